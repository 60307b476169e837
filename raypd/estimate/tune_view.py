"""What `raypd tune` prints: all that was tried, and why the best is the best."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.table import Table

from raypd.estimate.agreement import Agreement, compare
from raypd.estimate.search import Search, Trial
from raypd.estimate.tune import Result, describe


def show(result: Result, console: Console | None = None) -> None:
    """Prints to stdout, in the width of the terminal."""
    console = console or Console(highlight=False)
    search, priced = result.search, result.machines.usd_per_hour > 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("setting", overflow="fold", min_width=28)
    for head in ("docs/s", *(("$/1,000",) if priced else ()), "agree [95%]"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for trial in search.trials:
        cells = [f"{trial.speed:.3g}" if trial.usable else "-"]
        usd = result.usd_per_1000(trial) if trial.usable else None
        cells += [f"{usd:.3g}" if usd is not None else "-"] if priced else []
        cells.append(_agreement(result, trial))
        table.add_row(
            describe(trial.changes), *cells, _remark(result, trial), style="bold" if _best(result, trial) else ""
        )
    console.print(table)
    console.print(why(result), soft_wrap=True)
    for note in _notes(result):
        console.print(f"note: {note}", soft_wrap=True)


def _agreement(result: Result, trial: Trial) -> str:
    if trial is result.search.reference:
        return "reference"
    if not trial.usable or not trial.agreement.of:
        return "-"
    low, high = trial.agreement.interval()
    return f"{trial.agreement.share:.1%} [{100 * low:.0f}-{high:.0%}]"


def _best(result: Result, trial: Trial) -> bool:
    return trial is result.best


def _remark(result: Result, trial: Trial) -> str:
    search = result.search
    if _best(result, trial):
        return "best"
    if trial.error is not None:
        return "failed"
    if trial.cut:
        return "too slow"
    if search.agrees(trial):
        return ""
    return ("unsure" if _unsure(search, trial) else "below floor") if search.judged else "not judged"


def _unsure(search: Search, trial: Trial) -> bool:
    """Whether the agreement may reach the floor, and the sample is too small to tell."""
    return search.floor.by == "low" and trial.agreement.interval()[1] >= search.floor.share


def reference(search: Search) -> str:
    """What answers were compared with, in words."""
    return "guided decoding" if search.by_guided else "autoregressive decoding"


def why(result: Result) -> str:
    """In words, why the best setting is the best."""
    search, best = result.search, result.best
    assert best is not None
    count = sum(trial.usable for trial in search.trials)
    if not search.judged:
        text = f"{_not_judged(search)}. So only settings that leave the answers alone were changed: "
    elif not search.agrees(best):
        sure = " surely" if search.floor.by == "low" else ""
        return (
            f"none of {count} settings{sure} agrees with {reference(search)} in at least {search.floor.share:.0%} of "
            f"values; this one agrees most, in {best.agreement}"
        )
    else:
        how = "low end of the 95% interval" if search.floor.by == "low" else "share"
        text = f"fastest of {count} settings among those that agree with {reference(search)} in at least "
        text += f"{search.floor.share:.0%} of values ({how}): "
    text += f"{best.speed:.3g} documents/s of one worker"
    if search.judged:
        text += ", itself the reference" if best is search.reference else f", {best.agreement} agree"
    start = next((trial for trial in search.trials if not trial.changes and trial.usable), None)
    if start is not None and start is not best:
        text += f"; {best.speed / start.speed:.2f} times the speed of the configuration as it is"
    usd = result.usd_per_1000(best)
    if usd is not None:
        text += f"; ${usd:.3g} per 1,000 documents on {result.machines.name}"
    return text


def _not_judged(search: Search) -> str:
    """Why the floor could not be judged, and what to do."""
    there = search.reference.agreement.of if search.reference is not None else 0
    if math.isinf(search.floor.needed):
        return (
            f"agreement was NOT judged: no sample can show that {search.floor.share:.0%} of values agree; lower "
            "--agreement, or take the share as it is with --judge share"
        )
    return (
        f"agreement was NOT judged: {reference(search)} gave {there} whole values, and a floor of "
        f"{search.floor.share:.0%} needs {search.floor.needed:.0f} even if all of them agree; raise --sample or lower "
        "--agreement, or take the share as it is with --judge share"
    )


def _broken(search: Search) -> str:
    """Why it is not the answers of autoregressive decoding, where that was measured."""
    first = next((trial for trial in search.trials if trial.answers is not None and search.autoregressive(trial)), None)
    if first is None or first.answers is None:
        return ""
    own = compare(first.answers, first.answers)
    return f": autoregressive decoding gave {own.of} whole values and nothing whole for {own.left_out}"


def _notes(result: Result) -> list[str]:
    search, best = result.search, result.best
    assert best is not None
    notes = [f"measured on {result.machine}, {result.documents} documents; {search.ended}"]
    failed = [trial for trial in search.trials if trial.error is not None]
    notes += [f"{describe(trial.changes)}: {(trial.error or '').splitlines()[0]}" for trial in failed]
    if search.judged and any(t.usable and not search.agrees(t) and _unsure(search, t) for t in search.trials):
        notes.append(f"unsure: it may agree in less than {search.floor.share:.0%} of values; a larger --sample tells")
    if result.taken:
        notes.append(f"{result.taken} measurements are from the file; --fresh makes them again")
    found = search.reference.agreement if search.reference is not None else Agreement(0, 0)
    if search.by_guided:
        notes.append(
            "the reference is guided decoding: the keys are given, each value is decoded token by token behind all of "
            "the answer before it (decoding.method: guided)" + _broken(search)
        )
    elif found.left_out > found.of:
        notes.append(
            f"autoregressive decoding gave nothing whole for {found.left_out} values and a value for {found.of} only: "
            "with this model it is a poor reference"
        )
    if found.left_out and (search.by_guided or found.left_out <= found.of):
        notes.append(f"{found.left_out} values are left out: the reference gave nothing whole there")
    if not result.machines.usd_per_hour:
        notes.append("this machine has no price: cost.prices.local (USD per hour) or --instance gives it one")
    if result.busy is not None:
        notes.append(result.busy)
    return notes
