"""Word files: paragraphs and rows of tables."""

import json

from raypd.config import InputConfig
from raypd.dataset.formats.documents import DocumentFormat
from raypd.dataset.parser_process import parse
from raypd.run import Part


class Word(DocumentFormat):
    """Word files (.docx)."""

    media_types = ("application/vnd.openxmlformats-officedocument.wordprocessingml.document",)

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        return str(json.loads(parse("docx", data, self.unpacked_limit(source))))
