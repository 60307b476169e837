"""Files that each unit reads whole: JSON (an array, an object, several in turn), a workbook's first
sheet.
"""

import io
import json
import re
from collections.abc import Iterator
from typing import Any

from raypd.dataset.jsonl import open_lines
from raypd.dataset.parser_process import parse
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
    """Yield the rows of a workbook's first sheet, as a CSV of the sheet has them.

    An empty cell is None, and a row without a value is left out.

    Raises:
        InputError: The workbook cannot be read; the text says why.
    """
    try:
        lines = parse("excel", data)
    except ValueError as error:
        raise InputError(str(error)) from None
    for line in io.BytesIO(lines):
        yield json.loads(line)
