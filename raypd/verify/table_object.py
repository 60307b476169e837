"""The table of nightly runs: its objects, and the list of them."""

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.errors import Damaged
from raypd.run import layout


def objects(root: str) -> list[str]:
    return storage.read(storage.join(root, layout.CURRENT)).decode().splitlines()


def read_object(path: str, columns: list[str] | None = None) -> pa.Table:
    """An object's rows. columns: None: all. Raises Damaged (also: gone), storage.Unavailable: its
    store is away.
    """
    try:
        with storage.open_file(path) as file:
            return pq.ParquetFile(file, page_checksum_verification=True).read(columns)
    except (pa.ArrowException, OSError) as error:
        if outage := storage.outage(error, path):
            raise outage from None
        raise Damaged(
            f"{path}: a part of the table cannot be read: {error}; --full makes everything anew"
        ) from None


def write_object(path: str, table: pa.Table) -> None:
    """Writes an object with checksums, in place of one that a session which was cut off has
    written.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    storage.put(path, sink.getvalue().to_pybytes())
