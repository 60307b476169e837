"""Figures of a run against labels: by hand, and against scikit-learn and the SQuAD rules."""

from __future__ import annotations

import json

import numpy as np
import pytest

from raypd.answering.components import build
from raypd.cluster import driver
from raypd.errors import InputError
from raypd.evaluation import score
from raypd.evaluation.score import NN, NV, VC, VN, VW
from tests.runs import with_keys, write_jsonl


@pytest.mark.parametrize(
    ("answer", "forms", "outcome"),
    [
        ("Acme", ["acme "], VC), ("Acme", ["Zeta"], VW), (None, ["Zeta"], VN), ("Acme", [None], NV), (None, [None], NN),
        (7.0, ["7"], VC), (7.5, [7.5], VC), (True, [True], VC), ("red", ["Red", "red patent"], VC),
    ],
)  # fmt: skip
def test_outcome_of_a_value(answer, forms, outcome):
    assert score.outcome(answer, forms) == outcome


def test_a_number_may_be_off_by_what_a_unit_rounds():
    assert [score.outcome(answer, [204], 0.02) for answer in (205, 200.0, 209, "204", None)] == [VC, VC, VW, VC, VN]
    assert score.outcome(True, [1], 0.02) == VW


def test_f1_is_scikit_learns():
    """Micro F1 over (document, attribute, value) pairs as sets, which is how it is defined for extraction."""
    draw = np.random.default_rng(0)
    metrics = pytest.importorskip("sklearn.metrics")
    sums, gold_pairs, given_pairs = np.zeros(5), set(), set()
    for i in range(200):
        gold, answer = draw.choice(["a", "b", ""], 2)
        sums[score.outcome(answer or None, [gold or None])] += 1
        gold_pairs |= {(i, gold)} if gold else set()
        given_pairs |= {(i, answer)} if answer else set()
    pairs = sorted(gold_pairs | given_pairs)
    truth, predicted = [pair in gold_pairs for pair in pairs], [pair in given_pairs for pair in pairs]
    assert score._f1(sums) == pytest.approx(metrics.f1_score(truth, predicted))
    assert score._METRICS["strict precision"][1](sums) == pytest.approx(metrics.precision_score(truth, predicted))
    assert score._METRICS["strict recall"][1](sums) == pytest.approx(metrics.recall_score(truth, predicted))


def test_scored_looks_at_the_listed_attributes_and_all_accepted_forms():
    labels = {"target": {"Brand": "Acme", "Color": "red", "Size": None}, "scored": ["Color"],
              "accepted": {"Color": ["red", "dark red"]}}  # fmt: skip
    record = {"Brand": "Zeta", "Color": "Dark  red", "Size": "7"}
    parts = score._of_record(record, labels["target"], labels, 0.0)
    assert parts["scored"] == [1, 0, 0, 0, 0]
    assert parts["scored exact"] == [0, 1, 0, 0, 0]  # ExtractGPT compares case
    assert parts["strict"] == [0, 2, 1, 0, 0]


def test_questions_are_compared_as_squad_does():
    questions = [
        {"id": "a", "answers": ["the Seine river"]},
        {"id": "b", "answers": []},
        {"id": "c", "choices": ["x", "y"], "answers": ["y"], "answer_idx": [1]},
        {"id": "d", "answers": ["Rollo"]},
        {"id": "e", "answers": []},  # failed: no answer is not the right answer
        {"id": "f", "choices": ["x", "y", "z"], "answer_idx": [0, 2], "multi_select": True},
        {"id": "g", "choices": ["x", "y", "z"], "answer_idx": [0, 2], "multi_select": True},
    ]
    rows = [
        {"question_id": "a", "answer": "Seine, a river!", "choice_index": None},
        {"question_id": "b", "answer": None, "choice_index": None},
        {"question_id": "c", "answer": "y", "choice_index": 1},
        {"question_id": "f", "answer": "A, C", "choice_index": None},
        {"question_id": "g", "answer": "AB", "choice_index": None},
    ]
    parts = score._of_questions(rows, questions)
    assert parts == {"exact match": [2, 4], "token F1": [2, 4], "accuracy": [2, 3]}
    assert score._token_f1("in the Seine", "Seine river") == pytest.approx(0.5)


def test_intervals_are_scipys_and_pairs_are_narrower():
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(1)
    right = draw.random(300) < 0.7
    scores = [score.Score("", {"exact match": [float(r), 1.0]}) for r in right]
    flipped = right.copy()
    flipped[:6] ^= True
    flipped_scores = [score.Score("", {"exact match": [float(r), 1.0]}) for r in flipped]
    measure = score._measure("exact match", score._METRICS["exact match"], scores)
    assert measure is not None
    expected = stats.bootstrap((right.astype(float),), np.mean, method="percentile", rng=0).confidence_interval
    assert (measure.low, measure.high) == pytest.approx((expected.low, expected.high), abs=0.01)
    (difference,) = score._differences(scores, flipped_scores)
    assert difference.ours - difference.theirs == pytest.approx(right.mean() - flipped.mean())
    assert difference.high - difference.low < (measure.high - measure.low) / 2


def test_a_run_against_its_labels(config, tmp_path, in_process):
    path = write_jsonl(tmp_path / "in.jsonl", ["x" * (i + 1) for i in range(6)])
    run = with_keys(config(str(path)), model={"name": "fake"})
    driver.run_extract(run, build=build)
    labels = tmp_path / "labels.jsonl"
    rows = [{"id": str(i), "gold": {"a": None, "never asked": "x"}} for i in (0, 1, 99)]
    labels.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="has 'target', 'questions' or 'reference' there"):
        score.evaluate(run.output.path, str(labels))
    result = score.evaluate(run.output.path, str(labels), run.output.path, labels_column="gold")
    assert result.unlabelled == 4
    assert result.missing == 1
    figures = {measure.name: measure.value for measure in result.measures}
    assert figures["null everywhere"] == 1.0
    assert (result.not_asked, figures["values right"]) == (2, 0.0)
    assert all(d.ours == d.theirs and d.low == d.high == 0 for d in result.differences)
    assert "values right" in score.describe(result)
    with pytest.raises(InputError, match="no such file"):
        score.evaluate(run.output.path, str(tmp_path / "none.jsonl"))
    labels.write_text('{"id": "0", "questions": [{"question": "Who?"}]}\n')
    with pytest.raises(InputError, match=r"labels\.jsonl:1: a question without a list of 'answers'"):
        score.evaluate(run.output.path, str(labels))
    labels.write_text("{}\n")
    with pytest.raises(InputError, match=r"labels\.jsonl:1"):
        score.evaluate(run.output.path, str(labels))
