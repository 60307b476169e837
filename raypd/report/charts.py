"""The charts of the report page, drawn by matplotlib as inline SVG.

SVG needs no script and prints sharply. Each chart has a wide and a narrow form, because scaled text
would be illegible on a phone; CSS shows the form that fits.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from raypd import text
from raypd.billing import WorkerTime
from raypd.report.data import ReportSession, RunReport
from raypd.report.ledger import RunBill
from raypd.report.svg import ROLES, inline
from raypd.run import TrainingRecord, spread

# The kinds of a worker's time, and their names in the legend.
KINDS = {"busy": "busy", "startup": "starting up", "idle": "idle", "lost": "work that was lost"}
# Widths in CSS pixels.
HALF = 520
FULL = 940
NARROW = 360
# Draws on axes, given the width in pixels.
Draw = Callable[[Axes, int], None]
# The number of bins in the chart of speed.
_BINS = 120
# The maximum number of workers in the timeline, and in its table.
_TIMELINE_ROWS = 600
_WORKER_ROWS = 100
# Units of running time: seconds, name, and the longest run in seconds that uses the unit.
_UNITS = [
    (1, "seconds", 180),
    (60, "minutes", 3 * 3600),
    (3600, "hours", 4 * 86400),
    (86400, "days", float("inf")),
]
_STYLE: Any = {
    # Text remains text, in the page's font.
    "svg.fonttype": "none",
    "font.size": 12.0,
    # This makes the same page for the same run.
    "svg.hashsalt": "raypd",
    # A category may have a name such as $x$.
    "text.parse_math": False,
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    "axes.edgecolor": ROLES["grid"],
    "axes.labelcolor": ROLES["muted"],
    "text.color": ROLES["ink"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": ROLES["grid"],
    "grid.linewidth": 1.0,
    **{f"{axis}tick.color": ROLES["muted"] for axis in "xy"},
    **{f"{axis}tick.major.size": 0 for axis in "xy"},
    "xtick.major.pad": 5,
}


@dataclass
class Table:
    """Rows of text below headings. The page escapes the cells and cuts long ones."""

    heads: list[str]
    rows: list[list[str]]
    note: str = ""
    # The indices of columns with text; the others have figures. The first column names the row.
    text_columns: tuple[int, ...] = (0,)


@dataclass
class Chart:
    """A chart in both forms and as a table, or the reason why there is none."""

    title: str
    caption: str = ""
    missing: str = ""
    # The form, wide or narrow -> its SVG.
    forms: dict[str, str] = field(default_factory=dict)
    table: Table | None = None
    # The role of a color -> its meaning.
    legend: dict[str, str] = field(default_factory=dict)
    note: str = ""

    def draw(self, name: str, title: str, summary: str, size: tuple[int, int], draw: Draw) -> None:
        """Draw both forms.

        Args:
            name: A name that is unique on the page.
            title: The title that a screen reader reads.
            summary: The description that a screen reader reads.
            size: The width of the wide form and the height, in pixels.
            draw: Draws the chart.
        """
        width, height = size
        for form, pixels in (("wide", width), ("narrow", NARROW)):
            with rc_context(_STYLE):
                layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.04)
                figure = Figure(figsize=(pixels / 72, height / 72), layout=layout)
                draw(figure.add_subplot(), pixels)
                self.forms[form] = inline(figure, f"{name}-{form}", title, summary)


class RunningTime:
    """Converts Unix seconds to seconds of running time, which stands still between sessions.

    Attributes:
        total: Seconds of all sessions.
        borders: The running times at which sessions after the first began.
    """

    def __init__(self, sessions: Sequence[ReportSession]) -> None:
        self._unix: list[float] = []
        self._elapsed: list[float] = []
        self.total = 0.0
        for session in sessions:
            # Sessions do not overlap.
            began = max([session.began, *self._unix[-1:]])
            ended = max(began, session.ended)
            self._unix += [began, ended]
            self._elapsed += [self.total, self.total + ended - began]
            self.total = self._elapsed[-1]
        self.borders = self._elapsed[2::2]

    def at(self, unix: Sequence[Any] | np.ndarray) -> np.ndarray:
        """Return the seconds of running time up to Unix times."""
        times = np.asarray(unix, dtype=float)
        if not self._unix:
            return np.zeros_like(times)
        return np.asarray(np.interp(times, self._unix, self._elapsed))


def _time_axis(axes: Axes, clock: RunningTime, width: int) -> float:
    """Show running time on the x axis, and return the seconds of its unit."""
    total = max(clock.total, 1e-6)
    seconds, name = next((seconds, name) for seconds, name, limit in _UNITS if total <= limit)
    axes.set(xlim=(0, total / seconds), xlabel=f"running time, {name}")
    ticks = 6
    if width <= NARROW:
        ticks = 4
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 3, 5, 10]))
    for border in clock.borders:
        dashed(axes.axvline, border / seconds, "muted", 1, (2, 3))
    if clock.borders and len(clock.borders) < 6:
        point = (clock.borders[0] / seconds, 1)
        write(
            axes, "resumed", point, (4, 2), "muted", xycoords=("data", "axes fraction"), va="bottom"
        )
    return float(seconds)


def value_axis(axes: Axes, top: float, label: str) -> None:
    """Show values from 0 to `top` on the y axis."""
    axes.set(ylim=(0, max(top, 1e-9)), ylabel=label)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def dashed(
    line: Callable[..., Any],
    position: float,
    role: str,
    width: float = 1,
    dashes: tuple[int, int] = (5, 3),
) -> None:
    """Draw a dashed line with `line`, such as `axes.axhline`."""
    line(position, color=ROLES[role], linewidth=width, linestyle=(0, dashes))


def write(
    axes: Axes,
    words: str,
    xy: tuple[float, float],
    offset: tuple[float, float],
    role: str,
    **options: Any,
) -> None:
    """Write words next to a point; the offset is in points."""
    axes.annotate(words, xy, offset, textcoords="offset points", color=ROLES[role], **options)


def _over_time(heads: list[str], times: np.ndarray, values: np.ndarray, show: text.Show) -> Table:
    """Return about twelve values over time as a table."""
    indices = range(0, len(values), max(1, len(values) // 12))
    return Table(heads, [[text.duration(times[index]), show(values[index])] for index in indices])


def money(bill: RunBill | None, clock: RunningTime) -> Chart:
    """Chart the dollars spent over running time, and the budget if it fits the scale."""
    chart = Chart("Money over time", "dollars spent")
    chart.missing = _no_money(bill, clock)
    if bill is None or chart.missing:
        return chart
    unix, usd = np.array(bill.series).T
    times = np.concatenate([[0.0], clock.at(unix)])
    dollars = np.concatenate([[0.0], usd])
    spent = float(dollars[-1])
    budget = bill.newest.budget_usd
    shown_budget = None
    if budget is not None and budget <= max(spent, 1e-9) * 5:
        shown_budget = budget

    def draw(axes: Axes, width: int) -> None:
        size = _time_axis(axes, clock, width)
        area = np.concatenate([dollars, [0.0, 0.0]])
        axes.fill([*times / size, times[-1] / size, 0.0], area, color=ROLES["wash"], linewidth=0)
        axes.plot(times / size, dollars, color=ROLES["accent"], linewidth=2, clip_on=False)
        value_axis(axes, max(spent, shown_budget or 0.0) * 1.12, "spent, USD")
        axes.yaxis.set_major_formatter("${x:,.10g}")
        if shown_budget is not None:
            dashed(axes.axhline, shown_budget, "budget", 1.5)
            label = f"budget {text.usd(shown_budget)}"
            write(axes, label, (0, shown_budget), (4, -4), "budget", va="top")
        end = (times[-1] / size, spent)
        write(axes, text.usd(spent), end, (-4, 5), "accent", ha="right", fontweight="bold")

    summary = f"{text.usd(spent)} spent in {text.duration(clock.total)}"
    if budget is None:
        summary += "; no budget was set."
    else:
        summary += f", of a budget of {text.usd(budget)}."
    chart.draw("money", chart.title, summary, (HALF, 250), draw)
    chart.table = _over_time(["running time", "spent"], times, dollars, text.usd)
    if budget and shown_budget is None:
        chart.note = f"The budget of {text.usd(budget)} is far above this scale."
    return chart


def _no_money(bill: RunBill | None, clock: RunningTime) -> str:
    """Return why money cannot be charted; "" if it can."""
    if bill is None or not bill.sessions:
        return "No bill was kept for this run."
    if not bill.usd:
        return (
            "No machine of this run has a price. Set cost.prices (USD per hour) for the next run."
        )
    if len(bill.series) < 2 or clock.total <= 0:
        return f"{text.usd(bill.usd)} in all; its course over time was not recorded."
    return ""


def speeds(run: RunReport, clock: RunningTime) -> tuple[np.ndarray, np.ndarray]:
    """Compute the speed over running time.

    The documents of a unit are spread evenly over its processing time.

    Returns:
        Edges of equal spans of running time in seconds, `[n + 1]`, and documents per second in each
        span, `[n]`.
    """
    units = run.units.read
    bins = min(_BINS, max(12, len(units) // 2))
    edges = np.linspace(0, clock.total, bins + 1)
    began = clock.at([unit.began for unit in units])
    ended = np.maximum(clock.at([unit.committed_at for unit in units]), began + 1e-3)
    documents = np.array([unit.documents for unit in units], dtype=float)
    finished = []
    for edge in edges:
        shares = np.clip((edge - began) / (ended - began), 0, 1)
        finished.append((documents * shares).sum())
    return edges, np.diff(finished) * run.units.scale / np.diff(edges)


def rate(run: RunReport, clock: RunningTime) -> Chart:
    """Chart documents per second over running time."""
    chart = Chart("Speed over time")
    if not run.units.read or clock.total <= 0:
        return replace(chart, missing="No unit is committed yet.")
    edges, values = speeds(run, clock)
    mean = run.units.total("documents") / clock.total
    peak = float(values.max())

    def draw(axes: Axes, width: int) -> None:
        scaled = edges / _time_axis(axes, clock, width)
        axes.stairs(values, scaled, fill=True, color=ROLES["wash"], linewidth=0)
        axes.stairs(values, scaled, color=ROLES["accent"], linewidth=1.5, baseline=None)
        value_axis(axes, max(peak, mean) * 1.18, "documents/s")
        dashed(axes.axhline, mean, "ink")

    summary = f"{text.number(mean)} documents per second on average, at most {text.number(peak)}."
    chart.draw("rate", "Documents per second over time", summary, (HALF, 250), draw)
    chart.table = _over_time(["running time, from", "documents/s"], edges, values, text.number)
    chart.caption = f"documents per second; the dashed line is the mean, {text.number(mean)}"
    return chart


def timeline(bill: RunBill | None, clock: RunningTime) -> Chart:
    """Chart one row per worker: when it started up, was busy, idle, or did work that was lost."""
    chart = Chart("Workers", "what each did when")
    workers = []
    if bill is not None:
        workers = [worker for worker in bill.workers if worker.spans]
    if not workers or clock.total <= 0:
        return replace(chart, missing="What the workers did was not recorded for this run.")
    busiest_first = sorted(workers, key=lambda worker: -worker.spent("busy") / worker.lived())
    by_start = sorted(busiest_first, key=lambda worker: worker.began)
    rows = spread(by_start, _TIMELINE_ROWS)
    height = _row_height(len(rows))

    def draw(axes: Axes, width: int) -> None:
        _draw_timeline(axes, width, rows, height, clock)

    subject = f"{text.count(len(workers))} workers were"
    if len(workers) == 1:
        subject = "The one worker was"
    busy_seconds = sum(worker.spent("busy") for worker in busiest_first)
    busy = busy_seconds / sum(worker.lived() for worker in busiest_first)
    chart.note = f"{subject} busy {text.share(busy, 1)} of the time."
    chart.legend = KINDS
    size = (FULL, int(56 + len(rows) * height))
    chart.draw("workers", "What each worker did when", chart.note, size, draw)
    chart.table = _worker_table(busiest_first)
    return chart


def _row_height(workers: int) -> float:
    """Return the height of a worker's row in pixels."""
    if workers <= 16:
        return 22
    if workers <= 32:
        return 14
    return max(2.0, min(10.0, 640 / workers))


def _draw_timeline(
    axes: Axes, width: int, workers: Sequence[WorkerTime], row_height: float, clock: RunningTime
) -> None:
    """Draw the spans of workers, one row each."""
    size = _time_axis(axes, clock, width)
    axes.grid(False)
    gap = 0.0
    if row_height >= 10:
        gap = 0.2
    elif row_height >= 4:
        gap = 0.1
    pixel = clock.total / size / width
    for kind in KINDS:
        rows = []
        spans = []
        for row, worker in enumerate(workers):
            for began, ended, span_kind, *_ in worker.spans:
                if span_kind == kind:
                    rows.append(row)
                    spans.append((began, ended))
        if not spans:
            continue
        left, end = clock.at(spans).T / size
        # A span is never narrower than a pixel.
        right = left + np.maximum(end - left, pixel)
        low = np.array(rows) + gap
        high = np.array(rows) + 1 - gap
        corners = np.array([(left, low), (right, low), (right, high), (left, high)])
        path = Path.make_compound_path_from_polys(corners.transpose(2, 0, 1))
        axes.add_patch(PathPatch(path, facecolor=ROLES[kind], edgecolor="none", linewidth=0))
    axes.set_ylim(len(workers), 0)
    if row_height >= 10 and len(workers) <= 40:
        labels = [text.clean(worker.worker, 12) for worker in workers]
        if width <= NARROW:
            labels = [label[-8:] for label in labels]
        axes.set_yticks(np.arange(len(workers)) + 0.5, labels)
    else:
        axes.set(yticks=[], ylabel=f"{len(workers)} workers, the first to start on top")


def _worker_table(busiest_first: Sequence[WorkerTime]) -> Table:
    """Return the shares of the busiest workers' time as a table."""
    rows = []
    for worker in busiest_first[:_WORKER_ROWS]:
        shares = [text.share(worker.spent(kind), worker.lived()) for kind in KINDS]
        node = worker.node or text.NONE
        rows.append([worker.worker, node, text.duration(worker.lived()), *shares])
    note = ""
    if len(busiest_first) > _WORKER_ROWS:
        note = f"The {_WORKER_ROWS} busiest of {len(busiest_first)}."
    headings = ["worker", "machine", "time", "busy", "starting", "idle", "lost"]
    return Table(headings, rows, note, (0, 1))


def confidence(values: Sequence[float]) -> Chart:
    """Chart the model's confidence: the share of sampled answers per twentieth of 0 to 1."""
    chart = Chart("Confidence of the answers", "share of sampled answers")
    if not values:
        return replace(chart, missing="The sampled answers have no confidence.")
    counts, edges = np.histogram(np.asarray(values), bins=20, range=(0, 1))
    shares = 100 * counts / max(counts.sum(), 1)
    median = float(np.median(values))

    def draw(axes: Axes, width: int) -> None:
        axes.bar(edges[:-1], shares, width=0.046, align="edge", color=ROLES["accent"], linewidth=0)
        axes.set(xlim=(0, 1), xlabel="confidence, 0 to 1")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        value_axis(axes, float(shares.max()) * 1.22, "answers")
        axes.yaxis.set_major_formatter("{x:g}%")
        dashed(axes.axvline, median, "ink")
        offset = (-5, -2)
        side = "right"
        if median < 0.5:
            offset = (5, -2)
            side = "left"
        top = (median, axes.get_ylim()[1])
        write(axes, f"median {median:.2f}", top, offset, "ink", va="top", ha=side)

    answers = text.count(len(values))
    summary = f"Half of {answers} sampled answers have a confidence above {median:.2f}."
    chart.draw("confidence", chart.title, summary, (HALF, 250), draw)
    tenths = Counter(min(9, int(10 * value)) for value in values)
    rows = []
    for tenth in range(10):
        low = tenth / 10
        rows.append([f"{low:.1f} to {low + 0.1:.1f}", text.count(tenths[tenth])])
    chart.table = Table(["confidence", "answers"], rows)
    return chart


def losses(training: TrainingRecord) -> Chart:
    """Chart the losses of each learning rate over steps."""
    chart = Chart(
        "Losses over steps",
        "thin: the latest steps; thick: the documents that are held out",
    )
    best = training.best
    validations: dict[float, list[tuple[int, float]]] = {}
    for attempt in training.attempts:
        points = [(step, loss) for step, _, loss in attempt.curve if loss is not None]
        validations[attempt.learning_rate] = points
    validation_losses = [loss for points in validations.values() for _, loss in points]
    highest = max(validation_losses, default=1.0)

    def draw(axes: Axes, width: int) -> None:
        # The best one is drawn last, so that it is on top.
        for attempt in sorted(training.attempts, key=lambda attempt: attempt is best):
            color = ROLES["accent" if attempt is best else "muted"]
            trained = [(step, loss) for step, loss, _ in attempt.curve if loss is not None]
            if trained:
                axes.plot(*zip(*trained, strict=True), color=color, linewidth=1)
            points = validations[attempt.learning_rate]
            if not points:
                continue
            line = points
            if len(points) == 1:
                # A single validation becomes a horizontal line.
                line = [(0, points[0][1]), *points]
            axes.plot(*zip(*line, strict=True), color=color, linewidth=2)
            role = "accent" if attempt is best else "muted"
            write(axes, f"{attempt.learning_rate:g}", points[-1], (-4, 6), role, ha="right")
        axes.set(xlim=(0, None), xlabel="steps")
        value_axis(axes, 2 * highest, "loss")

    lowest = min((loss for _, loss in validations[best.learning_rate]), default=0.0)
    summary = (
        f"The lowest validation loss is {lowest:.4f}, at learning rate {best.learning_rate:g}."
    )
    chart.draw("losses", chart.title, summary, (FULL, 280), draw)
    return chart
