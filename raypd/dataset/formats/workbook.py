"""Workbooks of Excel and LibreOffice: the first sheet is the table."""

import io
import json
from collections.abc import Iterator
from typing import Any

from raypd.config import InputConfig
from raypd.dataset.formats.base import Fields
from raypd.dataset.formats.object_rows import ObjectFormat, read_whole
from raypd.dataset.parser_process import parse
from raypd.errors import InputError
from raypd.run import Part


class Workbook(ObjectFormat):
    """Workbooks."""

    reads_as = "a table, its first sheet"

    def rows(self, part: Part, source: InputConfig) -> Iterator[Any]:
        return sheet_rows(read_whole(part, "save the sheet as CSV"))

    def fields(self, row: Any) -> Fields:
        return dict(row)


def sheet_rows(data: bytes) -> Iterator[dict[str, str | None]]:
    """Yield the rows of a workbook's first sheet, as a CSV file of the sheet would have them.

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
