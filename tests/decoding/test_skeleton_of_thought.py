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
    expands = lambda point: [90 + point.number] * point.number  # noqa: E731
    program = skeleton_of_thought(Prompt([5, 6]), 50, expands, decode, ENDS)
    outline = [*b"1. a\n2. b", EOS]
    answer, feeds = scripted_steps(program, *([t] for t in outline), [65, 66], [EOS, 67], [68], [EOS])
    points = feeds[len(outline) :]
    assert [list(f.tokens) for f in points] == [[91, 92, 92], [65, 66], [67], [68]]
    assert [list(f.positions) for f in points] == [[11, 11, 12], [12, 13], [14], [15]]
    assert [list(f.segments) for f in points] == [[1, 2, 2], [1, 2], [2], [2]]
    assert [list(f.drop) for f in points] == [[], [], [11, 14], []]
    assert (answer.text, answer.cut, answer.content_tokens) == ("1. a A\n2. b BCD", None, 9 + 1 + 3)


@pytest.mark.parametrize(("most", "begun"), [(8, []), (9, [1]), (10, [1, 1]), (13, [3, 2])])
def test_budget_is_kept(most, begun):
    """An outline of 8 tokens; then the earlier points have what is left."""
    outline = [*b"1.a\n2.b", EOS]
    steered = outlined(skeleton_of_thought(Prompt([5, 6]), most, expand, decode, ENDS), outline, ending=False)
    answer = Engine(pair("llama")[0]).run([steered])[0]
    assert len(answer.outline) + sum(len(p.tokens) for p in answer.points) == most
    assert [len(p.tokens) for p in answer.points if p.tokens] == begun
    assert answer.cut is not None


def test_points():
    points = points_of("Outline:\n1. a b\n 2)c\n3.\nx 4. d\n1234. e")
    assert [(p.number, p.heading) for p in points] == [(1, "a b"), (2, "c")]


OUTLINE = [*([c] for c in b"1. a\n2. b"), [EOS]]


@pytest.mark.parametrize(
    ("steps", "most", "options", "text", "cut", "points"),
    [  # cut at the end of the first point that was; at the end of all where points are missing
        ([[ord("x")], [EOS]], 50, {}, "x", None, 0),
        ([[c] for c in b"1. a"], 4, {}, "1. a", 4, 0),
        ([*OUTLINE, [*b"xy"], [EOS, EOS]], 50, {}, "1. a x\n2. b y", None, 2),
        ([*OUTLINE, [*b"xy"], [ord("x"), EOS]], 50, {"max_point_tokens": 2}, "1. a xx\n2. b y", 7, 2),
        ([*OUTLINE, [ord("x")], [EOS]], 50, {"max_points": 1}, "1. a x", 6, 1),
    ],
)
def test_where_an_answer_was_cut(steps, most, options, text, cut, points):
    answer, _ = scripted_steps(skeleton_of_thought(Prompt([5]), most, expand, decode, ENDS, **options), *steps)
    assert (answer.text, answer.cut, len(answer.points)) == (text, cut, points)
