"""What `raypd estimate` and `raypd tune` print."""

import math

from rich import box
from rich.console import Console
from rich.table import Table

from raypd import text
from raypd.estimation import tables
from raypd.estimation.records import Estimate
from raypd.estimation.search import Search, Trial
from raypd.estimation.tune import TuneResult, describe


def show_estimate(result: Estimate) -> None:
    """Prints to stdout, in the width of the terminal."""
    console = Console(highlight=False, markup=False)
    about = "" if result.documents.counted else "about "
    words = "document" if result.documents.counted and result.documents.value == 1 else "documents"
    console.print(f"{about}{tables.with_interval(result.documents, text.count)} {words}\n")
    console.print(_table(tables.speeds(result)))
    for line in tables.sentences(result):
        console.print(line, soft_wrap=True)
    if result.machines:
        prices = _table(tables.prices(result), 13)
        bills = _table(tables.bills(result), 13)
        console.print("\nprice of decoding", prices, "\nhours and the whole bill", bills, sep="\n")
    if compared := tables.hosted(result):
        console.print(f"\n{text.clean(compared)}", soft_wrap=True)
    console.print()
    for note in result.notes:
        console.print(f"note: {text.clean(note)}", soft_wrap=True)


def _table(cells: tables.Cells, width: int | None = None) -> Table:
    """cells: the heads, then the rows. width: of the first column, which is else as long as its
    longest name.
    """
    (first, *heads), *rows = cells
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(first, overflow="fold", no_wrap=width is None, min_width=width)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def show_tune(result: TuneResult) -> None:
    """Prints all that was tried, and why the best is the best, to stdout in the width of the
    terminal.
    """
    console = Console(highlight=False, markup=False)
    priced = result.kind.usd_per_hour > 0
    cells = [["setting", "docs/s", *(["$/1,000"] if priced else []), "agree [95%]", ""]]
    for trial in result.search.trials:
        row = [describe(trial.changes), f"{trial.speed:.3g}" if trial.usable else "-"]
        usd = result.usd_per_1000(trial)
        row += [f"{usd:.3g}" if usd is not None else "-"] if priced else []
        if trial.usable and trial.agreement.of:
            agreement = str(trial.agreement).partition(" of ")[0]
        else:
            agreement = "-"
        cells.append(
            [
                *row,
                "reference" if trial is result.search.reference else agreement,
                _remark(result, trial),
            ]
        )
    table = _table(cells, 28)
    table.columns[-1].justify = "left"
    table.rows[result.search.trials.index(result.best)].style = "bold"
    console.print(table)
    console.print(why(result), soft_wrap=True)
    for note in _notes(result):
        console.print(f"note: {text.clean(note)}", soft_wrap=True)


def _remark(result: TuneResult, trial: Trial) -> str:
    search = result.search
    if trial is result.best:
        return "best"
    if not trial.usable:
        return "failed" if trial.error is not None else "too slow"
    if search.agrees(trial):
        return ""
    if search.judged:
        if search.unsure(trial):
            return "unsure"
        else:
            return "below floor"
    return "not judged"


def why(result: TuneResult) -> str:
    """In words, why the best setting is the best."""
    search = result.search
    best = result.best
    settings = text.counted(sum(trial.usable for trial in search.trials), "setting")
    agrees = (
        f"with {search.reference_method} decoding in at least {search.floor.share:.0%} of values"
    )
    by_low = search.floor.by == "low"
    if not search.judged:
        reason = (
            f"{_not_judged(search)}. So only settings that leave the answers alone were changed: "
        )
    elif not search.agrees(best):
        sure = " surely" if by_low else ""
        return (
            f"none of {settings}{sure} agrees {agrees}; this one agrees most, in {best.agreement}"
        )
    else:
        how = "low end of the 95% interval" if by_low else "share"
        reason = f"fastest of {settings} among those that agree {agrees} ({how}): "
    reason += f"{best.speed:.3g} documents/s of one worker"
    if search.judged:
        reason += (
            ", itself the reference" if best is search.reference else f", {best.agreement} agree"
        )
    start = next((trial for trial in search.trials if not trial.changes and trial.usable), best)
    if start is not best:
        reason += f"; {best.speed / start.speed:.2f} times the speed of the configuration as it is"
    usd = result.usd_per_1000(best)
    if usd is None:
        return reason
    return f"{reason}; ${usd:.3g} per 1,000 documents on {result.kind.name}"


def _not_judged(search: Search) -> str:
    floor = search.floor
    there = search.reference.agreement.of
    if math.isinf(floor.needed):
        reason = f"no sample can show that {floor.share:.0%} of values agree; lower --agreement"
    else:
        needs = f"a floor of {floor.share:.0%} needs {floor.needed:.0f} even if all agree"
        gave = f"{search.reference_method} decoding gave {text.counted(there, 'whole value')}"
        reason = f"{gave}, and {needs}; raise --sample or lower --agreement"
    return f"agreement was NOT judged: {reason}, or take the share as it is with --judge share"


def _notes(result: TuneResult) -> list[str]:
    search = result.search
    notes = [
        (
            f"measured on {result.machine}, {text.counted(result.documents, 'document')}; "
            f"{search.ended}"
        )
    ]
    notes += [
        f"{describe(t.changes)}: {t.error.splitlines()[0]}"
        for t in search.trials
        if t.error is not None
    ]
    if search.judged and any(
        t.usable and not search.agrees(t) and search.unsure(t) for t in search.trials
    ):
        notes.append(
            f"unsure: it may agree in less than {search.floor.share:.0%} of values; a larger "
            "--sample tells"
        )
    if result.reused:
        notes.append(f"{result.reused} measurements are from the file; --fresh makes them again")
    agreement = search.reference.agreement
    guided = search.reference_method == "guided"
    if guided:
        notes.append(
            "the reference is guided decoding: keys are given, each value follows all of the "
            "answer before it"
        )
    if not guided and agreement.left_out > agreement.of:
        gave = f"nothing whole for {agreement.left_out} values and a value for {agreement.of} only"
        notes.append(f"autoregressive decoding gave {gave}: with this model it is a poor reference")
    elif agreement.left_out:
        notes.append(
            f"{agreement.left_out} values are left out: the reference gave nothing whole there"
        )
    if not result.kind.usd_per_hour:
        notes.append(
            "this machine has no price: cost.prices.local (USD per hour) or --instance gives it one"
        )
    speeds = result.best.speeds
    if len(speeds) > 1 and max(speeds) > 1.15 * min(speeds):
        gap = max(speeds) / min(speeds) - 1
        notes.append(
            f"measurements of one setting differ by {gap:.0%}: the machine is busy; tune on an "
            "idle one"
        )
    return notes
