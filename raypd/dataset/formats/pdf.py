"""PDF: the text of a file's pages."""

import json
import logging

from raypd.config import InputConfig
from raypd.dataset.formats.base import Fields
from raypd.dataset.formats.documents import TEXT, DocumentFormat
from raypd.dataset.formats.recognition import PageTexts, check_page_count, recognized_page
from raypd.dataset.parser_process import parse
from raypd.run import Part
from raypd.text import counted

_log = logging.getLogger(__name__)


class Pdf(DocumentFormat):
    """PDF with text; pages without text are scans, which `input.ocr` recognizes."""

    media_types = ("application/pdf",)

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        return str(self.content(data, part, source)[TEXT])

    def content(self, data: bytes, part: Part, source: InputConfig) -> Fields:
        pages = json.loads(parse("pdf", data))
        page_count = counted(len(pages), "page")
        if source.ocr == "none":
            if not any(pages):
                raise ValueError(
                    f"a PDF without text on its {page_count} (probably a scan): set "
                    "input.ocr=auto to read it"
                )
            if not all(pages):
                _log.warning(
                    "%s: no text on %d of %s (probably scanned; input.ocr=auto reads them)",
                    part.name,
                    pages.count(""),
                    page_count,
                )
        else:
            check_page_count(pages.count(""))
        texts = PageTexts()
        for number, page in enumerate(pages):
            if page or source.ocr == "none":
                texts.add_text(page)
            else:
                rows, _ = recognized_page(data, number)
                texts.add_recognized(rows)
        if not texts.has_text:
            raise ValueError(f"a PDF without text on its {page_count}, and OCR finds none")
        return texts.fields()
