"""Files and streams in Arrow's IPC format, in which Hugging Face datasets are saved."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from raypd import storage
from raypd.config import InputConfig
from raypd.dataset.formats.arrow_columns import needed_names, rows_of_batches, text_rows
from raypd.dataset.formats.base import Columns, Fields, RowFormat, SeenColumns, SourceRow
from raypd.dataset.formats.nested_names import names_in_schema
from raypd.dataset.formats.ranges import RowGroups
from raypd.run import Part

_FILE_MAGIC = b"ARROW1"  # a stream begins with other bytes


class Arrow(RowFormat):
    """Arrow IPC."""

    title = "Arrow"
    compressible = False

    def count(
        self, part: Part, source: InputConfig, columns: Columns
    ) -> tuple[RowGroups, SeenColumns]:
        with (
            storage.open_file(part.path, part.version, part.size) as file,
            _open_batches(file) as batches,
        ):
            groups = [(batch.num_rows, batch.nbytes) for batch in batches]
            return groups, SeenColumns(names_in_schema(batches.schema), is_schema=True)

    def read(self, part: Part, source: InputConfig, columns: Columns) -> Iterator[SourceRow]:
        with (
            storage.open_file(part.path, part.version, part.size) as file,
            _open_batches(file) as batches,
        ):
            names = needed_names(batches.schema.names, columns)
            selected = (batch.select(names) for batch in batches)
            yield from rows_of_batches(selected, 0, part)

    def sample(self, part: Part, source: InputConfig) -> Iterator[Fields]:
        with storage.open_file(part.path) as file:
            for batch in _open_batches(file):
                yield from text_rows(batch)


def _open_batches(file: Any) -> pa.RecordBatchReader:
    """Return the batches of an open file; raises pa.ArrowInvalid."""
    magic = file.read(len(_FILE_MAGIC))
    file.seek(0)
    if magic != _FILE_MAGIC:
        return pa.ipc.open_stream(file)
    ipc_file = pa.ipc.open_file(file)
    batches = map(ipc_file.get_batch, range(ipc_file.num_record_batches))
    return pa.RecordBatchReader.from_batches(ipc_file.schema, batches)
