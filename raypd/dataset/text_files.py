"""Files that are a document each: plain text and Markdown, HTML (its visible text), PDF (its pages'
text), Word.
"""

import codecs
import json
import logging
import re

from raypd.config import InputConfig
from raypd.dataset import file_parsers
from raypd.dataset.jsonl import BOM
from raypd.dataset.parser_process import parse
from raypd.run.unit import Part
from raypd.text import counted

COLUMNS = ("id", "text")  # of the row that such a file is
# Bytes of HTML that cannot take long to read, whatever they are: read without another process.
_SHORT_HTML = 32 << 10
# Bytes of a file for each that its text may have: tags, and the pictures and fonts of a PDF.
_MARKUP = 16
_CHARSET = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
# Charsets that browsers take for it, by Python's names.
_AS_CP1252 = ("ascii", "iso8859-1", "cp1252")
_log = logging.getLogger(__name__)


def byte_limit(format: str, source: InputConfig) -> int:
    """Bytes of a file, or of a column of HTML, beyond which it is not read."""
    return source.max_document_bytes * (1 if format == "text" else _MARKUP)


def declares_charset(data: bytes) -> bool:
    """Return whether a page of HTML names its own charset."""
    return _CHARSET.search(_COMMENT.sub(b"", data[:4096])) is not None


def text_of_file(data: bytes, part: Part, source: InputConfig) -> str:
    """The text of a whole file. Raises ValueError with what is wrong with it."""
    limit = byte_limit(part.format, source)
    if len(data) > limit:
        advice = f"input.max_document_bytes is {source.max_document_bytes}"
        raise ValueError(f"the file has more than {limit} bytes; {advice}")
    if part.format == "pdf":
        return _pdf(data, part.name)
    if part.format == "docx":
        return str(json.loads(parse("docx", data, limit * _MARKUP)))
    encoding, errors = source.encoding, "strict"
    head = b"" if data.startswith(BOM) else _COMMENT.sub(b"", data[:4096])
    try:
        if part.format == "html" and encoding == "utf-8" and (charset := _CHARSET.search(head)):
            encoding = charset[1].decode()
            if codecs.lookup(encoding).name in _AS_CP1252:
                encoding, errors = "cp1252", "replace"
        text = data.decode("utf-8-sig" if encoding.lower() == "utf-8" else encoding, errors)
    except UnicodeDecodeError as error:
        place = f"byte {error.start}; input.encoding can be another, such as cp1252"
        raise ValueError(f"not {encoding.upper()}: {error.reason} at {place}") from None
    except LookupError:
        raise ValueError(
            f"its charset {encoding!r} is none that Python knows; input.encoding says another"
        ) from None
    return visible_text(text) if part.format == "html" else text


def visible_text(text: str) -> str:
    """Return the visible text of a page of HTML, or of a piece of one.

    Raises:
        ValueError: The HTML cannot be read; the text says why.
    """
    data = text.encode()
    if len(data) <= _SHORT_HTML:
        return file_parsers.visible_text(text)
    return str(json.loads(parse("html", data)))


def _pdf(data: bytes, name: str) -> str:
    pages = json.loads(parse("pdf", data))
    if not any(pages):
        raise ValueError(
            f"a PDF without text on its {counted(len(pages), 'page')}, as scans are: it needs "
            "OCR first"
        )
    if not all(pages):
        _log.warning(
            "%s: no text on %d of %s, as on scans",
            name,
            pages.count(""),
            counted(len(pages), "page"),
        )
    # As pdftotext ends a page; `span.page` counts them.
    return "".join(f"{page}\n\f" for page in pages)
