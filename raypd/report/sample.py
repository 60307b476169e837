"""A sample of the answers: documents, confidences, and the reasons for failures.

Every call draws the same sample.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from raypd import storage
from raypd.dataset import writer
from raypd.errors import RunError
from raypd.report.units import CommittedUnit
from raypd.run import by_document, failure_reasons, spread
from raypd.tasks import Row, RowValue, row_values
from raypd.text import NONE, clean, share
from raypd.verify import dead_letters

# The maximum number of units that are read for answers, and of rows in each.
_UNITS = 60
_ROWS = 1024
# The maximum number of units that are read for errors.
_FAILED_UNITS = 200
# The maximum number of documents that are shown, and how many of them may have failed.
_DOCUMENTS = 240
_FAILED_DOCUMENTS = 60
# The maximum number of characters of all documents together, which keeps the page small.
_CHARACTERS = 600_000
# The maximum number of values per document.
_ENTRIES = 60
_VALUE_CHARACTERS = 400
_TEXT_CHARACTERS = 1500
_THREADS = 16
# The maximum number of distinct values of an attribute that are counted.
_DISTINCT = 5000


@dataclass
class SampleDocument:
    """A document that the page shows."""

    id: str
    source: str
    row: int
    status: str
    error: str | None
    category: str | None
    attempts: int
    truncated: bool
    # The answers, whose texts are cut and harmless.
    entries: list[RowValue]
    # The number of answers that are not shown.
    left_out: int = 0
    unit: str = ""
    # With `raypd report --texts`, the text in pieces, each with the names of the values in it, or
    # "".
    text: list[tuple[str, str]] = field(default_factory=list)

    @property
    def confidence(self) -> float | None:
        """The confidence of its least certain answer."""
        confidences = [entry.confidence for entry in self.entries if entry.confidence is not None]
        return min(confidences, default=None)

    @property
    def size(self) -> int:
        """The approximate number of characters that it takes up on the page."""
        size = 60 + len(self.error or "")
        for entry in self.entries:
            size += len(entry.name) + len(entry.value or "") + 20
        return size


@dataclass
class SampleAttribute:
    """The sampled values of an attribute."""

    category: str
    name: str
    statuses: Counter[str] = field(default_factory=Counter)
    confidences: list[float] = field(default_factory=list)
    # The values as text, and those of them that do not occur in their documents; at most _DISTINCT
    # distinct ones.
    texts: Counter[str] = field(default_factory=Counter)
    texts_elsewhere: Counter[str] = field(default_factory=Counter)

    def add(self, value: Row) -> None:
        """Count a value, which is a row of the column `values`."""
        self.statuses[str(value["status"])] += 1
        self.confidences += _in_range(value.get("confidence"))
        if value["value"] is None:
            return
        stands = value.get("span") is not None
        for text in _items(value["value"]):
            if text not in self.texts and len(self.texts) >= _DISTINCT:
                continue
            self.texts[text] += 1
            if not stands:
                self.texts_elsewhere[text] += 1

    @property
    def shares(self) -> list[str]:
        """The shares of values, nulls, cut and ambiguous ones, and the others: invalid or
        unsure.
        """
        named = [self.statuses[status] for status in ("ok", "null", "truncated", "ambiguous")]
        total = self.statuses.total()
        return [share(count, total) for count in [*named, total - sum(named)]]

    @property
    def median(self) -> str:
        if not self.confidences:
            return NONE
        return f"{statistics.median(self.confidences):.2f}"


@dataclass
class AnswerSample:
    """The sample of a run.

    Attributes:
        rows: Rows that were read for answers.
        documents: Documents to show.
        confidences: The confidences of all answers.
        attributes: The sampled values by (category, attribute).
        errors: Reason -> number of documents.
        error_units: The number of units that were read for errors.
        failed_units: The number of units that have failed documents.
        retried: The number of rows that took more than one attempt.
    """

    rows: int = 0
    documents: list[SampleDocument] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    attributes: dict[tuple[str, str], SampleAttribute] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    error_units: int = 0
    failed_units: int = 0
    retried: int = 0

    def add(self, row: Row) -> None:
        """Count the answers of a row."""
        self.rows += 1
        self.retried += (row.get("attempts") or 1) > 1
        if row["status"] != "ok":
            return
        for value in row.get("values") or []:
            key = (str(row.get("category") or ""), str(value["name"]))
            attribute = self.attributes.setdefault(key, SampleAttribute(*key))
            attribute.add(value)
            self.confidences += _in_range(value.get("confidence"))
        self.confidences += _in_range(row.get("confidence"))


def _items(value: str) -> list[str]:
    """Return the distinct texts of a value, which may be a list in JSON."""
    if not value.startswith("["):
        return [value]
    try:
        items = json.loads(value)
    except ValueError:
        return [value]
    texts: dict[str, None] = {}
    for item in items:
        if not isinstance(item, str):
            return [value]
        texts[item] = None
    return [*texts]


def _in_range(confidence: float | None) -> list[float]:
    """Return a confidence as a list, which is empty if it is not between 0 and 1."""
    if confidence is None or not 0 <= confidence <= 1.001:
        return []
    return [min(confidence, 1.0)]


def read_sample(units: Sequence[CommittedUnit]) -> AnswerSample:
    """Read the sample of a run; objects that cannot be read are left out."""
    with_failures = [unit for unit in units if unit.failed]
    answer_tables = storage.in_threads(_unit_rows, spread(units, _UNITS), _THREADS)
    tables = [rows for rows in answer_tables if rows is not None]
    error_tables = storage.in_threads(
        failed_documents, spread(with_failures, _FAILED_UNITS), _THREADS
    )
    failures = [rows for rows in error_tables if rows is not None]
    sample = AnswerSample(failed_units=len(with_failures), error_units=len(failures))
    for rows in tables:
        for row in rows:
            sample.add(row)
    for rows in failures:
        for row in rows:
            sample.errors[failure_reasons.normalize(row["source"], row["error"])] += 1
    sample.documents = _documents([list(by_document(rows).values()) for rows in tables], failures)
    return sample


def _unit_rows(unit: CommittedUnit) -> list[Row] | None:
    """Return the first rows of a unit; None if its object cannot be read."""
    rows = first_rows(unit.path, _ROWS)
    if rows is None:
        return None
    return [{**row, "unit": unit.unit} for row in rows]


def first_rows(path: str, limit: int) -> list[Row] | None:
    """Return the first rows of a committed unit; None if it cannot be read.

    Args:
        path: The unit's object, or its object before a compaction.
        limit: The maximum number of rows to read.
    """
    try:
        return writer.read_rows("", "", limit, path)
    except (RunError, OSError):
        return None


def failed_documents(unit: CommittedUnit) -> list[Row] | None:
    """Return a row of each failed document; None if the unit's object cannot be read."""
    try:
        rows = dead_letters.error_rows(unit.path).to_pylist()
    except RunError:
        return None
    return [answers[-1] for answers in by_document(rows).values()]


def _documents(units: list[list[list[Row]]], failures: list[list[Row]]) -> list[SampleDocument]:
    """Choose the documents to show.

    Args:
        units: The rows of each document, for each unit.
        failures: A row of each failed document, for each unit with failures.
    """
    failed: list[Row] = []
    failed_per_unit = max(1, _FAILED_DOCUMENTS // max(len(failures), 1))
    for rows in failures:
        failed += rows[:failed_per_unit]
    failed = failed[:_FAILED_DOCUMENTS]
    failed_positions = by_document(failed)
    limit = _DOCUMENTS - len(failed)
    candidates = []
    for groups in units:
        candidates.append(
            [rows for rows in groups if (rows[0]["source"], rows[0]["row"]) not in failed_positions]
        )
    chosen: list[list[Row]] = []
    # Larger units may use the part of the share that smaller units leave free.
    candidates.sort(key=len)
    for number, rows_of_unit in enumerate(candidates):
        share = math.ceil((limit - len(chosen)) / (len(candidates) - number))
        chosen += spread(rows_of_unit, max(share, 0))
    shown = []
    size = 0
    for rows in [*([row] for row in failed), *spread(chosen, limit)]:
        document = document_of(rows)
        size += document.size
        if size <= _CHARACTERS:
            shown.append(document)
    return sorted(shown, key=lambda document: (document.source, document.row))


def document_of(rows: list[Row]) -> SampleDocument:
    """Return a document from its rows, with texts that are cut and harmless to read."""
    first = rows[0]
    entries = [_entry(answer) for row in rows for answer in row_values(row)]
    errors = [row["error"] for row in rows if row.get("error")]
    document = SampleDocument(
        id=clean(first["id"], 200),
        source=clean(first["source"], 200),
        row=int(first["row"]),
        status="error",
        error=None,
        category=None,
        attempts=max(int(row.get("attempts") or 1) for row in rows),
        truncated=any(bool(row.get("truncated")) for row in rows),
        entries=entries[:_ENTRIES],
        left_out=max(0, len(entries) - _ENTRIES),
        unit=first.get("unit", ""),
    )
    if all(row["status"] == "ok" for row in rows):
        document.status = "ok"
    if errors:
        document.error = clean(errors[0], 600)
    if first.get("category"):
        document.category = clean(first["category"], 100)
    return document


def _entry(answer: RowValue) -> RowValue:
    """Return an answer with texts that are cut and harmless; without a value, its decoded text."""
    value = answer.value
    if value is None:
        value = answer.raw
    if value is not None:
        limit = _TEXT_CHARACTERS
        if answer.name:
            limit = _VALUE_CHARACTERS
        value = clean(value, limit)
    name = clean(answer.name or answer.key, 200)
    return replace(answer, name=name, value=value, status=clean(answer.status, 40), raw=None)
