"""IPPD against one prompt a question through the unmodified model, and its mask against the paper's equations."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Continuation, Prompt
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, header, intra_prompt
from raypd.decoding.program import Predictions
from raypd.decoding.visibility import grown, one_segment, visible
from tests.decoding import reference
from tests.decoding.drivers import INSTRUCTION, tokens_of
from tests.decoding.test_exactness import FAMILIES, agree, beside_others, pair
from tests.tiny import in_float64

MOST = 7
LETTERS = np.array([65, 66, 67, 68])


def seventh(tokens):
    return tokens[-1] % 7 == 0


def letters_first(tokens):
    """A rule that limits the first token alone."""
    return LETTERS if not tokens else None


def question(rng: random.Random, limited: bool = False) -> Question:
    if limited:
        return Question(tokens_of(rng, 1, 6), lambda tokens: True, letters_first)
    return Question(tokens_of(rng, 1, 6), seventh, letters_first if rng.random() < 0.3 else None)


def tree(rng: random.Random, contexts: int, instruction=INSTRUCTION) -> PromptTree:
    """A ragged tree: 0 to 5 questions a context, but some in the first."""
    counts = [rng.randint(2, 5), *(rng.randint(0, 5) for _ in range(contexts - 1))]
    made = [Context(tokens_of(rng, 1, 15), [question(rng) for _ in range(count)]) for count in counts]
    return PromptTree(instruction, made)


def alone(stock, prompt: PromptTree, most: int = MOST):
    """The answers of one prompt a question."""
    for context in prompt.contexts:
        for q in context.questions:
            allowed_token_ids = (
                None
                if q.allowed_token_ids is None
                else lambda t, q=q: None if (i := q.allowed_token_ids(t)) is None else i.tolist()
            )
            tokens = [*prompt.instruction, *context.tokens, *q.tokens]
            yield reference.autoregressive(stock, tokens, most, q.stops, allowed_token_ids)


def check(stock, prompt: PromptTree, answers: list[Continuation], most: int = MOST) -> None:
    for expected, answer in zip(alone(stock, prompt, most), answers, strict=True):
        agree(expected, answer.tokens, answer.logprobs)
        assert answer.stopped or len(answer.tokens) == most


# ------------------------------------------------------------------------------------------------------- equations


def test_header_is_that_of_equations_1_to_5():
    prompt = PromptTree([9, 9], [Context([1] * 3, [Question([2] * 2, seventh), Question([3], seventh)]),
                                 Context([4], []), Context([5], [Question([6] * 2, seventh)])])  # fmt: skip
    head = header(prompt)
    # the second context has no question, so nobody would read it
    assert head.tokens == [9, 9, 1, 1, 1, 2, 2, 3, 5, 6, 6]
    assert head.positions == [0, 1, 2, 3, 4, 5, 6, 5, 2, 3, 4]
    assert head.segments == [0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 5]
    assert (head.ends, head.owns) == ([6, 7, 10], [2, 3, 5])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_mask_is_that_of_equations_6_to_9(seed, contexts):
    prompt = tree(random.Random(seed), contexts, INSTRUCTION[: seed % 5])
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


def test_steps_positions_and_segments():
    """Driven by hand: answers stand behind their question, and finished ones stop feeding."""
    rule = {"stops": lambda tokens: tokens[-1] == 0}
    prompt = PromptTree([1], [Context([2, 2], [Question([3], **rule), Question([4, 4], **rule)])])
    program = intra_prompt(prompt, 3)
    feed = next(program)
    assert (list(feed.sample_at), feed.shared, feed.allowed_token_ids) == ([3, 5], 1, None)
    feed = program.send(Predictions([7, 8], [-1.0, -2.0]))
    assert (feed.tokens, feed.positions, feed.segments) == ([7, 8], [4, 5], [2, 3])
    feed = program.send(Predictions([0, 8], [-1.0, -2.0]))
    assert (feed.tokens, feed.positions, feed.segments) == ([8], [6], [3])
    with pytest.raises(StopIteration) as end:
        program.send(Predictions([9], [-3.0]))
    assert end.value.value == [
        Continuation([7, 0], [-1.0, -1.0], True),
        Continuation([8, 8, 9], [-2.0, -2.0, -3.0], False),
    ]


def test_one_token_answers_take_one_feed():
    rng = random.Random(1)
    program = intra_prompt(PromptTree([5], [Context([6], [question(rng, limited=True) for _ in range(3)])]), 9)
    feed = next(program)
    assert [ids.tolist() for ids in feed.allowed_token_ids] == [LETTERS.tolist()] * 3
    with pytest.raises(StopIteration):
        program.send(Predictions([65, 66, 65], [-1.0] * 3))


def test_nothing_to_answer_and_nothing_to_ask():
    model, _ = pair("llama")
    assert Engine(model).run([intra_prompt(PromptTree([1, 2], [Context([3], [])]), 5)]) == [[]]
    with pytest.raises(ValueError, match="no token"):
        Engine(model).run([intra_prompt(PromptTree([1], [Context([3], [Question([], seventh)])]), 5)])


# ------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("kind", FAMILIES)
def test_equals_one_prompt_a_question(kind):
    """Ragged trees of 1 to 4 contexts, batched with each other and with other methods, in chunks."""
    model, stock = pair(kind)
    rng = random.Random(4)
    trees = [tree(rng, 1 + n % 4) for n in range(4)]
    prompt = Prompt(INSTRUCTION + tokens_of(rng, 3, 9), shared=len(INSTRUCTION))
    engine = Engine(model, max_num_seqs=4, max_num_batched_tokens=40)
    found = beside_others(engine, stock, [intra_prompt(t, MOST) for t in trees], prompt, seventh)
    lengths = set()
    for prompt, answers in zip(trees, found, strict=True):
        check(stock, prompt, answers)
        lengths |= {len(answer.tokens) for answer in answers}
    assert len(lengths) > 2, "answers should end at different steps"


@pytest.mark.parametrize("budget", [16, 33, 4096])
@pytest.mark.parametrize("shared", [False, True])
def test_prefix_and_chunks_change_nothing(budget, shared):
    model, stock = pair("llama")
    rng = random.Random(budget)
    # nothing is shared without an instruction: the first context then begins at position 0
    trees = [tree(rng, 2, INSTRUCTION if shared else []) for _ in range(3)]
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=budget)
    for prompt, answers in zip(trees, engine.run(intra_prompt(t, MOST) for t in trees), strict=True):
        check(stock, prompt, answers)
    assert bool(engine.scheduler.prefixes) == shared


def test_small_cache_feeds_rows_again():
    model, stock = pair("qwen3")
    rng = random.Random(12)
    trees = [tree(rng, 2) for _ in range(5)]
    engine = Engine(model, max_num_seqs=5, max_num_batched_tokens=64, cache_tokens=320)
    for prompt, answers in zip(trees, engine.run(intra_prompt(t, MOST) for t in trees), strict=True):
        check(stock, prompt, answers)


def test_float64_is_exact():
    """Tokens and log-probabilities, in the engine and in a replay of the program through the stock model."""
    model, stock = pair("qwen3")
    model, stock = in_float64(model), in_float64(stock)
    trees = [tree(random.Random(seed), 3) for seed in (21, 22)]
    answers = Engine(model, max_num_seqs=2, max_num_batched_tokens=50).run(intra_prompt(t, MOST) for t in trees)
    for prompt, ours in zip(trees, answers, strict=True):
        replayed = reference.Replay(stock).run(intra_prompt(prompt, MOST))
        for expected, answer, again in zip(alone(stock, prompt), ours, replayed, strict=True):
            assert answer.tokens == again.tokens == [t for t, _, _ in expected]
            np.testing.assert_allclose(answer.logprobs, [p for _, p, _ in expected], atol=1e-9)
            np.testing.assert_allclose(again.logprobs, [p for _, p, _ in expected], atol=1e-9)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_no_question_sees_another(seed):
    """Whatever is done to the other questions and contexts, a question's answer and its probabilities stay."""
    rng = random.Random(seed)
    model, _ = pair("gemma2")
    prompt = tree(rng, 3)
    before = Engine(in_float64(model), max_num_batched_tokens=64).run([intra_prompt(prompt, MOST)])[0]
    kept, changed = prompt.contexts[0].questions[1], tree(rng, 2).contexts
    first = Context(prompt.contexts[0].tokens, [*changed[0].questions, kept])
    after = Engine(model, max_num_batched_tokens=64).run(
        [intra_prompt(PromptTree(INSTRUCTION, [*changed, first]), MOST)]
    )[0]
    assert after[-1].tokens == before[1].tokens
    np.testing.assert_allclose(after[-1].logprobs, before[1].logprobs, atol=1e-9)


def test_answers_do_not_depend_on_stack_order_or_batch():
    """The same questions in one prompt, in a prompt a context, or in a prompt a question."""
    rng = random.Random(31)
    whole = tree(rng, 3)
    by_context = [PromptTree(INSTRUCTION, [context]) for context in whole.contexts]
    by_question = [PromptTree(INSTRUCTION, [Context(c.tokens, [q])]) for c in whole.contexts for q in c.questions]
    found = []
    for trees, batch in [([whole], 1), (by_context, 2), (by_question, 5), (by_question, 1)]:
        model, _ = pair("phi3")
        engine = Engine(model, max_num_seqs=batch, max_num_batched_tokens=128)
        found.append([a.tokens for answers in engine.run(intra_prompt(t, MOST) for t in trees) for a in answers])
    assert len(found[0]) > 3
    assert all(other == found[0] for other in found[1:])
