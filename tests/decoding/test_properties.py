"""Random programs against a replay of each alone; and who sees whom by IPPD's equations and sliding
windows.
"""

import copy
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from raypd.decoding.attention.step import Span
from raypd.decoding.counts import Finished
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, header, intra_prompt
from raypd.decoding.program import Feed
from raypd.decoding.scheduler import Chunk
from raypd.decoding.sequence import LEAST_REGION, ProgramError
from raypd.decoding.visibility import (
    NO_TOKEN,
    Reach,
    grown,
    in_window,
    one_segment,
    segment_sets,
    visible,
)
from tests.decoding import drivers, reference
from tests.decoding.cases import EverySeventh, agree, pair, seventh, tree_of
from tests.decoding.drivers import finished, never, tokens_of
from tests.decoding.reference import Replay
from tests.tiny import tiny_model

INSTRUCTION = [7, 91, 33, 250, 18, 77, 120, 5, 66]
MODEL = tiny_model("llama").double()  # float64: a wrong mask cannot hide in rounding
STOCK = copy.deepcopy(MODEL)
STOCK.set_attn_implementation("eager")
WINDOW = 24
KINDS = ["gemma2", "gemma3_text", "mistral"]


def wandering(seed: int, edits: bool):
    """A program that opens segments, joins them, feeds what was predicted or something else, drops
    and moves tokens.
    """
    rng = random.Random(seed)
    first = INSTRUCTION + tokens_of(rng, 1, 9)
    ask = sorted(rng.sample(range(9, len(first)), rng.randint(1, len(first) - 9)))
    predictions = yield Feed(first, range(len(first)), sample_at=ask, shared=rng.choice([0, 5, 9]))
    heard = [(predictions.tokens, predictions.logprobs)]
    total, at, segments, closed = len(first), len(first), 1, set()
    alive = list(range(9, total))  # tokens that are not shared and were not dropped
    for _ in range(rng.randint(1, 5)):
        reach = {}
        if rng.random() < 0.6:
            reach[segments, 0] = reach[segments, segments] = Reach.CAUSAL
            for other in range(1, segments):  # a segment that is seen whole gets no more tokens
                reach[segments, other] = (
                    rng.choice([Reach.HIDDEN, Reach.ALL]) if other in closed else Reach.HIDDEN
                )
                if rng.random() < 0.4:
                    closed.add(other)
            segments += 1
        count = rng.randint(1, 5)
        where = sorted(rng.sample(range(at, at + 12), count))
        tokens = [rng.choice([*predictions.tokens, rng.randrange(3, 256)]) for _ in range(count)]
        ours = [rng.choice([s for s in range(segments) if s not in closed]) for _ in range(count)]
        drop = rng.sample(alive, min(len(alive), rng.randint(0, 2))) if edits else []
        alive = [i for i in alive if i not in drop]
        moved = rng.sample(alive, min(len(alive), rng.randint(0, 2))) if edits else []
        ask = sorted(rng.sample(range(count), rng.randint(1, count)))
        move = {i: rng.randrange(segments) for i in moved}
        predictions = yield Feed(tokens, where, ours, reach, ask, drop=drop, move=move)
        heard.append((predictions.tokens, predictions.logprobs))
        alive += range(total, total + count)
        total, at = total + count, at + rng.randint(0, 4)
    return heard


def check(
    seeds: Iterable[int], engine: Engine, edits: bool, stock: PreTrainedModel = STOCK
) -> None:
    answers = engine.run(wandering(seed, edits) for seed in seeds)
    for seed, answer in zip(seeds, answers, strict=True):
        alike(answer, Replay(stock).run(wandering(seed, edits)))


def alike(answer: list[Any], expected: list[Any]) -> None:
    for (tokens, logprobs), (want, want_logprobs) in zip(answer, expected, strict=True):
        assert tokens == want
        np.testing.assert_allclose(logprobs, want_logprobs, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
    st.integers(1, 6),
    st.sampled_from([16, 23, 400]),
)
def test_no_row_sees_another(seeds, batch, budget):
    check(seeds, Engine(MODEL, max_num_seqs=batch, max_num_batched_tokens=budget), edits=True)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=3, max_size=6), st.integers(193, 260))
def test_a_row_that_lost_its_cache_sees_the_same(seeds, slots):
    check(
        seeds,
        Engine(MODEL, max_num_seqs=6, max_num_batched_tokens=16, cache_tokens=slots),
        edits=False,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": []}, "no token"),
        ({"positions": [0, 1]}, "2 positions"),
        ({"sample_at": [3]}, "not in it"),
        ({"segments": [0, 1, 1]}, "reach themselves"),
        ({"drop": [0]}, "not fed yet"),
        ({"allowed_token_ids": [None, None]}, "allows 2"),
        ({"positions": [1, 2, 3], "shared": 2}, "shared tokens"),
    ],
)
def test_an_impossible_feed_ends_its_program_alone(changes, words):
    engine = Engine(MODEL, max_num_seqs=4)
    engine.submit(wandering(1, False), tag="good")
    feeds = [Feed(**{"tokens": [5, 6, 7], "positions": [0, 1, 2], "sample_at": [2], **changes})]
    engine.submit((feed for feed in feeds), tag="bad")
    done = finished(engine)
    assert (done["good"].error, type(done["bad"].error)) == (None, ProgramError)
    assert words in str(done["bad"].error)


def test_a_row_that_never_fits_is_refused_and_the_rest_goes_on():
    engine = Engine(MODEL, max_num_seqs=4, max_num_batched_tokens=64, cache_tokens=256)
    engine.submit((feed for feed in [Feed([5] * 400, range(400), sample_at=[399])]), tag="long")
    for seed in range(4):
        engine.submit(wandering(seed, False), tag=seed)
    done = finished(engine)
    assert "cache_tokens" in str(done["long"].error)
    assert all(done[seed].error is None for seed in range(4))


def test_sequences_are_the_programs_alone_and_the_cache_is_empty_when_all_is_done():
    engine = Engine(MODEL, max_num_seqs=3, max_num_batched_tokens=16)
    engine.run(wandering(seed, True) for seed in range(6))
    kept = sum(prefix.length for prefix in engine.scheduler.prefixes.values())
    assert engine.cache.allocator.available == engine.cache.allocator.slots - kept
    assert not engine.scheduler.sequences
    assert torch.isfinite(engine.cache.keys[0]).all()
    # What a meter adds up holds no token twice while a shared prefix is computed.
    engine, ended = Engine(MODEL, max_num_seqs=2, max_num_batched_tokens=4), []
    for _ in range(2):
        engine.submit(autoregressive(Prompt([*INSTRUCTION, 5], shared=9), 3, never), tag="ours")
    while engine.pending:
        ended += engine.step()
        assert all(seq.tag == "ours" for seq in engine.sequences)
    assert sum(done.counts.prefill_tokens for done in ended) == 9 + 2
    assert (
        [done.counts.decode_tokens for done in ended]
        == [len(done.answer.tokens) for done in ended]
        == [3, 3]
    )


@pytest.mark.parametrize("most", [256, 24])
def test_no_pass_is_small_while_work_is_waiting(most: int) -> None:
    engine, passes = Engine(MODEL, max_num_seqs=most, max_num_batched_tokens=48), []
    schedule = engine.scheduler.schedule

    def noted() -> tuple[list[Chunk], list[Finished]]:
        chunks, finished = schedule()
        if engine.scheduler.waiting:
            passes.append((sum(len(chunk.tokens) for chunk in chunks), len(engine.sequences)))
        return chunks, finished

    engine.scheduler.schedule = noted
    answers = engine.run(
        autoregressive(Prompt(list(range(5, 12 + n % 9))), 20, never) for n in range(200)
    )
    assert [len(answer.tokens) for answer in answers] == [20] * 200
    if most == 256:
        assert {tokens for tokens, _ in passes} == {48}
        # The last one admitted has a part of its prompt fed.
        assert max(running for _, running in passes) <= 48 + 1
    else:
        assert max(running for _, running in passes) == 24


def shrinking(rng: random.Random):
    """Early release (APAR, section 3.4): fills the cache, drops it in pieces, and asks what is seen
    of the rest.
    """
    tokens, heard = tokens_of(rng, 260, 300), []
    predictions = yield Feed(tokens, range(len(tokens)), sample_at=[len(tokens) - 1])
    alive, total, at = list(range(len(tokens))), len(tokens), len(tokens)
    while len(alive) > 20:
        heard.append((predictions.tokens, predictions.logprobs))
        drop = rng.sample(alive, rng.randint(len(alive) // 8, len(alive) // 3))
        alive = [index for index in alive if index not in drop]
        count = rng.randint(1, 6)
        predictions = yield Feed(
            tokens_of(rng, count, count), range(at, at + count), sample_at=range(count), drop=drop
        )
        alive += range(total, total + count)
        total, at = total + count, at + count
    return heard


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_close_up_see_the_same_and_hold_no_more_than_they_need(seed):
    engine = Engine(MODEL, max_num_seqs=3, max_num_batched_tokens=120)
    for n in range(3):
        engine.submit(shrinking(random.Random(10 * seed + n)), tag=n)
    answers, sizes = {}, []
    while engine.pending:
        answers |= {done.tag: done.answer for done in engine.step()}
        taken = engine.cache.allocator.slots - engine.cache.allocator.available
        assert taken == sum(len(row.owner) for row in engine.scheduler.sequences)
        for row in engine.scheduler.sequences:
            live = np.flatnonzero(row.owner != NO_TOKEN)
            np.testing.assert_array_equal(row.place[row.owner[live]], live)
            waiting = row.size - row.cached
            sizes += [len(row.owner)] if len(row.owner) else []
            assert len(row.owner) <= (
                512 if row.steps < 2 else LEAST_REGION + 4 * (len(live) + waiting)
            )
    assert (min(sizes), max(sizes)) == (LEAST_REGION, 512)
    assert engine.cache.allocator.available == engine.cache.allocator.slots
    for n, answer in answers.items():
        alike(answer, Replay(STOCK).run(shrinking(random.Random(10 * seed + n))))


def test_only_text_that_is_read_in_order_is_causal() -> None:
    in_order, asks = [0, 0, 0, 0, 0, 1, 1, 1], [([0] * 8, 5, True), ([0] * 8, 2, False)]
    refilled = [0, 0, 2, 0, 0, 1, 1, 1]  # a slot that was free was filled later
    for steps, asked, causal in (*asks, (in_order, 5, True), (refilled, 5, False)):
        keys = np.array([range(8), [0] * 8, steps])
        assert Span(0, 3, 0, 8, one_segment(), keys[:, asked : asked + 3], keys, 0).causal == causal


def test_what_a_kernel_reads_is_the_rule() -> None:
    """Sets of segments for random tokens against `visible`, and windows against their rule written
    out.
    """
    rng = np.random.default_rng(7)
    for segments in (1, 3, 31, 32, 80):
        reach = rng.integers(0, 3, (segments, segments)).astype(np.int8)
        key_segments, key_positions = rng.integers(-1, segments, 60), rng.integers(0, 40, 60)
        query_segments, query_positions = rng.integers(0, segments, 20), rng.integers(0, 40, 20)
        seen = visible(reach, query_segments, query_positions, key_segments, key_positions)
        sets, labels = segment_sets(reach, query_segments, key_segments)
        whole, causal = (
            (sets[:, kind][:, labels // 32] >> (labels % 32)) & 1 == 1 for kind in (0, 1)
        )
        np.testing.assert_array_equal(
            whole | (causal & (key_positions <= query_positions[:, None])), seen
        )
        for window in (1, 2, 7, 60, 61):
            # [keys, keys], of those that the query has before it.
            later = key_positions > key_positions[:, None]
            before = seen & (key_positions <= query_positions[:, None])
            kept = in_window(seen, query_positions, key_positions, window)
            np.testing.assert_array_equal(kept, before.astype(int) @ later.T < window)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_mask_is_that_of_equations_6_to_9(seed, contexts):
    prompt = tree_of(random.Random(seed), contexts, drivers.INSTRUCTION[: seed % 5])
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
        Engine(model).run(
            [intra_prompt(PromptTree([1], [Context([3], [Question([], seventh)])]), 5)]
        )


@torch.no_grad()
def alone(stock: PreTrainedModel, prompt: list[int], count: int) -> list[tuple[int, float, float]]:
    """The model's own greedy answer behind a prompt, under the masks and windows that transformers
    makes itself.
    """
    answer: list[tuple[int, float, float]] = []
    while len(answer) < count and not (answer and answer[-1][0] % 7 == 0):
        logits = stock(
            torch.tensor([[*prompt, *(t for t, _, _ in answer)]]), use_cache=False
        ).logits[0, -1]
        answer.append(reference.greedy(logits, None))
    return answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [0, len(drivers.INSTRUCTION)])
def test_sixteen_gaps_of_thirty_take_nothing_of_the_window(kind, shared):
    """Sixteen values at once against each alone, in a prompt that ends at its attribute and has no
    gaps.
    """
    # Of a gap only the window is felt.
    flat = {"rope_type": "linear", "factor": 1e15, "rope_theta": 10_000.0}
    rope = {"full_attention": flat, "sliding_attention": flat} if kind == "gemma3_text" else flat
    model, stock = pair(kind, sliding_window=WINDOW, rope_parameters=rope, num_hidden_layers=4)
    rng = random.Random(4)
    tokens, slots = drivers.INSTRUCTION + tokens_of(rng, 12, 12), []
    for _ in range(16):
        tokens += tokens_of(rng, 1, 2)
        slots.append(Slot(len(tokens) - 1, EverySeventh()))
    seen = len(tokens) - WINDOW
    assert len(drivers.INSTRUCTION) < seen < slots[-1].end < 30 * len(slots), (
        "the window cuts, a gap is more"
    )
    prompt = SlottedPrompt(tokens, slots, shared=shared)
    programs = (hyper_parallel(prompt, 30, isolate_values=True) for _ in range(2))
    for values in Engine(model, max_num_batched_tokens=31).run(programs):
        for slot, value in zip(slots, values, strict=True):
            agree(alone(stock, tokens[: slot.end + 1], 30), value.tokens, value.logprobs)


@pytest.mark.parametrize("window", [1, 3, 6, 11])
def test_random_programs_under_a_window_equal_the_rule_written_out(window):
    model, stock = (one.double() for one in pair("mistral", sliding_window=window))
    check(
        range(18), Engine(model, max_num_seqs=2, max_num_batched_tokens=16), edits=True, stock=stock
    )
