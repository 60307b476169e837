"""What `raypd estimate` and `raypd tune` print."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table

from raypd.estimate.agreement import compare
from raypd.estimate.estimate import GIVEN
from raypd.estimate.machines import families
from raypd.estimate.profile import TOKENS
from raypd.estimate.search import Search, Trial
from raypd.estimate.tune import TuneResult, describe
from raypd.run.records import Estimate, Figure, MachineEstimate

Show = Callable[[float], str]


def _table(first: str, width: int | None, *heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(first, overflow="fold", no_wrap=width is None, min_width=width)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


# ------------------------------------------------------------------------------------------------------------ estimate


def show_estimate(result: Estimate, console: Console | None = None) -> None:
    """Prints to stdout, in the width of the terminal. Brackets hold the 95% interval."""
    console = console or Console(highlight=False)
    about = "" if result.documents.counted else "about "
    console.print(f"{about}{_bounded(result.documents, '{:,.0f}'.format)} documents\n")
    speeds = [*result.speeds, *result.baseline]
    console.print(_speeds(result))
    for speed in speeds:
        if speed.source != GIVEN:
            console.print(f"{speed.method}: {speed.source}", soft_wrap=True)
    for speed in result.speeds:
        if speed.times_autoregressive is not None:
            gain = _with_interval(speed.times_autoregressive, "{:.2f}")
            console.print(f"{speed.method} is {gain} times as fast as autoregressive decoding")
    if result.machines:
        console.print("\nprice of decoding", _prices(result), "\nhours and the whole bill", _bills(result), sep="\n")
    console.print()
    if result.not_measured:
        gpus = ", ".join(f"{gpu} ({families(types)})" for gpu, types in result.not_measured.items())
        console.print(f"not measured on these GPUs, so no figure: {gpus}", soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _speeds(result: Estimate) -> Table:
    speeds = [*result.speeds, *result.baseline]
    kinds = [kind for kind in TOKENS if any(kind in speed.tokens_per_document for speed in speeds)]
    names = dict(zip(TOKENS, ("prefilled", "shared", "decoded"), strict=True))
    table = _table("one worker", None, "documents/s [95%]", *(names[kind] for kind in kinds))
    for speed in speeds:
        tokens = [speed.tokens_per_document.get(kind) for kind in kinds]
        shown = ["" if mean is None else f"{mean.value:,.0f}" for mean in tokens]
        table.add_row(speed.name, _with_interval(speed.documents_per_second, "{:.3g}"), *shown)
    return table


def _prices(result: Estimate) -> Table:
    baseline = any(one.baseline_usd_per_1000 for one in result.machines)
    table = _table("machine", 13, "$/h", "$ per 1,000 [95%]", *(("autoregressive", "saves") if baseline else ()))
    for one in result.machines:
        cells = [f"{one.usd_per_hour:,.2f}", _per_1000(one.usd_per_1000)]
        if baseline:
            cells.append(_per_1000(one.baseline_usd_per_1000))
            cells.append("-" if one.saved_usd is None else _money(one.saved_usd.value))
        table.add_row(one.title, *(cells if one.usd_per_hour else ["-"] * len(cells)))
    return table


def _per_1000(figure: Figure | None) -> str:
    return "-" if figure is None else _with_interval(figure, "{:.3f}" if figure.value >= 0.01 else "{:.2g}")


def _bills(result: Estimate) -> Table:
    """Hours and whole bill by the number of nodes."""
    counts = sorted({bill.nodes for one in result.machines for bill in one.bills})
    hours = "GPU-hours" if all(one.gpu for one in result.machines) else "worker-hours"
    table = _table("machine", 13, hours, *(f"{count} node{'' if count == 1 else 's'}" for count in counts))
    for one in result.machines:
        shown = {bill.nodes: _hours(bill.hours.value) + _whole_bill(one, bill.usd) for bill in one.bills}
        total = one.bills[0].gpu_hours.value
        total_shown = f"{total:,.0f}" if total >= 100 else f"{total:.3g}"
        table.add_row(one.name, total_shown, *(shown.get(count, "") for count in counts))
    return table


def _whole_bill(machine: MachineEstimate, usd: Figure) -> str:
    return "\n" + _bounded(usd, _money, "\n") if machine.usd_per_hour else ""


def _with_interval(figure: Figure, form: str) -> str:
    if math.isinf(figure.value):
        return "-"
    if figure.low is None:
        return f"{form.format(figure.value)} [?]"
    return _bounded(figure, form.format)


def _bounded(figure: Figure, show: Show, between: str = " ") -> str:
    if figure.counted or figure.low is None or figure.high is None:
        return show(figure.value)
    return f"{show(figure.value)}{between}[{show(figure.low)}-{show(figure.high)}]"


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


# ---------------------------------------------------------------------------------------------------------------- tune


def show_tune(result: TuneResult, console: Console | None = None) -> None:
    """Prints all that was tried, and why the best is the best, to stdout in the width of the terminal."""
    console = console or Console(highlight=False)
    priced = result.kind.usd_per_hour > 0
    table = _table("setting", 28, "docs/s", *(("$/1,000",) if priced else ()), "agree [95%]", "")
    table.columns[-1].justify = "left"
    for trial in result.search.trials:
        usd = result.usd_per_1000(trial) if trial.usable else None
        cells = [f"{trial.speed:.3g}" if trial.usable else "-"]
        cells += [f"{usd:.3g}" if usd is not None else "-"] if priced else []
        cells += [_agreement(result.search, trial), _remark(result, trial)]
        table.add_row(describe(trial.changes), *cells, style="bold" if trial is result.best else "")
    console.print(table)
    console.print(why(result), soft_wrap=True)
    for note in _notes(result):
        console.print(f"note: {note}", soft_wrap=True)


def _agreement(search: Search, trial: Trial) -> str:
    if trial is search.reference:
        return "reference"
    if not trial.usable or not trial.agreement.of:
        return "-"
    low, high = trial.agreement.interval()
    return f"{trial.agreement.share:.1%} [{100 * low:.0f}-{high:.0%}]"


def _remark(result: TuneResult, trial: Trial) -> str:
    search = result.search
    if trial is result.best:
        return "best"
    if trial.error is not None:
        return "failed"
    if trial.cut:
        return "too slow"
    if search.agrees(trial):
        return ""
    return ("unsure" if search.unsure(trial) else "below floor") if search.judged else "not judged"


def why(result: TuneResult) -> str:
    """In words, why the best setting is the best."""
    search, best = result.search, result.best
    count = sum(trial.usable for trial in search.trials)
    floor = f"at least {search.floor.share:.0%} of values"
    if not search.judged:
        text = f"{_not_judged(search)}. So only settings that leave the answers alone were changed: "
    elif not search.agrees(best):
        sure = " surely" if search.floor.by == "low" else ""
        return (
            f"none of {count} settings{sure} agrees with {_reference(search)} in {floor}; this one agrees most, in "
            f"{best.agreement}"
        )
    else:
        how = "low end of the 95% interval" if search.floor.by == "low" else "share"
        text = f"fastest of {count} settings among those that agree with {_reference(search)} in {floor} ({how}): "
    text += f"{best.speed:.3g} documents/s of one worker"
    if search.judged:
        text += ", itself the reference" if best is search.reference else f", {best.agreement} agree"
    start = next((trial for trial in search.trials if not trial.changes and trial.usable), None)
    if start is not None and start is not best:
        text += f"; {best.speed / start.speed:.2f} times the speed of the configuration as it is"
    usd = result.usd_per_1000(best)
    return text if usd is None else f"{text}; ${usd:.3g} per 1,000 documents on {result.kind.name}"


def _reference(search: Search) -> str:
    return "guided decoding" if search.by_guided else "autoregressive decoding"


def _not_judged(search: Search) -> str:
    """Why the floor could not be judged, and what to do."""
    share = "or take the share as it is with --judge share"
    if math.isinf(search.floor.needed):
        return (
            f"agreement was NOT judged: no sample can show that {search.floor.share:.0%} of values agree; lower "
            f"--agreement, {share}"
        )
    there = search.reference.agreement.of if search.reference is not None else 0
    return (
        f"agreement was NOT judged: {_reference(search)} gave {there} whole values, and a floor of "
        f"{search.floor.share:.0%} needs {search.floor.needed:.0f} even if all of them agree; raise --sample or lower "
        f"--agreement, {share}"
    )


def _notes(result: TuneResult) -> list[str]:
    search = result.search
    notes = [f"measured on {result.machine}, {result.documents} documents; {search.ended}"]
    notes += [f"{describe(t.changes)}: {t.error.splitlines()[0]}" for t in search.trials if t.error is not None]
    if search.judged and any(t.usable and not search.agrees(t) and search.unsure(t) for t in search.trials):
        notes.append(f"unsure: it may agree in less than {search.floor.share:.0%} of values; a larger --sample tells")
    if result.taken:
        notes.append(f"{result.taken} measurements are from the file; --fresh makes them again")
    found = search.reference.agreement if search.reference is not None else None
    if search.by_guided:
        text = (
            "the reference is guided decoding: the keys are given, each value is decoded token by token behind all of "
            "the answer before it (decoding.method: guided)"
        )
        free = next((t for t in search.trials if t.answers is not None and search.autoregressive(t)), None)
        if free is not None and free.answers is not None:  # why it is not autoregressive decoding
            own = compare(free.answers, free.answers)
            text += f": autoregressive decoding gave {own.of} whole values and nothing whole for {own.left_out}"
        notes.append(text)
    elif found is not None and found.left_out > found.of:
        notes.append(
            f"autoregressive decoding gave nothing whole for {found.left_out} values and a value for {found.of} only: "
            "with this model it is a poor reference"
        )
    if found is not None and found.left_out and (search.by_guided or found.left_out <= found.of):
        notes.append(f"{found.left_out} values are left out: the reference gave nothing whole there")
    if not result.kind.usd_per_hour:
        notes.append("this machine has no price: cost.prices.local (USD per hour) or --instance gives it one")
    speeds = result.best.speeds
    if len(speeds) > 1 and max(speeds) > 1.15 * min(speeds):
        notes.append(
            f"measurements of the same setting differ by {max(speeds) / min(speeds) - 1:.0%}: the machine has other "
            "work; tune on an idle one for surer figures"
        )
    return notes
