"""What a fit found, as lines for the terminal and as a page with two plots."""

from dataclasses import replace

from matplotlib.axes import Axes

from raypd import storage
from raypd.evaluation.page import reliability_chart
from raypd.fitting.result import CandidateScore, FitResult
from raypd.report import charts, page
from raypd.report.charts import FULL, Chart, Table
from raypd.report.svg import ROLES
from raypd.run import layout, text
from raypd.run.records import Figure

_HEADS = [
    "model",
    "method",
    "labels",
    "F1",
    "95%",
    "documents/s",
    "1,000 documents",
    "the corpus",
    "its training",
]


def write(result: FitResult, why: str) -> str:
    """Writes the page into the folder of the fit; its path. why: nothing is recommended.

    Raises RunError.
    """
    where, corpus = storage.join(result.path, layout.REPORT), result.corpus_documents
    content = page.fill(
        "fit.html.j2",
        result=result,
        name=result.path.rpartition("/")[2],
        why=why,
        command=f"raypd extract {result.configuration}",
        heads=_HEADS,
        rows=[_cells(score) for score in result.scores],
        note=f"The corpus: {text.count(corpus.value)} documents, on one node of this kind."
        if corpus
        else "",
        quality=_quality(result),
        learning=_learning(result),
        sureness=_reliability(result),
    )
    page.put(where, content.encode(), "the page ")
    return where


def describe(result: FitResult, why: str) -> str:
    rows = [_HEADS, *(_cells(score) for score in result.scores)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(
        f"{{:{'<' if column < 2 else '>'}{width}}}" for column, width in enumerate(widths)
    )
    lines = [form.format(*row).rstrip() for row in rows]
    lines += [
        f"{score.name}: {score.error}" for score in result.scores + result.curve if score.error
    ]
    for score in result.scores:
        if score.calibration_error:
            before, after = score.calibration_error
            lines.append(
                f"confidence: {score.name}, calibration error {before:.3f}, calibrated {after:.3f}"
            )
    for name, points in _curves(result).items():
        lines.append(
            f"labels: {name} " + ", ".join(f"{f1:.3f} with {labels}" for labels, f1 in points)
        )
    lines.append(
        f"F1: {result.measure}, on {text.counted(result.documents.get('test', 0), 'document')}"
    )
    if result.stopped is not None:
        lines.append(f"stopped: {result.stopped}")
    if result.choice is not None:
        floor = f"surely at fit.f1_floor, {result.floor:g}, or above"
        lines.append(f"recommended: {result.choice.name}, the cheapest that is {floor}")
        lines.append(
            f"configuration: {result.configuration}\nnext: `raypd extract "
            f"{result.configuration}` runs it"
        )
    else:
        lines.append(f"none is surely at fit.f1_floor, {result.floor:g}: {why}")
    return "\n".join([*lines, f"page: {storage.join(result.path, layout.REPORT)}"])


def _curves(result: FitResult) -> dict[str, list[tuple[int, float]]]:
    scores = [score for score in [*result.curve, *result.scores] if score.f1]
    names = dict.fromkeys(score.name for score in result.curve)
    return {
        name: [(s.labels, s.f1.value) for s in scores if s.name == name and s.f1] for name in names
    }


def _cells(score: CandidateScore) -> list[str]:
    def shown(figure: Figure | None, show: text.Show) -> str:
        return text.NONE if figure is None else show(figure.value)

    interval = (
        text.NONE
        if score.f1 is None or score.f1.low is None
        else f"{score.f1.low:.3f} to {score.f1.high:.3f}"
    )
    corpus = shown(score.corpus_hours, lambda hours: text.duration(3600 * hours))
    corpus += f", {text.usd(score.corpus_usd.value)}" if score.corpus_usd is not None else ""
    training = text.duration(score.training_seconds) if score.training_seconds else text.NONE
    training += f", {text.usd(score.training_usd)}" if score.training_usd else ""
    labels, f1 = (
        text.count(score.labels) if score.labels else text.NONE,
        shown(score.f1, lambda value: f"{value:.3f}"),
    )
    speed, price = (
        shown(score.documents_per_second, text.number),
        shown(score.usd_per_1000, text.usd),
    )
    return [
        score.name,
        score.method or text.NONE,
        labels,
        f1,
        interval,
        speed,
        price,
        corpus,
        training,
    ]


def _quality(result: FitResult) -> Chart:
    """F1 with its interval over the documents a second; the floor as a line."""
    chart = Chart("Quality by speed", "F1 with its 95% interval; the dashed line is the floor")
    points = [
        (s, s.f1, s.documents_per_second.value)
        for s in result.scores
        if s.f1 and s.documents_per_second
    ]
    if not points:
        return replace(chart, missing="No model could be scored and measured.")
    fastest = max(speed for *_, speed in points)

    def draw(axes: Axes, width: int) -> None:
        for score, f1, speed in points:
            role = "accent" if score.name == result.recommended else "muted"
            axes.plot(
                [speed, speed],
                [f1.low or f1.value, f1.high or f1.value],
                color=ROLES[role],
                linewidth=2,
            )
            half = 0.008 * fastest
            axes.plot([speed - half, speed + half], [f1.value] * 2, color=ROLES[role], linewidth=4)
            side = ("right", -8) if speed > 0.6 * fastest else ("left", 8)
            charts.write(
                axes, score.name, (speed, f1.value), (side[1], 0), role, ha=side[0], va="center"
            )
        charts.dashed(axes.axhline, result.floor, "budget", 1.5)
        axes.set(xlim=(0, 1.15 * fastest), xlabel="documents/s of one worker")
        charts.value_axis(axes, 1.0, "F1")

    summary = "; ".join(
        f"{s.name} {f1.value:.3f} at {text.number(speed)} documents/s" for s, f1, speed in points
    )
    chart.draw("quality", chart.title, summary, (FULL, 300), draw)
    rows = [[score.name, text.number(speed), f"{f1.value:.3f}"] for score, f1, speed in points]
    chart.table = Table(["model", "documents/s", "F1"], rows)
    return chart


def _reliability(result: FitResult) -> Chart:
    """The share of right values by their confidence, of the recommended or else the first
    calibrated candidate.
    """
    calibrated = [score for score in result.scores if score.reliability]
    if not calibrated:
        return Chart("Confidence", missing="No candidate could be calibrated.")
    score = next((score for score in calibrated if score.name == result.recommended), calibrated[0])
    before, after = score.reliability
    errors = "calibration error {:.3f} as the model has it, {:.3f} calibrated".format(
        *score.calibration_error
    )
    lines = {
        "muted": ("as the model has it", before),
        "accent": ("calibrated on the validation part", after),
    }
    return reliability_chart(lines, f"{score.name}: {errors}, on the test part.")


def _learning(result: FitResult) -> Chart:
    """F1 over the number of labels, a line a candidate."""
    chart = Chart("More labels", "F1 by the number of labelled documents in training")
    lines = {name: sorted(points) for name, points in _curves(result).items() if len(points) > 1}
    if not lines:
        return replace(
            chart, missing="The curve was not asked for (fit.curve), or is not there yet."
        )

    def draw(axes: Axes, width: int) -> None:
        for name, points in lines.items():
            role = "accent" if name == result.recommended else "muted"
            axes.plot(*zip(*points, strict=True), color=ROLES[role], linewidth=2)
            charts.write(axes, name, points[-1], (-4, 8), role, ha="right")
        charts.dashed(axes.axhline, result.floor, "budget", 1.5)
        axes.set(xlim=(0, None), xlabel="labelled documents")
        charts.value_axis(axes, 1.0, "F1")

    summary = "; ".join(
        f"{name}: " + ", ".join(f"{f1:.3f} with {n}" for n, f1 in p) for name, p in lines.items()
    )
    chart.draw("learning", chart.title, summary, (FULL, 280), draw)
    rows = [
        [name, text.count(labels), f"{f1:.3f}"]
        for name, points in lines.items()
        for labels, f1 in points
    ]
    chart.table = Table(["model", "labels", "F1"], rows)
    return chart
