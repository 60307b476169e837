"""PDF: the text of a file's pages."""

import json
import logging

from raypd.config import InputConfig
from raypd.dataset.formats.documents import DocumentFormat
from raypd.dataset.parser_process import parse
from raypd.run import Part
from raypd.text import counted

_log = logging.getLogger(__name__)


class Pdf(DocumentFormat):
    """PDF with text; scans need OCR first."""

    name = "pdf"
    endings = (".pdf",)

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        pages = json.loads(parse("pdf", data))
        page_count = counted(len(pages), "page")
        if not any(pages):
            raise ValueError(
                f"a PDF without text on its {page_count}, as scans are: it needs OCR first"
            )
        if not all(pages):
            empty_pages = pages.count("")
            _log.warning("%s: no text on %d of %s, as on scans", part.name, empty_pages, page_count)
        # Each page ends as pdftotext ends it; `span.page` counts these form feeds.
        return "".join(f"{page}\n\f" for page in pages)
