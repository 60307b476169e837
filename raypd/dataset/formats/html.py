"""HTML: the visible text of a page, or of a column that contains HTML."""

import codecs
import json
import re

import raypd.dataset.encodings as encodings
import raypd.dataset.file_parsers.html as file_parser
from raypd.config import InputConfig
from raypd.dataset.formats.documents import (
    MARKUP,
    DocumentFormat,
    decode,
    detected_encoding,
    unknown_charset,
)
from raypd.dataset.jsonl import BOM
from raypd.dataset.parser_process import parse
from raypd.run import Part

# HTML up to this size (bytes) cannot take long to parse, so it needs no separate process.
_SHORT_HTML = 32 << 10
_HEAD_BYTES = 4096  # in which a page names its charset
_CHARSET = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
# Browsers read these charsets, here by Python's names, as cp1252.
_READ_AS_CP1252 = ("ascii", "iso8859-1", "cp1252")


class Html(DocumentFormat):
    """HTML pages."""

    media_types = ("text/html", "application/xhtml+xml")

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        encoding = source.encoding
        charset = _declared_charset(data)
        if encoding == encodings.AUTO:
            encoding = "utf-8" if charset is not None else detected_encoding(data)
        errors = "strict"
        if encoding == "utf-8" and charset is not None and not data.startswith(BOM):
            encoding = charset
            if _codec_name(charset) in _READ_AS_CP1252:
                encoding = "cp1252"
                errors = "replace"
        return visible_text(decode(data, encoding, errors))


def html_limit(source: InputConfig) -> int:
    """Return the size in bytes above which the HTML in a column is not read."""
    return source.max_document_bytes * MARKUP


def visible_text(text: str) -> str:
    """Return the visible text of an HTML page or fragment.

    Raises:
        ValueError: The HTML cannot be read; the text says why.
    """
    data = text.encode()
    if len(data) <= _SHORT_HTML:
        return file_parser.visible_text(text)
    return str(json.loads(parse("html", data)))


def _declared_charset(data: bytes) -> str | None:
    """Return the charset that a page names in its head."""
    match = _CHARSET.search(_COMMENT.sub(b"", data[:_HEAD_BYTES]))
    if match is None:
        return None
    return match[1].decode()


def _codec_name(charset: str) -> str:
    try:
        return codecs.lookup(charset).name
    except LookupError:
        raise unknown_charset(charset) from None
