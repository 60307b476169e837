"""Files that are a document each, what is wrong with them; Arrow files, and those a function of the
user's reads.
"""

import datetime
import gzip
import io
import json

import docx
import openpyxl
import pyarrow as pa
import pypdf
import pytest
from docx.oxml import ns, parse_xml
from matplotlib.figure import Figure

from raypd.dataset.file_parsers.pdf import pdf_pages
from raypd.dataset.formats.documents import DocumentFormat
from raypd.dataset.label_file import label_rows
from raypd.dataset.planner import plan
from raypd.errors import ConfigError, InputError
from tests.runs import read_all, says

PAGE = b"""<!doctype html><html><head><title>Shop</title><style>p {color: red}</style></head><body>
<script>var hidden = 1</script><!-- hidden --><h1>Mug &amp; saucer</h1><p>Made of <b>clay</b>, 0.3&nbsp;l<br>blue</p>
<table><tr><td>Brand</td><td>Acme</td></tr></table><ul><li>one<li>two</ul></body></html>"""  # noqa: E501
READER = """
import csv, io
def cards(name, file):
    for number, block in enumerate(file.read().decode().split("---")):
        if block == "end": raise ValueError("unknown card")
        yield {"id": f"{name}/{number}", "title": block} if block != "?" else [block]
"""


def pdf(*words: str, password: str | None = None) -> bytes:
    """A PDF of a page for each of some texts."""
    writer = pypdf.PdfWriter()
    made = io.BytesIO()
    for text in words:
        page = io.BytesIO()
        figure = Figure()
        figure.text(0.1, 0.5, text)
        figure.savefig(page, format="pdf")
        writer.append(page)
    if password is not None:
        writer.encrypt(password)
    writer.write(made)
    return made.getvalue()


def word() -> bytes:
    """A Word file of a paragraph with changes, its words said again by a fallback, and of a table
    in a table.
    """
    said = "<w:r><w:t>{}</w:t></w:r>".format
    text = f"{said('Lease to ')}<w:ins>{said('Acme')}</w:ins><w:del>{said('X')}</w:del><Fallback>{said('Y')}</Fallback>"  # noqa: E501
    file = docx.Document()
    made = io.BytesIO()
    file.element.body.insert(0, parse_xml(f"<w:p {ns.nsdecls('w')}>{text}</w:p>"))
    table = file.add_table(2, 2)
    for number, cell in enumerate(table._cells):
        cell.text = f"cell {number}"
    table.cell(1, 1).add_table(1, 1).cell(0, 0).text = "within"
    file.save(made)
    return made.getvalue()


def texts(folder, config, **keys) -> dict[str, str | None]:
    keys = {
        "format": "files",
        "text_columns": ["text"],
        "category_column": None,
        "category": "c",
        **keys,
    }
    return {d.id: d.error or d.fields["text"] for d in read_all(config(str(folder), **keys))}


def test_each_file_is_a_document_with_its_text(tmp_path, config, monkeypatch) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfplain\n text ")
    (tmp_path / "b.md").write_text("# Title\n\n*words*")
    (tmp_path / "below" / "c.HTML").write_bytes(PAGE)
    (tmp_path / "d.htm").write_bytes(b"<meta charset='iso-8859-1'><p>K\xe4se")
    (tmp_path / "e.pdf").write_bytes(pdf("first page", "second page"))
    (tmp_path / "f.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "g.docx").write_bytes(word())
    (tmp_path / "table.jsonl").write_text('{"id": 1, "text": "a row"}\n')
    assert texts(tmp_path, config) == {
        "a.txt": "plain\n text ",
        "b.md": "# Title\n\n*words*",
        "d.htm": "Käse",
        "f.txt.gz": "packed",
        "e.pdf": "first page\n\fsecond page\n\f",
        "g.docx": "Lease to Acme\ncell 0 cell 1\ncell 2 cell 3\nwithin",
        "below/c.HTML": "Mug & saucer\nMade of clay, 0.3 l\nblue\nBrand Acme\none\ntwo",
    }
    monkeypatch.setattr(DocumentFormat, "markup", 1)
    large = str(texts(tmp_path, config, max_document_bytes=len(word()))["g.docx"])
    assert large.startswith("g.docx: a Word file that has ")
    assert f"bytes unpacked, more than {len(word())}" in large


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (b"<html><body><p>one</p></body></html>\n<div>footer</div>", "one\nfooter"),
        (b"<html><head><title>t</title></head><body>one</body></html >" * 2, "one\none"),
        (b"<!DOCTYPE html><title>x</title><main>hello</main>", "hello"),
        (b"<meta charset=latin-1><p>5 \x80\x81", "5 \u20ac\ufffd"),
        (b"<meta charset=us-ascii><p>\x80", "\u20ac"),
        (b"\xef\xbb\xbf<meta charset=latin-1><p>K\xc3\xa4se", "K\u00e4se"),
        (b"<!-- <meta charset=klingon> --><meta charset=cp1252><p>\x80", "\u20ac"),
        (b"<!-- <meta charset=latin-1> --><p>\xc3\xa4", "\u00e4"),
        (b"<p>a \x0b b &#11; c \xef\xbf\xbe</p>d", "a\nb\nc \ufffe\nd"),
        (b"<p>a<img src='%s'>b" % (b"x" * 11_000_000), "ab"),
        (b"<i>" * 2000 + b"x", "x"),
    ],
)
def test_html_is_read_as_browsers_do(tmp_path, config, page: bytes, text: str) -> None:
    (tmp_path / "a.html").write_bytes(page)
    assert texts(tmp_path, config) == {"a.html": text}


def test_pages_of_a_pdf_without_text_are_counted(tmp_path, config, caplog):
    (tmp_path / "a.pdf").write_bytes(pdf("one", "", "three"))
    assert texts(tmp_path, config) == {"a.pdf": "one\n\f\n\fthree\n\f"}
    (message,) = caplog.messages
    assert message.startswith("a.pdf: no text on 1 of 3 pages (probably scanned")


def test_nul_characters_and_page_breaks_in_a_pdf_are_dropped(monkeypatch):
    read = pypdf.PageObject.extract_text
    monkeypatch.setattr(
        pypdf.PageObject, "extract_text", lambda page, **options: f"\0{read(page, **options)}\f\0"
    )
    assert pdf_pages(pdf("one", "")) == ["one", ""]


def test_columns_of_html_are_read_as_their_visible_text(tmp_path, config) -> None:
    clay = f"<p>Of <b>clay</b></p>0.3&nbsp;l<!--{'x' * 3000}-->"
    bodies = [
        clay,
        "",
        None,
        ["<i>a</i>", "b"],
        "<div>" * 5000,
        "<" * 40_000,
    ]
    lines = (
        json.dumps(
            {
                "id": n,
                "title": "<Mug>",
                "body": body,
            }
        )
        for n, body in enumerate(bodies)
    )
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    keys = {"html_columns": ["body"], "max_document_bytes": 2000, "category": "c"}
    *read, deep, large = read_all(
        config(
            str(tmp_path),
            text_columns=["title", "body"],
            **keys,
        )
    )
    assert [d.fields["body"] for d in read] == ["Of clay\n0.3 l", "", None, "a\nb"]
    says(
        (read[0].fields["title"], deep.error, large.error),
        "<Mug>",
        "elements are nested",
        "'body' has over 32000 byte",
    )
    with pytest.raises(
        ValueError, match=r"html_columns: 'body' is not one of the text columns \(title\)"
    ):
        config(str(tmp_path), text_columns=["title"], html_columns=["body"])


BAD = {
    "empty.txt": (b"", "empty.txt: the document has no text"),
    "latin.txt": (
        b"K\xe4se",
        "latin.txt: not UTF-8: invalid continuation byte at byte 1; set input.encoding",
    ),
    "nul.txt": (b"a\0b", "nul.txt: column 'text' holds NUL characters"),
    "long.txt": (
        b"x" * 3000,
        "long.txt: the file has more than 2000 bytes; input.max_document_bytes is 2000",
    ),
    "large.html": (b"<p>" + b" " * 40_000, "large.html: the file has more than 32000 bytes"),
    "deep.html": (
        b"<div>" * 5000 + b"x",
        "deep.html: the HTML cannot be read: its elements are nested",
    ),
    "charset.html": (
        b"<meta charset=klingon><p>x",
        "charset.html: its charset 'klingon' is unknown to Python",
    ),
    "nothing.html": (b" <!-- x -->", "nothing.html: the document has no text"),
    "cut.pdf": (b"%PDF-1.4 nothing", "cut.pdf: the PDF cannot be read: "),
    "locked.pdf": (
        pdf("x", password="secret"),
        "locked.pdf: the PDF cannot be read: it has a password",
    ),
    "locked.docx": (
        b"\xd0\xcf\x11\xe0",
        "locked.docx: not a Word file, or one with a password: File is not a zip file",
    ),
    "scan.pdf": (
        pdf("", ""),
        "scan.pdf: a PDF without text on its 2 pages (probably a scan): set input.ocr=auto",
    ),
}


def test_what_cannot_be_read_is_a_document_with_an_error(tmp_path, config) -> None:
    for name, (data, _) in BAD.items():
        (tmp_path / name).write_bytes(data)
    read = texts(tmp_path, config, max_document_bytes=2000)
    assert read.keys() == BAD.keys()
    for name, (_, error) in BAD.items():
        assert (read[name] or "").startswith(error), (name, read[name])


def test_a_folder_says_which_files_are_read_and_a_path_that_ends_as_they_do_needs_no_format(
    tmp_path, config
) -> None:
    (tmp_path / "README.md").write_text("about the table")
    with pytest.raises(
        InputError, match=r"README.md: input.format=files reads each file \(.txt, .*as a document"
    ):
        plan(config(str(tmp_path)))
    (tmp_path / "table.jsonl").write_text('{"id": 1, "title": "a row"}\n')
    assert [d.fields["title"] for d in read_all(config(str(tmp_path)))] == ["a row"]
    (tmp_path / "README.md").rename(tmp_path / "a.odt")
    (tmp_path / "table.jsonl").unlink()
    with pytest.raises(InputError, match=r"a.odt: input.format=files reads each file \(.txt, "):
        plan(
            config(
                str(tmp_path),
                format="files",
                text_columns=["text"],
            )
        )
    (tmp_path / "a.md").write_text("words")
    read = read_all(
        config(
            str(tmp_path / "*.md"),
            text_columns=["text"],
            category_column=None,
            category="c",
        )
    )
    assert [(d.id, d.fields["text"]) for d in read] == [("a.md", "words")]
    with pytest.raises((InputError, ConfigError), match=r"no column 'sku' \(input.id_column\)"):
        plan(
            config(
                str(tmp_path / "*.md"),
                text_columns=["text"],
                id_column="sku",
                category="c",
            )
        )


@pytest.mark.parametrize("write", [pa.ipc.new_stream, pa.ipc.new_file])
def test_rows_of_arrow_files(tmp_path, config, write) -> None:
    table = pa.Table.from_pylist(
        [
            {
                "id": n,
                "title": f"t{n}",
                "more": [n],
            }
            for n in range(200)
        ]
    )
    with write(str(tmp_path / "data-00000-of-00001.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=30)
    (tmp_path / "cache-0123456789abcdef.arrow").write_bytes(
        (tmp_path / "data-00000-of-00001.arrow").read_bytes()
    )
    assert plan(config(str(tmp_path / "cache-0123456789abcdef.arrow"))).documents == 200
    run = config(str(tmp_path), unit_documents=70)
    assert [d.fields for d in read_all(run)] == [{"id": n, "title": f"t{n}"} for n in range(200)]
    assert max(unit.rows for unit in plan(run)) <= 70
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"ARROW1 and nothing more")
    with pytest.raises(InputError, match=r"data-00000-of-00001.arrow: cannot be read as Arrow: "):
        plan(run)


def test_files_that_a_function_of_ones_own_reads(tmp_path, config, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop_cards.py").write_text(READER)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.cards").write_text("---".join(["x", "?", *"y" * 98]))
    made = config(str(tmp_path / "in"), reader="shop_cards:cards", unit_documents=70)
    assert [unit.rows for unit in plan(made)] == [70, 30]
    assert [(d.id, d.error) for d in read_all(made)[:3]] == [
        ("a.cards/0", None),
        ("a.cards:1", "a.cards, row 1: input.reader gave a list, not a dict"),
        ("a.cards/2", None),
    ]
    (tmp_path / "b.txt").write_text("x---y")
    # Of any name.
    assert plan(config(str(tmp_path / "b.txt"), reader="shop_cards:cards")).documents == 2
    (tmp_path / "in/a.cards").write_text("x---end")
    with pytest.raises(
        InputError, match=r"a.cards: input.reader shop_cards:cards: ValueError: unknown card"
    ):
        plan(made)
    with pytest.raises(
        ConfigError, match=r"input.reader: shop_cards:card: cannot be imported: AttributeError"
    ):
        plan(config(str(tmp_path / "in"), reader="shop_cards:card"))


def test_json_that_is_no_lines(tmp_path, config) -> None:
    one, two, three = (
        {
            "id": n,
            "title": f"t{n}",
            "more": {"n": n},
        }
        for n in "123"
    )
    (tmp_path / "a.json").write_text(
        f"\ufeff [{json.dumps(one, indent=2)}, 7,\n{json.dumps(two)}]\n"
    )
    (tmp_path / "b.JSON.gz").write_bytes(
        gzip.compress(f"{json.dumps(three, indent=1)}\n\n{{}}".encode())
    )
    (tmp_path / "notes.txt").write_text("no JSON")
    made = config(str(tmp_path), format="json", unit_documents=2)
    assert [(d.id, d.fields, d.error) for d in read_all(made)] == [
        ("1", one, None),
        ("a.json:1", {}, "a.json, row 1: expected a JSON object, found a number"),
        ("2", two, None),
        ("3", three, None),
        ("b.JSON.gz:1", {}, "b.JSON.gz, row 1: no text in title"),
    ]
    assert [unit.rows for unit in (*plan(made), *plan(config(str(tmp_path / "*.json"))))] == [
        2,
        1,
        2,
        3,
    ]
    with pytest.raises(
        InputError, match=r"/a.json: input.format=json reads each file \(.json\) as"
    ):
        plan(config([str(tmp_path / "*.json"), str(tmp_path / "*.txt")]))
    (tmp_path / "a.json").write_text('[{"id": 1}')
    with pytest.raises(
        InputError, match=r"a.json: not JSON: Expecting ',' delimiter: line 1 column 11"
    ):
        plan(config(str(tmp_path / "a.json")))
    (tmp_path / "a.json").write_text(json.dumps({"products": [one, two]}))
    assert [(d.id, d.fields) for d in read_all(config(str(tmp_path / "a.json")))] == [
        ("1", one),
        ("2", two),
    ]


def test_a_workbook_is_read_as_a_csv_of_its_first_sheet(tmp_path, config) -> None:
    book = openpyxl.Workbook()
    day = datetime.datetime(2021, 9, 1)
    hour = datetime.datetime(2021, 9, 1, 8, 30)
    book.active["A1"] = "Our products"
    for row in (
        ["id", "title", None, "more"],
        [7, 2001, "x", day],
        [None] * 4,
        [8.5, "b\nc", None, hour],
        [9, True],
    ):
        book.active.append(row)
    book.create_sheet().append(["id", "title"])
    book.save(tmp_path / "a.xlsx")
    made = config(str(tmp_path / "a.xlsx"), unit_documents=2)
    table = ("7", "2001", "2021-09-01"), ("8.5", "b\nc", "2021-09-01 08:30:00"), ("9", "true", None)
    assert [tuple(document.fields.values()) for document in read_all(made)] == [*table]
    assert [(unit.start, unit.rows) for unit in plan(made)] == [(0, 2), (2, 1)]
    assert [(line, row["title"]) for line, _, row in label_rows(str(tmp_path / "a.xlsx"), "id")][
        1
    ] == (3, "b\nc")
    book.active["C2"] = "title"
    book.save(tmp_path / "a.xlsx")
    (tmp_path / "b.xlsx").write_bytes(b"PK")
    for name, message in (
        ("a", "a.xlsx: two columns have the name 'title'"),
        ("b", "b.xlsx: not a readable workb"),
    ):
        with pytest.raises(InputError, match=message):
            plan(config(str(tmp_path / f"{name}.xlsx")))
