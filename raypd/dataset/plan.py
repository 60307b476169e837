"""A plan: all units of a run, in chunks on disk or in the run's folder, read as a stream.

In <output>/plan: plan.json (totals, what it was made from, the folder of its chunks; written last),
<id>/<number>.parquet (the units), alone.json (objects that share no unit, where a unit of several
could not be read).
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
from raypd.errors import RunError
from raypd.run import layout, records
from raypd.run.left_out import LeftOutFiles
from raypd.run.temporary import TemporaryFolder, temporary_space
from raypd.run.unit import Part, Unit, make_unit

_CHUNK_PARTS = 20_000  # parts of a chunk: some tens of megabytes while it is made or read
_BATCH_UNITS = 64
_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    str | None: pa.string(),
    int: pa.int64(),
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
    # Of the units that can be read; counted where `exact`, else partly estimated.
    documents: int = 0
    bytes: int = 0  # as stored
    exact: bool = True
    objects: int = 0
    damaged: int = 0  # units that cannot be read, one object each
    chunks: int = 0
    listing: str = ""  # digest of the objects' names, sizes and versions
    alone: int = 0  # objects that share no unit, because one of their unit could not be read
    # Keys of the configuration that decide how objects are cut.
    cut: dict[str, Any] = field(default_factory=dict)
    version: int | None = None  # of a Delta or Iceberg table
    fingerprint: str = ""  # of the run; "": of a night or a retry
    empty: LeftOutFiles | None = None  # objects without a document, which are in no unit


class Plan:
    """Iterates over its units in the input's order; `units`, `documents`, `bytes` leave damaged
    ones out.
    """

    def __init__(
        self, totals: PlanTotals, folder: str, spool: TemporaryFolder | None = None
    ) -> None:
        self.totals, self._folder, self._spool = totals, folder, spool  # spool: until it is stored
        self.units, self.documents, self.bytes = totals.units, totals.documents, totals.bytes
        # Whether `documents` is a count, or an estimate from the first lines of JSONL.
        self.exact = totals.exact
        # Objects that are not what they were in the last session's plan, in words.
        self.changes = ""
        # Files beside the input's objects, and objects without a document.
        self.left_out: list[LeftOutFiles] = []

    def __iter__(self) -> Iterator[Unit]:
        """The units that can be read.

        Raises RunError when a chunk is damaged; storage.Unavailable.
        """
        return (unit for unit in self.all() if unit.damaged is None)

    def damaged(self) -> Iterator[Unit]:
        """The units that cannot be read, each with its reason in `damaged`."""
        return (
            (unit for unit in self.all() if unit.damaged is not None)
            if self.totals.damaged
            else iter(())
        )

    def all(self) -> Iterator[Unit]:
        for number in range(self.totals.chunks):
            path = _chunk(self._folder, number)
            try:
                with storage.open_file(path) as file:
                    for batch in pq.ParquetFile(file).iter_batches(batch_size=_BATCH_UNITS):
                        for row in batch.to_pylist():
                            parts = tuple(Part(**part) for part in row["parts"])
                            only = None if row["only"] is None else tuple(row["only"])
                            yield Unit(row["id"], parts, row["damaged"], only)
            except (pa.ArrowException, OSError, TypeError) as error:
                if outage := storage.outage(error, path):
                    raise outage from None
                advice = (
                    f"delete {self._folder} and plan.json beside it, and the same command "
                    "plans again"
                )
                raise RunError(
                    f"{path}: a part of the plan cannot be read: {error}; {advice}"
                ) from None

    def keep(self, output: str) -> None:
        """Store the plan in the run's folder for later sessions, and delete all other plans there.

        The caller holds the run, so that the other plans are those of earlier sessions, also of
        killed ones.

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
        with contextlib.suppress(OSError):  # no right to delete is needed
            for name in storage.folders(plans):
                if name != self.totals.id:
                    storage.delete_folder(storage.join(plans, name))


def stored(output: str) -> Plan | None:
    """The plan that a session before has stored in a run's folder; None where there is none that
    can be read.
    """
    try:
        totals = records.read(PlanTotals, storage.join(output, layout.PLAN_TOTALS))
    except (FileNotFoundError, ValueError):
        return None  # where it is torn it is made again
    return Plan(totals, storage.join(output, layout.PLAN, totals.id))


def alone(output: str) -> set[str]:
    """Names of the objects that are to share no unit, so that an unreadable one keeps no other from
    being done.
    """
    try:
        return set(json.loads(storage.read(storage.join(output, layout.PLAN_ALONE))))
    except (FileNotFoundError, ValueError):
        return set()


def take_apart(output: str, plan: Plan, units: Sequence[Unit], fingerprint: str) -> list[Unit]:
    """Units of one object each in place of these units of several, now and in later sessions; the
    plan counts them.
    """
    names = alone(output) | {part.name for unit in units for part in unit.parts}
    storage.put(storage.join(output, layout.PLAN_ALONE), json.dumps(sorted(names)).encode())
    singles = [make_unit([part], fingerprint) for unit in units for part in unit.parts]
    plan.units += len(singles) - len(units)
    records.write(storage.join(output, layout.PLAN_TOTALS), replace(plan.totals, units=plan.units))
    return singles


def _chunk(folder: str, number: int) -> str:
    return storage.join(folder, f"{number:06d}.parquet")


class PlanWriter:
    """Takes units one by one and makes a plan of them, in a folder of its own on this machine."""

    def __init__(self) -> None:
        self._spool = TemporaryFolder("plan")
        self._waiting: list[Unit] = []
        self._parts = 0
        self._totals = PlanTotals(uuid.uuid4().hex[:12])

    def add(self, unit: Unit) -> None:
        totals = self._totals
        if unit.damaged is not None:
            totals.damaged += 1
        else:
            totals.units += 1
            totals.documents += unit.expected
            totals.bytes += unit.bytes
            totals.exact &= unit.rows is not None
        self._waiting.append(unit)
        self._parts += len(unit.parts)
        if self._parts >= _CHUNK_PARTS:
            self._flush()

    def _flush(self) -> None:
        rows = [
            {**vars(unit), "parts": [vars(part) for part in unit.parts]} for unit in self._waiting
        ]
        path = _chunk(self._spool.path, self._totals.chunks)
        with temporary_space(OSError):
            pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), path, compression="zstd")
        self._totals.chunks += 1
        self._waiting, self._parts = [], 0

    def finish(self, objects: int, listing: str, alone: int, cut: dict[str, Any]) -> Plan:
        """The plan of all units that were added, of `objects` listed ones, of which `alone` share
        no unit. listing: digest of these; a later session with the same one keeps the plan. cut:
        the keys that cut objects.
        """
        if self._waiting:
            self._flush()
        totals = replace(self._totals, objects=objects, listing=listing, alone=alone, cut=cut)
        return Plan(totals, self._spool.path, self._spool)
