"""A unit's documents, one for every row of its parts: what cannot be read is a document with an error, never lost."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset.jsonl import BOM, Line, lines, lines_of_range, open_lines
from raypd.dataset.planner import line_limit
from raypd.errors import InputError
from raypd.run.unit import Part, Unit
from raypd.tasks.base import Document
from raypd.tasks.documents import kind_of


def read_unit(unit: Unit, config: RunConfig, columns: Sequence[str] = ()) -> list[Document]:
    """The documents of a unit, in order; of a unit with `only` these alone, numbered as in the whole unit.

    Args:
        columns: what the task needs beside the columns of the configuration (Parquet reads no others).

    Returns:
        As many as the unit's rows, or where these are None as many as there are.

    Raises:
        InputError: an object cannot be read, or is not the one that was planned.
        storage.Unavailable: storage as a whole is out of reach, and nothing is known of the object.
    """
    if unit.damaged is not None:
        raise InputError(unit.damaged)
    documents: list[Document] = []
    for part in unit.parts:
        documents += _read_part(part, config, columns, len(documents))
    if unit.only is None:
        return documents
    if unit.only and unit.only[-1] >= len(documents):
        raise InputError(f"{unit.path}: has fewer documents than were wanted of it; start the run again")
    return [documents[row] for row in unit.only]


def _read_part(part: Part, config: RunConfig, columns: Sequence[str], row: int) -> list[Document]:
    """The documents of one part; `row`: the place of the first in its unit."""
    try:
        if part.format == "parquet":
            documents = list(_read_parquet(part, config, columns, row))
        else:
            documents = list(_read_jsonl(part, config, row))
    except storage.Changed as error:
        raise InputError(str(error)) from None
    except FileNotFoundError:
        raise InputError(f"{part.path}: is gone since the run was planned; start the run again") from None
    except (EOFError, zlib.error, OSError, pa.ArrowException) as error:
        if outage := storage.outage(error, part.path):
            raise outage from error
        raise InputError(f"{part.path}: cannot be read: {error}") from error
    if part.rows not in (None, len(documents)):
        raise InputError(f"{part.path}: {len(documents)} documents where {part.rows} were planned; start the run again")
    return documents


# ---------------------------------------------------------------------------------------------------------------- JSONL


def _read_jsonl(part: Part, config: RunConfig, row: int) -> Iterator[Document]:
    limit = line_limit(config.input.max_document_bytes)
    offset = max(0, part.start - 1) if part.compression is None else 0
    with open_lines(part.path, part.compression, offset, part.version) as file:
        if part.compression is None:
            found = lines_of_range(file, limit, part.start, part.end)
        else:
            found = itertools.islice(lines(file, limit), part.start, part.end)
        for number, line in enumerate(found):
            yield _parse(part, row + number, line, config)


def _parse(part: Part, row: int, line: Line, config: RunConfig) -> Document:
    document = Document(row, f"{part.name}:{line.offset}", source=part.name, place=line.offset)
    where = f"{part.name}, byte {line.offset}"
    if line.data is None:
        reason = f"the line has {line.length} bytes; input.max_document_bytes is {config.input.max_document_bytes}"
        return _bad(document, f"{where}: {reason}")
    try:
        fields = json.loads(line.data.removeprefix(BOM if line.offset == 0 else b"").decode())
    except UnicodeDecodeError as error:
        return _bad(document, f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line")
    except ValueError as error:
        return _bad(document, f"{where}: not JSON: {error}")
    except RecursionError:
        return _bad(document, f"{where}: not JSON that can be read: nested too deeply")
    if not isinstance(fields, dict):
        return _bad(document, f"{where}: expected a JSON object, found {kind_of(fields)}")
    return _document(document, where, fields, config)


# -------------------------------------------------------------------------------------------------------------- Parquet


def _read_parquet(part: Part, config: RunConfig, columns: Sequence[str], row: int) -> Iterator[Document]:
    with storage.open_file(part.path, part.version, part.size) as file:
        parquet = pq.ParquetFile(file)
        source = config.input
        wanted = {*columns, *config.wanted_columns().values(), source.id_column, source.category_column}
        present = [name for name in parquet.schema_arrow.names if name in wanted]
        first, groups = _row_groups(parquet.metadata, part)
        skip, at = part.start - first, part.start
        for batch in parquet.iter_batches(batch_size=1024, row_groups=groups, columns=present):
            taken = batch.slice(skip, part.end - at) if skip < len(batch) else batch.slice(0, 0)
            skip = max(0, skip - len(batch))
            for fields in _rows(taken):
                document = Document(row + at - part.start, f"{part.name}:{at}", source=part.name, place=at)
                where = f"{part.name}, row {at}"
                bad = [name for name, value in fields.items() if isinstance(value, UnicodeDecodeError)]
                if bad:
                    yield _bad(document, f"{where}: column {bad[0]!r} is not UTF-8")
                else:
                    yield _document(document, where, fields, config)
                at += 1
            if at == part.end:
                return


def _row_groups(metadata: Any, part: Part) -> tuple[int, list[int]]:
    """The row groups that a part touches, and the row at which the first of them begins."""
    first, begin = 0, 0
    groups: list[int] = []
    for i in range(metadata.num_row_groups):
        end = begin + metadata.row_group(i).num_rows
        if begin < part.end and end > part.start:
            first = first if groups else begin
            groups.append(i)
        begin = end
    return first, groups


def _rows(batch: Any) -> Iterable[dict[str, Any]]:
    """Rows as dicts; a text value that is not UTF-8 is the error itself, so that it spoils its own row alone."""
    columns = map(_values, batch.columns)
    return (dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True))


def _values(column: Any) -> list[Any]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if any(kind(column.type) for kind in kinds):  # some writers mark no text as text
        return [None if v is None else _decoded(v) for v in column.cast(pa.large_binary()).to_pylist()]
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):  # Python has no such time
        return column.cast(pa.string()).to_pylist()


def _decoded(value: bytes) -> str | UnicodeDecodeError:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return error


# ------------------------------------------------------------------------------------------------------------- document


def _document(document: Document, where: str, fields: dict[str, Any], config: RunConfig) -> Document:
    """The document with its id and its fields, or with what is wrong with them."""
    source, texts = config.input, config.text_columns()
    given = fields.get(source.id_column) if source.id_column is not None else None
    if given is not None and not isinstance(given, (dict, list)):
        # A lone surrogate cannot be written.
        document.id = str(given).encode("utf-8", "replace").decode()
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
            return _bad(document, f"{where}: column {name!r} holds {kind_of(value)}, not text")
        if "\0" in value:
            return _bad(document, f"{where}: column {name!r} holds NUL characters")
        try:
            size += len(value.encode())
        except UnicodeEncodeError:
            return _bad(document, f"{where}: column {name!r} holds half a surrogate pair")
    if size > source.max_document_bytes:
        reason = f"the document has {size} bytes; input.max_document_bytes is {config.input.max_document_bytes}"
        return _bad(document, f"{where}: {reason}")
    if texts and not any(isinstance(v, str) and v.strip() for v in map(fields.get, texts)):
        return _bad(document, f"{where}: no text in {', '.join(texts)}")
    document.fields = fields
    return document


def _bad(document: Document, error: str) -> Document:
    document.error = error
    return document
