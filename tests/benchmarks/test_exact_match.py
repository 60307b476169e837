"""The exact-match table: what differs, where, and by how much."""

import numpy as np
import pytest
import torch

from benchmarks import exact_match
from benchmarks.exact_match import Difference, ExactMatch, Reference, difference, with_gaps
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Continuation, Prompt, autoregressive
from raypd.decoding.sampling import AllowedTokens
from raypd.models.load import LoadedModel
from tests.decoding import reference
from tests.decoding.cases import pair
from tests.runs import says
from tests.tasks.test_question_answering import RAGGED
from tests.tiny import tiny_model, tiny_tokenizer


def loaded(dtype=torch.float32) -> LoadedModel:
    model = tiny_model("llama", max_position_embeddings=4096).to(dtype)
    return LoadedModel(model, tiny_tokenizer(), "tiny", dtype, torch.device("cpu"), 4096)


def test_gaps_and_the_first_difference_are_those_of_the_reference():
    model, stock = pair("llama")
    allow = lambda tokens: AllowedTokens(np.arange(60, 90)) if len(tokens) == 2 else None  # noqa: E731
    (found,) = Engine(model).run(
        [with_gaps(autoregressive(Prompt([5, 6, 7]), 6, lambda tokens: False, allow))]
    )
    expected = reference.autoregressive(stock, [5, 6, 7], 6, lambda tokens: False, allow)
    assert found.tokens == [t for t, _, _ in expected]
    assert found.gaps == pytest.approx([gap for _, _, gap in expected], abs=1e-4)
    of = Reference([1, 2, 3], [0.5, 0.25, 2.0])
    assert difference(of, [1, 2, 3]) is None
    assert difference(of, [1, 5, 3]) == Difference(1, 0.25)
    assert difference(of, [1, 2]) == Difference(2, 2.0)


def test_both_forms_agree_in_float64():
    outcomes = ExactMatch(loaded(torch.float64), 2, 6).compare(RAGGED, 3)
    asked = [f"{outcome.context} {outcome.question}" for outcome in outcomes]
    assert asked == ["id0 0", "id0 b", "id1 0", "id2 0", "id2 1", "id2 2", "id3 7"]
    assert all(o.differences == {"IPPD": None, "batch 3": None} for o in outcomes)
    assert all(o.tokens > 0 for o in outcomes)


def test_a_form_that_answers_otherwise_is_seen(monkeypatch):
    """IPPD one token off: the table counts it, and only it."""
    match = ExactMatch(loaded(), 2, 6)
    run = match.run

    def spoiled(*given):
        answers = run(*given)
        if not isinstance(answers[0], (Continuation, Reference)):
            answers[0][0].tokens[-1] += 1
        return answers

    monkeypatch.setattr(match, "run", spoiled)
    outcomes = match.compare(RAGGED, 3)
    assert [o.differences["IPPD"] is None for o in outcomes] == [False] + [True] * 6
    text = exact_match.table("data", "float32", outcomes)
    says(
        text,
        "data float32: 4 contexts, 7 questions",
        "IPPD: 6 of 7 equal (85.7%)",
        "batch 3: 7 of 7 equal (100.0%)",
        f"id0 0: token {outcomes[0].tokens} of {outcomes[0].tokens}, gap",
    )
