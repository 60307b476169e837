"""Word files: paragraphs and rows of tables."""

import io
from collections.abc import Iterator
from typing import Any

import lxml.etree

from raypd.dataset.file_parsers.archive import check_unpacked
from raypd.dataset.file_parsers.html import in_lines

_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_RUN_CHILDREN = {_WORD + name for name in ("br", "cr", "noBreakHyphen", "ptab", "t", "tab")}


def word_text(data: bytes, limit: int) -> str:
    """Return paragraphs and rows of tables, one per line, with all tracked changes accepted.

    Args:
        data: The file.
        limit: Bytes that the file may have when unpacked.

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    import docx  # imported here because most runs do not need it

    check_unpacked(data, limit, "a Word file", "not a Word file, or one with a password")
    try:
        body = docx.Document(io.BytesIO(data)).element.body
    except MemoryError:
        raise
    except Exception as error:  # from zipfile, lxml or python-docx
        raise ValueError(
            f"not a Word file, or one with a password: {error or type(error).__name__}"
        ) from None
    return in_lines(_word_lines(body))


def _word_lines(body: Any) -> Iterator[str]:
    # A row of a table or a paragraph outside of one -> paragraph -> its text.
    lines: dict[Any, dict[Any, str]] = {}
    paragraphs: list[Any] = []  # that are open
    rows: list[Any] = []  # that are open
    walk: Any = lxml.etree.iterwalk(body, ("start", "end"))
    for event, element in walk:
        tag = element.tag
        if event == "end":
            if tag == _WORD + "p":
                paragraphs.pop()
            elif tag == _WORD + "tr":
                rows.pop()
        elif tag == _WORD + "p":
            paragraphs.append(element)
        elif tag == _WORD + "tr":
            rows.append(element)
        elif tag == _WORD + "del" or str(tag).endswith("}Fallback") or tag == "Fallback":
            # Deleted text is skipped, and so are fallbacks, which repeat the same content.
            walk.skip_subtree()
        elif tag == _WORD + "r" and paragraphs:
            paragraph = paragraphs[-1]
            line = lines.setdefault(rows[-1] if rows else paragraph, {})
            text = "".join(str(child) for child in element if child.tag in _RUN_CHILDREN)
            line[paragraph] = line.get(paragraph, "") + text
    return (" ".join(line.values()) for line in lines.values())
