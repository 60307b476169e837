"""The tables and headline figures of the page, as text that is ready to be shown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raypd.report import text

if TYPE_CHECKING:
    from raypd.report.data import Run
    from raypd.report.ledger import Bill, Share, Worker
    from raypd.report.sample import Sample

_MOST_ROWS = 40
_WORKER_ROWS = 100
_REASONS = 15
PART_NAMES = {
    "decode": "decoding answers",
    "prefill": "reading prompts",
    "startup": "starting workers",
    "idle": "idle workers",
    "lost": "work that was lost",
    "head": "the head machine",
    "other": "everything else",
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
    """Rows of text under heads; the first column is the name of the row, the others are figures unless `left`."""

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


def bars_of(values: Mapping[str, float], show: Callable[[float], str]) -> list[Bar]:
    """A bar for each value, the longest first; shares are of their sum."""
    whole, longest = sum(values.values()), max(values.values(), default=0.0)
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return [
        Bar(
            text.clean(name, 160),
            show(value),
            text.share(value, whole),
            round(100 * value / longest, 1) if longest else 0,
        )
        for name, value in ordered
    ]


# --------------------------------------------------------------------------------------------------------------- tiles


def tiles(run: Run) -> list[Tile]:
    """The headline figures; what is not known says so."""
    documents, failed = run.units.total("documents"), run.units.total("failed")
    seconds = run.seconds
    tokens = {kind: run.units.tokens(f"{kind}_tokens") for kind in ("prefill", "shared", "decode")}
    sessions = f"{len(run.sessions)} session" + ("" if len(run.sessions) == 1 else "s")
    return [
        Tile("Documents", text.count(documents), "", _outcome(documents, failed)),
        Tile(
            "Speed",
            text.number(documents / seconds) if seconds and documents else text.NONE,
            "documents/s",
            ["mean over all running time"],
        ),
        *_cost_tiles(run, documents),
        Tile(
            "Tokens",
            text.compact(tokens["prefill"] + tokens["decode"]),
            "",
            [
                f"{text.compact(tokens['prefill'])} of prompts, {text.compact(tokens['decode'])} of answers",
                f"{text.compact(tokens['shared'])} more were shared, not computed again",
            ],
        ),
        Tile("Time", text.duration(seconds), "", [sessions, *_began_ended(run)]),
    ]


def _outcome(documents: int, failed: int) -> list[str]:
    if not documents:
        return ["none is committed yet"]
    return [f"{text.count(documents - failed)} ok", f"{text.count(failed)} failed ({text.share(failed, documents)})"]


def _began_ended(run: Run) -> list[str]:
    return [f"began {text.when(run.sessions[0].began)}"] if run.sessions else ["no session is on record"]


def _cost_tiles(run: Run, documents: int) -> list[Tile]:
    bill = run.bill
    if bill is None or not bill.sessions:
        return [Tile("Cost", text.NONE, "", ["no bill was kept for this run"]), Tile("Per 1,000 documents", text.NONE)]
    notes = [
        f"{text.share(bill.usd, bill.budget_usd)} of the budget of {text.usd(bill.budget_usd)}"
        if bill.budget_usd
        else "no budget was set"
    ]
    if bill.usd == 0:
        notes.append("no machine of this run has a price")
    if not bill.final:
        notes.append(f"as of {text.when(bill.until)}")
    if bill.kwh is not None:
        co2 = f", {text.number(bill.co2e_kg)} kg CO₂e" if bill.co2e_kg is not None else ""
        notes.append(f"{text.number(bill.kwh)} kWh{co2}")
    each = text.usd(1000 * bill.usd / documents) if documents else text.NONE
    return [
        Tile("Cost", text.usd(bill.usd), "", notes),
        Tile("Per 1,000 documents", each, "", ["all costs of the run"]),
    ]


# --------------------------------------------------------------------------------------------------------------- money


def money_tables(bill: Bill) -> list[Bars]:
    """Where the money went: by kind of time, by category, by method."""
    parts = {PART_NAMES.get(name, name): usd for name, usd in bill.parts.items() if usd > 0}
    tables = [Bars("Where the money went", bars_of(parts, text.usd))] if parts else []
    if bill.categories:
        tables.append(_share_table("Cost by category", bill.categories))
    if len(bill.methods) > 1:
        tables.append(_share_table("Cost by method", bill.methods))
    return tables


def _share_table(title: str, shares: list[Share]) -> Bars:
    bars = bars_of({s.name or "none": s.usd for s in shares[:_MOST_ROWS]}, text.usd)
    by_name = {text.clean(s.name or "none", 160): s for s in shares}
    for bar in bars:
        found = by_name.get(bar.name)
        if found and found.documents:
            bar.share = text.usd(1000 * found.usd / found.documents)
    left = len(shares) - _MOST_ROWS
    note = f"{left} more are not shown." if left > 0 else ""
    return Bars(title, bars, note, "in all, and for 1,000 documents")


def machine_table(bill: Bill) -> Table:
    """What was billed, machines of one kind together."""
    groups: dict[tuple[str, str, float, str], list[float]] = {}
    for node in bill.nodes:
        place = f" in {node.region}" if node.region else ""
        kind = node.instance_type or ("local machine" if node.market == "local" else "machine of unknown type")
        key = (f"{kind}{place}", node.market, node.usd_per_hour, node.source)
        sums = groups.setdefault(key, [0, 0.0, 0.0])
        sums[0] += 1
        sums[1] += node.seconds / 3600
        sums[2] += node.usd
    rows = [
        [
            text.clean(kind, 80),
            text.clean(market, 20),
            text.count(sums[0]),
            text.number(sums[1]),
            text.usd(price),
            text.usd(sums[2]),
            text.clean(source, 120),
        ]
        for (kind, market, price, source), sums in sorted(groups.items(), key=lambda item: -item[1][2])
    ]
    heads = ["machine", "market", "machines", "hours", "USD per hour", "cost", "price from"]
    return Table(heads, rows[:_MOST_ROWS], " ".join(text.clean(note, 300) for note in bill.notes), (0, 1, 6))


def worker_table(workers: list[Worker]) -> Table:
    """What each worker did with its time, the busiest first."""
    rows = [
        [
            text.clean(w.id, 40),
            text.clean(w.node, 40) or text.NONE,
            text.duration(w.ended - w.began),
            *(text.share(w.seconds(kind), w.ended - w.began) for kind in ("busy", "startup", "idle", "lost")),
        ]
        for w in workers[:_WORKER_ROWS]
    ]
    left = len(workers) - _WORKER_ROWS
    note = f"The {_WORKER_ROWS} busiest of {len(workers)}." if left > 0 else ""
    return Table(["worker", "machine", "time", "busy", "starting", "idle", "lost"], rows, note, (0, 1))


# ------------------------------------------------------------------------------------------------------------- answers


def token_bars(run: Run) -> Bars:
    """Tokens by kind; shared ones were in the cache already."""
    names = {
        "prefill_tokens": "prompts, computed",
        "shared_tokens": "prompts, shared",
        "decode_tokens": "answers",
    }
    found = {name: float(run.units.tokens(kind)) for kind, name in names.items()}
    note = "Shared tokens were in the cache already: of the instruction that all documents of a category have."
    return Bars("Tokens by kind", bars_of(found, text.compact), note)


def error_bars(sample: Sample) -> Bars:
    """Documents by the reason why they failed. A reason is the error without names, numbers and quotations."""
    found = {name: float(n) for name, n in sample.errors.most_common(_REASONS)}
    notes = []
    if len(sample.errors) > _REASONS:
        notes.append(f"{text.count(len(sample.errors) - _REASONS)} rarer reasons are not shown.")
    if sample.error_units < sample.failed_units:
        notes.append(
            f"Read from {text.count(sample.error_units)} of {text.count(sample.failed_units)} units with failures."
        )
    return Bars("Errors by reason", bars_of(found, text.count), " ".join(notes), "failed documents", stacked=True)


def answer_tables(sample: Sample) -> list[Table]:
    """Of each attribute: how often it was found, and how sure the model was."""
    rows = []
    by_size = sorted(sample.attributes.values(), key=lambda a: (a.category, -a.statuses.total()))
    for attribute in by_size[:_MOST_ROWS]:
        total = attribute.statuses.total()
        middle = f"{statistics.median(attribute.confidences):.2f}" if attribute.confidences else text.NONE
        rows.append(
            [
                text.clean(attribute.category, 60) or text.NONE,
                text.clean(attribute.name, 60),
                text.share(attribute.found, total),
                text.share(attribute.statuses["null"], total),
                text.share(attribute.statuses["ambiguous"], total),
                text.share(
                    total - attribute.found - attribute.statuses["null"] - attribute.statuses["ambiguous"], total
                ),
                middle,
            ]
        )
    if not rows:
        return []
    left = len(by_size) - _MOST_ROWS
    heads = ["category", "attribute", "found", "null", "ambiguous", "invalid or cut", "median confidence"]
    return [Table(heads, rows, f"{left} more are not shown." if left > 0 else "", (0, 1))]


def session_table(run: Run) -> Table:
    """First run and resumptions."""
    rows = [
        [
            text.clean(s.id, 40),
            text.when(s.began),
            text.duration(s.seconds),
            s.how,
            text.count(s.units),
            text.count(s.documents),
            text.usd(s.usd) if s.usd is not None else text.NONE,
        ]
        for s in run.sessions
    ]
    return Table(["session", "began", "time", "ended", "units", "documents", "cost"], rows, "", (0, 1, 3))
