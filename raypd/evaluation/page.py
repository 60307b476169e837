"""The page of `raypd evaluate`: what was wrong, document by document, the label beside the value,
with the reason.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from raypd import storage
from raypd.config import ExtractionConfig
from raypd.errors import UserError
from raypd.evaluation import score
from raypd.evaluation.score import NN, NV, VC, VN, Evaluation, flat_values
from raypd.report import charts, page, review
from raypd.report.charts import FULL, Chart, Table
from raypd.report.svg import ROLES
from raypd.report.texts import marked, text_in
from raypd.run.load import load_run
from raypd.run.text import count

PAGE = "evaluation.html"
_DOCUMENTS = 200  # that are shown, those with the most wrong values
REASONS = (
    "another value",
    "a part of the label",
    "more than the label",
    "no label",
    "missing",
    "no answer",
)
# (category, attribute) -> values that are right, and of each reason.
Counts = dict[tuple[str, str], Counter[str]]
_MEASURES = ("scored F1", "strict F1", "values right")


@dataclass
class WrongValue:
    attribute: str
    label: str
    value: str
    reason: str  # of REASONS
    status: str  # of the value
    confidence: float | None


@dataclass
class WrongDocument:
    """A document with wrong values: its text in pieces, each with the attributes whose values stand
    there.
    """

    id: str
    category: str
    source: str
    row: int
    values: list[WrongValue]
    pieces: list[tuple[str, str]]


def write(
    run: str, labels: str, evaluation: Evaluation, labels_column: str, tolerance: float
) -> str | None:
    """Writes the page of an extraction into the run's folder; where it is, None for a run of
    another kind. Raises ConfigError: there is no run in the folder; RunError: the page cannot be
    written.
    """
    root = storage.absolute(run)
    config = load_run(root, [])
    if not isinstance(config.task, ExtractionConfig):
        return None
    mistakes, counts = find(run, labels, labels_column, tolerance)
    shown = sorted(mistakes, key=lambda document: -len(document.values))[:_DOCUMENTS]
    texts, no_texts = {}, ""
    try:
        texts = review.documents_at(
            config, root, {(document.source, document.row): document for document in shown}
        )
    except UserError as error:  # the input has moved
        no_texts = f"Without the documents' texts: {error}"
    for document in shown:
        if (read := texts.get((document.source, document.row))) is not None and read.error is None:
            text = text_in(read, config)
            found = [(text.find(value.value), value) for value in document.values if value.value]
            spans = [
                ((at, at + len(value.value)), value.attribute) for at, value in found if at >= 0
            ]
            document.pieces = list(marked(text, spans))
    sureness = None
    if (gap := evaluation.calibration_error) is not None:
        sureness = reliability_chart(
            {"accent": ("this run", evaluation.reliability)}, f"calibration error {gap:.3f}"
        )
    measures = [
        measure for measure in evaluation.measures if measure.name in _MEASURES and not measure.of
    ]
    html = page.fill(
        "evaluation.html.j2",
        name=root.rstrip("/").rpartition("/")[2],
        labels=labels,
        measures=measures,
        heads=["attribute", "right", *REASONS],
        attributes=_rows(counts),
        documents=shown,
        no_texts=no_texts,
        sureness=sureness,
        wrong=len(mistakes),
    )
    path = storage.join(root, PAGE)
    page.put(path, html.encode())
    return path


def _rows(by_attribute: Counts) -> list[list[str]]:
    """Cells by attribute, the one with the most wrong values first."""
    ranked = sorted(by_attribute.items(), key=lambda item: item[1]["right"] - item[1].total())
    return [
        [
            " · ".join(filter(None, key)),
            *(str(counts[name]) if counts[name] else "" for name in ("right", *REASONS)),
        ]
        for key, counts in ranked
    ]


def reliability_chart(
    lines: Mapping[str, tuple[str, Sequence[Sequence[float]]]], about: str
) -> Chart:
    """Share of right values by confidence. lines: role -> what it is, and (confidence, share right,
    values) by bin.
    """
    chart = Chart(
        "Confidence", "share of right values by confidence; dashed: as it should be", note=about
    )
    chart.legend = {role: name for role, (name, _) in lines.items()}

    def draw(axes: Axes, width: int) -> None:
        axes.plot([0, 1], [0, 1], color=ROLES["ink"], linewidth=1, linestyle=(0, (5, 3)))
        for role, (_, points) in lines.items():
            axes.plot(
                [point[0] for point in points],
                [point[1] for point in points],
                color=ROLES[role],
                linewidth=2,
            )
            for x, y, _ in points:  # dots: `inline` keeps no markers
                axes.plot([x - 0.005, x + 0.005], [y, y], color=ROLES[role], linewidth=7)
        axes.set(xlim=(0, 1), xlabel="confidence")
        charts.value_axis(axes, 1.0, "share right")

    chart.draw("reliability", chart.title, about, (FULL, 300), draw)
    rows = [
        [name, f"{p[0]:.2f}", f"{p[1]:.2f}", count(p[2])]
        for name, points in lines.values()
        for p in points
    ]
    chart.table = Table(["confidence", "mean", "share right", "values"], rows)
    return chart


def find(
    run: str, labels: str, labels_column: str, tolerance: float
) -> tuple[list[WrongDocument], Counts]:
    """The wrong values of an extraction, and how many there are.

    Raises InputError as `evaluate`.
    """
    gold, names = score.read_labels(labels, labels_column, run), score.asked_attributes(run)
    mistakes: list[WrongDocument] = []
    by_attribute: Counts = {}
    for id, rows in score.read_answers(run).items():
        if "target" not in gold.get(id, {}):
            continue
        row = rows[0] if rows else {}
        target = flat_values(gold[id]["target"])
        category = score.category_of(row, gold[id], names)
        asked = names.get(category, {name: name for name in target})
        record = flat_values(json.loads(row["record"])) if row else {}
        values = {
            asked.get(value["name"], value["name"]): value for value in row.get("values") or []
        }
        wrong = []
        for name in [name for name in asked.values() if name in target]:
            forms = (gold[id].get("accepted") or {}).get(name) or [target[name]]
            reason = _reason(record.get(name), forms, tolerance) if row else "no answer"
            by_attribute.setdefault((category, name), Counter())[reason or "right"] += 1
            if reason is not None:
                value = values.get(name, {})
                shown = _shown(record.get(name)) or str(value.get("raw") or "")
                status = str(value.get("status", ""))
                wrong.append(
                    WrongValue(
                        name, _shown(forms[0]), shown, reason, status, value.get("confidence")
                    )
                )
        if wrong:
            place = str(row.get("source", "")), int(row.get("row") or 0)
            mistakes.append(WrongDocument(id, category, *place, wrong, []))
    return mistakes, by_attribute


def _reason(value: Any, forms: list[Any], tolerance: float) -> str | None:
    """Why a value is wrong; None: it is right."""
    kind = score.outcome(value, forms, tolerance)
    if kind in (VC, NN):
        return None
    if kind in (NV, VN):
        return "no label" if kind == NV else "missing"
    text, labels = str(value).casefold(), [str(form).casefold() for form in forms]
    if any(text in label for label in labels):
        return "a part of the label"
    return "more than the label" if any(label in text for label in labels) else "another value"


def _shown(value: Any) -> str:
    return (
        ""
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
    )
