"""Read and write the objects of a table of nightly runs."""

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.errors import Damaged
from raypd.run import layout


def objects(root: str) -> list[str]:
    """Return the paths of the table's objects."""
    return storage.read(storage.join(root, layout.CURRENT)).decode().splitlines()


def read_object(path: str, columns: list[str] | None = None) -> pa.Table:
    """Read an object's rows.

    Args:
        path: The object.
        columns: The columns to read; None for all.

    Raises:
        Damaged: If the object cannot be read, or does not exist.
        storage.Unavailable: If its storage is out of reach.
    """
    try:
        with storage.open_file(path) as file:
            # Callers read many objects at the same time, and each object is small.
            return pq.ParquetFile(file, page_checksum_verification=True).read(
                columns, use_threads=False
            )
    except (pa.ArrowException, OSError) as error:
        outage = storage.outage(error, path)
        if outage:
            raise outage from None
        raise Damaged(
            f"{path}: a part of the table cannot be read: {error}; --full extracts everything again"
        ) from None


def write_object(path: str, table: pa.Table) -> None:
    """Write an object with checksums. It replaces an object of an interrupted session."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    storage.put(path, sink.getvalue().to_pybytes())
