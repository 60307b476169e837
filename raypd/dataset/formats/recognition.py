"""The texts of the pages of a document, with the boxes of texts that were recognized (OCR)."""

import importlib.util
import json
from typing import Any

from raypd.config import InputConfig
from raypd.dataset.formats.base import Fields
from raypd.dataset.formats.documents import BOXES, TEXT
from raypd.dataset.parser_process import parse
from raypd.errors import InputError
from raypd.tasks import TextBox

# The most pages of one document that are recognized; at several seconds each, more would take
# hours.
MOST_PAGES = 500
_PACKAGES = ("rapidocr", "onnxruntime", "pypdfium2")


def check_installed(source: InputConfig) -> None:
    """Check that the packages that the configuration needs are installed.

    Raises:
        InputError: One is missing.
    """
    if source.ocr == "none":
        return
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"input.ocr={source.ocr} needs the package {package}: pip install 'raypd[ocr]'"
            )


def recognized_page(data: bytes, number: int) -> tuple[list[list[Any]], int]:
    """Return the rows of a page, as `file_parsers.ocr` describes them, and the file's page count.

    Args:
        data: A PDF or a picture.
        number: The page, from 0.

    Raises:
        ValueError: The page cannot be read; the text says why.
    """
    page = json.loads(parse("ocr", data, page=number))
    return page["rows"], page["pages"]


def check_page_count(pages: int) -> None:
    """Refuse a document with more pages to recognize than MOST_PAGES.

    Raises:
        ValueError: It has more.
    """
    if pages > MOST_PAGES:
        raise ValueError(
            f"{pages} pages to recognize, more than {MOST_PAGES}: split the file, or run OCR on it "
            "first"
        )


class PageTexts:
    """The text of a document that grows page by page."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0
        self._page = 1
        self._boxes: list[TextBox] = []

    @property
    def has_text(self) -> bool:
        """Whether any page has text."""
        return any(piece.strip() for piece in self._pieces)

    def add_text(self, text: str) -> None:
        """Add a page whose text is known."""
        self._add(text)
        self._end_page()

    def add_recognized(self, rows: list[list[Any]]) -> None:
        """Add a page that was recognized: a line for each row."""
        for row_number, row in enumerate(rows):
            if row_number:
                self._add("\n")
            for line_number, line in enumerate(row):
                if line_number:
                    self._add(" ")
                begin = self._length
                self._add(" ".join(line["text"].split()))
                self._boxes.append(TextBox(begin, self._length, self._page, *line["box"]))
        self._end_page()

    def fields(self) -> Fields:
        """Return the text and its boxes as fields of a row."""
        return {TEXT: "".join(self._pieces), BOXES: self._boxes}

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        self._length += len(text)

    def _end_page(self) -> None:
        # Each page ends as pdftotext ends it; `span.page` counts these form feeds.
        self._add("\n\f")
        self._page += 1
