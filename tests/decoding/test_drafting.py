"""SPACE, Medusa and APAR with Medusa: what each draws from a draft, pass by pass. test_exactness.py has their texts
against the stock model, of which no draft changes a token."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.methods.apar_medusa import apar_medusa
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.medusa import MedusaHeads, Tree, cartesian_tree, medusa
from raypd.decoding.methods.space import segments_seen, space
from raypd.decoding.program import Predictions
from raypd.decoding.sampling import Sampling
from raypd.decoding.visibility import NO_TOKEN, grown, one_segment, visible
from raypd.errors import ModelError
from raypd.models.medusa_heads import load_heads, save_heads
from tests.decoding import reference
from tests.decoding.cases import MASK, TREES, Knowing, drafting, pair
from tests.decoding.distribution import chance_of_texts, check_distribution
from tests.decoding.drivers import drive, never, prompts_of
from tests.tiny import tiny_model


def text_of(stock, prompt: Prompt, most: int) -> list[int]:
    """What the stock model says."""
    return [token for token, _, _ in reference.autoregressive(stock, prompt.tokens, most, never)]


def well_drafted(method: str, stock, prompt: Prompt, text: list[int], right: float, most: int, end: int | None = None):
    """(program whose drafts are as often right, tokens that a pass of right drafts decodes)."""
    stops = lambda tokens: tokens[-1] == end  # noqa: E731
    if method == "space":
        return drafting(space(prompt, most, 4, MASK, stops=stops), prompt, text, 4, right), 5
    heads = Knowing(stock, [([*prompt.tokens, *text], len(prompt.tokens))], right)
    if method == "medusa":
        return medusa(prompt, most, heads, TREES[0], stops), 4
    ends = frozenset() if end is None else frozenset([end])
    return apar_medusa(prompt, most, 250, 251, ends, heads, TREES[0]), 4


@pytest.mark.parametrize("method", ["space", "medusa", "apar_medusa"])
def test_most_tokens_and_stops_cut_inside_an_accepted_run(method):
    model, stock = pair("llama")
    prompt = prompts_of(8)[0]
    full = text_of(stock, prompt, 12)
    engine = Engine(model)

    def check(answer, tokens, stopped, steps, accepted):
        assert (answer.tokens, answer.generated(str).cut is None) == (tokens, stopped)
        assert (getattr(answer, "cost", answer).steps, answer.accepted) == (steps, accepted)

    for most in range(1, 12):
        program, tokens_a_pass = well_drafted(method, stock, prompt, full, 1.0, most)
        steps = 1 + -(-(most - 1) // tokens_a_pass)  # the prompt's pass says one token
        check(engine.run([program])[0], full[:most], False, steps, most - steps)
    for token in full:
        program, tokens_a_pass = well_drafted(method, stock, prompt, full, 1.0, 12, token)
        count = full.index(token) + 1
        steps = 1 + -(-(count - 1) // tokens_a_pass)
        # Of each pass after the prompt's all tokens but the last are drafts; the last token of 12 is none.
        accepted = sum(n % tokens_a_pass > 0 and n < 11 for n in range(1, count))
        said = full[: count - (method == "apar_medusa")]  # an end token is no text of APAR
        check(engine.run([program])[0], said, True, steps, accepted)


@pytest.mark.parametrize("drafts", ["masks", "heads before training", "random heads"])
def test_drafts_of_the_models_own_are_the_same_in_the_engine_and_in_replay(drafts):
    """Not only what is verified: the same drafts pass."""
    model, stock = pair("llama", vocab_size=8)
    heads = MedusaHeads.for_model(model, count=3, layers=2)
    trees = {"masks": None, "heads before training": None, "random heads": cartesian_tree(3, 2, 2)}
    if drafts == "random heads":
        torch.manual_seed(3)
        for weight in heads.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    prompts = [Prompt([1, 5, i, 4, 2]) for i in range(4)]

    def programs():
        for prompt in prompts:
            yield space(prompt, 20, 3, MASK) if drafts == "masks" else medusa(prompt, 20, heads, trees[drafts])

    answers = Engine(model, max_num_seqs=3, max_num_batched_tokens=40).run(programs())
    replayed = [reference.Replay(stock).run(program) for program in programs()]
    assert [(a.steps, a.accepted) for a in answers] == [(a.steps, a.accepted) for a in replayed]
    assert [answer.tokens for answer in answers] == [text_of(stock, prompt, 20) for prompt in prompts]
    assert sum(answer.accepted for answer in answers) > 3


@pytest.mark.parametrize(("method", "segments"), [("space", 10), ("medusa", 2)])
def test_the_cache_holds_the_text_and_one_draft(method, segments):
    """All that stays of earlier feeds is text, without a gap, in segment 0."""
    model, stock = pair("llama")
    prompt = prompts_of(9)[0]
    text = text_of(stock, prompt, 40)
    engine, done = Engine(model), []
    engine.submit(well_drafted(method, stock, prompt, text, 0.6, 40)[0])
    while engine.pending:
        done += engine.step()
        for sequence in engine.sequences:
            here = sequence.owner[: sequence.high]
            fed = sequence.size - len(sequence.feed.tokens)
            kept = sorted(token for token in here[here != NO_TOKEN] if token < fed)
            assert sequence.table[1, kept].tolist() == list(range(len(kept)))
            assert sequence.table[0, kept].tolist() == [*prompt.tokens, *text][: len(kept)]
            assert not sequence.table[2, kept].any()
            assert len(sequence.reach) == segments
            assert len(sequence.owner) <= 128
    assert done[0].answer.tokens == text


@pytest.mark.parametrize(
    ("method", "sampling"),
    [("space", Sampling(1.5, top_k=3)), ("space", Sampling(2.0, top_p=0.65)), ("medusa", Sampling(1.5, top_k=3))],
)
def test_sampled_texts_have_the_distribution_of_autoregressive_ones(method, sampling):
    model, stock = pair("llama", seed=4, vocab_size=16)
    prompt, runs = Prompt([1, 9, 5]), 700
    heads = MedusaHeads.for_model(model, count=2, layers=1, tree=cartesian_tree(4, 3))
    answers = Engine(model, max_num_seqs=175).run(
        (
            space(prompt, 4, 2, MASK, sampling, seed) if method == "space" else medusa(prompt, 4, heads)
            for seed in range(runs)
        ),
        sampling=sampling,
    )
    assert runs / 10 < sum(a.accepted for a in answers) < 2.5 * runs
    if method == "space":
        assert sum(a.rejected for a in answers) > runs / 10
    check_distribution(answers, chance_of_texts(stock, prompt.tokens, 4, sampling), 12)


# --------------------------------------------------------------------------------------------------------------- SPACE


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


# -------------------------------------------------------------------------------------------------------------- Medusa


def test_a_pass_by_hand():
    """Tokens, positions, segments and what leaves the cache, with heads that always guess 40 + rank."""

    class Fixed(MedusaHeads):
        def draft(self, hidden, tree):
            return [[10 * (3 + depth) + rank for depth, rank in zip(tree.depths, tree.ranks, strict=True)]]

    heads = Fixed(3, 1, 4, 99)
    program = medusa(Prompt([7, 8]), 20, heads, TREES[2])
    first = next(program)
    assert (list(first.tokens), list(first.sample_at), first.want_hidden) == ([7, 8], [1], True)
    hidden = [torch.zeros(4)] * 7
    ask = program.send(Predictions([9], [0.0], hidden=hidden[:1]))
    assert (ask.tokens, ask.draft.heads, ask.draft.tree) == ((), heads, TREES[2])
    feed = program.send(Predictions([], [], drafts=heads.draft(ask.draft.hidden, TREES[2])))
    assert list(feed.tokens) == [9, 40, 41, 42, 50, 51, 60]
    assert list(feed.positions) == [2, 3, 3, 3, 4, 4, 5]
    assert list(feed.segments) == [0, 1, 2, 3, 4, 5, 4]  # (1, 0) and (1, 0, 0) are one run
    assert {key for query, key in first.reach if query == 4} == {0, 2, 4}
    assert list(feed.sample_at) == list(range(7))
    # the model says 41 behind 9, 50 behind 41, and 1 behind 50
    ask = program.send(Predictions([41, 0, 50, 0, 1, 0, 0], [0.0] * 7, hidden=hidden))
    feed = program.send(Predictions([], [], drafts=heads.draft(ask.draft.hidden, TREES[2])))
    assert (feed.tokens[0], feed.positions[0]) == (1, 5)
    assert (feed.move, sorted(feed.drop)) == ({4: 0, 6: 0}, [3, 5, 7, 8])


def test_heads_run_once_a_step_for_all_programs_that_share_them():
    calls: list[int] = []

    class Counting(MedusaHeads):
        def draft(self, hidden, tree):
            calls.append(len(hidden))
            return super().draft(hidden, tree)

    model, _ = pair("llama")
    width = model.get_output_embeddings().weight.shape
    heads = Counting(2, 1, width[1], width[0]).eval()
    prompts = prompts_of(6)
    engine = Engine(model, max_num_seqs=4)
    engine.run([medusa(prompt, 9, heads) for prompt in prompts])
    assert max(calls) == len(prompts)
    assert len(calls) < engine.steps


def test_trees():
    assert cartesian_tree(2, 2).paths == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert [cartesian_tree(2, 2).size(d) for d in range(4)] == [0, 2, 6, 6]
    with pytest.raises(ValueError, match="no path"):
        Tree([(0,), (1, 0)])
    with pytest.raises(ValueError, match="deep"):
        next(medusa(Prompt([1]), 3, MedusaHeads(1, 1, 4, 9), cartesian_tree(1, 1)))


def test_heads_are_what_the_files_say(tmp_path):
    torch.manual_seed(1)
    model = tiny_model("qwen3")
    heads = MedusaHeads.for_model(model, 3, 2, "tiny", Tree([(0,), (1,), (0, 0)]))
    hidden = torch.randn(5, 64)
    own = model.get_output_embeddings()(hidden)
    assert torch.equal(heads(hidden)[1], own)  # before training: the model's own next token
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    state = {name: weight.detach() for name, weight in heads.state_dict().items()}
    x = hidden
    for layer in range(2):
        w, b = (state[f"heads.2.blocks.{layer}.linear.{name}"] for name in ("weight", "bias"))
        y = x @ w.T + b
        x = x + y * torch.sigmoid(y)
    torch.testing.assert_close(heads(hidden)[2], x @ state["heads.2.out.weight"].T)
    save_heads(heads, tmp_path / "heads")
    again = load_heads(tmp_path / "heads", model)
    assert torch.equal(again(hidden), heads(hidden))
    assert (again.base_model, again.tree.paths, again.layers) == ("tiny", heads.tree.paths, 2)
    assert not any(weight.requires_grad for weight in again.parameters())
    assert load_heads(tmp_path / "heads", tiny_model("qwen3").bfloat16())(hidden).dtype == torch.bfloat16
    with pytest.raises(ModelError, match=r"made for tiny.*vocabulary 256.*has 64 and 99"):
        load_heads(tmp_path / "heads", tiny_model("qwen3", vocab_size=99))
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_heads(tmp_path)
