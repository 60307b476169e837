"""A plan: all units of a run, in chunks on disk or in the run's folder, read as a stream.

The folder <output>/plan contains:

* plan.json: totals, what the plan was made from, and the folder of its chunks. It is written last.
* <id>/<number>.parquet: the units.
* alone.json: names of files that must not share a unit, because a unit that they shared could not
  be read.
"""

import contextlib
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.dataset.unsplit import UnsplitObjects
from raypd.errors import RunError
from raypd.run import (
    LeftOutFiles,
    Part,
    TemporaryFolder,
    Unit,
    layout,
    make_unit,
    records,
    temporary_space,
)

# Parts of a chunk; while it is made or read, it takes tens of megabytes.
_CHUNK_PARTS = 20_000
_BATCH_UNITS = 64
_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    str | None: pa.string(),
    int: pa.int64(),
    int | None: pa.int64(),
    bool: pa.bool_(),
}
_PART = pa.struct([(column.name, _TYPES[column.type]) for column in fields(Part)])
_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "damaged": pa.string(),
        "only": pa.list_(pa.int32()),
        "parts": pa.list_(_PART),
    }
)


@dataclass
class PlanTotals:
    """plan/plan.json."""

    id: str
    units: int = 0
    # Of the units that can be read; counted if `exact`, otherwise partly estimated.
    documents: int = 0
    bytes: int = 0  # as stored
    exact: bool = True
    objects: int = 0
    damaged: int = 0  # units that cannot be read, one object each
    chunks: int = 0
    listing: str = ""  # digest of the objects' names, sizes and versions
    alone: int = 0  # objects in `alone.json`
    # Keys of the configuration that decide how objects are cut.
    cut: dict[str, Any] = field(default_factory=dict)
    version: int | None = None  # of a Delta or Iceberg table
    fingerprint: str = ""  # of the run; "": of a night or a retry
    empty: LeftOutFiles | None = None  # objects without a document, which are in no unit


class Plan:
    """The units of a run, in the order of the input. Iterating yields those that can be read.

    Args:
        totals: The record of the plan.
        folder: Where its chunks are.
        spool: The temporary folder of the chunks, until the plan is stored.
    """

    def __init__(
        self, totals: PlanTotals, folder: str, spool: TemporaryFolder | None = None
    ) -> None:
        self.totals = totals
        self._folder = folder
        self._spool = spool
        # These three exclude damaged units.
        self.units = totals.units
        self.documents = totals.documents
        self.bytes = totals.bytes
        # Whether `documents` is a count, or an estimate from the first lines of JSONL.
        self.exact = totals.exact
        # A description of the files that have changed since the last session's plan.
        self.changes = ""
        # Files that are not input, and input files without a document.
        self.left_out: list[LeftOutFiles] = []
        # Notes on large objects that cannot be split; only a newly made plan has them.
        self.unsplit: list[str] = []

    def __iter__(self) -> Iterator[Unit]:
        """Yield the units that can be read.

        Raises:
            RunError: A chunk is damaged.
            storage.Unavailable: The storage is out of reach.
        """
        return (unit for unit in self.all() if unit.damaged is None)

    def damaged(self) -> Iterator[Unit]:
        """Yield the units that cannot be read, each with its reason in `damaged`."""
        if not self.totals.damaged:
            return
        for unit in self.all():
            if unit.damaged is not None:
                yield unit

    def all(self) -> Iterator[Unit]:
        """Yield the units that can be read and those that cannot; raises as iterating does."""
        for number in range(self.totals.chunks):
            path = _chunk(self._folder, number)
            try:
                with storage.open_file(path) as file:
                    for batch in pq.ParquetFile(file).iter_batches(batch_size=_BATCH_UNITS):
                        yield from map(_unit, batch.to_pylist())
            except (pa.ArrowException, OSError, TypeError) as error:
                outage = storage.outage(error, path)
                if outage is not None:
                    raise outage from None
                raise RunError(
                    f"{path}: a part of the plan cannot be read: {error}; delete {self._folder} "
                    "and plan.json beside it, and the same command plans again"
                ) from None

    def keep(self, output: str) -> None:
        """Store the plan in the run's folder for later sessions, and delete all other plans there.

        The caller holds the lease on the run, so the other plans are those of earlier sessions,
        including killed ones.

        Raises:
            OSError: The plan cannot be stored.
        """
        if self._spool is not None:
            folder = storage.join(output, layout.PLAN, self.totals.id)
            for number in range(self.totals.chunks):
                storage.put(_chunk(folder, number), storage.read(_chunk(self._folder, number)))
            records.write(storage.join(output, layout.PLAN_TOTALS), self.totals)
            self._folder = folder
            self._spool = None
        plans = storage.join(output, layout.PLAN)
        # A user without the right to delete keeps the other plans.
        with contextlib.suppress(OSError):
            for name in storage.folders(plans):
                if name != self.totals.id:
                    storage.delete_folder(storage.join(plans, name))


def _unit(row: dict[str, Any]) -> Unit:
    """Return the unit of a row of a chunk."""
    parts = tuple(Part(**part) for part in row["parts"])
    only = row["only"]
    if only is not None:
        only = tuple(only)
    return Unit(row["id"], parts, row["damaged"], only)


def stored(output: str) -> Plan | None:
    """Return the plan that an earlier session has stored.

    Args:
        output: The run's folder.

    Returns:
        None if there is no plan, or only one whose writing was interrupted.
    """
    try:
        totals = records.read(PlanTotals, storage.join(output, layout.PLAN_TOTALS))
    except (FileNotFoundError, ValueError):
        return None
    return Plan(totals, storage.join(output, layout.PLAN, totals.id))


def alone(output: str) -> set[str]:
    """Return the names of files that must not share a unit, because one of them could not be read.

    Args:
        output: The run's folder.
    """
    try:
        return set(json.loads(storage.read(storage.join(output, layout.PLAN_ALONE))))
    except (FileNotFoundError, ValueError):
        return set()


def take_apart(output: str, plan: Plan, units: Sequence[Unit], fingerprint: str) -> list[Unit]:
    """Replace units of several files by units of one file each, now and in later sessions.

    Args:
        output: The run's folder.
        plan: The plan; its number of units is corrected.
        units: The units to replace.
        fingerprint: The fingerprint of the configuration.

    Returns:
        The units of one file each.
    """
    parts = [part for unit in units for part in unit.parts]
    names = alone(output) | {part.name for part in parts}
    storage.put(storage.join(output, layout.PLAN_ALONE), json.dumps(sorted(names)).encode())
    singles = [make_unit([part], fingerprint) for part in parts]
    plan.units += len(singles) - len(units)
    records.write(storage.join(output, layout.PLAN_TOTALS), replace(plan.totals, units=plan.units))
    return singles


def _chunk(folder: str, number: int) -> str:
    return storage.join(folder, f"{number:06d}.parquet")


class PlanWriter:
    """Makes a plan from units that are added one by one, in a temporary folder on this machine."""

    def __init__(self) -> None:
        self._spool = TemporaryFolder("plan")
        self._buffer: list[Unit] = []
        self._buffered_parts = 0
        self._totals = PlanTotals(uuid.uuid4().hex[:12])
        self._unsplit = UnsplitObjects()

    def add(self, unit: Unit) -> None:
        """Add a unit, which may be damaged."""
        totals = self._totals
        if unit.damaged is not None:
            totals.damaged += 1
        else:
            totals.units += 1
            totals.documents += unit.expected
            totals.bytes += unit.bytes
            totals.exact &= unit.rows is not None
            self._unsplit.add(unit)
        self._buffer.append(unit)
        self._buffered_parts += len(unit.parts)
        if self._buffered_parts >= _CHUNK_PARTS:
            self._flush()

    def _flush(self) -> None:
        """Write the buffered units as a chunk."""
        rows = []
        for unit in self._buffer:
            parts = [vars(part) for part in unit.parts]
            rows.append({**vars(unit), "parts": parts})
        path = _chunk(self._spool.path, self._totals.chunks)
        with temporary_space(OSError):
            pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), path, compression="zstd")
        self._totals.chunks += 1
        self._buffer = []
        self._buffered_parts = 0

    def finish(self, objects: int, listing: str, alone: int, cut: dict[str, Any]) -> Plan:
        """Return the plan of all units that were added.

        Args:
            objects: Files of the input.
            listing: Digest of the files; a later session with the same one keeps the plan.
            alone: How many files must not share a unit.
            cut: The keys of the configuration that cut files into parts.
        """
        if self._buffer:
            self._flush()
        totals = replace(self._totals, objects=objects, listing=listing, alone=alone, cut=cut)
        plan = Plan(totals, self._spool.path, self._spool)
        plan.unsplit = self._unsplit.notes()
        return plan
