"""Skeleton of thought: the outline is autoregressive, and every point equals a prompt of its own."""

from __future__ import annotations

import random

import pytest

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.skeleton_of_thought import POINT_REQUEST, points_of, skeleton_of_thought
from tests.decoding import reference
from tests.decoding.drivers import INSTRUCTION, changed, drive, tokens_of
from tests.decoding.reference import Replay
from tests.decoding.test_exactness import agree, pair

EOS = 2
ENDS = frozenset([EOS])
OUTLINE = list(b"1. Sleep\n2) Eat well \nno point\n 10. Move")
EXPECTED = [(1, "Sleep"), (2, "Eat well"), (10, "Move")]


def decode(tokens) -> str:
    return bytes(t for t in tokens if t < 128).decode()


def expand(point) -> list[int]:
    return list(POINT_REQUEST.format(index=point.number)[:21].encode()) + list(
        f"{point.number}. {point.heading}".encode()
    )


def scripted(program, outline=(*OUTLINE, EOS), ending=True):
    """The outline is what a model that follows instructions writes; a point ends at a multiple of 7, or never."""
    left = list(outline)

    def write(feed, predictions) -> None:
        if left:
            predictions.tokens[0] = left.pop(0)
        else:
            predictions.tokens[:] = [(EOS if t % 7 == 0 else t) if ending else 65 for t in predictions.tokens]

    return changed(program, write)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "mistral", "gemma2", "olmo2"])
def test_points_equal_prompts_of_their_own(kind):
    model, stock = pair(kind)
    rng = random.Random(4)
    prompts = [Prompt(INSTRUCTION + tokens_of(rng, 1, 9), shared=23 if i else 0) for i in range(2)]
    stop = lambda tokens: tokens[-1] % 7 == 0  # noqa: E731
    programs = [scripted(skeleton_of_thought(p, 120, expand, decode, ENDS, max_point_tokens=6)) for p in prompts]
    programs.append(autoregressive(prompts[0], 9, stop))
    *answers, plain = Engine(model, max_num_seqs=3, max_num_batched_tokens=21).run(programs)
    agree(reference.autoregressive(stock, prompts[0].tokens, 9, stop), plain.tokens, plain.logprobs)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.outline == [*OUTLINE, EOS]
        assert [(p.number, p.heading) for p in answer.points] == EXPECTED
        for point in answer.points:
            alone = [*prompt.tokens, *OUTLINE, *expand(point)]
            expected = reference.autoregressive(stock, alone, 6, stop)
            expected = [(EOS if t % 7 == 0 else t, p, gap) for t, p, gap in expected]
            agree(expected, point.tokens, point.logprobs)
            assert point.stopped == (point.tokens[-1] == EOS)
        longest = max(len(p.tokens) for p in answer.points)
        assert answer.steps == answer.longest_path == len(OUTLINE) + 1 + longest
        assert answer.stopped == all(p.stopped for p in answer.points)
        assert answer.text == "\n".join(
            f"{p.number}. {p.heading} {decode(t for t in p.tokens if t != EOS).strip()}".strip() for p in answer.points
        )
    assert len({len(p.tokens) for a in answers for p in a.points}) > 1


def test_the_independent_interpreter_of_feeds():
    model, stock = pair("qwen3")
    prompt = Prompt(INSTRUCTION)
    ours = Engine(model).run([scripted(skeleton_of_thought(prompt, 60, expand, decode, ENDS))])[0]
    theirs = Replay(stock).run(scripted(skeleton_of_thought(prompt, 60, expand, decode, ENDS)))
    assert ours.text == theirs.text
    assert [p.tokens for p in ours.points] == [p.tokens for p in theirs.points]


def test_an_outline_that_goes_on_is_cut_and_written_out():
    model, stock = pair("qwen3")
    prompt = Prompt(INSTRUCTION, shared=20)
    cut = len(OUTLINE) - 2  # "10. Mo" is no point
    programs = [scripted(skeleton_of_thought(prompt, 90, expand, decode, ENDS, max_outline_tokens=cut), OUTLINE[:cut])]
    answer = Engine(model, max_num_batched_tokens=16).run(programs)[0]
    assert answer.outline == OUTLINE[:cut]
    assert [(p.number, p.heading) for p in answer.points] == EXPECTED[:2]
    assert not answer.stopped
    for point in answer.points:
        alone = [*prompt.tokens, *answer.outline, *expand(point)]
        expected = reference.autoregressive(stock, alone, len(point.tokens), lambda tokens: tokens[-1] % 7 == 0)
        agree([(EOS if t % 7 == 0 else t, p, gap) for t, p, gap in expected], point.tokens, point.logprobs)


def scripted_steps(program, *steps):
    """Answers the feeds with the given tokens, one list a step."""
    left = [list(tokens) for tokens in steps]
    answer, feeds = drive(program, lambda feed: left.pop(0))
    assert [len(feed.sample_at) for feed in feeds] == [len(tokens) for tokens in steps]
    return answer, feeds


def test_by_hand():
    """Positions, and what leaves the cache when."""
    expands = lambda point: [90 + point.number] * point.number  # noqa: E731
    program = skeleton_of_thought(Prompt([5, 6]), 50, expands, decode, ENDS, begun="1.")
    outline = [*b" a\n2. b", EOS]
    answer, feeds = scripted_steps(program, *([t] for t in outline), [65, 66], [EOS, 67], [68], [EOS])
    points = feeds[len(outline) :]
    assert [list(f.tokens) for f in points] == [[91, 92, 92], [65, 66], [67], [68]]
    assert [list(f.positions) for f in points] == [[9, 9, 10], [10, 11], [12], [13]]
    assert [list(f.segments) for f in points] == [[1, 2, 2], [1, 2], [2], [2]]
    assert [list(f.drop) for f in points] == [[], [], [9, 12], []]
    assert answer.text == "1. a A\n2. b BCD"
    assert answer.stopped
    assert answer.content_tokens == 7 + 1 + 3


@pytest.mark.parametrize(("most", "begun"), [(8, []), (9, [1]), (10, [1, 1]), (13, [3, 2])])
def test_budget_is_kept(most, begun):
    """An outline of 8 tokens; then the earlier points have what is left."""
    outline = [*b"1.a\n2.b", EOS]
    model, _ = pair("llama")
    steered = scripted(skeleton_of_thought(Prompt([5, 6]), most, expand, decode, ENDS), outline, ending=False)
    answer = Engine(model).run([steered])[0]
    assert len(answer.outline) + sum(len(p.tokens) for p in answer.points) == most
    assert [len(p.tokens) for p in answer.points if p.tokens] == begun
    assert not answer.stopped


def test_an_outline_without_points_is_the_answer():
    answer, _ = scripted_steps(skeleton_of_thought(Prompt([5]), 50, expand, decode, ENDS), [ord("x")], [EOS])
    assert (answer.text, answer.points, answer.stopped) == ("x", [], True)
    answer, _ = scripted_steps(skeleton_of_thought(Prompt([5]), 4, expand, decode, ENDS), *([c] for c in b"1. a"))
    assert (answer.text, answer.points, answer.stopped) == ("1. a", [], False)


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
    assert (answer.text, answer.cut, answer.stopped) == ("1. a x\n2. b y", None, True)
    program = skeleton_of_thought(Prompt([5]), 50, expand, decode, ENDS, **options)
    answer, _ = scripted_steps(program, *outline, [one, other], [one, EOS])
    assert (answer.text[: answer.cut], answer.stopped) == ("1. a xx", False)
    program = skeleton_of_thought(Prompt([5]), 50, expand, decode, ENDS, max_points=1)
    answer, _ = scripted_steps(program, *outline, [one], [EOS])
    assert (answer.text[: answer.cut], answer.text, answer.stopped) == ("1. a x", "1. a x", False)
