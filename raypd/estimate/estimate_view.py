"""What `raypd estimate` prints: the speed, what the corpus takes on each kind of machine, and how far it holds."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.table import Table

from raypd.estimate import estimation
from raypd.estimate.estimate_result import Estimate, Row, families
from raypd.estimate.estimation import Mean, Speed


def show(result: Estimate, console: Console | None = None) -> None:
    """Prints to stdout, in the width of the terminal. Brackets hold the 95% interval."""
    console = console or Console(highlight=False)
    about = "" if result.documents.error == 0 else "about "
    console.print(f"{about}{_count(result.documents)} documents")
    console.print()
    console.print(_speeds([*result.ours, *result.baseline]))
    for speed in [*result.ours, *result.baseline]:
        if speed.machine is not None:
            console.print(f"{speed.method}: {speed.source}", soft_wrap=True)
    for mine in result.ours:
        gain = result.gain(mine)
        if gain is not None:
            console.print(f"{mine.method} is {_with_interval(gain, '{:.2f}')} times as fast as autoregressive decoding")
    for title, table in (("price of decoding", _machines), ("hours and the whole bill", _nodes)) if result.rows else ():
        console.print(f"\n{title}")
        console.print(table(result))
    console.print()
    if result.not_measured:
        gpus = ", ".join(f"{gpu} ({families(types)})" for gpu, types in result.not_measured.items())
        console.print(f"not measured on these GPUs, so no figure: {gpus}", soft_wrap=True)
    for note in dict.fromkeys(result.notes):
        console.print(f"note: {note}", soft_wrap=True)


def _plain() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)


def _speeds(speeds: list[Speed]) -> Table:
    table = _plain()
    table.add_column("one worker", no_wrap=True)
    table.add_column("documents/s [95%]", justify="right", no_wrap=True)
    measured = any(speed.prefill_tokens is not None for speed in speeds)
    for head in ("prefilled", "shared", "decoded") if measured else ():
        table.add_column(head, justify="right")
    for speed in speeds:
        tokens = (speed.prefill_tokens, speed.shared_tokens, speed.decode_tokens) if measured else ()
        shown = ["" if mean is None else f"{mean.value:,.0f}" for mean in tokens]
        name = speed.method + (f" on {speed.gpu}" if speed.gpu else "")
        table.add_row(name, _with_interval(speed.per_second, "{:.3g}"), *shown)
    return table


def _machines(result: Estimate) -> Table:
    """Prices of decoding."""
    table = _plain()
    table.add_column("machine", overflow="fold", min_width=13)
    baseline = any(row.baseline for row in result.rows)
    for head in ("$/h", "$ per 1,000 [95%]", *(("autoregressive", "saves") if baseline else ())):
        table.add_column(head, justify="right", no_wrap=True)
    for row in result.rows:
        priced = row.machines.usd_per_hour > 0
        cells = [f"{row.machines.usd_per_hour:,.2f}", _per_1000(row.ours, row)]
        if baseline:
            cells += ["-" if row.baseline is None else _per_1000(row.baseline, row)]
            cells += ["-" if row.saved is None else _money(row.saved.value)]
        name = row.machines.name + (" spot" if row.machines.market == "spot" else "")
        table.add_row(name, *(cells if priced else ["-"] * len(cells)))
    return table


def _per_1000(speed: Speed, row: Row) -> str:
    mean = estimation.usd_per_1000(speed, row.machines)
    return _with_interval(mean, "{:.3f}" if mean.value >= 0.01 else "{:.2g}")


def _nodes(result: Estimate) -> Table:
    """Hours and whole bill by the number of nodes."""
    table, rows = _plain(), result.rows
    table.add_column("machine", overflow="fold", min_width=13)
    table.add_column("GPU-hours" if all(row.ours.gpu for row in rows) else "worker-hours", justify="right")
    counts = sorted({bill.nodes for row in rows for bill in row.bills})
    for count in counts:
        table.add_column(f"{count} node{'' if count == 1 else 's'}", justify="right")
    for row in rows:
        cells = {bill.nodes: bill for bill in row.bills}
        shown = []
        for count in counts:
            bill = cells.get(count)
            money = f"\n{_bounded(bill.usd)}" if bill is not None and row.machines.usd_per_hour else ""
            shown.append("" if bill is None else f"{_hours(bill.hours.value)}{money}")
        hours = row.bills[0].gpu_hours.value
        table.add_row(row.machines.name, f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}", *shown)
    return table


def _with_interval(mean: Mean, form: str) -> str:
    if math.isinf(mean.value):
        return "-"
    text, ends = form.format(mean.value), mean.interval()
    if mean.error == 0:
        return text
    return f"{text} [?]" if ends is None else f"{text} [{form.format(ends[0])}-{form.format(ends[1])}]"


def _bounded(mean: Mean) -> str:
    ends = mean.interval()
    if mean.error == 0 or ends is None:
        return _money(mean.value)
    return f"{_money(mean.value)}\n[{_money(ends[0])}-{_money(ends[1])}]"


def _money(usd: float) -> str:
    if abs(usd) >= 1000:
        return f"${usd:,.0f}"
    return f"${usd:,.2f}" if abs(usd) >= 1 else f"${usd:.4f}"


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.1f} s"
    if hours < 1:
        return f"{hours * 60:.1f} min"
    return f"{hours:,.1f} h" if hours < 100 else f"{hours:,.0f} h"


def _count(mean: Mean) -> str:
    ends = mean.interval()
    if mean.error == 0 or ends is None:
        return f"{mean.value:,.0f}"
    return f"{mean.value:,.0f} [{ends[0]:,.0f}-{ends[1]:,.0f}]"
