"""What a finished run shows: a few documents with their values, the totals, and where the files
lie.
"""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypd import storage
from raypd.dataset import writer
from raypd.run import layout
from raypd.run.left_out import describe
from raypd.run.manifest import Manifest
from raypd.run.usage import RunCost
from raypd.tasks.columns import shape_of
from raypd.text import count, counted, duration, number, one_line, share, usd

_ROWS = 8


def print_summary(manifest: Manifest, console: Console | None = None) -> None:
    """Prints what a run has come to. console: None: stdout, in the width of the terminal."""
    console = console or Console(highlight=False, markup=False)
    units = sorted(writer.committed(manifest.output))
    rows = writer.read_rows(manifest.output, units[0], _ROWS) if units else []
    if rows:
        console.print(_table(rows))
    if manifest.fake:
        console.print(
            "model: fake. THESE ANSWERS ARE MADE UP: no model read the documents.", style="bold red"
        )
    ok = f"{count(manifest.ok)} ok" + (
        f", {count(manifest.failed)} failed" if manifest.failed else ""
    )
    console.print(
        f"{counted(manifest.documents, 'document')}: {ok}; {counted(manifest.units, 'unit')}; "
        f"{duration(manifest.seconds)}, {number(manifest.documents_per_second)} documents/s"
    )
    if manifest.truncated:
        console.print(
            f"cut to fit the model's context: {counted(manifest.truncated, 'document')} "
            "(column `truncated`)"
        )
    if manifest.units_unreadable:
        unreadable = (
            f"left out: {counted(manifest.units_unreadable, 'unit')} of the input that cannot "
            "be read"
        )
        console.print(f"{unreadable}; the manifest lists them", style="red")
    if manifest.left_out:
        console.print(one_line(describe(manifest.left_out)), style="yellow", soft_wrap=True)
    console.print(
        f"tokens: {count(manifest.prefill_tokens)} prefilled, "
        f"{count(manifest.shared_tokens)} shared, "
        f"{count(manifest.decode_tokens)} decoded"
    )
    for line in _cost_lines(manifest.cost):
        console.print(line, soft_wrap=True)
    partition = [f"{key}=*" for key in manifest.config["output"]["partition"]]
    rows_at = storage.join(writer.units_folder(manifest.output), *partition, "*.parquet")
    console.print(f"rows:     {rows_at}", soft_wrap=True)
    console.print(f"manifest: {manifest.output}/{layout.MANIFEST}", soft_wrap=True)


def _cost_lines(cost: RunCost | None) -> list[str]:
    """The bill in one line, its parts in another: in money, or in time where the machines have no
    price.
    """
    if cost is None:
        return []
    largest = sorted((cost.parts if cost.usd else cost.seconds).items(), key=lambda item: -item[1])
    if not cost.usd:
        parts = [f"{name} {duration(seconds)}" for name, seconds in largest if seconds >= 0.05]
        reason = "; ".join(cost.notes or cost.prices)
        return [f"cost:   no price ({reason})", *([f"time:   {', '.join(parts)}"] if parts else [])]
    sessions = f", {counted(cost.sessions, 'session')}" if cost.sessions > 1 else ""
    each = cost.usd_per_1000_documents
    per_1000 = "" if each is None else f", {usd(each)} per 1,000 documents"
    parts = [f"{name} {usd(part)} ({share(part, cost.usd)})" for name, part in largest if part]
    lines = [f"cost:   {usd(cost.usd)}{per_1000}{sessions}", f"        {', '.join(parts)}"]
    if cost.kwh is not None:
        lines.append(f"energy: {number(cost.kwh)} kWh of the GPUs")
    if cost.gpu_use is not None:
        lines.append(f"use:    {cost.gpu_use}")
    return lines


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=True)
    with_category = any(row.get("category") for row in rows)
    for head in ("document", "category") if with_category else ("document",):
        table.add_column(head, overflow="ellipsis", no_wrap=True, max_width=16)
    table.add_column("values", overflow="ellipsis", no_wrap=True, min_width=20, ratio=1)
    for row in rows:
        category = [Text(one_line(row.pop("category", None) or ""))] if with_category else []
        table.add_row(Text(one_line(row["id"])), *category, _values(row))
    return table


def _values(row: dict[str, Any]) -> Text:
    """The answers of a row in one line: `name: value` of what was found, or the error."""
    if row["status"] != "ok":
        return Text(f"error: {_short(row['error'], 200)}", style="red")
    shape = shape_of(row)
    values = [] if shape is None else shape.values(row)
    if shape is not None and shape.many:
        return Text(
            "  ".join(f"{v.name}: {_short(v.value)}" for v in values if v.value not in (None, "[]"))
        )
    return Text(
        " ".join(f"{_short(v.name, 60)} {_short(v.value or v.status, 200)}".strip() for v in values)
    )


def _short(value: Any, most: int = 28) -> str:
    text = one_line(" ".join(str(value).split()))
    return text if len(text) <= most else text[: most - 1] + "…"
