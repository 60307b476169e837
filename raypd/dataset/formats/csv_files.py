"""CSV and TSV files: the first record names the columns."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import raypd.dataset.delimited as delimited
from raypd.config import ClusterConfig, InputConfig
from raypd.dataset.formats.base import Columns, Fields, Format, SeenColumns, SourceRow, Split
from raypd.dataset.formats.ranges import even_boundaries, parts_between
from raypd.dataset.jsonl import UNREADABLE, stream_error
from raypd.run import Part
from raypd.text import counted


class Csv(Format):
    """CSV.

    Planning reads the whole file, because a quoted field may contain line breaks, and cuts it into
    ranges of bytes that begin at records.
    """

    def split(
        self, part: Part, source: InputConfig, cluster: ClusterConfig, columns: Columns
    ) -> Split:
        # The first record of each range, and how many records it has.
        first_records: list[tuple[int, int]] = []  # (offset, line)
        counts: list[int] = []
        range_bytes = 0
        line = 0
        end = 0
        try:
            part = delimited.with_encoding(part, source)
            names, records = delimited.whole(part, source)
            for record in records:
                is_full = (
                    not counts
                    or counts[-1] >= cluster.unit_documents
                    or range_bytes + record.length > cluster.unit_bytes
                )
                if is_full:
                    first_records.append((record.offset, record.line))
                    counts.append(0)
                    range_bytes = 0
                counts[-1] += 1
                range_bytes += record.length
                line = record.line
                end = record.offset + record.length
        except UNREADABLE as error:
            raise stream_error(error, part, line) from None
        parts = _parts(part, first_records, counts, end)
        return Split(parts, SeenColumns(names, is_schema=bool(names)))

    def read(self, part: Part, source: InputConfig, columns: Columns) -> Iterator[SourceRow]:
        names, records = delimited.ranged(part, source)
        for record in records:
            yield SourceRow(record.offset, f"line {record.line}", partial(_fields, names, record))

    def sample(self, part: Part, source: InputConfig) -> Iterator[Fields]:
        names, records = delimited.whole(part, source)
        yield dict.fromkeys(names)
        for record in records:
            yield dict(zip(names, record.fields, strict=False))

    def can_enter(self, part: Part) -> bool:
        return part.compression is None

    def cut(self, part: Part, source: InputConfig, pieces: int) -> list[Part]:
        if not delimited.can_seek(part, source):
            # Each piece would have to read the file from its beginning.
            return [part]
        _, part_records = delimited.ranged(part, source)
        records = [(record.offset, record.line) for record in part_records]
        boundaries = even_boundaries(part, pieces)
        for number in range(1, pieces):
            offset, line = records[boundaries[number].documents]
            boundaries[number] = boundaries[number]._replace(start=offset, line=line)
        return parts_between(part, boundaries)


class Tsv(Csv):
    """TSV: like CSV, with a tab between fields."""


def _parts(
    part: Part, first_records: list[tuple[int, int]], counts: list[int], end: int
) -> Iterator[Part]:
    """Yield the ranges of a file.

    Args:
        part: The whole file.
        first_records: (offset, line) of the first record of each range.
        counts: Records of each range.
        end: The offset after the last record.
    """
    ends = [offset for offset, _ in first_records[1:]]
    ends.append(end)
    # A file without records has only an end.
    for (start, line), range_end, count in zip(first_records, ends, counts, strict=False):
        size = part.size * (range_end - start) // end
        yield replace(part, start=start, end=range_end, line=line, expected=count, bytes=size)


def _fields(names: Sequence[str], record: delimited.DelimitedRecord) -> Fields:
    """Return the fields of a record by the names of the header.

    Raises:
        ValueError: The record does not fit the header, or its bytes are damaged.
    """
    if record.error is not None:
        raise ValueError(record.error)
    if len(record.fields) != len(names):
        raise ValueError(f"{counted(len(record.fields), 'field')}, but the header has {len(names)}")
    return dict(zip(names, record.fields, strict=True))
