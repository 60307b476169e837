"""Text and rows of files of foreign formats: HTML, PDF, Word and workbooks.

A small file of such a format can take minutes or all memory to read. `parser_process` therefore
runs this file as a script in a process of its own, with limits. The script reads requests from
stdin and writes answers to stdout, both as a line of JSON followed by a body of bytes.
"""

import contextlib
import io
import json
import math
import os
import re
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO
from urllib.parse import urljoin

import lxml.etree
import lxml.html

MEMORY = 2 << 30  # bytes of address space of the process
_IDLE_MEMORY = 256 << 20  # bytes; a process that still holds more after its answer ends
# Elements of HTML whose text is not visible.
_INVISIBLE = ("title", "script", "style", "noscript", "template", "svg")
_LINES = re.findall(  # elements that begin a line
    r"\w+",
    "address article aside blockquote br dd div dl dt fieldset figcaption figure footer "
    "form h1 h2 h3 h4 h5 h6 header "
    "hr li main nav ol option p pre section table title tr ul",
)
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_RUN_CHILDREN = {_WORD + name for name in ("br", "cr", "noBreakHyphen", "ptab", "t", "tab")}
_UNPACKED_WORKBOOK = 1 << 30  # bytes
_MAX_CELLS = 1 << 25  # of a sheet's range: the parser takes 32 bytes for each, also for empty ones
_MAX_ROW_BYTES = 512 << 20  # of all rows of a sheet, as JSON
_SHEET_CHUNK = 1 << 22  # bytes of a sheet that are searched at a time
_SHEET_OVERLAP = 256  # bytes; no reference is longer than this
_ROW_NUMBER = re.compile(rb'<(?:\w+:)?row\b[^>]*?\sr="(\d{1,7})"')
_COLUMN_LETTERS = re.compile(rb'\sr="([A-Z]{1,3})\d')


def visible_text(text: str) -> str:
    """Return the visible text of a page of HTML, or of a piece of one.

    Raises:
        ValueError: The HTML cannot be read; the text says why.
    """
    # libxml2 drops what stands behind these.
    text = re.sub(r"(?i)</(?:body|html)\s*>", "", text)
    parser = lxml.html.HTMLParser(
        remove_comments=True, remove_pis=True, huge_tree=True, encoding="utf-8"
    )
    try:
        page = lxml.etree.fromstring(text.encode(), parser)
    except lxml.etree.LxmlError as error:
        raise ValueError(f"HTML that cannot be read: {error}") from None
    if any(entry.type_name == "ERR_RESOURCE_LIMIT" for entry in parser.error_log):
        raise ValueError(
            "HTML that cannot be read whole: its elements are nested more than 2048 deep"
        )
    if page is None:
        return ""
    # The tree stays as it is: lxml lets no control character be written into it.
    pieces = []
    walk: Any = lxml.etree.iterwalk(page, ("start", "end"))
    for event, element in walk:
        if element.tag in _LINES:
            pieces.append("\n")
        if event == "end":
            if element.tag in ("td", "th"):
                pieces.append(" ")
            pieces.append(element.tail or "")
        elif element.tag in _INVISIBLE:
            walk.skip_subtree()
        else:
            pieces.append(element.text or "")
    return _in_lines("".join(pieces).splitlines())


def _in_lines(texts: Iterable[str]) -> str:
    lines = (" ".join(text.split()) for text in texts)
    return "\n".join(line for line in lines if line)


def word_text(data: bytes, limit: int) -> str:
    """Return paragraphs and rows of tables, a line each, as if all changes were accepted.

    Args:
        data: The file.
        limit: Bytes that the file may have when it is unpacked.

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    import docx  # imported here because most runs need none of it

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(file.file_size for file in archive.infolist())
        if unpacked <= limit:
            body = docx.Document(io.BytesIO(data)).element.body
    except MemoryError:
        raise
    except Exception as error:  # of zipfile, lxml or python-docx
        raise ValueError(
            f"no Word file (or one with a password): {error or type(error).__name__}"
        ) from None
    if unpacked > limit:
        raise ValueError(f"a Word file that has {unpacked} bytes unpacked, more than {limit}")
    return _in_lines(_word_lines(body))


def _word_lines(body: Any) -> Iterator[str]:
    # A row of a table or a paragraph outside of one -> paragraph -> its text.
    lines: dict[Any, dict[Any, str]] = {}
    paragraphs: list[Any] = []  # that are open
    rows: list[Any] = []  # that are open
    walk: Any = lxml.etree.iterwalk(body, ("start", "end"))
    for event, element in walk:
        tag = element.tag
        if event == "end":
            if tag == _WORD + "p":
                paragraphs.pop()
            elif tag == _WORD + "tr":
                rows.pop()
        elif tag == _WORD + "p":
            paragraphs.append(element)
        elif tag == _WORD + "tr":
            rows.append(element)
        elif tag == _WORD + "del" or str(tag).endswith("}Fallback") or tag == "Fallback":
            # Deleted text, and a fallback that says the same again.
            walk.skip_subtree()
        elif tag == _WORD + "r" and paragraphs:
            paragraph = paragraphs[-1]
            line = lines.setdefault(rows[-1] if rows else paragraph, {})
            text = "".join(str(child) for child in element if child.tag in _RUN_CHILDREN)
            line[paragraph] = line.get(paragraph, "") + text
    return (" ".join(line.values()) for line in lines.values())


def pdf_pages(data: bytes) -> list[str]:
    """Return the text of each page of a PDF; "" for a page without text.

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    import pypdf  # imported here because most runs need none of it

    try:
        pdf = pypdf.PdfReader(io.BytesIO(data))
        if pdf.is_encrypted and not pdf.decrypt(""):
            raise ValueError("it has a password")
        return [re.sub("[\0\f]", " ", page.extract_text()).strip() for page in pdf.pages]
    except MemoryError:
        raise
    # Pypdf's own for some faults of a file, and any of Python's for others.
    except Exception as error:
        raise ValueError(f"a PDF that cannot be read: {error or type(error).__name__}") from None


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
        raise ValueError(f"no workbook that can be read: {error}") from None
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
    """Return the number of the row that names the columns: the first one with several values, as a
    title may stand above it; of a sheet with a single column the first one with a value.
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
            raise ValueError(f"two columns are called {name!r}")
        seen.add(name)


def _check_workbook(data: bytes) -> None:
    """Refuse a workbook that is known to be too large before it is unpacked or laid out.

    Raises:
        ValueError: The workbook is too large.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile:  # an .xls, or no workbook
        return
    with archive:
        unpacked = sum(file.file_size for file in archive.infolist())
        if unpacked > _UNPACKED_WORKBOOK:
            raise ValueError(
                f"a workbook that has {unpacked} bytes unpacked, more than {_UNPACKED_WORKBOOK}: "
                "save the sheet as CSV"
            )
        # What is wrong with a part is found again when the workbook is read.
        with contextlib.suppress(KeyError, lxml.etree.LxmlError, zipfile.BadZipFile, StopIteration):
            rows, columns = _sheet_range(archive, _first_sheet(archive))
            if rows * columns > _MAX_CELLS:
                raise ValueError(
                    f"a workbook whose first sheet spans {rows:,} rows and {columns:,} columns, "
                    f"more than {_MAX_CELLS:,} cells: delete cells that stand far outside of the "
                    "table, or save the sheet as CSV"
                )


def _first_sheet(archive: zipfile.ZipFile) -> str:
    """Return the name of the first sheet's part of an .xlsx or .xlsm.

    Raises:
        KeyError, StopIteration, lxml.etree.LxmlError: It has no such part, as an .ods has none.
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
    """Return a cell as text; a workbook has no whole numbers."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell) or None


def _answer(request: dict[str, Any], data: bytes) -> bytes:
    """Return what a request asks for: a line of JSON, or a line for each row of a sheet.

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    kind = request["kind"]
    if kind == "html":
        return json.dumps(visible_text(data.decode())).encode()
    if kind == "docx":
        return json.dumps(word_text(data, request["limit"])).encode()
    if kind == "pdf":
        return json.dumps(pdf_pages(data)).encode()
    lines = []
    size = 0
    for row in sheet_rows(data):
        line = json.dumps(row).encode()
        lines.append(line)
        size += len(line)
        if size > _MAX_ROW_BYTES:
            raise ValueError(
                f"a workbook with more than {_MAX_ROW_BYTES >> 20} MiB of values: save the sheet "
                "as CSV"
            )
    return b"\n".join(lines)


def _resident_memory() -> int:
    """Return the bytes that this process holds now; 0 where the system does not tell."""
    # Not `ru_maxrss`, which begins with the memory of the parent process.
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until stdin ends, which it does when the parent process ends."""
    import resource  # not on every system

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    while line := requests.readline():
        request = json.loads(line)
        data = requests.read(request["bytes"])
        cpu_limit = math.ceil(time.process_time()) + request["seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit, hard_limit))
        header: dict[str, Any] = {"error": None}
        body = b""
        try:
            body = _answer(request, data)
        except MemoryError:
            # As a parser that is not written in Python ends its process.
            sys.exit(1)
        except ValueError as error:
            header["error"] = str(error)
        except BaseException as error:  # a panic of Rust is no Exception
            header["error"] = f"it cannot be read: {type(error).__name__}: {error}"
        header["bytes"] = len(body)
        header["last"] = _resident_memory() > _IDLE_MEMORY
        answers.write(json.dumps(header).encode() + b"\n" + body)
        answers.flush()
        if header["last"]:
            return


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
