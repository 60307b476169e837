"""RTF: the text, as word processors exchange it."""

import json

from raypd.config import InputConfig
from raypd.dataset.formats.documents import DocumentFormat
from raypd.dataset.parser_process import parse
from raypd.run import Part


class Rtf(DocumentFormat):
    """RTF."""

    media_types = ("application/rtf", "text/rtf")

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        return str(json.loads(parse("rtf", data)))
