"""Scans: pages of PDF without text and pictures, whose text is recognized with its boxes."""

import io

import pyarrow as pa
import pypdf
import pytest
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from pypdf import generic

from raypd.dataset.file_parsers.pdf import pdf_pages
from raypd.dataset.formats import recognition
from raypd.dataset.planner import plan
from raypd.errors import InputError
from raypd.tasks import Record
from raypd.tasks.columns import columns_of, record_row, rows_of, value_row
from raypd.tasks.values import span_of
from tests.dataset.test_text_files import pdf
from tests.dataset.test_world_files import mail
from tests.runs import read_all, with_keys

FILES = {
    "format": "files",
    "text_columns": ["text"],
    "category_column": None,
    "category": "c",
}
SCANS = {**FILES, "ocr": "auto"}
INVOICE = "Rechnung 4711 für Größe und Söhne"
ROWS = (("Artikel", "Preis"), ("Stühle", "1.299,50"), ("Lampe", "79,00"))


def page(angle: float = 0.0, title: str = INVOICE) -> Image.Image:
    """A line and a table of two columns as a scanner sees them."""
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), 26)
    picture = Image.new("RGB", (800, 400), "white")
    draw = ImageDraw.Draw(picture)
    draw.text(
        (60, 80),
        title,
        fill="black",
        font=font,
    )
    for number, row in enumerate(ROWS):
        for text, left in zip(row, (60, 480), strict=True):
            draw.text(
                (left, 160 + 60 * number),
                text,
                fill="black",
                font=font,
            )
    return picture.rotate(angle, expand=False, fillcolor="white")


def saved(picture: Image.Image, kind: str, **options: object) -> bytes:
    data = io.BytesIO()
    picture.save(data, kind, **options)
    return data.getvalue()


def text_by_id(config, folder, **keys) -> dict[str, str]:
    documents = read_all(config(str(folder), **SCANS | keys))
    return {document.id: document.error or document.fields["text"] for document in documents}


EXPECTED = f"{INVOICE}\nArtikel Preis\nStühle 1.299,50\nLampe 79,00\n\f"


def test_scans_and_pictures_are_recognized_row_by_row(tmp_path, config) -> None:
    (tmp_path / "tilted.png").write_bytes(saved(page(angle=3), "PNG"))
    (tmp_path / "two.tiff").write_bytes(
        saved(
            page(),
            "TIFF",
            save_all=True,
            append_images=[page()],
        )
    )
    mixed = pypdf.PdfWriter()
    mixed.append(io.BytesIO(pdf("with text")))
    mixed.append(io.BytesIO(saved(page(), "PDF")))
    data = io.BytesIO()
    mixed.write(data)
    (tmp_path / "mixed.pdf").write_bytes(data.getvalue())
    (tmp_path / "blank.png").write_bytes(saved(Image.new("RGB", (300, 300), "white"), "PNG"))
    (tmp_path / "cut.jpg").write_bytes(saved(page(), "JPEG")[:200])
    read = text_by_id(config, tmp_path)
    assert read == {
        "blank.png": "blank.png: no text was recognized in the picture",
        "cut.jpg": read["cut.jpg"],
        "mixed.pdf": f"with text\n\f{EXPECTED}",
        "tilted.png": EXPECTED,
        "two.tiff": EXPECTED + EXPECTED,
    }
    assert read["cut.jpg"].startswith("cut.jpg: a page cannot be drawn: ")


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_page_that_stands_upside_down_or_sideways_is_turned(degrees, tmp_path, config) -> None:
    turned = page().rotate(degrees, expand=True)
    (tmp_path / "a.png").write_bytes(saved(turned, "PNG"))
    (document,) = read_all(config(str(tmp_path), **SCANS))
    text = document.fields["text"]
    assert text == EXPECTED
    box = span_of("1.299,50", text, 0, text, document.boxes)["span"]["box"]
    upright = [480 / 800, 225 / 400, 600 / 800, 255 / 400]
    left, top, right, bottom = upright
    expected = {
        90: [top, 1 - right, bottom, 1 - left],
        180: [1 - right, 1 - bottom, 1 - left, 1 - top],
        270: [1 - bottom, left, 1 - top, right],
    }
    assert box == pytest.approx(expected[degrees], abs=0.04)


def test_a_value_has_its_page_and_its_box(tmp_path, config) -> None:
    (tmp_path / "a.tiff").write_bytes(
        saved(
            page(),
            "TIFF",
            save_all=True,
            append_images=[page()],
        )
    )
    (document,) = read_all(config(str(tmp_path), **SCANS))
    text = document.fields["text"]
    first = span_of("1.299,50", text, 0, text, document.boxes)["span"]
    assert text[first["begin"] : first["end"]] == "1.299,50"
    assert first["page"] == 1
    left, top, right, bottom = first["box"]
    assert left == pytest.approx(480 / 800, abs=0.02)
    assert top == pytest.approx(225 / 400, abs=0.03)
    assert right == pytest.approx(600 / 800, abs=0.03)
    assert bottom == pytest.approx(255 / 400, abs=0.03)
    second_page = text.index("\f") + 1
    second = span_of("Lampe", text[second_page:], second_page, text, document.boxes)["span"]
    assert second["page"] == 2
    assert second["box"][1] == pytest.approx(285 / 400, abs=0.03)


def test_without_ocr_pictures_are_left_out_and_messages_name_the_key(tmp_path, config) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.png").write_bytes(saved(page(), "PNG"))
    (tmp_path / "c.eml").write_bytes(mail(("scan.png", saved(page(), "PNG"))))
    made = config(str(tmp_path), attachments="documents", **FILES)
    (left_out,) = plan(made).left_out
    assert left_out.reason == "that input.ocr=auto reads"
    assert left_out.examples == ["b.png"]
    assert [document.id for document in read_all(made)] == ["a.txt", "c.eml"]
    with pytest.raises(InputError, match=r"b.png: a picture, which input.ocr=auto reads"):
        plan(config(str(tmp_path / "*.png"), **FILES))
    read = text_by_id(config, tmp_path, attachments="documents")
    assert read["c.eml/scan.png"] == EXPECTED


def test_a_missing_package_is_named_before_the_run(tmp_path, config, monkeypatch) -> None:
    (tmp_path / "b.png").write_bytes(b"")
    monkeypatch.setattr(recognition, "_PACKAGES", ("no_such_package",))
    with pytest.raises(InputError, match=r"needs the package no_such_package: pip install 'raypd"):
        plan(config(str(tmp_path), **SCANS))


def test_a_picture_with_too_many_pixels_is_an_error(tmp_path, config) -> None:
    large = Image.new("1", (20_000, 20_000), 1)
    (tmp_path / "a.png").write_bytes(saved(large, "PNG"))
    error = text_by_id(config, tmp_path)["a.png"]
    assert "a page cannot be drawn" in error
    assert "exceeds limit" in error


def table_by_columns(*columns: tuple[str, ...], step: int) -> bytes:
    """A page of PDF whose content is written column by column."""
    writer = pypdf.PdfWriter()
    blank = writer.add_blank_page(595, 842)
    name = generic.NameObject
    font = generic.DictionaryObject(
        {
            name("/Type"): name("/Font"),
            name("/Subtype"): name("/Type1"),
            name("/BaseFont"): name("/Helvetica"),
        }
    )
    fonts = generic.DictionaryObject({name("/F1"): font})
    blank[name("/Resources")] = generic.DictionaryObject({name("/Font"): fonts})
    operations = []
    for number, column in enumerate(columns):
        for row, text in enumerate(column):
            place = f"{50 + step * number} {700 - 20 * row}"
            operations.append(f"BT /F1 10 Tf 1 0 0 1 {place} Tm ({text}) Tj ET")
    stream = generic.DecodedStreamObject()
    stream.set_data("\n".join(operations).encode())
    blank[name("/Contents")] = writer._add_object(stream)
    data = io.BytesIO()
    writer.write(data)
    return data.getvalue()


def test_a_table_that_is_stored_by_columns_is_read_by_rows() -> None:
    table = table_by_columns(
        ("Item", "Table", "Lamp"), ("Qty", "2", "1"), ("Price", "1299.00", "79.00"), step=120
    )
    assert pdf_pages(table) == ["Item Qty Price\nTable 2 1299.00\nLamp 1 79.00"]


def test_columns_of_prose_are_read_one_after_the_other() -> None:
    left = tuple(f"left column, sentence number {number} of it" for number in range(4))
    right = tuple(f"right column, sentence number {number} of it" for number in range(4))
    assert pdf_pages(table_by_columns(left, right, step=280)) == ["\n".join(left + right)]


@pytest.mark.parametrize("columns", ["record", "typed"])
def test_the_table_of_a_run_has_boxes_where_ocr_is_on(columns, tmp_path, config) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(saved(page(), "PNG"))
    made = with_keys(config(str(tmp_path / "in"), **SCANS), output={"columns": columns})
    (document,) = read_all(made)
    text = document.fields["text"]
    value = {
        **value_row("a", "Lampe", "ok", 0.9),
        **span_of("Lampe", text, 0, text, document.boxes),
        "window": None,
    }
    content = {
        "category": "c",
        "record": {"a": "Lampe"},
        "values": [value],
        "truncated": False,
    }
    (record,) = rows_of([Record(0, content)], made)
    table = pa.Table.from_pylist([record.columns], columns_of(made))
    (read,) = record_row(table.to_pylist()[0])["values"]
    assert read["span"] == {**value["span"], "box": pytest.approx(value["span"]["box"])}
    without = columns_of(config(str(tmp_path / "in"), **FILES))
    assert "box" not in str(without)


def test_a_document_with_too_many_pages_to_recognize_is_an_error(
    tmp_path, config, monkeypatch
) -> None:
    monkeypatch.setattr(recognition, "MOST_PAGES", 1)
    (tmp_path / "a.pdf").write_bytes(pdf("", "", "text"))
    (tmp_path / "b.tiff").write_bytes(
        saved(
            page(),
            "TIFF",
            save_all=True,
            append_images=[page()],
        )
    )
    read = text_by_id(config, tmp_path)
    for name, text in read.items():
        assert text.startswith(f"{name}: 2 pages to recognize, more than 1: split the file")
