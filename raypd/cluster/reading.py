"""A unit's documents, one for every row of its range: what cannot be read is a document with an error, never lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd.cluster import storage
from raypd.cluster.jsonl import BROKEN_STREAM, Line, lines, open_lines
from raypd.cluster.units import Unit, line_limit
from raypd.config import RunConfig
from raypd.errors import InputError
from raypd.tasks.base import Document


def read_unit(unit: Unit, config: RunConfig, columns: Sequence[str] = ()) -> list[Document]:
    """The documents of a unit, `unit.rows` of them, in order.

    columns: what the task needs beside the columns of the configuration (Parquet reads no others).
    Raises InputError when the object cannot be read, or is not the one that was planned.
    """
    try:
        documents = list(
            _read_parquet(unit, config, columns) if unit.format == "parquet" else _read_jsonl(unit, config)
        )
    except storage.Changed as error:
        raise InputError(str(error)) from None
    except (*BROKEN_STREAM, OSError, pa.ArrowException) as error:
        raise InputError(f"{unit.path}: cannot be read: {error}") from error
    if len(documents) != unit.rows:
        raise InputError(f"{unit.path}: has changed since the run was planned; start the run again")
    return documents


# ---------------------------------------------------------------------------------------------------------------- JSONL


def _read_jsonl(unit: Unit, config: RunConfig) -> Iterator[Document]:
    skipped = 0 if unit.compression is None else unit.start
    with open_lines(unit.path, unit.compression, unit.offset, unit.version) as file:
        found = lines(file, line_limit(config.input.max_document_bytes), unit.line, unit.offset)
        for row, line in enumerate(itertools.islice(found, skipped, skipped + unit.rows)):
            yield _parse(unit, row, line, config)


def _parse(unit: Unit, row: int, line: Line, config: RunConfig) -> Document:
    where = f"{unit.name}:{line.number}"
    unnamed = f"{unit.name}:{unit.start + row}"
    if line.data is None:
        reason = f"the line has {line.length} bytes; input.max_document_bytes is {config.input.max_document_bytes}"
        return Document(row, unnamed, error=f"{where}: {reason}")
    try:
        text = line.data.decode("utf-8-sig" if line.offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        return Document(row, unnamed, error=f"{where}: not UTF-8: {error.reason} at byte {error.start}")
    try:
        fields = json.loads(text)
    except ValueError as error:
        return Document(row, unnamed, error=f"{where}: not JSON: {error}")
    except RecursionError:
        return Document(row, unnamed, error=f"{where}: not JSON that can be read: nested too deeply")
    if not isinstance(fields, dict):
        return Document(row, unnamed, error=f"{where}: expected a JSON object, found {_kind(fields)}")
    return _document(row, where, unnamed, fields, config)


# -------------------------------------------------------------------------------------------------------------- Parquet


def _read_parquet(unit: Unit, config: RunConfig, columns: Sequence[str]) -> Iterator[Document]:
    with storage.open_file(unit.path, unit.version, unit.size) as file:
        parquet = pq.ParquetFile(file)
        source = config.input
        wanted = {*columns, *config.wanted_columns().values(), source.id_column, source.category_column}
        present = [name for name in parquet.schema_arrow.names if name in wanted]
        first, groups = _row_groups(parquet.metadata, unit)
        skip, row = unit.start - first, 0
        for batch in parquet.iter_batches(batch_size=1024, row_groups=groups, columns=present):
            part = batch.slice(skip, unit.rows - row) if skip < len(batch) else batch.slice(0, 0)
            skip = max(0, skip - len(batch))
            for fields in _rows(part):
                where = f"{unit.name}:{unit.start + row}"
                bad = [name for name, value in fields.items() if isinstance(value, UnicodeDecodeError)]
                if bad:
                    yield Document(row, where, error=f"{where}: column {bad[0]!r} is not UTF-8")
                else:
                    yield _document(row, where, where, fields, config)
                row += 1
            if row == unit.rows:
                return


def _row_groups(metadata: Any, unit: Unit) -> tuple[int, list[int]]:
    """The row groups that a unit touches, and the row at which the first of them begins."""
    first, begin = 0, 0
    groups: list[int] = []
    for i in range(metadata.num_row_groups):
        end = begin + metadata.row_group(i).num_rows
        if begin < unit.start + unit.rows and end > unit.start:
            first = first if groups else begin
            groups.append(i)
        begin = end
    return first, groups


def _rows(batch: Any) -> Iterable[dict[str, Any]]:
    """Rows as dicts; a text value that is not UTF-8 is the error itself, so that it spoils its own row alone."""
    columns = {name: _values(batch.column(i)) for i, name in enumerate(batch.schema.names)}
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _values(column: Any) -> list[Any]:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return [None if v is None else _decoded(v) for v in column.cast(pa.large_binary()).to_pylist()]
    return column.to_pylist()


def _decoded(value: bytes) -> str | UnicodeDecodeError:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return error


# ------------------------------------------------------------------------------------------------------------- document


def _document(row: int, where: str, unnamed: str, fields: dict[str, Any], config: RunConfig) -> Document:
    source, texts = config.input, config.text_columns()
    given = fields.get(source.id_column) if source.id_column is not None else None
    id = unnamed if given is None or isinstance(given, (dict, list)) else str(given)
    id = id.encode("utf-8", "replace").decode()  # a lone surrogate cannot be written
    size = 0
    for name in texts:
        value = fields.get(name)
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = fields[name] = "\n".join(value)
        elif isinstance(value, (int, float)):  # bool too
            value = fields[name] = json.dumps(value)
        if value is None:
            continue
        if not isinstance(value, str):
            return Document(row, id, error=f"{where}: column {name!r} holds {_kind(value)}, not text")
        if "\0" in value:
            return Document(row, id, error=f"{where}: column {name!r} holds NUL characters")
        try:
            size += len(value.encode())
        except UnicodeEncodeError:
            return Document(row, id, error=f"{where}: column {name!r} holds half a surrogate pair")
    if size > source.max_document_bytes:
        reason = f"the document has {size} bytes; input.max_document_bytes is {config.input.max_document_bytes}"
        return Document(row, id, error=f"{where}: {reason}")
    if texts and not any(isinstance(v, str) and v.strip() for v in map(fields.get, texts)):
        return Document(row, id, error=f"{where}: no text in {', '.join(texts)}")
    return Document(row, id, fields)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
