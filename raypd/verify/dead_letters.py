"""Dead letters: documents of a run that have no answer and units that could not be done, with their reasons."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.dataset import writer
from raypd.run import layout
from raypd.storage.threads import in_threads
from raypd.verify.table_object import objects, read_object

_EXAMPLES = 3
_LOOKED_AT = 512  # units, for the most frequent reason
_ROWS_READ = 20  # units of these that have failures
SCHEMA = pa.schema(
    {"id": "string", "source": "string", "row": "int64", "attempts": "int32", "reason": "string", "unit": "string"}
)
_COLUMNS = ["id", "status", "error", "source", "row", "attempts"]
_MOST_REASONS = 10_000  # kinds that are counted apart


@dataclass
class Reason:
    """Dead letters whose reasons are the same but for numbers and places. `can_change`: whether a retry may help."""

    reason: str
    documents: int = 0
    can_change: bool = True
    examples: list[dict[str, object]] = field(default_factory=list)


@dataclass
class FailedUnit:
    """A unit that is not committed, and the last line that its worker wrote."""

    unit: str
    reason: str


@dataclass
class Summary:
    """All dead letters of a run, grouped; the most frequent reason first."""

    run: str
    documents: int
    reasons: list[Reason]
    units: list[FailedUnit]


def letters(output: str) -> Iterator[pa.Table]:
    """The error rows of a run or of a nightly table, with the columns of SCHEMA; one table a unit that has any.

    Of units without failures the footer alone is read. Raises RunError at an object that is damaged.
    """
    if storage.exists(storage.join(output, layout.STATE)):  # nights: the objects of the table, which have no summaries
        for path in objects(output):
            failures = _error_rows(read_object(path, _COLUMNS), path.rpartition("/")[2].removesuffix(".parquet"))
            if len(failures):
                yield failures
        return
    for unit_id, path in sorted(writer.objects(output)):
        if writer.read_summary(output, unit_id, path).failed:
            yield _error_rows(writer.read_table(output, unit_id, _COLUMNS, path)[1], unit_id)


def _error_rows(table: pa.Table, unit_id: str) -> pa.Table:
    bad = table.filter(pc.not_equal(table["status"], "ok"))
    columns = [bad[name] for name in ("id", "source", "row", "attempts", "error")]
    return pa.table([*columns, [unit_id] * len(bad)], schema=SCHEMA)


def summarize(output: str) -> Summary:
    """Groups a run's dead letters by reason. Memory grows with the number of kinds of reasons, not of documents."""
    reasons: dict[str, Reason] = {}
    for table in letters(output):
        for row in table.to_pylist():
            from_input = of_input(row["source"], row["reason"])
            kind = normalize(row["source"], row["reason"])
            if kind not in reasons and len(reasons) >= _MOST_REASONS:
                kind, from_input = "(other reasons)", False
            group = reasons.setdefault(kind, Reason(kind, can_change=not from_input))
            group.documents += 1
            if len(group.examples) < _EXAMPLES:
                group.examples.append(row)
    ordered = sorted(reasons.values(), key=lambda r: (-r.documents, r.reason))
    return Summary(output, sum(r.documents for r in ordered), ordered, list(_failed_units(output)))


def most_frequent(output: str) -> str | None:
    """Why most documents of a run failed, as far as an even choice of its units tells; None where it has none."""
    units = list(writer.objects(output))
    chosen = units[:: -(-len(units) // _LOOKED_AT)] if units else []
    summaries = in_threads(lambda item: (item, writer.read_summary(output, *item)), chosen, 16)
    failed = [item for item, summary in summaries if summary.failed][:_ROWS_READ]
    tables = [_error_rows(writer.read_table(output, unit_id, _COLUMNS, path)[1], unit_id) for unit_id, path in failed]
    reasons = Counter(normalize(row["source"], row["reason"]) for table in tables for row in table.to_pylist())
    return reasons.most_common(1)[0][0] if reasons else None


def _failed_units(output: str) -> Iterator[FailedUnit]:
    """Units whose workers failed and that nobody has done since."""
    folder = storage.join(output, layout.FAILURES)
    names = [name for name in storage.names(folder) if name.endswith(".txt")]
    done = writer.committed(output) if names else set()
    for name in names:
        if (unit := name.removesuffix(".txt")) not in done:
            text = storage.read(storage.join(folder, name)).decode(errors="replace").strip()
            yield FailedUnit(unit, text.splitlines()[-1] if text else "its worker left no reason")


def of_input(source: str, reason: str | None) -> bool:
    """Whether a document failed because of how it stands in the input, which no second attempt changes.

    Such reasons begin with the place, as reading writes them: `name:13: what is wrong`, `name, row 13: ...`.
    """
    return _place(source).match(reason or "") is not None


def _place(source: str) -> re.Pattern[str]:
    return re.compile("^" + re.escape(source) + r"(?::|, line |, row |, byte )\d+: ")


def normalize(source: str, reason: str | None) -> str:
    """A reason without its place, its numbers and the names in it, so that alike reasons are one.

    >>> normalize("a.jsonl", "a.jsonl:13: not JSON: Expecting ',' delimiter: line 1 column 30 (char 29)")
    "not JSON: Expecting ',' delimiter: line N column N (char N)"
    """
    text = _place(source).sub("", (reason or "no reason").strip())
    lines = [line for line in text.splitlines() if line.strip()]
    text = lines[-1] if lines and text.startswith("Traceback") else (lines[0] if lines else "no reason")
    text = re.sub(r"0x[0-9a-fA-F]+|\b[0-9a-f]{12,}\b", "X", text)
    return re.sub(r"(UTF-\d+)|\d+(?:[.,]\d+)*", lambda match: match[1] or "N", text)[:300]
