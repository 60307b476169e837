"""The rows of a run, read from many units at a time and never held all at once."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import raypd.dataset.compacted as compacted
import raypd.dataset.summaries as summaries
import raypd.dataset.writer as writer
from raypd import storage
from raypd.dataset.committed import CommittedUnits, loose_objects

# Mostly they wait for storage.
_THREADS = 16


def tables(output: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of all committed units: of table files, and then of each other unit.

    Args:
        output: The run's folder.
        columns: The columns to read; None reads all.

    Raises:
        Damaged: A unit's object or a table file is damaged.
        RunError: Storage is out of reach.
    """
    table = compacted.table_of(output)
    if table is not None:
        yield from table.stream(columns)

    def read(item: storage.Object) -> pa.Table:
        _, table = writer.read_table("", "", columns, item.path, item)
        return table.replace_schema_metadata(None)

    yield from storage.in_threads(read, loose_objects(output, table), _THREADS)


def of_paths(paths: Iterable[str], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of some units, as `tables` does.

    Args:
        paths: The paths of the units' objects.
        columns: The columns to read; None reads all.
    """

    def read(path: str) -> pa.Table:
        _, table = writer.read_table("", "", columns, path)
        return table.replace_schema_metadata(None)

    yield from storage.in_threads(read, paths, _THREADS)


def rows_of(run: str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of all committed units; raises as `tables` does.

    Args:
        run: The run's folder.
        columns: The columns to read; None reads all.
    """
    for table in tables(storage.absolute(run), columns):
        yield from writer.as_records(table)


def with_ids(run: str, ids: Collection[str]) -> tuple[Iterator[dict[str, Any]], int]:
    """Find the rows of documents by their ids, without reading units that cannot have them.

    Args:
        run: The run's folder.
        ids: The ids of documents.

    Returns:
        The rows, which raise as `tables` does, and the number of documents of the run.
    """
    output = storage.absolute(run)
    ordered = sorted(ids)
    paths = []
    documents = 0
    for table in summaries.read(CommittedUnits(output)):
        documents += pc.sum(table["documents"]).as_py()
        ranges = table.select(["name", "first_id", "last_id"]).to_pylist()
        for row in ranges:
            if _may_have(row["first_id"], row["last_id"], ordered):
                paths.append(summaries.path_of(output, row["name"]))
    return _rows_with(paths, ids), documents


def count_failed(run: str) -> int:
    """Count the documents that a run could not answer, from the summaries of its units.

    Args:
        run: The run's folder.
    """
    failed = 0
    for table in summaries.read(CommittedUnits(storage.absolute(run))):
        failed += pc.sum(table["failed"]).as_py() or 0
    return failed


def _may_have(first_id: str | None, last_id: str | None, ordered: Sequence[str]) -> bool:
    """Return whether a unit may have one of some ids.

    Args:
        first_id: The smallest id of the unit; None if it is not known.
        last_id: The largest id of the unit.
        ordered: The ids, in order.
    """
    if first_id is None or last_id is None:
        return True
    position = bisect_left(ordered, first_id)
    return position < len(ordered) and ordered[position] <= last_id


def _rows_with(paths: Iterable[str], ids: Collection[str]) -> Iterator[dict[str, Any]]:
    id_set = pa.array(sorted(ids), pa.string())
    for table in of_paths(paths):
        yield from writer.as_records(table.filter(pc.is_in(table["id"], id_set)))
