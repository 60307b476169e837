"""APAR by hand: the tree, what is fed where and what is released when. test_exactness.py has its threads against the
stock model."""

import numpy as np
import pytest

from raypd.decoding.engine import Engine
from raypd.decoding.methods.apar import Paragraph, apar, restore
from raypd.decoding.methods.autoregressive import Prompt
from raypd.decoding.visibility import visible
from tests.decoding.cases import CHILD, ENDS, EOS, FORK, MOST, TREES, Knowing, check_threads, few_forks, pair, plainly
from tests.decoding.drivers import changed, drive, prompts_of, steered
from tests.decoding.reference import Replay
from tests.tiny import in_float64


def scripted(program, said: dict[tuple[int, ...], int], prompt: list[int]):
    """Answers feeds from a table {path of a thread behind the prompt: next token}; returns (answer, feeds)."""
    rows, alive, reach = [], set(), {(0, 0): 2}

    def answer(feed) -> list[int]:
        alive.difference_update(feed.drop)
        reach.update(feed.reach)
        first, tokens = len(rows), []
        rows.extend(zip(feed.tokens, feed.positions, feed.segments or [0] * len(feed.tokens), strict=True))
        alive.update(range(first, len(rows)))
        for index in feed.sample_at:
            _, position, segment = rows[first + index]
            kinds = {i: reach.get((segment, rows[i][2]), 0) for i in alive}
            seen = [i for i, kind in kinds.items() if kind == 1 or (kind == 2 and rows[i][1] <= position)]
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
        (): 10, (10,): F, (10, F): 20, (10, F, 20): F, (10, F, 20, F): 30, (10, F, 20, F, 30): E,
        (10, F, C): 11, (10, F, C, 11): E,
        (10, F, 20, F, C): 21, (10, F, 20, F, C, 21): 22, (10, F, 20, F, C, 21, 22): E,
    }  # fmt: skip
    answer, feeds = scripted(apar(Prompt([7, 8, 9]), 50, F, C, ENDS), said, [7, 8, 9])
    assert [p.tokens for p in restore(answer.root)] == [[10, F], [C, 11, E], [20, F], [C, 21, 22, E], [30, E]]
    assert answer.tokens == [10, 11, 20, 21, 22, 30]
    assert (answer.cut is None, answer.threads, answer.unstarted_threads) == (True, 3, 0)
    # after the prompt: 10; F; then 20 beside the first child; ...
    assert [list(f.tokens) for f in feeds[1:]] == [[10], [F], [20, C], [F, 11], [30, C], [21], [22]]
    assert [list(f.positions) for f in feeds[1:]] == [[3], [4], [5, 5], [6, 6], [7, 7], [8], [9]]
    # row indices: prompt 0-2, 10:3, F:4, 20:5, C:6, F:7, 11:8, 30:9, C:10, 21:11
    assert [sorted(f.drop) for f in feeds] == [[], [], [], [], [], [6, 8], [9], []]
    # the cache grows to 9, gives up the first child (2), takes 2, gives up the paragraph 30, takes 1, 1
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
    narrow, feeds = scripted(apar(Prompt([7, 8]), 100, F, C, ENDS, max_threads=max_threads), said, [7, 8])
    assert narrow.tokens == wide.tokens == [t for n in range(5) for t in (10 + n, 20 + n, 30 + n)]
    assert [p.tokens for p in restore(narrow.root)] == [p.tokens for p in restore(wide.root)]
    assert (narrow.cut is None, narrow.threads, narrow.unstarted_threads) == (True, 6, 0)
    assert max(len(feed.sample_at) for feed in feeds) == max_threads


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4, 5, 8, 13, 30])
def test_budget_is_kept_and_positions_stay_within_it(most):
    forever = lambda token, position, predicted: FORK if token != FORK else 50  # noqa: E731
    seen = []
    program = steered(apar(Prompt([5, 6, 7]), most, FORK, CHILD, ENDS), forever)
    (answer,) = Engine(pair("llama")[0]).run([changed(program, lambda feed, _: seen.extend(feed.positions))])
    assert sum(len(p.tokens) for p in restore(answer.root)) == most
    assert max(seen, default=0) < 3 + most
    assert (answer.cut is not None, bool(answer.cost.steps)) == (True, bool(most))


def test_a_fork_that_ends_a_prompt_is_acted_on_and_a_long_chain_restored():
    """Line 19 looks at the last token, whoever wrote it."""
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
        drafted = (apar(prompt, most, FORK, CHILD, ENDS, heads=one, tree=TREES[most % 3]) for one in heads)
        program, other = (steered(one, few_forks) for one in drafted)
        (answer,) = Engine(model, max_num_batched_tokens=30).run([program])
        assert sum(len(paragraph.tokens) for paragraph in restore(answer.root)) == most
        check_threads(stock, prompt, answer, few_forks, 1e-9)
        replayed = Replay(stock).run(other)
        assert [p.tokens for p in restore(answer.root)] == [p.tokens for p in restore(replayed.root)]
        assert (answer.cost, answer.accepted) == (replayed.cost, replayed.accepted)


@pytest.mark.parametrize("drafted", [False, True])
def test_what_no_thread_has_on_its_path_leaves_the_cache(drafted):
    """And the answer counts what is left there. A thread that drafts takes over segments of one that ended."""
    model, stock = pair("llama")
    prompt = prompts_of(23, 1)[0]
    plain, texts = plainly(stock, prompt)
    assert plain.cut is None
    program = apar(prompt, MOST, FORK, CHILD, ENDS)
    if drafted:
        program = apar(prompt, MOST, FORK, CHILD, ENDS, heads=Knowing(stock, texts, 0.6), tree=TREES[1])
    engine = Engine(model)
    engine.submit(steered(program, few_forks))
    done, most, size = [], 0, 0
    while engine.pending:
        done += engine.step()
        for sequence in engine.sequences:
            live = np.flatnonzero(~sequence.dropped[: sequence.size])
            _, positions, segments, _ = sequence.table[:, live]
            fed = live >= sequence.size - len(sequence.feed.tokens)
            seen = visible(sequence.reach, segments[fed], positions[fed], segments, positions)
            assert seen.any(0).all(), "a token that no thread has on its path"
            most, size = max(most, len(live)), max(size, len(sequence.reach))
    answer = done[0].answer
    assert [p.tokens for p in restore(answer.root)] == [p.tokens for p in restore(plain.root)]
    assert most == answer.cost.max_cached_tokens
    assert size < sum(1 for _ in restore(answer.root)) + 9 * drafted * answer.threads + 1
