"""A sample of the answers: documents to look at, how sure the model was, and why documents failed.

Units are chosen evenly over the run, the same at every call, and rows evenly within each. Units with failures are read
beside them, for the errors alone.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.report.text import clean
from raypd.verify import dead_letters

if TYPE_CHECKING:
    from raypd.report.data import Unit

UNITS = 60  # read whole or in part for answers
ROWS = 1024  # read of each
FAILED_UNITS = 200  # read for their errors
DOCUMENTS = 240  # to look at
FAILED_DOCUMENTS = 60  # of these
_CHARACTERS = 600_000  # of all documents together: the page stays small
_ENTRIES = 60  # values of one document
_VALUE_CHARACTERS = 400
_TEXT_CHARACTERS = 1500
_OWN = ("id", "status", "error", "source", "row", "attempts")
_HIDDEN = {*_OWN, "category", "record", "values", "truncated", "raw", "counters", "warnings", "tokens", "sample"}


@dataclass
class Entry:
    """One answer of a document. `confidence` is 0 to 1, None where the model gave none."""

    name: str
    value: str | None
    confidence: float | None
    status: str


@dataclass
class Document:
    """A document of the sample with its answers."""

    id: str
    source: str
    row: int
    status: str
    error: str | None
    category: str | None
    attempts: int
    truncated: bool
    entries: list[Entry]
    left_out: int = 0  # answers beyond those shown

    @property
    def confidence(self) -> float | None:
        """Of its least sure answer."""
        return min((e.confidence for e in self.entries if e.confidence is not None), default=None)


@dataclass
class Attribute:
    """What the sample says of one attribute of a category."""

    category: str
    name: str
    statuses: Counter[str] = field(default_factory=Counter)
    found: int = 0  # values, those that were cut among them
    confidences: list[float] = field(default_factory=list)


@dataclass
class Sample:
    """`rows` rows of `units` units; errors from the rows of `failed_units` of the units that have failures."""

    units: int = 0
    rows: int = 0
    documents: list[Document] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    attributes: dict[tuple[str, str], Attribute] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)  # reason -> documents
    error_units: int = 0
    failed_units: int = 0
    retried: int = 0  # rows that took more than one attempt
    unread: list[str] = field(default_factory=list)


def read_sample(units: Sequence[Unit], seed: str) -> Sample:
    """Reads the sample; objects that cannot be read are named in `unread`."""
    sample = Sample()
    chosen = _choose(units, UNITS, seed)
    failed = [u for u in units if u.failed]
    sample.failed_units = len(failed)
    chosen_failed = _choose(failed, FAILED_UNITS, seed)
    with ThreadPoolExecutor(16) as pool:
        tables = list(pool.map(_rows, chosen))
        errors = list(pool.map(lambda u: read_errors(u.path), chosen_failed))
    groups: list[list[list[dict[str, Any]]]] = []
    for unit, rows in zip(chosen, tables, strict=True):
        if rows is None:
            sample.unread.append(unit.path)
            continue
        sample.units += 1
        sample.rows += len(rows)
        sample.retried += sum((row.get("attempts") or 1) > 1 for row in rows)
        grouped = list(_by_document(rows))
        groups.append(grouped)
        for group in grouped:
            _count(sample, group)
    wanted_failures = []
    for unit, found in zip(chosen_failed, errors, strict=True):
        if found is None:
            sample.unread.append(unit.path)
            continue
        sample.error_units += 1
        sample.errors.update(dead_letters.normalize(row["source"], row["error"]) for row in found)
        wanted_failures.append(found)
    _take_documents(sample, groups, wanted_failures)
    return sample


def _choose(units: Sequence[Unit], most: int, seed: str) -> list[Unit]:
    """An even choice over the run with a start that the seed gives."""
    if len(units) <= most:
        return list(units)
    step = len(units) / most
    start = zlib.crc32(seed.encode()) / 2**32 * step
    return [units[int(start + i * step)] for i in range(most)]


def _rows(unit: Unit) -> list[dict[str, Any]] | None:
    try:
        with storage.open_file(unit.path) as file:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=ROWS):
                return batch.to_pylist()
        return []
    except (pa.ArrowException, OSError):
        return None


def read_errors(path: str) -> list[dict[str, Any]] | None:
    """The failed documents of a unit, each once."""
    try:
        with storage.open_file(path) as file:
            table = pq.ParquetFile(file).read(columns=list(_OWN))
    except (pa.ArrowException, OSError):
        return None
    found = {row["row"]: row for row in table.to_pylist() if row["status"] != "ok"}
    return list(found.values())


def _by_document(rows: Iterable[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """The rows of each document together: a document with questions or turns has several."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["source"], row["row"]), []).append(row)
    return groups.values()


# ------------------------------------------------------------------------------------------------------------- figures


def _count(sample: Sample, group: list[dict[str, Any]]) -> None:
    for row in group:
        category = str(row.get("category") or "")
        if row["status"] != "ok":
            continue
        for value in row.get("values") or []:
            key = (category, str(value["name"]))
            attribute = sample.attributes.setdefault(key, Attribute(*key))
            attribute.statuses[str(value["status"])] += 1
            attribute.found += value["value"] is not None
            _add_confidence(sample, value.get("confidence"), attribute)
        if "confidence" in row:
            _add_confidence(sample, row["confidence"], None)


def _add_confidence(sample: Sample, confidence: float | None, attribute: Attribute | None) -> None:
    if confidence is None or not 0 <= confidence <= 1.001:
        return
    sample.confidences.append(min(float(confidence), 1.0))
    if attribute is not None:
        attribute.confidences.append(float(confidence))


# ----------------------------------------------------------------------------------------------------------- documents


def _take_documents(
    sample: Sample, groups: list[list[list[dict[str, Any]]]], failures: list[list[dict[str, Any]]]
) -> None:
    """Some of every unit in turn, until there are enough or the page would grow too large; failures beside them."""
    failed = [row for rows in failures for row in rows[: max(1, FAILED_DOCUMENTS // max(len(failures), 1))]]
    failed = failed[:FAILED_DOCUMENTS]
    seen = {(row["source"], row["row"]) for row in failed}
    most = DOCUMENTS - len(failed)
    size = 0
    for group in [*([row] for row in failed), *_in_turn(groups, most, seen)]:
        document = document_of(group)
        size += 60 + sum(len(e.name) + len(e.value or "") + 20 for e in document.entries) + len(document.error or "")
        if size > _CHARACTERS:
            break
        sample.documents.append(document)
    sample.documents.sort(key=lambda d: (d.source, d.row))


def _in_turn(
    groups: list[list[list[dict[str, Any]]]], most: int, seen: set[tuple[str, int]]
) -> list[list[dict[str, Any]]]:
    """An even choice of every unit's documents, as many of each as make `most` together."""
    if not groups:
        return []
    each = -(-most // len(groups))
    taken = []
    for group in groups:
        left = [rows for rows in group if (rows[0]["source"], rows[0]["row"]) not in seen]
        taken += [left[i * len(left) // min(each, len(left))] for i in range(min(each, len(left)))]
    if len(taken) > most:
        taken = [taken[i * len(taken) // most] for i in range(most)]
    return taken


def document_of(rows: list[dict[str, Any]]) -> Document:
    """A document of its rows; texts are cut and made harmless to read."""
    first = rows[0]
    entries = [entry for row in rows for entry in _entries(row)]
    errors = [row["error"] for row in rows if row.get("error")]
    return Document(
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
    )


def _entries(row: dict[str, Any]) -> list[Entry]:
    """The answers of a row, whatever kind of task it is of."""
    if row.get("status") != "ok":
        return []
    if "values" in row:
        return [
            _entry(v["name"], v["value"] if v["value"] is not None else v.get("raw"), v["confidence"], v["status"])
            for v in row["values"] or []
        ]
    confidence = row.get("confidence")
    if "question" in row:
        return [_entry(row["question"], row["answer"], confidence, row.get("answer_status") or "ok")]
    if "text" in row:
        status = "truncated" if row.get("finish_reason") == "length" else "ok"
        name = f"turn {row.get('turn') or 0}, sample {row.get('sample') or 0}"
        return [_entry(name, row["text"], confidence, status, _TEXT_CHARACTERS)]
    return [_entry(name, _plain(value), None, "ok") for name, value in row.items() if name not in _HIDDEN]


def _entry(name: Any, value: Any, confidence: float | None, status: Any, most: int = _VALUE_CHARACTERS) -> Entry:
    shown = None if value is None else clean(value, most)
    return Entry(clean(name, 200), shown, confidence, clean(status or ("null" if value is None else "ok"), 40))


def _plain(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
