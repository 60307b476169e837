"""Dead letters: the documents and units of a run that failed, with their reasons."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.dataset import writer
from raypd.run import is_nightly, read, retry_policy
from raypd.verify.table_object import objects, read_object

# Examples per reason.
_EXAMPLES = 3
# For the most frequent reason, the summaries of this many units are read, and the rows of this many
# units with failures.
_UNITS_EXAMINED = 512
_FAILED_UNITS_READ = 20
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
# Further kinds of reasons are counted together.
_MAX_REASONS = 10_000


@dataclass
class Reason:
    """Dead letters whose reasons differ only in numbers and locations."""

    reason: str
    documents: int = 0
    can_change: bool = True  # whether a retry may help
    examples: list[dict[str, object]] = field(default_factory=list)


@dataclass
class Summary:
    """All dead letters of a run, grouped by reason, the most frequent reason first."""

    run: str
    documents: int
    reasons: list[Reason]
    # Units that were not committed: `unit`, and as `reason` the last line that the worker wrote.
    units: list[dict[str, str]]
    retried: int  # documents that --retry-errors would try again


def letters(output: str) -> Iterator[pa.Table]:
    """Yield the error rows of a run, or of a table of nightly runs.

    Args:
        output: The folder of the run.

    Yields:
        A table with the columns of SCHEMA per unit that has error rows. Of the other units only the
        footers are read.

    Raises:
        RunError: If a unit cannot be read.
    """
    for unit_id, rows in _error_tables(output):
        if len(rows):
            columns = [rows[name] for name in ("id", "source", "row", "attempts", "error")]
            yield pa.table([*columns, [unit_id] * len(rows)], schema=SCHEMA)


def _error_tables(output: str) -> Iterator[tuple[str, pa.Table]]:
    """Yield the id and the error rows of each unit that may have some."""
    if is_nightly(output):
        # The objects of a nightly table have no summaries that count failures.
        for path in objects(output):
            unit_id = path.rpartition("/")[2].removesuffix(".parquet")
            yield unit_id, _failed(read_object(path, COLUMNS))
        return
    for unit_id, path in sorted(writer.objects(output)):
        if writer.read_summary(output, unit_id, path).failed:
            yield unit_id, error_rows(path)


def error_rows(path: str) -> pa.Table:
    """Return the error rows of a unit's object, with the columns of COLUMNS.

    Raises:
        RunError: If the object cannot be read.
    """
    _, rows = writer.read_table("", "", COLUMNS, path)
    return _failed(rows)


def _failed(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.not_equal(rows["status"], "ok"))


def summarize(output: str) -> Summary:
    """Group the dead letters of a run by reason.

    Memory grows with the number of kinds of reasons, not with the number of documents.
    """
    reasons: dict[str, Reason] = {}
    documents = 0
    retried = 0
    for table in letters(output):
        for rows in read.by_document(table.to_pylist()).values():
            documents += 1
            retried += any(not of_input(row["source"], row["reason"]) for row in rows)
            _count_reasons(reasons, rows)
    ordered = sorted(reasons.values(), key=lambda group: (-group.documents, group.reason))
    failed_units = _failed_units(output)
    return Summary(output, documents, ordered, failed_units, retried)


def _count_reasons(reasons: dict[str, Reason], rows: list[dict[str, Any]]) -> None:
    """Count the error rows of one document, each kind of reason once."""
    first_rows: dict[str, dict[str, Any]] = {}
    for row in rows:
        first_rows.setdefault(normalize(row["source"], row["reason"]), row)
    for kind, row in first_rows.items():
        can_change = not of_input(row["source"], row["reason"])
        if kind not in reasons and len(reasons) >= _MAX_REASONS:
            kind = "(other reasons)"
            can_change = True
        group = reasons.setdefault(kind, Reason(kind, can_change=can_change))
        group.documents += 1
        if len(group.examples) < _EXAMPLES:
            group.examples.append(row)


def _failed_units(output: str) -> list[dict[str, str]]:
    """List the units that failed and were not committed later."""
    failures = list(read.failures(output))
    if not failures:
        return []
    done = {retry_policy.START, *writer.committed(output)}
    return [{"unit": unit, "reason": reason} for unit, reason in failures if unit not in done]


def most_frequent(output: str) -> str | None:
    """Return why most documents of a run failed; None if none failed.

    An even choice of units is examined, so the answer is approximate.
    """
    units = read.spread(list(writer.objects(output)), _UNITS_EXAMINED)

    def has_failed(unit: tuple[str, str]) -> tuple[str, bool]:
        unit_id, path = unit
        return path, bool(writer.read_summary(output, unit_id, path).failed)

    failed = [path for path, failed in storage.in_threads(has_failed, units, 16) if failed]
    reasons: Counter[str] = Counter()
    for path in failed[:_FAILED_UNITS_READ]:
        for row in error_rows(path).to_pylist():
            reasons[normalize(row["source"], row["error"])] += 1
    if not reasons:
        return None
    return reasons.most_common(1)[0][0]


def of_input(source: str, reason: str | None) -> bool:
    """Return whether the input caused a failure, so that a retry cannot help.

    Such reasons start with the location in the input (`name:13: `).
    """
    return _location(source).match(reason or "") is not None


def _location(source: str) -> re.Pattern[str]:
    """Return a pattern of the locations within a source, as reasons start with them."""
    return re.compile("^" + re.escape(source) + r"(?:(?::|, line |, row |, byte )\d+)?: ")


def normalize(source: str, reason: str | None) -> str:
    """Remove the location, the numbers and the addresses of a reason, so that similar ones are
    equal.

    >>> normalize("a.jsonl", "a.jsonl:13: not JSON: Expecting ',' delimiter: line 1 column 30 (char
        29)")
    "not JSON: Expecting ',' delimiter: line N column N (char N)"
    """
    text = _location(source).sub("", (reason or "").strip())
    lines = [line for line in text.splitlines() if line.strip()] or ["no reason"]
    line = lines[0]
    if text.startswith("Traceback"):
        line = lines[-1]
    line = re.sub(r"0x[0-9a-fA-F]+|\b[0-9a-f]{12,}\b", "X", line)
    return re.sub(r"(UTF-\d+)|\d+(?:[.,]\d+)*", lambda match: match[1] or "N", line)[:300]
