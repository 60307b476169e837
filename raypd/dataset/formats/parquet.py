"""Parquet files: planned from the footer, read by row group."""

from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from raypd import storage
from raypd.config import InputConfig
from raypd.dataset.formats.arrow_columns import needed_names, rows_of_batches, text_rows
from raypd.dataset.formats.base import Columns, Fields, RowFormat, SeenColumns, SourceRow
from raypd.dataset.formats.nested_names import names_in_schema
from raypd.dataset.formats.ranges import RowGroups
from raypd.run import Part

_BATCH_ROWS = 1024
# Small batches and buffers, so that a look at the first rows does not read a whole row group.
_SAMPLE_BATCH_ROWS = 500
_SAMPLE_BUFFER = 1 << 20


class Parquet(RowFormat):
    """Parquet; Delta and Iceberg tables are folders of such files."""

    title = "Parquet"
    compressible = False
    enters_groups = True

    def count(
        self, part: Part, source: InputConfig, columns: Columns
    ) -> tuple[RowGroups, SeenColumns]:
        with storage.open_file(part.path, part.version, part.size) as file:
            parquet = pq.ParquetFile(file)
            metadata = parquet.metadata
            names = names_in_schema(parquet.schema_arrow)
        groups: RowGroups = []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            groups.append((group.num_rows, _bytes_read(group, columns)))
        return groups, SeenColumns(names, is_schema=True)

    def read(self, part: Part, source: InputConfig, columns: Columns) -> Iterator[SourceRow]:
        with storage.open_file(part.path, part.version, part.size) as file:
            parquet = pq.ParquetFile(file)
            names = needed_names(parquet.schema_arrow.names, columns)
            first_row = 0
            for number in range(parquet.metadata.num_row_groups):
                end_row = first_row + parquet.metadata.row_group(number).num_rows
                if end_row > part.start and first_row < part.end:
                    batches = parquet.iter_batches(_BATCH_ROWS, row_groups=[number], columns=names)
                    yield from rows_of_batches(batches, first_row, part)
                first_row = end_row

    def sample(self, part: Part, source: InputConfig) -> Iterator[Fields]:
        with storage.open_file(part.path) as file:
            parquet = pq.ParquetFile(file, buffer_size=_SAMPLE_BUFFER, pre_buffer=False)
            for batch in parquet.iter_batches(_SAMPLE_BATCH_ROWS):
                yield from text_rows(batch)


def _bytes_read(group: Any, columns: Columns) -> int:
    """Return the decompressed bytes of the wanted columns of a row group."""
    size = 0
    for number in range(group.num_columns):
        column = group.column(number)
        name = column.path_in_schema.split(".")[0].strip()
        if name in columns:
            size += column.total_uncompressed_size
    return size
