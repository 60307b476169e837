"""The estimate of a run beside its bill."""

import math
from dataclasses import dataclass, field

from raypd import text
from raypd.estimation.records import BillEstimate, Estimate, Figure, MachineEstimate
from raypd.report.data import RunReport
from raypd.report.ledger import RunBill

_SAME = 0.01  # an estimate and a run whose documents differ by more are of different corpora


@dataclass
class BillComparison:
    """How the bill held against the estimate: the answer in a sentence, and its figures where they
    can be compared.
    """

    sentence: str
    # Name, estimated, in the run, difference, interval.
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""


def cheapest(estimate: Estimate) -> MachineEstimate | None:
    """The machine with the least bill of those that have a price; None where none has."""
    priced = [
        machine for machine in estimate.machines if machine.usd_per_hour > 0 and machine.bills
    ]
    return min(priced, key=lambda machine: machine.bills[0].usd.value, default=None)


def compare(run: RunReport, estimate: Estimate) -> BillComparison:
    bill = run.bill
    documents = run.units.total("documents")
    if estimate.fingerprint is not None and estimate.fingerprint != run.fingerprint:
        return BillComparison(
            "It is not compared with the bill: it was made for another configuration than "
            "the run has. `raypd "
            "estimate` with the configuration of the run makes a new one."
        )
    if bill is None or not bill.sessions or not documents:
        return BillComparison("There is no bill yet that it could be compared with.")
    match = _estimated(estimate, bill)
    if match is None:
        return BillComparison(
            "It is not compared with the bill: it has no figure for the machines that the run had."
        )
    machine, estimated, had = match
    if not bill.usd or not machine.usd_per_hour:
        return BillComparison("It is not compared with the bill: the machine had no price.")
    planned = estimate.documents
    price = machine.usd_per_hour
    usd = estimated.usd.times(
        1, plus=planned.value * float((estimate.sample or {}).get("server_usd", 0.0))
    )
    each = usd.times(1000 / planned.value)
    billed = 1000 * bill.usd / documents
    rows = [["documents", *_row(planned, documents, text.count)]]
    nodes = text.counted(estimated.nodes, "node")
    notes = [f"Estimated for {nodes} of {text.clean(machine.title, 80)}; the run had {had}."]
    if run.state != "complete":
        rows[0][3] = f"{text.share(documents, planned.value)} of it"
        sentence = _sentence("So far, the bill of 1,000 documents", each, billed)
        notes.append(
            "While a run is not finished, its start-up weighs more than it will in the end."
        )
    elif abs(documents / planned.value - 1) > _SAME:
        sentence = _sentence("The bill of 1,000 documents", each, billed)
        notes.append(
            "The estimate is for another number of documents, so only the price of one is compared."
        )
    else:
        rows.append(["time", *_row(estimated.hours.times(3600), run.seconds, text.duration)])
        rows.append(["the whole bill", *_row(usd, bill.usd, text.usd)])
        sentence = _sentence("The bill", usd, bill.usd)
    rows.append(["1,000 documents, all costs", *_row(each, billed, text.usd)])
    prices = sorted(
        {node.usd_per_hour for node in bill.nodes if node.instance_type == machine.instance_type}
    )
    if any(abs(hourly / price - 1) > _SAME for hourly in prices):
        hour = " and ".join(text.usd(hourly) for hourly in prices)
        notes.append(f"An hour was taken to cost {text.usd(price)}, and was billed at {hour}.")
    return BillComparison(sentence, rows, " ".join(notes))


def _estimated(
    estimate: Estimate, bill: RunBill
) -> tuple[MachineEstimate, BillEstimate, int] | None:
    """What was estimated for the machines that the workers had, and how many at a time; None where
    nothing was.
    """
    with_workers = {worker.node for worker in bill.workers}
    nodes = [node for node in bill.nodes if node.node in with_workers] or bill.nodes
    kinds = {node.instance_type for node in nodes}
    machine = next((m for m in estimate.machines if {m.instance_type} == kinds and m.bills), None)
    if machine is None:
        return None
    there = [(node.began, node.ended or node.began) for node in nodes]
    count = max(1, *(sum(began <= moment < ended for began, ended in there) for moment, _ in there))
    return (
        machine,
        min(machine.bills, key=lambda candidate: abs(math.log(candidate.nodes / count))),
        count,
    )


def _row(figure: Figure, value: float, show: text.Show) -> list[str]:
    off = f"{100 * (value / figure.value - 1):+.1f}%" if figure.value else text.NONE
    return [show(figure.value), show(value), off, interval(figure, show)]


def _sentence(subject: str, figure: Figure, value: float) -> str:
    off = 100 * (value / figure.value - 1)
    how = (
        f"{abs(off):.1f}% {'above' if off > 0 else 'below'} the estimate of "
        f"{text.usd(figure.value)}"
    )
    inside = {True: ", inside its 95% interval", False: ", outside its 95% interval", None: ""}[
        figure.holds(value)
    ]
    return f"{subject} is {text.usd(value)}: {how}{inside}."


def interval(figure: Figure, show: text.Show) -> str:
    if figure.low is None or figure.high is None:
        return "unknown"
    return text.NONE if figure.counted else f"{show(figure.low)} to {show(figure.high)}"


def about(figure: Figure) -> str:
    return text.count(figure.value) if figure.counted else f"about {text.count(figure.value)}"
