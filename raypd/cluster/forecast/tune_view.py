"""What `raypd tune` prints: all that was tried, and why the best is the best."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from raypd.cluster.forecast.search import Trial
from raypd.cluster.forecast.tune import Result, describe


def show(result: Result, console: Console | None = None) -> None:
    """Prints to stdout, in the width of the terminal."""
    console = console or Console(highlight=False)
    search, priced = result.search, result.machines.usd_per_hour > 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("setting", overflow="fold")
    for head in ("documents/s", *(("$ per 1,000",) if priced else ()), "agree"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", overflow="ellipsis", no_wrap=True, max_width=30)
    for trial in search.trials:
        cells = [f"{trial.speed:.3g}" if trial.usable else "-"]
        usd = result.usd_per_1000(trial) if trial.usable else None
        cells += [f"{usd:.3g}" if usd is not None else "-"] if priced else []
        cells.append(f"{trial.agreement.share:.1%}" if trial.usable and trial.agreement.of else "-")
        table.add_row(
            describe(trial.changes), *cells, _remark(result, trial), style="bold" if _best(result, trial) else ""
        )
    console.print(table)
    console.print(why(result), soft_wrap=True)
    for note in _notes(result):
        console.print(f"note: {note}", soft_wrap=True)


def _best(result: Result, trial: Trial) -> bool:
    return trial is result.best


def _remark(result: Result, trial: Trial) -> str:
    if _best(result, trial):
        return "best" if len(trial.speeds) < 2 else f"best, median of {len(trial.speeds)}"
    if trial.error is not None:
        return trial.error.splitlines()[0]
    if trial.cut:
        return "stopped, far slower"
    if not result.search.agrees(trial):
        return "below the floor"
    return f"median of {len(trial.speeds)}" if len(trial.speeds) > 1 else ""


def why(result: Result) -> str:
    """In words, why the best setting is the best."""
    search, best = result.search, result.best
    assert best is not None
    same, count = best.agreement, sum(trial.usable for trial in search.trials)
    if not search.agrees(best):
        return (
            f"none of {count} settings agrees with autoregressive decoding in {search.floor:.0%} of values; this one "
            f"agrees most, in {same.share:.1%} of {same.of}"
            if same.of
            else "autoregressive decoding gave no whole value"
        )
    text = f"fastest of {count} settings among those that agree in at least {search.floor:.0%} of values: "
    text += f"{best.speed:.3g} documents/s of one worker, {same.agree} of {same.of} values agree"
    start = next((trial for trial in search.trials if not trial.changes and trial.usable), None)
    if start is not None and start is not best:
        text += f"; {best.speed / start.speed:.2f} times the speed of the configuration as it is"
    usd = result.usd_per_1000(best)
    if usd is not None:
        text += f"; ${usd:.3g} per 1,000 documents on {result.machines.name}"
    return text


def _notes(result: Result) -> list[str]:
    search, best = result.search, result.best
    assert best is not None
    notes = [f"measured on {result.machine}, {result.documents} documents; {search.ended}"]
    if result.taken:
        notes.append(f"{result.taken} measurements are from the file; --fresh makes them again")
    if best.agreement.of < 100:
        notes.append(f"agreement rests on {best.agreement.of} values only: raise --sample to be surer of it")
    if best.agreement.left_out > best.agreement.of:
        notes.append(
            f"autoregressive decoding gave nothing whole for {best.agreement.left_out} values and a value for "
            f"{best.agreement.of} only: with this model it is a poor reference"
        )
    elif best.agreement.left_out:
        notes.append(f"{best.agreement.left_out} values are left out: autoregressive decoding gave nothing whole there")
    if not result.machines.usd_per_hour:
        notes.append("this machine has no price: cost.prices.local (USD per hour) or --instance gives it one")
    if result.busy is not None:
        notes.append(result.busy)
    return notes
