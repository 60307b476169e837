"""Tables that do not fit into memory: filled by threads, then queried with SQL.

They are kept by DuckDB in a temporary folder.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from raypd.run import TemporaryFolder, temporary_space

_MEMORY = "256MB"
_BUFFERED_ROWS = 100_000
# The errors that DuckDB raises for a full disk, and afterwards for every further statement.
_FULL = (OSError, duckdb.OperationalError, duckdb.FatalException)


class Scratch(ExitStack):
    """Temporary tables in TMPDIR; they take gigabytes per hundred million documents.

    Any thread may add rows. Every method raises RunError if TMPDIR is full.

    Args:
        tables: The tables to create: name -> schema.
    """

    def __init__(self, **tables: pa.Schema) -> None:
        super().__init__()
        folder = Path(self.enter_context(TemporaryFolder("scratch")).path)
        self._lock = threading.RLock()
        # The first table of each buffer is empty and has the schema.
        self._buffers: dict[str, list[pa.Table]] = {}
        self._buffered_rows = 0
        settings: dict[str, Any] = {
            "memory_limit": _MEMORY,
            "temp_directory": str(folder / "spilled"),
            # Preserving the order would cost memory.
            "preserve_insertion_order": "false",
        }
        # The database is a file, because tables in memory would count against the memory limit.
        try:
            with temporary_space(*_FULL):
                self._connection = duckdb.connect(folder / "scratch.duckdb", config=settings)
        except BaseException:
            self.close()
            raise
        self.callback(self._disconnect)
        self._connection.execute("SET enable_progress_bar = false")
        for name, schema in tables.items():
            self.create(name, schema)

    def _disconnect(self) -> None:
        # Rows that could not be written to a full disk are no longer needed.
        with suppress(duckdb.Error):
            self._connection.close()

    def create(self, name: str, schema: pa.Schema) -> None:
        """Create an empty table."""
        self._buffers[name] = [schema.empty_table()]
        with temporary_space(*_FULL):
            self._connection.from_arrow(schema.empty_table()).create(name)

    def add(self, name: str, rows: pa.Table | list[dict[str, Any]]) -> None:
        """Append rows that have the columns of the table."""
        buffer = self._buffers[name]
        if isinstance(rows, list):
            rows = pa.Table.from_pylist(rows, buffer[0].schema)
        with self._lock:
            buffer.append(rows)
            self._buffered_rows += len(rows)
            if self._buffered_rows >= _BUFFERED_ROWS:
                self._flush()

    def _flush(self) -> None:
        """Write buffered rows to the database."""
        with self._lock, temporary_space(*_FULL):
            for name, buffer in self._buffers.items():
                if len(buffer) > 1:
                    self._connection.from_arrow(pa.concat_tables(buffer)).insert_into(name)
                    del buffer[1:]
            self._buffered_rows = 0

    def run(self, sql: str) -> None:
        """Execute a statement without a result."""
        self._flush()
        with temporary_space(*_FULL):
            self._connection.execute(sql)

    def copy(self, query: str, path: str, options: str) -> None:
        """Write the rows of a query to a file.

        Args:
            query: SQL.
            path: A local file.
            options: Options of DuckDB's COPY.

        Raises:
            OSError: The file cannot be written.
            RunError: TMPDIR is full.
        """
        self._flush()
        with temporary_space(*_FULL[1:]):
            try:
                self._connection.execute(f"COPY ({query}) TO {quoted([path])} ({options})")
            except duckdb.OperationalError as error:
                if path not in str(error):
                    raise
                raise OSError(str(error)) from None

    def row(self, sql: str) -> dict[str, Any]:
        """Return the only row of a query."""
        (row,) = self.rows(sql)
        return row

    def number(self, sql: str) -> int:
        """Return the only value of a query."""
        (value,) = self.row(sql).values()
        return int(value)

    def rows(self, sql: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a query. Only one query may be open at a time."""
        for batch in self.batches(sql, 10_000):
            yield from batch.to_pylist()

    def batches(self, sql: str, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the result of a query in batches of `rows`.

        Only one query may be open at a time.
        """
        self._flush()
        with temporary_space(*_FULL):
            reader = self._connection.sql(sql).to_arrow_reader(rows)
            batch = next(reader, None)
        while batch is not None:
            yield batch
            with temporary_space(*_FULL):
                batch = next(reader, None)


def quoted(values: Iterable[str]) -> str:
    """Quote texts for SQL, separated by commas."""
    return ", ".join("'" + value.replace("'", "''") + "'" for value in values)
