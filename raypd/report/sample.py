"""A sample of the answers, the same at every call: documents, the model's sureness, and why
documents failed.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.dataset import writer
from raypd.errors import RunError
from raypd.report.units import CommittedUnit
from raypd.run.read import by_document, spread
from raypd.tasks.columns import Row, RowValue, row_values
from raypd.text import NONE, clean, share
from raypd.verify import dead_letters

_UNITS = 60  # read whole or in part for answers
_ROWS = 1024  # read of each
_FAILED_UNITS = 200  # read for their errors
_DOCUMENTS = 240  # to look at
_FAILED_DOCUMENTS = 60  # of these
_CHARACTERS = 600_000  # of all documents together: the page stays small
_ENTRIES = 60  # values of one document
_VALUE_CHARACTERS = 400
_TEXT_CHARACTERS = 1500
_THREADS = 16


@dataclass
class SampleDocument:
    id: str
    source: str
    row: int
    status: str
    error: str | None
    category: str | None
    attempts: int
    truncated: bool
    entries: list[RowValue]  # with texts that are cut and harmless
    left_out: int = 0  # answers beyond those shown
    unit: str = ""
    # With `raypd report --texts`, in pieces: each with the names of the values that stand there, or
    # nothing.
    text: list[tuple[str, str]] = field(default_factory=list)

    @property
    def confidence(self) -> float | None:
        """Of its least sure answer."""
        return min((e.confidence for e in self.entries if e.confidence is not None), default=None)

    @property
    def size(self) -> int:
        """Characters that it takes on the page, about."""
        return (
            60
            + sum(len(e.name) + len(e.value or "") + 20 for e in self.entries)
            + len(self.error or "")
        )


@dataclass
class SampleAttribute:
    category: str
    name: str
    statuses: Counter[str] = field(default_factory=Counter)
    values: int = 0  # those that were cut among them
    confidences: list[float] = field(default_factory=list)

    @property
    def shares(self) -> list[str]:
        """Of values, nulls, ambiguous ones, and all others: invalid, cut or unsure."""
        counts = [self.values, self.statuses["null"], self.statuses["ambiguous"]]
        total = self.statuses.total()
        return [share(count, total) for count in (*counts, total - sum(counts))]

    @property
    def median(self) -> str:
        return f"{statistics.median(self.confidences):.2f}" if self.confidences else NONE


@dataclass
class AnswerSample:
    """`rows` rows of some units; errors from the rows of `error_units` of the `failed_units` that
    have failures.
    """

    rows: int = 0
    documents: list[SampleDocument] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    attributes: dict[tuple[str, str], SampleAttribute] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)  # reason -> documents
    error_units: int = 0
    failed_units: int = 0
    retried: int = 0  # rows that took more than one attempt

    def add(self, row: Row) -> None:
        self.rows += 1
        self.retried += (row.get("attempts") or 1) > 1
        if row["status"] != "ok":
            return
        for value in row.get("values") or []:
            key = (str(row.get("category") or ""), str(value["name"]))
            attribute = self.attributes.setdefault(key, SampleAttribute(*key))
            attribute.statuses[str(value["status"])] += 1
            attribute.values += value["value"] is not None
            attribute.confidences += _in_range(value.get("confidence"))
            self.confidences += _in_range(value.get("confidence"))
        self.confidences += _in_range(row.get("confidence"))


def _in_range(confidence: float | None) -> list[float]:
    return [min(confidence, 1.0)] if confidence is not None and 0 <= confidence <= 1.001 else []


def read_sample(units: Sequence[CommittedUnit]) -> AnswerSample:
    """Reads the sample; objects that cannot be read are left out."""
    with_failures = [unit for unit in units if unit.failed]
    tables = [
        rows
        for rows in storage.in_threads(_rows, spread(units, _UNITS), _THREADS)
        if rows is not None
    ]
    chosen = storage.in_threads(failed_documents, spread(with_failures, _FAILED_UNITS), _THREADS)
    failures = [rows for rows in chosen if rows is not None]
    sample = AnswerSample(failed_units=len(with_failures), error_units=len(failures))
    for row in (row for rows in tables for row in rows):
        sample.add(row)
    sample.errors.update(
        dead_letters.normalize(row["source"], row["error"]) for rows in failures for row in rows
    )
    sample.documents = _documents([list(by_document(rows).values()) for rows in tables], failures)
    return sample


def _rows(unit: CommittedUnit) -> list[Row] | None:
    try:
        with storage.open_file(unit.path) as file:
            batches = pq.ParquetFile(file).iter_batches(batch_size=_ROWS)
            return [
                {**row, "unit": unit.unit}
                for row in next((writer.as_records(batch) for batch in batches), [])
            ]
    except (pa.ArrowException, OSError):
        return None


def failed_documents(unit: CommittedUnit) -> list[Row] | None:
    """A row of each; None where the unit's object cannot be read."""
    try:
        rows = dead_letters.error_rows(unit.path).to_pylist()
    except RunError:
        return None
    return [answers[-1] for answers in by_document(rows).values()]


def _documents(units: list[list[list[Row]]], failures: list[list[Row]]) -> list[SampleDocument]:
    failed = [
        row
        for rows in failures
        for row in rows[: max(1, _FAILED_DOCUMENTS // max(len(failures), 1))]
    ]
    failed = failed[:_FAILED_DOCUMENTS]
    failed_places = by_document(failed)
    limit = _DOCUMENTS - len(failed)
    each = -(-limit // max(len(units), 1))
    chosen = []
    for groups in units:
        chosen += spread(
            [rows for rows in groups if (rows[0]["source"], rows[0]["row"]) not in failed_places],
            each,
        )
    documents = list(map(document_of, [*([row] for row in failed), *spread(chosen, limit)]))
    sizes = itertools.accumulate(document.size for document in documents)
    shown = [
        document for document, size in zip(documents, sizes, strict=True) if size <= _CHARACTERS
    ]
    return sorted(shown, key=lambda d: (d.source, d.row))


def document_of(rows: list[Row]) -> SampleDocument:
    """A document of its rows; texts are cut and made harmless to read."""
    first = rows[0]
    entries = []
    for answer in (answer for row in rows for answer in row_values(row)):
        shown = answer.value if answer.value is not None else answer.raw
        if shown is None:
            value = None
        else:
            value = clean(shown, _VALUE_CHARACTERS if answer.name else _TEXT_CHARACTERS)
        name = clean(answer.name or answer.key, 200)
        entries.append(
            replace(answer, name=name, value=value, status=clean(answer.status, 40), raw=None)
        )
    errors = [row["error"] for row in rows if row.get("error")]
    return SampleDocument(
        id=clean(first["id"], 200),
        source=clean(first["source"], 200),
        row=int(first["row"]),
        status="ok" if all(row["status"] == "ok" for row in rows) else "error",
        error=clean(errors[0], 600) if errors else None,
        category=clean(first["category"], 100) if first.get("category") else None,
        attempts=max(int(row.get("attempts") or 1) for row in rows),
        truncated=any(bool(row.get("truncated")) for row in rows),
        entries=entries[:_ENTRIES],
        left_out=max(0, len(entries) - _ENTRIES),
        unit=first.get("unit", ""),
    )
