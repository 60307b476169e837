"""Small files that take minutes or all memory to read: each is one error, and all else is read."""

import contextlib
import gzip
import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import docx
import openpyxl
import pytest

from raypd.dataset import delimited, jsonl, parser_process
from raypd.dataset.formats.workbook import sheet_rows
from raypd.dataset.label_file import label_rows
from raypd.dataset.planner import plan
from raypd.errors import InputError
from tests.runs import read_all

FILES = {
    "format": "files",
    "text_columns": ["text"],
    "category_column": None,
    "category": "c",
}
SHEET = '<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>'


def workbook(*rows: tuple[object, ...]) -> bytes:
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    data = io.BytesIO()
    book.save(data)
    return data.getvalue()


def with_part(data: bytes, name: str, *pieces: bytes) -> bytes:
    """A copy of a zip file in which one part consists of these pieces."""
    result = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as source,
        zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for item in source.infolist():
            if item.filename != name:
                target.writestr(item.filename, source.read(item.filename))
        with target.open(name, "w", force_zip64=True) as part:
            for piece in pieces:
                part.write(piece)
    return result.getvalue()


def with_sheet(*pieces: bytes) -> bytes:
    sheet = (SHEET.encode(), *pieces, b"</sheetData></worksheet>")
    return with_part(workbook(("id",)), "xl/worksheets/sheet1.xml", *sheet)


def cell(reference: str, text: str = "x") -> str:
    return f'<c r="{reference}" t="inlineStr"><is><t>{text}</t></is></c>'


def far_cell(reference: str, row: str = '<row r="1048576">') -> bytes:
    first = f'<row r="1">{cell("A1", "id")}{cell("B1", "title")}</row>'
    return with_sheet(f"{first}{row}{cell(reference)}</row>".encode())


def unpacks_to_gigabytes() -> bytes:
    text = (b"a" * (1 << 20) for _ in range(1100))
    return with_sheet(b'<row r="1"><c r="A1" t="inlineStr"><is><t>', *text, b"</t></is></c></row>")


def test_a_workbook_that_is_too_large_costs_no_other_file_anything(tmp_path, config) -> None:
    (tmp_path / "good.xlsx").write_bytes(workbook(("id", "title"), (1, "lamp")))
    (tmp_path / "corner.xlsx").write_bytes(far_cell("XFD1048576"))
    (tmp_path / "hundred_columns.xlsx").write_bytes(far_cell("CV1048576"))
    (tmp_path / "bomb.xlsx").write_bytes(unpacks_to_gigabytes())
    made = plan(
        config(
            str(tmp_path),
            format="excel",
            category_column=None,
            category="c",
        )
    )
    assert made.units == 1
    assert made.documents == 1
    reasons = {unit.name: str(unit.damaged) for unit in made.damaged()}
    assert reasons.keys() == {"corner.xlsx", "hundred_columns.xlsx", "bomb.xlsx"}
    assert "spans 1,048,576 rows and 16,384 columns" in reasons["corner.xlsx"]
    assert "spans 1,048,576 rows and 100 columns" in reasons["hundred_columns.xlsx"]
    assert "bytes unpacked, more than 1073741824" in reasons["bomb.xlsx"]
    with pytest.raises(InputError, match=r"corner\.xlsx.* spans 1,048,576 rows"):
        list(label_rows(str(tmp_path / "corner.xlsx"), "id"))


def test_a_parser_that_asks_for_all_memory_ends_its_own_process_alone() -> None:
    # Rows without a number are not seen by the check of the range.
    hidden = far_cell("XFD1048576", row="<row>")
    with pytest.raises(InputError, match="a workbook whose parser crashed or needed more than 2 G"):
        list(sheet_rows(hidden))
    good = workbook(("id", "title"), (1, "lamp"))
    assert list(sheet_rows(good)) == [{"id": "1", "title": "lamp"}]


def test_a_table_may_begin_anywhere_in_a_sheet_and_have_one_column() -> None:
    empty = (None,) * 4
    rows = sheet_rows(workbook(empty, empty, (*empty, "id", "title"), empty, (*empty, 7, "lamp")))
    assert list(rows) == [{"id": "7", "title": "lamp"}]
    one_column = sheet_rows(workbook(empty, (None, "title"), (None, "lamp"), (None, "mug")))
    assert list(one_column) == [{"title": "lamp"}, {"title": "mug"}]
    assert list(sheet_rows(workbook())) == []


def test_html_with_many_attributes_and_a_long_word_file_end_within_their_time(
    tmp_path, config, monkeypatch
) -> None:
    attributes = " ".join(f"a{number}" for number in range(300_000))
    (tmp_path / "a.html").write_text(f"<p {attributes}>x")
    run = "<w:r><w:t>a</w:t></w:r>" * 100_000
    data = io.BytesIO()
    docx.Document().save(data)
    namespace = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    document = (
        f'<w:document xmlns:w="{namespace}"><w:body><w:p>{run}</w:p></w:body></w:document>'
    ).encode()
    (tmp_path / "b.docx").write_bytes(with_part(data.getvalue(), "word/document.xml", document))
    (tmp_path / "c.txt").write_text("text")
    monkeypatch.setitem(parser_process.SECONDS, "html", 1)
    start = time.process_time()
    html, word, text = read_all(config(str(tmp_path), **FILES))
    assert html.error == "a.html: HTML that could not be read within 1 s"
    assert word.fields["text"] == "a" * 100_000
    assert text.fields["text"] == "text"
    assert time.process_time() - start < 2  # of this process


def test_a_file_whose_parser_is_killed_is_an_error_and_the_next_one_is_read() -> None:
    parser_process.close()
    with contextlib.suppress(ValueError):
        parser_process.parse("docx", b"")
    (idle,) = parser_process._idle
    os.kill(idle.pid, signal.SIGKILL)
    idle.wait()
    with pytest.raises(ValueError, match="not a Word file"):
        parser_process.parse("docx", b"")
    (fresh,) = parser_process._idle
    assert fresh.pid != idle.pid
    fresh.send_signal(signal.SIGSTOP)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {fresh.pid}"])
    with pytest.raises(ValueError, match="a Word file whose parser crashed"):
        parser_process.parse("docx", b"")
    killer.wait()


def test_parsers_end_with_the_process_that_started_them() -> None:
    code = (
        "import os\n"
        "from raypd.dataset import parser_process\n"
        "parser_process.parse('html', b'<p>x')\n"
        "print(parser_process._idle[0].pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
    )
    parser = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 20
    while parser.exists() and parser.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_packed_file_of_blank_lines_is_unreadable(ending, tmp_path, config, monkeypatch) -> None:
    monkeypatch.setattr(jsonl, "BLANK_LIMIT", 10_000)
    monkeypatch.setattr(delimited, "BLANK_LIMIT", 10_000)
    first = b'{"id": 1, "title": "a"}\n'
    last = b'{"id": 2, "title": "b"}\n'
    if ending == "csv":
        first = b"id,title\n1,a\n"
        last = b"2,b\n"
    few = b"\r\n" * 4_999
    many = b"\r\n" * 5_001
    (tmp_path / f"few.{ending}.gz").write_bytes(gzip.compress(first + few + last))
    (tmp_path / f"many.{ending}.gz").write_bytes(gzip.compress(first + many + last))
    (tmp_path / f"plain.{ending}").write_bytes(first + many + last)
    made = config(str(tmp_path), category_column=None, category="c")
    assert [(d.source, d.fields["title"]) for d in read_all(made)] == [
        (f"few.{ending}.gz", "a"),
        (f"few.{ending}.gz", "b"),
        (f"plain.{ending}", "a"),
        (f"plain.{ending}", "b"),
    ]
    (damaged,) = plan(made).damaged()
    assert damaged.name == f"many.{ending}.gz"
    assert "10000 bytes of blank lines" in str(damaged.damaged)
