"""APAR against algorithm 1 written out: every thread read again from its first token, alone, by the stock model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from raypd.decoding.engine import Engine
from raypd.decoding.methods.apar import AparAnswer, Paragraph, apar, restore
from raypd.decoding.methods.autoregressive import Prompt
from tests.decoding import reference
from tests.decoding.drivers import changed, drive, never, prompts_of, steered
from tests.decoding.reference import Replay
from tests.decoding.test_exactness import FEW_FAMILIES, beside_others, pair
from tests.tiny import in_float64

FORK, CHILD, EOS = 3, 4, 2
ENDS = frozenset([EOS])


def steer(token: int, position: int, predicted: int) -> int:
    """What a trained model would do now and then, as a function of what the model sees last: forks and ends."""
    draw = (predicted * 31 + position * 17 + token * 7) % 19
    if draw < 3 and token != CHILD:
        return FORK
    if draw == 3 or (draw < 7 and position > 70):
        return EOS
    return predicted if predicted not in (FORK, CHILD, EOS) else 40 + draw


def forked(prompt: Prompt, most: int, *max_threads: int):
    return steered(apar(prompt, most, FORK, CHILD, ENDS, *max_threads), steer)


@dataclass(eq=False)
class Sequence:
    """A sequence of algorithm 1: all of its tokens, and the slices of it that are paragraphs."""

    tokens: list[int]
    node: Node
    finished: bool = False


@dataclass(eq=False)
class Node:
    start: int
    sequence: Sequence | None = None
    end: int | None = None
    first_child: Node | None = None
    next_sibling: Node | None = None
    picked: list[tuple[int, float, float]] = field(default_factory=list)


def from_scratch(stock, prompt: list[int], most: int, max_threads: int = 64, rule=steer):
    """Algorithm 1, line by line: (root, sequences, steps, attended tokens, most tokens in the cache).

    A child begins, the oldest first, once fewer than `max_threads` run and two tokens are left for it.
    """
    root = Node(len(prompt))
    group = [Sequence(list(prompt), root)]
    root.sequence = group[0]
    waiting: list[Sequence] = []
    steps, attended, used, cached = 0, [], 0, 0
    while used < most and not all(s.finished for s in group):
        steps += 1
        live = [s for s in group if not s.finished][: most - used]
        used += len(live)
        fed = [s.tokens[: len(s.tokens) - (s not in live)] for s in group if not s.finished]
        fed += [s.tokens[:-1] for s in waiting]  # what a child will see stays in the cache
        cached = max(cached, len({tuple(tokens[: i + 1]) for tokens in fed for i in range(len(tokens))}))
        for s in live:
            attended.append(len(s.tokens))
            token, logprob, gap = reference.autoregressive(stock, s.tokens, 1, never)[0]
            x = rule(s.tokens[-1], len(s.tokens) - 1, token)
            if s.tokens[-1] == FORK:
                copy = Sequence([*s.tokens, CHILD], Node(len(s.tokens)))
                copy.node.sequence = copy
                node = Node(len(s.tokens), s)
                s.node.end, s.node.next_sibling, s.node.first_child = len(s.tokens), node, copy.node
                s.node = node
                waiting.append(copy)
            s.tokens.append(x)
            s.node.picked.append((x, logprob, gap))
            s.finished = x == EOS
            while waiting and sum(not s.finished for s in group) < max_threads and used + 2 <= most:
                used += 1
                group.append(waiting.pop(0))
    for child in waiting:  # never began
        child.tokens.pop()
    return root, group, steps, attended, cached


def in_order(node: Node | None) -> list[Node]:
    return [] if node is None else [node, *in_order(node.first_child), *in_order(node.next_sibling)]


def compare(answer: AparAnswer, expected, atol=1e-3) -> None:
    root, group, steps, attended, cached = expected
    nodes, paragraphs = in_order(root), list(restore(answer.root))
    assert len(nodes) == len(paragraphs)
    for node, paragraph in zip(nodes, paragraphs, strict=True):
        assert paragraph.tokens == node.sequence.tokens[node.start : node.end]
        given = paragraph.tokens[:1] == [CHILD]
        assert len(paragraph.logprobs) == len(paragraph.tokens)
        agree_steered(node.picked, paragraph.tokens[given:], paragraph.logprobs[given:], atol)
        assert (paragraph.first_child is None) == (node.first_child is None)
    text = [t for node in nodes for t in node.sequence.tokens[node.start : node.end] if t not in (FORK, CHILD, EOS)]
    assert answer.tokens == text
    assert len(answer.logprobs) == len(text)
    assert answer.threads == len(group)
    unstarted = sum(node.sequence not in group for node in nodes)
    assert answer.unstarted_threads == unstarted
    assert answer.stopped == (all(s.finished for s in group) and not unstarted)
    assert answer.cost.steps == steps
    assert answer.cost.max_cached_tokens == cached
    assert answer.cost.attended_tokens == pytest.approx(sum(attended) / len(attended))


def agree_steered(picked, tokens, logprobs, atol) -> None:
    """Log-probabilities are those of what the model said; a rule that replaced it keeps them."""
    assert tokens == [t for t, _, _ in picked]
    assert logprobs == pytest.approx([p for _, p, _ in picked], abs=atol)


@pytest.mark.parametrize("kind", FEW_FAMILIES)
def test_threads_equal_threads_alone_beside_other_programs(kind):
    model, stock = pair(kind)
    prompts = prompts_of(2, 3, 15, 3)
    expected = [from_scratch(stock, p.tokens, 40) for p in prompts]
    engine = Engine(model, max_num_seqs=4, max_num_batched_tokens=24)
    answers = beside_others(engine, stock, [forked(p, 40) for p in prompts], prompts[0])
    for answer, want in zip(answers, expected, strict=True):
        compare(answer, want)
    assert sum(answer.threads for answer in answers) > 6
    assert any(p.first_child and p.first_child.first_child for a in answers for p in restore(a.root)), "nested forks"


def test_float64_and_the_independent_interpreter_of_feeds():
    model, stock = pair("qwen3")
    model, stock = in_float64(model), in_float64(stock)
    prompts = prompts_of(4, 2, 15, 3)
    for prompt, answer in zip(prompts, Engine(model, max_num_seqs=3).run(forked(p, 40) for p in prompts), strict=True):
        compare(answer, from_scratch(stock, prompt.tokens, 40), atol=1e-9)
        replayed = Replay(stock).run(forked(prompt, 40))
        assert replayed.tokens == answer.tokens
        assert replayed.logprobs == pytest.approx(answer.logprobs, abs=1e-9)


def test_rows_fed_again_after_losing_their_cache():
    model, stock = pair("llama")
    prompts = prompts_of(5, 5, 15, 3)
    engine = Engine(model, max_num_seqs=5, max_num_batched_tokens=40, cache_tokens=320)
    for prompt, answer in zip(prompts, engine.run(forked(p, 45) for p in prompts), strict=True):
        compare(answer, from_scratch(stock, prompt.tokens, 45))


# ------------------------------------------------------------------------------------------------------------ by hand


def scripted(program, said: dict[tuple[int, ...], int], prompt: list[int]):
    """Answers feeds from a table {path of a thread behind the prompt: next token}; returns (answer, feeds)."""
    rows, alive, reach = [], set(), {(0, 0): 2}

    def answer(feed) -> list[int]:
        nonlocal alive
        alive -= set(feed.drop)
        reach.update(feed.reach)
        first = len(rows)
        rows.extend(zip(feed.tokens, feed.positions, feed.segments or [0] * len(feed.tokens), strict=True))
        alive |= set(range(first, len(rows)))
        tokens = []
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
    assert (answer.stopped, answer.threads, answer.unstarted_threads) == (True, 3, 0)
    # after the prompt: 10; F; then 20 beside the first child; ...
    assert [list(f.tokens) for f in feeds[1:]] == [[10], [F], [20, C], [F, 11], [30, C], [21], [22]]
    assert [list(f.positions) for f in feeds[1:]] == [[3], [4], [5, 5], [6, 6], [7, 7], [8], [9]]
    # row indices: prompt 0-2, 10:3, F:4, 20:5, C:6, F:7, 11:8, 30:9, C:10, 21:11
    assert [sorted(f.drop) for f in feeds] == [[], [], [], [], [], [6, 8], [9], []]
    # the cache grows to 9, gives up the first child (2), takes 2, gives up the paragraph 30, takes 1, 1
    assert answer.cost.max_cached_tokens == 10
    assert answer.cost.steps == 8
    assert answer.cost.attended_tokens == pytest.approx((3 + 4 + 5 + 6 + 6 + 7 + 7 + 8 + 8 + 9 + 10) / 11)
    # flattened: 6 tokens and an end behind 3 of prompt
    assert answer.flattened.steps == 7
    assert answer.flattened.max_cached_tokens == 9
    assert answer.flattened.attended_tokens == pytest.approx((3 + 4 + 5 + 6 + 7 + 8 + 9) / 7)


def test_a_nested_child_outlives_its_parent_thread():
    """What the grandchild sees stays; it is released with the grandchild, and all threads end."""
    F, C, E = FORK, CHILD, EOS
    said = {
        (): F, (F,): 20, (F, 20): 21, (F, 20, 21): 22, (F, 20, 21, 22): 23, (F, 20, 21, 22, 23): 24,
        (F, 20, 21, 22, 23, 24): 25, (F, 20, 21, 22, 23, 24, 25): E,
        (F, C): F, (F, C, F): E,  # forks and ends at once
        (F, C, F, C): 31, (F, C, F, C, 31): E,
    }  # fmt: skip
    answer, feeds = scripted(apar(Prompt([7, 8]), 50, F, C, ENDS), said, [7, 8])
    assert [p.tokens for p in restore(answer.root)] == [[F], [C, F], [C, 31, E], [E], [20, 21, 22, 23, 24, 25, E]]
    # rows: 7 8 F:2 | 20:3 C:4 | 21:5 F:6 | 22:7 C:8 | 23:9 31:10 | then the whole branch goes
    assert [sorted(f.drop) for f in feeds if f.drop] == [[4, 6, 8, 10]]


@pytest.mark.parametrize("max_threads", [1, 2, 3])
def test_a_child_beyond_the_threads_waits_and_nothing_of_it_is_lost(max_threads):
    """Five points, each forked: whatever may run at the same time, the text and the tree are those of all at once."""
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
    assert (narrow.stopped, narrow.threads, narrow.unstarted_threads) == (True, 6, 0)
    assert max(len(feed.sample_at) for feed in feeds) == max_threads


@pytest.mark.parametrize("max_threads", [1, 2, 3])
def test_waiting_children_equal_threads_alone(max_threads):
    """Random nested forks, of apar and of the independent replay, against algorithm 1 written out with a queue."""
    model, stock = pair("llama")
    model, stock = in_float64(model), in_float64(stock)
    prompts = prompts_of(6, 3, 15, 3)
    programs = [forked(p, 60, max_threads) for p in prompts]
    for prompt, answer in zip(
        prompts, Engine(model, max_num_seqs=2, max_num_batched_tokens=30).run(programs), strict=True
    ):
        compare(answer, from_scratch(stock, prompt.tokens, 60, max_threads), atol=1e-9)
        replayed = Replay(stock).run(forked(prompt, 60, max_threads))
        assert (replayed.tokens, replayed.cost) == (answer.tokens, answer.cost)


def test_children_that_never_began_are_no_end():
    """The main thread ends with the last token; its child had none: the answer was cut, and says so."""
    said = {(): 10, (10,): FORK, (10, FORK): EOS}
    answer, _ = scripted(apar(Prompt([7, 8]), 4, FORK, CHILD, ENDS, max_threads=1), said, [7, 8])
    assert [p.tokens for p in restore(answer.root)] == [[10, FORK], [], [EOS]]
    assert (answer.stopped, answer.threads, answer.unstarted_threads) == (False, 1, 1)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 13, 30])
def test_budget_is_kept_and_positions_stay_within_it(most):
    forever = lambda token, position, predicted: FORK if token != FORK else 50  # noqa: E731
    model, _ = pair("llama")
    seen = []

    program = steered(apar(Prompt([5, 6, 7]), most, FORK, CHILD, ENDS), forever)
    answer = Engine(model).run([changed(program, lambda feed, _: seen.extend(feed.positions))])[0]
    assert sum(len(p.tokens) for p in restore(answer.root)) == most
    assert max(seen, default=0) < 3 + most
    assert not answer.stopped


def test_no_tokens_at_all():
    answer = Engine(pair("llama")[0]).run([apar(Prompt([5, 6, 7]), 0, FORK, CHILD, ENDS)])[0]
    assert (answer.tokens, answer.stopped, answer.cost.steps) == ([], False, 0)


def test_a_fork_that_ends_a_prompt_is_acted_on():
    """Line 19 looks at the last token, whoever wrote it."""
    said = {(): 10, (10,): EOS, (CHILD,): 11, (CHILD, 11): EOS}
    answer, _ = scripted(apar(Prompt([7, FORK]), 50, FORK, CHILD, ENDS), said, [7, FORK])
    assert [p.tokens for p in restore(answer.root)] == [[], [CHILD, 11, EOS], [10, EOS]]


def test_restore_of_a_long_chain():
    root = Paragraph([0])
    last = root
    for i in range(1, 5000):
        last.next_sibling = Paragraph([i])
        last = last.next_sibling
    assert [p.tokens[0] for p in restore(root)] == list(range(5000))
    assert len(repr(root)) < 100
