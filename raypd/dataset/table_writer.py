"""Write the table files of a compaction, a row group at a time.

Each table file is stored before the rows about its units, so these rows tell a resumed compaction
which files are complete.
"""

import os
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.dataset.compacted import UNIT_ROWS, TableFile, unit_rows_path
from raypd.run import TemporaryFolder, layout, temporary_space

# Decoded bytes of a row group: enough to be worth skipping, and few enough to keep several in
# memory.
_ROW_GROUP_BYTES = 32 << 20
_CHUNK_UNITS = 500  # rows about units that are kept as objects
# A command reads all rows about the units of a file into memory.
_MAX_FILE_UNITS = 20_000
_COMBINED_UNITS = 64  # units that are kept as one table each


class TableWriter:
    """Writes units into table files, in the order in which they are added.

    Attributes:
        files: The table files that are complete.

    Args:
        output: The run's folder.
        compaction: The id of the compaction.
        target_bytes: The size of a table file.
        folder: A temporary folder.
    """

    def __init__(
        self, output: str, compaction: str, target_bytes: int, folder: TemporaryFolder
    ) -> None:
        self.files: list[TableFile] = []
        self._output = output
        self._compaction = compaction
        self._target_bytes = target_bytes
        self._spool = os.path.join(folder.path, "table.parquet")
        self._partition = ""
        # Of the current file.
        self._parquet: pq.ParquetWriter | None = None
        self._file: Any = None
        self._schema: pa.Schema | None = None
        self._row_group = 0
        self._rows = 0
        self._file_units = 0
        self._size = 0  # stored bytes of its row groups
        self._group_size = 0  # of the last one
        self._unit_rows: list[dict[str, Any]] = []
        self._unit_tables: list[pa.Table] = []
        # Of the current row group.
        self._tables: list[pa.Table] = []
        self._units: list[pa.Table] = []
        self._group_rows = 0
        self._group_bytes = 0

    def add(self, partition: str, unit_row: dict[str, Any], rows: pa.Table) -> None:
        """Add a unit.

        Args:
            partition: The folders of its partition, as key=value, separated by slashes; or "".
            unit_row: A row of UNIT_ROWS, whose location is filled in here.
            rows: The rows of the unit, without metadata.
        """
        is_open = self._parquet is not None
        if is_open and (partition != self._partition or rows.schema != self._schema):
            self.end_file()
        self._partition = partition
        self._schema = rows.schema
        if self._parquet is None:
            self._open()
        location = {"row_group": self._row_group, "row": self._group_rows, "rows": len(rows)}
        self._unit_rows.append({**unit_row, **location})
        if len(self._unit_rows) >= _CHUNK_UNITS:
            self._pack()
        self._units.append(rows)
        if len(self._units) >= _COMBINED_UNITS:
            self._combine()
        self._group_rows += len(rows)
        self._group_bytes += rows.nbytes
        if self._group_bytes >= _ROW_GROUP_BYTES:
            self._write_row_group()
        self._file_units += 1
        # With one more row group the file would be further from its target size.
        is_full = self._size + self._group_size // 2 >= self._target_bytes
        if is_full or self._file_units >= _MAX_FILE_UNITS:
            self.end_file()

    def adopt(self, file: TableFile) -> None:
        """Take over a table file that an interrupted session has stored under the next number."""
        self.end_file()
        self.files.append(file)

    def copy(self, partition: str, source: str, unit_rows: pa.Table) -> None:
        """Copy a table file of an earlier compaction.

        Args:
            partition: As in `add`.
            source: The table file.
            unit_rows: The rows about its units.
        """
        self.end_file()
        self._partition = partition
        with storage.open_read(source) as data, open(self._spool, "wb") as file:
            block = data.read(_ROW_GROUP_BYTES)
            while block:
                with temporary_space(OSError):
                    file.write(block)
                block = data.read(_ROW_GROUP_BYTES)
        rows = pq.ParquetFile(self._spool).metadata.num_rows
        source_index = UNIT_ROWS.get_field_index("source_digest")
        source_digests = unit_rows["version_digest"]
        unit_rows = unit_rows.set_column(
            source_index, UNIT_ROWS.field("source_digest"), source_digests
        )
        self._store(unit_rows, rows)

    def _open(self) -> None:
        with temporary_space(OSError):
            self._file = pa.OSFile(self._spool, "wb")
        self._parquet = pq.ParquetWriter(
            self._file,
            self._schema,
            compression="zstd",
            # With checksums, `raypd verify` detects a flipped bit in any column.
            write_page_checksum=True,
            # Readers skip row groups, and pages, by the smallest and largest value of a column.
            write_statistics=True,
            write_page_index=True,
        )

    def _combine(self) -> None:
        """Copy the rows of small units into one table, which takes less memory than theirs."""
        if self._units:
            self._tables.append(pa.concat_tables(self._units).combine_chunks())
            self._units = []

    def _write_row_group(self) -> None:
        self._combine()
        if not self._tables:
            return
        assert self._parquet is not None
        # An empty row group would be written for a table without rows.
        if self._group_rows:
            table = pa.concat_tables(self._tables)
            with temporary_space(OSError):
                self._parquet.write_table(table, row_group_size=len(table))
            self._row_group += 1
            self._group_size = self._file.tell() - self._size
            self._size = self._file.tell()
        self._rows += self._group_rows
        self._tables = []
        self._group_rows = 0
        self._group_bytes = 0

    def _pack(self) -> None:
        """Convert the rows about units to a table, which takes less memory."""
        self._unit_tables.append(pa.Table.from_pylist(self._unit_rows, UNIT_ROWS))
        self._unit_rows = []

    def end_file(self) -> None:
        """Store the current file, if there is one."""
        if self._parquet is None:
            return
        self._write_row_group()
        with temporary_space(OSError):
            self._parquet.close()
            self._file.close()
        self._parquet = None
        self._pack()
        self._store(pa.concat_tables(self._unit_tables), self._rows)
        self._unit_tables = []
        self._row_group = 0
        self._rows = 0
        self._file_units = 0
        self._size = 0
        self._group_size = 0

    def _store(self, unit_rows: pa.Table, rows: int) -> None:
        """Store the file in the temporary folder, and then the rows about its units."""
        number = len(self.files)
        folders = [part for part in self._partition.split("/") if part]
        name = "/".join([*folders, f"{number:06d}.parquet"])
        size = os.path.getsize(self._spool)
        folder = storage.join(self._output, layout.TABLE, self._compaction)
        storage.put_file(storage.join(folder, *name.split("/")), self._spool)
        with temporary_space(OSError):
            os.unlink(self._spool)
        sink = pa.BufferOutputStream()
        pq.write_table(unit_rows, sink, compression="zstd", write_page_checksum=True)
        path = unit_rows_path(self._output, self._compaction, number)
        storage.put(path, sink.getvalue().to_pybytes())
        self.files.append(TableFile(name, len(unit_rows), rows, size))
