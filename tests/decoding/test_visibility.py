"""Who sees whom, as a pass and a kernel are told, as the paper's equations of IPPD have it, and under sliding windows,
however many position gaps lie before a value. test_exactness.py has what comes of it."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from raypd.decoding.attention.step import Span
from raypd.decoding.engine import Engine
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, header, intra_prompt
from raypd.decoding.visibility import grown, in_window, one_segment, segment_sets, visible
from tests.decoding import reference
from tests.decoding.cases import EverySeventh, agree, pair, seventh, tree_of
from tests.decoding.drivers import INSTRUCTION, tokens_of
from tests.decoding.test_properties import check


def test_only_text_that_is_read_in_order_is_causal() -> None:
    in_order, asks = [0, 0, 0, 0, 0, 1, 1, 1], [([0] * 8, 5, True), ([0] * 8, 2, False)]
    refilled = [0, 0, 2, 0, 0, 1, 1, 1]  # a slot that was free was filled later
    for steps, asked, causal in (*asks, (in_order, 5, True), (refilled, 5, False)):
        keys = np.array([range(8), [0] * 8, steps])
        assert Span(0, 3, 0, 8, one_segment(), keys[:, asked : asked + 3], keys, 0).causal == causal


def test_what_a_kernel_reads_is_the_rule() -> None:
    """Sets of segments for random tokens against `visible`, and windows against their rule written out."""
    rng = np.random.default_rng(7)
    for segments in (1, 3, 31, 32, 80):
        reach = rng.integers(0, 3, (segments, segments)).astype(np.int8)
        key_segments, key_positions = rng.integers(-1, segments, 60), rng.integers(0, 40, 60)
        query_segments, query_positions = rng.integers(0, segments, 20), rng.integers(0, 40, 20)
        seen = visible(reach, query_segments, query_positions, key_segments, key_positions)

        sets, labels = segment_sets(reach, query_segments, key_segments)
        whole, causal = ((sets[:, kind][:, labels // 32] >> (labels % 32)) & 1 == 1 for kind in (0, 1))
        np.testing.assert_array_equal(whole | (causal & (key_positions <= query_positions[:, None])), seen)
        for window in (1, 2, 7, 60, 61):
            later = key_positions > key_positions[:, None]  # [keys, keys], of those that the query has before it
            before = seen & (key_positions <= query_positions[:, None])
            kept = in_window(seen, query_positions, key_positions, window)
            np.testing.assert_array_equal(kept, before.astype(int) @ later.T < window)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_mask_is_that_of_equations_6_to_9(seed, contexts):
    prompt = tree_of(random.Random(seed), contexts, INSTRUCTION[: seed % 5])
    head = header(prompt)
    context_of, question_of = [0] * len(prompt.instruction), [0] * len(prompt.instruction)
    for j, context in enumerate((c for c in prompt.contexts if c.questions), 1):
        context_of += [j] * len(context.tokens)
        question_of += [0] * len(context.tokens)
        for k, q in enumerate(context.questions, 1):
            context_of += [j] * len(q.tokens)
            question_of += [k] * len(q.tokens)
    position, context, asked = np.array(head.positions), np.array(context_of), np.array(question_of)
    causal = position[:, None] >= position[None, :]
    same_context = (context[:, None] == context[None, :]) | (context[None, :] == 0)
    same_question = (asked[:, None] == asked[None, :]) | (asked[None, :] == 0)
    segments = np.array(head.segments)
    seen = visible(grown(one_segment(), head.reach), segments, position, segments, position)
    assert (seen == (causal & same_context & same_question)).all()


def test_nothing_to_answer_and_nothing_to_ask():
    model, _ = pair("llama")
    assert Engine(model).run([intra_prompt(PromptTree([1, 2], [Context([3], [])]), 5)]) == [[]]
    with pytest.raises(ValueError, match="no token"):
        Engine(model).run([intra_prompt(PromptTree([1], [Context([3], [Question([], seventh)])]), 5)])


WINDOW = 24
KINDS = ["gemma2", "gemma3_text", "mistral"]


@torch.no_grad()
def alone(stock: PreTrainedModel, prompt: list[int], count: int) -> list[tuple[int, float, float]]:
    """The model's own greedy answer behind a prompt, under the masks and windows that transformers makes itself."""
    answer: list[tuple[int, float, float]] = []
    while len(answer) < count and not (answer and answer[-1][0] % 7 == 0):
        logits = stock(torch.tensor([[*prompt, *(t for t, _, _ in answer)]]), use_cache=False).logits[0, -1]
        answer.append(reference.greedy(logits, None))
    return answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [0, len(INSTRUCTION)])
def test_sixteen_gaps_of_thirty_take_nothing_of_the_window(kind, shared):
    """Sixteen values at once against each alone, in a prompt that ends at its attribute and has no gaps."""
    flat = {"rope_type": "linear", "factor": 1e15, "rope_theta": 10_000.0}  # of a gap only the window is felt
    rope = {"full_attention": flat, "sliding_attention": flat} if kind == "gemma3_text" else flat
    model, stock = pair(kind, sliding_window=WINDOW, rope_parameters=rope, num_hidden_layers=4)
    rng = random.Random(4)
    tokens, slots = INSTRUCTION + tokens_of(rng, 12, 12), []
    for _ in range(16):
        tokens += tokens_of(rng, 1, 2)
        slots.append(Slot(len(tokens) - 1, EverySeventh()))
    assert len(INSTRUCTION) < len(tokens) - WINDOW < slots[-1].end < 30 * len(slots), "the window cuts, a gap is more"
    prompt = SlottedPrompt(tokens, slots, shared=shared)
    programs = (hyper_parallel(prompt, 30, isolate_values=True) for _ in range(2))
    for values in Engine(model, max_num_batched_tokens=31).run(programs):
        for slot, value in zip(slots, values, strict=True):
            agree(alone(stock, tokens[: slot.end + 1], 30), value.tokens, value.logprobs)


@pytest.mark.parametrize("window", [1, 3, 6, 11])
def test_random_programs_under_a_window_equal_the_rule_written_out(window):
    model, stock = (one.double() for one in pair("mistral", sliding_window=window))
    check(range(18), Engine(model, max_num_seqs=2, max_num_batched_tokens=16), edits=True, stock=stock)
