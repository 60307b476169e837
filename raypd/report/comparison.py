"""Compares the estimate of a run with its bill."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from raypd import text
from raypd.billing import NodeTime
from raypd.estimation import BillEstimate, Estimate, Figure, MachineEstimate
from raypd.report.data import RunReport
from raypd.report.ledger import RunBill

# If the documents of an estimate and a run differ by more than this share, the corpora differ.
_TOLERANCE = 0.01


@dataclass
class BillComparison:
    """How well a bill matched its estimate: a sentence, and figures if the two can be compared."""

    sentence: str
    # Name, estimated, actual, difference, interval.
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""


def cheapest(estimate: Estimate) -> MachineEstimate | None:
    """Return the machine with the smallest bill; None if no machine has a price."""
    priced = [
        machine for machine in estimate.machines if machine.usd_per_hour > 0 and machine.bills
    ]
    return min(priced, key=lambda machine: machine.bills[0].usd.value, default=None)


def compare(run: RunReport, estimate: Estimate) -> BillComparison:
    """Compare the bill of a run with its estimate."""
    bill = run.bill
    documents = run.units.total("documents")
    if estimate.fingerprint is not None and estimate.fingerprint != run.fingerprint:
        return BillComparison(
            "It is not compared with the bill: it was made for another configuration than the "
            "run's. `raypd estimate` with the configuration of the run makes a new one."
        )
    if bill is None or not bill.sessions or not documents:
        return BillComparison("There is no bill yet to compare it with.")
    match = _matching_estimate(estimate, bill)
    if match is None:
        return BillComparison(
            "It is not compared with the bill: it has no figure for the machines that the run had."
        )
    if not bill.usd or not match.machine.usd_per_hour:
        return BillComparison("It is not compared with the bill: the machine had no price.")
    return _compare_figures(run, bill, documents, estimate, match)


@dataclass
class _Match:
    """The part of an estimate that concerns a run's machines."""

    machine: MachineEstimate
    bill: BillEstimate
    # The number of nodes that the run had at the same time.
    nodes: int


def _compare_figures(
    run: RunReport, bill: RunBill, documents: int, estimate: Estimate, match: _Match
) -> BillComparison:
    """Compare the figures of a bill with those of the matching estimate."""
    planned = estimate.documents
    server_usd = planned.value * float((estimate.sample or {}).get("server_usd", 0.0))
    usd = match.bill.usd.times(1, plus=server_usd)
    usd_per_1000 = usd.times(1000 / planned.value)
    billed_per_1000 = 1000 * bill.usd / documents
    documents_row = ["documents", *_row(planned, documents, text.count)]
    rows = [documents_row]
    nodes = text.counted(match.bill.nodes, "node")
    machine = text.clean(match.machine.title, 80)
    notes = [f"Estimated for {nodes} of {machine}; the run had {match.nodes}."]
    if run.state != "complete":
        documents_row[3] = f"{text.share(documents, planned.value)} of it"
        sentence = _sentence("So far, the bill of 1,000 documents", usd_per_1000, billed_per_1000)
        notes.append(
            "While a run is not finished, its start-up weighs more than it will in the end."
        )
    elif abs(documents / planned.value - 1) > _TOLERANCE:
        sentence = _sentence("The bill of 1,000 documents", usd_per_1000, billed_per_1000)
        notes.append(
            "The estimate is for another number of documents, so only the price of one is compared."
        )
    else:
        rows.append(["time", *_row(match.bill.hours.times(3600), run.seconds, text.duration)])
        rows.append(["the whole bill", *_row(usd, bill.usd, text.usd)])
        sentence = _sentence("The bill", usd, bill.usd)
    rows.append(["1,000 documents, all costs", *_row(usd_per_1000, billed_per_1000, text.usd)])
    notes += _price_notes(bill, match.machine)
    return BillComparison(sentence, rows, " ".join(notes))


def _price_notes(bill: RunBill, machine: MachineEstimate) -> list[str]:
    """Return a note if the machine was billed at a different price than estimated."""
    price = machine.usd_per_hour
    billed = sorted(
        {node.usd_per_hour for node in bill.nodes if node.instance_type == machine.instance_type}
    )
    if not any(abs(hourly / price - 1) > _TOLERANCE for hourly in billed):
        return []
    prices = " and ".join(text.usd(hourly) for hourly in billed)
    return [f"The estimate assumed {text.usd(price)} per hour; it was billed at {prices}."]


def _matching_estimate(estimate: Estimate, bill: RunBill) -> _Match | None:
    """Return the estimate for the machines that the workers had; None if there is none."""
    worker_nodes = {worker.node for worker in bill.workers}
    nodes = [node for node in bill.nodes if node.node in worker_nodes] or bill.nodes
    types = {node.instance_type for node in nodes}
    for machine in estimate.machines:
        if {machine.instance_type} == types and machine.bills:
            count = _nodes_at_once(nodes)
            closest = min(
                machine.bills, key=lambda candidate: abs(math.log(candidate.nodes / count))
            )
            return _Match(machine, closest, count)
    return None


def _nodes_at_once(nodes: Sequence[NodeTime]) -> int:
    """Return the largest number of nodes that a run had at the same time."""
    spans = [(node.began, node.ended or node.began) for node in nodes]
    largest = 1
    for moment, _ in spans:
        present = sum(began <= moment < ended for began, ended in spans)
        largest = max(largest, present)
    return largest


def _row(figure: Figure, value: float, show: text.Show) -> list[str]:
    """Return the estimate, the actual value, the difference and the interval."""
    difference = text.NONE
    if figure.value:
        difference = f"{100 * (value / figure.value - 1):+.1f}%"
    return [show(figure.value), show(value), difference, interval(figure, show)]


def _sentence(subject: str, figure: Figure, value: float) -> str:
    """Say how much a bill differs from its estimate."""
    percent = 100 * (value / figure.value - 1)
    direction = "below"
    if percent > 0:
        direction = "above"
    sentence = (
        f"{subject} is {text.usd(value)}: {abs(percent):.1f}% {direction} the estimate of "
        f"{text.usd(figure.value)}"
    )
    holds = figure.holds(value)
    if holds is None:
        return f"{sentence}."
    if holds:
        return f"{sentence}, inside its 95% interval."
    return f"{sentence}, outside its 95% interval."


def interval(figure: Figure, show: text.Show) -> str:
    """Return the 95% interval of a figure in words."""
    if figure.low is None or figure.high is None:
        return "unknown"
    if figure.counted:
        return text.NONE
    return f"{show(figure.low)} to {show(figure.high)}"


def about(figure: Figure) -> str:
    """Return a count, with "about" if it was estimated."""
    count = text.count(figure.value)
    if figure.counted:
        return count
    return f"about {count}"
