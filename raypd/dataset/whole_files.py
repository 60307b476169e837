"""Files that each unit reads whole: JSON (an array, an object, several in turn), a workbook's first
sheet.
"""

import io
import json
import re
from collections.abc import Iterator
from typing import Any

from python_calamine import CalamineError, CalamineWorkbook

from raypd.dataset.jsonl import open_lines
from raypd.errors import InputError, in_words
from raypd.run.unit import Part
from raypd.tasks.missing import json_constant

_VALUE = re.compile(r"\S")  # begins one
_DECODER = json.JSONDecoder(parse_constant=json_constant)
_MOST_BYTES = 1 << 27  # as objects of Python that is a GB
_LINES = (
    "`jq -c '.[]'` makes JSON Lines of an array, and input.format=jsonl reads lines of this name"
)


def whole_rows(part: Part) -> Iterator[Any]:
    """A file's rows, or what stands in their places. Raises InputError, OSError."""
    with open_lines(part.path, part.compression, version=part.version) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        advice = "save the sheet as CSV" if part.format == "excel" else _LINES
        raise InputError(f"a file of more than {_MOST_BYTES >> 20} MiB: {advice}")
    yield from sheet_rows(data) if part.format == "excel" else json_values(data)


def json_values(data: bytes) -> Iterator[Any]:
    """The items of arrays, also of one that is all that an object has, and what stands outside of
    one.
    """
    try:
        text, place = data.decode("utf-8-sig"), 0
        while begin := _VALUE.search(text, place):
            value, place = _DECODER.raw_decode(text, begin.start())
            items = (
                next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else value
            )
            yield from items if isinstance(items, list) else [value]
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {in_words(error)}") from None


def sheet_rows(data: bytes) -> Iterator[dict[str, str | None]]:
    """The rows of a workbook that have a value, as a CSV of the sheet has them; empty cells None.

    Raises InputError.
    """
    try:
        rows = CalamineWorkbook.from_filelike(io.BytesIO(data)).get_sheet_by_index(0).to_python()
    except CalamineError as error:
        raise InputError(f"no workbook that can be read: {error}") from None
    # A title may stand above it.
    head = next((n for n, row in enumerate(rows) if sum(map(bool, row)) > 1), 0)
    names = [(_text(cell) or "").strip() for cell in rows[head]] if rows else []
    if twice := next((name for n, name in enumerate(names) if name and name in names[:n]), None):
        raise InputError(f"two columns are called {twice!r}")
    for row in rows[head + 1 :]:
        fields = {name: _text(cell) for name, cell in zip(names, row, strict=False) if name}
        if any(fields.values()):
            yield fields


def _text(cell: Any) -> str | None:
    """As text; a workbook has no whole numbers."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return (str(cell).lower() if isinstance(cell, bool) else str(cell)) or None
