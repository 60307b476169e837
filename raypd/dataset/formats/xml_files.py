"""XML: an outline of the elements and their text."""

import json

from raypd.config import InputConfig
from raypd.dataset.formats.documents import DocumentFormat
from raypd.dataset.parser_process import parse
from raypd.run import Part


class Xml(DocumentFormat):
    """XML, such as electronic invoices."""

    media_types = ("application/xml", "text/xml", "application/rss+xml", "application/atom+xml")

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        return str(json.loads(parse("xml", data)))
