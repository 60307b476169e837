"""Large objects that cannot be split: one process reads them, however many workers there are."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.run import Part, Unit
from raypd.text import counted

# Smaller objects are read in a second.
_LARGE_BYTES = 64 << 20
# Objects that notes name, and Parquet files whose row groups are looked at.
_SHOWN = 3
_KINDS = {"json": "a JSON array", "excel": "a workbook"}
_GROUPS = "row groups are read in parallel"


@dataclass
class _LargeObject:
    """An object of the input, and how many units have a part of it."""

    part: Part
    units: int = 0


class UnsplitObjects:
    """Collects large objects of a plan, in memory that grows only with their number."""

    def __init__(self) -> None:
        self._objects: dict[str, _LargeObject] = {}

    def add(self, unit: Unit) -> None:
        """Add the objects of a unit."""
        for part in unit.parts:
            if part.size >= _LARGE_BYTES:
                self._objects.setdefault(part.path, _LargeObject(part)).units += 1

    def notes(self) -> list[str]:
        """Return a note for each of the largest objects that cannot be split."""
        several = (item for item in self._objects.values() if item.units > 1)
        return list(_notes(nlargest(_SHOWN, several, key=lambda item: item.part.size)))


def _notes(objects: Iterable[_LargeObject]) -> Iterator[str]:
    """Yield what cannot be split, what that costs, and what to do."""
    for item in objects:
        part = item.part
        size = _size(part.size)
        if part.compression is not None:
            kind = f"{part.compression} of {size}"
            advice = f"write files of 128 MB, or leave it uncompressed; or Parquet, whose {_GROUPS}"
        elif part.format in _KINDS:
            kind = f"{_KINDS[part.format]} of {size}"
            advice = f"write JSON lines, or Parquet, whose {_GROUPS}"
        elif part.format == "parquet":
            groups = _row_groups(part)
            if groups is None or groups >= item.units:
                continue
            kind = f"{counted(groups, 'row group')} of {_size(part.size // max(1, groups))}"
            advice = f"rewrite it with row groups of {_size(part.size // item.units)}"
        else:
            continue
        yield (
            f"{part.name}: {kind} cannot be split: one process at a time decodes it for its "
            f"{counted(item.units, 'unit')}, and workers wait for it; {advice}"
        )


def _size(count: int) -> str:
    """Return a number of bytes as text."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{max(1, round(count / 1e6))} MB"


def _row_groups(part: Part) -> int | None:
    """Return the row groups of a Parquet file; None if it cannot be read."""
    try:
        with storage.open_file(part.path) as file:
            return int(pq.ParquetFile(file).metadata.num_row_groups)
    except (pa.ArrowException, OSError):
        return None
