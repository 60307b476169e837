"""The tables and headline figures of the page, as text that is ready to be shown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypd.report.data import RunReport
from raypd.report.ledger import RunBill
from raypd.report.sample import AnswerSample
from raypd.run import text
from raypd.run.records import Counts, WorkerTime

_MOST_ROWS = 40
_WORKER_ROWS = 100
_REASONS = 15
_PART_NAMES = {
    "decode": "decoding answers",
    "prefill": "reading prompts",
    "startup": "starting workers",
    "idle": "idle workers",
    "lost": "work that was lost",
    "head": "the head machine",
    "other": "everything else",
    "endpoint": "tokens of the model's server",
    "retry": "trying failed documents again",
}


@dataclass
class Tile:
    """A headline figure."""

    name: str
    value: str
    unit: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class Bar:
    """A row of a bar table. `width` is a percentage of the longest."""

    name: str
    value: str
    share: str
    width: float


@dataclass
class Table:
    """Rows of text under heads; the first column is the name of the row, the others are figures unless `left`.

    The page makes cells harmless and cuts long ones.
    """

    heads: list[str]
    rows: list[list[str]]
    note: str = ""
    left: tuple[int, ...] = (0,)


@dataclass
class Bars:
    """A table with a bar in every row."""

    title: str
    bars: list[Bar]
    note: str = ""
    unit: str = ""
    stacked: bool = False  # long names stand above their bars


def _bars_of(values: Mapping[str, float], show: Callable[[float], str]) -> list[Bar]:
    """A bar for each value, the longest first; shares are of their sum."""
    total, longest = sum(values.values()), max(values.values(), default=0.0)
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return [
        Bar(name, show(value), text.share(value, total), round(100 * value / longest, 1) if longest else 0)
        for name, value in ordered
    ]


def _not_shown(rows: Sequence[Any]) -> str:
    hidden = len(rows) - _MOST_ROWS
    return f"{hidden} more are not shown." if hidden > 0 else ""


# --------------------------------------------------------------------------------------------------------------- tiles


def tiles(run: RunReport) -> list[Tile]:
    """The headline figures; what is not known says so."""
    documents, failed, seconds = run.units.total("documents"), run.units.total("failed"), run.seconds
    extracted = documents
    if run.table is not None:
        documents, failed = run.table.documents, run.table.failed
    prefill, shared, decode = (run.units.tokens(f"{kind}_tokens") for kind in ("prefill", "shared", "decode"))
    outcome = ["none is committed yet"]
    if documents:
        share = text.share(failed, documents)
        outcome = [f"{text.count(documents - failed)} ok", f"{text.count(failed)} failed ({share})"]
    if run.table is not None:
        outcome.append(
            f"in the table of the night {text.clean(run.table.night, 40)}; {text.count(extracted)} extracted"
        )
    speed = text.number(extracted / seconds) if seconds and extracted else text.NONE
    tokens = [
        f"{text.compact(prefill)} of prompts, {text.compact(decode)} of answers",
        f"{text.compact(shared)} more were shared, not computed again",
    ]
    began = f"began {text.when(run.sessions[0].began)}" if run.sessions else "no session is on record"
    return [
        Tile("Documents", text.count(documents), "", outcome),
        Tile("Speed", speed, "documents/s", ["mean over all running time"]),
        *_cost_tiles(run.bill, extracted),
        Tile("Tokens", text.compact(prefill + decode), "", tokens),
        Tile("Time", text.duration(seconds), "", [text.counted(len(run.sessions), "session"), began]),
    ]


def _cost_tiles(bill: RunBill | None, documents: int) -> list[Tile]:
    if bill is None or not bill.sessions:
        return [Tile("Cost", text.NONE, "", ["no bill was kept for this run"]), Tile("Per 1,000 documents", text.NONE)]
    budget, notes = bill.newest.budget_usd, ["no budget was set"]
    if budget:
        notes = [f"{text.share(bill.usd, budget)} of the budget of {text.usd(budget)}"]
    if bill.usd == 0:
        notes = ["no machine of this run has a price"]
    if not bill.newest.final:
        notes.append(f"as of {text.when(bill.newest.until)}")
    if bill.cost.kwh is not None:
        co2 = f", {text.number(bill.cost.co2e_kg)} kg CO₂e" if bill.cost.co2e_kg is not None else ""
        notes.append(f"{text.number(bill.cost.kwh)} kWh{co2}")
    each = text.cost(1000 * bill.usd / documents) if documents else text.NONE
    return [
        Tile("Cost", text.cost(bill.usd), "", notes),
        Tile("Per 1,000 documents", each, "", ["all costs of the run"]),
    ]


# --------------------------------------------------------------------------------------------------------------- money


def money_tables(bill: RunBill) -> list[Bars]:
    """Where the money went: by kind of time, by category; nothing where there is no price."""
    if not bill.usd:
        return []
    parts = {_PART_NAMES[name]: usd for name, usd in bill.parts.items() if usd}
    tables = [Bars("Where the money went", _bars_of(parts, text.usd))] if parts else []
    if bill.categories:
        tables.append(_category_table(bill.categories))
    return tables


def _category_table(categories: dict[str, Counts]) -> Bars:
    dearest = sorted(categories.items(), key=lambda item: -item[1]["usd"])
    shown = {name or "none": counts for name, counts in dearest[:_MOST_ROWS]}
    bars = _bars_of({name: counts["usd"] for name, counts in shown.items()}, text.usd)
    for bar in bars:
        counts = shown[bar.name]
        if counts["documents"]:
            bar.share = text.usd(1000 * counts["usd"] / counts["documents"])
    return Bars("Cost by category", bars, _not_shown(dearest), "in all, and for 1,000 documents")


def machine_table(bill: RunBill) -> Table:
    """What was billed, machines of one kind together."""
    groups: dict[tuple[str, str, float, str], list[float]] = {}
    for node in bill.nodes:
        place = f" in {node.region}" if node.region else ""
        kind = node.instance_type or ("local machine" if node.market == "local" else "machine of unknown type")
        sums = groups.setdefault((f"{kind}{place}", node.market, node.usd_per_hour, node.price_source), [0, 0.0, 0.0])
        sums[0] += 1
        sums[1] += node.seconds / 3600
        sums[2] += node.usd
    rows = [
        [kind, market, text.count(machines), text.number(hours), text.cost(price), text.cost(usd), source]
        for (kind, market, price, source), (machines, hours, usd) in sorted(groups.items(), key=lambda i: -i[1][2])
    ]
    heads = ["machine", "market", "machines", "hours", "USD per hour", "cost", "price from"]
    return Table(heads, rows[:_MOST_ROWS], " ".join(text.clean(note, 300) for note in bill.cost.notes), (0, 1, 6))


def worker_table(workers: list[WorkerTime]) -> Table:
    """What each worker did with its time, in their order."""
    rows = []
    for worker in workers[:_WORKER_ROWS]:
        lived = worker.lived()
        shares = [text.share(worker.spent(kind), lived) for kind in ("busy", "startup", "idle", "lost")]
        rows.append([worker.worker, worker.node or text.NONE, text.duration(lived), *shares])
    note = f"The {_WORKER_ROWS} busiest of {len(workers)}." if len(workers) > _WORKER_ROWS else ""
    return Table(["worker", "machine", "time", "busy", "starting", "idle", "lost"], rows, note, (0, 1))


# ------------------------------------------------------------------------------------------------------------- answers


def token_bars(run: RunReport) -> Bars:
    """Tokens by kind; shared ones were in the cache already."""
    names = {"prefill_tokens": "prompts, computed", "shared_tokens": "prompts, shared", "decode_tokens": "answers"}
    tokens = {name: float(run.units.tokens(kind)) for kind, name in names.items()}
    note = "Shared tokens were in the cache already: of the instruction that all documents of a category have."
    return Bars("Tokens by kind", _bars_of(tokens, text.compact), note)


def error_bars(sample: AnswerSample) -> Bars:
    """Documents by the reason why they failed. A reason is the error without names, numbers and quotations."""
    documents = {name: float(n) for name, n in sample.errors.most_common(_REASONS)}
    notes = []
    if len(sample.errors) > _REASONS:
        notes.append(f"{text.count(len(sample.errors) - _REASONS)} rarer reasons are not shown.")
    if sample.error_units < sample.failed_units:
        notes.append(
            f"Read from {text.count(sample.error_units)} of {text.counted(sample.failed_units, 'unit')} with failures."
        )
    return Bars("Errors by reason", _bars_of(documents, text.count), " ".join(notes), "failed documents", stacked=True)


def answer_tables(sample: AnswerSample) -> list[Table]:
    """Of each attribute: how often it was found, and how sure the model was."""
    rows = []
    by_size = sorted(sample.attributes.values(), key=lambda a: (a.category, -a.statuses.total()))
    for attribute in by_size[:_MOST_ROWS]:
        total = attribute.statuses.total()
        counts = [attribute.found, attribute.statuses["null"], attribute.statuses["ambiguous"]]
        shares = [text.share(number, total) for number in (*counts, total - sum(counts))]
        middle = f"{statistics.median(attribute.confidences):.2f}" if attribute.confidences else text.NONE
        rows.append([attribute.category or text.NONE, attribute.name, *shares, middle])
    heads = ["category", "attribute", "found", "null", "ambiguous", "invalid or cut", "median confidence"]
    return [Table(heads, rows, _not_shown(by_size), (0, 1))] if rows else []


def session_table(run: RunReport) -> Table:
    """First run and resumptions."""
    rows = []
    for session in run.sessions:
        cost = text.NONE if session.usd is None else text.cost(session.usd)
        done = [text.count(session.units), text.count(session.documents), cost]
        rows.append([session.id, text.when(session.began), text.duration(session.seconds), session.how, *done])
    return Table(["session", "began", "time", "ended", "units", "documents", "cost"], rows, "", (0, 1, 3))
