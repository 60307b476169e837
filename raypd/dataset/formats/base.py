"""What every input format provides: one subclass of `Format` for each format."""

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from raypd.config import ClusterConfig, InputConfig
from raypd.dataset.formats.ranges import (
    RowGroups,
    cut_rows,
    even_boundaries,
    parts_between,
    row_parts,
    with_groups,
)
from raypd.run import Part

# Rows of a file in which planning looks for columns.
SAMPLED_ROWS = 100

Fields = dict[str, Any]
# The columns that a run reads.
Columns = Container[str | None]


class SourceRow(NamedTuple):
    """A row of a file that becomes one document."""

    # Where the row begins: a byte or a row number. Default ids and the output column `row` use it.
    offset: int
    # The same in words, such as "line 7", for messages; "" if the whole file is the document.
    position: str
    # Returns the row's fields; raises ValueError with what is wrong with the row.
    read_fields: Callable[[], Fields]


@dataclass
class SeenColumns:
    """The columns of a file, from its schema or from its first rows."""

    names: list[str]
    rows: int = 0  # rows that were looked at
    objects: int = 0  # the rows among them that have columns
    is_schema: bool = False  # whether every row has these columns and no others


class Split(NamedTuple):
    """The result of planning one file."""

    parts: Iterator[Part]
    columns: SeenColumns


class Format(ABC):
    """How files of one format are recognized, cut into parts, read and looked at.

    An instance has no state. Every method raises InputError if the file cannot be read, and OSError
    or an error of pyarrow if the storage or the parser does.

    The registry (`raypd.config.INPUT_FORMATS`) gives each of its formats `name`, `endings` and
    `setting`, and describes them.
    """

    # Also `Part.format`.
    name: ClassVar[str]
    endings: ClassVar[tuple[str, ...]] = ()
    setting: ClassVar[str] = "auto"
    # What one file is read as if `setting` is not auto; for messages.
    reads_as: ClassVar[str] = ""
    # The format's name in the message "cannot be read as ...".
    title: ClassVar[str] = ""
    # Whether files may be compressed with gzip or zstd as a whole.
    compressible: ClassVar[bool] = True
    # Whether all rows of a file have the same columns.
    has_schema: ClassVar[bool] = True
    # Whether reading can start at any group of rows, so that skipping many rows is a waste.
    enters_groups: ClassVar[bool] = False
    # Whether the text of each row is in the column `text`, and its id in `id`.
    is_document: ClassVar[bool] = False

    @abstractmethod
    def split(
        self, part: Part, source: InputConfig, cluster: ClusterConfig, columns: Columns
    ) -> Split:
        """Cut a file into parts of at most a unit's documents and bytes.

        Args:
            part: The whole file, without a range.
            source: Section `input`.
            cluster: Section `cluster`, which has a unit's documents and bytes.
            columns: The columns that are needed.

        Returns:
            The parts, which are made on demand, and the file's columns.
        """

    @abstractmethod
    def read(self, part: Part, source: InputConfig, columns: Columns) -> Iterator[SourceRow]:
        """Yield the rows of a part in the order of the file.

        Args:
            part: A planned part.
            source: Section `input`.
            columns: The columns that are needed; a format may read all others as well.
        """

    def sample(self, part: Part, source: InputConfig) -> Iterator[Fields]:
        """Yield rows from the beginning of a file, for a look at its columns.

        A row that cannot be read has no columns. Rows that only name columns may come first.

        Args:
            part: The whole file, without a range.
            source: Section `input`.
        """
        for row in self.read(replace(part, end=sys.maxsize), source, _AllColumns()):
            fields: Fields = {}
            with contextlib.suppress(ValueError):
                fields = row.read_fields()
            yield fields

    def can_enter(self, part: Part) -> bool:
        """Return whether a part can be read without reading what precedes it in the file."""
        return False

    def counts_rows(self, part: Part) -> bool:
        """Return whether the range of a part counts rows, and not bytes."""
        return False

    def may_have(self, part: Part, offset: int) -> bool:
        """Return whether a part may have the row of this `SourceRow.offset`.

        Args:
            part: A planned part.
            offset: The row, of the same file.
        """
        return part.start <= offset < part.end

    def cut(self, part: Part, source: InputConfig, pieces: int) -> list[Part]:
        """Cut a planned part into smaller ones with the same documents and bytes in total.

        Args:
            part: A planned part.
            source: Section `input`.
            pieces: How many parts are wanted. There is one if reading cannot start inside `part`.
        """
        return parts_between(part, even_boundaries(part, pieces))


class _AllColumns(Container[str | None]):
    def __contains__(self, name: object) -> bool:
        return True


class RowFormat(Format):
    """A format whose parts are ranges of row numbers."""

    def counts_rows(self, part: Part) -> bool:
        return True

    @abstractmethod
    def count(
        self, part: Part, source: InputConfig, columns: Columns
    ) -> tuple[RowGroups, SeenColumns]:
        """Return the rows and bytes of a file in groups, and its columns.

        Args:
            part: The whole file, without a range.
            source: Section `input`.
            columns: The columns that are needed; a format may count the bytes of these alone.
        """

    def split(
        self, part: Part, source: InputConfig, cluster: ClusterConfig, columns: Columns
    ) -> Split:
        groups, seen = self.count(part, source, columns)
        bounds = cut_rows(groups, cluster.unit_documents, cluster.unit_bytes)
        rows = sum(group_rows for group_rows, _ in groups)
        parts = row_parts(part, bounds, rows)
        if self.enters_groups:
            parts = with_groups(parts, groups)
        return Split(parts, seen)
