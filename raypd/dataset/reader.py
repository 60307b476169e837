"""The documents of a unit, one for each row of its parts.

A row that cannot be read becomes a document with an error, so that no row is lost.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import pyarrow as pa

import raypd.dataset.cursors as cursors
from raypd import storage
from raypd.config import InputConfig, RunConfig
from raypd.dataset.formats import FORMATS, Fields, SourceRow
from raypd.dataset.formats.arrow_columns import column_values, needed_names
from raypd.dataset.formats.documents import BOXES
from raypd.dataset.formats.html import html_limit, visible_text
from raypd.dataset.formats.nested_names import with_outer
from raypd.dataset.jsonl import UNREADABLE
from raypd.dataset.listing import partition_keys
from raypd.errors import InputError
from raypd.run import Part, Unit
from raypd.storage import SINCE_PLANNED
from raypd.tasks import Document, kind_of, with_nested
from raypd.text import id_text


def read_unit(unit: Unit, config: RunConfig, columns: Sequence[str] = ()) -> list[Document]:
    """Return the documents of a unit in order.

    Args:
        unit: A unit of a plan. If it is a subset of another unit, only the documents of the subset
            are returned, numbered as in the other unit.
        config: The run's configuration.
        columns: Columns to read besides those of the configuration.

    Raises:
        InputError: A file cannot be read, or is not the one that was planned.
        storage.Unavailable: The storage is out of reach, so nothing is known about the file.
    """
    if unit.damaged is not None:
        raise InputError(unit.damaged)
    documents: list[Document] = []
    rows = 0
    numbers = None
    if unit.only is not None:
        numbers = frozenset(unit.only)
    for part in unit.parts:
        rows += _read_part(part, config, columns, rows, numbers, documents)
    if unit.only and unit.only[-1] >= rows:
        raise InputError(
            f"{unit.parts[0].path}: has changed {SINCE_PLANNED}: it has fewer "
            "documents than were planned"
        )
    return documents


def may_have(unit: Unit, source: str, row: int) -> bool:
    """Return whether a unit may have a document.

    Args:
        unit: A unit of a plan.
        source: The name of the document's file.
        row: `Document.row`.
    """
    parts = (part for part in unit.parts if part.name == source)
    return any(FORMATS[part.format].may_have(part, row) for part in parts)


def _read_part(
    part: Part,
    config: RunConfig,
    columns: Sequence[str],
    first_number: int,
    numbers: frozenset[int] | None,
    documents: list[Document],
) -> int:
    """Read the documents of one part.

    Args:
        part: The part.
        config: The run's configuration.
        columns: Columns to read besides those of the configuration.
        first_number: The number of the first document in its unit.
        numbers: The numbers of the documents to read; None for all.
        documents: The list that gets the documents.

    Returns:
        How many documents the part has.
    """
    count = 0
    source = config.input
    needed = with_outer([*columns, *_columns_read(config)])
    path_fields: Fields = {}
    for key, value in partition_keys(part.name).items():
        if key in needed:
            path_fields[key] = value
    try:
        if cursors.applies(part):
            rows: Iterable[SourceRow] = cursors.default.rows(part, source, needed)
        else:
            rows = FORMATS[part.format].read(part, source, needed)
        for number, row in enumerate(rows, first_number):
            count += 1
            if numbers is None or number in numbers:
                documents.append(_document(number, row, part, config, path_fields))
    except storage.Changed as error:
        raise InputError(str(error)) from None
    except InputError as error:
        raise InputError(f"{part.path}: {error}") from None
    except FileNotFoundError:
        raise InputError(f"{part.path}: is gone {SINCE_PLANNED}") from None
    except (*UNREADABLE, pa.ArrowException) as error:
        outage = storage.outage(error, part.path)
        if outage is not None:
            raise outage from error
        raise InputError(f"{part.path}: cannot be read: {error}") from error
    if part.rows not in (None, count):
        counts = f"{count} documents, but {part.rows} were planned"
        raise InputError(f"{part.path}: has changed {SINCE_PLANNED}: {counts}")
    return count


def _columns_read(config: RunConfig) -> set[str | None]:
    """Return the columns of the configuration; None is among them if one is not set."""
    source = config.input
    return {*config.wanted_columns().values(), source.id_column, source.category_column}


def _document(
    number: int, row: SourceRow, part: Part, config: RunConfig, path_fields: Fields
) -> Document:
    """Return the document of a row, with the number that it has in its unit."""
    default_id = part.name
    position = part.name
    if row.position:
        default_id = f"{part.name}:{row.offset}"
        position = f"{part.name}, {row.position}"
    document = Document(number, default_id, source=part.name, row=row.offset)
    return filled(document, config, path_fields, row.read_fields, f"{position}: ")


def filled(
    document: Document,
    config: RunConfig,
    fields: Fields,
    read_fields: Callable[[], Fields] = dict,
    position: str = "",
) -> Document:
    """Fill a document with its id and fields, or with what is wrong with them.

    Args:
        document: The document, without fields.
        config: The run's configuration.
        fields: Fields that are known; a row's own fields of these names replace them.
        read_fields: Returns the row's own fields; raises ValueError.
        position: Where the row is, as the beginning of an error message.

    Returns:
        The same document.
    """
    try:
        _fill(document, {**fields, **read_fields()}, config)
    except ValueError as error:
        document.error = f"{position}{error}"
    return document


def _fill(document: Document, fields: Fields, config: RunConfig) -> None:
    """Give a document its id and its fields.

    Raises:
        ValueError: The fields cannot be used; the text says why.
    """
    document.boxes = fields.pop(BOXES, [])
    fields = with_nested(_without_spaces(fields), _columns_read(config))
    for name, value in fields.items():
        if isinstance(value, UnicodeDecodeError):
            raise ValueError(f"column {name!r} is not UTF-8")
    source = config.input
    _set_id(document, fields, source)
    text_columns = config.text_columns()
    size = 0
    has_text = False
    for name in text_columns:
        text = _column_text(name, fields.get(name))
        if text is None:
            continue
        if name in source.html_columns:
            text = _html_text(name, text, source)
        fields[name] = text
        size += _utf8_bytes(name, text)
        has_text = has_text or bool(text.strip())
    if size > source.max_document_bytes:
        raise ValueError(
            f"the document has {size} bytes; input.max_document_bytes is "
            f"{source.max_document_bytes}"
        )
    if text_columns and not has_text:
        if text_columns == ["text"]:
            raise ValueError("the document has no text")
        raise ValueError(f"no text in {', '.join(text_columns)}")
    document.fields = fields


def _without_spaces(fields: Fields) -> Fields:
    """Return the fields by their names without surrounding white space.

    If two names become the same, the field whose name had no white space is kept.
    """
    stripped: Fields = {}
    for name, value in fields.items():
        plain_name = name.strip() if isinstance(name, str) else name
        if plain_name == name or plain_name not in fields:
            stripped[plain_name] = value
    return stripped


def _set_id(document: Document, fields: Fields, source: InputConfig) -> None:
    """Set the id of a document from its column, if the column has a single value."""
    if source.id_column is None:
        return
    value = fields.get(source.id_column)
    if value is None or isinstance(value, (dict, list)):
        return
    if isinstance(value, str) and not value.strip():
        # A CSV cell cannot be null, and documents that share an empty id would count as one.
        return
    document.id = id_text(value)


def _column_text(name: str, value: object) -> str | None:
    """Return the value of a column as text; None if there is none.

    Raises:
        ValueError: The value is not text, or has characters that cannot be used.
    """
    if isinstance(value, list):
        items = [item for item in value if item is not None]
        for item in items:
            if not isinstance(item, str):
                raise ValueError(
                    f"column {name!r} holds a list with {kind_of(item)} in it, not text"
                )
        value = "\n".join(items)
    elif isinstance(value, (int, float)):  # also a boolean
        value = json.dumps(value)
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(
            f"column {name!r} holds {kind_of(value)}, not text{_key_hint(name, value)}"
        )
    if "\0" in value:
        raise ValueError(f"column {name!r} holds NUL characters")
    return value


def _key_hint(name: str, value: object) -> str:
    """Return a hint at how to name a text inside an object; "" if it has none."""
    if not isinstance(value, Mapping):
        return ""
    for key, inner in value.items():
        if isinstance(inner, str):
            return f"; name a key of it instead, such as {name}.{key}"
    return ""


def _html_text(name: str, html: str, source: InputConfig) -> str:
    """Return the visible text of a column of HTML.

    Raises:
        ValueError: The HTML is too large or cannot be read.
    """
    limit = html_limit(source)
    if _utf8_bytes(name, html) > limit:
        raise ValueError(
            f"column {name!r} has over {limit} bytes of HTML, 16 times input.max_document_bytes"
        )
    return visible_text(html)


def _utf8_bytes(name: str, text: str) -> int:
    """Return the bytes of a column's text in UTF-8.

    Raises:
        ValueError: It cannot be encoded.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"column {name!r} holds half a surrogate pair") from None


def read_table(table: pa.Table, config: RunConfig) -> list[Document]:
    """Return the documents of a table in memory, one for each row.

    A document without an id gets its row's number.

    Args:
        table: The rows.
        config: The run's configuration.
    """
    columns: dict[str, list[object]] = {}
    for name in needed_names(table.column_names, with_outer(_columns_read(config))):
        columns[name] = column_values(table[name].combine_chunks())
    documents = []
    for row in range(table.num_rows):
        fields = {name: values[row] for name, values in columns.items()}
        documents.append(filled(Document(row, str(row), row=row), config, fields))
    return documents
