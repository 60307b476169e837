"""Files that give row after row: Arrow's, which Hugging Face's `datasets` saves too, and those that a function of the
user's reads (`input.reader`)."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from raypd import storage
from raypd.config import InputConfig
from raypd.config.schema import imported
from raypd.errors import InputError
from raypd.run.unit import Part


def arrow_batches(file: Any) -> pa.RecordBatchReader:
    """The batches of an open file, a stream or a file of Arrow's IPC format. Raises pa.ArrowInvalid."""
    magic = file.read(6)
    file.seek(0)
    if magic != b"ARROW1":
        return pa.ipc.open_stream(file)
    whole = pa.ipc.open_file(file)
    return pa.RecordBatchReader.from_batches(whole.schema, map(whole.get_batch, range(whole.num_record_batches)))


def custom_rows(part: Part, source: InputConfig) -> Iterator[Any]:
    """What `input.reader` gives for a file. Raises InputError where it fails, OSError of storage, ConfigError."""
    read = imported("input.reader", str(source.reader))
    with storage.open_read(part.path, version=part.version) as file:
        try:
            yield from read(part.name, file)
        except Exception as error:
            if isinstance(error, OSError) and (outage := storage.outage(error, part.path)):
                raise outage from None
            raise InputError(f"input.reader {source.reader}: {type(error).__name__}: {error}") from None
