"""Books in EPUB: the visible text of the chapters."""

import json

from raypd.config import InputConfig
from raypd.dataset.formats.documents import DocumentFormat
from raypd.dataset.parser_process import parse
from raypd.run import Part


class Epub(DocumentFormat):
    """EPUB."""

    media_types = ("application/epub+zip",)

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        return str(json.loads(parse("epub", data, self.unpacked_limit(source))))
