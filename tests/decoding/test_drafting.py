"""SPACE, Medusa and APAR with Medusa: what each draws from a draft, pass by pass. test_exactness.py has their texts
against the stock model, of which no draft changes a token."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.methods.apar import Tree, apar
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.medusa import MedusaHeads, cartesian_tree, medusa
from raypd.decoding.methods.space import segments_seen, space
from raypd.decoding.program import Predictions
from raypd.decoding.sampling import Sampling, probabilities
from raypd.decoding.visibility import NO_TOKEN, grown, one_segment, visible
from raypd.errors import ModelError
from raypd.models.medusa_heads import load_heads, save_heads
from tests.decoding import reference
from tests.decoding.cases import MASK, TREES, Knowing, drafting, pair
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
    return apar(prompt, most, 250, 251, ends, heads=heads, tree=TREES[0]), 4


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
    model, stock = pair("llama", vocab_size=8)
    heads = MedusaHeads.for_model(model, count=3, layers=2)
    tree = cartesian_tree(3, 2, 2) if drafts == "random heads" else None
    if drafts == "random heads":
        torch.manual_seed(3)
        for weight in heads.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    prompts = [Prompt([1, 5, i, 4, 2]) for i in range(4)]

    def programs():
        return [space(p, 20, 3, MASK) if drafts == "masks" else medusa(p, 20, heads, tree) for p in prompts]

    answers = Engine(model, max_num_seqs=3, max_num_batched_tokens=40).run(programs())
    replayed = [reference.Replay(stock).run(program) for program in programs()]
    assert [(a.steps, a.accepted) for a in answers] == [(a.steps, a.accepted) for a in replayed]
    assert [answer.tokens for answer in answers] == [text_of(stock, prompt, 20) for prompt in prompts]
    assert sum(answer.accepted for answer in answers) > 3


@pytest.mark.parametrize(("method", "segments"), [("space", 10), ("medusa", 2)])
def test_the_cache_holds_the_text_and_one_draft(method, segments):
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
            want = [[*prompt.tokens, *text][: len(kept)], list(range(len(kept))), [0] * len(kept)]
            assert sequence.table[:3, kept].tolist() == want
            assert (len(sequence.reach), len(sequence.owner) <= 128) == (segments, True)
    assert done[0].answer.tokens == text


@pytest.mark.parametrize("method", ["space", "medusa", "apar_medusa", "apar"])
def test_decoded_tokens_are_those_of_the_answer_and_no_mask_or_rejected_draft(method):
    """And never fewer than before: busy time is booked by what has come."""
    model, stock = pair("llama")
    prompt = prompts_of(9)[0]
    text = text_of(stock, prompt, 40)
    apart = apar(prompt, 40, 250, 251, frozenset(text[-1:]))  # nothing drafted: what was fed is what was decoded
    program = apart if method == "apar" else well_drafted(method, stock, prompt, text, 0.6, 40, text[-1])[0]
    engine, counted, done = Engine(model), [0], []
    engine.submit(program)
    while engine.pending:
        done += engine.step()
        counted += [sequence.counts.decode_tokens for sequence in engine.sequences]
    assert counted == sorted(counted)
    assert done[0].counts.decode_tokens == text.index(text[-1]) + 1 >= counted[-1] > 3


def chance_of_texts(stock, prompt, length, sampling):
    """{text: probability} of every continuation of `length` tokens, one token at a time by the stock model."""
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in texts.items():
            logits = reference.plain_output(stock, [*prompt, *text])[0][-1]
            for token, p in enumerate(probabilities(logits, sampling).tolist()):
                if p > 0:
                    longer[*text, token] = chance * p
        texts = longer
    return texts


def check_distribution(answers, chances, least_freedom):
    """Within 4 standard deviations of what chi-square gives (Wilson and Hilferty's cube root is close to normal), cells
    that expect fewer than 5 put together."""
    counts = Counter(tuple(answer.tokens) for answer in answers)
    assert set(counts) <= set(chances), "a text that one token at a time never says"
    cells = [(counts.get(text, 0), len(answers) * chance) for text, chance in chances.items()]
    small = [sum(column) for column in zip(*(cell for cell in cells if cell[1] < 5), strict=True)]
    cells = [cell for cell in cells if cell[1] >= 5] + [small] * bool(small)
    statistic, freedom = sum((c - e) ** 2 / e for c, e in cells if e > 0), len(cells) - 1
    assert freedom > least_freedom
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < 4, (statistic, freedom)


@pytest.mark.parametrize(("method", "sampling"), [
    ("space", Sampling(1.5, top_k=3)), ("space", Sampling(2.0, top_p=0.65)), ("medusa", Sampling(1.5, top_k=3)),
])  # fmt: skip
def test_sampled_texts_have_the_distribution_of_autoregressive_ones(method, sampling):
    model, stock = pair("llama", seed=4, vocab_size=16)
    prompt, runs = Prompt([1, 9, 5]), 700
    heads = MedusaHeads.for_model(model, count=2, layers=1, tree=cartesian_tree(4, 3))
    spaced = (space(prompt, 4, 2, MASK, sampling, seed) for seed in range(runs))
    programs = spaced if method == "space" else (medusa(prompt, 4, heads) for _ in range(runs))
    answers = Engine(model, max_num_seqs=175).run(programs, sampling=sampling)
    assert runs / 10 < sum(a.accepted for a in answers) < 2.5 * runs
    if method == "space":
        assert sum(a.rejected for a in answers) > runs / 10
    check_distribution(answers, chance_of_texts(stock, prompt.tokens, 4, sampling), 12)


@pytest.mark.parametrize(("said", "last", "accepted", "rejected"), [
    ([22, 23, 24], 22, 1, 0), ([22, 23, 24], 23, 2, 0), ([22, 23, 24], 24, 2, 0),
    ([22, 25, 0], 22, 1, 0), ([22, 25, 0], 25, 1, 1), ([26, 0, 0], 26, 0, 1)])  # fmt: skip
def test_candidates_behind_the_end_of_the_text_do_not_count(said, last, accepted, rejected):
    """Candidates 22 and 23 behind 21; the model says `said` there, and the text ends with `last`."""
    program = space(Prompt([20]), 20, 2, MASK, stops=lambda tokens: tokens[-1] == last)
    next(program)
    program.send(Predictions([21, 22, 23], [0.0] * 3))
    with pytest.raises(StopIteration) as end:
        program.send(Predictions([*said, *[0] * 6], [0.0] * 9))
    answer = end.value.value
    assert (answer.tokens[-1], answer.accepted, answer.rejected) == (last, accepted, rejected)


def test_a_pass_looks_like_figure_7_and_k_0_feeds_what_autoregressive_feeds():
    def feeds(program):
        said = itertools.count(1)
        answer, seen = drive(program, lambda feed: [next(said)])
        lists = [[list(getattr(f, name)) for name in ("tokens", "positions", "sample_at", "drop")] for f in seen]
        return lists, [feed.shared for feed in seen], answer.tokens

    prompt = Prompt([7, 8, 9], 2)
    assert feeds(space(prompt, 5, 0, MASK)) == feeds(autoregressive(prompt, 5, never))
    with pytest.raises(ValueError, match="k is -1"):
        next(space(prompt, 5, -1, MASK))
    # Two candidates behind "LLMs are": who sees whom, and the positions as visible tokens minus one.
    program = space(Prompt([20]), 20, 2, MASK)
    first = next(program)
    assert (list(first.tokens), list(first.positions)) == ([20, MASK, MASK], [0, 1, 2])
    second = program.send(Predictions([21, 22, 23], [0.0] * 3))  # "are", and the candidates "auto", "model"
    assert list(second.tokens) == [21, MASK, MASK, 22, MASK, MASK, 23, MASK, MASK]
    assert list(second.drop) == [1, 2]
    positions = np.array([0, *second.positions])
    segments = np.array([0, *second.segments])
    seen = visible(grown(one_segment(), segments_seen(2)), segments, positions, segments, positions)
    figure = ["0", "01", "012", "0123", "014", "0145", "01456", "0147", "01478", "014789"]
    assert ["".join(map(str, np.flatnonzero(line))) for line in seen] == figure
    assert (seen.sum(1) - 1 == positions).all()


def test_heads_run_once_a_step_for_all_programs_that_share_them():
    calls: list[int] = []

    class Counting(MedusaHeads):
        def draft(self, hidden, tree):
            calls.append(len(hidden))
            return super().draft(hidden, tree)

    engine, heads = Engine(tiny_model("llama"), max_num_seqs=4), Counting(2, 1, 64, 256).eval()
    engine.run([medusa(prompt, 9, heads) for prompt in prompts_of(6)])
    assert (max(calls), len(calls) < engine.steps) == (4, True)


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
    assert torch.equal(heads(hidden)[1], model.get_output_embeddings()(hidden))  # before training: its own next token
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    state, x = {name: weight.detach() for name, weight in heads.state_dict().items()}, hidden
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
