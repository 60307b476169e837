"""Skeleton of thought by hand; test_exactness.py has every point against a prompt of its own."""

import pytest

from raypd.decoding.engine import Engine
from raypd.decoding.methods.skeleton_of_thought import (
    SkeletonAnswer,
    points_of,
    skeleton_of_thought,
)
from raypd.decoding.program import Feed, Program
from raypd.decoding.text import Prompt
from tests.decoding.cases import ENDS, EOS, decode, follows_instructions, pair, request
from tests.decoding.drivers import drive

SKELETON = [*b"1. a\n2. b", EOS]


def run_by_hand(
    program: Program[SkeletonAnswer], *predicted: list[int]
) -> tuple[SkeletonAnswer, list[Feed]]:
    """The answer and the feeds of a program whose predictions are given, one list per pass."""
    unused = list(predicted)
    answer, feeds = drive(program, lambda feed: unused.pop(0))
    assert [len(feed.sample_at) for feed in feeds] == [len(tokens) for tokens in predicted]
    return answer, feeds


def test_points_are_decoded_side_by_side_behind_the_skeleton():
    program = skeleton_of_thought(
        Prompt([5, 6]), 50, lambda point: [90 + point.number] * point.number, decode, ENDS
    )
    skeleton = [[token] for token in SKELETON]
    answer, feeds = run_by_hand(program, *skeleton, [65, 66], [EOS, 67], [68], [EOS])
    passes = feeds[len(skeleton) :]
    assert [list(feed.tokens) for feed in passes] == [
        [91, 92, 92],
        [65, 66],
        [67],
        [68],
    ]
    # The skeleton ends at position 10; both points go on from there.
    assert [list(feed.positions) for feed in passes] == [
        [11, 11, 12],
        [12, 13],
        [14],
        [15],
    ]
    assert [list(feed.segments) for feed in passes] == [
        [1, 2, 2],
        [1, 2],
        [2],
        [2],
    ]
    assert answer.text == "1. a A\n2. b BCD"
    assert answer.cut is None
    assert answer.content_tokens == 9 + 1 + 3
    assert answer.steps == 10 + 4
    assert answer.longest_path == 10 + 4


def test_the_last_token_of_a_cut_skeleton_is_fed_before_the_points():
    program = skeleton_of_thought(
        Prompt([5]), 50, lambda point: [90], decode, ENDS, max_skeleton_tokens=6
    )
    skeleton = [[token] for token in b"1. a\n2"]
    answer, feeds = run_by_hand(program, *skeleton, [EOS])
    # The line that was cut is no point.
    assert [point.heading for point in answer.points] == ["a"]
    assert list(feeds[-1].tokens) == [ord("2"), 90]
    assert list(feeds[-1].positions) == [6, 7]
    assert list(feeds[-1].segments) == [0, 1]


def test_what_the_prompt_begins_is_part_of_the_skeleton():
    program = skeleton_of_thought(Prompt([5]), 50, lambda point: [90], decode, ENDS, beginning="1.")
    answer, _ = run_by_hand(program, [ord("a")], [EOS], [ord("b")], [EOS])
    assert answer.text == "1. a b"


@pytest.mark.parametrize(
    ("max_new_tokens", "lengths"), [(10, [0, 0]), (11, [1, 0]), (12, [1, 1]), (15, [3, 2])]
)
def test_the_earlier_points_have_the_tokens_that_are_left(max_new_tokens, lengths):
    program = skeleton_of_thought(Prompt([5, 6]), max_new_tokens, request, decode, ENDS)
    steered = follows_instructions(program, SKELETON, points_end=False)
    (answer,) = Engine(pair("llama")[0]).run([steered])
    assert [len(point.tokens) for point in answer.points] == lengths
    assert len(answer.skeleton) + sum(lengths) == max_new_tokens
    assert answer.cut is not None


def test_points_are_numbered_lines():
    points = points_of("Skeleton:\n1. a b\n 2)c\n3.\nx 4. d\n1234. e")
    assert [(point.number, point.heading) for point in points] == [(1, "a b"), (2, "c")]


@pytest.mark.parametrize(
    ("predicted", "max_new_tokens", "max_point_tokens", "text", "cut"),
    [
        # Without points the skeleton is the text.
        ([[ord("x")], [EOS]], 50, 9, "x", None),
        ([[ord("x")]], 1, 9, "x", 1),
        ([*([t] for t in SKELETON), [*b"xy"], [EOS, EOS]], 50, 9, "1. a x\n2. b y", None),
        # The text is cut at the end of the first point that is.
        ([*([t] for t in SKELETON), [*b"xy"], [ord("x"), EOS]], 50, 2, "1. a xx\n2. b y", 7),
    ],
)
def test_where_an_answer_is_cut(predicted, max_new_tokens, max_point_tokens, text, cut):
    program = skeleton_of_thought(
        Prompt([5]), max_new_tokens, request, decode, ENDS, max_point_tokens=max_point_tokens
    )
    answer, _ = run_by_hand(program, *predicted)
    assert answer.text == text
    assert answer.cut == cut


def test_a_request_must_hold_a_token():
    program = skeleton_of_thought(Prompt([5]), 50, lambda point: [], decode, ENDS)
    with pytest.raises(ValueError, match="request gives no tokens"):
        run_by_hand(program, *([token] for token in SKELETON), [65, 66])
