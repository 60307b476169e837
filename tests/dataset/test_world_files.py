"""Mails, presentations, RTF, books, XML and archives of the web, and folders that mix them."""

import gzip
import io
import zipfile
import zlib
from email.message import EmailMessage
from pathlib import Path

import pptx
import pytest
import zstandard
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from raypd.config import InputConfig
from raypd.dataset import parser_process, stretch_of
from raypd.dataset.formats import warc
from raypd.dataset.look import look
from raypd.dataset.planner import plan
from raypd.errors import InputError
from tests.dataset.test_text_files import pdf, texts, word
from tests.runs import read_all

WARC = {"text_columns": ["text"], "category_column": None, "category": "c"}
FILES = Path(__file__).parent / "files"
CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/content.opf"/></rootfiles></container>'
)
PACKAGE = (
    '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
    '<item id="b" href="zwei.xhtml" media-type="application/xhtml+xml"/>'
    '<item id="a" href="text/ein%20s.xhtml" media-type="application/xhtml+xml"/>'
    '<item id="i" href="cover.png" media-type="image/png"/>'
    '</manifest><spine><itemref idref="a"/><itemref idref="b"/></spine></package>'
)


def presentation() -> bytes:
    deck = pptx.Presentation()
    first = deck.slides.add_slide(deck.slide_layouts[1])
    first.shapes.title.text = "Jahresbericht"
    first.placeholders[1].text = "Umsatz 12 Mio. Euro\nGewinn"
    first.notes_slide.notes_text_frame.text = "Zahlen prüfen"
    second = deck.slides.add_slide(deck.slide_layouts[6])
    group = second.shapes.add_group_shape()
    group.shapes.add_textbox(0, 0, 100, 100).text_frame.text = "in a group"
    table = second.shapes.add_table(2, 2, 0, 0, 100, 100).table
    for number, cell in enumerate(table.iter_cells()):
        cell.text = f"cell {number}"
    data = io.BytesIO()
    deck.save(data)
    return data.getvalue()


def book(*, encrypted: str | None = None, chapter: str = "") -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr("META-INF/container.xml", CONTAINER)
        archive.writestr("OEBPS/content.opf", PACKAGE)
        archive.writestr(
            "OEBPS/text/ein s.xhtml",
            '<?xml version="1.0" encoding="iso-8859-1"?><html xmlns="http://www.w3.org/1999/xhtml">'
            "<head><title/></head><body><h1>Käse</h1><p>Erstes</p></body></html>".encode("latin-1"),
        )
        archive.writestr("OEBPS/zwei.xhtml", f"<p>Zweites&nbsp;Kapitel{chapter}")
        if encrypted is not None:
            archive.writestr(
                "META-INF/encryption.xml", f'<a><CipherReference URI="{encrypted}"/></a>'
            )
    return data.getvalue()


def mail(*attachments: tuple[str, bytes], html: str | None = None, plain: str = "Anbei.") -> bytes:
    message = EmailMessage()
    message["From"] = "Jörg Müller <jm@example.com>"
    message["To"] = "office@example.com"
    message["Subject"] = "Rechnung für März"
    if plain:
        message.set_content(plain)
    if html is not None:
        message.add_alternative(html, subtype="html")
    for name, data in attachments:
        message.add_attachment(data, maintype="application", subtype="octet-stream", filename=name)
    return message.as_bytes()


def archive(*responses: tuple[str, str, bytes], compressed: bool = True) -> bytes:
    """A WARC of responses (status line, content type, body), with a request before each."""
    data = io.BytesIO()
    writer = WARCWriter(data, gzip=compressed)
    for number, (status, content_type, body) in enumerate(responses):
        url = f"https://example.com/{number}"
        asked = StatusAndHeaders("GET / HTTP/1.1", [], is_http_request=True)
        writer.write_record(writer.create_warc_record(url, "request", http_headers=asked))
        headers = StatusAndHeaders(status, [("Content-Type", content_type)], protocol="HTTP/1.1")
        record = writer.create_warc_record(
            url, "response", payload=io.BytesIO(body), http_headers=headers
        )
        writer.write_record(record)
    return data.getvalue()


def test_a_mixed_folder_is_one_run(tmp_path, config) -> None:
    (tmp_path / "Verträge").mkdir()
    (tmp_path / "Verträge" / "Müller & Söhne.docx").write_bytes(word())
    (tmp_path / "Präsentation.pptx").write_bytes(presentation())
    (tmp_path / "Größe.rtf").write_bytes(
        rb"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}}\f0 Gr\'f6\'dfe\par \u8364? 12}"
    )
    (tmp_path / "buch.epub").write_bytes(book())
    (tmp_path / "rechnung.xml").write_text(
        '<i:Invoice xmlns:i="urn:x"><i:ID>R-7</i:ID><i:Seller><i:Name>Acme</i:Name></i:Seller>'
        '<i:Total currency="EUR">12.00</i:Total><i:Note>Paid <b>today</b>.</i:Note></i:Invoice>'
    )
    (tmp_path / "anfrage.eml").write_bytes(mail(("bild.png", b"\x89PNG"), html="<p>Anbei.</p>"))
    (tmp_path / "outlook.msg").write_bytes((FILES / "outlook.msg").read_bytes())
    (tmp_path / "seite.pdf").write_bytes(pdf("page one"))
    (tmp_path / "damaged.pptx").write_bytes(presentation()[:2000])
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "song.mp3").write_bytes(b"ID3")
    read = texts(tmp_path, config)
    assert read == {
        "Größe.rtf": "Größe\n€ 12",
        "Präsentation.pptx": "Jahresbericht\nUmsatz 12 Mio. Euro\nGewinn\nZahlen prüfen\n\f"
        "in a group\ncell 0 cell 1\ncell 2 cell 3\n\f",
        "Verträge/Müller & Söhne.docx": "Lease to Acme\ncell 0 cell 1\ncell 2 cell 3\nwithin",
        "anfrage.eml": "From: Jörg Müller <jm@example.com>\nTo: office@example.com\n"
        "Subject: Rechnung für März\nAttachments: bild.png\n\nAnbei.",
        "buch.epub": "Käse\nErstes\nZweites Kapitel",
        "damaged.pptx": read["damaged.pptx"],
        "empty.txt": "empty.txt: the document has no text",
        "outlook.msg": 'From: "peterpan@neverland.com" <peterpan@neverland.com>\n'
        "To: crocodile@neverland.com <crocodile@neverland.com>\n"
        "Subject: This is the subject\n\nThis is a message",
        "rechnung.xml": "Invoice:\n  ID: R-7\n  Seller:\n    Name: Acme\n"
        "  Total (currency=EUR): 12.00\n  Note: Paid today.",
        "seite.pdf": "page one\n\f",
    }
    assert str(read["damaged.pptx"]).startswith("damaged.pptx: not a PowerPoint file")
    made = plan(
        config(
            str(tmp_path),
            format="files",
            text_columns=["text"],
            category_column=None,
        )
    )
    (left_out,) = made.left_out
    assert left_out.files == 1
    assert left_out.examples == ["song.mp3"]


def test_attachments_are_named_or_follow_the_body_or_are_documents(tmp_path, config) -> None:
    inner = mail(("deep.txt", b"deep"))
    data = mail(
        ("Rechnung März.pdf", pdf("total 12")),
        ("logo.xyz", b"?"),
        ("damaged.docx", b"PK"),
        ("weiter.eml", inner),
    )
    (tmp_path / "a.eml").write_bytes(data)
    (tmp_path / "b.eml.gz").write_bytes(gzip.compress(mail(plain="", html="<p>Grüße</p>")))
    names = texts(tmp_path, config)
    assert names.keys() == {"a.eml", "b.eml.gz"}
    assert "Attachments: Rechnung März.pdf, logo.xyz, damaged.docx, weiter.eml" in names["a.eml"]
    assert names["b.eml.gz"].endswith("\n\nGrüße")
    (tmp_path / "a.eml").write_bytes(mail(("Rechnung März.pdf", pdf("total 12")), ("x.xyz", b"?")))
    followed = texts(tmp_path, config, attachments="text")
    assert followed["a.eml"].endswith("Anbei.\n\n--- Rechnung März.pdf ---\ntotal 12\n\f")
    (tmp_path / "a.eml").write_bytes(data)
    made = config(
        str(tmp_path),
        format="files",
        text_columns=["text"],
        category_column=None,
        attachments="documents",
    )
    assert plan(made).documents == 5
    documents = {document.id: document for document in read_all(made)}
    assert documents["a.eml/Rechnung März.pdf"].fields["text"] == "total 12\n\f"
    assert documents["a.eml/weiter.eml"].fields["text"].endswith("Attachments: deep.txt\n\nAnbei.")
    assert [(d.id, d.row) for d in documents.values()] == [
        ("a.eml", 0),
        ("a.eml/Rechnung März.pdf", 1),
        ("a.eml:2", 2),
        ("a.eml/weiter.eml", 3),
        ("b.eml.gz", 0),
    ]
    error = str(documents["a.eml:2"].error)
    assert error.startswith("a.eml, attachment damaged.docx: not a Word file")


def test_what_is_no_mail_is_an_error(tmp_path, config) -> None:
    (tmp_path / "a.eml").write_bytes(b"just words\n")
    (tmp_path / "b.msg").write_bytes((FILES / "outlook.msg").read_bytes()[:3000])
    (tmp_path / "c.msg").write_bytes(b"")
    for attachments in ("names", "documents"):
        read = texts(tmp_path, config, attachments=attachments)
        assert str(read["a.eml"]).startswith("a.eml: not a mail")
        assert str(read["b.msg"]).startswith("b.msg: not a readable message of Outlook")
        assert str(read["c.msg"]).startswith("c.msg: not a readable message of Outlook")


def test_mails_with_wrong_charsets_and_headers_are_read(tmp_path, config) -> None:
    (tmp_path / "a.eml").write_bytes(
        b"From: a@b.c\nSubject: =?klingon?q?x?=\nContent-Type: text/plain; charset=klingon\n\n\xe4"
    )
    (tmp_path / "b.eml").write_bytes(b"From: \xe4 <a@b.c>\nDate: never\n\nbody")
    read = texts(tmp_path, config)
    assert str(read["a.eml"]).endswith("\n\nä")
    assert str(read["b.eml"]).endswith("\n\nbody")


def test_every_part_of_a_mail_is_shown_or_named(tmp_path, config) -> None:
    message = EmailMessage()
    message["From"] = "a@b.c"
    message.set_content("Bitte kommen.")
    message.add_alternative("BEGIN:VCALENDAR", subtype="calendar")
    message.add_attachment(b"one", maintype="text", subtype="plain", filename="a.txt")
    message.add_attachment(b"two", maintype="text", subtype="plain", filename="a.txt")
    (tmp_path / "a.eml").write_bytes(message.as_bytes())
    # Programs that save a mail as text write a mark and an empty line first.
    (tmp_path / "b.eml").write_bytes(b"\xef\xbb\xbf\r\nFrom: a@b.c\r\n\r\nbody")
    read = texts(tmp_path, config, attachments="documents")
    assert read["a.eml"] == (
        "From: a@b.c\nAttachments: attachment.ics, a.txt, a.txt\n\nBitte kommen."
    )
    assert read["a.eml/a.txt"] == "one"
    assert read["a.eml/a.txt (2)"] == "two"
    assert read["b.eml"] == "From: a@b.c\n\nbody"


@pytest.mark.parametrize(
    ("charset", "data"),
    [
        ("us-ascii", "größer „so“".encode()),
        ("unknown-8bit", "größer „so“".encode()),
        ("iso-8859-1", "größer „so“".encode("cp1252")),
        ("utf-8", "größer „so“".encode("cp1252")),
        ("cp1250", "größer „so“".encode("cp1250")),
    ],
)
def test_the_charset_of_a_mail_may_be_wrong(charset, data, tmp_path, config) -> None:
    head = f"From: a@b.c\nContent-Type: text/plain; charset={charset}\n\n".encode()
    (tmp_path / "a.eml").write_bytes(head + data)
    assert str(texts(tmp_path, config)["a.eml"]).endswith("\n\ngrößer „so“")


def test_blanks_may_stand_before_the_declaration_of_xml(tmp_path, config) -> None:
    (tmp_path / "a.xml").write_text('\n <?xml version="1.0"?><a>x</a>')
    assert texts(tmp_path, config) == {"a.xml": "a: x"}


def test_a_book_with_encrypted_chapters_is_an_error(tmp_path, config) -> None:
    (tmp_path / "font.epub").write_bytes(book(encrypted="OEBPS/font.otf"))
    (tmp_path / "drm.epub").write_bytes(book(encrypted="OEBPS/zwei.xhtml"))
    (tmp_path / "no.epub").write_bytes(presentation())
    read = texts(tmp_path, config)
    assert str(read["font.epub"]).startswith("Käse")
    assert "its chapters are encrypted (DRM), the first: OEBPS/zwei.xhtml" in str(read["drm.epub"])
    assert str(read["no.epub"]).startswith("no.epub: not a readable EPUB")


def test_hostile_files_are_an_error_each(tmp_path, config, monkeypatch) -> None:
    lines = f'<!ENTITY a0 "{"x" * 1000}">'
    for number in range(11):
        lines += f'<!ENTITY a{number + 1} "{f"&a{number};" * 10}">'
    (tmp_path / "laughs.xml").write_text(f"<!DOCTYPE a [{lines}]><a>&a11;</a>")
    secret = tmp_path / "secret"
    secret.write_text("top secret")
    (tmp_path / "outside.xml").write_text(
        f'<!DOCTYPE a [<!ENTITY x SYSTEM "{secret.as_uri()}">]><a>&x;</a>'
    )
    (tmp_path / "deep.xml").write_text("<a>" * 40_000)
    (tmp_path / "bomb.epub").write_bytes(book(chapter="x" * 3_000_000))
    (tmp_path / "good.txt").write_text("fine")
    read = texts(tmp_path, config, max_document_bytes=10_000)
    assert read.pop("good.txt") == "fine"
    assert "Maximum entity amplification factor exceeded" in str(read["laughs.xml"])
    assert "the XML cannot be read" in str(read["outside.xml"])
    assert "the XML cannot be read" in str(read["deep.xml"])
    assert "an EPUB that has" in str(read["bomb.epub"])
    monkeypatch.setitem(parser_process.SECONDS, "rtf", 1)
    with pytest.raises(ValueError, match="an RTF file that could not be read within 1 s"):
        parser_process.parse("rtf", b"{\\rtf1 " + b"{\\b x}" * 3_000_000)
    assert "top secret" not in str(read)


RESPONSES = (
    ("200 OK", "text/html; charset=iso-8859-1", "<h1>K\xe4se</h1><p>frisch".encode("latin-1")),
    ("301 Moved", "text/html", b"<p>moved"),
    ("200 OK", "text/plain", b"plain words"),
    ("200 OK", "audio/ogg", b"OggS"),
    ("200 OK", "application/pdf", pdf("in a PDF")),
)


@pytest.mark.parametrize("name", ["crawl.warc", "crawl.warc.gz"])
def test_each_response_of_a_warc_is_a_document(name, tmp_path, config) -> None:
    (tmp_path / name).write_bytes(archive(*RESPONSES, compressed=name.endswith(".gz")))
    source = InputConfig(path=str(tmp_path / name))
    assert source.format == "warc"
    assert source.text_columns == ["text"]
    assert look(str(tmp_path / name)).texts == ["text"]
    made = config(str(tmp_path / name), unit_documents=2, **WARC)
    assert [unit.rows for unit in plan(made)] == [2, 2, 1]
    documents = read_all(made)
    assert [document.error or document.fields["text"] for document in documents] == [
        "Käse\nfrisch",
        documents[1].error,
        "plain words",
        documents[3].error,
        "in a PDF\n\f",
    ]
    assert str(documents[1].error).endswith("the server answered with HTTP status 301")
    assert str(documents[3].error).endswith("a response of type audio/ogg is not a document")
    first = documents[0]
    assert first.id == first.fields["url"] == "https://example.com/0"
    assert first.fields["status"] == 200
    offsets = [document.row for document in documents]
    assert offsets == sorted(set(offsets))


PAGE = "<p>größer".encode()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(PAGE, mtime=0)),
        ("x-gzip", gzip.compress(PAGE, mtime=0)),
        ("GZIP", gzip.compress(PAGE, mtime=0)),
        ("deflate", zlib.compress(PAGE)),
        ("zstd", zstandard.compress(PAGE)),
        ("identity", PAGE),
        # Crawlers unpack a body and keep the header.
        ("gzip", PAGE),
        ("br", PAGE),
        ("zstd", PAGE),
        ("gzip, br", PAGE),
    ],
)
def test_a_response_is_unpacked(encoding, body, tmp_path, config) -> None:
    (tmp_path / "a.warc").write_bytes(encoded_archive(encoding, body))
    (document,) = read_all(config(str(tmp_path / "a.warc"), **WARC))
    assert document.fields["text"] == "größer"


def test_what_cannot_be_unpacked_is_an_error_and_no_text(tmp_path, config) -> None:
    packed = bytes.fromhex("1b0d00f8a5402a5c6f1a05")
    (tmp_path / "a.warc").write_bytes(encoded_archive("br", packed + b"\xff" * 30))
    (document,) = read_all(config(str(tmp_path / "a.warc"), **WARC))
    assert str(document.error).endswith("has the Content-Encoding br, which is not read")


def test_a_warc_that_ends_within_a_record_is_an_error(tmp_path, config) -> None:
    body = b"<p>" + b"words " * 100
    (tmp_path / "a.warc").write_bytes(encoded_archive("identity", body)[:-200])
    (document,) = read_all(config(str(tmp_path / "a.warc"), **WARC))
    assert "the file ends within the record" in str(document.error)


def encoded_archive(encoding: str, body: bytes) -> bytes:
    data = io.BytesIO()
    headers = StatusAndHeaders(
        "200 OK",
        [("Content-Type", "text/html; charset=utf-8"), ("Content-Encoding", encoding)],
        protocol="HTTP/1.1",
    )
    writer = WARCWriter(data, gzip=False)
    record = writer.create_warc_record(
        "https://example.com/", "response", payload=io.BytesIO(body), http_headers=headers
    )
    writer.write_record(record)
    return data.getvalue()


def test_several_processes_may_read_the_units_of_one_warc(tmp_path, config) -> None:
    (tmp_path / "crawl.warc.gz").write_bytes(archive(*RESPONSES))
    lines = gzip.compress(b'{"id": "a", "text": "b"}\n' * 5)
    (tmp_path / "lines.jsonl.gz").write_bytes(lines)
    archived = plan(
        config(
            str(tmp_path / "crawl.warc.gz"),
            unit_documents=2,
            **WARC,
        )
    )
    compressed = plan(
        config(
            str(tmp_path / "lines.jsonl.gz"),
            unit_documents=2,
            **WARC,
        )
    )
    assert [stretch_of(unit) for unit in archived] == [None] * 3
    path = str(tmp_path / "lines.jsonl.gz")
    assert [stretch_of(unit) for unit in compressed] == [(path, 0)] * 3


def test_a_part_of_a_warc_is_cut_between_records(tmp_path, config) -> None:
    responses = [("200 OK", "text/plain", b"words %d" % n) for n in range(100)]
    (tmp_path / "a.warc.gz").write_bytes(archive(*responses))
    made = config(str(tmp_path / "a.warc.gz"), unit_documents=100, **WARC)
    (unit,) = plan(made)
    pieces = warc.Warc(lambda name: None).cut(unit.parts[0], made.input, 4)
    assert [piece.expected for piece in pieces] == [25] * 4
    read = [
        row.offset
        for piece in pieces
        for row in warc.Warc(lambda name: None).read(piece, made.input, [])
    ]
    assert read == [document.row for document in read_all(made)]


def test_damaged_and_endless_archives_are_unreadable(tmp_path, config, monkeypatch) -> None:
    monkeypatch.setattr(warc, "_MAX_HEADER_BYTES", 10_000)
    good = archive(("200 OK", "text/plain", b"words"))
    (tmp_path / "good.warc.gz").write_bytes(good)
    (tmp_path / "header.warc.gz").write_bytes(gzip.compress(b"WARC/1.0\r\nX: " + b"x" * 1_000_000))
    (tmp_path / "headers.warc.gz").write_bytes(
        gzip.compress(b"WARC/1.0\r\n" + b"X: y\r\n" * 100_000)
    )
    (tmp_path / "whole.warc.gz").write_bytes(
        gzip.compress(archive(*RESPONSES[:3], compressed=False))
    )
    (tmp_path / "words.warc").write_bytes(b"just words\n")
    made = plan(config(str(tmp_path), format="warc", **WARC))
    assert made.documents == 1
    reasons = {unit.name: str(unit.damaged) for unit in made.damaged()}
    assert reasons.keys() == {"header.warc.gz", "headers.warc.gz", "whole.warc.gz", "words.warc"}
    (tmp_path / "good.warc.gz").write_bytes(good[:-200])
    with pytest.raises(InputError):
        plan(config(str(tmp_path / "good.warc.gz"), **WARC))


def test_a_look_takes_what_most_of_a_folder_is(tmp_path) -> None:
    (tmp_path / "list.tsv").write_text("id\ttitle\n1\ta title of a product\n")
    assert look(str(tmp_path)).form is None
    (tmp_path / "report.pdf").write_bytes(pdf("page one"))
    assert look(str(tmp_path)).form == "files"
    (tmp_path / "table.csv").write_text("id,title\n" + "1,a title of a product\n" * 10_000)
    assert look(str(tmp_path)).form is None


def test_a_file_that_another_format_reads_is_left_out_with_this_hint(tmp_path, config) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "title": "a row"}\n')
    (tmp_path / "b.pdf").write_bytes(pdf("page one"))
    (left_out,) = plan(config(str(tmp_path))).left_out
    assert left_out.reason == "that input.format=files reads"
