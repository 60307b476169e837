"""Packing, caching and chunking never let a token see another than the rule says: random programs against a replay of
each alone through the stock model, under masks written out token by token."""

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

from raypd.decoding.counts import Finished
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.program import Feed
from raypd.decoding.scheduler import Chunk
from raypd.decoding.sequence import LEAST_REGION, ProgramError
from raypd.decoding.visibility import NO_TOKEN, Reach
from tests.decoding.drivers import finished, never, tokens_of
from tests.decoding.reference import Replay
from tests.tiny import tiny_model

INSTRUCTION = [7, 91, 33, 250, 18, 77, 120, 5, 66]
MODEL = tiny_model("llama").double()  # float64: a wrong mask cannot hide in rounding
STOCK = copy.deepcopy(MODEL)
STOCK.set_attn_implementation("eager")


def wandering(seed: int, edits: bool):
    """A program that opens segments, joins them, feeds what was predicted or something else, drops and moves tokens."""
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
                reach[segments, other] = rng.choice([Reach.HIDDEN, Reach.ALL]) if other in closed else Reach.HIDDEN
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


def check(seeds: Iterable[int], engine: Engine, edits: bool, stock: PreTrainedModel = STOCK) -> None:
    answers = engine.run(wandering(seed, edits) for seed in seeds)
    for seed, answer in zip(seeds, answers, strict=True):
        alike(answer, Replay(stock).run(wandering(seed, edits)))


def alike(answer: list[Any], expected: list[Any]) -> None:
    for (tokens, logprobs), (want, want_logprobs) in zip(answer, expected, strict=True):
        assert tokens == want
        np.testing.assert_allclose(logprobs, want_logprobs, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(1, 6), st.sampled_from([16, 23, 400]))
def test_no_row_sees_another(seeds, batch, budget):
    check(seeds, Engine(MODEL, max_num_seqs=batch, max_num_batched_tokens=budget), edits=True)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=3, max_size=6), st.integers(193, 260))
def test_a_row_that_lost_its_cache_sees_the_same(seeds, slots):
    check(seeds, Engine(MODEL, max_num_seqs=6, max_num_batched_tokens=16, cache_tokens=slots), edits=False)


@pytest.mark.parametrize(("changes", "words"), [
    ({"tokens": []}, "no token"), ({"positions": [0, 1]}, "2 positions"), ({"sample_at": [3]}, "not in it"),
    ({"segments": [0, 1, 1]}, "reach themselves"), ({"drop": [0]}, "not fed yet"),
    ({"allowed_token_ids": [None, None]}, "allows 2"),
    ({"positions": [1, 2, 3], "shared": 2}, "shared tokens")])  # fmt: skip
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
    assert [done.counts.decode_tokens for done in ended] == [len(done.answer.tokens) for done in ended] == [3, 3]


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
    answers = engine.run(autoregressive(Prompt(list(range(5, 12 + n % 9))), 20, never) for n in range(200))
    assert [len(answer.tokens) for answer in answers] == [20] * 200
    if most == 256:
        assert {tokens for tokens, _ in passes} == {48}
        assert max(running for _, running in passes) <= 48 + 1  # the last one admitted has a part of its prompt fed
    else:
        assert max(running for _, running in passes) == 24


def shrinking(rng: random.Random):
    """Early release (APAR, section 3.4): fills the cache, drops it in pieces, and asks what is seen of the rest."""
    tokens, heard = tokens_of(rng, 260, 300), []
    predictions = yield Feed(tokens, range(len(tokens)), sample_at=[len(tokens) - 1])
    alive, total, at = list(range(len(tokens))), len(tokens), len(tokens)
    while len(alive) > 20:
        heard.append((predictions.tokens, predictions.logprobs))
        drop = rng.sample(alive, rng.randint(len(alive) // 8, len(alive) // 3))
        alive = [index for index in alive if index not in drop]
        count = rng.randint(1, 6)
        predictions = yield Feed(tokens_of(rng, count, count), range(at, at + count), sample_at=range(count), drop=drop)
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
            assert len(row.owner) <= (512 if row.steps < 2 else LEAST_REGION + 4 * (len(live) + waiting))
    assert (min(sizes), max(sizes)) == (LEAST_REGION, 512)
    assert engine.cache.allocator.available == engine.cache.allocator.slots
    for n, answer in answers.items():
        alike(answer, Replay(STOCK).run(shrinking(random.Random(10 * seed + n))))
