"""Early release (APAR, section 3.4): what a finished thread leaves goes back to the cache's allocator, and is attended
to no more. `pytest -s` prints the figures of docs/methods.md."""

import random

import numpy as np
import pytest

from raypd.decoding import engine as engines
from raypd.decoding.engine import Engine
from raypd.decoding.methods.apar import apar
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.program import Feed
from raypd.decoding.sequence import LEAST_REGION, Sequence
from raypd.decoding.visibility import NO_TOKEN
from tests.decoding import reference
from tests.decoding.cases import CHILD, ENDS, EOS, FORK, pair
from tests.decoding.drivers import INSTRUCTION, steered, tokens_of


def decode(model, programs, monkeypatch) -> tuple[list, tuple[int, int]]:
    """The programs' answers, four at a time; the most of the cache that was ever taken, and the keys that queries were
    multiplied with."""
    slots, attended, real = [], [], engines.Step

    def step(cache, groups, *rest):
        slots.append(cache.allocator.slots - cache.allocator.available)
        attended.extend((span.b - span.a) * (group.length + span.length) for group in groups for span in group.spans)
        return real(cache, groups, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "Step", step)
        answers = Engine(model, max_num_seqs=4).run(programs)
    return answers, (max(slots), sum(attended))


def list_of(points: int, start: int):
    """A model that writes a list behind `start` tokens: headings of four tokens, each forking a detail of 10 to 89."""

    def rule(token: int, position: int, predicted: int) -> int:
        if token == CHILD:
            return 100 + 37 * position % 80
        if token >= 100:
            return EOS if token == 189 else token + 1
        if token == FORK:
            return EOS if position == start + 5 * points - 1 else 50
        return {50: 51, 51: 52, 52: 53, 53: FORK}.get(token, 50)

    return rule


@pytest.mark.slow
def test_a_batch_of_lists_takes_less_than_its_flattened_texts(monkeypatch):
    """Twelve answers of 3 to 6 points, four at a time: peak of the cache and keys multiplied, the text forked with and
    without giving back, and flattened."""
    model, _ = pair("llama")
    rng = random.Random(1)
    prompts = [Prompt([*INSTRUCTION, *tokens_of(rng, 5, 60), 7]) for _ in range(12)]

    def forked():
        rules = [list_of(3 + n % 4, len(prompt.tokens)) for n, prompt in enumerate(prompts)]
        return [steered(apar(p, 4000, FORK, CHILD, ENDS), rule) for p, rule in zip(prompts, rules, strict=True)]

    answers, released = decode(model, forked(), monkeypatch)
    assert all(answer.cut is None and answer.threads == 4 + n % 4 for n, answer in enumerate(answers))
    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "_close_up", lambda self, coming, cache: None)
        again, kept = decode(model, forked(), monkeypatch)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]
    flat = (autoregressive(p, len(a.tokens), lambda t: False) for p, a in zip(prompts, answers, strict=True))
    _, flattened = decode(model, flat, monkeypatch)
    print(f"\n(slots, keys) forked, given back: {released}\nforked, kept: {kept}\nflattened: {flattened}")
    assert all(less < more for others in (kept, flattened) for less, more in zip(released, others, strict=True))


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
