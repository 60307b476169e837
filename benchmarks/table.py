"""What was measured, as Markdown tables and as charts."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.compare import Result, Row, label
from raypd.text import count, number, one_line

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "raypd",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_HEAD = (
    "engine",
    "at a time",
    "{unit}/s [range]",
    "x {first}",
    "of the floor",
    "fed",
    "decoded",
    "same answers",
)


def markdown(result: Result) -> str:
    """Return the table of a work.

    Ratios are medians of the ratios within each repeat, since a machine's speed varies between two
    repeats.

    Args:
        result: The work with its rows.
    """
    lines = [f"## {result.name}", ""]
    if result.skipped is not None:
        return "\n".join([*lines, f"Left out: {one_line(result.skipped)}"])
    timed = [row for row in result.rows if row.seconds]
    about = f"{count(result.count)} {result.unit}"
    if result.flops is not None:
        about += f"; ceiling {result.flops / 1e9:,.0f} GFLOP/s"
        if result.pair_flops is not None:
            about += f", of attention {result.pair_flops / 1e9:,.0f}"
    if result.floor:
        about += f"; floor {number(result.count / result.floor)} {result.unit}/s"
    lines += [about, ""]
    if timed:
        first = timed[0]
        head = [cell.format(unit=result.unit, first=first.engine) for cell in _HEAD]
        lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        lines += ["| " + " | ".join(_cells(row, first, result)) + " |" for row in timed]
        lines.append("")
    lines += [f"{row.engine}: {row.error}" for row in result.rows if row.error is not None]
    return "\n".join(lines).rstrip()


def machine() -> str:
    """Return the cores, the processor and the GPUs in one line."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.is_file() else ""
    facts = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    processor = facts.get("model name", platform.machine())
    if "cpu family" in facts:  # in a cloud the name may not tell the generation
        processor += f" (family {facts['cpu family']}, model {facts['model']})"
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return ", ".join([f"{os.cpu_count()} cores", processor, *gpus])


def save(results: Sequence[Result], folder: Path, model: str) -> list[Path]:
    """Write table.md, results.json and a chart per work of the configuration.

    Args:
        results: The works that are done.
        folder: The folder, which is made if it does not exist.
        model: The name of the model.

    Returns:
        The paths of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    versions: dict[str, None] = {}  # ordered, and without duplicates
    for result in results:
        for row in result.rows:
            versions |= {f"{package} {version}": None for package, version in row.versions.items()}
    head = f"# {model}\n\n{machine()}; {', '.join(versions)}"
    tables = [markdown(result) for result in results]
    table_file = folder / "table.md"
    table_file.write_text("\n\n".join([head, *tables]) + "\n", encoding="utf-8")
    tree = {"model": model, "machine": machine(), "works": [asdict(result) for result in results]}
    json_file = folder / "results.json"
    json_file.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    written = [table_file, json_file]
    for group in dict.fromkeys(result.group for result in results):
        file = folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', group)}.svg"
        if chart([result for result in results if result.group == group], file):
            written.append(file)
    return written


def speeds(row: Row, result: Result) -> list[float]:
    """Return the documents or questions per second of each repeat."""
    return [result.count / seconds for seconds in row.seconds]


def _cells(row: Row, first: Row, result: Result) -> list[str]:
    """Return the cells of a row; ratios are to the row `first`."""
    rates = speeds(row, result)
    ratios = [ours / theirs for ours, theirs in zip(first.seconds, row.seconds, strict=False)]
    share_of_floor = ""
    if result.floor:
        share_of_floor = f"{result.floor / median(row.seconds):.0%}"
    agreement = ""
    if row.agreement is not None:
        agreement = f"{row.agreement:.0%} as {row.agrees_with}"
    return [
        row.engine,
        label(row.setting, row.form),
        f"{number(median(rates))} [{number(min(rates))}-{number(max(rates))}]",
        f"{median(ratios):.2f}",
        share_of_floor,
        "" if row.fed is None else count(row.fed),
        count(row.decoded),
        agreement,
    ]


def chart(results: Sequence[Result], file: Path) -> bool:
    """Write an SVG of a work: bars of speeds, or seconds per document over what varies.

    Args:
        results: The results of one work of the configuration.
        file: The file that is written.

    Returns:
        False if nothing was timed.
    """
    timed = [(result, row) for result in results for row in result.rows if row.seconds]
    if not timed:
        return False
    first, _ = timed[0]
    with rc_context(_STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.add_subplot()
        if first.varied is None:
            _draw_bars(axes, first, [row for _, row in timed])
        else:
            _draw_lines(axes, first, timed)
        figure.savefig(file, metadata={"Date": None})
    return True


def _draw_bars(axes: Axes, result: Result, rows: Sequence[Row]) -> None:
    """Draw the median speed of each row with its range, the first row at the top."""
    names = []
    medians = []
    below = []
    above = []
    for row in reversed(rows):
        rates = speeds(row, result)
        names.append(row.engine)
        medians.append(median(rates))
        below.append(median(rates) - min(rates))
        above.append(max(rates) - median(rates))
    axes.barh(names, medians, xerr=[below, above])
    if result.floor:
        axes.axvline(result.count / result.floor, color="grey", linestyle="--")
    axes.set(title=f"{result.name}; dashed: the floor", xlabel=f"{result.unit}/s")


def _draw_lines(axes: Axes, first: Result, timed: Sequence[tuple[Result, Row]]) -> None:
    """Draw the cost of each engine over the key that varies."""
    for engine in dict.fromkeys(row.engine for _, row in timed):
        values = []
        costs = []
        for result, row in timed:
            if row.engine == engine:
                values.append(result.varied or 0)
                costs.append(median(row.seconds) / result.count)
        axes.plot(values, costs, marker="o", label=engine)
    key = first.name.rpartition(" ")[2].partition("=")[0]
    axes.set(
        title=first.group,
        xscale="log",
        yscale="log",
        xlabel=key,
        ylabel=f"seconds / {first.unit}",
    )
    axes.legend(frameon=False)
