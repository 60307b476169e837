"""The committed units of a run, from one listing of their objects and from its table files."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import numpy as np

import raypd.dataset.compacted as compacted
from raypd import storage
from raypd.dataset.compacted import CompactedTable
from raypd.dataset.digests import DigestSet, digest, unit_id_of
from raypd.run import layout


def unit_objects(output: str) -> Iterator[storage.Object]:
    """Yield the objects of all committed units; their names are relative to the units folder.

    The objects of units in table files no longer exist. `writer.read_table` reads such a unit from
    its table file, also if a compaction deletes the object after it was listed.
    """
    table = compacted.table_of(output)
    if table is not None:
        yield from table.objects()
    yield from loose_objects(output, table)


def loose_objects(
    output: str,
    table: CompactedTable | None,
    on_leftover: Callable[[storage.Object], None] = lambda item: None,
) -> Iterator[storage.Object]:
    """Yield the objects of the units that are not in table files.

    Args:
        output: The run's folder.
        table: The table files.
        on_leftover: Is called with each object whose unit is in a table file. A compaction leaves
            such objects behind if it cannot delete them.
    """
    listed = array("Q")
    for item in storage.walk(storage.join(output, layout.UNITS)):
        if not _is_unit(item.name):
            continue
        value = digest(unit_id_of(item.name))
        if table is not None and table.has(value):
            on_leftover(item)
            continue
        listed.append(value)
        yield item
    # A compaction that completed in the meantime may have deleted objects before they were listed.
    newer_table = compacted.table_of(output)
    if newer_table is None or newer_table is table:
        return
    seen = DigestSet(listed)
    for item in newer_table.objects():
        value = digest(unit_id_of(item.name))
        if value not in seen and not (table is not None and table.has(value)):
            yield item


def leftover_objects(output: str, table: CompactedTable) -> Iterator[storage.Object]:
    """Yield the objects whose units are also in table files."""
    for item in storage.walk(storage.join(output, layout.UNITS)):
        if _is_unit(item.name) and table.has(digest(unit_id_of(item.name))):
            yield item


def _is_unit(name: str) -> bool:
    file_name = name.rpartition("/")[2]
    return file_name.endswith(".parquet") and not file_name.startswith((".", "_"))


class CommittedUnits(Set[str]):
    """The ids of the units that are committed in any partition: 16 bytes of memory for each unit.

    Iterating lists the objects again.

    Attributes:
        table: The table files of a run that was compacted; None if there are none.
        objects: The number of units; a unit with objects in two partitions counts twice.
        loose: How many of them are not in table files.
        loose_bytes: The bytes of their objects.
        leftovers: The number of objects whose units are also in table files.

    Args:
        output: The run's folder.
    """

    def __init__(self, output: str) -> None:
        self.output = output
        self.loose = 0
        self.loose_bytes = 0
        self.leftovers = 0

        def count_leftover(item: storage.Object) -> None:
            self.leftovers += 1

        def digests() -> Iterator[int]:
            for item in loose_objects(output, self.table, count_leftover):
                self.loose += 1
                self.loose_bytes += item.size
                yield digest(item.name, item.stamp)
                yield digest(unit_id_of(item.name))

        self.table = compacted.table_of(output)
        both = np.fromiter(digests(), dtype=np.uint64).reshape(-1, 2)
        versions = both[:, 0]
        ids = both[:, 1]
        if self.table is not None:
            versions = np.concatenate([self.table.versions, versions])
            ids = np.concatenate([self.table.ids, ids])
        self.objects = len(ids)
        # Which objects the listing shows, and in which versions.
        self.versions = DigestSet(versions)
        self._ids = DigestSet(ids)

    def __contains__(self, unit_id: object) -> bool:
        return isinstance(unit_id, str) and digest(unit_id) in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[str]:
        for item in unit_objects(self.output):
            yield unit_id_of(item.name)

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        return set(it)
