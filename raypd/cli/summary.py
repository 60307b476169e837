"""The summary of a finished run: a few documents with their values, the totals, and the files."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypd import storage
from raypd.config import UNNAMED_CATEGORY
from raypd.dataset import table_folder, writer
from raypd.report import answer_check
from raypd.run import Manifest, NoRun, RunCost, layout, left_out
from raypd.tasks import shape_of
from raypd.text import count, counted, duration, number, one_line, share, usd

# Documents that are shown.
_ROWS = 8
# The time of a run's only worker is no more than this many times the time of the run, except in
# rounding and with clocks that differ. Otherwise there were several places for workers.
_SEVERAL_PLACES = 1.25


def print_summary(manifest: Manifest, console: Console | None = None) -> str:
    """Print the summary of a run.

    Args:
        manifest: The manifest of the run.
        console: Where to print; None for stdout, in the width of the terminal.

    Returns:
        The next step, in words; "" if there is none.
    """
    console = console or Console(highlight=False, markup=False)
    for unit_id, path in writer.objects(manifest.output):
        rows = writer.read_rows(manifest.output, unit_id, _ROWS, path)
        if rows:
            console.print(_table(rows))
        break
    if manifest.fake:
        console.print(
            "model: fake. THESE ANSWERS ARE MADE UP: no model read the documents.", style="bold red"
        )
    _print_totals(manifest, console)
    next_step = _print_check(manifest, console)
    for line in _cost_lines(manifest.cost, manifest.seconds):
        console.print(line, soft_wrap=True)
    partition = [f"{key}=*" for key in manifest.config["output"]["partition"]]
    pattern = storage.join(table_folder(manifest.output), *partition, "*.parquet")
    console.print(f"rows:     {pattern}", soft_wrap=True)
    console.print(f"manifest: {manifest.output}/{layout.MANIFEST}", soft_wrap=True)
    return next_step


def _print_check(manifest: Manifest, console: Console) -> str:
    """Print what the answers show without labels, and return the next step."""
    progress = answer_check.RunProgress(
        state="complete",
        documents=manifest.documents,
        failed=manifest.failed,
        seconds=manifest.seconds,
        on_gpu=manifest.cost is not None and manifest.cost.gpu_use is not None,
    )
    try:
        check = answer_check.check_run(manifest.output, progress)
    except NoRun:
        return ""
    except OSError as error:
        console.print(one_line(f"answers were not checked: {error}"), style="yellow")
        return ""
    for line in answer_check.lines(check):
        style = "yellow" if line.startswith("warning") else None
        console.print(one_line(line), style=style, soft_wrap=True)
    return check.next_step


def _print_totals(manifest: Manifest, console: Console) -> None:
    """Print how many documents were processed, what was left out, and the tokens."""
    documents = counted(manifest.documents, "document")
    outcome = f"{count(manifest.ok)} answered"
    if manifest.failed:
        outcome += f", {count(manifest.failed)} failed"
    console.print(
        f"{documents}: {outcome}; {counted(manifest.units, 'unit')}; "
        f"{duration(manifest.seconds)}, {number(manifest.documents_per_second)} documents/s"
    )
    if manifest.truncated:
        truncated = counted(manifest.truncated, "document")
        console.print(
            f"cut to fit the model's context: {truncated} (column `truncated`; "
            "task.long_documents has other ways to read them)"
        )
    if manifest.units_unreadable:
        units = counted(manifest.units_unreadable, "unit")
        console.print(
            f"left out: {units} of the input that cannot be read; the manifest lists them",
            style="red",
        )
    if manifest.left_out:
        console.print(
            one_line(left_out.describe(manifest.left_out)), style="yellow", soft_wrap=True
        )
    console.print(
        f"tokens: {count(manifest.prefill_tokens)} prefilled, "
        f"{count(manifest.shared_tokens)} shared, "
        f"{count(manifest.decode_tokens)} decoded"
    )


def _cost_lines(cost: RunCost | None, run_seconds: float) -> list[str]:
    """Return the bill and its parts: in money, or in time if the machines have no price.

    Args:
        cost: The bill.
        run_seconds: How long the run took.
    """
    if cost is None:
        return []
    if not cost.usd:
        return _time_lines(cost, run_seconds)
    line = f"cost:   {usd(cost.usd)}"
    if cost.usd_per_1000_documents is not None:
        line += f", {usd(cost.usd_per_1000_documents)} per 1,000 documents"
    if cost.sessions > 1:
        line += f", {counted(cost.sessions, 'session')}"
    parts = []
    for name, part in _largest_first(cost.parts):
        if part:
            parts.append(f"{name} {usd(part)} ({share(part, cost.usd)})")
    lines = [line, f"        {', '.join(parts)}"]
    if cost.kwh is not None:
        lines.append(f"energy: {number(cost.kwh)} kWh of the GPUs")
    if cost.gpu_use is not None:
        lines.append(f"use:    {cost.gpu_use}")
    return lines + _input_lines(cost)


def _time_lines(cost: RunCost, run_seconds: float) -> list[str]:
    """Return the parts of a run's time, without money.

    The times of all places for workers are added up, so they may be longer than the run.
    """
    lines = [f"cost:   no price ({'; '.join(cost.notes or cost.prices)})"]
    parts = []
    for name, seconds in _largest_first(cost.seconds):
        if seconds >= 0.05:
            parts.append(f"{name} {duration(seconds)}")
    if parts:
        line = f"time:   {', '.join(parts)}"
        if sum(cost.seconds.values()) > _SEVERAL_PLACES * run_seconds > 0:
            line += " (summed over all workers)"
        lines.append(line)
    return lines + _input_lines(cost)


def _input_lines(cost: RunCost) -> list[str]:
    """Say how long engines waited for input, if they did."""
    if not cost.input_bound_note:
        return []
    return [f"input:  {cost.input_bound_note}"]


def _largest_first(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda item: -item[1])


def _table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of a few documents."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=True)
    headings = ["document"]
    categories = {row.get("category") for row in rows}
    if categories - {None, "", UNNAMED_CATEGORY}:
        headings.append("category")
    for heading in headings:
        table.add_column(heading, overflow="ellipsis", no_wrap=True, max_width=16)
    table.add_column("values", overflow="ellipsis", no_wrap=True, min_width=20, ratio=1)
    for row in rows:
        cells = [Text(one_line(row["id"]))]
        # The category is no value: it has its own column, or it is one that nobody named.
        category = row.pop("category", None) or ""
        if "category" in headings:
            cells.append(Text(one_line(category)))
        table.add_row(*cells, _values(row))
    return table


def _values(row: dict[str, Any]) -> Text:
    """Return the answers of a row in one line, `name: value` each, or its error."""
    if row["status"] != "ok":
        return Text(f"error: {_short(row['error'], 200)}", style="red")
    shape = shape_of(row)
    if shape is None:
        return Text("")
    values = shape.values(row)
    if shape.many:
        parts = [
            f"{answer.name}: {_short(answer.value)}"
            for answer in values
            if answer.value not in (None, "[]")
        ]
        return Text("  ".join(parts))
    parts = []
    for answer in values:
        value = _short(answer.value or answer.status, 200)
        # A short question leaves room for its answer in a terminal of 80 columns.
        parts.append(f"{_short(answer.name)} {value}".strip())
    return Text(" ".join(parts))


def _short(value: Any, limit: int = 28) -> str:
    """Return a value in one line of at most `limit` characters."""
    text = one_line(" ".join(str(value).split()))
    if len(text) <= limit:
        return text
    return text[: limit - 1] + "…"
