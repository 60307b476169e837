"""Dead letters: documents of a run that have no answer and units that could not be done, with their
reasons.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.dataset import writer
from raypd.run import read, retry_policy
from raypd.run.layout import is_nightly
from raypd.verify.table_object import objects, read_object

_EXAMPLES = 3
_LOOKED_AT = 512  # units, for the most frequent reason
_ROWS_READ = 20  # units of these that have failures
SCHEMA = pa.schema(
    {
        "id": "string",
        "source": "string",
        "row": "int64",
        "attempts": "int32",
        "reason": "string",
        "unit": "string",
    }
)
COLUMNS = ["id", "status", "error", "source", "row", "attempts"]
_MOST_REASONS = 10_000  # kinds that are counted apart


@dataclass
class Reason:
    """Dead letters whose reasons are the same but for numbers and places."""

    reason: str
    documents: int = 0
    can_change: bool = True  # whether a retry may help
    examples: list[dict[str, object]] = field(default_factory=list)


@dataclass
class Summary:
    """All dead letters of a run, grouped; the most frequent reason first."""

    run: str
    documents: int
    reasons: list[Reason]
    # Not committed: `unit`, and the last line that its worker wrote as `reason`.
    units: list[dict[str, str]]
    retried: int  # documents that --retry-errors tries again


def letters(output: str) -> Iterator[pa.Table]:
    """The error rows, with SCHEMA's columns, a table a unit that has any; of others only footers.

    Raises RunError.
    """
    if is_nightly(output):  # the objects of the table, which have no summaries
        units = (
            (path.rpartition("/")[2].removesuffix(".parquet"), path) for path in objects(output)
        )
        tables = ((unit_id, _failed(read_object(path, COLUMNS))) for unit_id, path in units)
    else:
        failed = (
            unit
            for unit in sorted(writer.objects(output))
            if writer.read_summary(output, *unit).failed
        )
        tables = ((unit_id, error_rows(path)) for unit_id, path in failed)
    for unit_id, rows in tables:
        if len(rows):
            columns = [rows[name] for name in ("id", "source", "row", "attempts", "error")]
            yield pa.table([*columns, [unit_id] * len(rows)], schema=SCHEMA)


def error_rows(path: str) -> pa.Table:
    """The error rows of a unit's object, with COLUMNS. Raises RunError when it cannot be read."""
    return _failed(writer.read_table("", "", COLUMNS, path)[1])


def _failed(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.not_equal(rows["status"], "ok"))


def summarize(output: str) -> Summary:
    """Groups a run's dead letters by reason.

    Memory grows with the number of kinds of reasons, not of documents.
    """
    reasons: dict[str, Reason] = {}
    documents = retried = 0
    for rows in (
        rows for table in letters(output) for rows in read.by_document(table.to_pylist()).values()
    ):
        documents += 1
        retried += any(not of_input(row["source"], row["reason"]) for row in rows)
        # The first of each.
        kinds = {normalize(row["source"], row["reason"]): row for row in reversed(rows)}
        for kind, row in kinds.items():
            can_change = not of_input(row["source"], row["reason"])
            if kind not in reasons and len(reasons) >= _MOST_REASONS:
                kind = "(other reasons)"
                can_change = True
            group = reasons.setdefault(kind, Reason(kind, can_change=can_change))
            group.documents += 1
            if len(group.examples) < _EXAMPLES:
                group.examples.append(row)
    ordered = sorted(reasons.values(), key=lambda r: (-r.documents, r.reason))
    failures = list(read.failures(output))
    done = {retry_policy.START, *(writer.committed(output) if failures else ())}
    failed = [{"unit": unit, "reason": reason} for unit, reason in failures if unit not in done]
    return Summary(output, documents, ordered, failed, retried)


def most_frequent(output: str) -> str | None:
    """Why most documents of a run failed, as far as an even choice of its units tells; None where
    it has none.
    """
    chosen = read.spread(list(writer.objects(output)), _LOOKED_AT)
    summaries = storage.in_threads(
        lambda item: (item, writer.read_summary(output, *item)), chosen, 16
    )
    failed = [item for item, summary in summaries if summary.failed][:_ROWS_READ]
    rows = [row for _, path in failed for row in error_rows(path).to_pylist()]
    reasons = Counter(normalize(row["source"], row["error"]) for row in rows)
    return reasons.most_common(1)[0][0] if reasons else None


def of_input(source: str, reason: str | None) -> bool:
    """Whether the input is at fault, which no retry changes: such reasons begin with the place
    (`name:13: `).
    """
    return _place(source).match(reason or "") is not None


def _place(source: str) -> re.Pattern[str]:
    return re.compile("^" + re.escape(source) + r"(?:(?::|, line |, row |, byte )\d+)?: ")


def normalize(source: str, reason: str | None) -> str:
    """A reason without its place, its numbers and the names in it, so that alike reasons are one.

    >>> normalize("a.jsonl", "a.jsonl:13: not JSON: Expecting ',' delimiter: line 1 column 30 (char
        29)")
    "not JSON: Expecting ',' delimiter: line N column N (char N)"
    """
    text = _place(source).sub("", (reason or "").strip())
    lines = [line for line in text.splitlines() if line.strip()] or ["no reason"]
    text = lines[-1 if text.startswith("Traceback") else 0]
    text = re.sub(r"0x[0-9a-fA-F]+|\b[0-9a-f]{12,}\b", "X", text)
    return re.sub(r"(UTF-\d+)|\d+(?:[.,]\d+)*", lambda match: match[1] or "N", text)[:300]
