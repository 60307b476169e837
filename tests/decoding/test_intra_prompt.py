"""IPPD's positions against the paper's equations. test_exactness.py has its answers, and with them its mask."""

from __future__ import annotations

import pytest

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Continuation
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, header, intra_prompt
from raypd.decoding.program import Predictions
from tests.decoding.cases import pair, seventh


def test_header_is_that_of_equations_1_to_5():
    prompt = PromptTree([9, 9], [Context([1] * 3, [Question([2] * 2, seventh), Question([3], seventh)]),
                                 Context([4], []), Context([5], [Question([6] * 2, seventh)])])  # fmt: skip
    head = header(prompt)
    # the second context has no question, so nobody would read it
    assert head.tokens == [9, 9, 1, 1, 1, 2, 2, 3, 5, 6, 6]
    assert head.positions == [0, 1, 2, 3, 4, 5, 6, 5, 2, 3, 4]
    assert head.segments == [0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 5]
    assert (head.ends, head.owns) == ([6, 7, 10], [2, 3, 5])


def test_steps_positions_and_segments():
    """Driven by hand: answers stand behind their question, and finished ones stop feeding."""
    rule = {"stops": lambda tokens: tokens[-1] == 0}
    prompt = PromptTree([1], [Context([2, 2], [Question([3], **rule), Question([4, 4], **rule)])])
    program = intra_prompt(prompt, 3)
    feed = next(program)
    assert (list(feed.sample_at), feed.shared, feed.allowed_token_ids) == ([3, 5], 1, None)
    feed = program.send(Predictions([7, 8], [-1.0, -2.0]))
    assert (feed.tokens, feed.positions, feed.segments) == ([7, 8], [4, 5], [2, 3])
    feed = program.send(Predictions([0, 8], [-1.0, -2.0]))
    assert (feed.tokens, feed.positions, feed.segments) == ([8], [6], [3])
    with pytest.raises(StopIteration) as end:
        program.send(Predictions([9], [-3.0]))
    assert end.value.value == [
        Continuation([7, 0], [-1.0, -1.0], True),
        Continuation([8, 8, 9], [-2.0, -2.0, -3.0], False),
    ]


def test_nothing_to_answer_and_nothing_to_ask():
    model, _ = pair("llama")
    assert Engine(model).run([intra_prompt(PromptTree([1, 2], [Context([3], [])]), 5)]) == [[]]
    with pytest.raises(ValueError, match="no token"):
        Engine(model).run([intra_prompt(PromptTree([1], [Context([3], [Question([], seventh)])]), 5)])
