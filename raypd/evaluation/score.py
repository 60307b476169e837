"""`raypd evaluate RUN LABELS`.

Extraction is micro-averaged over (document, attribute) in two ways. Strict: all attributes that the
run extracted, compared only with the gold value (case and white space folded). Scored: the
attributes in a document's `scored`, compared with any of its `accepted` forms, as in the literature
(ExtractGPT), which compares case (`scored F1, exact`).

A value is correct (VC), wrong (VW), present although the label is null (NV), missing (VN) or
correctly null (NN). Precision is VC / (VC + VW + NV), recall is VC / (VC + VW + VN), and `values
right` is the share of VC + NN. Questions: exact match and token F1 as in SQuAD; the answer to a
multi-select question must name exactly the correct choices. A failed question is wrong. Texts:
ROUGE-L.

Intervals are 95% bootstrap intervals over documents. A difference of two runs is resampled in
pairs.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypd.config import LABELS_NEEDED, RunConfig
from raypd.dataset import AT_RANDOM, CHOSEN, LEAST_SURE
from raypd.errors import InputError, raised_as
from raypd.estimation import bootstrap
from raypd.evaluation.calibration import LabelledValue, calibration_error, reliability
from raypd.evaluation.labels import (
    Answers,
    AttributeNames,
    Labels,
    Row,
    SeenDocuments,
    answers_for,
    asked_attributes,
    attribute_names,
    category_of,
    columns_without_attribute,
    flat_values,
    no_ids,
    read_labels,
    seen_documents,
)
from raypd.evaluation.outcome import (
    NN,
    NV,
    OUTCOMES,
    VC,
    VN,
    VW,
    outcome,
    parts_of_questions,
    parts_of_record,
    parts_of_texts,
)
from raypd.tasks import about_missing, is_number
from raypd.text import counted

_SEED = 0
# Below this number of documents, a line warns that the figures say little.
_FEW_DOCUMENTS = 10
# Measures that are 1 only if they count no fault.
_FAULTLESS = ("strict F1", "scored F1", "exact match", "accuracy")
# Fewer documents that a review chose at random do not represent all documents.
_FEW_AT_RANDOM = 30
# The figures that are shown for them.
_REVIEW_FIGURES = ("scored F1", "strict F1", "values right")
# The width of the column with the names of the figures.
_NAME_WIDTH = 25
# The limit on the attributes that the terminal shows.
_MOST_ATTRIBUTES = 20
_OTHER_LABELS = (
    "label others. After `raypd fit`, test.jsonl in its folder holds the documents that its models "
    "have not seen"
)


@dataclass
class Measure:
    """A figure with its 95% interval."""

    name: str
    value: float
    low: float
    high: float
    documents: int
    # A category, or "" for all documents.
    of: str = ""


@dataclass
class ScoreDifference:
    """A figure of two runs over the same documents; the 95% interval is that of ours - theirs."""

    name: str
    ours: float
    theirs: float
    low: float
    high: float
    documents: int


@dataclass
class AttributeScore:
    """How many values of an attribute are correct, over all labelled documents."""

    category: str
    attribute: str
    f1: float
    # The number of correct values, including nulls.
    right: int
    # The number of values that have a label, which may be null.
    values: int
    # The most frequent label, as JSON, and the number of values that it would make correct.
    frequent_label: str
    frequent_right: int


@dataclass
class Evaluation:
    """The result of `raypd evaluate`."""

    measures: list[Measure]
    differences: list[ScoreDifference] = field(default_factory=list)
    # Documents of the run without labels.
    unlabelled: int = 0
    # Labelled documents that the run does not contain.
    missing: int = 0
    # Documents that the run could not answer, which count as having no values.
    failed: int = 0
    # Labelled documents that are left out because the prompt shows them with their labels.
    shown: int = 0
    # Labelled documents that are left out because the model was trained or validated on them.
    trained: int = 0
    # Labelled documents that are left out of the differences because the other run's prompt shows
    # them, or its model was trained on them.
    other_left_out: int = 0
    # Labelled values, including nulls, of attributes that the run did not extract.
    not_asked: int = 0
    # The calibration error of the confidences of an extraction.
    calibration_error: float | None = None
    # (confidence, share of correct values, number of values) per tenth.
    reliability: list[tuple[float, float, int]] = field(default_factory=list)
    # The attributes, with the lowest F1 first.
    attributes: list[AttributeScore] = field(default_factory=list)
    # The attributes of the run without labels.
    without_labels: list[str] = field(default_factory=list)
    # Columns of the labels that fit no attribute, if there are attributes without labels.
    other_columns: list[str] = field(default_factory=list)
    # Documents that `raypd review` chose because the model was least sure of them. If there are
    # any, `at_random` has the figures of the documents that it chose at random.
    least_sure: int = 0
    at_random: list[Measure] = field(default_factory=list)


@dataclass
class Score:
    """The numbers of one document, which are summed over documents."""

    category: str
    # The numbers by the `part` of a Metric.
    parts: dict[str, list[float]]
    # Whether its labels have `scored` or `accepted`.
    lists: bool = False
    not_asked: int = 0


@dataclass(frozen=True)
class Metric:
    """A figure that is computed from sums over documents.

    Attributes:
        part: Which numbers of a Score are summed.
        figure: Computes the figure: [..., n] sums -> [...].
    """

    part: str
    figure: Callable[[np.ndarray], np.ndarray]


def _f1(sums: np.ndarray) -> np.ndarray:
    """Compute F1 from [..., 5] sums of outcomes, as [...]; 0 if no value is correct."""
    right = sums[..., VC]
    wrong = 2 * sums[..., VW] + sums[..., NV] + sums[..., VN]
    return 2 * right / np.maximum(1, 2 * right + wrong)


def share(part: list[int], total: list[int]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that computes the share of some sums in others.

    Args:
        part: The indices of the sums in the numerator.
        total: The indices of the sums in the denominator.

    Returns:
        A function [..., n] -> [...], which is 0 if the denominator is 0.
    """

    def figure(sums: np.ndarray) -> np.ndarray:
        return sums[..., part].sum(-1) / np.maximum(1, sums[..., total].sum(-1))

    return figure


# The share of values that would be correct if the answer to everything were null.
IF_ALL_NULL = "if every value were null"
# The mean of parts that are (sum, count).
mean = share([0], [1])
# The metrics by their displayed names.
METRICS: dict[str, Metric] = {
    "strict F1": Metric("strict", _f1),
    "strict precision": Metric("strict", share([VC], [VC, VW, NV])),
    "strict recall": Metric("strict", share([VC], [VC, VW, VN])),
    "values right": Metric("strict", share([VC, NN], list(OUTCOMES))),
    IF_ALL_NULL: Metric("strict", share([NV, NN], list(OUTCOMES))),
    "scored F1": Metric("scored", _f1),
    "scored F1, exact": Metric("scored exact", _f1),
    "exact match": Metric("exact match", mean),
    "token F1": Metric("token F1", mean),
    "accuracy": Metric("accuracy", mean),
    "ROUGE-L": Metric("ROUGE-L", mean),
}


def evaluate(
    run: str,
    labels: str,
    other_run: str | None = None,
    tolerance: float = 0.0,
    labels_column: str = "target",
) -> Evaluation:
    """Score a run against labels.

    Args:
        run: The folder of the run.
        labels: JSON lines of {id, target | questions | reference, ...}, or a table (CSV, JSON
            lines) with an id and a column per attribute.
        other_run: The folder of a run to compare with, over the documents that both contain.
        tolerance: The share by which a number may differ from its label.
        labels_column: The column that is read instead of `target`.

    Raises:
        InputError: A file cannot be read, the run and the labels have no document in common, or the
            model has seen all of those.
        ModelError: The file next to the model's weights cannot be read.
    """
    gold = read_labels(labels, labels_column, run)
    answers, others = answers_for(run, gold)
    seen = seen_documents(run, {key: gold[key] for key in answers.keys() & gold.keys()})
    _leave_out(run, labels, seen, answers, gold)
    names = asked_attributes(run)
    with raised_as(
        InputError,
        f"{labels}: these labels are of another kind of task than {run}, which lacks",
        KeyError,
    ):
        scores = _scores(answers, gold, tolerance, names)
    if not scores:
        raise _no_labels(run, labels, labels_column, bool(answers.keys() & gold.keys()))
    evaluation = Evaluation(
        measures_of(scores),
        unlabelled=others,
        missing=len(gold.keys() - answers.keys()),
        shown=len(seen.shown),
        trained=len(seen.trained),
        failed=sum(not rows for rows in answers.values()),
        not_asked=sum(score.not_asked for score in scores.values()),
    )
    evaluation.attributes = _attribute_scores(answers, gold, tolerance, names)
    evaluation.without_labels = _without_labels(evaluation.attributes, names)
    if evaluation.without_labels:
        evaluation.other_columns = columns_without_attribute(
            labels, labels_column, run, gold, names
        )
    evaluation.least_sure = len(_chosen(scores, gold, LEAST_SURE))
    drawn = _chosen(scores, gold, AT_RANDOM)
    if evaluation.least_sure and drawn:
        evaluation.at_random = [measure for measure in measures_of(drawn) if not measure.of]
    values = _labelled_values(answers, gold, tolerance, names)
    if values:
        evaluation.reliability = reliability(values)
        evaluation.calibration_error = calibration_error(evaluation.reliability)
    if other_run is not None:
        other_answers, _ = answers_for(other_run, gold)
        other_out = seen_documents(other_run, {key: gold[key] for key in scores}).ids
        evaluation.other_left_out = len(other_out & other_answers.keys())
        other_scores = _scores(other_answers, gold, tolerance, names)
        common = sorted((scores.keys() & other_scores.keys()) - other_out)
        if not common and scores.keys() & other_scores.keys():
            raise InputError(
                f"{labels}: all documents of {run} that are left trained the model of {other_run} "
                f"or are shown in its prompt (task.examples); {_OTHER_LABELS}"
            )
        if not common:
            raise InputError(
                f"{other_run}: it has no document in common with {run}; give two runs over the "
                "same input"
            )
        evaluation.differences = _differences(
            [scores[key] for key in common], [other_scores[key] for key in common]
        )
    return evaluation


def _without_labels(scores: list[AttributeScore], names: AttributeNames) -> list[str]:
    """Return the attributes without any label, in the categories that have labels."""
    labelled = {(score.category, score.attribute) for score in scores}
    missing: dict[str, None] = {}
    for category in {category for category, _ in labelled} & names.keys():
        for name in names[category].values():
            if (category, name) not in labelled:
                missing[name] = None
    return list(missing)


def _chosen(scores: dict[str, Score], gold: Labels, why: str) -> dict[str, Score]:
    """Return the scores of the documents that `raypd review` chose for one reason."""
    return {key: score for key, score in scores.items() if gold[key].get(CHOSEN) == why}


def _leave_out(run: str, labels: str, seen: SeenDocuments, answers: Answers, gold: Labels) -> None:
    """Remove the documents that are left out; raise InputError if no label would remain."""
    for key in seen.ids:
        del gold[key]
        del answers[key]
    if answers.keys() & gold.keys() or not seen.ids:
        return
    if not seen.trained:
        raise InputError(
            f"{labels}: the prompt of {run} shows all of these documents (task.examples); label "
            "others"
        )
    raise InputError(
        f"{labels}: the model of {run} was trained on all of these documents, or they are shown in "
        f"its prompt; {_OTHER_LABELS}"
    )


def _no_labels(run: str, labels: str, labels_column: str, has_ids: bool) -> InputError:
    """Return the error for labels with which no document can be scored."""
    lacking = "has labels"
    if has_ids:
        lacking = (
            f"has {labels_column!r}, 'questions', 'reference', or columns named like its attributes"
        )
    ids = "ids are compared as strings; rows without an id use source:row"
    if not has_ids:
        ids = no_ids(labels, run) or ids
    return InputError(f"{labels}: no document of {run} {lacking} there; {ids}")


def labelled_values(
    run: str,
    labels: str,
    labels_column: str = "target",
    tolerance: float = 0.0,
    *,
    with_trained: bool = False,
) -> tuple[list[LabelledValue], int]:
    """Return the values of an extraction that have a confidence and a label.

    Args:
        run: The folder of the run.
        labels: The file of labels, as for `evaluate`.
        labels_column: The column that is read instead of `target`.
        tolerance: The share by which a number may differ from its label.
        with_trained: Whether to include documents that the model was trained or validated on.

    Returns:
        The values, and the number of labelled documents that are left out because the model was
        trained or validated on them.

    Raises:
        InputError: A file cannot be read, or the model has seen all of the documents.
        ModelError: The file next to the model's weights cannot be read.
    """
    gold = read_labels(labels, labels_column, run)
    answers, _ = answers_for(run, gold)
    seen = seen_documents(run, {key: gold[key] for key in answers.keys() & gold.keys()})
    if with_trained:
        seen = SeenDocuments(seen.shown)
    _leave_out(run, labels, seen, answers, gold)
    values = _labelled_values(answers, gold, tolerance, asked_attributes(run))
    return values, len(seen.trained)


def _labelled_values(
    answers: Answers, gold: Labels, tolerance: float, names: AttributeNames
) -> list[LabelledValue]:
    labelled = []
    for key in sorted(answers.keys() & gold.keys()):
        labels = gold[key]
        for row in answers[key]:
            if "record" not in row or "target" not in labels:
                continue
            record = flat_values(json.loads(row["record"]))
            target = flat_values(labels["target"])
            category = str(row["category"])
            for value in row["values"]:
                name = names.get(category, {}).get(value["name"], value["name"])
                if name not in target or value["confidence"] is None:
                    continue
                if value.get("status") == "unsure":
                    # The record does not contain the decoded value.
                    continue
                forms = (labels.get("accepted") or {}).get(name) or [target[name]]
                labelled.append(
                    LabelledValue(
                        category=category,
                        attribute=value["name"],
                        confidence=value["confidence"],
                        null=value["value"] is None,
                        in_document=value.get("span") is not None,
                        right=outcome(record.get(name), forms, tolerance) in (VC, NN),
                        is_number=is_number(record.get(name)),
                        document=key,
                    )
                )
    return labelled


def f1_of(answers: Answers, labels: Labels, config: RunConfig) -> Measure:
    """Return the F1 of answers.

    Args:
        answers: The rows by document id.
        labels: The labels by document id.
        config: The configuration of the extraction.

    Returns:
        Scored F1 if the labels say which attributes are scored, otherwise strict F1.

    Raises:
        InputError: No document has labels.
    """
    task = config.model_dump(include={"task"})["task"]
    scores = list(_scores(answers, labels, 0.0, attribute_names(task)).values())
    if scores:
        for name in ("scored F1", "strict F1"):
            measure = _measure(name, METRICS[name], scores)
            if measure is not None:
                return measure
    raise InputError(
        f"no document has labels in training.labels_column ({config.training.labels_column!r})"
    )


def attributes_of(answers: Answers, labels: Labels, config: RunConfig) -> list[AttributeScore]:
    """Return how many values of each attribute are correct, with the lowest F1 first.

    Args:
        answers: The rows by document id.
        labels: The labels by document id.
        config: The configuration of the extraction.
    """
    task = config.model_dump(include={"task"})["task"]
    return _attribute_scores(answers, labels, 0.0, attribute_names(task))


def _scores(
    answers: Answers, gold: Labels, tolerance: float, names: AttributeNames
) -> dict[str, Score]:
    """Return the score of each document that has an answer and labels, by id."""
    scores = {}
    for key in sorted(answers.keys() & gold.keys()):
        labels = gold[key]
        rows = answers[key]
        if "target" in labels:
            scores[key] = _score_of_record(rows, labels, tolerance, names)
            continue
        category = str(labels.get("category", ""))
        if "questions" in labels:
            scores[key] = Score(category, parts_of_questions(rows, labels["questions"]))
        elif "reference" in labels:
            scores[key] = Score(category, parts_of_texts(rows, labels))
    return scores


def _record_and_labels(rows: list[Row], labels: Row, names: AttributeNames) -> tuple[str, Row, Row]:
    """Return the category of a document, its values, and the labels of what was extracted.

    Args:
        rows: The row that answers the document, or none.
        labels: The labels of the document.
        names: The attributes of the run by category.
    """
    row = rows[0] if rows else {}
    record = flat_values(json.loads(row["record"])) if rows else {}
    target = flat_values(labels["target"])
    category = category_of(row, labels, names)
    if category in names:
        extracted = set(names[category].values())
        target = {name: label for name, label in target.items() if name in extracted}
    return category, record, target


def _attribute_scores(
    answers: Answers, gold: Labels, tolerance: float, names: AttributeNames
) -> list[AttributeScore]:
    """Return the scores of each attribute, with all accepted forms of a label."""
    counts: dict[tuple[str, str], np.ndarray] = {}
    forms_by_attribute: dict[tuple[str, str], list[list[Any]]] = {}
    for key in sorted(answers.keys() & gold.keys()):
        labels = gold[key]
        if "target" not in labels:
            continue
        category, record, target = _record_and_labels(answers[key], labels, names)
        for name, label in target.items():
            forms = (labels.get("accepted") or {}).get(name) or [label]
            outcomes = counts.setdefault((category, name), np.zeros(len(OUTCOMES)))
            outcomes[outcome(record.get(name), forms, tolerance)] += 1
            forms_by_attribute.setdefault((category, name), []).append(forms)
    scores = []
    for (category, name), outcomes in counts.items():
        right = int(outcomes[VC] + outcomes[NN])
        label, frequent_right = _most_frequent(forms_by_attribute[category, name], tolerance)
        scores.append(
            AttributeScore(
                category,
                name,
                float(_f1(outcomes)),
                right,
                int(outcomes.sum()),
                label,
                frequent_right,
            )
        )
    return sorted(scores, key=lambda score: score.f1)


def _most_frequent(labels: list[list[Any]], tolerance: float) -> tuple[str, int]:
    """Return the most frequent label of an attribute as JSON, and how often it would be correct.

    Args:
        labels: The correct forms of each document's label; the first one is the label.
        tolerance: The share by which a number may differ from its label.
    """
    texts = Counter(json.dumps(forms[0], ensure_ascii=False) for forms in labels)
    label = texts.most_common(1)[0][0]
    value = json.loads(label)
    right = sum(outcome(value, forms, tolerance) in (VC, NN) for forms in labels)
    return label, right


def _score_of_record(
    rows: list[Row], labels: Row, tolerance: float, names: AttributeNames
) -> Score:
    """Return the score of an extraction's document, for which `rows` is one row, or none."""
    target = flat_values(labels["target"])
    category, record, scored_labels = _record_and_labels(rows, labels, names)
    return Score(
        category,
        parts_of_record(record, scored_labels, labels, tolerance),
        lists="scored" in labels or bool(labels.get("accepted")),
        not_asked=len(target) - len(scored_labels),
    )


def measures_of(
    scores: dict[str, Score], metrics: dict[str, Metric] | None = None
) -> list[Measure]:
    """Return the figures over all documents and by category.

    Args:
        scores: The scores by document id.
        metrics: The metrics by name; None for those of `raypd evaluate`.
    """
    by_category: dict[str, list[Score]] = {"": list(scores.values())}
    for score in scores.values():
        if score.category:
            by_category.setdefault(score.category, []).append(score)
    if len(by_category) == 2:
        # The figures of a single category are those of all documents.
        by_category = {"": by_category[""]}
    measures = []
    for category, members in by_category.items():
        for name, metric in (METRICS if metrics is None else metrics).items():
            measure = _measure(name, metric, members, category)
            if measure is not None:
                measures.append(measure)
    return measures


def _measure(name: str, metric: Metric, scores: list[Score], category: str = "") -> Measure | None:
    """Return a figure with its interval; None if no document has its numbers."""
    table = _table(metric.part, scores)
    if table is None:
        return None
    value, low, high = _interval(metric.figure(_weights(scores) @ table))
    return Measure(name, value, low, high, len(scores), category)


def _differences(scores: list[Score], other_scores: list[Score]) -> list[ScoreDifference]:
    """Return the differences of all figures between two runs over the same documents."""
    differences = []
    for name, metric in METRICS.items():
        table = _table(metric.part, scores)
        other_table = _table(metric.part, other_scores)
        if table is None or other_table is None:
            continue
        # This figure depends only on the labels.
        if name == IF_ALL_NULL:
            continue
        weights = _weights(scores)
        values = metric.figure(weights @ table)
        other_values = metric.figure(weights @ other_table)
        _, low, high = _interval(values - other_values)
        differences.append(
            ScoreDifference(name, float(values[0]), float(other_values[0]), low, high, len(scores))
        )
    return differences


def _table(part: str, scores: list[Score]) -> np.ndarray | None:
    """Return the numbers of a part, [documents, numbers]; None if no document has any."""
    parts = [score.parts.get(part) for score in scores]
    if None in parts:
        return None
    if part.startswith("scored") and not any(score.lists for score in scores):
        return None
    table = np.array(parts, dtype=float)
    return table if table.any() else None


def _weights(scores: list[Score]) -> np.ndarray:
    """Return how often each document counts: [1 + samples, documents].

    Each document counts once in the first row, and in the others as often as it is in a bootstrap
    sample.
    """
    return bootstrap.weights(len(scores), np.random.default_rng(_SEED))


def _interval(draws: np.ndarray) -> tuple[float, float, float]:
    """Return (value, low, high) of the draws of a figure: [1 + samples]."""
    # A score may be anywhere between 0 and 1.
    figure = bootstrap.figure(draws, widest_ratio=math.inf)
    return figure.value, figure.low or 0.0, figure.high or 0.0


def about_perfect(measure: str, documents: int) -> str:
    """Return what a figure of 1.000 says about other documents.

    A bootstrap of documents without a wrong value has only such documents, so that its interval has
    no width. The exact one-sided bound is the share of faulty documents with which such a sample
    would be drawn in 5% of all cases.

    Args:
        measure: The name of the figure.
        documents: The documents that were scored.
    """
    bound = 1 - 0.05 ** (1 / documents)
    return (
        f"{measure} is 1.000 on {counted(documents, 'document')}: it counts no fault in any of "
        f"them. Up to {bound:.1%} of all documents may still have one (95% confidence), which an "
        "interval of 1.000 to 1.000 does not show"
    )


def about_review(evaluation: Evaluation) -> str:
    """Return what the documents of a review say about all documents; "" if there are none."""
    if not evaluation.least_sure:
        return ""
    chosen = counted(evaluation.least_sure, "document")
    note = f"`raypd review` chose {chosen} because the model was least sure of them"
    if not evaluation.at_random:
        return (
            f"{note}, so the figures may not be those of all documents. No document that it chose "
            "at random has labels here: review some of these"
        )
    figures = [
        f"{measure.name} {measure.value:.3f} ({measure.low:.3f} to {measure.high:.3f})"
        for measure in evaluation.at_random
        if measure.name in _REVIEW_FIGURES
    ]
    listed = ", ".join(figures)
    documents = evaluation.at_random[0].documents
    drawn = counted(documents, "document")
    if documents < _FEW_AT_RANDOM:
        have = "has" if documents == 1 else "have"
        return (
            f"{note}. Only documents that it chose at random represent all documents, and only "
            f"{documents} of them {have} labels: {listed}. Label at least {_FEW_AT_RANDOM} "
            "documents that were chosen at random; `raypd review RUN` chooses more"
        )
    if _are_better(evaluation):
        note += ": the figures of all documents are probably better"
    return f"{note}. The {drawn} that it chose at random represent all documents: {listed}"


def _are_better(evaluation: Evaluation) -> bool:
    """Return whether all figures of the documents chosen at random are better than those of all."""
    of_all = {measure.name: measure.value for measure in evaluation.measures if not measure.of}
    pairs = [
        (measure.value, of_all[measure.name])
        for measure in evaluation.at_random
        if measure.name in _REVIEW_FIGURES and measure.name in of_all
    ]
    return bool(pairs) and all(at_random > both for at_random, both in pairs)


def describe(evaluation: Evaluation) -> str:
    """Return an evaluation as a table for the terminal."""
    lines = [f"{'':<24}{'':<{_NAME_WIDTH}}{'value':>8}  95% interval    documents"]
    for measure in evaluation.measures:
        interval = f"{measure.low:.3f} to {measure.high:.3f}"
        lines.append(
            f"{measure.of:<24.23}{measure.name:<{_NAME_WIDTH}}{measure.value:8.3f}  {interval:<16}"
            f"{measure.documents:>9,}"
        )
    if evaluation.calibration_error is not None:
        values = counted(sum(count for *_, count in evaluation.reliability), "value")
        lines.append(
            f"{'':<24}{'calibration error':<{_NAME_WIDTH}}{evaluation.calibration_error:8.3f}  of "
            f"confidence, {values}"
        )
    if evaluation.differences:
        documents = counted(evaluation.differences[0].documents, "document")
        title = f"over the {documents} of both runs"
        lines += ["", f"{title:<{24 + _NAME_WIDTH}}{'value':>8}   other  difference [95%]"]
    for pair in evaluation.differences:
        lines.append(
            f"{'':<24}{pair.name:<{_NAME_WIDTH}}{pair.ours:8.3f}{pair.theirs:8.3f}  "
            f"{pair.ours - pair.theirs:+.3f} [{pair.low:+.3f} to {pair.high:+.3f}]"
        )
    scored = max((measure.documents for measure in evaluation.measures), default=0)
    if 0 < scored < _FEW_DOCUMENTS:
        are = "is" if scored == 1 else "are"
        lines.append(
            f"{counted(scored, 'document')} {are} too few: the real uncertainty is larger than "
            f"these intervals. Label at least {_FEW_DOCUMENTS}, better {LABELS_NEEDED} documents"
        )
    for measure in evaluation.measures:
        if measure.name in _FAULTLESS and not measure.of and measure.value == 1.0:
            lines.append(about_perfect(measure.name, measure.documents))
            break
    review = about_review(evaluation)
    if review:
        lines.append(review)
    for count, reason in (
        (evaluation.shown, "shown in the prompt (task.examples): left out"),
        (
            evaluation.trained,
            "trained or validated the model: left out, because it has seen their labels",
        ),
        (
            evaluation.other_left_out,
            "trained the model of the other run, or are in its prompt: left out of the comparison",
        ),
        (evaluation.failed, "failed: each counts as having no values"),
        (evaluation.unlabelled, "without labels: left out"),
        (evaluation.missing, "with labels, not in the run: left out"),
    ):
        if count:
            lines.append(f"{counted(count, 'document')} {reason}")
    if evaluation.not_asked:
        lines.append(
            f"{counted(evaluation.not_asked, 'label')} of attributes that the run did not ask "
            "for: left out"
        )
    missing = about_missing(evaluation.without_labels, evaluation.other_columns)
    if missing:
        lines.append(missing)
    return "\n".join(lines + _attribute_lines(evaluation.attributes))


def _attribute_lines(scores: list[AttributeScore]) -> list[str]:
    """Return the lines of the attributes; none if there is only one attribute."""
    if len(scores) < 2:
        return []
    lines = ["", "by attribute, the lowest F1 first      F1  right"]
    several = len({score.category for score in scores}) > 1
    for score in scores[:_MOST_ATTRIBUTES]:
        name = f"{score.category} · {score.attribute}" if several else score.attribute
        lines.append(f"  {name:<31.30}{score.f1:8.3f}  {score.right:,} of {score.values:,}")
    if len(scores) > _MOST_ATTRIBUTES:
        lines.append(f"  and {counted(len(scores) - _MOST_ATTRIBUTES, 'attribute')} more")
    return lines
