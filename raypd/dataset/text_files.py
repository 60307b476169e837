"""Files that are a document each: plain text and Markdown, HTML (its visible text), PDF (its pages'
text), Word.
"""

import codecs
import io
import logging
import re
import zipfile
from collections.abc import Iterable
from typing import Any

import lxml.etree
import lxml.html

from raypd.config import InputConfig
from raypd.dataset.jsonl import BOM
from raypd.errors import raised_as
from raypd.run.text import counted
from raypd.run.unit import Part
from raypd.tasks.sandbox import time_limit

COLUMNS = ("id", "text")  # of the row that such a file is
# Elements of HTML whose text nobody sees.
_UNSEEN = ("title", "script", "style", "noscript", "template", "svg")
_LINES = re.findall(  # elements that begin a line
    r"\w+",
    "address article aside blockquote br dd div dl dt fieldset figcaption figure footer "
    "form h1 h2 h3 h4 h5 h6 header "
    "hr li main nav ol option p pre section table title tr ul",
)
_PDF_SECONDS = 60
# Bytes of a file for each that its text may have: tags, and the pictures and fonts of a PDF.
_MARKUP = 16
_CHARSET = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
# Charsets that browsers take for it, by Python's names.
_AS_CP1252 = ("ascii", "iso8859-1", "cp1252")
# Of Word; a fallback says all twice.
_RUNS = ".//w:r[not(ancestor::w:del or ancestor::*[local-name()='Fallback'])]"
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
    if part.format in ("pdf", "docx"):
        return _pdf(data, part.name) if part.format == "pdf" else _docx(data, limit * _MARKUP)
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
    """Of a page of HTML, or a piece of one. Raises ValueError."""
    text = re.sub(r"(?i)</(?:body|html)\s*>", "", text)  # libxml2 drops what stands behind
    parser = lxml.html.HTMLParser(
        remove_comments=True, remove_pis=True, huge_tree=True, encoding="utf-8"
    )
    with raised_as(ValueError, "HTML that cannot be read", lxml.etree.LxmlError):
        page = lxml.etree.fromstring(text.encode(), parser)
    if any(entry.type_name == "ERR_RESOURCE_LIMIT" for entry in parser.error_log):
        raise ValueError(
            "HTML that cannot be read whole: its elements are nested more than 2048 deep"
        )
    pieces = []  # the tree stays as it is: lxml lets no control character be written into it
    walk: Any = () if page is None else lxml.etree.iterwalk(page, ("start", "end"))
    for event, element in walk:
        pieces.append("\n" if element.tag in _LINES else "")
        if event == "end":
            pieces += [" " if element.tag in ("td", "th") else "", element.tail or ""]
        elif element.tag in _UNSEEN:
            walk.skip_subtree()
        else:
            pieces.append(element.text or "")
    return _in_lines("".join(pieces).splitlines())


def _in_lines(texts: Iterable[str]) -> str:
    return "\n".join(filter(None, (" ".join(text.split()) for text in texts)))


def _docx(data: bytes, limit: int) -> str:
    """Paragraphs and rows of tables, a line each, as if all changes were accepted. limit: of its
    bytes, unpacked.
    """
    import docx  # here, as most runs need none of it

    try:
        if sum(file.file_size for file in zipfile.ZipFile(io.BytesIO(data)).infolist()) > limit:
            raise ValueError(f"unpacked it has more than {limit} bytes")
        runs = docx.Document(io.BytesIO(data)).element.body.xpath(_RUNS)
    except Exception as error:  # of zipfile, lxml or python-docx
        raise ValueError(
            f"no Word file (or one with a password): {error or type(error).__name__}"
        ) from None
    lines: dict[Any, dict[Any, str]] = {}  # row or paragraph -> paragraph -> text
    for run in runs:
        paragraph, *_ = run.xpath("ancestor::w:p[1]")
        line = lines.setdefault(next(iter(run.xpath("ancestor::w:tr[1]")), paragraph), {})
        line[paragraph] = line.get(paragraph, "") + run.text
    return _in_lines(" ".join(line.values()) for line in lines.values())


def _pdf(data: bytes, name: str) -> str:
    import pypdf  # here, as most runs need none of it

    try:
        with time_limit(_PDF_SECONDS):
            pdf = pypdf.PdfReader(io.BytesIO(data))
            if pdf.is_encrypted and not pdf.decrypt(""):
                raise ValueError("it has a password")
            pages = [re.sub("[\0\f]", " ", page.extract_text()).strip() for page in pdf.pages]
    except TimeoutError:
        raise ValueError(f"a PDF that is not read within {_PDF_SECONDS} s") from None
    # Pypdf's own for some faults of a file, and any of Python's for others.
    except Exception as error:
        raise ValueError(f"a PDF that cannot be read: {error or type(error).__name__}") from None
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
