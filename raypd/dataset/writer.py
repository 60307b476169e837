"""Commits: one Parquet object a unit.

That it exists is the commit; it is written whole and never overwritten.
"""

import contextlib
import errno
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypd import storage
from raypd.config import RunConfig
from raypd.errors import ConfigError, Damaged, RunError
from raypd.run import layout
from raypd.run.records import encoded, from_json
from raypd.run.unit import UnitSummary
from raypd.tasks.base import Document, Record
from raypd.tasks.columns import OWN, columns_of, parts_of, record_row, typed_row

COUNTS = ("prefill_tokens", "shared_tokens", "decode_tokens", "steps")
_KEY = b"raypd"
# Raised for a value that fits no column.
_MISFITS = (pa.ArrowException, ValueError, TypeError, OverflowError)


def units_folder(output: str) -> str:
    return storage.join(output, layout.UNITS)


def unit_path(output: str, unit_id: str, partition: Mapping[str, str] | None = None) -> str:
    """units/<id>.parquet, or units/key=value/<id>.parquet."""
    folders = [f"{key}={value}" for key, value in (partition or {}).items()]
    return storage.join(units_folder(output), *folders, f"{unit_id}.parquet")


def output_schema(task_columns: pa.Schema, partition: Iterable[str] = ()) -> pa.Schema:
    """All columns.

    Raises ConfigError where a partition's key is among them, ValueError where a task's hides one.
    """
    if twice := set(OWN.names) & set(task_columns.names):
        raise ValueError(
            f"the task's columns {sorted(twice)} are names that every output has already"
        )
    schema = pa.schema([*OWN, *task_columns])
    for key in partition:
        if key in schema.names:
            raise ConfigError(
                f"output.partition: {key!r} is a column of the output: {', '.join(schema.names)}"
            )
    return schema


def make_table(
    documents: Sequence[Document], records: Sequence[Record], columns: pa.Schema, attempts: int
) -> pa.Table:
    """A unit's rows in the order of its documents, an error row where one has none.

    Raises RunError: one is doubled.
    """
    schema = output_schema(columns)
    by_row: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_row[record.index].append(record)
    rows: list[dict[str, Any]] = []
    for document in documents:
        for record in by_row[document.index] or [
            Record(document.index, error=document.error or "it got no answer")
        ]:
            row = {
                "id": document.id,
                "source": document.source,
                "row": document.place,
                "attempts": attempts,
            }
            error = None if record.error is None else _printable(record.error)
            rows.append(
                {
                    **row,
                    "status": "ok" if error is None else "error",
                    "error": error,
                    **record.columns,
                }
            )
    try:
        table = pa.Table.from_pylist(rows, schema)
    except _MISFITS:
        table = pa.Table.from_pylist([_writable(row, schema) for row in rows], schema)
    places = pa.table([table["source"], table["row"], parts_of(table)], ["source", "row", "part"])
    if twice := len(table) - places.group_by(places.column_names).aggregate([]).num_rows:
        raise RunError(f"{twice} answers of a unit stand in it twice; this is a fault of raypd")
    return table


def _writable(row: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """The row, or an error row in its place when a value does not fit its column."""
    try:
        pa.Table.from_pylist([row], schema)
        return row
    except _MISFITS as error:
        values = {name: row.get(name) for name in OWN.names}
        return {
            **values,
            "status": "error",
            "error": _printable(f"the answer cannot be written: {error}"),
        }


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "\\0")


def count_documents(table: pa.Table) -> tuple[int, int]:
    """(ok, failed) documents of a unit's rows; a document with any error row counts as failed."""
    failed = _places(table.filter(pc.not_equal(table["status"], "ok")))
    return len(_places(table) - failed), len(failed)


def count_truncated(table: pa.Table) -> int:
    """Documents of a unit's rows that were cut to fit the model's context."""
    return (
        len(_places(table.filter(table["truncated"]))) if "truncated" in table.column_names else 0
    )


def _places(table: pa.Table) -> set[tuple[str, int]]:
    return set(zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True))


def commit(
    output: str, table: pa.Table, summary: UnitSummary, partition: Mapping[str, str] | None = None
) -> bool:
    """Writes a unit's object, with the summary in its metadata; False where there is one already,
    which stays.
    """
    summary.committed_at = time.time()
    return storage.put_new(unit_path(output, summary.unit, partition), _encoded(table, summary))


def replace_rows(path: str, table: pa.Table, summary: UnitSummary, version: str) -> bool:
    """Replaces this version of a unit's object, as only a retry may; False when it is another
    version by now.
    """
    return storage.put_if(path, _encoded(table, summary), version)


def _encoded(table: pa.Table, summary: UnitSummary) -> bytes:
    sink = pa.BufferOutputStream()
    # With checksums `raypd verify` sees a flipped bit in any column.
    table = table.replace_schema_metadata({_KEY: encoded(summary, indent=None)})
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


def typed_table(rows: pa.Table, config: RunConfig) -> pa.Table:
    """Rows of a run with `output.columns: typed` in its configuration, whatever they were written
    as.
    """
    if "record" not in rows.column_names:
        return rows
    typed = [row | typed_row(row, config) for row in rows.to_pylist()]
    return pa.Table.from_pylist(typed, output_schema(columns_of(config)))


def objects(output: str) -> Iterator[tuple[str, str]]:
    """(unit id, path) of every committed unit, in all partitions."""
    for item in storage.walk(units_folder(output)):
        name = item.name.rpartition("/")[2]
        if name.endswith(".parquet") and not name.startswith((".", "_")):
            yield name.removesuffix(".parquet"), item.path


def summaries(output: str) -> list[UnitSummary]:
    """What the committed units hold, in the order of their ids. Raises as `read_summary` does."""
    return list(
        storage.in_threads(lambda item: read_summary(output, *item), sorted(objects(output)), 16)
    )


def committed(output: str) -> set[str]:
    return {unit for unit, _ in objects(output)}


def is_committed(output: str, unit_id: str, partition: Mapping[str, str] | None = None) -> bool:
    return storage.exists(unit_path(output, unit_id, partition))


def read_summary(output: str, unit_id: str, path: str | None = None) -> UnitSummary:
    """What a committed unit holds; without `path`, partitions are searched.

    Raises Damaged; RunError (unreachable).
    """
    with _opened(path or _locate(output, unit_id)) as parquet:
        return _summary(parquet)


def read_table(
    output: str, unit_id: str, columns: Sequence[str] | None = None, path: str | None = None
) -> tuple[UnitSummary, pa.Table]:
    """A committed unit: its summary and its rows, with these columns or all.

    Raises as `read_summary` does.
    """
    with _opened(path or _locate(output, unit_id)) as parquet:
        return _summary(parquet), parquet.read(columns=None if columns is None else list(columns))


def _summary(parquet: pq.ParquetFile) -> UnitSummary:
    return from_json(UnitSummary, json.loads(parquet.schema_arrow.metadata[_KEY]), "its summary")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile]:
    """Raises Damaged where an object is, RunError where it is out of reach or refused and must not
    be deleted.
    """
    try:
        with storage.open_file(path) as file:
            yield pq.ParquetFile(file, page_checksum_verification=True)
    except storage.StorageError as error:
        raise RunError(f"{error}; the same command resumes") from None
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        # Pyarrow's own have no number.
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise RunError(f"{path}: cannot be read: {error}") from None
        advice = "delete it and the same command redoes it"
        raise Damaged(f"{path}: damaged, not a whole unit of raypd ({error}); {advice}") from None


def _locate(output: str, unit_id: str) -> str:
    """The path of a unit's object, in whichever partition; the plain one where there is none."""
    plain = unit_path(output, unit_id)
    return plain if storage.exists(plain) else dict(objects(output)).get(unit_id, plain)


def read_rows(output: str, unit_id: str, limit: int) -> list[dict[str, Any]]:
    return as_records(read_table(output, unit_id)[1].slice(0, limit))


def rows_of(run: str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    folder = storage.absolute(run)
    for unit, path in sorted(objects(folder)):
        yield from as_records(read_table(folder, unit, columns, path)[1])


def as_records(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a table; those of typed columns with `record` and `values` in their place."""
    return [record_row(row) for row in table.to_pylist()]
