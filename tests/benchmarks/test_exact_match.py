"""The exact-match table: which answers differ, where, and by which gap."""

import numpy as np
import pytest
import torch

from benchmarks import exact_match
from benchmarks.exact_match import Difference, ExactMatch, Reference, difference, with_gaps
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Continuation, autoregressive
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.text import Prompt
from raypd.models.load import LoadedModel
from tests.decoding import reference
from tests.decoding.cases import pair
from tests.runs import says
from tests.tasks.test_question_answering import RAGGED
from tests.tiny import tiny_model, tiny_tokenizer


def loaded(dtype=torch.float32) -> LoadedModel:
    model = tiny_model("llama", max_position_embeddings=4096).to(dtype)
    return LoadedModel(model, tiny_tokenizer(), "tiny", dtype, torch.device("cpu"), 4096)


def never_stop(tokens):
    return False


def limit_the_third(tokens):
    return AllowedTokens(np.arange(60, 90)) if len(tokens) == 2 else None


def test_gaps_are_those_of_the_unmodified_model():
    model, stock = pair("llama")
    program = autoregressive(Prompt([5, 6, 7]), 6, never_stop, limit_the_third)
    (answer,) = Engine(model).run([with_gaps(program)])
    expected = reference.autoregressive(stock, [5, 6, 7], 6, never_stop, limit_the_third)
    assert answer.tokens == [token for token, _, _ in expected]
    assert answer.gaps == pytest.approx([gap for _, _, gap in expected], abs=1e-4)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([1, 2, 3], None), ([1, 5, 3], Difference(1, 0.25)), ([1, 2], Difference(2, 2.0))],
)
def test_a_difference_is_the_first_token_that_differs(tokens, expected):
    assert difference(Reference([1, 2, 3], [0.5, 0.25, 2.0]), tokens) == expected


def test_both_forms_agree_in_float64():
    outcomes = ExactMatch(loaded(torch.float64), 2, 6).compare(RAGGED, 3)
    questions = [f"{outcome.context} {outcome.question}" for outcome in outcomes]
    assert questions == ["id0 0", "id0 b", "id1 0", "id2 0", "id2 1", "id2 2", "id3 7"]
    for outcome in outcomes:
        assert outcome.differences == {"IPPD": None, "batch 3": None}
        assert outcome.tokens > 0


def test_an_answer_of_ippd_that_is_one_token_off_is_counted(monkeypatch):
    match = ExactMatch(loaded(), 2, 6)
    run = match.run

    def one_token_off(*arguments):
        answers = run(*arguments)
        is_ippd = not isinstance(answers[0], (Continuation, Reference))
        if is_ippd:
            answers[0][0].tokens[-1] += 1
        return answers

    monkeypatch.setattr(match, "run", one_token_off)
    outcomes = match.compare(RAGGED, 3)
    assert [outcome.differences["IPPD"] is None for outcome in outcomes] == [False] + [True] * 6
    last = outcomes[0].tokens
    says(
        exact_match.table("data", "float32", outcomes),
        "data float32: 4 contexts, 7 questions",
        "IPPD: 6 of 7 equal (85.7%)",
        "batch 3: 7 of 7 equal (100.0%)",
        f"id0 0: token {last} of {last}, gap",
    )
