"""The result of a fit, as lines for the terminal and as a page with charts."""

import shlex
from dataclasses import dataclass, replace

from matplotlib.axes import Axes

from raypd import storage, text
from raypd.estimation import Figure
from raypd.evaluation import AttributeScore, about_perfect, reliability_chart
from raypd.fitting.result import AttributeResult, CandidateScore, FitResult
from raypd.report import FULL, ROLES, Chart, Table, charts, page
from raypd.run import layout

# A gain in F1 by the last labels from which more labels are worth while.
_GAIN = 0.01
# A model that is larger than most that are fitted.
_LARGER = "Qwen/Qwen3-1.7B"
_HEADS = [
    "model",
    "method",
    "labels",
    "F1",
    "95%",
    "documents/s",
    "1,000 documents",
    "all documents",
    "its training",
]
_CORPUS_COLUMN = 7
_NO_PRICE = "no price"
_TEXT_COLUMNS = 2  # the first columns, which are aligned to the left
_FLOOR_WIDTH = 1.5
# Attributes that the terminal names, and characters of a name or a label.
_SHOWN_ATTRIBUTES = 8
_SHOWN_CHARACTERS = 60
_ADVICE = (
    "do not rely on such an attribute. Label more documents, above all with its rarer values "
    "(`raypd review`, fit.documents); or describe it better or give it another type "
    "(docs/values.md), and fit again"
)


def write(result: FitResult, reason: str) -> str:
    """Write the page into the folder of the fit.

    Args:
        result: The result.
        reason: Why nothing is recommended, as `missing` says.

    Returns:
        The path of the page.

    Raises:
        RunError: If the page cannot be written.
    """
    note = ""
    if result.corpus_documents:
        documents = text.count(result.corpus_documents.value)
        note = f"All {documents} documents of the input, on one node of this kind."
    content = page.fill(
        "fit.html.j2",
        result=result,
        name=result.path.rpartition("/")[2],
        why=reason,
        command=_run_command(result.configuration),
        heads=_heads(result),
        rows=[_cells(score) for score in result.scores],
        note=note,
        attributes=_attribute_table(result),
        warnings=_attribute_warnings(result),
        advice=_ADVICE,
        best=_best(result),
        quality=_quality(result),
        learning=_learning(result),
        sureness=_reliability(result),
    )
    path = storage.join(result.path, layout.REPORT)
    page.put(path, content.encode(), "the page ")
    return path


def describe(result: FitResult, reason: str) -> str:
    """Return the result as lines for the terminal.

    Args:
        result: The result.
        reason: Why nothing is recommended, as `missing` says.
    """
    lines = _table(result)
    for score in result.scores + result.curve:
        if score.error:
            lines.append(f"{score.name}: {score.error}")
    for score in result.scores:
        if score.calibration_error:
            own, *calibrated = score.calibration_error
            outcome = ", uncalibrated because a calibration is not certain to improve it"
            if calibrated:
                outcome = f", calibrated {calibrated[0]:.3f}"
            lines.append(f"confidence: {score.name}, calibration error {own:.3f}{outcome}")
    for name, points in _curves(result).items():
        lines.append(f"labels: {name} {_curve_in_words(points)}")
    documents = text.counted(result.documents.get("test", 0), "document")
    lines.append(f"F1: {result.measure}, on {documents}")
    if any(score.f1 is not None and score.f1.value == 1.0 for score in result.scores):
        lines.append(about_perfect(result.measure, result.documents["test"]))
    if result.stopped is not None:
        lines.append(f"stopped: {result.stopped}")
    lines += _attributes_below_floor(result)
    if result.choice is None:
        lines.append(f"none is certain to reach fit.f1_floor, {result.floor:g}: {reason}")
        if result.best_configuration is not None:
            lines.append(
                f"best nevertheless: {result.best}; configuration: {result.best_configuration}"
            )
            lines += _warning_lines(result)
    else:
        floor = f"certain to reach fit.f1_floor, {result.floor:g}"
        lines.append(f"recommended: {result.choice.name}, the {_best(result)} that is {floor}")
        lines += _warning_lines(result)
        lines.append(f"configuration: {result.configuration}")
    lines.append(f"page: {storage.join(result.path, layout.REPORT)}")
    lines.append(f"Next: {_next_step(result)}")
    return "\n".join(lines)


def _best(result: FitResult) -> str:
    """Return by what the recommended score was chosen."""
    has_prices = any(score.usd_per_1000 is not None for score in result.scores)
    return "cheapest" if has_prices else "fastest"


def _shown_score(result: FitResult) -> CandidateScore | None:
    """Return the score that is recommended, or else the best one."""
    return result.choice or result.best_score


def _attributes_below_floor(result: FitResult) -> list[str]:
    """Return a line that names the attributes whose F1 is below the floor; none without such."""
    score = _shown_score(result)
    if score is None:
        return []
    low = []
    for attribute in score.attributes:
        figures = attribute.score
        if figures.f1 < result.floor and figures.right < figures.values:
            right = f"{text.count(figures.right)} of {text.count(figures.values)} right"
            low.append(f"{_attribute_name(result, figures)} {figures.f1:.3f} ({right})")
    if not low:
        return []
    named = ", ".join(low[:_SHOWN_ATTRIBUTES])
    if len(low) > _SHOWN_ATTRIBUTES:
        named += f", and {len(low) - _SHOWN_ATTRIBUTES} more on the page"
    return [f"attributes: {score.name}, F1 below fit.f1_floor, {result.floor:g}: {named}"]


def _warning_lines(result: FitResult) -> list[str]:
    """Return the warnings about worthless attributes for the terminal, with what to do."""
    warnings = _attribute_warnings(result)
    if not warnings:
        return []
    lines = [f"warning: {warning}" for warning in warnings[:_SHOWN_ATTRIBUTES]]
    if len(warnings) > _SHOWN_ATTRIBUTES:
        lines.append(f"warning: {len(warnings) - _SHOWN_ATTRIBUTES} more, which the page shows")
    lines.append(f"what helps: {_ADVICE}")
    return lines


def _attribute_warnings(result: FitResult) -> list[str]:
    """Return a sentence for each worthless attribute of the recommended or best score."""
    score = _shown_score(result)
    if score is None:
        return []
    warnings = []
    for attribute in score.attributes:
        if not attribute.is_worthless:
            continue
        figures = attribute.score
        name = _attribute_name(result, figures)
        label = text.clean(figures.frequent_label, _SHOWN_CHARACTERS)
        warning = (
            f"{score.name} has {name} right in {text.count(figures.right)} of "
            f"{text.counted(figures.values, 'document')}; its most frequent label, {label}, "
            f"everywhere would be right in {text.count(figures.frequent_right)}"
        )
        for fault in attribute.faults.values():
            warning += f"; {fault}"
        warnings.append(warning)
    return warnings


def _attribute_name(result: FitResult, figures: AttributeScore) -> str:
    """Return the name of an attribute, with its category where there are several."""
    categories = {
        attribute.score.category for score in result.scores for attribute in score.attributes
    }
    name = figures.attribute
    if len(categories) > 1:
        name = f"{figures.category} · {name}"
    return text.clean(name, _SHOWN_CHARACTERS)


def _attribute_table(result: FitResult) -> Table | None:
    """Return the F1 of each attribute and score; None if nothing was scored."""
    scores = [score for score in result.scores if score.attributes]
    shown = _shown_score(result)
    if shown is None or not shown.attributes:
        return None
    by_score = []
    for score in scores:
        of_score = {}
        for attribute in score.attributes:
            of_score[attribute.score.category, attribute.score.attribute] = attribute
        by_score.append(of_score)
    rows = []
    for attribute in shown.attributes:
        figures = attribute.score
        cells = [_attribute_name(result, figures)]
        for of_score in by_score:
            cells.append(_attribute_cell(of_score.get((figures.category, figures.attribute))))
        share = text.share(figures.frequent_right, figures.values)
        cells.append(f"{share}, {figures.frequent_label}")
        rows.append(cells)
    heads = ["attribute", *(score.name for score in scores), "always the most frequent label"]
    note = (
        "The F1 of each attribute on the test part, with all accepted forms of a label, and the "
        "share of documents that have it right. An F1 counts values alone; a share also counts "
        "nulls. The last column is the share that the most frequent label would have right "
        "everywhere. ⚠ marks an attribute that is worse than that, "
        "or only equal to it because its answers say little."
    )
    return Table(heads, rows, note)


def _attribute_cell(attribute: AttributeResult | None) -> str:
    """Return the figures of an attribute as a cell of the table."""
    if attribute is None:
        return text.NONE
    figures = attribute.score
    cell = f"{figures.f1:.3f}, {text.share(figures.right, figures.values)} right"
    return f"⚠ {cell}" if attribute.is_worthless else cell


def _run_command(configuration: str | None) -> str:
    """Return the command that runs a configuration, which names a folder of its own."""
    return shlex.join(["raypd", "extract", str(configuration)])


def _next_step(result: FitResult) -> str:
    """Return how to run the recommended model, or what would most likely lift the F1."""
    if result.choice is not None:
        return f"`{_run_command(result.configuration)}` runs it"
    best = result.best_score
    if best is None or result.best_configuration is None:
        return "run the same command again, which resumes, or change what the messages above name"
    command = f"`{_run_command(result.best_configuration)}` runs it as it is"
    if best.f1 is not None and best.f1.value >= result.floor:
        return f"more test documents (fit.documents) may show that it is above the floor; {command}"
    curve = [score for score in result.curve if score.name == best.name and score.f1 is not None]
    last = curve[-1].f1 if curve else None
    if best.f1 is not None and last is not None and best.f1.value - last.value > _GAIN:
        return f"more labels (`raypd review`) would help most; {command}"
    return (
        f"a larger model would help most (fit.candidates, such as {{model.name: {_LARGER}}}); "
        f"{command}"
    )


def _heads(result: FitResult) -> list[str]:
    """Return the headings of the table, one of which names the documents of the input."""
    heads = list(_HEADS)
    if result.corpus_documents:
        heads[_CORPUS_COLUMN] = f"all {text.count(result.corpus_documents.value)} documents"
    return heads


def _table(result: FitResult) -> list[str]:
    """Return the lines of the table of scores, in columns of equal width."""
    rows = [_heads(result), *(_cells(score) for score in result.scores)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            is_text = number < _TEXT_COLUMNS
            cells.append(cell.ljust(width) if is_text else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


Point = tuple[int, float]  # number of labels, F1


def _curves(result: FitResult) -> dict[str, list[Point]]:
    """Return the learning curve of each candidate that has one; the last point has all labels."""
    curves: dict[str, list[Point]] = {score.name: [] for score in result.curve}
    for score in result.curve + result.scores:
        if score.f1 and score.name in curves:
            curves[score.name].append((score.labels, score.f1.value))
    return curves


def _curve_in_words(points: list[Point]) -> str:
    return ", ".join(f"{f1:.3f} with {labels}" for labels, f1 in points)


def _cells(score: CandidateScore) -> list[str]:
    """Return the cells of a score's row in the table."""
    f1 = text.NONE
    interval = text.NONE
    if score.f1 is not None:
        f1 = f"{score.f1.value:.3f}"
        if score.f1.low is not None:
            interval = f"{score.f1.low:.3f} to {score.f1.high:.3f}"
    corpus = text.NONE
    if score.corpus_hours is not None:
        corpus = text.duration(3600 * score.corpus_hours.value)
    if score.corpus_usd is not None:
        corpus += f", {text.usd(score.corpus_usd.value)}"
    training = text.NONE
    if score.training_seconds:
        training = text.duration(score.training_seconds)
    if score.training_usd:
        training += f", {text.usd(score.training_usd)}"
    return [
        score.name,
        score.method or text.NONE,
        text.count(score.labels) if score.labels else text.NONE,
        f1,
        interval,
        _shown(score.documents_per_second, text.number),
        _price(score),
        corpus,
        training,
    ]


def _price(score: CandidateScore) -> str:
    """Return the price of 1,000 documents; it is not known on a machine without a price."""
    if score.usd_per_1000 is None and score.documents_per_second is not None:
        return _NO_PRICE
    return _shown(score.usd_per_1000, text.usd)


def _shown(figure: Figure | None, show: text.Show) -> str:
    if figure is None:
        return text.NONE
    return show(figure.value)


@dataclass
class _QualityPoint:
    """A score that has an F1 and a speed."""

    name: str
    f1: Figure
    speed: float  # documents/s of one worker


def _quality(result: FitResult) -> Chart:
    """Draw F1 with its interval by documents per second, and the floor as a line."""
    chart = Chart("Quality by speed", "F1 with its 95% interval; the dashed line is the floor")
    points = []
    for score in result.scores:
        if score.f1 and score.documents_per_second:
            points.append(_QualityPoint(score.name, score.f1, score.documents_per_second.value))
    if not points:
        return replace(chart, missing="No model could be scored and measured.")
    fastest = max(point.speed for point in points)

    def draw(axes: Axes, width: int) -> None:
        for point in points:
            role = "accent" if point.name == result.recommended else "muted"
            _draw_point(axes, point, role, fastest)
        charts.dashed(axes.axhline, result.floor, "budget", _FLOOR_WIDTH)
        axes.set(xlim=(0, 1.15 * fastest), xlabel="documents/s of one worker")
        charts.value_axis(axes, 1.0, "F1")

    summary = "; ".join(
        f"{point.name} {point.f1.value:.3f} at {text.number(point.speed)} documents/s"
        for point in points
    )
    chart.draw("quality", chart.title, summary, (FULL, 300), draw)
    rows = [[point.name, text.number(point.speed), f"{point.f1.value:.3f}"] for point in points]
    chart.table = Table(["model", "documents/s", "F1"], rows)
    return chart


def _draw_point(axes: Axes, point: _QualityPoint, role: str, fastest: float) -> None:
    """Draw the interval of an F1, the F1 as a short line across it, and the name beside it."""
    f1 = point.f1
    speed = point.speed
    interval = [f1.low or f1.value, f1.high or f1.value]
    axes.plot([speed, speed], interval, color=ROLES[role], linewidth=2)
    half = 0.008 * fastest
    axes.plot([speed - half, speed + half], [f1.value] * 2, color=ROLES[role], linewidth=4)
    alignment = "left"
    offset = 8
    if speed > 0.6 * fastest:  # the name would not fit to the right of the point
        alignment = "right"
        offset = -8
    charts.write(axes, point.name, (speed, f1.value), (offset, 0), role, ha=alignment, va="center")


def _reliability(result: FitResult) -> Chart:
    """Draw the share of right values by confidence.

    The chart is of the recommended candidate, or else of the first that could be calibrated.
    """
    measured = [score for score in result.scores if score.reliability]
    if not measured:
        return Chart("Confidence", missing="No candidate could be calibrated.")
    recommended = [score for score in measured if score.name == result.recommended]
    score = (recommended or measured)[0]
    if len(score.reliability) == 1:
        return reliability_chart(
            {"accent": ("uncalibrated", score.reliability[0])},
            f"{score.name}: calibration error {score.calibration_error[0]:.3f} on the test part. "
            "Its confidences stay uncalibrated, because a calibration is not certain to improve "
            "them.",
        )
    points_before, points_after = score.reliability
    error_before, error_after = score.calibration_error
    lines = {
        "muted": ("before calibration", points_before),
        "accent": ("calibrated on the validation part", points_after),
    }
    return reliability_chart(
        lines,
        f"{score.name}: calibration error {error_before:.3f} before calibration and "
        f"{error_after:.3f} after it, on the test part.",
    )


def _learning(result: FitResult) -> Chart:
    """Draw F1 by the number of labels, a line per candidate."""
    chart = Chart("More labels", "F1 by the number of labelled documents in training")
    lines = {}
    for name, points in _curves(result).items():
        if len(points) > 1:
            lines[name] = sorted(points)
    if not lines:
        return replace(chart, missing="The curve is off (fit.curve=[]), or not measured yet.")

    def draw(axes: Axes, width: int) -> None:
        for name, points in lines.items():
            role = "accent" if name == result.recommended else "muted"
            labels = [point[0] for point in points]
            f1s = [point[1] for point in points]
            axes.plot(labels, f1s, color=ROLES[role], linewidth=2)
            charts.write(axes, name, points[-1], (-4, 8), role, ha="right")
        charts.dashed(axes.axhline, result.floor, "budget", _FLOOR_WIDTH)
        axes.set(xlim=(0, None), xlabel="labelled documents")
        charts.value_axis(axes, 1.0, "F1")

    summary = "; ".join(f"{name}: {_curve_in_words(points)}" for name, points in lines.items())
    chart.draw("learning", chart.title, summary, (FULL, 280), draw)
    rows = []
    for name, points in lines.items():
        for labels, f1 in points:
            rows.append([name, text.count(labels), f"{f1:.3f}"])
    chart.table = Table(["model", "labels", "F1"], rows)
    return chart
