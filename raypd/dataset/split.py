"""Looking into one object of the input: whether it can be read, and the ranges that it is cut into.

Parquet is cut by rows and bytes from its footer; uncompressed JSONL by bytes, of which only the first megabyte is
read; compressed JSONL by rows, for which all of it is read once, since a stream has no way into its middle; and so is
CSV, by the bytes of its text, since a line break may stand in a quoted field.
"""

import io
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset import delimited
from raypd.dataset.columns import Columns, SeenColumns, columns_of
from raypd.dataset.jsonl import Line, is_broken, line_limit, lines, open_lines
from raypd.dataset.listing import InputObject, partition_keys
from raypd.errors import InputError
from raypd.run.unit import Part

HEAD_BYTES = 1 << 20  # of uncompressed JSONL, from which lines are counted and columns seen
_SAMPLED_LINES = 100  # in which columns are looked for


@dataclass
class Inspected:
    """An object that was looked into."""

    found: InputObject
    parts: Iterator[Part]  # made as they are asked for; of a damaged object one that holds no document
    seen: SeenColumns | None = None
    damaged: str | None = None  # why it cannot be read


def inspect(found: InputObject, config: RunConfig, columns: Columns) -> Inspected:
    """Looks into an object. What is wrong with it stands in the result.

    Raises:
        storage.Unavailable: storage as a whole is out of reach; the object may be intact and must not be left out.
    """
    try:
        version = found.stamp if storage.is_remote(found.path) else storage.version(found.path)
        parts, seen = _cut(Part(**found._asdict(), version=version), config)
        seen.names += [key for key in partition_keys(found.name) if key not in seen.names]
        reason = columns.lacks(seen)
    except InputError as error:
        reason = str(error)
    except (pa.ArrowException, OSError) as error:
        if outage := storage.outage(error, found.path):
            raise outage from None
        kind = "cannot be read as Parquet" if found.format == "parquet" else "cannot be read"
        reason = f"{kind}: {error}"
    if reason is not None:
        whole = Part(**found._asdict(), version=found.stamp, end=found.size, exact=False, bytes=found.size)
        return Inspected(found, iter([whole]), damaged=f"{found.path}: {reason}")
    return Inspected(found, (part for part in parts if part.expected or not part.exact), seen)


def _cut(whole: Part, config: RunConfig) -> tuple[Iterator[Part], SeenColumns]:
    if whole.format == "parquet":
        return _parquet(whole, config)
    if whole.format == "jsonl":
        return (_plain if whole.compression is None else _compressed)(whole, config)
    return _delimited(whole, config)


def _parquet(whole: Part, config: RunConfig) -> tuple[Iterator[Part], SeenColumns]:
    with storage.open_file(whole.path, whole.version, whole.size) as file:
        parquet = pq.ParquetFile(file)
        metadata, names = parquet.metadata, parquet.schema_arrow.names
    wanted = {*config.wanted_columns().values(), config.input.id_column, config.input.category_column}
    groups = [(g.num_rows, _read_bytes(g, wanted)) for g in map(metadata.row_group, range(metadata.num_row_groups))]
    bounds = cut_rows(groups, config.cluster.unit_documents, config.cluster.unit_bytes)
    return _of_rows(whole, bounds, metadata.num_rows), SeenColumns(names, schema=True)


def _of_rows(whole: Part, bounds: Iterable[tuple[int, int]], rows: int) -> Iterator[Part]:
    """Ranges of an object's rows; each takes its share of the stored bytes."""
    for start, end in bounds:
        size = whole.size * (end - start) // max(1, rows)
        yield replace(whole, start=start, end=end, expected=end - start, bytes=size)


def _read_bytes(group: Any, wanted: set[str | None]) -> int:
    """Bytes, decompressed, of the columns that are read of a row group."""
    found = (group.column(i) for i in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in found if c.path_in_schema.split(".")[0] in wanted)


def cut_rows(groups: Iterable[tuple[int, int]], most_rows: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows over row groups of (rows, bytes): none above either limit, but each of one row at least."""
    start = end = 0
    size = 0.0
    for rows, length in groups:
        each = length / rows if rows else 0.0
        while rows:
            room = most_rows - (end - start)
            if each:
                room = min(room, int((most_bytes - size) / each))
            elif size > most_bytes:  # one row above the limit, and then rows of no bytes
                room = 0
            if room <= 0 and end > start:
                yield start, end
                start, size = end, 0.0
                continue
            taken = min(rows, max(1, room))
            end, rows, size = end + taken, rows - taken, size + taken * each
    if end > start:
        yield start, end


def _plain(whole: Part, config: RunConfig) -> tuple[Iterator[Part], SeenColumns]:
    with storage.open_read(whole.path, version=whole.version) as file:
        head = file.read(HEAD_BYTES)
    if len(head) != min(whole.size, HEAD_BYTES):
        raise InputError("has changed while the run was planned; start the run again")
    if whole.size > HEAD_BYTES:
        head = head[: head.rfind(b"\n") + 1]  # without a line that is not seen to its end
    first = list(lines(io.BytesIO(head), line_limit(config.input.max_document_bytes)))
    seen = columns_of(line.data for line in first[:_SAMPLED_LINES] if line.data is not None)
    if whole.size <= HEAD_BYTES:
        return _counted(whole, first, config), seen
    return _estimated(whole, len(head), len(first), config), seen


def _counted(whole: Part, known: list[Line], config: RunConfig) -> Iterator[Part]:
    """The ranges of an object of which every line is known."""
    begins = [line.offset for line in known] + [whole.size]
    rows = [(1, line.length) for line in known]
    for first, last in cut_rows(rows, config.cluster.unit_documents, config.cluster.unit_bytes):
        start, end = begins[first], begins[last]
        yield replace(whole, start=start, end=end, expected=last - first, bytes=end - start)


def _estimated(whole: Part, seen_bytes: int, seen_lines: int, config: RunConfig) -> Iterator[Part]:
    """Ranges of equal length, by the mean length of the lines that were seen."""
    mean = seen_bytes / seen_lines if seen_lines else HEAD_BYTES
    count = math.ceil(whole.size / min(config.cluster.unit_documents * mean, config.cluster.unit_bytes))
    for i in range(count):
        start, end = i * whole.size // count, (i + 1) * whole.size // count
        documents = max(1, round((end - start) / mean))
        yield replace(whole, start=start, end=end, expected=documents, exact=False, bytes=end - start)


def _compressed(whole: Part, config: RunConfig) -> tuple[Iterator[Part], SeenColumns]:
    sampled: list[bytes] = []
    number = 0

    def lengths(file: BinaryIO) -> Iterator[tuple[int, int]]:
        nonlocal number
        for line in lines(file, line_limit(config.input.max_document_bytes)):
            if len(sampled) < _SAMPLED_LINES and line.data is not None:
                sampled.append(line.data)
            number = line.number
            yield 1, line.length

    try:
        with open_lines(whole.path, whole.compression, version=whole.version) as file:
            bounds = list(cut_rows(lengths(file), config.cluster.unit_documents, config.cluster.unit_bytes))
    except (EOFError, zlib.error, OSError) as error:
        raise _broken(error, whole, number) from None
    return _of_rows(whole, bounds, bounds[-1][1] if bounds else 0), columns_of(sampled)


def _delimited(whole: Part, config: RunConfig) -> tuple[Iterator[Part], SeenColumns]:
    starts: list[tuple[int, int]] = []  # (offset, line) of the first record of each range
    counts: list[int] = []  # of its records
    size = line = end = 0  # size: bytes of the last range
    try:
        names, records = delimited.whole(whole, config.input)
        for record in records:
            full = counts and counts[-1] >= config.cluster.unit_documents
            if not counts or full or size + record.length > config.cluster.unit_bytes:
                starts.append((record.offset, record.line))
                counts.append(0)
                size = 0
            counts[-1] += 1
            size, line, end = size + record.length, record.line, record.offset + record.length
    except (EOFError, zlib.error, OSError) as error:
        raise _broken(error, whole, line) from None
    ends = [*(offset for offset, _ in starts[1:]), end]
    found = zip(starts, ends, counts, strict=False)  # without records there is an end alone
    parts = (
        replace(whole, start=at, end=to, line=number, expected=count, bytes=whole.size * (to - at) // end)
        for (at, number), to, count in found
    )
    return parts, SeenColumns(names, schema=bool(names))


def _broken(error: Exception, whole: Part, line: int) -> Exception:
    """What to raise where reading fails after a line: InputError where the stream is damaged, else the error itself."""
    if whole.compression is None or not is_broken(error):
        return error
    return InputError(
        f"cannot be read as {whole.compression} after line {line}: {error}; the file is damaged or cut short"
    )
