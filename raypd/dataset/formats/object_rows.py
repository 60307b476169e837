"""Formats in which each unit reads a whole file and takes its rows by number."""

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from raypd.config import InputConfig
from raypd.dataset.formats.base import (
    SAMPLED_ROWS,
    Columns,
    Fields,
    RowFormat,
    SeenColumns,
    SourceRow,
)
from raypd.dataset.formats.nested_names import names_in_row
from raypd.dataset.formats.ranges import RowGroups
from raypd.dataset.jsonl import open_lines
from raypd.errors import InputError
from raypd.run import Part

# As Python objects, these bytes take about a gigabyte.
_MAX_BYTES = 1 << 27


class ObjectFormat(RowFormat):
    """A format that yields the rows of a file one after the other, each as a Python object."""

    @abstractmethod
    def rows(self, part: Part, source: InputConfig) -> Iterator[Any]:
        """Yield all rows of a file; an item that is not a row is yielded unchanged."""

    @abstractmethod
    def fields(self, row: Any) -> Fields:
        """Return the fields of a row.

        Raises:
            ValueError: The item is not a row; the text says what it is.
        """

    def count(
        self, part: Part, source: InputConfig, columns: Columns
    ) -> tuple[RowGroups, SeenColumns]:
        """Read all rows once to count them; the first ones show the columns."""
        names: dict[str, None] = {}
        groups: RowGroups = []
        seen = SeenColumns([])
        for row in self.rows(part, source):
            fields: Mapping[Any, Any] = {}
            if isinstance(row, Mapping):
                fields = dict(row)
            if seen.rows < SAMPLED_ROWS:
                names.update(dict.fromkeys(names_in_row(fields)))
                seen.rows += 1
                seen.objects += isinstance(row, Mapping)
            texts = (value for value in fields.values() if isinstance(value, str))
            groups.append((1, sum(map(len, texts))))
        seen.names = list(names)
        seen.is_schema = self.has_schema and bool(names)
        return groups, seen

    def read(self, part: Part, source: InputConfig, columns: Columns) -> Iterator[SourceRow]:
        numbered = enumerate(self.rows(part, source))
        for number, row in itertools.islice(numbered, part.start, part.end):
            yield SourceRow(number, f"row {number}", partial(self.fields, row))


def read_whole(part: Part, advice: str) -> bytes:
    """Return the uncompressed bytes of a file.

    Args:
        part: The file.
        advice: What to do with a file that is too large.

    Raises:
        InputError: The file is too large.
        OSError: The file cannot be read.
    """
    with open_lines(part.path, part.compression, version=part.version) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise InputError(f"a file of more than {_MAX_BYTES >> 20} MiB: {advice}")
    return data
