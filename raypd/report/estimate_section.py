"""The section `Estimate` of the page: what was estimated, and how the run's bill held against it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raypd.estimation import tables
from raypd.report.charts import Table
from raypd.run import text
from raypd.run.records import BillEstimate, Estimate, Figure, MachineEstimate

if TYPE_CHECKING:
    from raypd.report.data import RunReport
    from raypd.report.ledger import RunBill

_TOKENS = "Tokens are of one document; shared ones are in the cache already."
_DECODING = "Of the seconds in which documents are decoded, as papers count: without start-up, idle time and head node."
_WHOLE = "With start-up, idle time and head node."
Tile = tuple[str, str, list[str], str]  # a headline figure: name, value, notes, unit
_SAME = 0.01  # an estimate and a run whose documents differ by more are of different corpora


@dataclass
class EstimateSection:
    """All that the section shows. sentence, comparison: how the bill held; None while no run has begun."""

    lines: list[str]
    tables: list[Table]
    notes: list[str]
    sentence: str | None = None
    comparison: Table | None = None


def section(run: RunReport) -> EstimateSection | None:
    """The section of a run, or of a folder that has only the estimate; None where none was made."""
    estimate = run.forecast
    if estimate is None:
        return None
    lines = [f"Made {text.when(estimate.created_at)} for {_about(estimate.documents)} documents."]
    lines += [f"{text.clean(line, 300)}." for line in tables.sentences(estimate)]
    parts = [("One worker", tables.speeds(estimate), _TOKENS)]
    if estimate.machines:
        parts.append(("Price of decoding", tables.prices(estimate), _DECODING))
        parts.append(("Hours and the whole bill", tables.bills(estimate), _WHOLE))
    shown = [Table(cells[0], cells[1:], note, title=title) for title, cells, note in parts]
    notes = [text.clean(note, 300) for note in estimate.notes]
    notes += [text.clean(words, 900) for words in (tables.hosted(estimate), tables.not_measured(estimate)) if words]
    section = EstimateSection(lines, shown, notes)
    if run.state != "estimated":
        section.sentence, section.comparison = _compare(run, estimate)
    return section


def tiles(estimate: Estimate) -> list[Tile]:
    """The headline figures of a page that has nothing but the estimate."""
    shown = [("Documents", _about(estimate.documents), ["in the corpus, as planned"], "")]
    for speed in estimate.speeds[:1]:
        worker = f"one worker, {text.clean(speed.method, 60)}"
        shown.append(_tile("Speed", speed.documents_per_second, text.number, worker, "documents/s"))
        if (gain := speed.times_autoregressive) is not None:
            notes = [f"as fast; 95% interval: {_interval(gain, text.number)}"]
            shown.append(("Against autoregressive", text.number(gain.value), notes, "times"))
    priced = [machine for machine in estimate.machines if machine.usd_per_hour > 0 and machine.bills]
    if not priced:
        return [*shown, ("Cost", text.NONE, ["no machine of the estimate has a price"], "")]
    cheapest = min(priced, key=lambda machine: machine.bills[0].usd.value)
    bill, name = cheapest.bills[0], text.clean(cheapest.name, 60)
    return [
        *shown,
        _tile("Per 1,000 documents", cheapest.usd_per_1000, text.usd, f"decoding on {name}"),
        _tile("Cost", bill.usd, text.usd, f"the whole bill on {name}"),
        _tile("Time", bill.hours.times(3600), text.duration, f"on {text.counted(bill.nodes, 'node')} of it"),
    ]


def _tile(name: str, figure: Figure, show: text.Show, note: str, unit: str = "") -> Tile:
    interval = [] if figure.counted else [f"95% interval: {_interval(figure, show)}"]
    return name, show(figure.value), [note, *interval], unit


def _compare(run: RunReport, estimate: Estimate) -> tuple[str, Table | None]:
    """The answer in a sentence, and its figures; None where nothing can be compared."""
    bill, documents = run.bill, run.units.total("documents")
    if estimate.fingerprint is not None and estimate.fingerprint != run.fingerprint:
        return (
            "It is not compared with the bill: it was made for another configuration than the run has. `raypd "
            "estimate` with the configuration of the run makes a new one."
        ), None
    if bill is None or not bill.sessions or not documents:
        return "There is no bill yet that it could be compared with.", None
    match = _estimated(estimate, bill)
    if match is None:
        return "It is not compared with the bill: it has no figure for the machines that the run had.", None
    machine, estimated, had = match
    if not bill.usd or not machine.usd_per_hour:
        return "It is not compared with the bill: the machine had no price.", None
    planned, usd, price = estimate.documents, estimated.usd, machine.usd_per_hour
    each, billed = usd.times(1000 / planned.value), 1000 * bill.usd / documents
    rows = [["documents", *_row(planned, documents, text.count)]]
    nodes = text.counted(estimated.nodes, "node")
    notes = [f"Estimated for {nodes} of {text.clean(machine.title, 80)}; the run had {had}."]
    if run.state != "complete":
        rows[0][3] = f"{text.share(documents, planned.value)} of it"
        sentence = _sentence("So far, the bill of 1,000 documents", each, billed)
        notes.append("While a run is not finished, its start-up weighs more than it will in the end.")
    elif abs(documents / planned.value - 1) > _SAME:
        sentence = _sentence("The bill of 1,000 documents", each, billed)
        notes.append("The estimate is for another number of documents, so only the price of one is compared.")
    else:
        rows.append(["time", *_row(estimated.hours.times(3600), run.seconds, text.duration)])
        rows.append(["the whole bill", *_row(usd, bill.usd, text.usd)])
        sentence = _sentence("The bill", usd, bill.usd)
    rows.append(["1,000 documents, all costs", *_row(each, billed, text.usd)])
    prices = sorted({node.usd_per_hour for node in bill.nodes if node.instance_type == machine.instance_type})
    if any(abs(hourly / price - 1) > _SAME for hourly in prices):
        hour = " and ".join(text.usd(hourly) for hourly in prices)
        notes.append(f"An hour was taken to cost {text.usd(price)}, and was billed at {hour}.")
    return sentence, Table(["", "estimated", "in the run", "difference", "95% interval"], rows, " ".join(notes))


def _estimated(estimate: Estimate, bill: RunBill) -> tuple[MachineEstimate, BillEstimate, int] | None:
    """What was estimated for the machines that the workers had, and how many at a time; None where nothing was."""
    with_workers = {worker.node for worker in bill.workers}
    nodes = [node for node in bill.nodes if node.node in with_workers] or bill.nodes
    kinds = {node.instance_type for node in nodes}
    machine = next(
        (candidate for candidate in estimate.machines if {candidate.instance_type} == kinds and candidate.bills), None
    )
    if machine is None:
        return None
    there = [(node.began, node.ended or node.began) for node in nodes]
    count = max(1, *(sum(began <= moment < ended for began, ended in there) for moment, _ in there))
    return machine, min(machine.bills, key=lambda candidate: abs(math.log(candidate.nodes / count))), count


def _row(figure: Figure, value: float, show: text.Show) -> list[str]:
    off = f"{100 * (value / figure.value - 1):+.1f}%" if figure.value else text.NONE
    return [show(figure.value), show(value), off, _interval(figure, show)]


def _sentence(subject: str, figure: Figure, value: float) -> str:
    off = 100 * (value / figure.value - 1)
    how = f"{abs(off):.1f}% {'above' if off > 0 else 'below'} the estimate of {text.usd(figure.value)}"
    inside = {True: ", inside its 95% interval", False: ", outside its 95% interval", None: ""}[figure.holds(value)]
    return f"{subject} is {text.usd(value)}: {how}{inside}."


def _interval(figure: Figure, show: text.Show) -> str:
    if figure.low is None or figure.high is None:
        return "unknown"
    return text.NONE if figure.counted else f"{show(figure.low)} to {show(figure.high)}"


def _about(figure: Figure) -> str:
    return text.count(figure.value) if figure.counted else f"about {text.count(figure.value)}"
