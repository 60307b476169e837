"""JSON Lines: an object per line, plain or compressed."""

import contextlib
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from raypd import storage
from raypd.config import ClusterConfig, InputConfig
from raypd.dataset.formats.base import (
    SAMPLED_ROWS,
    Columns,
    Fields,
    Format,
    SeenColumns,
    SourceRow,
    Split,
)
from raypd.dataset.formats.nested_names import names_in_row
from raypd.dataset.formats.ranges import (
    Boundary,
    cut_rows,
    even_boundaries,
    parts_between,
    row_parts,
)
from raypd.dataset.jsonl import (
    BOM,
    UNREADABLE,
    Line,
    line_limit,
    lines,
    lines_of_range,
    open_lines,
    packed_lines,
    stream_error,
)
from raypd.errors import InputError, in_words
from raypd.run import Part
from raypd.tasks import kind_of, parse_json

# Bytes of a plain file that planning reads to count lines and find columns.
HEAD_BYTES = 1 << 20


class JsonLines(Format):
    """JSON Lines.

    A plain file is cut into ranges of bytes, and planning reads only its first megabyte. A
    compressed file is cut into ranges of lines, and planning reads all of it, because a compressed
    stream cannot be read from the middle.
    """

    has_schema = False

    def split(
        self, part: Part, source: InputConfig, cluster: ClusterConfig, columns: Columns
    ) -> Split:
        if part.compression is None:
            return _split_plain(part, source, cluster)
        return _split_compressed(part, source, cluster)

    def read(self, part: Part, source: InputConfig, columns: Columns) -> Iterator[SourceRow]:
        limit = line_limit(source.max_document_bytes)
        offset = 0
        if part.compression is None:
            offset = max(0, part.start - 1)
        with open_lines(part.path, part.compression, offset, part.version) as file:
            if part.compression is None:
                selected = lines_of_range(file, limit, part.start, part.end)
            else:
                selected = itertools.islice(packed_lines(file, limit), part.start, part.end)
            for line in selected:
                read_fields = partial(_fields_of_line, line, source)
                yield SourceRow(line.offset, f"byte {line.offset}", read_fields)

    def sample(self, part: Part, source: InputConfig) -> Iterator[Fields]:
        limit = line_limit(source.max_document_bytes)
        with open_lines(part.path, part.compression) as file:
            all_lines = (
                lines(file, limit) if part.compression is None else packed_lines(file, limit)
            )
            for line in all_lines:
                try:
                    row = json.loads((line.data or b"").removeprefix(BOM))
                except (ValueError, RecursionError):
                    continue
                yield row if isinstance(row, dict) else {}

    def can_enter(self, part: Part) -> bool:
        return part.compression is None

    def counts_rows(self, part: Part) -> bool:
        return part.compression is not None

    def may_have(self, part: Part, offset: int) -> bool:
        # A compressed file is cut by lines, but its rows are identified by their byte offsets.
        return part.compression is not None or super().may_have(part, offset)

    def cut(self, part: Part, source: InputConfig, pieces: int) -> list[Part]:
        if part.compression is not None:
            return super().cut(part, source, pieces)
        boundaries = even_boundaries(part, pieces)
        if part.exact:
            # The pieces stay exact only if each of them begins with a line.
            boundaries = _at_lines(boundaries, part, source)
        # The ranges of a plain file are in stored bytes.
        boundaries = [boundary._replace(bytes=boundary.start) for boundary in boundaries]
        return parts_between(part, boundaries)


def _split_plain(part: Part, source: InputConfig, cluster: ClusterConfig) -> Split:
    with storage.open_read(part.path, version=part.version) as file:
        head = file.read(HEAD_BYTES)
    if len(head) != min(part.size, HEAD_BYTES):
        raise InputError("has changed while the run was planned; start the run again")
    if part.size > HEAD_BYTES:
        # The last line may continue after the head.
        head = head[: head.rfind(b"\n") + 1]
    head_lines = list(lines(io.BytesIO(head), line_limit(source.max_document_bytes)))
    columns = columns_of_lines(
        line.data for line in head_lines[:SAMPLED_ROWS] if line.data is not None
    )
    if part.size <= HEAD_BYTES:
        return Split(_counted_parts(part, head_lines, cluster), columns)
    return Split(_estimated_parts(part, len(head), len(head_lines), cluster), columns)


def _counted_parts(part: Part, file_lines: list[Line], cluster: ClusterConfig) -> Iterator[Part]:
    """Yield exact ranges of a file whose lines are all known."""
    offsets = [line.offset for line in file_lines] + [part.size]
    rows = [(1, line.length) for line in file_lines]
    for first, last in cut_rows(rows, cluster.unit_documents, cluster.unit_bytes):
        start = offsets[first]
        end = offsets[last]
        yield replace(part, start=start, end=end, expected=last - first, bytes=end - start)


def _estimated_parts(
    part: Part, head_bytes: int, head_lines: int, cluster: ClusterConfig
) -> Iterator[Part]:
    """Yield ranges of equal length, with documents estimated from the mean length of lines."""
    line_bytes: float = HEAD_BYTES
    if head_lines:
        line_bytes = head_bytes / head_lines
    unit_bytes = min(cluster.unit_documents * line_bytes, cluster.unit_bytes)
    count = math.ceil(part.size / unit_bytes)
    for number in range(count):
        start = number * part.size // count
        end = (number + 1) * part.size // count
        size = end - start
        documents = max(1, round(size / line_bytes))
        yield replace(part, start=start, end=end, expected=documents, exact=False, bytes=size)


def _split_compressed(part: Part, source: InputConfig, cluster: ClusterConfig) -> Split:
    sampled: list[bytes] = []
    last_line = 0

    def line_sizes(file: BinaryIO) -> Iterator[tuple[int, int]]:
        nonlocal last_line
        for line in packed_lines(file, line_limit(source.max_document_bytes)):
            if len(sampled) < SAMPLED_ROWS and line.data is not None:
                sampled.append(line.data)
            last_line = line.number
            yield 1, line.length

    try:
        with open_lines(part.path, part.compression, version=part.version) as file:
            bounds = list(cut_rows(line_sizes(file), cluster.unit_documents, cluster.unit_bytes))
    except UNREADABLE as error:
        raise stream_error(error, part, last_line) from None
    rows = bounds[-1][1] if bounds else 0
    return Split(row_parts(part, bounds, rows), columns_of_lines(sampled))


def columns_of_lines(texts: Iterable[bytes]) -> SeenColumns:
    """Return all columns that occur in lines of JSON."""
    columns: set[str] = set()
    rows = 0
    objects = 0
    for text in texts:
        rows += 1
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(text.removeprefix(BOM))
            if isinstance(row, dict):
                objects += 1
                columns.update(names_in_row(row))
    return SeenColumns(sorted(columns), rows, objects)


def _at_lines(boundaries: list[Boundary], part: Part, source: InputConfig) -> list[Boundary]:
    """Move the inner boundaries of an exact part to the lines at which their documents begin."""
    limit = line_limit(source.max_document_bytes)
    with open_lines(part.path, None, max(0, part.start - 1), part.version) as file:
        offsets = [line.offset for line in lines_of_range(file, limit, part.start, part.end)]
    inner = [boundary._replace(start=offsets[boundary.documents]) for boundary in boundaries[1:-1]]
    return [boundaries[0], *inner, boundaries[-1]]


def _fields_of_line(line: Line, source: InputConfig) -> Fields:
    """Return the object on a line.

    Raises:
        ValueError: The line is not an object; the text says why.
    """
    if line.data is None:
        raise ValueError(
            f"the line has {line.length} bytes; input.max_document_bytes is "
            f"{source.max_document_bytes}"
        )
    data = line.data
    if line.offset == 0:
        data = data.removeprefix(BOM)
    try:
        fields = parse_json(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start} of the line") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {in_words(error)}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, found {kind_of(fields)}")
    return fields
