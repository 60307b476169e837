"""Cutting one file into ranges: by rows, by bytes, and a planned range into smaller ones."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from raypd.run import Part

# Groups of rows that are stored together in a file, each as (rows, bytes).
RowGroups = list[tuple[int, int]]
# A row group of at least this size is read by one process, from its beginning to its end.
_LARGE_GROUP_BYTES = 64 << 20


def cut_rows(
    groups: Iterable[tuple[int, int]], max_rows: int, max_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield ranges (first row, end row) over all rows of a file.

    No range exceeds a limit unless a single row does. Ranges may span several groups.

    Args:
        groups: The file's row groups, each as (rows, bytes), in the order of the file.
        max_rows: Rows of a range.
        max_bytes: Bytes of a range; the rows of one group count as equally large.
    """
    start = 0
    end = 0
    size = 0.0
    for group_rows, group_bytes in groups:
        remaining = group_rows
        row_bytes = group_bytes / group_rows if group_rows else 0.0
        while remaining:
            room = max_rows - (end - start)
            if row_bytes:
                room = min(room, int((max_bytes - size) / row_bytes))
            elif size > max_bytes:
                # The range already exceeds the limit with a single row, so it gets no further rows,
                # not even these, which have no bytes.
                room = 0
            if room <= 0 and end > start:
                yield start, end
                start = end
                size = 0.0
                continue
            count = min(remaining, max(1, room))
            end += count
            remaining -= count
            size += count * row_bytes
    if end > start:
        yield start, end


def row_parts(part: Part, bounds: Iterable[tuple[int, int]], rows: int) -> Iterator[Part]:
    """Yield a part for each range of rows; each is assigned its share of the stored bytes.

    Args:
        part: The whole file.
        bounds: Ranges of rows as `cut_rows` yields them.
        rows: Rows of the file.
    """
    for start, end in bounds:
        count = end - start
        size = part.size * count // max(1, rows)
        yield replace(part, start=start, end=end, expected=count, bytes=size)


def with_groups(parts: Iterable[Part], groups: RowGroups) -> Iterator[Part]:
    """Yield parts, each with the row group in which it begins if that is a large one.

    Args:
        parts: The parts of a file, in order.
        groups: The file's row groups, each as (rows, bytes).
    """
    remaining = iter(groups)
    group_start = 0
    group_end = 0
    group_bytes = 0
    for part in parts:
        while part.start >= group_end:
            group_rows, group_bytes = next(remaining)
            group_start = group_end
            group_end += group_rows
        if group_bytes >= _LARGE_GROUP_BYTES:
            part = replace(part, group=group_start)
        yield part


class Boundary(NamedTuple):
    """A position in a part at which one piece ends and the next begins."""

    start: int  # the row or byte, as `Part.start` counts
    documents: int  # documents of the part before it
    bytes: int  # stored bytes of the part before it
    line: int  # the line in a CSV file


def even_boundaries(part: Part, pieces: int) -> list[Boundary]:
    """Return the boundaries that cut a part into equal pieces: `pieces` + 1 of them."""
    length = part.end - part.start
    return [
        Boundary(
            part.start + length * number // pieces,
            part.expected * number // pieces,
            part.bytes * number // pieces,
            part.line,
        )
        for number in range(pieces + 1)
    ]


def parts_between(part: Part, boundaries: list[Boundary]) -> list[Part]:
    """Return the pieces of a part that lie between boundaries."""
    return [
        replace(
            part,
            start=first.start,
            end=last.start,
            expected=last.documents - first.documents,
            bytes=last.bytes - first.bytes,
            line=first.line,
        )
        for first, last in itertools.pairwise(boundaries)
    ]
