"""SPACE, Medusa, APAR: what each draws from a draft, pass by pass; test_exactness.py has their
texts.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.methods.apar import Paragraph, Tree, apar, restore
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.medusa import MedusaHeads, cartesian_tree, medusa
from raypd.decoding.methods.space import segments_seen, space
from raypd.decoding.program import Predictions
from raypd.decoding.sampling import Sampling, probabilities
from raypd.decoding.sequence import TOKEN
from raypd.decoding.visibility import NO_TOKEN, POSITION, SEGMENT, grown, one_segment, visible
from raypd.errors import ModelError
from raypd.models.medusa_heads import load_heads, save_heads
from tests.decoding import cases, reference
from tests.decoding.cases import (
    CHILD,
    ENDS,
    EOS,
    FORK,
    MASK,
    MAX_TREE_TOKENS,
    TREES,
    Knowing,
    drafting,
    few_forks,
    pair,
    plainly,
)
from tests.decoding.drivers import changed, drive, never, prompts_of, steered
from tests.decoding.reference import Replay
from tests.tiny import in_float64, tiny_model


def text_of(stock, prompt: Prompt, most: int) -> list[int]:
    """What the stock model says."""
    return [token for token, _, _ in reference.autoregressive(stock, prompt.tokens, most, never)]


def well_drafted(
    method: str,
    stock,
    prompt: Prompt,
    text: list[int],
    right: float,
    most: int,
    end: int | None = None,
):
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
        # Of each pass after the prompt's all tokens but the last are drafts; the last token of 12
        # is none.
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
        return [
            space(p, 20, 3, MASK) if drafts == "masks" else medusa(p, 20, heads, tree)
            for p in prompts
        ]

    answers = Engine(model, max_num_seqs=3, max_num_batched_tokens=40).run(programs())
    replayed = [reference.Replay(stock).run(program) for program in programs()]
    assert [(a.steps, a.accepted) for a in answers] == [(a.steps, a.accepted) for a in replayed]
    assert [answer.tokens for answer in answers] == [
        text_of(stock, prompt, 20) for prompt in prompts
    ]
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
            assert sequence.table[TOKEN, kept].tolist() == [*prompt.tokens, *text][: len(kept)]
            assert sequence.table[POSITION, kept].tolist() == list(range(len(kept)))
            assert sequence.table[SEGMENT, kept].tolist() == [0] * len(kept)
            assert (len(sequence.reach), len(sequence.owner) <= 128) == (segments, True)
    assert done[0].answer.tokens == text


@pytest.mark.parametrize("method", ["space", "medusa", "apar_medusa", "apar"])
def test_decoded_tokens_are_those_of_the_answer_and_no_mask_or_rejected_draft(method):
    model, stock = pair("llama")
    prompt = prompts_of(9)[0]
    text = text_of(stock, prompt, 40)
    # Nothing drafted: what was fed is what was decoded.
    apart = apar(prompt, 40, 250, 251, frozenset(text[-1:]))
    program = (
        apart
        if method == "apar"
        else well_drafted(method, stock, prompt, text, 0.6, 40, text[-1])[0]
    )
    engine, counted, done = Engine(model), [0], []
    engine.submit(program)
    while engine.pending:
        done += engine.step()
        counted += [sequence.counts.decode_tokens for sequence in engine.sequences]
    assert counted == sorted(counted)
    assert done[0].counts.decode_tokens == text.index(text[-1]) + 1 >= counted[-1] > 3


def chance_of_texts(stock, prompt, length, sampling):
    """{text: probability} of every continuation of `length` tokens, one token at a time by the
    stock model.
    """
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
    """Within 4 standard deviations of chi-square (Wilson and Hilferty); cells that expect fewer
    than 5 are one.
    """
    counts = Counter(tuple(answer.tokens) for answer in answers)
    assert set(counts) <= set(chances), "a text that one token at a time never says"
    cells = [(counts.get(text, 0), len(answers) * chance) for text, chance in chances.items()]
    small = [sum(column) for column in zip(*(cell for cell in cells if cell[1] < 5), strict=True)]
    cells = [cell for cell in cells if cell[1] >= 5] + [small] * bool(small)
    statistic, freedom = sum((c - e) ** 2 / e for c, e in cells if e > 0), len(cells) - 1
    assert freedom > least_freedom
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < 4, (statistic, freedom)


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        ("space", Sampling(1.5, top_k=3)),
        ("space", Sampling(2.0, top_p=0.65)),
        ("medusa", Sampling(1.5, top_k=3)),
    ],
)
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
        lists = [
            [list(getattr(f, name)) for name in ("tokens", "positions", "sample_at", "drop")]
            for f in seen
        ]
        return lists, [feed.shared for feed in seen], answer.tokens

    prompt = Prompt([7, 8, 9], 2)
    assert feeds(space(prompt, 5, 0, MASK)) == feeds(autoregressive(prompt, 5, never))
    with pytest.raises(ValueError, match="k is -1"):
        next(space(prompt, 5, -1, MASK))
    # Two candidates behind "LLMs are": who sees whom, and the positions as visible tokens minus
    # one.
    program = space(Prompt([20]), 20, 2, MASK)
    first = next(program)
    assert (list(first.tokens), list(first.positions)) == ([20, MASK, MASK], [0, 1, 2])
    # "are", and the candidates "auto", "model".
    second = program.send(Predictions([21, 22, 23], [0.0] * 3))
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
    # Before training: its own next token.
    assert torch.equal(heads(hidden)[1], model.get_output_embeddings()(hidden))
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
    assert (
        load_heads(tmp_path / "heads", tiny_model("qwen3").bfloat16())(hidden).dtype
        == torch.bfloat16
    )
    with pytest.raises(ModelError, match=r"made for tiny.*vocabulary 256.*has 64 and 99"):
        load_heads(tmp_path / "heads", tiny_model("qwen3", vocab_size=99))


def scripted(program, said: dict[tuple[int, ...], int], prompt: list[int]):
    """Answers feeds from a table {path of a thread behind the prompt: next token}; returns (answer,
    feeds).
    """
    rows, alive, reach = [], set(), {(0, 0): 2}

    def answer(feed) -> list[int]:
        alive.difference_update(feed.drop)
        reach.update(feed.reach)
        first, tokens = len(rows), []
        rows.extend(
            zip(feed.tokens, feed.positions, feed.segments or [0] * len(feed.tokens), strict=True)
        )
        alive.update(range(first, len(rows)))
        for index in feed.sample_at:
            _, position, segment = rows[first + index]
            kinds = {i: reach.get((segment, rows[i][2]), 0) for i in alive}
            seen = [
                i
                for i, kind in kinds.items()
                if kind == 1 or (kind == 2 and rows[i][1] <= position)
            ]
            seen.sort(key=lambda i: rows[i][1])
            assert [rows[i][1] for i in seen] == list(range(len(seen))), "a path has no gaps"
            path = tuple(rows[i][0] for i in seen)
            assert path[: len(prompt)] == tuple(prompt)
            tokens.append(said[path[len(prompt) :]])
        return tokens

    return drive(program, answer)


def test_by_hand():
    """Figure 3: p0 - p1 - p2, each with a detail, and what is released when."""
    F, C, E = FORK, CHILD, EOS
    said = {
        (): 10,
        (10,): F,
        (10, F): 20,
        (10, F, 20): F,
        (10, F, 20, F): 30,
        (10, F, 20, F, 30): E,
        (10, F, C): 11,
        (10, F, C, 11): E,
        (10, F, 20, F, C): 21,
        (10, F, 20, F, C, 21): 22,
        (10, F, 20, F, C, 21, 22): E,
    }
    answer, feeds = scripted(apar(Prompt([7, 8, 9]), 50, F, C, ENDS), said, [7, 8, 9])
    assert [p.tokens for p in restore(answer.root)] == [
        [10, F],
        [C, 11, E],
        [20, F],
        [C, 21, 22, E],
        [30, E],
    ]
    assert answer.tokens == [10, 11, 20, 21, 22, 30]
    assert (answer.cut is None, answer.threads, answer.unstarted_threads) == (True, 3, 0)
    # after the prompt: 10; F; then 20 beside the first child; ...
    assert [list(f.tokens) for f in feeds[1:]] == [[10], [F], [20, C], [F, 11], [30, C], [21], [22]]
    assert [list(f.positions) for f in feeds[1:]] == [[3], [4], [5, 5], [6, 6], [7, 7], [8], [9]]
    # row indices: prompt 0-2, 10:3, F:4, 20:5, C:6, F:7, 11:8, 30:9, C:10, 21:11
    assert [sorted(f.drop) for f in feeds] == [[], [], [], [], [], [6, 8], [9], []]
    # the cache grows to 9, gives up the first child (2), takes 2, gives up the paragraph 30, takes
    # 1, 1
    seen = [3, 4, 5, 6, 6, 7, 7, 8, 8, 9, 10]
    for cost, steps, cached, attended in (
        (answer.cost, 8, 10, sum(seen) / 11),
        (answer.flattened, 7, 9, sum(range(3, 10)) / 7),  # 6 tokens and an end behind 3 of prompt
    ):
        assert (cost.steps, cost.max_cached_tokens) == (steps, cached)
        assert cost.attended_tokens == pytest.approx(attended)


@pytest.mark.parametrize("max_threads", [1, 2, 3])
def test_a_child_beyond_the_threads_waits_and_nothing_of_it_is_lost(max_threads):
    F, C, E = FORK, CHILD, EOS
    said, spine = {}, ()
    for n in range(5):
        said |= {spine: 10 + n, (*spine, 10 + n): F}
        spine = (*spine, 10 + n, F)
        said |= {(*spine, C): 20 + n, (*spine, C, 20 + n): 30 + n, (*spine, C, 20 + n, 30 + n): E}
    said[spine] = E
    wide, _ = scripted(apar(Prompt([7, 8]), 100, F, C, ENDS), said, [7, 8])
    narrow, feeds = scripted(
        apar(Prompt([7, 8]), 100, F, C, ENDS, max_threads=max_threads), said, [7, 8]
    )
    assert narrow.tokens == wide.tokens == [t for n in range(5) for t in (10 + n, 20 + n, 30 + n)]
    assert [p.tokens for p in restore(narrow.root)] == [p.tokens for p in restore(wide.root)]
    assert (narrow.cut is None, narrow.threads, narrow.unstarted_threads) == (True, 6, 0)
    assert max(len(feed.sample_at) for feed in feeds) == max_threads


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4, 5, 8, 13, 30])
def test_budget_is_kept_and_positions_stay_within_it(most):
    forever = lambda token, position, predicted: FORK if token != FORK else 50  # noqa: E731
    seen = []
    program = steered(apar(Prompt([5, 6, 7]), most, FORK, CHILD, ENDS), forever)
    (answer,) = Engine(pair("llama")[0]).run(
        [changed(program, lambda feed, _: seen.extend(feed.positions))]
    )
    assert sum(len(p.tokens) for p in restore(answer.root)) == most
    assert max(seen, default=0) < 3 + most
    assert (answer.cut is not None, bool(answer.cost.steps)) == (True, bool(most))


def test_a_fork_that_ends_a_prompt_is_acted_on_and_a_long_chain_restored():
    said = {(): 10, (10,): EOS, (CHILD,): 11, (CHILD, 11): EOS}
    answer, _ = scripted(apar(Prompt([7, FORK]), 50, FORK, CHILD, ENDS), said, [7, FORK])
    assert [p.tokens for p in restore(answer.root)] == [[], [CHILD, 11, EOS], [10, EOS]]
    root = last = Paragraph([0])
    for i in range(1, 5000):
        last.next_sibling = Paragraph([i])
        last = last.next_sibling
    assert [p.tokens[0] for p in restore(root)] == list(range(5000))
    assert len(repr(root)) < 100


def test_with_medusa_every_budget_is_kept():
    """Never more tokens, all of them those of the threads; the same in the engine and in Replay."""
    model, stock = (in_float64(one) for one in pair("llama"))
    prompt = prompts_of(23, 1)[0]
    texts = plainly(stock, prompt)[1]
    assert len(texts) > 2
    for most in (1, 2, 3, 7, 12, 20):
        heads = (Knowing(stock, texts, 0.9, most) for _ in range(2))
        drafted = (
            apar(prompt, most, FORK, CHILD, ENDS, heads=one, tree=TREES[most % 3]) for one in heads
        )
        program, other = (steered(one, few_forks) for one in drafted)
        (answer,) = Engine(model, max_num_batched_tokens=30).run([program])
        assert sum(len(paragraph.tokens) for paragraph in restore(answer.root)) == most
        cases.check_threads(stock, prompt, answer, few_forks, 1e-9)
        replayed = Replay(stock).run(other)
        assert [p.tokens for p in restore(answer.root)] == [
            p.tokens for p in restore(replayed.root)
        ]
        assert (answer.cost, answer.accepted) == (replayed.cost, replayed.accepted)


@pytest.mark.parametrize("drafted", [False, True])
def test_what_no_thread_has_on_its_path_leaves_the_cache(drafted):
    """And the answer counts what is left there.

    A thread that drafts takes over segments of one that ended.
    """
    model, stock = pair("llama")
    prompt = prompts_of(23, 1)[0]
    plain, texts = plainly(stock, prompt)
    assert plain.cut is None
    program = apar(prompt, MAX_TREE_TOKENS, FORK, CHILD, ENDS)
    if drafted:
        program = apar(
            prompt,
            MAX_TREE_TOKENS,
            FORK,
            CHILD,
            ENDS,
            heads=Knowing(stock, texts, 0.6),
            tree=TREES[1],
        )
    engine = Engine(model)
    engine.submit(steered(program, few_forks))
    done, most, size = [], 0, 0
    while engine.pending:
        done += engine.step()
        for sequence in engine.sequences:
            live = np.flatnonzero(~sequence.dropped[: sequence.size])
            positions = sequence.table[POSITION, live]
            segments = sequence.table[SEGMENT, live]
            fed = live >= sequence.size - len(sequence.feed.tokens)
            seen = visible(sequence.reach, segments[fed], positions[fed], segments, positions)
            assert seen.any(0).all(), "a token that no thread has on its path"
            most, size = max(most, len(live)), max(size, len(sequence.reach))
    answer = done[0].answer
    assert [p.tokens for p in restore(answer.root)] == [p.tokens for p in restore(plain.root)]
    assert most == answer.cost.max_cached_tokens
    assert size < sum(1 for _ in restore(answer.root)) + 9 * drafted * answer.threads + 1
