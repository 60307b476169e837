"""Tables on the local disk that are too long for memory: filled by threads, then asked with SQL.

DuckDB does the work. Its memory is bounded, and what does not fit goes into a temporary folder that ends with the
object. Nothing here knows runs or documents.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

MEMORY = "2GB"
_BUFFERED_ROWS = 100_000


class Scratch:
    """Named tables: `add` rows from any thread, then `query`. After the first query of a table it takes no more rows.

    The folder lies in TMPDIR; a hundred million documents need some gigabytes there.
    """

    def __init__(self, memory: str = MEMORY) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="raypd-"))
        self._memory = memory
        self._lock = threading.Lock()
        self._buffers: dict[str, list[pa.Table]] = {}
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._connection: Any = None

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._connection is not None:
            self._connection.close()
        for writer in self._writers.values():
            writer.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def create(self, name: str, schema: pa.Schema) -> None:
        """An empty table."""
        self._buffers[name] = []
        self._writers[name] = pq.ParquetWriter(self.folder / f"{name}.parquet", schema, compression="zstd")

    def add(self, name: str, rows: pa.Table) -> None:
        """Appends rows with the schema that the table was made with."""
        with self._lock:
            buffer = self._buffers[name]
            buffer.append(rows)
            if sum(map(len, buffer)) >= _BUFFERED_ROWS:
                self._flush(name)

    def _flush(self, name: str) -> None:
        buffer = self._buffers[name]
        if buffer:
            self._writers[name].write_table(pa.concat_tables(buffer))
            buffer.clear()

    def close(self, name: str) -> None:
        """Ends the filling of a table and makes it known to SQL by its name."""
        self._flush(name)
        del self._buffers[name]
        self._writers.pop(name).close()
        self.view(name, [str(self.folder / f"{name}.parquet")])

    def view(self, name: str, files: list[str]) -> None:
        """Makes local Parquet files known to SQL as one table."""
        listed = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
        self.run(f"CREATE VIEW {name} AS SELECT * FROM read_parquet([{listed}])")

    def run(self, sql: str) -> None:
        """A statement without a result."""
        self._open().execute(sql)

    def one(self, sql: str) -> tuple[Any, ...]:
        """The only row of a query."""
        (row,) = self._open().execute(sql).fetchall()
        return tuple(row)

    def rows(self, sql: str, batch: int = 10_000) -> Iterator[dict[str, Any]]:
        """The rows of a query, streamed. One query at a time."""
        for found in self.batches(sql, batch):
            yield from found.to_pylist()

    def batches(self, sql: str, batch: int = 10_000) -> Iterator[pa.RecordBatch]:
        """The rows of a query as Arrow batches, streamed. One query at a time."""
        yield from self._open().sql(sql).to_arrow_reader(batch)

    def _open(self) -> Any:
        if self._connection is None:
            settings: dict[str, Any] = {"memory_limit": self._memory, "temp_directory": str(self.folder / "spilled")}
            # In a file: tables in memory would count against its limit.
            self._connection = duckdb.connect(str(self.folder / "scratch.duckdb"), config=settings)
            self._connection.execute("SET enable_progress_bar = false")
            self._connection.execute("SET preserve_insertion_order = false")  # it costs memory
        return self._connection
