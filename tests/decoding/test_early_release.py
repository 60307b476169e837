"""Early release (APAR, section 3.4): what is dropped goes back to the cache's allocator. What a finished thread leaves
is dropped: test_apar.py."""

import random

import numpy as np
import pytest

from raypd.decoding.engine import Engine
from raypd.decoding.program import Feed
from raypd.decoding.sequence import LEAST_REGION
from raypd.decoding.visibility import NO_TOKEN
from tests.decoding import reference
from tests.decoding.cases import pair
from tests.decoding.drivers import tokens_of


def shrinking(rng: random.Random):
    """A program that fills the cache, drops most of it in pieces, and asks what is seen of the rest after each."""
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
    model, stock = pair("llama")
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=120)
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
        expected = reference.Replay(stock).run(shrinking(random.Random(10 * seed + n)))
        for (tokens, logprobs), (want, want_logprobs) in zip(answer, expected, strict=True):
            assert tokens == want
            np.testing.assert_allclose(logprobs, want_logprobs, atol=1e-3)
