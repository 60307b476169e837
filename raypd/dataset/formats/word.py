"""Word files: paragraphs and rows of tables."""

import json

from raypd.config import InputConfig
from raypd.dataset.formats.documents import DocumentFormat
from raypd.dataset.parser_process import parse
from raypd.run import Part


class Word(DocumentFormat):
    """Word files (.docx)."""

    name = "docx"
    endings = (".docx",)

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        # A zipped file may unpack as far again as it may be larger than its text.
        unpacked_limit = source.max_document_bytes * self.markup * self.markup
        return str(json.loads(parse("docx", data, unpacked_limit)))
