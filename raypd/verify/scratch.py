"""Tables too long for memory, filled by threads, then queried with SQL: DuckDB, in a temporary
folder.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from raypd.run.temporary import TemporaryFolder, temporary_space

_MEMORY = "2GB"
_BUFFERED_ROWS = 100_000
# What DuckDB raises for a full disk, and afterwards for every further statement.
_FULL = (OSError, duckdb.OperationalError, duckdb.FatalException)


class Scratch(ExitStack):
    """Tables (at first `tables`) in TMPDIR, GBs a hundred million documents: `create`, `add` by any
    thread, query. Every method raises RunError where TMPDIR is full.
    """

    def __init__(self, **tables: pa.Schema) -> None:
        super().__init__()
        folder = Path(self.enter_context(TemporaryFolder("scratch")).path)
        self._lock = threading.RLock()
        # The first of each is empty, and has the schema.
        self._buffers: dict[str, list[pa.Table]] = {}
        settings: dict[str, Any] = {
            "memory_limit": _MEMORY,
            "temp_directory": str(folder / "spilled"),
            "preserve_insertion_order": "false",  # it costs memory
        }
        # In a file: tables in memory would count against its limit.
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
        with suppress(duckdb.Error):  # what a full disk left unwritten is not needed any more
            self._connection.close()

    def create(self, name: str, schema: pa.Schema) -> None:
        self._buffers[name] = [schema.empty_table()]
        with temporary_space(*_FULL):
            self._connection.from_arrow(schema.empty_table()).create(name)

    def add(self, name: str, rows: pa.Table | list[dict[str, Any]]) -> None:
        """Appends rows, which have the columns of the table."""
        buffer = self._buffers[name]
        table = pa.Table.from_pylist(rows, buffer[0].schema) if isinstance(rows, list) else rows
        with self._lock:
            buffer.append(table)
            if sum(map(len, buffer)) >= _BUFFERED_ROWS:
                self._flush()

    def _flush(self) -> None:
        with self._lock, temporary_space(*_FULL):
            for name, buffer in self._buffers.items():
                if len(buffer) > 1:
                    self._connection.from_arrow(pa.concat_tables(buffer)).insert_into(name)
                    del buffer[1:]

    def run(self, sql: str) -> None:
        self._flush()
        with temporary_space(*_FULL):
            self._connection.execute(sql)

    def copy(self, query: str, path: str, options: str) -> None:
        """Write the rows of a query to a file.

        Args:
            query: SQL.
            path: A local file.
            options: Those of DuckDB's COPY.

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
        (row,) = self.rows(sql)
        return row

    def number(self, sql: str) -> int:
        return int(*self.row(sql).values())

    def rows(self, sql: str) -> Iterator[dict[str, Any]]:
        """The rows of a query, streamed. One query at a time."""
        for batch in self.batches(sql, 10_000):
            yield from batch.to_pylist()

    def batches(self, sql: str, rows: int) -> Iterator[pa.RecordBatch]:
        """The result of a query in batches of so many rows, streamed. One query at a time."""
        self._flush()
        with temporary_space(*_FULL):
            reader = self._connection.sql(sql).to_arrow_reader(rows)
            batch = next(reader, None)
        while batch is not None:
            yield batch
            with temporary_space(*_FULL):
                batch = next(reader, None)


def quoted(values: Iterable[str]) -> str:
    return ", ".join("'" + value.replace("'", "''") + "'" for value in values)
