"""Tables and bars of the page, as text that is ready to be shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypd.report.data import RunReport
from raypd.report.sample import AnswerSample
from raypd.run import text
from raypd.run.records import Counts, WorkerTime

MOST_ROWS = 40
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
class Table:
    """Rows of text under heads; the first column is the name of the row, the others are figures unless `text_columns`.

    The page makes cells harmless and cuts long ones.
    """

    heads: list[str]
    rows: list[list[str]]
    note: str = ""
    text_columns: tuple[int, ...] = (0,)
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
    hidden = len(rows) - MOST_ROWS
    return f"{hidden} more are not shown." if hidden > 0 else ""


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
    shown = {name or "none": counts for name, counts in dearest[:MOST_ROWS]}
    rows = []
    for name, usd, share, width in _bars({name: counts["usd"] for name, counts in shown.items()}, text.usd):
        counts = shown[name]
        per_1000 = text.usd(1000 * counts["usd"] / counts["documents"]) if counts["documents"] else share
        rows.append((name, usd, per_1000, width))
    return Bars("Cost by category", rows, _not_shown(dearest), "in all, and for 1,000 documents")


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
