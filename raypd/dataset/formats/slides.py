"""Presentations of PowerPoint: the text of the slides and their notes."""

import json

from raypd.config import InputConfig
from raypd.dataset.formats.documents import DocumentFormat, in_pages
from raypd.dataset.parser_process import parse
from raypd.run import Part


class Slides(DocumentFormat):
    """Presentations (.pptx); a slide is a page."""

    media_types = ("application/vnd.openxmlformats-officedocument.presentationml.presentation",)

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        return in_pages(json.loads(parse("pptx", data, self.unpacked_limit(source))))
