"""The section `Estimate` of the page: what was estimated, and how the run's bill held against it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raypd.estimate.estimate_result import families
from raypd.report.forecast import held
from raypd.report.sections import Table, Tile
from raypd.run import text

if TYPE_CHECKING:
    from raypd.report.data import RunReport
    from raypd.report.forecast import Figure, Forecast, Held, Machine, Speed
    from raypd.report.ledger import RunBill

_TOKENS = {"prefill_tokens": "prompt tokens", "shared_tokens": "shared", "decode_tokens": "answer tokens"}
_SAME = 0.01  # an estimate and a run whose documents differ by more are of different corpora


@dataclass
class Comparison:
    """The estimate beside the bill. said: the answer in a sentence; table: None where nothing can be compared."""

    said: str
    table: Table | None = None


@dataclass
class Section:
    """All that the section shows. comparison: None while no run has begun. tables: (title, table)."""

    said: list[str]
    tables: list[tuple[str, Table]] = field(default_factory=list)
    comparison: Comparison | None = None
    notes: list[str] = field(default_factory=list)


def section(run: RunReport) -> Section | None:
    """The section of a run, or of a folder that has only the estimate; None where none was made."""
    forecast = run.forecast
    if forecast is None:
        return None
    tables = [("One worker", _speeds(forecast))]
    if forecast.machines:
        tables += [("Price of decoding", _prices(forecast)), ("Hours and the whole bill", _bills(forecast))]
    notes = [text.clean(note, 300) for note in forecast.notes]
    if forecast.not_measured:
        gpus = ", ".join(f"{gpu} ({families(names)})" for gpu, names in forecast.not_measured.items())
        notes.append(text.clean(f"not measured on these GPUs, so no figure: {gpus}", 600))
    return Section(_said(forecast), tables, None if run.state == "estimated" else _compare(run, forecast), notes)


def tiles(forecast: Forecast) -> list[Tile]:
    """The headline figures of a page that has nothing but the estimate."""
    found = [Tile("Documents", _about(forecast.documents), "", ["in the corpus, as planned"])]
    for speed in forecast.speeds[:1]:
        notes = [f"one worker, {text.clean(speed.method, 60)}", *_noted(speed.per_second, text.number)]
        found.append(Tile("Speed", text.number(speed.per_second.value), "documents/s", notes))
        if speed.gain is not None:
            gain = [f"as fast; 95% interval: {_interval(speed.gain, text.number)}"]
            found.append(Tile("Against autoregressive", text.number(speed.gain.value), "times", gain))
    priced = [one for one in forecast.machines if one.usd_per_hour > 0 and one.bills]
    if not priced:
        return [*found, Tile("Cost", text.NONE, "", ["no machine of the estimate has a price"])]
    cheapest = min(priced, key=lambda one: one.bills[0].usd.value)
    bill, name = cheapest.bills[0], text.clean(cheapest.name, 60)
    per_1000 = [f"decoding on {name}", *_noted(cheapest.per_1000, text.usd)]
    hours = [f"on {_nodes(bill.nodes)} of it", *_noted(bill.hours, _hours)]
    return [
        *found,
        Tile("Per 1,000 documents", text.usd(cheapest.per_1000.value), "", per_1000),
        Tile("Cost", text.usd(bill.usd.value), "", [f"the whole bill on {name}", *_noted(bill.usd, text.usd)]),
        Tile("Time", _hours(bill.hours.value), "", hours),
    ]


# ------------------------------------------------------------------------------------------------- what was estimated


def _said(forecast: Forecast) -> list[str]:
    said = [f"Made {text.when(forecast.created)} for {_about(forecast.documents)} documents."]
    said += [f"{text.clean(one.method, 60)}: {text.clean(one.source, 200)}." for one in _all(forecast)]
    for speed in forecast.speeds:
        if speed.gain is not None:
            on = f" on {text.clean(speed.gpu, 40)}" if speed.gpu else ""
            said.append(
                f"{text.clean(speed.method, 60)}{on} is {text.number(speed.gain.value)} times as fast as "
                f"autoregressive decoding (95% interval: {_interval(speed.gain, text.number)})."
            )
    return said


def _all(forecast: Forecast) -> list[Speed]:
    return [*forecast.speeds, *forecast.baseline]


def _speeds(forecast: Forecast) -> Table:
    kinds = [kind for kind in _TOKENS if any(kind in speed.tokens for speed in _all(forecast))]
    rows = []
    for speed in _all(forecast):
        tokens = [text.number(speed.tokens[kind].value) if kind in speed.tokens else text.NONE for kind in kinds]
        name = text.clean(speed.method + (f" on {speed.gpu}" if speed.gpu else ""), 80)
        rows.append([name, text.number(speed.per_second.value), _interval(speed.per_second, text.number), *tokens])
    note = "Tokens are of one document; shared ones are in the cache already." if kinds else ""
    return Table(["method", "documents/s", "95% interval", *(_TOKENS[kind] for kind in kinds)], rows, note)


def _prices(forecast: Forecast) -> Table:
    baseline = any(one.baseline_per_1000 for one in forecast.machines)
    rows = []
    for one in forecast.machines:
        priced = one.usd_per_hour > 0
        cells = [text.usd(one.per_1000.value), _interval(one.per_1000, text.usd)]
        if baseline:
            cells += [
                text.NONE if figure is None else text.usd(figure.value) for figure in (one.baseline_per_1000, one.saved)
            ]
        cells.append(text.usd(one.usd_per_hour))
        rows.append([_name(one), *(cells if priced else [text.NONE] * len(cells))])
    heads = ["machine", "1,000 documents", "95% interval"]
    heads += ["autoregressive", "saved in all"] if baseline else []
    note = "Of the seconds in which documents are decoded, as papers count: without start-up, idle time and head node."
    return Table([*heads, "USD per hour"], rows, note)


def _bills(forecast: Forecast) -> Table:
    counts = sorted({bill.nodes for one in forecast.machines for bill in one.bills})
    rows = []
    for one in forecast.machines:
        of = {bill.nodes: bill for bill in one.bills}
        cells = []
        for count in counts:
            money = f" · {text.usd(of[count].usd.value)}" if count in of and one.usd_per_hour else ""
            cells.append(f"{_hours(of[count].hours.value)}{money}" if count in of else text.NONE)
        first = one.bills[0] if one.bills else None
        interval = _interval(first.usd, text.usd) if first and one.usd_per_hour else text.NONE
        rows.append([_name(one), text.number(first.gpu_hours.value) if first else text.NONE, *cells, interval])
    hours = "GPU-hours" if all(speed.gpu for speed in forecast.speeds) else "worker-hours"
    heads = ["machine", hours, *(_nodes(count) for count in counts), "95% interval of the cost"]
    return Table(heads, rows, f"With start-up, idle time and head node. The interval is that of {_nodes(counts[0])}.")


# ---------------------------------------------------------------------------------------------------- against the bill


def _compare(run: RunReport, forecast: Forecast) -> Comparison:
    bill, documents = run.bill, run.units.total("documents")
    if forecast.fingerprint is not None and forecast.fingerprint != run.fingerprint:
        return Comparison(
            "It is not compared with the bill: it was made for another configuration than the run has. `raypd "
            "estimate` with the configuration of the run makes a new one."
        )
    if bill is None or not bill.sessions or not documents:
        return Comparison("There is no bill yet that it could be compared with.")
    found = held(forecast, bill)
    if found is None:
        return Comparison("It is not compared with the bill: it has no figure for the machines that the run had.")
    if not bill.usd or not found.machine.usd_per_hour:
        return Comparison("It is not compared with the bill: the machine had no price.")
    return _beside(run, forecast, bill, found)


def _beside(run: RunReport, forecast: Forecast, bill: RunBill, found: Held) -> Comparison:
    documents, planned, usd = run.units.total("documents"), forecast.documents, found.bill.usd
    each = _scaled(usd, 1000 / planned.value)
    rows = [["documents", *_row(planned, documents, text.count)]]
    whole = run.state == "complete" and abs(documents / planned.value - 1) <= _SAME
    if whole:
        rows.append(["time", *_row(_scaled(found.bill.hours, 3600), run.seconds, text.duration)])
        rows.append(["the whole bill", *_row(usd, bill.usd, text.usd)])
        said = _sentence("The bill", usd, bill.usd)
    else:
        what = "The bill of 1,000 documents"
        if run.state != "complete":
            what = "So far, the bill of 1,000 documents"
            rows[0][3] = f"{text.share(documents, planned.value)} of it"
        said = _sentence(what, each, 1000 * bill.usd / documents)
    rows.append(["1,000 documents, all costs", *_row(each, 1000 * bill.usd / documents, text.usd)])
    notes = [f"Estimated for {_nodes(found.bill.nodes)} of {_name(found.machine)}; the run had {found.nodes}."]
    if run.state != "complete":
        notes.append("While a run is not finished, its start-up weighs more than it will in the end.")
    elif not whole:
        notes.append("The estimate is for another number of documents, so only the price of one is compared.")
    prices = sorted({node.usd_per_hour for node in bill.nodes if node.instance_type == found.machine.instance_type})
    if any(abs(price / found.machine.usd_per_hour - 1) > _SAME for price in prices):
        billed = " and ".join(text.usd(price) for price in prices)
        notes.append(f"An hour was taken to cost {text.usd(found.machine.usd_per_hour)}, and was billed at {billed}.")
    heads = ["", "estimated", "in the run", "difference", "95% interval"]
    return Comparison(said, Table(heads, rows, " ".join(notes)))


def _row(figure: Figure, value: float, show: text.Show) -> list[str]:
    return [show(figure.value), show(value), _difference(figure.value, value), _interval(figure, show)]


def _sentence(what: str, figure: Figure, value: float) -> str:
    off = 100 * (value / figure.value - 1)
    how = f"{abs(off):.1f}% {'above' if off > 0 else 'below'} the estimate of {text.usd(figure.value)}"
    inside = {True: ", inside its 95% interval", False: ", outside its 95% interval", None: ""}[figure.holds(value)]
    return f"{what} is {text.usd(value)}: {how}{inside}."


def _difference(estimated: float, found: float) -> str:
    return f"{100 * (found / estimated - 1):+.1f}%" if estimated else text.NONE


# --------------------------------------------------------------------------------------------------------------- words


def _scaled(figure: Figure, by: float) -> Figure:
    ends = (None if end is None else end * by for end in (figure.low, figure.high))
    return type(figure)(figure.value * by, *ends)


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


def _name(machine: Machine) -> str:
    return text.clean(machine.name + (" spot" if machine.market == "spot" else ""), 80)
