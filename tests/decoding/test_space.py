"""SPACE is lossless: greedy text equals autoregressive text, sampled text has its distribution, for any model."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.space import segments_seen, space
from raypd.decoding.program import Predictions
from raypd.decoding.sampling import Sampling, probabilities
from raypd.decoding.visibility import NO_TOKEN, grown, one_segment, visible
from tests.decoding import reference
from tests.decoding.drivers import changed, drive, never, prompts_of, rarely
from tests.decoding.test_exactness import FEW_FAMILIES, agree, beside_others, pair
from tests.tiny import in_float64, tiny_model

MASK = 3


def guided(program, prompt, text, k, right, seed=0):
    """Replaces drafts by `text`, what will be decoded, each with the probability `right`: a model that drafts well."""
    rng = random.Random(seed)

    def draft(feed, predictions) -> None:
        for number, index in enumerate(feed.sample_at):
            ahead = feed.positions[index] + 1 - len(prompt.tokens)
            if feed.segments[index] > k and ahead < len(text) and rng.random() < right:
                predictions.tokens[number] = text[ahead]

    return changed(program, draft)


def answers_beside_others(model, stock, programs, expected, prompt, stops):
    """Answers of programs that must say `expected`, run beside those of other methods."""
    engine = Engine(model, max_num_seqs=4, max_num_batched_tokens=20)
    ours = beside_others(engine, stock, programs, prompt, stops[1])
    for answer, want, stop in zip(ours, expected, stops, strict=True):
        agree(want, answer.tokens, answer.logprobs)
        assert answer.stopped == stop(answer.tokens)
    return ours


@pytest.mark.parametrize("kind", FEW_FAMILIES)
def test_greedy_equals_autoregressive_beside_other_programs(kind):
    model, stock = pair(kind)
    prompts = prompts_of(2)
    stops = [rarely, rarely, never, never]
    expected = [reference.autoregressive(stock, p.tokens, 14, s) for p, s in zip(prompts, stops, strict=True)]
    programs = [
        guided(space(p, 14, k, MASK, stops=s), p, [t for t, _, _ in e], k, 0.7, i)
        for i, (p, e, k, s) in enumerate(zip(prompts, expected, [1, 2, 3, 5], stops, strict=True))
    ]
    ours = answers_beside_others(model, stock, programs, expected, prompts[1], stops)
    assert sum(a.accepted for a in ours) > 5
    assert sum(a.rejected for a in ours) > 0
    assert max(a.average_accepted_tokens for a in ours) > 1.3


@pytest.mark.parametrize("kind", ["llama", "mistral", "olmo2"])
def test_float64_tokens_are_those_of_the_reference_and_of_replay(kind):
    model, stock = pair(kind)
    model, stock = in_float64(model), in_float64(stock)
    prompts = prompts_of(5, 3)
    expected = [reference.autoregressive(stock, p.tokens, 12, never) for p in prompts]

    def programs():
        return [
            guided(space(p, 12, 3, MASK), p, [t for t, _, _ in e], 3, 0.8, i)
            for i, (p, e) in enumerate(zip(prompts, expected, strict=True))
        ]

    for answer, program, want in zip(
        Engine(model, max_num_batched_tokens=24).run(programs()), programs(), expected, strict=True
    ):
        assert answer.tokens == [t for t, _, _ in want]
        np.testing.assert_allclose(answer.logprobs, [p for _, p, _ in want], atol=1e-9)
        replayed = reference.Replay(stock).run(program)
        assert replayed.tokens == answer.tokens
        assert (replayed.steps, replayed.accepted, replayed.rejected) == (
            answer.steps,
            answer.accepted,
            answer.rejected,
        )


@pytest.mark.parametrize("budget", [16, 4096])
def test_an_untrained_model_drafts_badly_and_stays_exact(budget):
    """No guide: the drafts are what a random model says at mask tokens; the mask token is one that it also says."""
    model, stock = pair("qwen3")
    prompts = prompts_of(7, 6)
    expected = [reference.autoregressive(stock, p.tokens, 10, rarely) for p in prompts]
    said = max(expected, key=len)[2][0]
    answers = Engine(model, max_num_seqs=6, max_num_batched_tokens=budget).run(
        space(p, 10, 4, said, stops=rarely) for p in prompts
    )
    for answer, want in zip(answers, expected, strict=True):
        agree(want, answer.tokens, answer.logprobs)
    assert any(said in answer.tokens for answer in answers)


def test_drafts_of_the_model_itself_equal_those_of_replay():
    """The masks' own outputs, not only what is verified: the same candidates pass in the engine and in Replay."""
    model = tiny_model("llama", vocab_size=8)
    stock = tiny_model("llama", vocab_size=8)
    stock.set_attn_implementation("eager")
    prompts = [Prompt([1, 5, i, 4, 2]) for i in range(8)]
    answers = Engine(model, max_num_seqs=3, max_num_batched_tokens=30).run(space(p, 30, 3, MASK) for p in prompts)
    replayed = [reference.Replay(stock).run(space(p, 30, 3, MASK)) for p in prompts]
    assert [a.tokens for a in answers] == [a.tokens for a in replayed]
    assert [(a.steps, a.accepted) for a in answers] == [(a.steps, a.accepted) for a in replayed]
    assert sum(a.accepted for a in answers) > 3


def test_most_tokens_and_stops_cut_inside_an_accepted_run():
    model, stock = pair("llama")
    prompt = prompts_of(8)[0]
    full = [t for t, _, _ in reference.autoregressive(stock, prompt.tokens, 12, never)]
    engine = Engine(model)
    for most in range(1, 12):
        answer = engine.run([guided(space(prompt, most, 4, MASK), prompt, full, 4, 1.0)])[0]
        assert (answer.tokens, answer.stopped) == (full[:most], False)
        # the prompt's pass says one token, every later one up to k + 1
        assert answer.steps == 1 + -(-(most - 1) // 5)
        assert answer.average_accepted_tokens == most / answer.steps
    for place, token in enumerate(full):
        program = space(prompt, 12, 4, MASK, stops=lambda tokens, token=token: tokens[-1] == token)
        answer = engine.run([guided(program, prompt, full, 4, 1.0)])[0]
        assert (answer.tokens, answer.stopped) == (full[: full.index(token) + 1], True), place
        # of each pass after the prompt's the first four are candidates; the last pass of 12 tokens has none
        candidates = [n for n in range(1, full.index(token) + 1) if n % 5 and n < 11]
        assert (answer.accepted, answer.rejected) == (len(candidates), 0)


@pytest.mark.parametrize(
    ("said", "last", "accepted", "rejected"),
    [
        ([22, 23, 24], 22, 1, 0),
        ([22, 23, 24], 23, 2, 0),
        ([22, 23, 24], 24, 2, 0),
        ([22, 25, 0], 22, 1, 0),
        ([22, 25, 0], 25, 1, 1),
        ([26, 0, 0], 26, 0, 1),
    ],
)
def test_candidates_behind_the_end_of_the_text_do_not_count(said, last, accepted, rejected):
    """Candidates 22 and 23 behind 21; the model says `said` there, and the text ends with `last`."""
    program = space(Prompt([20]), 20, 2, MASK, stops=lambda tokens: tokens[-1] == last)
    next(program)
    program.send(Predictions([21, 22, 23], [0.0] * 3))
    with pytest.raises(StopIteration) as end:
        program.send(Predictions([*said, *[0] * 6], [0.0] * 9))
    assert end.value.value.tokens[-1] == last
    assert (end.value.value.accepted, end.value.value.rejected) == (accepted, rejected)


def test_k_0_feeds_what_autoregressive_feeds():
    def feeds(program):
        said = itertools.count(1)
        answer, seen = drive(program, lambda feed: [next(said)])
        told = [(list(f.tokens), list(f.positions), list(f.sample_at), f.shared, list(f.drop)) for f in seen]
        return told, answer.tokens

    prompt = Prompt([7, 8, 9], 2)
    assert feeds(space(prompt, 5, 0, MASK)) == feeds(autoregressive(prompt, 5, never))
    with pytest.raises(ValueError, match="k is -1"):
        next(space(prompt, 5, -1, MASK))


def test_a_pass_looks_like_figure_7():
    """Two candidates behind "LLMs are": who sees whom, and the positions as visible tokens minus one."""
    program = space(Prompt([20]), 20, 2, MASK)
    first = next(program)
    assert (list(first.tokens), list(first.positions)) == ([20, MASK, MASK], [0, 1, 2])
    second = program.send(Predictions([21, 22, 23], [0.0] * 3))  # "are", and the candidates "auto", "model"
    assert list(second.tokens) == [21, MASK, MASK, 22, MASK, MASK, 23, MASK, MASK]
    assert list(second.drop) == [1, 2]
    positions = np.array([0, *second.positions])
    segments = np.array([0, *second.segments])
    seen = visible(grown(one_segment(), segments_seen(2)), segments, positions, segments, positions)
    figure = [
        "1.........",
        "11........",
        "111.......",
        "1111......",
        "11..1.....",
        "11..11....",
        "11..111...",
        "11..1..1..",
        "11..1..11.",
        "11..1..111",
    ]
    assert ["".join(".1"[int(s)] for s in line) for line in seen] == figure
    assert (seen.sum(1) - 1 == positions).all()


def check_cached_text(engine, prompt, text, segments):
    """Decodes the program in the engine: all that stays of earlier feeds is text, without a gap, in segment 0."""
    said = []
    while engine.pending:
        said += engine.step()
        for row in engine.scheduler.sequences:
            here = row.owner[: row.high]
            kept = sorted(token for token in here[here != NO_TOKEN] if token < row.size - len(row.feed.tokens))
            assert row.table[1, kept].tolist() == list(range(len(kept)))
            assert row.table[0, kept].tolist() == [*prompt.tokens, *text][: len(kept)]
            assert not row.table[2, kept].any()
            assert len(row.reach) == segments
            assert len(row.owner) <= 128
    assert said[0].answer.tokens == text


def test_rejected_and_mask_tokens_leave_the_cache():
    model, stock = pair("llama")
    prompt = prompts_of(9)[0]
    text = [t for t, _, _ in reference.autoregressive(stock, prompt.tokens, 40, never)]
    engine = Engine(model)
    engine.submit(guided(space(prompt, 40, 3, MASK), prompt, text, 3, 0.6))
    check_cached_text(engine, prompt, text, 8)


def test_small_cache_feeds_rows_again():
    model, stock = pair("llama")
    prompts = prompts_of(10, 6)
    expected = [reference.autoregressive(stock, p.tokens, 16, never) for p in prompts]
    programs = [
        guided(space(p, 16, 2, MASK), p, [t for t, _, _ in e], 2, 0.7, i)
        for i, (p, e) in enumerate(zip(prompts, expected, strict=True))
    ]
    answers = Engine(model, max_num_seqs=6, max_num_batched_tokens=64, cache_tokens=320).run(programs)
    for answer, want in zip(answers, expected, strict=True):
        agree(want, answer.tokens, answer.logprobs)


# -------------------------------------------------------------------------------------------------------- sampling


def chance_of_texts(stock, prompt, length, sampling):
    """{text: probability} of every continuation of `length` tokens, one token at a time by the stock model."""
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in texts.items():
            n = len(prompt) + len(text)
            logits = reference.dense_logits(stock, [*prompt, *text], range(n), torch.ones(n, n).tril().bool())[-1]
            for token, p in enumerate(probabilities(logits, sampling).tolist()):
                if p > 0:
                    longer[*text, token] = chance * p
        texts = longer
    return texts


def chi_square(counts, chances, runs):
    """(statistic, degrees of freedom), cells that expect fewer than 5 put together."""
    assert set(counts) <= set(chances), "a text that one token at a time never says"
    cells = [(counts.get(text, 0), runs * chance) for text, chance in chances.items()]
    small = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if small:
        cells.append((sum(c for c, _ in small), sum(e for _, e in small)))
    return sum((c - e) ** 2 / e for c, e in cells if e > 0), len(cells) - 1


def check_distribution(answers, chances, least_freedom):
    """Within 4 standard deviations of what chi-square gives (Wilson and Hilferty's cube root is close to normal)."""
    statistic, freedom = chi_square(Counter(tuple(answer.tokens) for answer in answers), chances, len(answers))
    assert freedom > least_freedom
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < 4, (statistic, freedom)


@pytest.mark.parametrize("sampling", [Sampling(1.5, top_k=3), Sampling(2.0, top_p=0.65)], ids=["top_k", "top_p"])
def test_sampled_texts_have_the_distribution_of_autoregressive_ones(sampling):
    model = tiny_model("llama", seed=4, vocab_size=16)
    stock = tiny_model("llama", seed=4, vocab_size=16)
    stock.set_attn_implementation("eager")
    prompt, runs = Prompt([1, 9, 5]), 700
    chances = chance_of_texts(stock, prompt.tokens, 4, sampling)
    answers = Engine(model, max_num_seqs=175).run(space(prompt, 4, 2, MASK, sampling, seed) for seed in range(runs))
    assert sum(a.accepted for a in answers) > runs / 10
    assert sum(a.rejected for a in answers) > runs / 10
    check_distribution(answers, chances, 15)


def test_sampled_texts_of_a_made_up_model():
    """Many runs without an engine: next tokens depend on the last one, drafts are drawn from quite other chances."""
    rng = np.random.default_rng(1)
    follows, guesses = rng.normal(size=(4, 4)) * 1.5, rng.normal(size=(4, 2, 4)) * 1.5
    start, runs, sampling = 1, 2500, Sampling(1.0)
    following = torch.from_numpy(follows)
    guessing = torch.from_numpy(guesses)

    def says(feed) -> Predictions:
        logits, last = [], {}
        for index, (token, segment) in enumerate(zip(feed.tokens, feed.segments, strict=True)):
            last[index] = (token, 0) if segment <= 2 else (last[index - 1][0], last[index - 1][1] + 1)
        for index in feed.sample_at:
            token, ahead = last[index]
            logits.append(following[token] if ahead == 0 else guessing[token, ahead - 1])
        return Predictions([0] * len(logits), [0.0] * len(logits), logits)

    follow = probabilities(following, sampling).numpy()
    chances = {}
    for text in itertools.product(range(4), repeat=4):
        path = [start, *text]
        chances[text] = float(np.prod([follow[a, b] for a, b in itertools.pairwise(path)]))
    answers = [drive(space(Prompt([start]), 4, 2, MASK, sampling, seed), says)[0] for seed in range(runs)]
    assert sum(a.accepted for a in answers) > runs / 2
    assert sum(a.rejected for a in answers) > runs / 2
    check_distribution(answers, chances, 60)


def test_sampled_text_depends_on_the_seed_alone():
    warm = Sampling(1.0, top_k=40, top_p=0.95)
    model, _ = pair("llama")
    prompts = prompts_of(11, 5)
    alone = [Engine(model, max_num_seqs=1).run([space(p, 8, 2, MASK, warm, i)])[0] for i, p in enumerate(prompts)]
    together = Engine(model, max_num_seqs=5, max_num_batched_tokens=31).run(
        (space(p, 8, 2, MASK, warm, i) for i, p in enumerate(prompts)), sampling=warm, seed=77
    )
    assert [a.tokens for a in alone] == [a.tokens for a in together]
    np.testing.assert_allclose(alone[0].logprobs, together[0].logprobs, atol=1e-3)
    other = Engine(model).run(space(p, 8, 2, MASK, warm, 50) for p in prompts)
    assert [a.tokens for a in alone] != [a.tokens for a in other]
