"""The tables and headline figures of the page, as text that is ready to be shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypd.report.data import RunReport
from raypd.report.ledger import RunBill
from raypd.report.sample import AnswerSample
from raypd.run import text
from raypd.run.records import Counts, NodeTime, WorkerTime

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
_TOKEN_NAMES = {"prefill_tokens": "prompts, computed", "shared_tokens": "prompts, shared", "decode_tokens": "answers"}


@dataclass
class Tile:
    """A headline figure."""

    name: str
    value: str
    notes: list[str] = field(default_factory=list)
    unit: str = ""


@dataclass
class Table:
    """Rows of text under heads; the first column is the name of the row, the others are figures unless `left`.

    The page makes cells harmless and cuts long ones.
    """

    heads: list[str]
    rows: list[list[str]]
    note: str = ""
    left: tuple[int, ...] = (0,)
    title: str = ""


@dataclass
class Bars:
    """A table with a bar in every row: name, value, share, and the bar's length as a percentage of the longest."""

    title: str
    rows: list[tuple[str, str, str, float]]
    note: str = ""
    caption: str = ""
    stacked: bool = False  # long names stand above their bars


def _bars(values: Mapping[str, float], show: text.Show) -> list[tuple[str, str, str, float]]:
    """A bar for each value, the longest first; shares are of their sum."""
    total, longest = sum(values.values()), max(values.values(), default=0.0)
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return [
        (name, show(value), text.share(value, total), round(100 * value / longest, 1) if longest else 0)
        for name, value in ordered
    ]


def _not_shown(rows: Sequence[Any]) -> str:
    hidden = len(rows) - _MOST_ROWS
    return f"{hidden} more are not shown." if hidden > 0 else ""


def tiles(run: RunReport) -> list[Tile]:
    """The headline figures; what is not known says so."""
    extracted, failed, seconds = run.units.total("documents"), run.units.total("failed"), run.seconds
    documents = extracted
    if run.table is not None:
        documents, failed = run.table.documents, run.table.failed
    prefill, shared, decode = (run.units.tokens(f"{kind}_tokens") for kind in ("prefill", "shared", "decode"))
    outcome = ["none is committed yet"]
    if documents:
        outcome = [
            f"{text.count(documents - failed)} ok",
            f"{text.count(failed)} failed ({text.share(failed, documents)})",
        ]
    if run.table is not None:
        night = text.clean(run.table.night, 40)
        outcome.append(f"in the table of the night {night}; {text.count(extracted)} extracted")
    speed = text.number(extracted / seconds) if seconds and extracted else text.NONE
    tokens = [
        f"{text.compact(prefill)} of prompts, {text.compact(decode)} of answers",
        f"{text.compact(shared)} more were shared, not computed again",
    ]
    began = f"began {text.when(run.sessions[0].began)}" if run.sessions else "no session is on record"
    return [
        Tile("Documents", text.count(documents), outcome),
        Tile("Speed", speed, ["mean over all running time"], "documents/s"),
        *_cost_tiles(run.bill, extracted),
        Tile("Tokens", text.compact(prefill + decode), tokens),
        Tile("Time", text.duration(seconds), [text.counted(len(run.sessions), "session"), began]),
    ]


def _cost_tiles(bill: RunBill | None, documents: int) -> list[Tile]:
    if bill is None or not bill.sessions:
        return [Tile("Cost", text.NONE, ["no bill was kept for this run"]), Tile("Per 1,000 documents", text.NONE)]
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
    return [Tile("Cost", text.cost(bill.usd), notes), Tile("Per 1,000 documents", each, ["all costs of the run"])]


def bars(run: RunReport) -> list[Bars]:
    """Where the money went, by kind of time and by category; then the tokens by kind."""
    shown = []
    if run.bill and run.bill.usd:
        parts = {_PART_NAMES[name]: usd for name, usd in run.bill.parts.items() if usd}
        shown = [Bars("Where the money went", _bars(parts, text.usd))] if parts else []
        if run.bill.categories:
            shown.append(_category_bars(run.bill.categories))
    tokens = {name: float(run.units.tokens(kind)) for kind, name in _TOKEN_NAMES.items()}
    note = "Shared tokens were in the cache already: of the instruction that all documents of a category have."
    return [*shown, Bars("Tokens by kind", _bars(tokens, text.compact), note)]


def _category_bars(categories: dict[str, Counts]) -> Bars:
    dearest = sorted(categories.items(), key=lambda item: -item[1]["usd"])
    shown = {name or "none": counts for name, counts in dearest[:_MOST_ROWS]}
    rows = []
    for name, usd, share, width in _bars({name: counts["usd"] for name, counts in shown.items()}, text.usd):
        counts = shown[name]
        per_1000 = text.usd(1000 * counts["usd"] / counts["documents"]) if counts["documents"] else share
        rows.append((name, usd, per_1000, width))
    return Bars("Cost by category", rows, _not_shown(dearest), "in all, and for 1,000 documents")


def machine_table(bill: RunBill) -> Table:
    """What was billed, machines of one kind together."""
    groups: dict[tuple[str, str, float, str], list[NodeTime]] = {}
    for node in bill.nodes:
        place = f" in {node.region}" if node.region else ""
        kind = node.instance_type or ("local machine" if node.market == "local" else "machine of unknown type")
        groups.setdefault((f"{kind}{place}", node.market, node.usd_per_hour, node.price_source), []).append(node)
    rows = []
    for (kind, market, price, source), nodes in sorted(groups.items(), key=lambda i: -sum(n.usd for n in i[1])):
        hours, usd = sum(n.seconds for n in nodes) / 3600, sum(n.usd for n in nodes)
        figures = [text.count(len(nodes)), text.number(hours), text.cost(price), text.cost(usd)]
        rows.append([kind, market, *figures, source])
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


def error_bars(sample: AnswerSample) -> Bars:
    """Documents by the reason why they failed. A reason is the error without names, numbers and quotations."""
    documents = {name: float(n) for name, n in sample.errors.most_common(_REASONS)}
    notes = []
    if len(sample.errors) > _REASONS:
        notes.append(f"{text.count(len(sample.errors) - _REASONS)} rarer reasons are not shown.")
    if sample.error_units < sample.failed_units:
        units = text.counted(sample.failed_units, "unit")
        notes.append(f"Read from {text.count(sample.error_units)} of {units} with failures.")
    return Bars("Errors by reason", _bars(documents, text.count), " ".join(notes), "failed documents", stacked=True)


def answer_table(sample: AnswerSample) -> Table:
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
    return Table(heads, rows, _not_shown(by_size), (0, 1))
