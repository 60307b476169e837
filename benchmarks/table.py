"""What was measured, as Markdown and as charts."""

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

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.compare import Result, Row, label
from raypd.run.text import count, number, one_line

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
    """A work's table.

    Ratios are medians of those of each repeat, since a machine swings between two.
    """
    lines = [f"## {result.name}", ""]
    if result.skipped is not None:
        return "\n".join([*lines, f"Left out: {one_line(result.skipped)}"])
    timed = [row for row in result.rows if row.seconds]
    first = timed[0] if timed else None
    about = f"{count(result.count)} {result.unit}"
    if result.flops is not None:
        about += f"; ceiling {result.flops / 1e9:,.0f} GFLOP/s"
        if result.pair_flops is not None:
            about += f", of attention {result.pair_flops / 1e9:,.0f}"
    if result.floor:
        about += f"; floor {number(result.count / result.floor)} {result.unit}/s"
    lines += [about, ""]
    if first is not None:
        head = [cell.format(unit=result.unit, first=first.engine) for cell in _HEAD]
        lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        lines += ["| " + " | ".join(_cells(row, first, result)) + " |" for row in timed]
        lines.append("")
    lines += [f"{row.engine}: {row.error}" for row in result.rows if row.error is not None]
    return "\n".join(lines).rstrip()


def machine() -> str:
    """The processor, its cores and the GPUs, in a line."""
    found = Path("/proc/cpuinfo")
    text = found.read_text() if found.is_file() else ""
    known = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    parts = [f"{os.cpu_count()} cores", known.get("model name", platform.machine())]
    if "cpu family" in known:  # in a cloud the name may leave the generation open
        parts[-1] += f" (family {known['cpu family']}, model {known['model']})"
    parts += [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return ", ".join(parts)


def save(results: Sequence[Result], folder: Path, model: str) -> list[Path]:
    """Writes table.md, results.json and a chart for each work of the configuration; their paths.

    Args:
        results: of the works that are done.
        folder: is made where it is not there.
        model: its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    versions = {
        f"{k} {v}": None for r in results for row in r.rows for k, v in row.versions.items()
    }
    head = f"# {model}\n\n{machine()}; {', '.join(versions)}\n"
    written = [folder / "table.md", folder / "results.json"]
    written[0].write_text(
        "\n\n".join([head.rstrip(), *map(markdown, results)]) + "\n", encoding="utf-8"
    )
    tree = {"model": model, "machine": machine(), "works": [asdict(result) for result in results]}
    written[1].write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    for group in dict.fromkeys(result.group for result in results):
        file = folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', group)}.svg"
        if chart([result for result in results if result.group == group], file):
            written.append(file)
    return written


def speeds(row: Row, result: Result) -> list[float]:
    """Documents or questions a second, of each repeat."""
    return [result.count / seconds for seconds in row.seconds]


def _cells(row: Row, first: Row, result: Result) -> list[str]:
    rates = speeds(row, result)
    ratios = [ours / theirs for ours, theirs in zip(first.seconds, row.seconds, strict=False)]
    share = "" if not result.floor else f"{result.floor / median(row.seconds):.0%}"
    agrees = "" if row.agreement is None else f"{row.agreement:.0%} as {row.agrees_with}"
    spread = f"{number(median(rates))} [{number(min(rates))}-{number(max(rates))}]"
    tokens = ["" if row.fed is None else count(row.fed), count(row.decoded)]
    return [
        row.engine,
        label(row.setting, row.form),
        spread,
        f"{median(ratios):.2f}",
        share,
        *tokens,
        agrees,
    ]


def chart(results: Sequence[Result], file: Path) -> bool:
    """Writes an SVG of a work: bars of speeds, or seconds of a document over what varies; False:
    nothing was timed.

    Args:
        results: of one work of the configuration.
        file: that is written.
    """
    timed = [(result, row) for result in results for row in result.rows if row.seconds]
    if not timed:
        return False
    first = timed[0][0]
    with rc_context(_STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.add_subplot()
        if first.varied is None:
            low, middle, high = np.array(
                [[f(speeds(row, first)) for f in (min, median, max)] for _, row in timed[::-1]]
            ).T
            axes.barh(
                [row.engine for _, row in timed[::-1]], middle, xerr=[middle - low, high - middle]
            )
            if first.floor:
                axes.axvline(first.count / first.floor, color="grey", linestyle="--")
            axes.set(title=f"{first.name}; dashed: the floor", xlabel=f"{first.unit}/s")
        else:
            for engine in dict.fromkeys(row.engine for _, row in timed):
                mine = [(result, row) for result, row in timed if row.engine == engine]
                cost = [median(row.seconds) / result.count for result, row in mine]
                axes.plot(
                    [result.varied or 0 for result, _ in mine], cost, marker="o", label=engine
                )
            key = first.name.rpartition(" ")[2].partition("=")[0]
            axes.set(
                title=first.group,
                xscale="log",
                yscale="log",
                xlabel=key,
                ylabel=f"seconds / {first.unit}",
            )
            axes.legend(frameon=False)
        figure.savefig(file, metadata={"Date": None})
    return True
