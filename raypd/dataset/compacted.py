"""The table files of a run that was compacted, and where each unit's rows are in them.

A compaction copies the rows of units into few large files, `table/<compaction>/<number>.parquet`,
in the order of the input. compaction.json names these files. Once it exists, a unit is committed if
the table file with its rows exists, and its own object is no longer read.

Beside each table file, `table_units/<compaction>/<number>.parquet` has a row for each unit: its
summary, and where its rows are. A unit never spans two row groups.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.dataset.digests import digest, unit_id_of
from raypd.dataset.summary_rows import SCHEMA, path_of, summary_of, with_columns
from raypd.errors import Damaged, RunError
from raypd.run import RecordError, UnitSummary, layout, records

# A row for each unit of a table file, in the order of their rows.
UNIT_ROWS = pa.schema(
    [
        *SCHEMA,
        # Digests of the unit's id, of its name and stamp, and of the name and stamp of the object
        # from which its rows were copied.
        ("id_digest", pa.uint64()),
        ("version_digest", pa.uint64()),
        ("source_digest", pa.uint64()),
        # Where its rows are: the row group of the table file, and the first row in it.
        ("row_group", pa.int32()),
        ("row", pa.int32()),
        ("rows", pa.int32()),
    ]
)
_LOCATION = np.dtype(
    [("file", "i4"), ("number", "i4"), ("row_group", "i4"), ("row", "i4"), ("rows", "i4")]
)
_THREADS = 8
# What a process caches of table files: decoded row groups, footers, and rows about units.
_HELD_ROW_GROUPS = 3
_HELD_FOOTERS = 8
_HELD_UNIT_ROWS = 2
# Row groups that are read at the same time, and rows that are yielded at a time.
_STREAM_THREADS = 2
_STREAM_ROWS = 2_000

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class TableFile:
    """A table file."""

    name: str  # below the folder of the compaction: [key=value/]<number>.parquet
    units: int
    rows: int
    bytes: int


@dataclass
class Compaction:
    """compaction.json: the table files of a run."""

    id: str
    files: list[TableFile] = field(default_factory=list)

    @property
    def units(self) -> int:
        """The number of units in all files."""
        return sum(file.units for file in self.files)

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.bytes for file in self.files)


class _Held(Generic[_Key, _Value]):
    """A cache of values that are made once for all threads; it keeps the most recently used ones.

    Args:
        limit: How many values are kept.
        make: Makes the value of a key.
    """

    def __init__(self, limit: int, make: Callable[[_Key], _Value]) -> None:
        self._limit = limit
        self._make = make
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, _Entry[_Value]] = OrderedDict()

    def get(self, key: _Key) -> _Value:
        """Return the value of a key."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > self._limit:
                self._entries.popitem(last=False)
        with entry.lock:
            if not entry.is_made:
                entry.value = self._make(key)
                entry.is_made = True
            return entry.value


class _Entry(Generic[_Value]):
    """A value that may not be made yet."""

    value: _Value

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_made = False


class CompactedTable:
    """The units in a run's table files: 36 bytes of memory for each.

    Attributes:
        ids: Digests of the units' ids, in the order of the files [units].
        versions: Digests of the units' names and stamps [units].

    Args:
        output: The run's folder.
        compaction: Its compaction.
        present: The names of the table files that exist.
    """

    def __init__(self, output: str, compaction: Compaction, present: frozenset[str]) -> None:
        self.output = output
        self.compaction = compaction
        self.present = present
        numbers = [n for n, file in enumerate(compaction.files) if file.name in present]
        self._numbers = numbers
        ids = [np.empty(0, np.uint64)]
        versions = [np.empty(0, np.uint64)]
        locations = [np.empty(0, _LOCATION)]
        columns = ["id_digest", "version_digest", "row_group", "row", "rows"]

        def read_columns(number: int) -> pa.Table:
            return self._read_unit_rows(number, columns)

        tables = storage.in_threads(read_columns, numbers, _THREADS)
        for number, rows in zip(numbers, tables, strict=True):
            location = np.empty(len(rows), _LOCATION)
            location["file"] = number
            location["number"] = np.arange(len(rows))
            for name in ("row_group", "row", "rows"):
                location[name] = rows[name].to_numpy()
            ids.append(rows["id_digest"].to_numpy())
            versions.append(rows["version_digest"].to_numpy())
            locations.append(location)
        self.ids = np.concatenate(ids)
        self.versions = np.concatenate(versions)
        self._order = np.argsort(self.ids, kind="stable").astype(np.int32)
        self._sorted_ids = self.ids[self._order]
        self._locations = np.concatenate(locations)
        self._footers: _Held[int, Any] = _Held(_HELD_FOOTERS, self._read_footer)
        self._row_groups: _Held[tuple[int, int, tuple[str, ...] | None], pa.Table] = _Held(
            _HELD_ROW_GROUPS, self._read_row_group
        )
        self._unit_rows: _Held[int, pa.Table] = _Held(_HELD_UNIT_ROWS, self._read_unit_rows)

    def __len__(self) -> int:
        return len(self.ids)

    def has(self, value: int) -> bool:
        """Return whether a unit is in the table files, by the digest of its id."""
        return self.locate(value) is not None

    def locate(self, value: int) -> Any:
        """Return where the rows of a unit are, by the digest of its id; None if it is in no file.

        The location has the fields file (the number of the table file), number (of the unit in the
        file), row_group, row and rows.
        """
        number = self._number(value)
        return None if number is None else self._locations[number]

    def version_of(self, value: int) -> int | None:
        """Return the digest of a unit's name and stamp, by the digest of its id, or None."""
        number = self._number(value)
        return None if number is None else int(self.versions[number])

    def _number(self, value: int) -> int | None:
        """Return the index of a unit among all units of the table files."""
        position = int(np.searchsorted(self._sorted_ids, np.uint64(value)))
        if position == len(self._sorted_ids) or int(self._sorted_ids[position]) != value:
            return None
        return int(self._order[position])

    def folder(self) -> str:
        """Return the folder of the table files."""
        return storage.join(self.output, layout.TABLE, self.compaction.id)

    def paths(self) -> list[str]:
        """Return the paths of all table files, in the order of the input."""
        return [self.path(number) for number in range(len(self.compaction.files))]

    def path(self, number: int) -> str:
        """Return the path of a table file."""
        name = self.compaction.files[number].name
        return storage.join(self.folder(), *name.split("/"))

    def objects(self) -> Iterator[storage.Object]:
        """Yield all units as the objects that they were before, in the order of the input."""
        for number in self._numbers:
            rows = self._read_unit_rows(number, ["name", "stamp"]).to_pylist()
            for row in rows:
                path = path_of(self.output, row["name"])
                yield storage.Object(path, row["name"], 0, row["stamp"])

    def unit_rows(self) -> Iterator[pa.Table]:
        """Yield the rows about units, a table of UNIT_ROWS for each table file."""
        yield from storage.in_threads(self._read_unit_rows, self._numbers, 2)

    def unit_rows_of(self, number: int) -> pa.Table:
        """Return the rows about the units of a table file, a table of UNIT_ROWS."""
        return self._unit_rows.get(number)

    def summary(self, location: Any) -> UnitSummary:
        """Return the summary of a unit.

        Args:
            location: What `locate` returned.
        """
        (row,) = self.unit_rows_of(int(location["file"])).slice(location["number"], 1).to_pylist()
        return summary_of(row)

    def rows(self, location: Any, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a unit.

        Args:
            location: What `locate` returned.
            columns: The columns to read; None reads all.
        """
        names = None if columns is None else tuple(columns)
        if not location["rows"]:
            schema = self._footers.get(int(location["file"])).schema.to_arrow_schema()
            empty = schema.remove_metadata().empty_table()
            return empty if names is None else empty.select(list(names))
        group = self._row_groups.get((int(location["file"]), int(location["row_group"]), names))
        return group.slice(location["row"], location["rows"])

    def stream(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows in the order of the input, a few thousand at a time."""
        names = None if columns is None else tuple(columns)

        def row_groups() -> Iterator[tuple[int, int, tuple[str, ...] | None]]:
            for number in self._numbers:
                for group in range(self._footers.get(number).num_row_groups):
                    yield number, group, names

        for table in storage.in_threads(self._read_row_group, row_groups(), _STREAM_THREADS):
            for first_row in range(0, len(table), _STREAM_ROWS):
                yield table.slice(first_row, _STREAM_ROWS)

    def _opened(self, number: int) -> Any:
        size = self.compaction.files[number].bytes
        return storage.open_file(self.path(number), None, size)

    def _read_footer(self, number: int) -> Any:
        return self._read(number, lambda file: pq.ParquetFile(file).metadata)

    def _read_row_group(self, key: tuple[int, int, tuple[str, ...] | None]) -> pa.Table:
        number, group, columns = key
        footer = self._footers.get(number)

        def read(file: Any) -> pa.Table:
            parquet = pq.ParquetFile(
                file, metadata=footer, page_checksum_verification=True, pre_buffer=True
            )
            names = None if columns is None else list(columns)
            table = parquet.read_row_group(group, names, use_threads=False)
            return table.replace_schema_metadata(None)

        return self._read(number, read)

    def _read(self, number: int, read: Callable[[Any], Any]) -> Any:
        """Return what a function reads from a table file."""
        path = self.path(number)
        try:
            with self._opened(number) as file:
                return read(file)
        except FileNotFoundError:
            raise TableReplaced(path) from None
        except (pa.ArrowException, OSError) as error:
            outage = storage.outage(error, path)
            if outage is not None:
                raise RunError(f"{outage}; run the same command again to resume") from None
            raise Damaged(
                f"{path}: damaged, not a whole table file of raypd ({error}); delete it, and the "
                "same command of the run processes its documents again"
            ) from None

    def _read_unit_rows(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        path = unit_rows_path(self.output, self.compaction.id, number)
        return read_unit_rows(path, columns)


class TableReplaced(RunError):
    """A table file no longer exists."""

    def __str__(self) -> str:
        return (
            f"{self.args[0]}: was deleted, or replaced by a later compaction, while it was read; "
            "run the same command again"
        )


def unit_rows_path(output: str, compaction: str, number: int) -> str:
    """Return the path of the rows about the units of a table file.

    Args:
        output: The run's folder.
        compaction: The id of the compaction.
        number: The number of the table file.
    """
    return storage.join(output, layout.TABLE_UNITS, compaction, f"{number:06d}.parquet")


def read_unit_rows(path: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the rows about the units of a table file, in the columns of UNIT_ROWS.

    Args:
        path: The file.
        columns: The columns to read; None reads all.

    Raises:
        TableReplaced: The file does not exist.
        Damaged: It is damaged.
        RunError: Storage is out of reach.
    """
    names = UNIT_ROWS.names if columns is None else list(columns)
    try:
        with storage.open_file(path) as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            table = parquet.read(names)
    except FileNotFoundError:
        raise TableReplaced(path) from None
    except (pa.ArrowException, OSError) as error:
        outage = storage.outage(error, path)
        if outage is not None:
            raise RunError(f"{outage}; run the same command again to resume") from None
        raise Damaged(
            f"{path}: damaged ({error}); delete the table file with the same number below "
            f"{layout.TABLE}, and the same command of the run processes its documents again"
        ) from None
    return with_columns(table, pa.schema([UNIT_ROWS.field(name) for name in names]))


# ------------------------------------------------------------------------
# The table files of a run, as this process knows them

_tables: dict[str, tuple[bytes, CompactedTable]] = {}
_tables_lock = threading.Lock()


def compaction_path(output: str) -> str:
    """Return the path of compaction.json."""
    return storage.join(output, layout.COMPACTION)


def table_of(output: str) -> CompactedTable | None:
    """Return the table files of a run as they are now; None if it was not compacted.

    If nothing has changed, the result is the same object as that of the last call. It costs a GET,
    and a LIST if there are table files.

    Raises:
        RunError: A record of the compaction is damaged, or storage is out of reach.
    """
    path = compaction_path(output)
    try:
        data = storage.read(path)
        compaction = records.from_bytes(Compaction, data, path)
    except (FileNotFoundError, NotADirectoryError):
        _tables.pop(output, None)
        return None
    except RecordError as error:
        raise RunError(str(error)) from None
    folder = storage.join(output, layout.TABLE, compaction.id)
    present = frozenset(item.name for item in storage.walk(folder))
    with _tables_lock:
        cached = _tables.get(output)
        if cached is not None and cached[0] == data and cached[1].present == present:
            return cached[1]
        table = CompactedTable(output, compaction, present)
        _tables[output] = (data, table)
        return table


def holding(path: str, refresh: bool = False) -> tuple[CompactedTable, Any] | None:
    """Return the table files with the rows of a unit, and its location in them.

    Args:
        path: The path of the object that the unit has or had.
        refresh: Whether to check storage again. Otherwise the table files that this process
            knows are used.

    Returns:
        None if the unit is not in table files.
    """
    output, separator, name = path.rpartition(f"/{layout.UNITS}/")
    if not separator:
        return None
    cached = _tables.get(output)
    table = cached[1] if cached is not None else None
    if refresh:
        table = table_of(output)
    if table is None:
        return None
    location = table.locate(digest(unit_id_of(name)))
    if location is None:
        return None
    return table, location


def read_unit(
    path: str, columns: Sequence[str] | None, with_rows: bool, refresh: bool = False
) -> tuple[UnitSummary, pa.Table | None] | None:
    """Read a unit from table files.

    Args:
        path: The path of the object that the unit has or had.
        columns: The columns to read; None reads all.
        with_rows: Whether to read the unit's rows, or only its summary.
        refresh: As in `holding`.

    Returns:
        The summary and the rows; None if the unit is not in table files.

    Raises:
        Damaged: A table file is damaged.
        RunError: Storage is out of reach, or the table file was deleted.
    """
    for attempt in range(2):
        held = holding(path, refresh or attempt > 0)
        if held is None:
            return None
        table, location = held
        try:
            rows = table.rows(location, columns) if with_rows else None
            return table.summary(location), rows
        except TableReplaced:
            if attempt > 0:
                raise
    return None
