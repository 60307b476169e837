"""Skeleton of thought by hand. test_exactness.py has every point against a prompt of its own."""

from __future__ import annotations

import pytest

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt
from raypd.decoding.methods.skeleton_of_thought import points_of, skeleton_of_thought
from tests.decoding.cases import ENDS, EOS, decode, expand, outlined, pair
from tests.decoding.drivers import drive


def scripted_steps(program, *steps):
    """Answers the feeds with the given tokens, one list a step."""
    left = [list(tokens) for tokens in steps]
    answer, feeds = drive(program, lambda feed: left.pop(0))
    assert [len(feed.sample_at) for feed in feeds] == [len(tokens) for tokens in steps]
    return answer, feeds


def test_by_hand():
    """Positions, and what leaves the cache when."""
    expands = lambda point: [90 + point.number] * point.number  # noqa: E731
    program = skeleton_of_thought(Prompt([5, 6]), 50, expands, decode, ENDS)
    outline = [*b"1. a\n2. b", EOS]
    answer, feeds = scripted_steps(program, *([t] for t in outline), [65, 66], [EOS, 67], [68], [EOS])
    points = feeds[len(outline) :]
    assert [list(f.tokens) for f in points] == [[91, 92, 92], [65, 66], [67], [68]]
    assert [list(f.positions) for f in points] == [[11, 11, 12], [12, 13], [14], [15]]
    assert [list(f.segments) for f in points] == [[1, 2, 2], [1, 2], [2], [2]]
    assert [list(f.drop) for f in points] == [[], [], [11, 14], []]
    assert answer.text == "1. a A\n2. b BCD"
    assert answer.cut is None
    assert answer.content_tokens == 9 + 1 + 3


@pytest.mark.parametrize(("most", "begun"), [(8, []), (9, [1]), (10, [1, 1]), (13, [3, 2])])
def test_budget_is_kept(most, begun):
    """An outline of 8 tokens; then the earlier points have what is left."""
    outline = [*b"1.a\n2.b", EOS]
    model, _ = pair("llama")
    steered = outlined(skeleton_of_thought(Prompt([5, 6]), most, expand, decode, ENDS), outline, ending=False)
    answer = Engine(model).run([steered])[0]
    assert len(answer.outline) + sum(len(p.tokens) for p in answer.points) == most
    assert [len(p.tokens) for p in answer.points if p.tokens] == begun
    assert answer.cut is not None


def test_an_outline_without_points_is_the_answer():
    answer, _ = scripted_steps(skeleton_of_thought(Prompt([5]), 50, expand, decode, ENDS), [ord("x")], [EOS])
    assert (answer.text, answer.points, answer.cut is None) == ("x", [], True)
    answer, _ = scripted_steps(skeleton_of_thought(Prompt([5]), 4, expand, decode, ENDS), *([c] for c in b"1. a"))
    assert (answer.text, answer.points, answer.cut is None) == ("1. a", [], False)


def test_points():
    assert [(p.number, p.heading) for p in points_of("Outline:\n1. a b\n 2)c\n3.\nx 4. d\n1234. e")] == [
        (1, "a b"),
        (2, "c"),
    ]


def test_where_an_answer_was_cut():
    """At the end of the first point that was; at the end of all where points are missing."""
    outline = [*([c] for c in b"1. a\n2. b"), [EOS]]
    one, other = ord("x"), ord("y")
    options = {"max_point_tokens": 2}
    answer, _ = scripted_steps(
        skeleton_of_thought(Prompt([5]), 50, expand, decode, ENDS), *outline, [one, other], [EOS, EOS]
    )
    assert (answer.text, answer.cut) == ("1. a x\n2. b y", None)
    program = skeleton_of_thought(Prompt([5]), 50, expand, decode, ENDS, **options)
    answer, _ = scripted_steps(program, *outline, [one, other], [one, EOS])
    assert answer.text[: answer.cut] == "1. a xx"
    program = skeleton_of_thought(Prompt([5]), 50, expand, decode, ENDS, max_points=1)
    answer, _ = scripted_steps(program, *outline, [one], [EOS])
    assert (answer.text, answer.cut) == ("1. a x", 6)
