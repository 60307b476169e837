"""Read and write the objects of a table of nightly runs."""

import contextlib
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.errors import Damaged
from raypd.run import layout


def objects(root: str) -> list[str]:
    """Return the paths of the files of the table: objects, or table files with many of them."""
    return storage.read(storage.join(root, layout.CURRENT)).decode().splitlines()


def has_table_files(paths: list[str]) -> bool:
    """Return whether the first of some files of a table is a table file rather than an object."""
    return bool(paths) and f"/{layout.NIGHTS}/" not in paths[0]


def tables(
    paths: Iterable[str], columns: list[str] | None = None, threads: int = 8
) -> Iterator[tuple[str, pa.Table]]:
    """Yield the rows of objects, and of table files one row group at a time.

    Args:
        paths: The files of the table.
        columns: The columns to read; None for all.
        threads: Pieces that are read at the same time.

    Yields:
        (path, rows), in the order of the paths.

    Raises:
        Damaged: If a file cannot be read, or does not exist.
        storage.Unavailable: If storage is out of reach.
    """

    def pieces() -> Iterator[tuple[str, int | None]]:
        for path in paths:
            if not has_table_files([path]):
                yield path, None
                continue
            with _opened(path) as parquet:
                groups = parquet.num_row_groups
            for group in range(groups):
                yield path, group

    def read(piece: tuple[str, int | None]) -> tuple[str, pa.Table]:
        path, group = piece
        if group is None:
            return path, read_object(path, columns)
        with _opened(path) as parquet:
            return path, parquet.read_row_group(group, columns)

    yield from storage.in_threads(read, pieces(), threads)


def read_object(path: str, columns: list[str] | None = None) -> pa.Table:
    """Read an object's rows.

    Args:
        path: The object.
        columns: The columns to read; None for all.

    Raises:
        Damaged: If the object cannot be read, or does not exist.
        storage.Unavailable: If its storage is out of reach.
    """
    with _opened(path) as parquet:
        # Callers read many objects at the same time, and most objects are small.
        return parquet.read(columns, use_threads=False)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile]:
    """Open a file; raises as `read_object` does."""
    try:
        with storage.open_file(path) as file:
            yield pq.ParquetFile(file, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        outage = storage.outage(error, path)
        if outage:
            raise outage from None
        advice = "--full extracts everything again"
        if has_table_files([path]):
            advice = f"delete {layout.PUBLISHED}, and the same command of the night writes it again"
        raise Damaged(f"{path}: a part of the table cannot be read: {error}; {advice}") from None


def write_object(path: str, table: pa.Table) -> None:
    """Write an object with checksums. It replaces an object of an interrupted session."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    storage.put(path, sink.getvalue().to_pybytes())
