"""Rows of Arrow columns, as Parquet files, Arrow files and tables in memory have them."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from raypd.dataset.formats.base import Columns, Fields, SourceRow
from raypd.run import Part
from raypd.tasks import plain_value

# Some writers do not mark text as text.
_TEXT_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)


def needed_names(names: Iterable[str], columns: Columns) -> list[str]:
    """Return the names that are needed, with or without white space around them."""
    return [name for name in names if name in columns or name.strip() in columns]


def rows_of_batches(
    batches: Iterable[pa.RecordBatch], first_row: int, part: Part
) -> Iterator[SourceRow]:
    """Yield the rows of batches that are in a part.

    Args:
        batches: Consecutive batches.
        first_row: Number of the first batch's first row in the file.
        part: Its range of row numbers is read.
    """
    for batch in batches:
        if first_row >= part.end:
            return
        skipped = min(max(0, part.start - first_row), len(batch))
        piece = batch.slice(skipped, max(0, part.end - first_row - skipped))
        names = piece.schema.names
        rows = zip(*map(column_values, piece.columns), strict=True)
        for number, values in enumerate(rows, first_row + skipped):
            fields = zip(names, values, strict=True)
            yield SourceRow(number, f"row {number}", partial(dict, fields))
        first_row += len(batch)


def text_rows(batch: pa.RecordBatch | pa.Table) -> Iterator[Fields]:
    """Yield a row that names all columns, and then the rows of a batch with its text columns."""
    yield dict.fromkeys(batch.schema.names)
    names = [field.name for field in batch.schema if "string" in str(field.type)]
    yield from batch.select(names).to_pylist()


def column_values(column: Any) -> list[Any]:
    """Return the values of a column as types that JSON has.

    A text that is not UTF-8 is returned as the error itself, so that only its own row fails.

    Args:
        column: A pyarrow Array.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if any(is_text(column.type) for is_text in _TEXT_TYPES):
        return [_decoded(value) for value in column.cast(pa.large_binary()).to_pylist()]
    if pa.types.is_float32(column.type) or pa.types.is_float16(column.type):
        # As a 64-bit number, 0.1 would become 0.10000000149011612.
        shortest = column.cast(pa.float32()).cast(pa.string()).to_pylist()
        return [plain_value(None if text is None else float(text)) for text in shortest]
    try:
        values = column.to_pylist()
    except (ValueError, OverflowError):
        # Python cannot represent the time.
        values = column.cast(pa.string()).to_pylist()
    return [plain_value(value) for value in values]


def _decoded(value: bytes | None) -> str | UnicodeDecodeError | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return error
