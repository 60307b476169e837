"""The page of `raypd evaluate`: the wrong values, document by document.

Each value is next to its label, with the reason why it is wrong.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from raypd import storage
from raypd.config import UNNAMED_CATEGORY, ExtractionConfig, RunConfig
from raypd.errors import UserError
from raypd.evaluation.labels import (
    AttributeNames,
    Row,
    answers_for,
    asked_attributes,
    category_of,
    flat_values,
    free_texts,
    read_labels,
    seen_documents,
)
from raypd.evaluation.outcome import NN, NV, VC, VN, outcome
from raypd.evaluation.score import Evaluation, about_review
from raypd.report import (
    FULL,
    ROLES,
    Chart,
    Table,
    charts,
    labels_of_page,
    marked,
    page,
    review,
    text_in,
)
from raypd.run import layout, load_run
from raypd.text import count

# The limit on documents on the page, which shows those with the most wrong values.
_MAX_DOCUMENTS = 200
REASONS = (
    "another value",
    "a part of the label",
    "more than the label",
    "no label",
    "missing",
    "no answer",
)
# (category, attribute) -> the number of "right" values, and of wrong values for each reason.
Counts = dict[tuple[str, str], Counter[str]]
# The size of a point in the chart, and of the area next to its axes, in pixels.
_SQUARE = 8
_BESIDE_AXES = 60
_MEASURES = ("scored F1", "strict F1", "values right")


@dataclass
class WrongValue:
    """A value that differs from its label."""

    attribute: str
    label: str
    value: str
    # One of REASONS.
    reason: str
    # The status of the value.
    status: str
    confidence: float | None
    # Characters [begin, end) of the document's text; None if the value is not there.
    span: tuple[int, int] | None


@dataclass
class WrongDocument:
    """A document with wrong values.

    `pieces` is its text in pieces, each with the attributes whose values are there.
    """

    id: str
    category: str
    source: str
    row: int
    values: list[WrongValue]
    pieces: list[tuple[str, str]]


def write_page(
    run: str, labels: str, evaluation: Evaluation, labels_column: str, tolerance: float
) -> tuple[str, str] | None:
    """Write the page of an extraction into the run's folder.

    Args:
        run: The folder of the run.
        labels: The file of labels, as for `evaluate`.
        evaluation: The result of `evaluate`.
        labels_column: The column that is read instead of `target`.
        tolerance: The share by which a number may differ from its label.

    Returns:
        The path of the page, and the file of labels whose page it replaces ("" for none or the same
        file); None if the run is not an extraction.

    Raises:
        ConfigError: There is no run in the folder.
        RunError: The page cannot be written.
    """
    root = storage.absolute(run)
    config = load_run(root, [])
    if not isinstance(config.task, ExtractionConfig):
        return None
    documents, counts = find_wrong_values(run, labels, labels_column, tolerance)
    shown = sorted(documents, key=lambda document: -len(document.values))[:_MAX_DOCUMENTS]
    no_texts = ""
    try:
        _add_texts(shown, config, root)
    # The input was moved.
    except UserError as error:
        no_texts = f"Without the documents' texts: {error}"
    chart = None
    if evaluation.calibration_error is not None:
        chart = reliability_chart(
            {"accent": ("this run", evaluation.reliability)},
            f"calibration error {evaluation.calibration_error:.3f}",
        )
    measures = [
        measure for measure in evaluation.measures if measure.name in _MEASURES and not measure.of
    ]
    html = page.fill(
        "evaluation.html.j2",
        name=root.rstrip("/").rpartition("/")[2],
        labels=labels,
        labels_path=storage.absolute(labels),
        labels_column=labels_column,
        measures=measures,
        about_review=about_review(evaluation),
        heads=["attribute", "F1", "right", *REASONS],
        attributes=_rows(counts, evaluation),
        documents=shown,
        categories=page.named_categories(document.category for document in shown),
        position=page.position_of(config.input.model_dump(include={"format", "reader"})),
        no_texts=no_texts,
        sureness=chart,
        wrong=len(documents),
    )
    path = storage.join(root, layout.EVALUATION)
    replaced, _ = labels_of_page(path)
    page.put(path, html.encode())
    return path, "" if replaced == storage.absolute(labels) else replaced


def _add_texts(documents: Sequence[WrongDocument], config: RunConfig, root: str) -> None:
    """Read the texts of documents again, and mark their wrong values in them."""
    by_key = {(document.source, document.row): document for document in documents}
    texts = review.documents_at(config, root, by_key)
    for key, document in by_key.items():
        input_document = texts.get(key)
        if input_document is None or input_document.error is not None:
            continue
        text = text_in(input_document, config)
        spans = [
            (value.span, value.attribute) for value in document.values if value.span is not None
        ]
        document.pieces = list(marked(text, spans))


def _rows(counts_by_attribute: Counts, evaluation: Evaluation) -> list[list[str]]:
    """Return the cells of the table of attributes, with the one with the most wrong values
    first.
    """
    f1 = {(score.category, score.attribute): score.f1 for score in evaluation.attributes}
    ranked = sorted(
        counts_by_attribute.items(), key=lambda item: item[1]["right"] - item[1].total()
    )
    rows = []
    for key, counts in ranked:
        category, name = key
        row = [name]
        if category and category != UNNAMED_CATEGORY:
            row = [f"{category} · {name}"]
        row.append(f"{f1[key]:.3f}" if key in f1 else "")
        for reason in ("right", *REASONS):
            row.append(str(counts[reason]) if counts[reason] else "")
        rows.append(row)
    return rows


def reliability_chart(
    lines: Mapping[str, tuple[str, Sequence[Sequence[float]]]], about: str
) -> Chart:
    """Draw the share of correct values by confidence.

    Args:
        lines: Role of a color -> the name of a line and its points (confidence, share of correct
            values, number of values).
        about: The caption of the chart.
    """
    chart = Chart(
        "Confidence", "share of right values by confidence; dashed: as it should be", note=about
    )
    chart.legend = {role: name for role, (name, _) in lines.items()}

    def draw(axes: Axes, width: int) -> None:
        axes.plot([0, 1], [0, 1], color=ROLES["ink"], linewidth=1, linestyle=(0, (5, 3)))
        for role, (_, points) in lines.items():
            confidences = [point[0] for point in points]
            shares = [point[1] for point in points]
            axes.plot(confidences, shares, color=ROLES[role], linewidth=2)
            # Short thick lines serve as squares, because `inline` keeps no markers.
            half = _SQUARE / 2 / (width - _BESIDE_AXES)
            for x, y, _ in points:
                axes.plot([x - half, x + half], [y, y], color=ROLES[role], linewidth=_SQUARE)
        axes.set(xlim=(0, 1), xlabel="confidence")
        charts.value_axis(axes, 1.0, "share right")

    chart.draw("reliability", chart.title, about, (FULL, 300), draw)
    rows = []
    for name, points in lines.values():
        for confidence, share, values in points:
            rows.append([name, f"{confidence:.2f}", f"{share:.2f}", count(values)])
    chart.table = Table(["confidence", "mean", "share right", "values"], rows)
    return chart


def find_wrong_values(
    run: str, labels: str, labels_column: str, tolerance: float
) -> tuple[list[WrongDocument], Counts]:
    """Compare the values of an extraction with their labels.

    Args:
        run: The folder of the run.
        labels: The file of labels, as for `evaluate`.
        labels_column: The column that is read instead of `target`.
        tolerance: The share by which a number may differ from its label.

    Returns:
        The documents with wrong values, without their texts, and the number of correct and wrong
        values by attribute.

    Raises:
        InputError: A file cannot be read.
    """
    gold = read_labels(labels, labels_column, run)
    answers, _ = answers_for(run, gold)
    for key in seen_documents(run, {key: gold[key] for key in answers.keys() & gold.keys()}).ids:
        del gold[key]
    names = asked_attributes(run)
    texts = free_texts(run)
    documents: list[WrongDocument] = []
    counts: Counts = {}
    for key, rows in answers.items():
        if "target" not in gold.get(key, {}):
            continue
        row = rows[0] if rows else {}
        category = category_of(row, gold[key], names)
        wrong = []
        for name, reason, value in _compared(row, gold[key], category, names, texts, tolerance):
            counts.setdefault((category, name), Counter())[reason or "right"] += 1
            if value is not None:
                wrong.append(value)
        if wrong:
            document = WrongDocument(
                id=key,
                category=category,
                source=str(row.get("source", "")),
                row=int(row.get("row") or 0),
                values=wrong,
                pieces=[],
            )
            documents.append(document)
    return documents, counts


def _compared(
    row: Row,
    labels: Row,
    category: str,
    names: AttributeNames,
    texts: Collection[tuple[str, str]],
    tolerance: float,
) -> list[tuple[str, str | None, WrongValue | None]]:
    """Compare the values of one document with its labels.

    Returns:
        (attribute, None, None) for a correct value, (attribute, reason, value) for a wrong one.
    """
    target = flat_values(labels["target"])
    names_of_labels = names.get(category, {name: name for name in target})
    record = flat_values(json.loads(row["record"])) if row else {}
    values = {}
    for value in row.get("values") or []:
        values[names_of_labels.get(value["name"], value["name"])] = value
    compared: list[tuple[str, str | None, WrongValue | None]] = []
    for name in names_of_labels.values():
        if name not in target:
            continue
        forms = (labels.get("accepted") or {}).get(name) or [target[name]]
        # Without a configuration, the types are unknown.
        is_free = not names or (category, name) in texts
        reason: str | None = "no answer"
        if row:
            reason = _reason(record.get(name), forms, tolerance, is_free)
        if reason is None:
            compared.append((name, None, None))
            continue
        value = values.get(name, {})
        span = value.get("span")
        wrong = WrongValue(
            attribute=name,
            label=_shown(forms[0]),
            value=_shown(record.get(name)) or str(value.get("raw") or ""),
            reason=reason,
            status=str(value.get("status", "")),
            confidence=value.get("confidence"),
            span=(span["begin"], span["end"]) if span else None,
        )
        compared.append((name, reason, wrong))
    return compared


def _reason(value: Any, forms: list[Any], tolerance: float, is_free: bool) -> str | None:
    """Return why a value is wrong; None if it is correct.

    Args:
        value: The value.
        forms: All correct forms of the label.
        tolerance: The share by which a number may differ from its label.
        is_free: Whether it is a free text. A part of any other value proves nothing:
            `accident-free` does not extend `accident`, but is its opposite.
    """
    kind = outcome(value, forms, tolerance)
    if kind in (VC, NN):
        return None
    if kind == NV:
        return "no label"
    if kind == VN:
        return "missing"
    if is_free and isinstance(value, str):
        # Common digits of numbers prove nothing: 36 is not a part of 36000.
        text = value.casefold()
        labels = [form.casefold() for form in forms if isinstance(form, str)]
        if any(text in label for label in labels):
            return "a part of the label"
        if any(label in text for label in labels):
            return "more than the label"
    if isinstance(value, list):
        lists = [form for form in forms if isinstance(form, list)]
        if any(all(item in form for item in value) for form in lists):
            return "a part of the label"
        if any(all(item in value for item in form) for form in lists):
            return "more than the label"
    return "another value"


def _shown(value: Any) -> str:
    """Return a value in the form that the page shows."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
