"""The committed units of a run: totals, and a selection of the units themselves."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.dataset import CommittedUnits, summaries
from raypd.errors import RunError
from raypd.run import Commit, UnitSummary, UnitTotals

# If there are more units, an even selection is kept, and the footers of an even selection are read.
READ_UNITS = 20_000
_THREADS = 32
# The number of the newest units with failed documents that are kept.
_LAST_FAILURES = 8


@dataclass
class CommittedUnit(UnitSummary):
    """The summary of a unit, and the path of its object."""

    path: str = ""


@dataclass
class Units:
    """All committed units of some runs.

    Attributes:
        read: The units, or an even selection of them, oldest first.
        committed: The number of all committed units.
        damaged: The paths of damaged objects.
        counted: The number of units in `totals`.
        totals: The totals of these units.
        last_failures: The newest units with failed documents, newest first.
    """

    read: list[CommittedUnit] = field(default_factory=list)
    committed: int = 0
    damaged: list[str] = field(default_factory=list)
    counted: int = 0
    totals: UnitTotals = field(default_factory=UnitTotals)
    last_failures: list[CommittedUnit] = field(default_factory=list)

    @property
    def scale(self) -> float:
        """The number of units that each unit of `read` represents."""
        return self._per(len(self.read))

    @property
    def counted_scale(self) -> float:
        """The number of units that each counted unit represents."""
        return self._per(self.counted)

    def _per(self, units: int) -> float:
        if not units:
            return 1.0
        return (self.committed - len(self.damaged)) / units

    @property
    def all_read(self) -> bool:
        """Whether the totals are exact."""
        return self.counted + len(self.damaged) == self.committed

    def total(self, name: str) -> int:
        """Return the total of a field of the summaries, such as documents, ok or failed."""
        return round(self.totals.total(name) * self.counted_scale)

    def tokens(self, kind: str) -> int:
        """Return the total of one kind of tokens."""
        return round(self.totals.tokens(kind) * self.counted_scale)

    def add(self, units: Iterable[CommittedUnit]) -> None:
        """Count units, and keep them."""
        for unit in units:
            self.totals.add_summary(unit)
            self.counted += 1
            self.read.append(unit)
            if unit.failed:
                self._add_failures([unit])

    def add_table(self, table: pa.Table, output: str, chosen: Iterable[pa.Table]) -> None:
        """Count the units of a table of summaries.

        Args:
            table: The table.
            output: The folder of the run.
            chosen: Some of its rows, whose units are kept.
        """
        summaries.add(self.totals, table)
        self.counted += len(table)
        for rows in chosen:
            self.read += _units_of(rows, output)
        failed = table.filter(pc.greater(table["failed"], 0))
        newest = failed.sort_by([("committed_at", "descending")]).slice(0, _LAST_FAILURES)
        self._add_failures(_units_of(newest, output))

    def _add_failures(self, units: Sequence[CommittedUnit]) -> None:
        self.last_failures = nlargest(
            _LAST_FAILURES, [*self.last_failures, *units], key=lambda unit: unit.committed_at
        )


def _units_of(table: pa.Table, output: str) -> list[CommittedUnit]:
    units = []
    for row in table.to_pylist():
        path = summaries.path_of(output, row["name"])
        units.append(CommittedUnit(**vars(summaries.summary_of(row)), path=path))
    return units


class UnitReader:
    """Reads the units of some runs, once or repeatedly.

    It keeps the summaries that it has read from footers for the next time.

    Args:
        footers: How many footers are read at a time; None for READ_UNITS. If more units are in no
            file of summaries, an even selection is read, and their figures are scaled up.
    """

    def __init__(self, footers: int | None = None) -> None:
        self._footers = footers or READ_UNITS
        # (path, stamp) -> the summary; None if the object is damaged.
        self._summaries: dict[tuple[str, str], CommittedUnit | None] = {}

    def read(self, runs: Sequence[CommittedUnits]) -> Units:
        """Read the units of some runs. Damaged objects are listed, but not counted."""
        result = Units(committed=sum(run.objects for run in runs))
        unread = 0
        missing = []
        for run in runs:
            seen = summaries.none_seen(run)
            offset = 0
            for table in summaries.stored(run, seen):
                chosen = summaries.spread([table], result.committed, READ_UNITS, offset)
                result.add_table(table, run.output, chosen)
                offset += len(table)
            missing.append((run, seen))
            unread += int((~seen).sum())
        items = (item for run, seen in missing for item in summaries.unseen(run, seen))
        for unit, path in self._of_footers(items, unread):
            if unit is None:
                result.damaged.append(path)
            else:
                result.add([unit])
        result.read.sort(key=lambda unit: unit.committed_at)
        return result

    def _of_footers(
        self, items: Iterable[storage.Object], count: int
    ) -> Iterator[tuple[CommittedUnit | None, str]]:
        """Yield what is known about units after reading some footers.

        Args:
            items: The objects of the units.
            count: The number of objects.
        """
        step = max(1, -(-(count - len(self._summaries)) // self._footers))
        current: dict[tuple[str, str], CommittedUnit | None] = {}
        new = []
        unread = 0
        for item in items:
            key = (item.path, item.stamp)
            if key in self._summaries:
                current[key] = self._summaries[key]
                continue
            if unread % step == 0:
                new.append(item)
            unread += 1
        for item, unit in zip(new, storage.in_threads(_read_unit, new, _THREADS), strict=True):
            current[item.path, item.stamp] = unit
        # Units that were replaced, or are by now in a file of summaries, are forgotten.
        self._summaries = current
        for (path, _), unit in current.items():
            yield unit, path


def _read_unit(item: storage.Object) -> CommittedUnit | None:
    """Read the summary in a unit's object; None if the object is damaged or cannot be read."""
    try:
        commit: Commit = summaries.of_footer(item)
    except RunError:
        return None
    return CommittedUnit(**vars(commit.summary), path=item.path)
