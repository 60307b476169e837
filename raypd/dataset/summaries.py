"""What the committed units of a run contain, in a few files.

Every unit's object has its summary in its footer. The driver also appends the summaries to files of
about ten thousand units each, so that the end of a run and the commands that look at it need not
open every object. A row of such a file counts only while the listing of the units shows the object
in the version that the row names. Units without such a row are read from their footers. The
summaries of units in table files (`compacted`) are stored beside these files.
"""

import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import raypd.dataset.writer as writer
from raypd import storage
from raypd.dataset.committed import CommittedUnits, unit_objects
from raypd.dataset.digests import digest, unit_id_of
from raypd.dataset.summary_rows import (
    COUNTS,
    SCHEMA,
    USAGE,
    path_of as path_of,
    row_of,
    summary_of as summary_of,
    with_columns,
)
from raypd.run import (
    SUMMED,
    Commit,
    FailureReason,
    SessionUnits,
    UnitSummary,
    UnitTotals,
    UsageKey,
    layout,
)

# Units of a file. A file with fewer units is written after this many seconds.
_FILE_UNITS = 10_000
_FILE_SECONDS = 600.0
_CHUNK_UNITS = 500  # summaries that are held as objects
_THREADS = 32


class SummaryWriter:
    """Appends the summaries of units that were just committed to files.

    Nothing is lost if it ends without `flush`, or if a file cannot be written: the footers of the
    units contain the same data.

    Args:
        output: The run's folder.
    """

    def __init__(self, output: str) -> None:
        self._output = output
        self._id = uuid.uuid4().hex[:12]
        self._files = 0
        self._rows: list[dict[str, Any]] = []
        self._tables: list[pa.Table] = []
        self._units = 0
        self._flushed = time.monotonic()

    def add(self, commit: Commit) -> None:
        """Append the summary of a unit."""
        self._rows.append(row_of(commit))
        self._units += 1
        if len(self._rows) >= _CHUNK_UNITS:
            self._pack()
        if self._units >= _FILE_UNITS or time.monotonic() - self._flushed > _FILE_SECONDS:
            self.flush()

    def _pack(self) -> None:
        """Convert the rows to a table, which takes less memory."""
        self._tables.append(pa.Table.from_pylist(self._rows, SCHEMA))
        self._rows = []

    def flush(self) -> None:
        """Write what was appended since the last file."""
        self._flushed = time.monotonic()
        if not self._units:
            return
        self._pack()
        path = storage.join(self._output, layout.SUMMARIES, f"{self._id}-{self._files:06d}.parquet")
        sink = pa.BufferOutputStream()
        pq.write_table(
            pa.concat_tables(self._tables), sink, compression="zstd", write_page_checksum=True
        )
        with contextlib.suppress(OSError):
            storage.put(path, sink.getvalue().to_pybytes())
        self._files += 1
        self._tables = []
        self._units = 0


def read(units: CommittedUnits, keep: bool = False) -> Iterator[pa.Table]:
    """Yield the summaries of committed units, each unit once, in no particular order.

    Args:
        units: The units.
        keep: Whether to store the summaries that no file has. The caller holds the run's lease.

    Yields:
        Tables of SCHEMA with at least one row.

    Raises:
        Damaged: A unit's object is damaged.
        RunError: Storage is out of reach.
    """
    seen = none_seen(units)
    yield from stored(units, seen)
    summary_writer = SummaryWriter(units.output)
    for items in _batches(unseen(units, seen), _FILE_UNITS):
        rows = []
        for commit in storage.in_threads(of_footer, items, _THREADS):
            rows.append(row_of(commit))
            if keep:
                summary_writer.add(commit)
        yield pa.Table.from_pylist(rows, SCHEMA)
    if keep:
        summary_writer.flush()


def none_seen(units: CommittedUnits) -> np.ndarray:
    """Return the `seen` of `stored` and `unseen` before any unit was seen, [objects] of bool."""
    return np.zeros(len(units.versions), dtype=bool)


def stored(units: CommittedUnits, seen: np.ndarray) -> Iterator[pa.Table]:
    """Yield the summaries that are in files, and mark their units as seen.

    Args:
        units: The units.
        seen: What `none_seen` returned; it is modified.
    """
    if units.table is not None:
        for table in units.table.unit_rows():
            positions = units.versions.positions(table["version_digest"].to_numpy())
            seen[positions] = True
            yield table.select(SCHEMA.names)
    folder = storage.join(units.output, layout.SUMMARIES)
    paths = [storage.join(folder, name) for name in storage.names(folder)]
    for table in storage.in_threads(_read_file, paths, 2):
        if table is None:
            continue
        keys = zip(table["name"].to_pylist(), table["stamp"].to_pylist(), strict=True)
        digests = np.fromiter((digest(*key) for key in keys), dtype=np.uint64)
        positions = units.versions.positions(digests)
        # The same unit may be in two files, or twice in one.
        _, first_rows = np.unique(positions, return_index=True)
        is_first = np.zeros(len(positions), dtype=bool)
        is_first[first_rows] = True
        counts = (positions >= 0) & is_first
        counts[counts] = ~seen[positions[counts]]
        seen[positions[counts]] = True
        if counts.all():
            yield table
        elif counts.any():
            yield table.filter(pa.array(counts))


def _read_file(path: str) -> pa.Table | None:
    """Read a file of summaries; None if it is damaged or gone, and the footers are read instead."""
    try:
        with storage.open_file(path) as file:
            table = pq.ParquetFile(file, page_checksum_verification=True).read()
    except (pa.ArrowException, OSError) as error:
        outage = storage.outage(error, path)
        if outage is not None:
            raise outage from None
        return None
    return with_columns(table, SCHEMA)


def unseen(units: CommittedUnits, seen: np.ndarray) -> Iterator[storage.Object]:
    """Yield the objects of the units that were not seen yet, after a new listing.

    Args:
        units: The units.
        seen: As `stored` left it; it is modified.
    """
    if seen.all():
        return
    for item in unit_objects(units.output):
        position = units.versions.positions(np.array([digest(item.name, item.stamp)], np.uint64))
        # An object that the first listing did not show was committed or replaced since.
        if position[0] >= 0 and not seen[position[0]]:
            seen[position[0]] = True
            yield item


def of_footer(item: storage.Object) -> Commit:
    """Read the summary of a unit from its object; raises as `writer.read_summary` does."""
    unit_id = unit_id_of(item.name)
    try:
        summary = writer.read_summary("", unit_id, item.path, item)
    except storage.Changed:
        # A retry has replaced it since it was listed. The old stamp is never seen again.
        summary = writer.read_summary("", unit_id, item.path)
    return Commit(summary, item.name, item.stamp)


def _batches(items: Iterable[storage.Object], size: int) -> Iterator[list[storage.Object]]:
    batch: list[storage.Object] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def totals(tables: Iterable[pa.Table]) -> UnitTotals:
    """Add up summaries.

    Args:
        tables: Tables of SCHEMA.
    """
    result = UnitTotals()
    for table in tables:
        add(result, table)
    return result


def add(result: UnitTotals, table: pa.Table) -> None:
    """Add a table of summaries to totals."""
    named = table.group_by("fingerprint").aggregate([("unit", "min")])
    for row in named.to_pylist():
        result.fingerprints.setdefault(row["fingerprint"], row["unit_min"])
    columns = {name: table[name] for name in ("session", "committed_at", *SUMMED)}
    counts = table["counts"].combine_chunks()
    for kind in COUNTS:
        columns[kind] = pc.struct_field(counts, kind)
    aggregates = [(name, "sum") for name in (*SUMMED, *COUNTS)]
    aggregates += [("session", "count"), ("committed_at", "max")]
    for row in pa.table(columns).group_by("session").aggregate(aggregates).to_pylist():
        session = SessionUnits(units=row["session_count"], last_commit=row["committed_at_max"])
        for name in SUMMED:
            setattr(session, name, row[f"{name}_sum"] or 0)
        session.counts = {kind: row[f"{kind}_sum"] or 0 for kind in COUNTS}
        result.sessions[row["session"]].add(session)
    _add_usage(result, table)
    failed = table.filter(pc.greater(table["failed"], 0))["reasons"]
    for reasons in failed.to_pylist():
        result.add_reasons(FailureReason(**reason) for reason in reasons or [])


def _add_usage(result: UnitTotals, table: pa.Table) -> None:
    usage = table["categories"].combine_chunks()
    rows = pc.list_flatten(usage)
    if not len(rows):
        return
    columns = {"session": table["session"].combine_chunks().take(pc.list_parent_indices(usage))}
    for name in USAGE:
        columns[name] = pc.struct_field(rows, name)
    kinds = [name for name in USAGE if name not in ("category", "model")]
    grouped = pa.table(columns).group_by(["session", "category", "model"])
    for row in grouped.aggregate([(kind, "sum") for kind in kinds]).to_pylist():
        key = UsageKey(row["category"], row["model"])
        counts = {kind: row[f"{kind}_sum"] for kind in kinds}
        result.sessions[row["session"]].add(SessionUnits(usage={key: counts}))


def spread(
    tables: Iterable[pa.Table], total: int, limit: int, offset: int = 0
) -> Iterator[pa.Table]:
    """Yield at most `limit` rows of some tables, evenly spaced.

    Args:
        tables: Tables.
        total: The number of rows of all tables together.
        limit: The largest number of rows to yield.
        offset: The number of rows of earlier tables.
    """
    step = max(1, -(-total // limit))
    for table in tables:
        rows = np.arange(-offset % step, len(table), step)
        offset += len(table)
        if len(rows):
            yield table.take(pa.array(rows))


def failed_names(tables: Iterable[pa.Table]) -> Iterator[str]:
    """Yield the names of the objects that have failed documents."""
    for table in tables:
        yield from table.filter(pc.greater(table["failed"], 0))["name"].to_pylist()


def some(output: str, limit: int) -> list[UnitSummary]:
    """Return the summaries of some of a run's committed units, evenly spaced.

    Args:
        output: The run's folder.
        limit: The largest number of units.

    Raises:
        Damaged: A unit's object is damaged.
        RunError: Storage is out of reach.
    """
    units = CommittedUnits(output)
    chosen = spread(read(units), units.objects, limit)
    return [summary_of(row) for table in chosen for row in table.to_pylist()]
