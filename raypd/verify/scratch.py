"""Tables on the local disk that are too long for memory: filled by threads, then queried with SQL.

DuckDB does the work. Its memory is bounded, and what does not fit goes into a temporary folder that is deleted with
the object. Nothing here knows runs or documents.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

MEMORY = "2GB"
_BUFFERED_ROWS = 100_000


class Scratch(ExitStack):
    """Named tables: `create`, `add` rows from any thread, `finish`, then query. To be used in a `with`.

    The folder lies in TMPDIR; a hundred million documents need some gigabytes there.
    """

    def __init__(self) -> None:
        super().__init__()
        folder = tempfile.TemporaryDirectory(prefix="raypd-", ignore_cleanup_errors=True)
        self._folder = Path(self.enter_context(folder))
        self._lock = threading.Lock()
        self._buffers: dict[str, list[pa.Table]] = {}
        self._writers: dict[str, pq.ParquetWriter] = {}
        settings: dict[str, Any] = {
            "memory_limit": MEMORY,
            "temp_directory": str(self._folder / "spilled"),
            "preserve_insertion_order": "false",  # it costs memory
        }
        # In a file: tables in memory would count against its limit.
        self._connection = self.enter_context(duckdb.connect(self._folder / "scratch.duckdb", config=settings))
        self._connection.execute("SET enable_progress_bar = false")

    def create(self, name: str, schema: pa.Schema) -> None:
        """An empty table."""
        self._buffers[name] = []
        writer = pq.ParquetWriter(self._folder / f"{name}.parquet", schema, compression="zstd")
        self._writers[name] = self.enter_context(writer)

    def add(self, name: str, rows: pa.Table | Sequence[Any]) -> None:
        """Appends rows: a table with the schema of `create`, or the values of each of its columns."""
        if not isinstance(rows, pa.Table):
            rows = pa.table(rows, schema=self._writers[name].schema)
        with self._lock:
            self._buffers[name].append(rows)
            if sum(map(len, self._buffers[name])) >= _BUFFERED_ROWS:
                self._flush(name)

    def _flush(self, name: str) -> None:
        if self._buffers[name]:
            self._writers[name].write_table(pa.concat_tables(self._buffers[name]))
            self._buffers[name].clear()

    def finish(self, name: str) -> None:
        """Makes a table known to SQL by its name; it takes no more rows."""
        self._flush(name)
        self._writers[name].close()
        file = quoted([str(self._folder / f"{name}.parquet")])
        self.run(f"CREATE VIEW {name} AS SELECT * FROM read_parquet({file})")

    def run(self, sql: str) -> None:
        """Runs a statement that has no result."""
        self._connection.execute(sql)

    def row(self, sql: str) -> dict[str, Any]:
        """The only row of a query."""
        (row,) = self.rows(sql)
        return row

    def number(self, sql: str) -> int:
        """The number that a query counts."""
        return int(*self.row(sql).values())

    def rows(self, sql: str) -> Iterator[dict[str, Any]]:
        """The rows of a query, streamed. One query at a time."""
        for found in self.batches(sql, 10_000):
            yield from found.to_pylist()

    def batches(self, sql: str, rows: int) -> Iterator[pa.RecordBatch]:
        """The rows of a query as Arrow batches of so many rows, streamed. One query at a time."""
        yield from self._connection.sql(sql).to_arrow_reader(rows)


def quoted(values: Iterable[str]) -> str:
    """Texts as a list in SQL, without its brackets."""
    return ", ".join("'" + value.replace("'", "''") + "'" for value in values)
