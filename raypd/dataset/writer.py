"""Commits: one Parquet file per unit.

A unit is committed if its file exists. The file is written atomically and never overwritten, except
by a retry.
"""

import contextlib
import errno
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import raypd.dataset.compacted as compacted
from raypd import storage
from raypd.config import RunConfig
from raypd.dataset.committed import CommittedUnits, unit_objects
from raypd.dataset.digests import unit_id_of
from raypd.errors import ConfigError, Damaged, RunError
from raypd.run import Commit, UnitSummary, encoded, failure_reasons, from_json, layout
from raypd.tasks import (
    Document,
    Record,
    columns as tasks_columns,
    columns_of,
    parts_of,
    record_row,
    typed_row,
)

_WHOLE_BYTES = 8 << 20  # a smaller file is read whole
_MAX_RANGE_ID = 128  # characters
_SUMMARY_KEY = b"raypd"  # in the metadata of the file's schema
# Raised if a value does not fit its column.
_MISFITS = (pa.ArrowException, ValueError, TypeError, OverflowError)


def units_folder(output: str) -> str:
    """Return the folder of the committed units in a run's folder."""
    return storage.join(output, layout.UNITS)


def unit_path(output: str, unit_id: str, partition: Mapping[str, str] | None = None) -> str:
    """Return the path of a unit: units/<id>.parquet, or units/key=value/<id>.parquet.

    Args:
        output: The run's folder.
        unit_id: The unit.
        partition: `output.partition` of the run's configuration.
    """
    folders = []
    if partition is not None:
        folders = [f"{key}={value}" for key, value in partition.items()]
    return storage.join(units_folder(output), *folders, f"{unit_id}.parquet")


def output_schema(task_columns: pa.Schema, partition: Iterable[str] = ()) -> pa.Schema:
    """Return all columns of the output: raypd's own and those of the task.

    Args:
        task_columns: The columns of the task.
        partition: Keys of `output.partition`.

    Raises:
        ConfigError: A partition's key is the name of a column.
        ValueError: A column of the task has the same name as one of raypd's own.
    """
    repeated = set(tasks_columns.OWN.names) & set(task_columns.names)
    if repeated:
        raise ValueError(
            f"the task's columns {sorted(repeated)} have names that every output already uses"
        )
    schema = pa.schema([*tasks_columns.OWN, *task_columns])
    for key in partition:
        if key in schema.names:
            raise ConfigError(
                f"output.partition: {key!r} is a column of the output: {', '.join(schema.names)}"
            )
    return schema


def make_table(
    documents: Sequence[Document], records: Sequence[Record], columns: pa.Schema, attempts: int
) -> pa.Table:
    """Return the rows of a unit in the order of its documents.

    Args:
        documents: All documents of the unit.
        records: Their answers. A document without one gets an error row.
        columns: The columns of the task.
        attempts: How often the unit was tried, including this time.

    Raises:
        RunError: A document has the same answer twice.
    """
    schema = output_schema(columns)
    records_by_document: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        records_by_document[record.index].append(record)
    rows: list[dict[str, Any]] = []
    for document in documents:
        answers = records_by_document[document.index]
        if not answers:
            error = document.error or "it got no answer"
            answers = [Record(document.index, error=error)]
        rows += [_row(document, answer, attempts) for answer in answers]
    try:
        table = pa.Table.from_pylist(rows, schema)
    except _MISFITS:
        table = pa.Table.from_pylist([_writable(row, schema) for row in rows], schema)
    repeated = _repeated_rows(table)
    if repeated:
        raise RunError(
            f"internal error: {repeated} answers of a unit occur twice. Please report this"
        )
    return table


def _row(document: Document, record: Record, attempts: int) -> dict[str, Any]:
    """Return the row of one answer."""
    row = tasks_columns.own_columns(document, record, attempts)
    if record.error is not None:
        row["error"] = _printable(record.error)
    row.update(record.columns)
    return row


def _repeated_rows(table: pa.Table) -> int:
    """Return how many rows of a unit repeat the part of a document that another row has."""
    names = ["source", "row", "part"]
    keys = pa.table([table["source"], table["row"], parts_of(table)], names)
    # The threads of Arrow cost more than they save for the rows of a unit.
    distinct = keys.group_by(names, use_threads=False).aggregate([])
    return int(len(table) - distinct.num_rows)


def _writable(row: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """Return the row, or an error row if a value does not fit its column."""
    try:
        pa.Table.from_pylist([row], schema)
        return row
    except _MISFITS as error:
        error_row = {name: row.get(name) for name in tasks_columns.OWN.names}
        error_row["status"] = "error"
        error_row["error"] = _printable(f"the answer cannot be written: {error}")
        return error_row


def _printable(text: str) -> str:
    """Return a text without characters that cannot be written or shown."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\\0")


def count_documents(table: pa.Table) -> tuple[int, int]:
    """Return how many documents of a unit's rows are (ok, failed).

    A document with any error row counts as failed.
    """
    failed = _document_keys(table.filter(pc.not_equal(table["status"], "ok")))
    return len(_document_keys(table) - failed), len(failed)


def count_truncated(table: pa.Table) -> int:
    """Return how many documents of a unit's rows were cut to fit the model's context."""
    if "truncated" not in table.column_names:
        return 0
    return len(_document_keys(table.filter(table["truncated"])))


def count_failures(table: pa.Table) -> failure_reasons.FailureCounts:
    """Count the failed documents of a unit's rows by kind of reason."""
    failed = table.filter(pc.not_equal(table["status"], "ok"))
    return failure_reasons.count(failed.select(["source", "row", "error"]).to_pylist())


def with_counts(summary: UnitSummary, table: pa.Table) -> UnitSummary:
    """Return a summary with everything that is counted in a unit's rows.

    Workers and retries both use it.
    """
    ok, failed = count_documents(table)
    failures = count_failures(table)
    first_id, last_id = id_range(table)
    return replace(
        summary,
        ok=ok,
        failed=failed,
        truncated=count_truncated(table),
        reasons=failures.reasons,
        retriable=failures.retriable,
        first_id=first_id,
        last_id=last_id,
    )


def id_range(table: pa.Table) -> tuple[str | None, str | None]:
    """Return the smallest and the largest id of a unit's rows; None for both if one is too long."""
    ids = pc.min_max(table["id"]).as_py()
    if ids["min"] is None or max(map(len, ids.values())) > _MAX_RANGE_ID:
        return None, None
    return ids["min"], ids["max"]


def _document_keys(table: pa.Table) -> set[tuple[str, int]]:
    """Return the (source, row) of every document of a unit's rows."""
    return set(zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True))


def commit(
    output: str, table: pa.Table, summary: UnitSummary, partition: Mapping[str, str] | None = None
) -> Commit | None:
    """Write a unit's file, unless it exists.

    Args:
        output: The run's folder.
        table: The unit's rows.
        summary: Written into the file's metadata, with the time of the commit.
        partition: `output.partition` of the run's configuration.

    Returns:
        The commit; None if the file existed.
    """
    summary.committed_at = time.time()
    path = unit_path(output, summary.unit, partition)
    return _commit(output, path, summary, storage.put_new(path, _encoded(table, summary)))


def _commit(output: str, path: str, summary: UnitSummary, stamp: str | None) -> Commit | None:
    if stamp is None:
        return None
    folder = storage.join(units_folder(output), "")
    return Commit(summary, path.removeprefix(folder), stamp)


def replace_rows(
    output: str, path: str, table: pa.Table, summary: UnitSummary, version: str
) -> Commit | None:
    """Replace a unit's file, as only a retry may.

    Args:
        output: The run's folder.
        path: The unit's file.
        table: The new rows.
        summary: The new summary.
        version: The version to replace.

    Returns:
        The commit; None if the file has another version by now.
    """
    stamp = storage.put_if(path, _encoded(table, summary), version)
    return _commit(output, path, summary, stamp)


def _encoded(table: pa.Table, summary: UnitSummary) -> bytes:
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({_SUMMARY_KEY: encoded(summary, indent=None)})
    # With checksums, `raypd verify` detects a flipped bit in any column.
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


def typed_table(rows: pa.Table, config: RunConfig) -> pa.Table:
    """Return the rows of a run with a typed column for each attribute.

    Args:
        rows: Rows with the columns `record` and `values`, or rows that are already typed.
        config: The run's configuration with `output.columns: typed`.
    """
    if "record" not in rows.column_names:
        return rows
    typed = []
    for row in rows.to_pylist():
        # A table of several nights may have categories that the schema no longer has.
        if row["record"] is not None and row["category"] in config.extraction.categories:
            row |= typed_row({**row, "record": json.loads(row["record"])}, config)
        typed.append(row)
    return pa.Table.from_pylist(typed, output_schema(columns_of(config)))


def objects(output: str) -> Iterator[tuple[str, str]]:
    """Yield the (unit id, path) of every committed unit, in all partitions."""
    for item in unit_objects(output):
        yield unit_id_of(item.name), item.path


def committed(output: str) -> CommittedUnits:
    """Return the ids of the committed units."""
    return CommittedUnits(output)


def is_committed(output: str, unit_id: str, partition: Mapping[str, str] | None = None) -> bool:
    """Return whether a unit is committed in this partition; it costs one request."""
    return storage.exists(unit_path(output, unit_id, partition))


def read_summary(
    output: str, unit_id: str, path: str | None = None, item: storage.Object | None = None
) -> UnitSummary:
    """Return the summary of a committed unit.

    Args:
        output: The run's folder.
        unit_id: The unit.
        path: The unit's file, or the one that it had before a compaction; None searches all
            partitions.
        item: The unit's file in a listing, if that is known; it saves a request.

    Raises:
        Damaged: The file is damaged.
        RunError: The file cannot be reached.
    """
    summary, _ = _read(path or _locate(output, unit_id), None, item, with_rows=False)
    return summary


def read_table(
    output: str,
    unit_id: str,
    columns: Sequence[str] | None = None,
    path: str | None = None,
    item: storage.Object | None = None,
) -> tuple[UnitSummary, pa.Table]:
    """Return the summary and the rows of a committed unit; raises as `read_summary` does.

    Args:
        output: The run's folder.
        unit_id: The unit.
        columns: The columns to read; None reads all.
        path: The unit's file, or the one that it had before a compaction; None searches all
            partitions.
        item: The unit's file in a listing, if that is known; it saves a request.
    """
    summary, rows = _read(path or _locate(output, unit_id), columns, item, with_rows=True)
    assert rows is not None
    return summary, rows


def _read(
    path: str, columns: Sequence[str] | None, item: storage.Object | None, with_rows: bool
) -> tuple[UnitSummary, pa.Table | None]:
    """Read a unit from a table file if it is in one, and otherwise from its own file."""
    compacted_unit = compacted.read_unit(path, columns, with_rows)
    if compacted_unit is not None:
        return compacted_unit
    names = None if columns is None else list(columns)
    try:
        with _opened(path, item) as parquet:
            rows = None
            if with_rows:
                rows = parquet.read(columns=names, use_threads=False)
            return _summary(parquet), rows
    except (Damaged, storage.Changed):
        # A compaction may have moved the unit to a table file since this process listed it.
        compacted_unit = compacted.read_unit(path, columns, with_rows, refresh=True)
        if compacted_unit is None:
            raise
        return compacted_unit


def _summary(parquet: pq.ParquetFile) -> UnitSummary:
    tree = json.loads(parquet.schema_arrow.metadata[_SUMMARY_KEY])
    return from_json(UnitSummary, tree, "its summary")


@contextlib.contextmanager
def _opened(path: str, item: storage.Object | None = None) -> Iterator[pq.ParquetFile]:
    """Open a unit's file.

    Args:
        path: The file.
        item: The file in a listing, if that is known.

    Raises:
        Damaged: The file is damaged, here or while it is read.
        RunError: It is out of reach or access is denied, so it must not be deleted.
        storage.Changed: It is no longer the one in the listing.
    """
    try:
        version = None
        size = None
        if item is not None and storage.is_remote(path):
            version = item.stamp
            size = item.size
        with storage.open_file(path, version, size) as file:
            source = file
            if item is not None and item.size <= _WHOLE_BYTES:
                # One request instead of one for each column.
                source = pa.BufferReader(file.read())
            yield pq.ParquetFile(source, page_checksum_verification=True)
    except storage.Changed:
        raise
    except storage.StorageError as error:
        raise RunError(f"{error}; run the same command again to resume") from None
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        # Errors of pyarrow about the content have no errno.
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise RunError(f"{path}: cannot be read: {error}") from None
        advice = "delete it, and the same command processes it again"
        raise Damaged(f"{path}: damaged, not a whole unit of raypd ({error}); {advice}") from None


def _locate(output: str, unit_id: str) -> str:
    """Return the path of a unit in its partition.

    If the unit is in no partition, or in a table file, the path is the one outside of partitions.
    """
    plain_path = unit_path(output, unit_id)
    if compacted.holding(plain_path) is not None or storage.exists(plain_path):
        return plain_path
    if compacted.holding(plain_path, refresh=True) is not None:
        return plain_path
    return dict(objects(output)).get(unit_id, plain_path)


def read_rows(
    output: str, unit_id: str, limit: int, path: str | None = None
) -> list[dict[str, Any]]:
    """Return the first rows of a committed unit; raises as `read_summary` does.

    Args:
        output: The run's folder.
        unit_id: The unit.
        limit: Rows to return, at most.
        path: As in `read_table`.
    """
    _, table = read_table(output, unit_id, path=path)
    return as_records(table.slice(0, limit))


def as_records(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a table; typed columns become the columns `record` and `values`."""
    return [record_row(row) for row in table.to_pylist()]
