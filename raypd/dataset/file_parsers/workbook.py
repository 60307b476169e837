"""Workbooks: the rows of the first sheet."""

import contextlib
import io
import re
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urljoin

import lxml.etree

_UNPACKED_WORKBOOK = 1 << 30  # bytes
_MAX_CELLS = 1 << 25  # of a sheet's range: the parser takes 32 bytes for each, even if it is empty
_SHEET_CHUNK = 1 << 22  # bytes of a sheet that are searched at a time
_SHEET_OVERLAP = 256  # bytes; no reference is longer than this
_ROW_NUMBER = re.compile(rb'<(?:\w+:)?row\b[^>]*?\sr="(\d{1,7})"')
_COLUMN_LETTERS = re.compile(rb'\sr="([A-Z]{1,3})\d')


def sheet_rows(data: bytes) -> Iterator[dict[str, str | None]]:
    """Yield the rows of a workbook's first sheet that have a value; an empty cell is None.

    Raises:
        ValueError: The workbook cannot be read; the text says why.
    """
    from python_calamine import CalamineError, CalamineWorkbook

    _check_workbook(data)
    try:
        sheet = CalamineWorkbook.from_filelike(io.BytesIO(data)).get_sheet_by_index(0)
    except CalamineError as error:
        raise ValueError(f"not a readable workbook: {error}") from None
    header_row = _header_row(sheet.iter_rows())
    names: list[str] = []
    for number, row in enumerate(sheet.iter_rows()):
        if number == header_row:
            names = [(_cell_text(cell) or "").strip() for cell in row]
            _check_names(names)
        elif number > header_row:
            cells = zip(names, row, strict=False)
            fields = {name: _cell_text(cell) for name, cell in cells if name}
            if any(fields.values()):
                yield fields


def _header_row(rows: Iterable[list[Any]]) -> int:
    """Return the number of the row that names the columns: the first row with several values,
    because a title may be above it; in a sheet with one column, the first row with a value.
    """
    first = None
    for number, row in enumerate(rows):
        if sum(map(bool, row)) > 1:
            return number
        if first is None and any(cell != "" for cell in row):
            first = number
    return first or 0


def _check_names(names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name and name in seen:
            raise ValueError(f"two columns have the name {name!r}")
        seen.add(name)


def _check_workbook(data: bytes) -> None:
    """Refuse a workbook that is too large, before it is unpacked or laid out.

    Raises:
        ValueError: The workbook is too large.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile:  # an .xls, or not a workbook
        return
    with archive:
        unpacked = sum(file.file_size for file in archive.infolist())
        if unpacked > _UNPACKED_WORKBOOK:
            raise ValueError(
                f"a workbook that has {unpacked} bytes unpacked, more than {_UNPACKED_WORKBOOK}: "
                "save the sheet as CSV"
            )
        # Faults of a part are found again when the workbook is read.
        with contextlib.suppress(KeyError, lxml.etree.LxmlError, zipfile.BadZipFile, StopIteration):
            rows, columns = _sheet_range(archive, _first_sheet(archive))
            if rows * columns > _MAX_CELLS:
                raise ValueError(
                    f"a workbook whose first sheet spans {rows:,} rows and {columns:,} columns, "
                    f"more than {_MAX_CELLS:,} cells: delete cells far outside the table, or save "
                    "the sheet as CSV"
                )


def _first_sheet(archive: zipfile.ZipFile) -> str:
    """Return the name of the first sheet's part of an .xlsx or .xlsm.

    Raises:
        KeyError, StopIteration, lxml.etree.LxmlError: It has no such part, such as an .ods.
    """
    workbook = _parsed(archive.read("xl/workbook.xml"))
    sheet = next(element for element in workbook.iter("{*}sheet"))
    relation = next(value for name, value in sheet.items() if name.endswith("}id"))
    for element in _parsed(archive.read("xl/_rels/workbook.xml.rels")).iter("{*}Relationship"):
        if element.get("Id") == relation:
            return urljoin("/xl/workbook.xml", element.get("Target")).lstrip("/")
    raise KeyError(relation)


def _parsed(data: bytes) -> Any:
    return lxml.etree.fromstring(data, lxml.etree.XMLParser(resolve_entities=False))


def _sheet_range(archive: zipfile.ZipFile, name: str) -> tuple[int, int]:
    """Return the number of the last row and of the last column that a sheet's cells name."""
    last_row = 0
    letters: set[bytes] = set()
    tail = b""
    with archive.open(name) as file:
        while data := file.read(_SHEET_CHUNK):
            chunk = tail + data
            numbers = _ROW_NUMBER.findall(chunk)
            last_row = max(last_row, max(map(int, numbers), default=0))
            letters.update(_COLUMN_LETTERS.findall(chunk))
            tail = chunk[-_SHEET_OVERLAP:]
    return last_row, max(map(_column_number, letters), default=0)


def _column_number(letters: bytes) -> int:
    """Return the number of a column: 1 for A, 27 for AA."""
    number = 0
    for letter in letters:
        number = number * 26 + letter - ord("A") + 1
    return number


def _cell_text(cell: Any) -> str | None:
    """Return a cell as text; a workbook stores whole numbers as floats, too."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell) or None
