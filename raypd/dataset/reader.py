"""A unit's documents, one for every row of its parts: what cannot be read is a document with an
error, never lost.
"""

import io
import itertools
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.config import InputConfig, RunConfig
from raypd.config.data import WHOLE
from raypd.config.schema import imported
from raypd.dataset import delimited, encodings
from raypd.dataset.jsonl import (
    BOM,
    UNREADABLE,
    Line,
    line_limit,
    lines_of_range,
    open_lines,
    packed_lines,
)
from raypd.dataset.listing import partition_keys
from raypd.dataset.text_files import (
    COLUMNS,
    byte_limit,
    declares_charset,
    text_of_file,
    visible_text,
)
from raypd.dataset.whole_files import whole_rows
from raypd.errors import InputError, in_words, raised_as
from raypd.run.unit import Part, Unit
from raypd.storage import SINCE_PLANNED
from raypd.tasks.base import Document
from raypd.tasks.documents import kind_of
from raypd.tasks.missing import parse_json, plain_value
from raypd.text import counted

Fields = dict[str, Any]
Needed = Container[str | None]  # columns
# A row's place, that in words ("" of a file that is a document), and what gives its fields.
Row = tuple[int, str, Callable[[], Fields]]


def read_unit(unit: Unit, config: RunConfig, columns: Sequence[str] = ()) -> list[Document]:
    """The documents of a unit, in order; of one with `only` these alone, numbered as in the unit
    without it. columns: of Parquet and the path, beside those of the configuration. Raises
    InputError: an object cannot be read or is not the planned one; storage.Unavailable: storage is
    out of reach, and nothing is known of the object.
    """
    if unit.damaged is not None:
        raise InputError(unit.damaged)
    documents: list[Document] = []
    for part in unit.parts:
        documents += _read_part(part, config, columns, len(documents))
    if unit.only is None:
        return documents
    if unit.only and unit.only[-1] >= len(documents):
        raise InputError(
            f"{unit.parts[0].path}: has changed {SINCE_PLANNED}: fewer documents than were "
            "wanted of it"
        )
    return [documents[row] for row in unit.only]


def _read_part(part: Part, config: RunConfig, columns: Sequence[str], row: int) -> list[Document]:
    """The documents of one part; `row`: the place of the first in its unit."""
    documents = []
    source = config.input
    needed = {*columns, *config.wanted_columns().values(), source.id_column, source.category_column}
    of_path = {key: value for key, value in partition_keys(part.name).items() if key in needed}
    try:
        rows_of = {"parquet": _parquet_rows, "arrow": _arrow_rows, "jsonl": _jsonl_lines}
        rows_of |= dict.fromkeys(delimited.DELIMITERS, _records) | dict.fromkeys(
            ("reader", *WHOLE), _rows_of_reader
        )
        rows = rows_of.get(part.format, _whole_file)(part, source, needed)
        for number, (place, where, fields) in enumerate(rows, row):
            name, default_id = (
                (f"{part.name}, {where}", f"{part.name}:{place}")
                if where
                else (part.name, part.name)
            )
            document = Document(number, default_id, source=part.name, place=place)
            documents.append(filled(document, config, of_path, fields, f"{name}: "))
    except storage.Changed as error:
        raise InputError(str(error)) from None
    except InputError as error:
        raise InputError(f"{part.path}: {error}") from None
    except FileNotFoundError:
        raise InputError(f"{part.path}: is gone {SINCE_PLANNED}") from None
    except (*UNREADABLE, pa.ArrowException) as error:
        if outage := storage.outage(error, part.path):
            raise outage from error
        raise InputError(f"{part.path}: cannot be read: {error}") from error
    if part.rows not in (None, len(documents)):
        count = f"{len(documents)} documents where {part.rows} were planned"
        raise InputError(f"{part.path}: has changed {SINCE_PLANNED}: {count}")
    return documents


def _jsonl_lines(part: Part, source: InputConfig, needed: Needed) -> Iterator[Row]:
    """Every line of a part; its place is the byte at which it begins."""
    limit = line_limit(source.max_document_bytes)
    offset = max(0, part.start - 1) if part.compression is None else 0
    with open_lines(part.path, part.compression, offset, part.version) as file:
        if part.compression is None:
            selected = lines_of_range(file, limit, part.start, part.end)
        else:
            selected = itertools.islice(packed_lines(file, limit), part.start, part.end)
        yield from (
            (line.offset, f"byte {line.offset}", partial(_parsed, line, source))
            for line in selected
        )


def _records(part: Part, source: InputConfig, needed: Needed) -> Iterator[Row]:
    """Every record of a part of a CSV file; its place is the byte at which it begins."""
    names, records = delimited.ranged(part, source)
    for record in records:
        yield record.offset, f"line {record.line}", partial(_named, names, record)


def _whole_file(part: Part, source: InputConfig, needed: Needed) -> Iterator[Row]:
    """A file that is a document; what is wrong with it is known when its fields are asked for."""
    with open_lines(part.path, part.compression, version=part.version) as file:
        data = file.read(byte_limit(part.format, source) + 1)
    yield 0, "", partial(_document_of_file, data, part, source)


def _document_of_file(data: bytes, part: Part, source: InputConfig) -> Fields:
    """Raises ValueError."""
    if source.encoding == encodings.AUTO:
        encoding = "utf-8"  # where the page itself names a charset, that one is read
        if part.format == "text" or (part.format == "html" and not declares_charset(data)):
            with raised_as(ValueError, "a text that cannot be read", InputError):
                encoding = encodings.detect(io.BytesIO(data))
        source = source.model_copy(update={"encoding": encoding})
    text = text_of_file(data, part, source)
    return dict(zip(COLUMNS, (part.name, text), strict=True))


def _named(names: Sequence[str], record: delimited.DelimitedRecord) -> dict[str, str]:
    """Raises ValueError."""
    if record.error is not None:
        raise ValueError(record.error)
    if len(record.fields) != len(names):
        raise ValueError(
            f"{counted(len(record.fields), 'field')} where the header has {len(names)}"
        )
    return dict(zip(names, record.fields, strict=True))


def _parsed(line: Line, source: InputConfig) -> Fields:
    """Raises ValueError."""
    if line.data is None:
        raise ValueError(
            f"the line has {line.length} bytes; input.max_document_bytes is "
            f"{source.max_document_bytes}"
        )
    try:
        fields = parse_json(line.data.removeprefix(BOM if line.offset == 0 else b"").decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start} of the line") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {in_words(error)}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, found {kind_of(fields)}")
    return fields


def _parquet_rows(part: Part, source: InputConfig, needed: Needed) -> Iterator[Row]:
    """A part's rows, and of their columns those that are wanted; a row's place is its number in the
    object.
    """
    with storage.open_file(part.path, part.version, part.size) as file:
        parquet = pq.ParquetFile(file)
        present = _present(parquet.schema_arrow.names, needed)
        first = 0
        for group in range(parquet.metadata.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if first + rows <= part.start or first >= part.end:
                first += rows
                continue
            yield from _batch_rows(
                parquet.iter_batches(1024, row_groups=[group], columns=present), first, part
            )
            first += rows


def _arrow_rows(part: Part, source: InputConfig, needed: Needed) -> Iterator[Row]:
    with (
        storage.open_file(part.path, part.version, part.size) as file,
        arrow_batches(file) as batches,
    ):
        present = _present(batches.schema.names, needed)
        yield from _batch_rows((batch.select(present) for batch in batches), 0, part)


def _present(names: Iterable[str], needed: Needed) -> list[str]:
    """Return the columns that are needed, by their names with or without white space around."""
    return [name for name in names if name in needed or name.strip() in needed]


def _batch_rows(batches: Iterable[pa.RecordBatch], first: int, part: Part) -> Iterator[Row]:
    """The rows of a part out of batches, of which the first one's first row has the number
    `first`.
    """
    for batch in batches:
        if first >= part.end:
            return
        skip = min(max(0, part.start - first), len(batch))
        piece = batch.slice(skip, max(0, part.end - first - skip))
        for number, row in enumerate(zip(*map(_values, piece.columns), strict=True), first + skip):
            yield number, f"row {number}", partial(dict, zip(piece.schema.names, row, strict=True))
        first += len(batch)


def _rows_of_reader(part: Part, source: InputConfig, needed: Needed) -> Iterator[Row]:
    for number, row in itertools.islice(enumerate(custom_rows(part, source)), part.start, part.end):
        yield number, f"row {number}", partial(_mapping, row, part.format)


def _mapping(row: Any, form: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        kind = kind_of(row)
        of_json = f"expected a JSON object, found {kind}"
        raise ValueError(of_json if form == "json" else f"input.reader gave {kind}, not a dict")
    return dict(row) if form == "json" else plain_value(row)


def _values(column: Any) -> list[Any]:
    """Return the values of a column in types that JSON has.

    A text that is not UTF-8 is the error itself, so that it spoils its own row alone.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kinds = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    if any(kind(column.type) for kind in kinds):  # some writers mark no text as text
        return [
            None if v is None else _decoded(v) for v in column.cast(pa.large_binary()).to_pylist()
        ]
    try:
        values = column.to_pylist()
    except (ValueError, OverflowError):  # Python has no such time
        values = column.cast(pa.string()).to_pylist()
    return [plain_value(value) for value in values]


def _decoded(value: bytes) -> str | UnicodeDecodeError:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return error


def filled(
    document: Document,
    config: RunConfig,
    fields: Fields,
    read: Callable[[], Fields] = dict,
    where: str = "",
) -> Document:
    """The document with fields, and those that `read` gives; or with what is wrong with them,
    behind `where`.
    """
    try:
        _fill(document, {**fields, **read()}, config)
    except ValueError as error:
        document.error = f"{where}{error}"
    return document


def _without_spaces(fields: Fields) -> Fields:
    """Return the fields by their names without the white space around them; of two that become
    alike the one without white space counts.
    """
    stripped: Fields = {}
    for name, value in fields.items():
        plain_name = name.strip() if isinstance(name, str) else name
        if plain_name == name or plain_name not in fields:
            stripped[plain_name] = value
    return stripped


def _fill(document: Document, fields: dict[str, Any], config: RunConfig) -> None:
    """Gives a document its id and its fields. Raises ValueError with what is wrong with them."""
    fields = _without_spaces(fields)
    bad = [name for name, value in fields.items() if isinstance(value, UnicodeDecodeError)]
    if bad:
        raise ValueError(f"column {bad[0]!r} is not UTF-8")
    source, texts = config.input, config.text_columns()
    id_value = fields.get(source.id_column) if source.id_column is not None else None
    if id_value is not None and not isinstance(id_value, (dict, list)):
        # A lone surrogate cannot be written.
        document.id = str(id_value).encode("utf-8", "replace").decode()
    size = 0
    for name in texts:
        value = fields.get(name)
        if isinstance(value, list):
            value = [item for item in value if item is not None]
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = fields[name] = "\n".join(value)
        elif isinstance(value, (int, float)):  # bool too
            value = fields[name] = json.dumps(value)
        if value is None:
            continue
        if not isinstance(value, str):
            content = kind_of(value)
            if isinstance(value, list):
                content = (
                    "a list with "
                    f"{kind_of(next(part for part in value if not isinstance(part, str)))} in "
                    "it"
                )
            raise ValueError(f"column {name!r} holds {content}, not text")
        if "\0" in value:
            raise ValueError(f"column {name!r} holds NUL characters")
        try:
            if (is_html := name in source.html_columns) and len(value.encode()) > (
                limit := byte_limit("html", source)
            ):
                raise ValueError(
                    f"column {name!r} has over {limit} bytes of HTML, 16 times "
                    "input.max_document_bytes"
                )
            value = fields[name] = visible_text(value) if is_html else value
            size += len(value.encode())
        except UnicodeEncodeError:
            raise ValueError(f"column {name!r} holds half a surrogate pair") from None
    if size > source.max_document_bytes:
        raise ValueError(
            f"the document has {size} bytes; input.max_document_bytes is "
            f"{source.max_document_bytes}"
        )
    if texts and not any(isinstance(v, str) and v.strip() for v in map(fields.get, texts)):
        raise ValueError(f"no text in {', '.join(texts)}")
    document.fields = fields


def read_table(table: pa.Table, config: RunConfig) -> list[Document]:
    """The documents of a table in memory, one a row, each with its number there for id where it has
    none.
    """
    needed = {
        *config.wanted_columns().values(),
        config.input.id_column,
        config.input.category_column,
    }
    columns = {
        name: _values(table[name].combine_chunks()) for name in _present(table.column_names, needed)
    }
    return [
        filled(
            Document(n, str(n), place=n),
            config,
            {name: values[n] for name, values in columns.items()},
        )
        for n in range(table.num_rows)
    ]


def arrow_batches(file: Any) -> pa.RecordBatchReader:
    """The batches of an open file, a stream or a file of Arrow's IPC format.

    Raises pa.ArrowInvalid.
    """
    magic = file.read(6)
    file.seek(0)
    if magic != b"ARROW1":
        return pa.ipc.open_stream(file)
    whole = pa.ipc.open_file(file)
    return pa.RecordBatchReader.from_batches(
        whole.schema, map(whole.get_batch, range(whole.num_record_batches))
    )


def custom_rows(part: Part, source: InputConfig) -> Iterator[Any]:
    """What `input.reader` gives for a file, or `whole_rows`.

    Raises InputError where it fails, OSError, ConfigError.
    """
    if part.format in WHOLE:
        yield from whole_rows(part)
        return
    read = imported("input.reader", str(source.reader))
    with storage.open_read(part.path, version=part.version) as file:
        try:
            yield from read(part.name, file)
        except Exception as error:
            if isinstance(error, OSError) and (outage := storage.outage(error, part.path)):
                raise outage from None
            raise InputError(
                f"input.reader {source.reader}: {type(error).__name__}: {error}"
            ) from None
