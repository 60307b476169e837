"""Whether an object can be read, and the ranges that it is cut into.

Parquet is cut by rows and bytes from its footer; JSONL by bytes, of which only the first megabyte
is read; compressed JSONL by rows, all of it read once, since a stream cannot be entered in its
middle. CSV is read whole too (a quoted field may hold line breaks), and cut by bytes.
"""

import contextlib
import io
import json
import math
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.config import RunConfig
from raypd.config.data import WHOLE
from raypd.dataset import delimited
from raypd.dataset.jsonl import (
    BOM,
    LARGE_WINDOW,
    UNREADABLE,
    Line,
    line_limit,
    lines,
    open_lines,
    packed_lines,
    window_bytes,
)
from raypd.dataset.listing import InputObject, partition_keys
from raypd.dataset.reader import arrow_batches, custom_rows
from raypd.dataset.text_files import COLUMNS
from raypd.errors import InputError, did_you_mean
from raypd.run.unit import Part

HEAD_BYTES = 1 << 20  # of uncompressed JSONL, from which lines are counted and columns seen
_SAMPLED_LINES = 100  # in which columns are looked for
_SHOWN = 20  # columns in a message
_LARGE_WINDOW_ERROR = "too much memory"  # in zstd's own message about a window
_one_large_window = threading.Lock()
Groups = list[tuple[int, int]]  # (rows, bytes) of what lies together in an object


@dataclass
class SeenColumns:
    """The columns of an object's schema or first lines, and of its path."""

    names: list[str]
    lines: int = 0
    objects: int = 0  # lines that are JSON objects
    schema: bool = False  # whether `names` are all that it has


def columns_of(lines: Iterable[bytes]) -> SeenColumns:
    rows, seen = [], [*lines]
    for data in seen:
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(data.removeprefix(BOM)))
    objects = [row for row in rows if isinstance(row, dict)]
    return SeenColumns(sorted(set[str]().union(*objects)), len(seen), len(objects))


class Columns:
    """The columns of a configuration, looked for in one object after the other."""

    def __init__(self, config: RunConfig, optional: set[str]) -> None:
        self.wanted, self.optional = config.wanted_columns(), optional  # by a table's schema
        # An object without any of these has nothing to read.
        self.content = {
            k: n
            for k, n in self.wanted.items()
            if k not in ("input.id_column", "input.category_column")
        }
        self._seen: set[str] = set()
        # A JSONL object that was looked into, and its columns.
        self._first: tuple[str, list[str]] | None = None
        self._objects = 0

    def lacks(self, columns: SeenColumns) -> str | None:
        """Why an object cannot be read: a column that a schema lacks, or all text columns of its
        lines.
        """
        if columns.schema:
            missing = [
                item
                for item in self.wanted.items()
                if item[1] not in self.optional.union(columns.names)
            ]
        else:
            nothing = columns.objects and not set(columns.names).intersection(self.content.values())
            missing = list(self.content.items()) if nothing else []
        return self._missing(*missing[0], columns.names) if missing else None

    def note(self, name: str, columns: SeenColumns) -> None:
        """Counts the lines of a JSONL object for `nowhere`."""
        if columns.lines:
            self._first = self._first or (name, columns.names[: 4 * _SHOWN])
            self._objects += columns.objects
            self._seen |= set(self.wanted.values()).intersection(columns.names)

    def nowhere(self) -> str | None:
        """After the last object: what no line of any JSONL object had; None when all is there."""
        if self._first is None:
            return None
        name, names = self._first
        if not self._objects:
            return (
                f"{name}: none of its first rows is a JSON object; one of several lines wants "
                "a name in .json"
            )
        for key, column in self.wanted.items():
            if column not in self._seen:
                return f"{name}: {self._missing(key, column, names)}"
        return None

    @staticmethod
    def _missing(key: str, name: str, present: Sequence[str]) -> str:
        hint = did_you_mean(name, present)
        shown = ", ".join(present[:_SHOWN]) + (", ..." if len(present) > _SHOWN else "")
        extra = {
            "input.id_column": "; input.id_column=null numbers the documents",
            "input.category_column": "; input.category_column=null with input.category gives all the same",  # noqa: E501
            "input.text_columns": "; input.text_columns=[NAME] says which hold text, and `raypd init` finds them",  # noqa: E501
        }.get(key.partition(" ")[0], "")
        return (
            f"no column {name!r} ({key}): "
            f"{' '.join(filter(None, [hint, f'it has {shown}{extra}']))}"
        )


@dataclass
class Inspected:
    object: InputObject
    # Made as they are asked for; of a damaged object one that holds no document.
    parts: Iterator[Part]
    columns: SeenColumns | None = None
    damaged: str | None = None  # why it cannot be read


def inspect(item: InputObject, config: RunConfig, columns: Columns) -> Inspected:
    """What is wrong stands in the result.

    Raises storage.Unavailable, when the object must not be left out.
    """
    try:
        version = item.stamp if storage.is_remote(item.path) else storage.version(item.path)
        part = Part(**item._asdict(), version=version)
        with _window_memory(part):
            parts, present = _cut(part, config)
        present.names = [*dict.fromkeys(name.strip() for name in present.names)]
        present.names += [key for key in partition_keys(item.name) if key not in present.names]
        reason = columns.lacks(present)
    except InputError as error:
        reason = str(error)
    except (pa.ArrowException, OSError) as error:
        if outage := storage.outage(error, item.path):
            raise outage from None
        form = {"parquet": " as Parquet", "arrow": " as Arrow"}.get(item.format, "")
        reason = f"cannot be read{form}: {error}"
    if reason is not None:
        damaged = Part(
            **item._asdict(), version=item.stamp, end=item.size, exact=False, bytes=item.size
        )
        return Inspected(item, iter([damaged]), damaged=f"{item.path}: {reason}")
    return Inspected(item, (part for part in parts if part.expected or not part.exact), present)


@contextlib.contextmanager
def _window_memory(part: Part) -> Iterator[None]:
    """Let one thread at a time plan a zstd file with a large window, which takes up to 2 GiB."""
    large = False
    if part.compression == "zst":
        with storage.open_read(part.path, version=part.version) as raw:
            large = window_bytes(raw) > LARGE_WINDOW
    if not large:
        yield
        return
    with _one_large_window:
        yield


def _cut(part: Part, config: RunConfig) -> tuple[Iterator[Part], SeenColumns]:
    if part.format == "jsonl":
        return (_plain if part.compression is None else _compressed)(part, config)
    if part.format in delimited.DELIMITERS:
        return _delimited(part, config)
    looks = {"parquet": _parquet, "arrow": _arrow} | dict.fromkeys(("reader", *WHOLE), _of_reader)
    groups, columns = looks.get(part.format, _whole)(part, config)
    bounds = cut_rows(groups, config.cluster.unit_documents, config.cluster.unit_bytes)
    return _of_rows(part, bounds, sum(rows for rows, _ in groups)), columns


def _whole(part: Part, config: RunConfig) -> tuple[Groups, SeenColumns]:
    return [(1, part.size)], SeenColumns([*COLUMNS], schema=True)


def _parquet(part: Part, config: RunConfig) -> tuple[Groups, SeenColumns]:
    with storage.open_file(part.path, part.version, part.size) as file:
        parquet = pq.ParquetFile(file)
        metadata, names = parquet.metadata, parquet.schema_arrow.names
    needed = {
        *config.wanted_columns().values(),
        config.input.id_column,
        config.input.category_column,
    }
    groups = [
        (g.num_rows, _read_bytes(g, needed))
        for g in map(metadata.row_group, range(metadata.num_row_groups))
    ]
    return groups, SeenColumns(names, schema=True)


def _arrow(part: Part, config: RunConfig) -> tuple[Groups, SeenColumns]:
    with (
        storage.open_file(part.path, part.version, part.size) as file,
        arrow_batches(file) as batches,
    ):
        return [(batch.num_rows, batch.nbytes) for batch in batches], SeenColumns(
            batches.schema.names, schema=True
        )


def _of_reader(part: Part, config: RunConfig) -> tuple[Groups, SeenColumns]:
    """All rows are read once, to count them; the first say what columns there are."""
    names: dict[str, None] = {}
    sizes: list[tuple[int, int]] = []
    columns = SeenColumns([])
    for row in custom_rows(part, config.input):
        fields = dict(row) if isinstance(row, Mapping) else {}
        if columns.lines < _SAMPLED_LINES:
            names |= dict.fromkeys(fields)
            columns.lines, columns.objects = (
                columns.lines + 1,
                columns.objects + isinstance(row, Mapping),
            )
        sizes.append((1, sum(len(value) for value in fields.values() if isinstance(value, str))))
    columns.names, columns.schema = [*names], bool(names) and part.format != "json"
    return sizes, columns


def _of_rows(part: Part, bounds: Iterable[tuple[int, int]], rows: int) -> Iterator[Part]:
    """Ranges of an object's rows; each takes its share of the stored bytes."""
    for start, end in bounds:
        size = part.size * (end - start) // max(1, rows)
        yield replace(part, start=start, end=end, expected=end - start, bytes=size)


def _read_bytes(group: Any, needed: set[str | None]) -> int:
    """Bytes, decompressed, of the columns that are read of a row group."""
    columns = (group.column(i) for i in range(group.num_columns))
    return sum(
        c.total_uncompressed_size
        for c in columns
        if c.path_in_schema.split(".")[0].strip() in needed
    )


def cut_rows(
    groups: Iterable[tuple[int, int]], max_rows: int, max_bytes: int
) -> Iterator[tuple[int, int]]:
    """Ranges of rows over row groups of (rows, bytes): none above either limit, but each of one row
    at least.
    """
    start = end = 0
    size = 0.0
    for rows, length in groups:
        each = length / rows if rows else 0.0
        while rows:
            room = max_rows - (end - start)
            if each:
                room = min(room, int((max_bytes - size) / each))
            elif size > max_bytes:  # one row above the limit, and then rows of no bytes
                room = 0
            if room <= 0 and end > start:
                yield start, end
                start, size = end, 0.0
                continue
            count = min(rows, max(1, room))
            end, rows, size = end + count, rows - count, size + count * each
    if end > start:
        yield start, end


def _plain(part: Part, config: RunConfig) -> tuple[Iterator[Part], SeenColumns]:
    with storage.open_read(part.path, version=part.version) as file:
        head = file.read(HEAD_BYTES)
    if len(head) != min(part.size, HEAD_BYTES):
        raise InputError("has changed while the run was planned; start the run again")
    if part.size > HEAD_BYTES:
        head = head[: head.rfind(b"\n") + 1]  # without a line that is not seen to its end
    first = list(lines(io.BytesIO(head), line_limit(config.input.max_document_bytes)))
    columns = columns_of(line.data for line in first[:_SAMPLED_LINES] if line.data is not None)
    if part.size <= HEAD_BYTES:
        return _counted(part, first, config), columns
    return _estimated(part, len(head), len(first), config), columns


def _counted(part: Part, file_lines: list[Line], config: RunConfig) -> Iterator[Part]:
    begins = [line.offset for line in file_lines] + [part.size]
    rows = [(1, line.length) for line in file_lines]
    for first, last in cut_rows(rows, config.cluster.unit_documents, config.cluster.unit_bytes):
        start, end = begins[first], begins[last]
        yield replace(part, start=start, end=end, expected=last - first, bytes=end - start)


def _estimated(part: Part, seen_bytes: int, seen_lines: int, config: RunConfig) -> Iterator[Part]:
    """Ranges of equal length, by the mean length of the lines that were seen."""
    mean = seen_bytes / seen_lines if seen_lines else HEAD_BYTES
    count = math.ceil(
        part.size / min(config.cluster.unit_documents * mean, config.cluster.unit_bytes)
    )
    for i in range(count):
        start, end = i * part.size // count, (i + 1) * part.size // count
        documents = max(1, round((end - start) / mean))
        yield replace(
            part, start=start, end=end, expected=documents, exact=False, bytes=end - start
        )


def _compressed(part: Part, config: RunConfig) -> tuple[Iterator[Part], SeenColumns]:
    sampled: list[bytes] = []
    number = 0

    def lengths(file: BinaryIO) -> Iterator[tuple[int, int]]:
        nonlocal number
        for line in packed_lines(file, line_limit(config.input.max_document_bytes)):
            if len(sampled) < _SAMPLED_LINES and line.data is not None:
                sampled.append(line.data)
            number = line.number
            yield 1, line.length

    try:
        with open_lines(part.path, part.compression, version=part.version) as file:
            bounds = list(
                cut_rows(lengths(file), config.cluster.unit_documents, config.cluster.unit_bytes)
            )
    except UNREADABLE as error:
        raise _broken(error, part, number) from None
    return _of_rows(part, bounds, bounds[-1][1] if bounds else 0), columns_of(sampled)


def _delimited(part: Part, config: RunConfig) -> tuple[Iterator[Part], SeenColumns]:
    starts: list[tuple[int, int]] = []  # (offset, line) of the first record of each range
    counts: list[int] = []  # of its records
    size = line = end = 0  # size: bytes of the last range
    try:
        part = delimited.with_encoding(part, config.input)
        names, records = delimited.whole(part, config.input)
        for record in records:
            full = counts and counts[-1] >= config.cluster.unit_documents
            if not counts or full or size + record.length > config.cluster.unit_bytes:
                starts.append((record.offset, record.line))
                counts.append(0)
                size = 0
            counts[-1] += 1
            size, line, end = size + record.length, record.line, record.offset + record.length
    except UNREADABLE as error:
        raise _broken(error, part, line) from None
    ends = [*(offset for offset, _ in starts[1:]), end]
    ranges = zip(starts, ends, counts, strict=False)  # without records there is an end alone
    parts = (
        replace(
            part,
            start=begin,
            end=to,
            line=number,
            expected=count,
            bytes=part.size * (to - begin) // end,
        )
        for (begin, number), to, count in ranges
    )
    return parts, SeenColumns(names, schema=bool(names))


def _broken(error: Exception, part: Part, line: int) -> Exception:
    """What to raise where reading fails after a line: InputError where the stream is damaged, else
    the error itself.
    """
    numbered = isinstance(error, OSError) and (
        error.errno is not None or isinstance(error, storage.StorageError)
    )
    if part.compression is None or numbered:  # or its storage is out of reach
        return error
    reason = "it is damaged or cut short"
    if _LARGE_WINDOW_ERROR in str(error):
        reason = (
            "its window is too large: compress it anew, "
            f"zstd -dc --long=31 {shlex.quote(part.path)} | zstd -o NEW.zst"
        )
    return InputError(f"cannot be read as {part.compression} after line {line}: {error}; {reason}")
