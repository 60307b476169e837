"""Dead letters: the documents and units of a run that failed, with their reasons."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.dataset import summaries, writer
from raypd.run import OTHER, FailureReason, failure_reasons, is_nightly, read, retry_policy
from raypd.verify.table_object import objects, tables

# Examples per reason, and how many of the most frequent reasons have examples.
_EXAMPLES = 3
_MAX_SHOWN = 200
_THREADS = 16
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
    # Units that were not committed: `unit`, and the last line that the worker wrote as `reason`.
    units: list[dict[str, str]]
    retried: int  # documents that --retry-errors would retry


def letters(output: str) -> Iterator[pa.Table]:
    """Yield the error rows of a run, or of a table of nightly runs.

    Args:
        output: The folder of the run.

    Yields:
        A table with the columns of SCHEMA for each unit that has error rows. Other units are not
        read.

    Raises:
        RunError: If a unit cannot be read.
    """
    letters_of_all: Iterator[pa.Table]
    if is_nightly(output):
        # The objects of a nightly table have no summaries that count failures.
        letters_of_all = (table for _, table in _nightly_letters(objects(output)))
    else:
        names = summaries.failed_names(summaries.read(writer.committed(output)))
        paths = (summaries.path_of(output, name) for name in names)
        letters_of_all = storage.in_threads(_unit_letters, paths, _THREADS)
    for table in letters_of_all:
        if len(table):
            yield table


def _nightly_letters(paths: Iterable[str]) -> Iterator[tuple[str, pa.Table]]:
    """Yield the error rows of files of a nightly table, each with the path of the file."""
    for path, rows in tables(paths, COLUMNS):
        yield path, _letters(path, _failed(rows))


def _nightly_letters_of(path: str) -> pa.Table:
    tables_of_file = [table for _, table in _nightly_letters([path])]
    return pa.concat_tables([SCHEMA.empty_table(), *tables_of_file])


def _unit_letters(path: str) -> pa.Table:
    return _letters(path, error_rows(path))


def _letters(path: str, rows: pa.Table) -> pa.Table:
    unit_id = path.rpartition("/")[2].removesuffix(".parquet")
    columns = [rows[name] for name in ("id", "source", "row", "attempts", "error")]
    return pa.table([*columns, [unit_id] * len(rows)], schema=SCHEMA)


def error_rows(path: str) -> pa.Table:
    """Return the error rows of a unit's object, with the columns of COLUMNS.

    Raises:
        RunError: If the object cannot be read.
    """
    _, rows = writer.read_table("", "", COLUMNS, path)
    return _failed(rows)


def _failed(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.not_equal(rows["status"], "ok"))


class _Counter:
    """Counts dead letters by kind of reason, in memory that grows only with the number of kinds."""

    def __init__(self) -> None:
        self.documents = 0
        self.retried = 0
        self.reasons: dict[str, Reason] = {}
        # Kind -> the paths of the first objects that have documents that failed because of it.
        self._paths: dict[str, list[str]] = {}

    def add_letters(self, table: pa.Table, path: str) -> None:
        """Add the error rows of an object, a table of SCHEMA."""
        rows = [{**row, "error": row["reason"]} for row in table.to_pylist()]
        counts = failure_reasons.count(rows)
        self.add(len(read.by_document(rows)), counts.retriable, counts.reasons, path)

    def add(self, documents: int, retriable: int, reasons: list[FailureReason], path: str) -> None:
        """Add the failed documents of an object."""
        self.documents += documents
        self.retried += retriable
        for reason in reasons:
            kind = reason.reason
            can_change = reason.can_change
            if kind not in self.reasons and len(self.reasons) >= _MAX_REASONS:
                kind = OTHER
                can_change = True
            group = self.reasons.setdefault(kind, Reason(kind, can_change=can_change))
            group.documents += reason.documents
            paths = [*self._paths.get(kind, []), path]
            self._paths[kind] = nsmallest(_EXAMPLES, paths)

    def ordered(self) -> list[Reason]:
        """Return the reasons, the most frequent first."""
        return sorted(self.reasons.values(), key=lambda group: (-group.documents, group.reason))

    def add_examples(self, read_letters: Any) -> None:
        """Add examples to the most frequent reasons.

        Args:
            read_letters: Returns the error rows of an object, a table of SCHEMA.
        """
        paths: dict[str, None] = {}
        for group in self.ordered()[:_MAX_SHOWN]:
            paths.update(dict.fromkeys(self._paths[group.reason]))
        for table in storage.in_threads(read_letters, sorted(paths), _THREADS):
            for rows in read.by_document(table.to_pylist()).values():
                self._add_examples_of(rows)

    def _add_examples_of(self, rows: list[dict[str, Any]]) -> None:
        """Add rows of one document, one for each kind of reason that lacks examples."""
        first_rows: dict[str, dict[str, Any]] = {}
        for row in rows:
            kind = failure_reasons.normalize(row["source"], row["reason"])
            if kind not in self.reasons:
                kind = OTHER
            first_rows.setdefault(kind, row)
        for kind, row in first_rows.items():
            group = self.reasons.get(kind)
            if group is not None and len(group.examples) < _EXAMPLES:
                group.examples.append(row)


def summarize(output: str) -> Summary:
    """Group the dead letters of a run by reason.

    For a run, only the units with the examples are read. Memory grows with the number of kinds of
    reasons, not with the number of documents.
    """
    counter = _Counter()
    if is_nightly(output):
        for path, table in _nightly_letters(objects(output)):
            counter.add_letters(table, path)
        counter.add_examples(_nightly_letters_of)
    else:
        _count_units(counter, output)
        counter.add_examples(_unit_letters)
    failed_units = _failed_units(output)
    return Summary(output, counter.documents, counter.ordered(), failed_units, counter.retried)


def _count_units(counter: _Counter, output: str) -> None:
    """Count the dead letters of a run from the summaries of its units."""
    columns = ["name", "failed", "reasons", "retriable"]
    for table in summaries.read(writer.committed(output)):
        failed = table.filter(pc.greater(table["failed"], 0)).select(columns)
        uncounted = []
        for row in failed.to_pylist():
            path = summaries.path_of(output, row["name"])
            if row["reasons"] is None:
                # The unit is from an earlier version, whose summaries have no reasons.
                uncounted.append(path)
                continue
            reasons = [FailureReason(**reason) for reason in row["reasons"]]
            counter.add(row["failed"], row["retriable"], reasons, path)
        letters_of_units = storage.in_threads(_unit_letters, uncounted, _THREADS)
        for path, rows in zip(uncounted, letters_of_units, strict=True):
            counter.add_letters(rows, path)


def _failed_units(output: str) -> list[dict[str, str]]:
    """List the units that failed and were not committed later."""
    failures = list(read.failures(output))
    if not failures:
        return []
    done = writer.committed(output)
    listed = []
    for unit, reason in failures:
        if unit != retry_policy.START and unit not in done:
            listed.append({"unit": unit, "reason": reason})
    return listed


def has_retriable(output: str) -> bool:
    """Return whether a run has failed documents for which a retry may help."""
    counter = _Counter()
    _count_units(counter, output)
    return counter.retried > 0


def most_frequent(output: str) -> str | None:
    """Return why most documents of a run failed; None if none failed."""
    counter = _Counter()
    _count_units(counter, output)
    for reason in counter.ordered():
        return reason.reason
    return None
