"""The section `Estimate` of the page: what was estimated, and how the run's bill held against it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raypd.estimate.machines import families
from raypd.report.forecast import held
from raypd.report.sections import Table, Tile
from raypd.run import text
from raypd.run.records import Estimate, Figure

if TYPE_CHECKING:
    from raypd.report.data import RunReport

_TOKENS = {"prefill_tokens": "prompt tokens", "shared_tokens": "shared", "decode_tokens": "answer tokens"}
_SAME = 0.01  # an estimate and a run whose documents differ by more are of different corpora


@dataclass
class BillComparison:
    """The estimate beside the bill. said: the answer in a sentence; table: None where nothing can be compared."""

    said: str
    table: Table | None = None


@dataclass
class EstimateSection:
    """All that the section shows. comparison: None while no run has begun. tables: (title, table)."""

    said: list[str]
    tables: list[tuple[str, Table]] = field(default_factory=list)
    comparison: BillComparison | None = None
    notes: list[str] = field(default_factory=list)


def section(run: RunReport) -> EstimateSection | None:
    """The section of a run, or of a folder that has only the estimate; None where none was made."""
    found = run.forecast
    if found is None:
        return None
    said = [f"Made {text.when(found.created_at)} for {_about(found.documents)} documents."]
    said += [f"{text.clean(one.method, 60)}: {text.clean(one.source, 200)}." for one in found.speeds + found.baseline]
    for speed in found.speeds:
        if speed.times_autoregressive is not None:
            said.append(
                f"{text.clean(speed.name, 110)} is {text.number(speed.times_autoregressive.value)} times as fast as "
                f"autoregressive decoding (95% interval: {_interval(speed.times_autoregressive, text.number)})."
            )
    tables = [("One worker", _speeds(found))]
    if found.machines:
        tables += [("Price of decoding", _prices(found)), ("Hours and the whole bill", _bills(found))]
    notes = [text.clean(note, 300) for note in found.notes]
    if found.not_measured:
        gpus = ", ".join(f"{gpu} ({families(names)})" for gpu, names in found.not_measured.items())
        notes.append(text.clean(f"not measured on these GPUs, so no figure: {gpus}", 600))
    return EstimateSection(said, tables, None if run.state == "estimated" else _compare(run, found), notes)


def tiles(found: Estimate) -> list[Tile]:
    """The headline figures of a page that has nothing but the estimate."""
    shown = [Tile("Documents", _about(found.documents), "", ["in the corpus, as planned"])]
    for speed in found.speeds[:1]:
        rate, gain = speed.documents_per_second, speed.times_autoregressive
        notes = [f"one worker, {text.clean(speed.method, 60)}", *_noted(rate, text.number)]
        shown.append(Tile("Speed", text.number(rate.value), "documents/s", notes))
        if gain is not None:
            notes = [f"as fast; 95% interval: {_interval(gain, text.number)}"]
            shown.append(Tile("Against autoregressive", text.number(gain.value), "times", notes))
    priced = [one for one in found.machines if one.usd_per_hour > 0 and one.bills]
    if not priced:
        return [*shown, Tile("Cost", text.NONE, "", ["no machine of the estimate has a price"])]
    cheapest = min(priced, key=lambda one: one.bills[0].usd.value)
    bill, name, per_1000 = cheapest.bills[0], text.clean(cheapest.name, 60), cheapest.usd_per_1000
    return [
        *shown,
        _tile("Per 1,000 documents", per_1000, text.usd, f"decoding on {name}"),
        _tile("Cost", bill.usd, text.usd, f"the whole bill on {name}"),
        _tile("Time", bill.hours, _hours, f"on {_nodes(bill.nodes)} of it"),
    ]


def _tile(name: str, figure: Figure, show: text.Show, note: str) -> Tile:
    return Tile(name, show(figure.value), "", [note, *_noted(figure, show)])


# ------------------------------------------------------------------------------------------------- what was estimated


def _speeds(found: Estimate) -> Table:
    speeds = found.speeds + found.baseline
    kinds = [kind for kind in _TOKENS if any(kind in speed.tokens_per_document for speed in speeds)]
    rows = []
    for speed in speeds:
        tokens = [_value(speed.tokens_per_document.get(kind), text.number) for kind in kinds]
        rate = speed.documents_per_second
        rows.append([text.clean(speed.name, 80), text.number(rate.value), _interval(rate, text.number), *tokens])
    note = "Tokens are of one document; shared ones are in the cache already." if kinds else ""
    return Table(["method", "documents/s", "95% interval", *(_TOKENS[kind] for kind in kinds)], rows, note)


def _prices(found: Estimate) -> Table:
    baseline = any(one.baseline_usd_per_1000 for one in found.machines)
    rows = []
    for one in found.machines:
        cells = [text.usd(one.usd_per_1000.value), _interval(one.usd_per_1000, text.usd)]
        cells += [_value(f, text.usd) for f in (one.baseline_usd_per_1000, one.saved_usd)] if baseline else []
        cells.append(text.usd(one.usd_per_hour))
        rows.append([text.clean(one.title, 80), *(cells if one.usd_per_hour > 0 else [text.NONE] * len(cells))])
    heads = ["machine", "1,000 documents", "95% interval"]
    heads += ["autoregressive", "saved in all"] if baseline else []
    note = "Of the seconds in which documents are decoded, as papers count: without start-up, idle time and head node."
    return Table([*heads, "USD per hour"], rows, note)


def _bills(found: Estimate) -> Table:
    counts = sorted({bill.nodes for one in found.machines for bill in one.bills})
    rows = []
    for one in found.machines:
        shown = {}
        for bill in one.bills:
            money = f" · {text.usd(bill.usd.value)}" if one.usd_per_hour else ""
            shown[bill.nodes] = f"{_hours(bill.hours.value)}{money}"
        first = one.bills[0] if one.bills else None
        interval = _interval(first.usd, text.usd) if first and one.usd_per_hour else text.NONE
        hours = text.number(first.gpu_hours.value) if first else text.NONE
        cells = [shown.get(count, text.NONE) for count in counts]
        rows.append([text.clean(one.title, 80), hours, *cells, interval])
    hours = "GPU-hours" if all(speed.gpu for speed in found.speeds) else "worker-hours"
    heads = ["machine", hours, *(_nodes(count) for count in counts), "95% interval of the cost"]
    return Table(heads, rows, f"With start-up, idle time and head node. The interval is that of {_nodes(counts[0])}.")


# ---------------------------------------------------------------------------------------------------- against the bill


def _compare(run: RunReport, found: Estimate) -> BillComparison:
    if found.fingerprint is not None and found.fingerprint != run.fingerprint:
        return BillComparison(
            "It is not compared with the bill: it was made for another configuration than the run has. `raypd "
            "estimate` with the configuration of the run makes a new one."
        )
    bill, documents = run.bill, run.units.total("documents")
    if bill is None or not bill.sessions or not documents:
        return BillComparison("There is no bill yet that it could be compared with.")
    match = held(found, bill)
    if match is None:
        return BillComparison("It is not compared with the bill: it has no figure for the machines that the run had.")
    if not bill.usd or not match.machine.usd_per_hour:
        return BillComparison("It is not compared with the bill: the machine had no price.")
    planned, usd, price = found.documents, match.bill.usd, match.machine.usd_per_hour
    each, billed = usd.times(1000 / planned.value), 1000 * bill.usd / documents
    rows = [["documents", *_row(planned, documents, text.count)]]
    notes = [f"Estimated for {_nodes(match.bill.nodes)} of {text.clean(match.machine.title, 80)}; "
             f"the run had {match.nodes}."]  # fmt: skip
    if run.state != "complete":
        rows[0][3] = f"{text.share(documents, planned.value)} of it"
        said = _sentence("So far, the bill of 1,000 documents", each, billed)
        notes.append("While a run is not finished, its start-up weighs more than it will in the end.")
    elif abs(documents / planned.value - 1) > _SAME:
        said = _sentence("The bill of 1,000 documents", each, billed)
        notes.append("The estimate is for another number of documents, so only the price of one is compared.")
    else:
        rows.append(["time", *_row(match.bill.hours.times(3600), run.seconds, text.duration)])
        rows.append(["the whole bill", *_row(usd, bill.usd, text.usd)])
        said = _sentence("The bill", usd, bill.usd)
    rows.append(["1,000 documents, all costs", *_row(each, billed, text.usd)])
    prices = sorted({node.usd_per_hour for node in bill.nodes if node.instance_type == match.machine.instance_type})
    if any(abs(one / price - 1) > _SAME for one in prices):
        hour = " and ".join(text.usd(one) for one in prices)
        notes.append(f"An hour was taken to cost {text.usd(price)}, and was billed at {hour}.")
    return BillComparison(
        said, Table(["", "estimated", "in the run", "difference", "95% interval"], rows, " ".join(notes))
    )


def _row(figure: Figure, value: float, show: text.Show) -> list[str]:
    off = f"{100 * (value / figure.value - 1):+.1f}%" if figure.value else text.NONE
    return [show(figure.value), show(value), off, _interval(figure, show)]


def _sentence(what: str, figure: Figure, value: float) -> str:
    off = 100 * (value / figure.value - 1)
    how = f"{abs(off):.1f}% {'above' if off > 0 else 'below'} the estimate of {text.usd(figure.value)}"
    inside = {True: ", inside its 95% interval", False: ", outside its 95% interval", None: ""}[figure.holds(value)]
    return f"{what} is {text.usd(value)}: {how}{inside}."


# --------------------------------------------------------------------------------------------------------------- words


def _value(figure: Figure | None, show: text.Show) -> str:
    return text.NONE if figure is None else show(figure.value)


def _interval(figure: Figure, show: text.Show) -> str:
    if figure.low is None or figure.high is None:
        return "unknown"
    return text.NONE if figure.counted else f"{show(figure.low)} to {show(figure.high)}"


def _noted(figure: Figure, show: text.Show) -> list[str]:
    return [] if figure.counted else [f"95% interval: {_interval(figure, show)}"]


def _about(figure: Figure) -> str:
    return text.count(figure.value) if figure.counted else f"about {text.count(figure.value)}"


def _hours(hours: float) -> str:
    return text.duration(3600 * hours)


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"
