"""The committed units of a run, by the summaries in the footers of their objects."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from raypd import storage
from raypd.dataset import writer
from raypd.errors import RunError
from raypd.run import layout
from raypd.run.read import spread
from raypd.run.unit import UnitSummary

# More units than this are read in part, evenly spread, and their figures scaled up.
READ_UNITS = 20_000
_THREADS = 32


@dataclass
class CommittedUnit(UnitSummary):
    path: str = ""  # of its object


@dataclass
class Units:
    """All committed units, or with `scale` above 1 an even choice that stands for that many times
    as many.
    """

    read: list[CommittedUnit] = field(default_factory=list)
    committed: int = 0
    damaged: list[str] = field(default_factory=list)

    @property
    def scale(self) -> float:
        return (self.committed - len(self.damaged)) / len(self.read) if self.read else 1.0

    @property
    def all_read(self) -> bool:
        """Whether sums are exact."""
        return len(self.read) + len(self.damaged) == self.committed

    def total(self, name: str) -> int:
        """Documents, ok or failed of all units."""
        return round(sum(getattr(u, name) for u in self.read) * self.scale)

    def tokens(self, kind: str) -> int:
        return round(sum(u.counts.get(kind, 0) for u in self.read) * self.scale)


def unit_objects(runs: Sequence[str]) -> list[storage.Object]:
    """The objects of the committed units of some runs, in the order of their names."""
    objects = (o for run in runs for o in storage.walk(storage.join(run, layout.UNITS)))
    return [o for o in objects if o.name.endswith(".parquet")]


def read_units(objects: Sequence[storage.Object]) -> Units:
    """The summaries of committed units, of very many an even choice.

    Damaged ones are named, and not counted.
    """
    chosen = spread(objects, READ_UNITS)
    units = list(storage.in_threads(read_unit, chosen, _THREADS))
    intact = sorted((unit for unit in units if unit is not None), key=lambda u: u.committed_at)
    return Units(
        intact,
        len(objects),
        [item.path for item, unit in zip(chosen, units, strict=True) if unit is None],
    )


def read_unit(item: storage.Object) -> CommittedUnit | None:
    """The summary in a unit's object; None where it is damaged or cannot be read."""
    try:
        return CommittedUnit(**vars(writer.read_summary("", "", item.path)), path=item.path)
    except RunError:
        return None
