"""The committed units of a run, from the summaries in the footers of their objects."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from raypd import storage
from raypd.dataset import writer
from raypd.errors import RunError
from raypd.run import UnitSummary, layout, spread

# More units than this are read in part, evenly spread, and their figures scaled up.
READ_UNITS = 20_000
_THREADS = 32


@dataclass
class CommittedUnit(UnitSummary):
    """The summary of a unit, and the path of its object."""

    path: str = ""


@dataclass
class Units:
    """All committed units, or an even choice of them.

    Attributes:
        read: The units that were read, the oldest first.
        committed: The number of all committed units.
        damaged: The paths of damaged objects.
    """

    read: list[CommittedUnit] = field(default_factory=list)
    committed: int = 0
    damaged: list[str] = field(default_factory=list)

    @property
    def scale(self) -> float:
        """How many units each unit that was read stands for."""
        if not self.read:
            return 1.0
        return (self.committed - len(self.damaged)) / len(self.read)

    @property
    def all_read(self) -> bool:
        """Whether totals are exact."""
        return len(self.read) + len(self.damaged) == self.committed

    def total(self, name: str) -> int:
        """Return the total of a field of the summaries, such as documents, ok or failed."""
        return round(sum(getattr(unit, name) for unit in self.read) * self.scale)

    def tokens(self, kind: str) -> int:
        """Return the total of one kind of tokens."""
        return round(sum(unit.counts.get(kind, 0) for unit in self.read) * self.scale)


def unit_objects(runs: Sequence[str]) -> list[storage.Object]:
    """List the objects of the committed units of runs, in the order of their names."""
    objects = []
    for run in runs:
        for item in storage.walk(storage.join(run, layout.UNITS)):
            if item.name.endswith(".parquet"):
                objects.append(item)
    return objects


def read_units(objects: Sequence[storage.Object]) -> Units:
    """Read the summaries of committed units; of very many, an even choice.

    Damaged objects are named, but not counted.
    """
    chosen = spread(objects, READ_UNITS)
    intact = []
    damaged = []
    for item, unit in zip(chosen, storage.in_threads(read_unit, chosen, _THREADS), strict=True):
        if unit is None:
            damaged.append(item.path)
        else:
            intact.append(unit)
    intact.sort(key=lambda unit: unit.committed_at)
    return Units(intact, len(objects), damaged)


def read_unit(item: storage.Object) -> CommittedUnit | None:
    """Read the summary in a unit's object; None if the object is damaged or cannot be read."""
    try:
        return CommittedUnit(**vars(writer.read_summary("", "", item.path)), path=item.path)
    except RunError:
        return None
