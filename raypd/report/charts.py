"""The charts of the page, drawn by matplotlib as inline SVG, each in a wide and a narrow form.

Static SVG, because it needs no script, prints sharp, and weighs 5 to 30 KB where an interactive library would put
megabytes into every page. Two forms, because text that is scaled with a picture cannot be read on a phone: CSS shows
the one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator

from raypd.report.sections import Table
from raypd.report.series import RunningTime
from raypd.report.svg import ROLES, inline
from raypd.run import text
from raypd.run.training import Curve

KINDS = {"busy": "busy", "startup": "starting up", "idle": "idle", "lost": "work that was lost"}  # of a worker's time
HALF, FULL, NARROW = 520, 940, 360  # widths in CSS pixels
_FONT = 12.0
_UNITS = [(1, "seconds", 180), (60, "minutes", 3 * 3600), (3600, "hours", 4 * 86400), (86400, "days", float("inf"))]
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text, in the page's font
    "svg.hashsalt": "raypd",  # the same run makes the same page
    "text.parse_math": False,  # a category may be named $x$
    "font.family": "DejaVu Sans",
    "font.size": _FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": ROLES["grid"],
    "axes.labelcolor": ROLES["muted"],
    "axes.labelsize": _FONT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": ROLES["grid"],
    "grid.linewidth": 1.0,
    "text.color": ROLES["ink"],
    "xtick.color": ROLES["muted"],
    "ytick.color": ROLES["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 5,
    "path.simplify": True,
}


@dataclass
class Chart:
    """A chart in its two forms with the same figures as a table, or none and why there is none."""

    wide: str = ""
    narrow: str = ""
    missing: str = ""
    table: Table | None = None
    legend: dict[str, str] = field(default_factory=dict)  # role of the colour: what it means
    note: str = ""
    unit: str = ""


def _draw(name: str, title: str, description: str, width: int, height: int, draw: Callable[[Axes, int], None]) -> Chart:
    """Both forms; `draw` gets the axes and the width in pixels."""
    forms = []
    for form, pixels in (("wide", width), ("narrow", NARROW)):
        with rc_context(_STYLE):
            figure = Figure(figsize=(pixels / 72, height / 72), layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.04))
            axes = figure.add_subplot()
            draw(axes, pixels)
            forms.append(inline(figure, f"{name}-{form}", title, description))
    return Chart(wide=forms[0], narrow=forms[1])


def _time_axis(axes: Axes, clock: RunningTime, width: int) -> float:
    """Puts running time on x, in a unit that fits; seconds of one such unit."""
    total = max(clock.total, 1e-6)
    size, name = next((s, n) for s, n, limit in _UNITS if total <= limit)
    axes.set_xlim(0, total / size)
    axes.xaxis.set_major_locator(MaxNLocator(6 if width > NARROW else 4, steps=[1, 2, 3, 5, 10]))
    axes.set_xlabel(f"running time, {name}")
    for border in clock.borders:
        axes.axvline(border / size, color=ROLES["muted"], linewidth=1, linestyle=(0, (2, 3)))
    if clock.borders and len(clock.borders) < 6:
        point = (clock.borders[0] / size, 1)
        _write(axes, "resumed", point, (4, 2), "muted", xycoords=("data", "axes fraction"), va="bottom")
    return float(size)


def _value_axis(axes: Axes, top: float, label: str) -> None:
    """Puts 0 to the top value, and a little more, on y."""
    axes.set_ylim(0, max(top, 1e-9))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylabel(label)


def _write(axes: Axes, words: str, xy: tuple[float, float], offset: tuple[float, float], role: str, **how: Any) -> None:
    axes.annotate(words, xy, offset, textcoords="offset points", color=ROLES[role], **how)


def _dollars(ticks: np.ndarray) -> Callable[[float, Any], str]:
    """Dollars with the digits that tell the ticks of an axis apart, the same for all."""
    digits = next((d for d in (0, 2, 3, 4, 5) if all(abs(round(t, d) - t) < 1e-9 for t in ticks)), 6)
    return lambda value, _: f"${value:,.{digits}f}"


def money(times: np.ndarray, dollars: np.ndarray, budget: float | None, clock: RunningTime) -> tuple[Chart, bool]:
    """Dollars spent over running time; the budget as a line, and whether it fits the scale."""
    spent = float(dollars[-1])
    shown = budget if budget is not None and budget <= max(spent, 1e-9) * 5 else None

    def draw(axes: Axes, width: int) -> None:
        size = _time_axis(axes, clock, width)
        under = np.concatenate([dollars, [0.0, 0.0]])
        axes.fill([*times / size, times[-1] / size, 0.0], under, color=ROLES["wash"], linewidth=0)
        axes.plot(times / size, dollars, color=ROLES["accent"], linewidth=2, clip_on=False)
        _value_axis(axes, max(spent, shown or 0.0) * 1.12, "spent, USD")
        axes.yaxis.set_major_formatter(FuncFormatter(_dollars(axes.get_yticks())))
        if shown is not None:
            axes.axhline(shown, color=ROLES["budget"], linewidth=1.5, linestyle=(0, (5, 3)))
            _write(axes, f"budget {text.usd(shown)}", (0, shown), (4, -4), "budget", va="top")
        point = (times[-1] / size, spent)
        _write(axes, text.usd(spent), point, (-4, 5), "accent", ha="right", fontweight="bold")

    summary = f"{text.usd(spent)} spent in {text.duration(clock.total)}"
    summary += f", of a budget of {text.usd(budget)}." if budget is not None else "; no budget was set."
    return _draw("money", "Money over time", summary, HALF, 250, draw), shown is not None


def rate(times: np.ndarray, values: np.ndarray, clock: RunningTime, mean: float) -> Chart:
    """Documents a second over running time, with their mean. times: edges, of which there is one more than values."""
    peak = float(values.max())

    def draw(axes: Axes, width: int) -> None:
        edges = times / _time_axis(axes, clock, width)
        axes.stairs(values, edges, fill=True, color=ROLES["wash"], linewidth=0)
        axes.stairs(values, edges, color=ROLES["accent"], linewidth=1.5, baseline=None)
        _value_axis(axes, max(peak, mean) * 1.18, "documents/s")
        axes.axhline(mean, color=ROLES["ink"], linewidth=1, linestyle=(0, (5, 3)))

    summary = f"{text.number(mean)} documents a second on average, at most {text.number(peak)}."
    return _draw("rate", "Documents a second over time", summary, HALF, 250, draw)


def timeline(
    rows: Sequence[Sequence[tuple[float, float, str]]], labels: Sequence[str], clock: RunningTime, description: str
) -> Chart:
    """One row a worker: when it started up, was busy, idle, or did work that was lost. Times in running seconds."""
    count = len(rows)
    each = 22 if count <= 16 else 14 if count <= 32 else max(2.0, min(10.0, 640 / count))
    gap = 0.2 if each >= 10 else 0.1 if each >= 4 else 0.0

    def draw(axes: Axes, width: int) -> None:
        size = _time_axis(axes, clock, width)
        axes.grid(False)
        least = clock.total / size / width  # a span is never thinner than a pixel
        for kind in KINDS:
            bars = [
                (i, began / size, max((ended - began) / size, least))
                for i, row in enumerate(rows)
                for began, ended, span_kind in row
                if span_kind == kind
            ]
            if bars:
                path = Path.make_compound_path(*(_box(x, x + long, i + gap, i + 1 - gap) for i, x, long in bars))
                axes.add_patch(PathPatch(path, facecolor=ROLES[kind], edgecolor="none", linewidth=0))
        axes.set_ylim(count, 0)
        if each >= 10 and count <= 40:
            axes.set_yticks(np.arange(count) + 0.5, [label if width > NARROW else label[-8:] for label in labels])
        else:
            axes.set_yticks([])
            axes.set_ylabel(f"{count} workers, the first to start on top")

    return _draw("workers", "What each worker did when", description, FULL, int(56 + count * each), draw)


def _box(left: float, right: float, top: float, bottom: float) -> Path:
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    return Path(corners, [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY])


def confidence(values: Sequence[float]) -> Chart:
    """How sure the model was: the share of sampled answers in each twentieth of 0 to 1."""
    counts, edges = np.histogram(np.asarray(values), bins=20, range=(0, 1))
    shares = 100 * counts / max(counts.sum(), 1)
    middle = float(np.median(values))

    def draw(axes: Axes, width: int) -> None:
        axes.bar(edges[:-1], shares, width=0.046, align="edge", color=ROLES["accent"], linewidth=0)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("confidence, 0 to 1")
        _value_axis(axes, float(shares.max()) * 1.22, "answers")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
        axes.axvline(middle, color=ROLES["ink"], linewidth=1, linestyle=(0, (5, 3)))
        offset, side = ((5, -2), "left") if middle < 0.5 else ((-5, -2), "right")
        _write(axes, f"median {middle:.2f}", (middle, axes.get_ylim()[1]), offset, "ink", va="top", ha=side)

    summary = f"Half of {text.count(len(values))} sampled answers have a confidence above {middle:.2f}."
    return _draw("confidence", "Confidence of the answers", summary, HALF, 250, draw)


def losses(curves: Mapping[str, Curve], best: str) -> Chart:
    """Losses over steps by learning rate: thin lines, and thick ones for validations.

    best: the learning rate whose weights were kept.
    """
    held_out = {rate: [(step, loss) for step, _, loss in curve if loss is not None] for rate, curve in curves.items()}
    highest = max((loss for points in held_out.values() for _, loss in points), default=1.0)

    def draw(axes: Axes, width: int) -> None:
        for rate, curve in sorted(curves.items(), key=lambda item: item[0] == best):  # the best on top
            color = ROLES["accent" if rate == best else "muted"]
            trained = [(step, loss) for step, loss, _ in curve if loss is not None]
            if trained:
                axes.plot(*zip(*trained, strict=True), color=color, linewidth=1)
            if held_out[rate]:
                points = held_out[rate] if len(held_out[rate]) > 1 else [(0, held_out[rate][0][1]), *held_out[rate]]
                axes.plot(*zip(*points, strict=True), color=color, linewidth=2)
                _write(axes, rate, held_out[rate][-1], (-4, 6), "accent" if rate == best else "muted", ha="right")
        axes.set_xlim(left=0)
        axes.set_xlabel("steps")
        _value_axis(axes, 2 * highest, "loss")

    lowest = min((loss for _, loss in held_out.get(best, [])), default=0.0)
    summary = f"The lowest validation loss is {lowest:.4f}, at learning rate {best}."
    return _draw("losses", "Losses over steps", summary, FULL, 280, draw)
