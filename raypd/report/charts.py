"""The charts of the page, drawn by matplotlib as inline SVG, which needs no script and prints
sharp, each in a wide and a narrow form, as scaled text cannot be read on a phone: CSS shows the one
that fits.
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
from raypd.report.data import ReportSession, RunReport
from raypd.report.ledger import RunBill
from raypd.report.svg import ROLES, inline
from raypd.run.read import spread
from raypd.run.training import TrainingRecord

# Of a worker's time.
KINDS = {"busy": "busy", "startup": "starting up", "idle": "idle", "lost": "work that was lost"}
HALF, FULL, NARROW = 520, 940, 360  # widths in CSS pixels
Draw = Callable[[Axes, int], None]
_BINS = 120  # of the speed
_TIMELINE_ROWS = 600
_WORKER_ROWS = 100  # of the table
_UNITS = [
    (1, "seconds", 180),
    (60, "minutes", 3 * 3600),
    (3600, "hours", 4 * 86400),
    (86400, "days", float("inf")),
]
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 12.0,  # text stays text, in the page's font
    "svg.hashsalt": "raypd",  # the same run makes the same page
    "text.parse_math": False,  # a category may be named $x$
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
    """Rows of text under heads. The page makes cells harmless and cuts long ones."""

    heads: list[str]
    rows: list[list[str]]
    note: str = ""
    text_columns: tuple[int, ...] = (0,)  # all others are figures; the first is the name of the row


@dataclass
class Chart:
    """A chart in its two forms with the same figures as a table; or why there is none."""

    title: str
    caption: str = ""
    missing: str = ""
    forms: dict[str, str] = field(default_factory=dict)  # wide, narrow: SVG
    table: Table | None = None
    legend: dict[str, str] = field(default_factory=dict)  # role of the colour: what it means
    note: str = ""

    def draw(self, name: str, title: str, summary: str, size: tuple[int, int], draw: Draw) -> None:
        """Both forms by `draw` (axes, width in pixels). name: unique on the page; title, summary:
        what is said.
        """
        for form, pixels in (("wide", size[0]), ("narrow", NARROW)):
            with rc_context(_STYLE):
                layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.04)
                figure = Figure(figsize=(pixels / 72, size[1] / 72), layout=layout)
                draw(figure.add_subplot(), pixels)
                self.forms[form] = inline(figure, f"{name}-{form}", title, summary)


class RunningTime:
    """Unix seconds to seconds of running time (`total`), which stands still between sessions (at
    `borders`).
    """

    def __init__(self, sessions: Sequence[ReportSession]) -> None:
        self._unix: list[float] = []
        self._elapsed: list[float] = []
        self.total = 0.0
        for session in sessions:
            began = max([session.began, *self._unix[-1:]])  # sessions do not overlap
            self._unix += [began, max(began, session.ended)]
            self._elapsed += [self.total, self.total + self._unix[-1] - began]
            self.total = self._elapsed[-1]
        self.borders = self._elapsed[2::2]

    def at(self, unix: Sequence[Any] | np.ndarray) -> np.ndarray:
        """Seconds of running time up to a time."""
        times = np.asarray(unix, dtype=float)
        if self._unix:
            return np.asarray(np.interp(times, self._unix, self._elapsed))
        return np.zeros_like(times)


def _time_axis(axes: Axes, clock: RunningTime, width: int) -> float:
    """Puts running time on x, in a unit that fits; seconds of one such unit."""
    total = max(clock.total, 1e-6)
    size, name = next((s, n) for s, n, limit in _UNITS if total <= limit)
    axes.set(xlim=(0, total / size), xlabel=f"running time, {name}")
    axes.xaxis.set_major_locator(MaxNLocator(6 if width > NARROW else 4, steps=[1, 2, 3, 5, 10]))
    for border in clock.borders:
        dashed(axes.axvline, border / size, "muted", 1, (2, 3))
    if clock.borders and len(clock.borders) < 6:
        point = (clock.borders[0] / size, 1)
        write(
            axes, "resumed", point, (4, 2), "muted", xycoords=("data", "axes fraction"), va="bottom"
        )
    return float(size)


def value_axis(axes: Axes, top: float, label: str) -> None:
    axes.set(ylim=(0, max(top, 1e-9)), ylabel=label)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def dashed(
    line: Callable[..., Any],
    position: float,
    role: str,
    width: float = 1,
    dashes: tuple[int, int] = (5, 3),
) -> None:
    line(position, color=ROLES[role], linewidth=width, linestyle=(0, dashes))


def write(
    axes: Axes,
    words: str,
    xy: tuple[float, float],
    offset: tuple[float, float],
    role: str,
    **how: Any,
) -> None:
    axes.annotate(words, xy, offset, textcoords="offset points", color=ROLES[role], **how)


def _over_time(heads: list[str], times: np.ndarray, values: np.ndarray, show: text.Show) -> Table:
    chosen = range(0, len(values), max(1, len(values) // 12))
    return Table(heads, [[text.duration(times[i]), show(values[i])] for i in chosen])


def money(bill: RunBill | None, clock: RunningTime) -> Chart:
    """Dollars spent over running time, and the budget as a line where it fits the scale."""
    chart = Chart("Money over time", "dollars spent")
    if bill is None or not bill.sessions:
        return replace(chart, missing="No bill was kept for this run.")
    if not bill.usd:
        words = (
            "No machine of this run has a price. cost.prices (USD per hour) gives the next run one."
        )
        return replace(chart, missing=words)
    if len(bill.series) < 2 or clock.total <= 0:
        return replace(chart, missing=f"{text.usd(bill.usd)} in all; how it grew was not kept.")
    unix, usd = np.array(bill.series).T
    times = np.concatenate([[0.0], clock.at(unix)])
    dollars = np.concatenate([[0.0], usd])
    spent = float(dollars[-1])
    budget = bill.newest.budget_usd
    shown = budget if budget is not None and budget <= max(spent, 1e-9) * 5 else None

    def draw(axes: Axes, width: int) -> None:
        size = _time_axis(axes, clock, width)
        under = np.concatenate([dollars, [0.0, 0.0]])
        axes.fill([*times / size, times[-1] / size, 0.0], under, color=ROLES["wash"], linewidth=0)
        axes.plot(times / size, dollars, color=ROLES["accent"], linewidth=2, clip_on=False)
        value_axis(axes, max(spent, shown or 0.0) * 1.12, "spent, USD")
        axes.yaxis.set_major_formatter("${x:,.10g}")
        if shown is not None:
            dashed(axes.axhline, shown, "budget", 1.5)
            write(axes, f"budget {text.usd(shown)}", (0, shown), (4, -4), "budget", va="top")
        write(
            axes,
            text.usd(spent),
            (times[-1] / size, spent),
            (-4, 5),
            "accent",
            ha="right",
            fontweight="bold",
        )

    summary = f"{text.usd(spent)} spent in {text.duration(clock.total)}"
    summary += (
        f", of a budget of {text.usd(budget)}." if budget is not None else "; no budget was set."
    )
    chart.draw("money", chart.title, summary, (HALF, 250), draw)
    chart.table = _over_time(["running time", "spent"], times, dollars, text.usd)
    if budget and shown is None:
        chart.note = f"The budget of {text.usd(budget)} lies far above this scale."
    return chart


def speeds(run: RunReport, clock: RunningTime) -> tuple[np.ndarray, np.ndarray]:
    """Edges of equal spans of running time, and documents/s in each: a unit's are spread over its
    time of work.
    """
    units = run.units.read
    edges = np.linspace(0, clock.total, min(_BINS, max(12, len(units) // 2)) + 1)
    began = clock.at([u.began for u in units])
    ended = np.maximum(clock.at([u.committed_at for u in units]), began + 1e-3)
    documents = np.array([u.documents for u in units], dtype=float)
    done = np.array(
        [(documents * np.clip((t - began) / (ended - began), 0, 1)).sum() for t in edges]
    )
    return edges, np.diff(done) * run.units.scale / np.diff(edges)


def rate(run: RunReport, clock: RunningTime) -> Chart:
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

    summary = f"{text.number(mean)} documents a second on average, at most {text.number(peak)}."
    chart.draw("rate", "Documents a second over time", summary, (HALF, 250), draw)
    chart.table = _over_time(["running time, from", "documents/s"], edges, values, text.number)
    chart.caption = f"documents a second; the dashed line is the mean, {text.number(mean)}"
    return chart


def timeline(bill: RunBill | None, clock: RunningTime) -> Chart:
    """One row a worker: when it started up, was busy, idle, or did work that was lost."""
    chart = Chart("Workers", "what each did when")
    workers = [w for w in bill.workers if w.spans] if bill else []
    if not workers or clock.total <= 0:
        return replace(chart, missing="Which worker did what was not kept for this run.")
    by_share = sorted(workers, key=lambda w: -w.spent("busy") / w.lived())
    workers = spread(sorted(by_share, key=lambda w: w.began), _TIMELINE_ROWS)
    count = len(workers)
    each: float
    if count <= 16:
        each = 22
    elif count <= 32:
        each = 14
    else:
        each = max(2.0, min(10.0, 640 / count))
    if each >= 10:
        gap = 0.2
    elif each >= 4:
        gap = 0.1
    else:
        gap = 0.0

    def draw(axes: Axes, width: int) -> None:
        size = _time_axis(axes, clock, width)
        axes.grid(False)
        least = clock.total / size / width  # a span is never thinner than a pixel
        for kind in KINDS:
            spans = [
                (row, span)
                for row, worker in enumerate(workers)
                for span in worker.spans
                if span[2] == kind
            ]
            if spans:
                x, end = clock.at([span[:2] for _, span in spans]).T / size
                right = x + np.maximum(end - x, least)
                row = np.array([row for row, _ in spans])
                low = row + gap
                high = row + 1 - gap
                boxes = np.array([(x, low), (right, low), (right, high), (x, high)]).transpose(
                    2, 0, 1
                )
                path = Path.make_compound_path_from_polys(boxes)
                axes.add_patch(
                    PathPatch(path, facecolor=ROLES[kind], edgecolor="none", linewidth=0)
                )
        axes.set_ylim(count, 0)
        if each >= 10 and count <= 40:
            labels = [text.clean(worker.worker, 12) for worker in workers]
            axes.set_yticks(
                np.arange(count) + 0.5,
                [label if width > NARROW else label[-8:] for label in labels],
            )
        else:
            axes.set(yticks=[], ylabel=f"{count} workers, the first to start on top")

    if len(by_share) == 1:
        who = "The one worker was"
    else:
        who = f"{text.count(len(by_share))} workers were"
    busy = sum(w.spent("busy") for w in by_share) / sum(w.lived() for w in by_share)
    chart.note = f"{who} busy {text.share(busy, 1)} of the time."
    chart.legend = KINDS
    chart.draw(
        "workers", "What each worker did when", chart.note, (FULL, int(56 + count * each)), draw
    )
    rows = []
    for worker in by_share[:_WORKER_ROWS]:
        shares = [text.share(worker.spent(kind), worker.lived()) for kind in KINDS]
        rows.append(
            [worker.worker, worker.node or text.NONE, text.duration(worker.lived()), *shares]
        )
    note = f"The {_WORKER_ROWS} busiest of {len(by_share)}." if len(by_share) > _WORKER_ROWS else ""
    chart.table = Table(
        ["worker", "machine", "time", "busy", "starting", "idle", "lost"], rows, note, (0, 1)
    )
    return chart


def confidence(values: Sequence[float]) -> Chart:
    """How sure the model was: the share of sampled answers in each twentieth of 0 to 1."""
    chart = Chart("Confidence of the answers", "share of sampled answers")
    if not values:
        return replace(chart, missing="The sampled answers carry no confidence.")
    counts, edges = np.histogram(np.asarray(values), bins=20, range=(0, 1))
    shares = 100 * counts / max(counts.sum(), 1)
    middle = float(np.median(values))

    def draw(axes: Axes, width: int) -> None:
        axes.bar(edges[:-1], shares, width=0.046, align="edge", color=ROLES["accent"], linewidth=0)
        axes.set(xlim=(0, 1), xlabel="confidence, 0 to 1")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        value_axis(axes, float(shares.max()) * 1.22, "answers")
        axes.yaxis.set_major_formatter("{x:g}%")
        dashed(axes.axvline, middle, "ink")
        offset, side = ((5, -2), "left") if middle < 0.5 else ((-5, -2), "right")
        write(
            axes,
            f"median {middle:.2f}",
            (middle, axes.get_ylim()[1]),
            offset,
            "ink",
            va="top",
            ha=side,
        )

    summary = (
        f"Half of {text.count(len(values))} sampled answers have a confidence above {middle:.2f}."
    )
    chart.draw("confidence", chart.title, summary, (HALF, 250), draw)
    tenths = Counter(min(9, int(10 * value)) for value in values)
    rows = [
        [f"{low / 10:.1f} to {low / 10 + 0.1:.1f}", text.count(tenths[low])] for low in range(10)
    ]
    chart.table = Table(["confidence", "answers"], rows)
    return chart


def losses(training: TrainingRecord) -> Chart:
    """Losses over steps by learning rate: thin lines, and thick ones for validations."""
    chart = Chart(
        "Losses over steps",
        "thin: of the latest steps; thick: on the documents that are not trained on",
    )
    best = training.best
    validations = {
        attempt.learning_rate: [(step, loss) for step, _, loss in attempt.curve if loss is not None]
        for attempt in training.attempts
    }
    highest = max((loss for points in validations.values() for _, loss in points), default=1.0)

    def draw(axes: Axes, width: int) -> None:
        # The best on top.
        for attempt in sorted(training.attempts, key=lambda attempt: attempt is best):
            role = "accent" if attempt is best else "muted"
            trained = [(step, loss) for step, loss, _ in attempt.curve if loss is not None]
            if trained:
                axes.plot(*zip(*trained, strict=True), color=ROLES[role], linewidth=1)
            if points := validations[attempt.learning_rate]:
                line = points if len(points) > 1 else [(0, points[0][1]), *points]
                axes.plot(*zip(*line, strict=True), color=ROLES[role], linewidth=2)
                write(axes, f"{attempt.learning_rate:g}", points[-1], (-4, 6), role, ha="right")
        axes.set(xlim=(0, None), xlabel="steps")
        value_axis(axes, 2 * highest, "loss")

    lowest = min((loss for _, loss in validations[best.learning_rate]), default=0.0)
    summary = (
        f"The lowest validation loss is {lowest:.4f}, at learning rate {best.learning_rate:g}."
    )
    chart.draw("losses", chart.title, summary, (FULL, 280), draw)
    return chart
