"""What `raypd estimate` and `raypd tune` print."""

import math

from rich import box
from rich.console import Console
from rich.table import Table

import raypd.estimation.tables as tables
from raypd import text
from raypd.estimation.records import Estimate
from raypd.estimation.search import Search, Trial
from raypd.estimation.tune import TuneResult, describe


def show_estimate(result: Estimate) -> None:
    """Print an estimate to stdout, in the width of the terminal."""
    console = Console(highlight=False, markup=False)
    heading = _documents(result)
    if result.model is not None:
        heading += f" with {text.clean(result.model, 120)}"
    console.print(f"{heading}\n", soft_wrap=True)
    console.print(_table(tables.speeds(result)))
    for line in tables.sentences(result):
        console.print(line, soft_wrap=True)
    if result.machines:
        prices = _table(tables.prices(result), 13)
        bills = _table(tables.bills(result), 13)
        console.print("\nprice of decoding", prices, "\nhours and the whole bill", bills, sep="\n")
    hosted = tables.hosted(result)
    if hosted:
        console.print(f"\n{text.clean(hosted)}", soft_wrap=True)
    console.print()
    for note in result.notes:
        console.print(f"note: {text.clean(note)}", soft_wrap=True)


def _documents(result: Estimate) -> str:
    """Return the number of documents in words."""
    number = tables.with_interval(result.documents, text.count)
    if not result.documents.counted:
        return f"about {number} documents"
    if result.documents.value == 1:
        return f"{number} document"
    return f"{number} documents"


def _table(cells: tables.Cells, width: int | None = None) -> Table:
    """Make a table of cells.

    Args:
        cells: The headings, then the rows.
        width: The width of the first column; None for the length of its longest name.
    """
    headings = cells[0]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(headings[0], overflow="fold", no_wrap=width is None, min_width=width)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in cells[1:]:
        table.add_row(*row)
    return table


def show_tune(result: TuneResult) -> None:
    """Print all trials, and why the best is the best, in the width of the terminal."""
    console = Console(highlight=False, markup=False)
    priced = result.kind.usd_per_hour > 0
    headings = ["setting", "docs/s"]
    if priced:
        headings.append("$/1,000")
    headings += ["agree [95%]", ""]
    trials = result.search.trials
    rows = [_trial_row(result, trial, priced) for trial in trials]
    table = _table([headings, *rows], 28)
    table.columns[-1].justify = "left"
    table.rows[trials.index(result.best)].style = "bold"
    console.print(table)
    console.print(why(result), soft_wrap=True)
    for note in _notes(result):
        console.print(f"note: {text.clean(note)}", soft_wrap=True)


def _trial_row(result: TuneResult, trial: Trial, priced: bool) -> list[str]:
    """Return the cells of a trial."""
    speed = "-"
    agreement = "-"
    if trial.usable:
        speed = f"{trial.speed:.3g}"
        if trial.agreement.of:
            agreement = str(trial.agreement).partition(" of ")[0]
    if trial is result.search.reference:
        agreement = "reference"
    cells = [describe(trial.changes), speed]
    if priced:
        usd = result.usd_per_1000(trial)
        cells.append("-" if usd is None else f"{usd:.3g}")
    return [*cells, agreement, _remark(result, trial)]


def _remark(result: TuneResult, trial: Trial) -> str:
    """Return in a word or two why a trial is not the best."""
    search = result.search
    if trial is result.best:
        return "best"
    if trial.error is not None:
        return "failed"
    if not trial.usable:
        return "too slow"
    if search.agrees(trial):
        return ""
    if not search.judged:
        return "not judged"
    if search.unsure(trial):
        return "unsure"
    return "below floor"


def why(result: TuneResult) -> str:
    """Return why the best setting is the best."""
    search = result.search
    best = result.best
    if search.judged and not search.agrees(best):
        return _why_most_agreeing(result)
    if search.judged:
        measure = "share"
        if search.floor.by == "low":
            measure = "low end of the 95% interval"
        reason = (
            f"fastest of {_usable_settings(search)} among those that agree "
            f"{_with_reference(search)} ({measure}): "
        )
    else:
        reason = (
            f"{_not_judged(search)}. So only settings that do not affect the answers were changed: "
        )
    reason += f"{best.speed:.3g} documents/s of one worker"
    if search.judged and best is search.reference:
        reason += ", itself the reference"
    elif search.judged:
        reason += f", {best.agreement} agree"
    for trial in search.trials:
        if not trial.changes and trial.usable and trial is not best:
            gain = f"{best.speed / trial.speed:.2f}"
            reason += f"; {gain} times the speed of the configuration as it is"
            break
    usd = result.usd_per_1000(best)
    if usd is None:
        return reason
    return f"{reason}; ${usd:.3g} per 1,000 documents on {result.kind.name}"


def _why_most_agreeing(result: TuneResult) -> str:
    """Return a sentence that no setting reaches the floor."""
    search = result.search
    surely = ""
    if search.floor.by == "low":
        surely = " with certainty"
    return (
        f"none of {_usable_settings(search)}{surely} agrees {_with_reference(search)}; this one "
        f"agrees most, in {result.best.agreement}"
    )


def _usable_settings(search: Search) -> str:
    return text.counted(sum(trial.usable for trial in search.trials), "setting")


def _with_reference(search: Search) -> str:
    return f"with {search.reference_method} decoding in at least {search.floor.share:.0%} of values"


def _not_judged(search: Search) -> str:
    """Return why agreement could not be judged, and what to do."""
    floor = search.floor
    if math.isinf(floor.needed):
        reason = f"no sample can show that {floor.share:.0%} of values agree; lower --agreement"
    else:
        values = text.counted(search.reference.agreement.of, "complete value")
        reason = (
            f"{search.reference_method} decoding gave {values}, and a floor of {floor.share:.0%} "
            f"needs {floor.needed:.0f} even if all agree; raise --sample or lower --agreement"
        )
    return f"agreement was NOT judged: {reason}, or accept the share as it is with --judge share"


def _notes(result: TuneResult) -> list[str]:
    """Return what a reader of the result should know."""
    search = result.search
    notes = [
        f"measured on {result.machine}, {text.counted(result.documents, 'document')}; "
        f"{search.ended}"
    ]
    for trial in search.trials:
        if trial.error is not None:
            notes.append(f"{describe(trial.changes)}: {trial.error.splitlines()[0]}")
    usable = [trial for trial in search.trials if trial.usable]
    unsure = [trial for trial in usable if not search.agrees(trial) and search.unsure(trial)]
    if search.judged and unsure:
        notes.append(
            f"unsure: it may agree in less than {search.floor.share:.0%} of values; a larger "
            "--sample tells"
        )
    if result.reused:
        notes.append(f"{result.reused} measurements are from the file; --fresh repeats them")
    notes += _reference_notes(search)
    if not result.kind.usd_per_hour:
        notes.append(
            "this machine has no price: set cost.prices.local (USD per hour), or give --instance"
        )
    speeds = result.best.speeds
    if len(speeds) > 1 and max(speeds) > 1.15 * min(speeds):
        gap = max(speeds) / min(speeds) - 1
        notes.append(
            f"measurements of one setting differ by {gap:.0%}: the machine is busy; tune on an "
            "idle one"
        )
    return notes


def _reference_notes(search: Search) -> list[str]:
    """Return notes on the quality of the reference."""
    notes = []
    agreement = search.reference.agreement
    guided = search.reference_method == "guided"
    if guided:
        notes.append(
            "the reference is guided decoding: keys are given, and each value follows the whole "
            "answer before it"
        )
    if not guided and agreement.left_out > agreement.of:
        notes.append(
            f"autoregressive decoding gave {agreement.of} complete values and "
            f"{agreement.left_out} incomplete ones: with this model it is a poor reference"
        )
    elif agreement.left_out:
        notes.append(
            f"{agreement.left_out} values are left out, because they are incomplete in the "
            "reference"
        )
    return notes
