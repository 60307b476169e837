"""`raypd evaluate RUN LABELS`.

Extraction is micro-averaged over (document, attribute): strict: all attributes that the run asked
for, the gold value alone (case and white space folded); scored: those in a document's `scored`, any
of its `accepted` forms, as in the literature (ExtractGPT), which compares case (`scored F1,
exact`).

A value is right (VC), wrong (VW), given where there is none (NV), missing (VN) or rightly null
(NN): precision is VC / (VC + VW + NV), recall VC / (VC + VW + VN). `values right`: (VC + NN) of
all. Questions: exact match and token F1 as of SQuAD; of choices all right ones and no other must be
named. A failed question is wrong. Texts: ROUGE-L. Intervals are 95% bootstrap intervals over
documents; a difference of two runs is resampled in pairs.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from raypd import storage
from raypd.config import Attribute, RunConfig
from raypd.dataset import writer
from raypd.dataset.label_file import label_rows
from raypd.errors import InputError, raised_as
from raypd.estimation import bootstrap
from raypd.evaluation.calibration import LabelledValue, calibration_error, reliability
from raypd.run.load import NoRun, load_record
from raypd.run.text import counted
from raypd.tasks.labels import labels_of

_SEED = 0
VC, VW, NV, VN, NN = range(5)
Row = dict[str, Any]
# The parts of a score, and the figure of their sums.
Metric = tuple[str, Callable[[np.ndarray], np.ndarray]]
Answers = dict[str, list[Row]]  # document id -> the rows that answer it; none where it failed
Labels = dict[str, Row]  # by document id
_KINDS: dict[str, Any] = {
    "target": dict,
    "questions": list,
    "reference": (str, list),
    "scored": list,
    "accepted": dict,
}
# Category -> the attributes that a run asked for, as its labels call them.
Asked = dict[str, dict[str, str]]


@dataclass
class Measure:
    """A figure with its 95% interval, over so many documents."""

    name: str
    value: float
    low: float
    high: float
    documents: int
    of: str = ""  # a category


@dataclass
class ScoreDifference:
    """A figure of two runs over the same documents, and the 95% interval of ours - theirs."""

    name: str
    ours: float
    theirs: float
    low: float
    high: float
    documents: int


@dataclass
class Evaluation:
    measures: list[Measure]
    differences: list[ScoreDifference] = field(default_factory=list)
    unlabelled: int = 0  # documents of the run without labels
    missing: int = 0  # labelled documents that the run does not hold
    failed: int = 0  # documents that the run could not answer: counted as without any value
    not_asked: int = 0  # labelled values, null or not, of attributes that the run did not ask for
    calibration_error: float | None = None  # of the confidences of an extraction
    # (confidence, share right, values)
    reliability: list[tuple[float, float, int]] = field(default_factory=list)


def evaluate(
    run: str,
    labels: str,
    other: str | None = None,
    tolerance: float = 0.0,
    labels_column: str = "target",
) -> Evaluation:
    """Scores the run in a folder against labels, JSON lines of {id, target | questions | reference,
    ...}, or a table (CSV, JSON lines) with an id and a column for each attribute. Differences are
    run - `other`, over the same documents. tolerance: the share by which a number may differ from
    its label. labels_column: in place of `target`. Raises InputError: unreadable, or no document
    stands in both.
    """
    gold, answers, attributes = (
        read_labels(labels, labels_column, run),
        read_answers(run),
        asked_attributes(run),
    )
    with raised_as(
        InputError, f"{labels}: labels of another kind of task than {run}, which lacks", KeyError
    ):
        scores = _score(answers, gold, tolerance, attributes)
    if not scores:
        kinds = (
            f"{labels_column!r}, 'questions', 'reference', or columns called as its attributes are,"
        )
        what = f"has {kinds}" if answers.keys() & gold.keys() else "has labels"
        ids = "ids are compared as text, and a row without one has that of its place"
        raise InputError(f"{labels}: no document of {run} {what} there; {ids}")
    evaluation = Evaluation(
        measures_of(scores),
        unlabelled=len(answers.keys() - gold.keys()),
        missing=len(gold.keys() - answers.keys()),
        failed=sum(not rows for key, rows in answers.items() if key in gold),
        not_asked=sum(score.not_asked for score in scores.values()),
    )
    if values := _labelled(answers, gold, tolerance, attributes):
        evaluation.reliability = reliability(values)
        evaluation.calibration_error = calibration_error(evaluation.reliability)
    if other is not None:
        other_scores = _score(read_answers(other), gold, tolerance, attributes)
        both = sorted(scores.keys() & other_scores.keys())
        if not both:
            raise InputError(f"{other}: no document of {run} stands there, too")
        evaluation.differences = _differences(
            [scores[key] for key in both], [other_scores[key] for key in both]
        )
    return evaluation


def labelled_values(
    run: str, labels: str, labels_column: str = "target", tolerance: float = 0.0
) -> list[LabelledValue]:
    """The values of an extraction that have a confidence and a label.

    Raises InputError as `evaluate`.
    """
    return _labelled(
        read_answers(run), read_labels(labels, labels_column, run), tolerance, asked_attributes(run)
    )


def f1_of(answers: Answers, labels: Labels, config: RunConfig) -> Measure:
    """F1 of answers: scored where the labels say what is, else strict.

    Raises InputError: there are no labels.
    """
    scores = list(
        _score(answers, labels, 0.0, _names(config.model_dump(include={"task"})["task"])).values()
    )
    measures = (
        [_measure(name, _METRICS[name], scores) for name in ("scored F1", "strict F1")]
        if scores
        else []
    )
    if (measure := next(filter(None, measures), None)) is None:
        raise InputError(
            f"no document has labels in training.labels_column ({config.training.labels_column!r})"
        )
    return measure


def _labelled(
    answers: Answers, gold: Labels, tolerance: float, attributes: Asked
) -> list[LabelledValue]:
    values = []
    for key in sorted(answers.keys() & gold.keys()):
        for row in answers[key]:
            if "record" not in row or "target" not in gold[key]:
                continue
            record, target = (
                flat_values(json.loads(row["record"])),
                flat_values(gold[key]["target"]),
            )
            category = str(row["category"])
            for value in row["values"]:
                name = attributes.get(category, {}).get(value["name"], value["name"])
                if (
                    name not in target
                    or value["confidence"] is None
                    or value.get("status") == "unsure"
                ):
                    continue  # what was decoded of an unsure value was not kept in the record
                forms = (gold[key].get("accepted") or {}).get(name) or [target[name]]
                right = outcome(record.get(name), forms, tolerance) in (VC, NN)
                null, stands = value["value"] is None, value.get("span") is not None
                values.append(
                    LabelledValue(category, value["name"], value["confidence"], null, stands, right)
                )
    return values


def read_labels(path: str, labels_column: str, run: str = "") -> Labels:
    """run: of whose documents they are: a row of its input has its id column, any other `id`.

    Raises InputError.
    """
    labels: Labels = {}
    config = _config(run) if run else {}
    source, schemas = config.get("input") or {}, (config.get("task") or {}).get("categories") or {}
    id_column, category_column, texts = (
        source.get(key) for key in ("id_column", "category_column", "text_columns")
    )
    asked = {
        name: [Attribute(**attribute) for attribute in schema["attributes"]]
        for name, schema in schemas.items()
    }
    for number, key, row in label_rows(path, id_column):
        try:
            attributes = asked.get(str(row.get(category_column or ""))) or chain(*asked.values())
            with raised_as(InputError, f"{path}:{number}", ValueError):
                record = labels_in(row, labels_column, attributes, texts or ())
            if labels.setdefault(key, record) != record:
                raise InputError(f"{path}:{number}: the id {key!r} has other labels above")
            for question in record.get("questions", []) if "target" not in record else []:
                name = "answer_idx" if question.get("choices") else "answers"
                if not isinstance(question.get(name), list):
                    raise InputError(
                        f"{path}:{number}: a question without a list of {name!r}: label it or "
                        "drop it"
                    )
        except (KeyError, TypeError, AttributeError):
            raise InputError(f"{path}:{number}: expected an object of labels") from None
    return labels


def labels_in(
    row: Row, labels_column: str, attributes: Iterable[Attribute], texts: Collection[str]
) -> Row:
    """The labels in a row, as `target` what `labels_of` says (and raises); what is of another kind
    is a column.
    """
    named = {**row, "target": labels_of(row, labels_column, attributes, texts)}
    return {
        name: value for name, value in named.items() if isinstance(value, _KINDS.get(name, object))
    }


def asked_attributes(run: str) -> Asked:
    return _names(_config(run).get("task") or {})


def _config(run: str) -> Row:
    try:
        return load_record(storage.absolute(run)).config
    except NoRun:  # a folder of units alone: all that is labelled counts
        return {}


def category_of(row: Row, labels: Row, asked: Asked) -> str:
    """That of an answer; where a document has none, the only one of the run, or what its labels
    say.
    """
    only = next(iter(asked)) if len(asked) == 1 else labels.get("category")
    return str(row.get("category") or only or "")


def _names(task: Row) -> Asked:
    return {
        category: {a["name"]: ".".join(a.get("path") or [a["name"]]) for a in schema["attributes"]}
        for category, schema in (task.get("categories") or {}).items()
    }


def read_answers(run: str) -> Answers:
    answers: Answers = {}
    for row in writer.rows_of(run):
        rows = answers.setdefault(row["id"], [])
        if row["status"] == "ok":
            rows.append(row)
    if not answers:
        raise InputError(f"{run}: holds no answers; give the output folder of a run")
    return answers


@dataclass
class Score:
    """One document: its category, and for each metric the numbers that add up over documents."""

    category: str
    parts: dict[str, list[float]]
    lists: bool = False  # whether its labels have `scored` or `accepted`
    not_asked: int = 0


def _score(answers: Answers, gold: Labels, tolerance: float, attributes: Asked) -> dict[str, Score]:
    scores = {}
    for key in sorted(answers.keys() & gold.keys()):
        labels, rows = gold[key], answers[key]
        if "target" in labels:
            record = flat_values(json.loads(rows[0]["record"])) if rows else {}
            category = category_of(rows[0] if rows else {}, labels, attributes)
            lists = "scored" in labels or bool(labels.get("accepted"))
            target = flat_values(labels["target"])
            names = target.keys() & set(
                attributes[category].values() if category in attributes else target
            )
            parts = _of_record(record, {name: target[name] for name in names}, labels, tolerance)
            scores[key] = Score(category, parts, lists, len(target) - len(names))
        elif "questions" in labels:
            scores[key] = Score(
                str(labels.get("category", "")), _of_questions(rows, labels["questions"])
            )
        elif "reference" in labels:
            scores[key] = Score(str(labels.get("category", "")), _of_texts(rows, labels))
    return scores


def _of_record(record: Row, target: Row, labels: Row, tolerance: float) -> dict[str, list[float]]:
    scored = labels.get("scored")
    accepted = labels.get("accepted") or {}
    strict, loose, exact = [0.0] * 5, [0.0] * 5, [0.0] * 5
    for name, value in target.items():
        strict[outcome(record.get(name), [value], tolerance)] += 1
        if scored is None or name in scored:
            forms = accepted.get(name) or [value]
            loose[outcome(record.get(name), forms, tolerance)] += 1
            exact[outcome(record.get(name), forms, tolerance, fold=False)] += 1
    return {"strict": strict, "scored": loose, "scored exact": exact}


def flat_values(tree: Row, above: str = "") -> Row:
    """Values of nested objects under `a.b`."""
    flat: Row = {}
    for name, value in tree.items():
        flat |= (
            flat_values(value, f"{above}{name}.")
            if isinstance(value, dict)
            else {above + name: value}
        )
    return flat


def outcome(answer: Any, forms: Sequence[Any], tolerance: float = 0.0, fold: bool = True) -> int:
    accepted = {_plain(form, fold) for form in forms} - {""}
    value = _plain(answer, fold)
    if not accepted:
        return NV if value else NN
    numbers = [form for form in forms if _is_number(form)] if _is_number(answer) else []
    near = any(abs(answer - number) <= tolerance * abs(number) for number in numbers)
    return VN if not value else VC if near or value in accepted else VW


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any, fold: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):  # a row: in any order, a null is as good as no cell
        cells = {
            _plain(name, fold): text for name, cell in value.items() if (text := _plain(cell, fold))
        }
        return json.dumps(cells, sort_keys=True)
    if isinstance(value, list):
        return json.dumps([_plain(one, fold) for one in value])
    text = (
        value
        if isinstance(value, str)
        else f"{value:.15g}"
        if isinstance(value, float)
        else json.dumps(value)
    )
    return " ".join((text.casefold() if fold else text).split())


def _of_questions(rows: list[Row], questions: list[Row]) -> dict[str, list[float]]:
    by_question = {row["question_id"]: row for row in rows}
    exact, overlap, right = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]  # sum, count
    for number, question in enumerate(questions):
        row = by_question.get(str(question.get("id", number)))
        if question.get("choices"):
            right[0] += row is not None and _chosen(row, question)
            right[1] += 1
            continue
        exact[1], overlap[1] = exact[1] + 1, overlap[1] + 1
        if row is not None:
            answer, answers = row["answer"] or "", question["answers"] or [""]
            exact[0] += max(_squad(answer) == _squad(gold) for gold in answers)
            overlap[0] += max(_token_f1(answer, gold) for gold in answers)
    return {"exact match": exact, "token F1": overlap, "accuracy": right}


def _chosen(row: Row, question: Row) -> bool:
    """Whether a row names the right choice, or where several may be named, all right ones and no
    other.
    """
    if not question.get("multi_select"):
        return row["choice_index"] in question["answer_idx"]
    letters = "".join(re.findall(r"\b[A-Z]+\b", row["answer"] or ""))  # "B, D" or "BD"
    return {string.ascii_uppercase.index(letter) for letter in letters} == set(
        question["answer_idx"]
    )


def _squad(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space, as SQuAD compares."""
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def _token_f1(answer: str, gold: str) -> float:
    answer_words, gold_words = _squad(answer).split(), _squad(gold).split()
    if not answer_words or not gold_words:
        return float(answer_words == gold_words)
    return (
        2
        * sum((Counter(answer_words) & Counter(gold_words)).values())
        / (len(answer_words) + len(gold_words))
    )


def _of_texts(rows: list[Row], labels: Row) -> dict[str, list[float]]:
    """ROUGE-L against the reference of each turn that has one; the mean over samples."""
    references = (
        [labels["reference"]] if isinstance(labels["reference"], str) else labels["reference"]
    )
    pairs = [
        (references[row["turn"]], row["text"]) for row in rows if row["turn"] < len(references)
    ]
    overlaps = [
        _rouge().score(reference, text)["rougeL"].fmeasure for reference, text in pairs if reference
    ]
    return {"ROUGE-L": [sum(overlaps), max(1.0, len(overlaps))]}


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # it takes a second to import

    return RougeScorer(["rougeL"], use_stemmer=True)


def _f1(sums: np.ndarray) -> np.ndarray:
    """[..., 5] sums of outcomes -> [...] F1, 0 where nothing is right."""
    right = sums[..., VC]
    return 2 * right / np.maximum(1, 2 * right + 2 * sums[..., VW] + sums[..., NV] + sums[..., VN])


def share(part: list[int], among: list[int]) -> Callable[[np.ndarray], np.ndarray]:
    """[..., n] sums -> [...] the share of some in others, 0 where there are none."""
    return lambda sums: sums[..., part].sum(-1) / np.maximum(1, sums[..., among].sum(-1))


_ALL = [VC, VW, NV, VN, NN]
mean = share([0], [1])  # of (sum, count)
_METRICS: dict[str, Metric] = {  # shown as -> it
    "strict F1": ("strict", _f1),
    "strict precision": ("strict", share([VC], [VC, VW, NV])),
    "strict recall": ("strict", share([VC], [VC, VW, VN])),
    "values right": ("strict", share([VC, NN], _ALL)),
    "null everywhere": ("strict", share([NV, NN], _ALL)),
    "scored F1": ("scored", _f1),
    "scored F1, exact": ("scored exact", _f1),
    **{name: (name, mean) for name in ("exact match", "token F1", "accuracy", "ROUGE-L")},
}


def measures_of(scores: dict[str, Score], metrics: dict[str, Metric] = _METRICS) -> list[Measure]:
    """The figures that documents' scores give, over all and by category."""
    by_category: dict[str, list[Score]] = {"": list(scores.values())}
    for score in scores.values():
        if score.category:
            by_category.setdefault(score.category, []).append(score)
    if len(by_category) == 2:  # one category alone: the same figures
        by_category = {"": by_category[""]}
    measures = (
        _measure(name, metric, members, category)
        for category, members in by_category.items()
        for name, metric in metrics.items()
    )
    return [measure for measure in measures if measure is not None]


def _measure(name: str, metric: Metric, scores: list[Score], category: str = "") -> Measure | None:
    table = _table(metric[0], scores)
    if table is None:
        return None
    value, low, high = _interval(metric[1](_weights(scores) @ table))
    return Measure(name, value, low, high, len(scores), category)


def _differences(scores: list[Score], other_scores: list[Score]) -> list[ScoreDifference]:
    differences = []
    for name, (part, metric) in _METRICS.items():
        a, b = _table(part, scores), _table(part, other_scores)
        if a is None or b is None or name == "null everywhere":  # which is of the labels alone
            continue
        values, other_values = (metric(_weights(scores) @ table) for table in (a, b))
        _, low, high = _interval(values - other_values)
        differences.append(
            ScoreDifference(name, float(values[0]), float(other_values[0]), low, high, len(scores))
        )
    return differences


def _table(part: str, scores: list[Score]) -> np.ndarray | None:
    """[documents, numbers] of a part; None where no document has any."""
    parts = [score.parts.get(part) for score in scores]
    if None in parts or (part.startswith("scored") and not any(score.lists for score in scores)):
        return None
    table = np.array(parts, dtype=float)
    return table if table.any() else None


def _weights(scores: list[Score]) -> np.ndarray:
    """How often each document counts: once, then as often as a bootstrap sample has it: [1 +
    samples, documents].
    """
    return bootstrap.weights(len(scores), np.random.default_rng(_SEED))


def _interval(draws: np.ndarray) -> tuple[float, float, float]:
    figure = bootstrap.figure(draws)
    return figure.value, figure.low or 0.0, figure.high or 0.0


def describe(evaluation: Evaluation) -> str:
    lines = [f"{'':<24}{'':<18}{'value':>8}  95% interval    documents"]
    for measure in evaluation.measures:
        figures = (
            f"{measure.value:8.3f}  "
            f"{f'{measure.low:.3f} to {measure.high:.3f}':<16}{measure.documents:>9,}"
        )
        lines.append(f"{measure.of:<24.23}{measure.name:<18}{figures}")
    if evaluation.calibration_error is not None:
        values = counted(sum(count for *_, count in evaluation.reliability), "value")
        lines.append(
            f"{'':<24}{'calibration error':<18}{evaluation.calibration_error:8.3f}  of "
            f"confidence, {values}"
        )
    if evaluation.differences:
        both = f"over the {counted(evaluation.differences[0].documents, 'document')} of both runs"
        lines += ["", f"{both:<42}{'value':>8}   other  difference [95%]"]
        lines += [
            f"{'':<24}{pair.name:<18}{pair.ours:8.3f}{pair.theirs:8.3f}  "
            f"{pair.ours - pair.theirs:+.3f} "
            f"[{pair.low:+.3f} to {pair.high:+.3f}]"
            for pair in evaluation.differences
        ]
    for count, reason in (
        (evaluation.failed, "failed: each counts as without any value"),
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
    return "\n".join(lines)
