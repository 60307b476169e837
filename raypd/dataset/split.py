"""Looking into one object of the input: whether it can be read, and the ranges that it is cut into.

Parquet is cut by rows and bytes from its footer; uncompressed JSONL by bytes, of which only the first megabyte is
read; compressed JSONL by rows, for which all of it is read once, since a stream has no way into its middle.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset.columns import Columns, Seen
from raypd.dataset.jsonl import BROKEN_STREAM, Line, lines, open_lines
from raypd.dataset.listing import Found
from raypd.errors import InputError
from raypd.run.unit import Part

HEAD_BYTES = 1 << 20  # of uncompressed JSONL, from which lines are counted and columns seen
_SAMPLED_LINES = 100  # in which columns are looked for


class Range(NamedTuple):
    """Where a range begins and ends (rows or bytes, see Part), its documents, and its stored bytes."""

    start: int
    end: int
    expected: int
    exact: bool
    bytes: int


@dataclass
class Inspected:
    """An object that was looked into; `ranges` are made as they are asked for. `damaged`: why it cannot be read."""

    found: Found
    version: str
    ranges: Iterator[Range]
    seen: Seen | None = None
    damaged: str | None = None

    def parts(self) -> Iterator[Part]:
        """Its ranges that can hold documents; of a damaged object one that holds none."""
        found = self.found
        for start, end, expected, exact, size in self.ranges:
            if expected or not exact or self.damaged is not None:
                yield Part(
                    path=found.path,
                    name=found.name,
                    version=self.version,
                    stamp=found.stamp,
                    size=found.size,
                    format=found.format,
                    compression=found.compression,
                    start=start,
                    end=end,
                    expected=expected,
                    exact=exact,
                    bytes=size,
                )


def line_limit(max_document_bytes: int) -> int:
    """Bytes of a JSONL line beyond which it is not parsed: room for escapes and for columns that are not text."""
    return 4 * max_document_bytes + 65536


def inspect(found: Found, config: RunConfig, columns: Columns) -> Inspected:
    """Looks into an object. What is wrong with it is told in the result.

    Raises storage.Unavailable where storage as a whole gives way: the object may be well, so it must not be left out.
    """
    try:
        version = found.stamp if storage.is_remote(found.path) else storage.version(found.path)
        if found.format == "parquet":
            ranges, seen = _parquet(found, version, config, columns)
        elif found.compression is None:
            ranges, seen = _plain(found, version, config, columns)
        else:
            ranges, seen = _compressed(found, version, config, columns)
        reason = columns.lacks(seen, strict=found.format == "parquet")
    except InputError as error:
        reason = str(error)
    except (pa.ArrowException, OSError) as error:
        if outage := storage.outage(error, found.path):
            raise outage from None
        kind = "cannot be read as Parquet" if found.format == "parquet" else "cannot be read"
        reason = f"{kind}: {error}"
    if reason is not None:
        whole = Range(0, found.size, 0, False, found.size)
        return Inspected(found, found.stamp, iter([whole]), damaged=f"{found.path}: {reason}")
    return Inspected(found, version, ranges, seen)


# -------------------------------------------------------------------------------------------------------------- Parquet


def _parquet(found: Found, version: str, config: RunConfig, columns: Columns) -> tuple[Iterator[Range], Seen]:
    with storage.open_file(found.path, version, found.size) as file:
        parquet = pq.ParquetFile(file)
        metadata, names = parquet.metadata, parquet.schema_arrow.names
    wanted = {*config.wanted_columns().values(), config.input.id_column, config.input.category_column}
    groups = [(g.num_rows, _read_bytes(g, wanted)) for g in map(metadata.row_group, range(metadata.num_row_groups))]
    total = max(1, metadata.num_rows)
    return (
        Range(start, end, end - start, True, found.size * (end - start) // total)
        for start, end in cut_rows(groups, config.cluster.unit_documents, config.cluster.unit_bytes)
    ), columns.of_schema(names)


def _read_bytes(group: Any, wanted: set[str | None]) -> int:
    """Bytes, decompressed, of the columns that are read of a row group."""
    found = (group.column(i) for i in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in found if c.path_in_schema.split(".")[0] in wanted)


def cut_rows(groups: list[tuple[int, int]], most_rows: int, most_bytes: int) -> Iterator[tuple[int, int]]:
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


# ---------------------------------------------------------------------------------------------------------------- JSONL


def _plain(found: Found, version: str, config: RunConfig, columns: Columns) -> tuple[Iterator[Range], Seen]:
    with storage.open_read(found.path, version=version) as file:
        head = file.read(HEAD_BYTES)
    whole = found.size <= HEAD_BYTES
    if len(head) != min(found.size, HEAD_BYTES):
        raise InputError("has changed while the run was planned; start the run again")
    if not whole:
        head = head[: head.rfind(b"\n") + 1]  # without a line that is not seen to its end
    first = list(lines(io.BytesIO(head), line_limit(config.input.max_document_bytes)))
    sampled = [line.data for line in first[:_SAMPLED_LINES] if line.data is not None]
    ranges = _counted(first, found.size, config) if whole else _estimated(len(head), len(first), found.size, config)
    return ranges, columns.of_lines(sampled)


def _counted(known: list[Line], size: int, config: RunConfig) -> Iterator[Range]:
    """The ranges of an object of which every line is known."""
    begins = [line.offset for line in known] + [size]
    rows = [(1, line.length) for line in known]
    for start, end in cut_rows(rows, config.cluster.unit_documents, config.cluster.unit_bytes):
        yield Range(begins[start], begins[end], end - start, True, begins[end] - begins[start])


def _estimated(seen_bytes: int, seen_lines: int, size: int, config: RunConfig) -> Iterator[Range]:
    """Ranges of equal length, by the mean length of the lines that were seen."""
    mean = seen_bytes / seen_lines if seen_lines else HEAD_BYTES
    count = math.ceil(size / min(config.cluster.unit_documents * mean, config.cluster.unit_bytes))
    for i in range(count):
        start, end = i * size // count, (i + 1) * size // count
        yield Range(start, end, max(1, round((end - start) / mean)), False, end - start)


def _compressed(found: Found, version: str, config: RunConfig, columns: Columns) -> tuple[Iterator[Range], Seen]:
    most, most_bytes = config.cluster.unit_documents, config.cluster.unit_bytes
    bounds = [0]
    rows = size = number = 0
    sampled: list[bytes] = []
    try:
        with open_lines(found.path, found.compression, version=version) as file:
            for line in lines(file, line_limit(config.input.max_document_bytes)):
                if rows > bounds[-1] and (rows - bounds[-1] >= most or size + line.length > most_bytes):
                    bounds.append(rows)
                    size = 0
                if len(sampled) < _SAMPLED_LINES and line.data is not None:
                    sampled.append(line.data)
                rows, size, number = rows + 1, size + line.length, line.number
    except BROKEN_STREAM as error:
        raise InputError(
            f"cannot be read as {found.compression} after line {number}: {error}; the file is damaged or cut short"
        ) from None
    bounds.append(rows)
    return (
        Range(start, end, end - start, True, found.size * (end - start) // max(1, rows))
        for start, end in itertools.pairwise(bounds)
    ), columns.of_lines(sampled)
