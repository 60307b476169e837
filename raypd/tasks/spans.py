"""Where in a document's text a value stands."""

import re
from collections.abc import Sequence
from typing import Any

from raypd.config import Attribute
from raypd.tasks.base import Document


def find_span(text: str, value: str) -> tuple[int, int, bool] | None:
    """(begin, end, exact) of a value's first place, whole words first; not exact: in another case or white space."""
    if not value.strip():
        return None
    if (begin := _place(text, value)) is not None:
        return begin, begin + len(value), True
    body = r"\s+".join(map(re.escape, value.split()))
    for pattern in (rf"(?<!\w){body}(?!\w)", body):
        if match := re.search(pattern, text, re.IGNORECASE):
            return match.start(), match.end(), False
    return None


def _place(text: str, value: str) -> int | None:
    """Where a value is written; most are, and a pattern of each would take longer than the rest of a record."""
    first = begin = text.find(value)
    while begin >= 0:
        end = begin + len(value)
        if not (_is_word(text[begin - 1 : begin]) or _is_word(text[end : end + 1])):
            return begin
        begin = text.find(value, begin + 1)
    return first if first >= 0 else None


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def span_of(attribute: Attribute, value: Any, text: str, shift: int) -> dict[str, Any]:
    """`span` and `span_exact` of a value, where it is a text that stands in the document's."""
    span = find_span(text, value) if isinstance(value, str) and not attribute.many else None
    if span is None:
        return {"span": None, "span_exact": None}
    begin, end, exact = span
    return {"span": {"begin": begin + shift, "end": end + shift}, "span_exact": exact}


def span_shift(document: Document, columns: Sequence[str]) -> int:
    """Characters of white space before the document's text in its one column; of several, their text is raypd's."""
    text = str(document.fields.get(columns[0])) if len(columns) == 1 else ""
    return len(text) - len(text.lstrip())
