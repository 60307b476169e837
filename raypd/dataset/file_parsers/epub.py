"""EPUB: the visible text of a book's chapters."""

import io
import posixpath
import zipfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import lxml.etree

from raypd.dataset.file_parsers.archive import check_unpacked
from raypd.dataset.file_parsers.html import visible_text

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_NO_BOOK = "not a readable EPUB"
_CHAPTER_TYPES = ("application/xhtml+xml", "text/html")


def book_text(data: bytes, limit: int) -> str:
    """Return the visible text of the chapters in reading order.

    Args:
        data: The file.
        limit: Bytes that the file may have when unpacked.

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    check_unpacked(data, limit, "an EPUB", _NO_BOOK)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            encrypted = _encrypted_names(archive)
            texts = []
            for name in _chapter_names(archive):
                if name in encrypted:
                    raise ValueError(f"its chapters are encrypted (DRM), the first: {name}")
                chapter = visible_text(_decoded(archive.read(name)))
                if chapter:
                    texts.append(chapter)
    except MemoryError:
        raise
    except Exception as error:  # from zipfile and lxml, or a KeyError for a missing part
        raise ValueError(f"{_NO_BOOK}: {error or type(error).__name__}") from None
    return "\n".join(texts)


def _chapter_names(archive: zipfile.ZipFile) -> Iterator[str]:
    """Yield the names of the chapters' parts in the order of the book's spine."""
    container = _parsed(archive.read(_CONTAINER))
    package_name = next(container.iter("{*}rootfile")).get("full-path")
    package = _parsed(archive.read(package_name))
    items = {item.get("id"): item for item in package.iter("{*}item")}
    for reference in package.iter("{*}itemref"):
        item = items.get(reference.get("idref"))
        if item is not None and item.get("media-type") in _CHAPTER_TYPES:
            path = unquote(item.get("href").partition("#")[0])
            yield posixpath.normpath(posixpath.join(posixpath.dirname(package_name), path))


def _encrypted_names(archive: zipfile.ZipFile) -> set[str]:
    """Return the names of the encrypted parts; a book that is not encrypted may have such fonts."""
    if _ENCRYPTION not in archive.namelist():
        return set()
    references = _parsed(archive.read(_ENCRYPTION)).iter("{*}CipherReference")
    return {unquote(reference.get("URI", "")) for reference in references}


def _parsed(data: bytes) -> Any:
    return lxml.etree.fromstring(data, lxml.etree.XMLParser(resolve_entities=False))


def _decoded(data: bytes) -> str:
    """Return a chapter as HTML; a chapter that is not XHTML is returned unchanged."""
    try:
        # The HTML parser treats a self-closing element, such as <title/>, as an open one.
        return str(lxml.etree.tostring(_parsed(data), method="html", encoding="unicode"))
    except lxml.etree.LxmlError:
        pass
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    return data.decode("utf-8-sig", "replace")
