"""IPPD's mask against the paper's equations. test_exactness.py has its answers."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypd.decoding.engine import Engine
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, header, intra_prompt
from raypd.decoding.visibility import grown, one_segment, visible
from tests.decoding.cases import pair, seventh, tree_of
from tests.decoding.drivers import INSTRUCTION


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_mask_is_that_of_equations_6_to_9(seed, contexts):
    prompt = tree_of(random.Random(seed), contexts, INSTRUCTION[: seed % 5])
    head = header(prompt)
    context_of, question_of = [0] * len(prompt.instruction), [0] * len(prompt.instruction)
    for j, context in enumerate((c for c in prompt.contexts if c.questions), 1):
        context_of += [j] * len(context.tokens)
        question_of += [0] * len(context.tokens)
        for k, q in enumerate(context.questions, 1):
            context_of += [j] * len(q.tokens)
            question_of += [k] * len(q.tokens)
    position, context, asked = np.array(head.positions), np.array(context_of), np.array(question_of)
    causal = position[:, None] >= position[None, :]
    same_context = (context[:, None] == context[None, :]) | (context[None, :] == 0)
    same_question = (asked[:, None] == asked[None, :]) | (asked[None, :] == 0)
    segments = np.array(head.segments)
    seen = visible(grown(one_segment(), head.reach), segments, position, segments, position)
    assert (seen == (causal & same_context & same_question)).all()


def test_nothing_to_answer_and_nothing_to_ask():
    model, _ = pair("llama")
    assert Engine(model).run([intra_prompt(PromptTree([1, 2], [Context([3], [])]), 5)]) == [[]]
    with pytest.raises(ValueError, match="no token"):
        Engine(model).run([intra_prompt(PromptTree([1], [Context([3], [Question([], seventh)])]), 5)])
