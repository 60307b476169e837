"""Turns decoded text into checked values, and finds the values in a document's text."""

import json
import re
from collections.abc import Sequence
from typing import Any

from raypd.schema import (
    BARE_VALUE,
    DASHES,
    STRING_BODY,
    Attribute,
    CheckedValue,
    Status,
    bare,
    dumps,
    find_number,
    string_end,
    structure_end,
)
from raypd.tasks.base import Document, TextBox

__all__ = [
    "CheckedValue",
    "JsonObjectEnd",
    "Rated",
    "Status",
    "box_of",
    "check",
    "find_span",
    "find_value",
    "is_number",
    "span_of",
    "span_source",
]

_QUOTED = re.compile(rf'"{STRING_BODY.pattern}"?', re.DOTALL)
# The characters that may separate the words of a key: a model may write Model name as model_name.
_BETWEEN_WORDS = r"[ _./-]"

# A value and its confidence.
Rated = tuple[CheckedValue, float | None]


def check(attribute: Attribute, text: str, closed: bool = True, bare: bool = False) -> CheckedValue:
    """Read the text that was decoded for an attribute, and check the value.

    Args:
        attribute: The attribute.
        text: The decoded text.
        closed: Whether the value is complete; otherwise it was cut.
        bare: Whether a text has no quotes and ends at a newline.
    """
    return attribute.value_type.check(text, closed, bare)


def _depth(text: str) -> int:
    """Return how many objects and lists are open at the end of a piece of JSON."""
    marks = _QUOTED.sub("", text)
    opened = marks.count("[") + marks.count("{")
    closed = marks.count("]") + marks.count("}")
    return opened - closed


def find_value(text: str, name: str) -> tuple[int, int, bool] | None:
    """Find the value of a key in an autoregressive answer.

    Args:
        text: The answer; it may begin inside its object.
        name: The key, which may differ in case and punctuation.

    Returns:
        The value's start and end offsets and whether it is complete; None if there is no such key.
    """
    start = _value_offset(text, name)
    if start is None:
        return None
    mark = text[start : start + 1]
    if mark == "[":
        list_end = structure_end(text, start)
        if list_end is None:
            return start, len(text), False
        return start, list_end, True
    if mark == '"':
        length = string_end(text[start:])
        if length is None:
            return start, len(text), False
        return start, start + length + 1, True
    end = start + len(BARE_VALUE.match(text[start:]).group())  # type: ignore[union-attr]
    return start, end, end < len(text)


def _value_offset(text: str, name: str) -> int | None:
    """Return where the value of a key of the outermost object begins."""
    # Servers in Python often escape the key as ASCII, "gr\\u00f6\\u00dfe" for "größe".
    spellings = dict.fromkeys([dumps(name), json.dumps(name)])
    exact = "|".join(map(re.escape, spellings))
    words = map(re.escape, re.split(f"{_BETWEEN_WORDS}+", name))
    alike = f"{_BETWEEN_WORDS}*".join(words)
    keys = [
        *re.finditer(rf"(?:{exact})\s*:\s*", text),
        *re.finditer(rf'"{alike}"\s*:\s*', text, re.IGNORECASE),
    ]
    top = _depth(text.partition('"')[0])
    for key in keys:
        if _depth(text[: key.start()]) == top:
            return key.end()
    return None


class JsonObjectEnd:
    """Detects that an answer that begins inside a JSON object is complete.

    Call it after each token with all tokens so far. The answer is complete at its closing brace, at
    an end token, when every name has its value, and when a key occurs for the second time (the
    first one counts; a small model may repeat itself endlessly).
    """

    def __init__(
        self, texts: Sequence[str], end_tokens: frozenset[int], names: Sequence[str]
    ) -> None:
        self._texts = texts
        self._end_tokens = end_tokens
        self._names = set(map(bare, names))
        self._keys: set[str] = set()
        self._tokens_read = 0
        self._depth = 1
        self._in_string = False
        self._is_escaped = False
        self._after_colon = False
        self._is_over = False
        self._string = ""
        # The last character, or "1," for a comma after a digit.
        self._last = ""

    def __call__(self, tokens: Sequence[int]) -> bool:
        for token in tokens[self._tokens_read :]:
            if token in self._end_tokens:
                return True
            for char in self._texts[token]:
                self._next(char)
        self._tokens_read = len(tokens)
        return self._is_over

    def _next(self, char: str) -> None:
        last = self._last
        self._last = char
        if last == "1," and not char.isdecimal() and not _is_dash(char):
            self._end_value()
        if self._in_string:
            self._next_in_string(char)
        elif char == '"':
            self._in_string = True
            self._string = ""
        elif char == ":" and self._depth == 1 and not self._after_colon:
            key = bare(self._string)
            self._is_over |= key in self._keys
            self._keys.add(key)
            self._after_colon = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._is_over |= self._depth <= 0
        elif char == "," and last.isdecimal():
            # The next character tells whether the number continues.
            self._last = "1,"
        elif char in ",\n":
            self._end_value()

    def _next_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char in '"\n':
            self._in_string = False
            # A string that is cut by the end of the line is a complete value.
            self._after_colon &= char == '"' or self._depth > 1
        self._string += char

    def _end_value(self) -> None:
        if self._depth == 1 and self._after_colon:
            self._after_colon = False
            self._is_over |= self._names <= self._keys


def _is_dash(char: str) -> bool:
    """Return whether a character after a comma may begin a dash that replaces the cents.

    Such a comma belongs to the number. A token with only the first byte of a dash reads as U+FFFD.
    """
    return char == "\ufffd" or re.match(f"[{DASHES}]", char) is not None


def find_span(text: str, value: str) -> tuple[int, int, bool] | None:
    """Find the first occurrence of a value in a text, as whole words before parts of words.

    Returns:
        The start and end offsets and whether the occurrence is exact; otherwise it differs in case
        or white space. None if there is no occurrence.
    """
    if not value.strip():
        return None
    begin = _exact_offset(text, value)
    if begin is not None:
        return begin, begin + len(value), True
    folded = text.casefold()
    # A regular expression per value would take longer than everything else that a record needs.
    if any(word.casefold() not in folded for word in value.split()):
        return None
    body = r"\s+".join(map(re.escape, value.split()))
    for pattern in (rf"(?<!\w){body}(?!\w)", body):
        match = re.search(pattern, text, re.IGNORECASE)
        if match:
            return match.start(), match.end(), False
    return None


def _exact_offset(text: str, value: str) -> int | None:
    first = text.find(value)
    begin = first
    while begin >= 0:
        end = begin + len(value)
        if not (_is_word(text[begin - 1 : begin]) or _is_word(text[end : end + 1])):
            return begin
        begin = text.find(value, begin + 1)
    return first if first >= 0 else None


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def span_of(
    value: Any, text: str, offset: int, source: str, boxes: Sequence[TextBox] = ()
) -> dict[str, Any]:
    """Return the columns `span` and `span_exact` of a value.

    Args:
        value: The value; only texts and numbers have a span.
        text: The part of the source that the model read.
        offset: The offset at which the part begins, in characters.
        source: The document's whole text, with form feeds between pages.
        boxes: The positions of the source on its pages, if it was recognized.
    """
    span = None
    if isinstance(value, str):
        span = find_span(text, value)
    elif is_number(value):
        span = _number_span(text, value)
    if span is None:
        return {"span": None, "span_exact": None}
    begin = offset + span[0]
    end = offset + span[1]
    page = source.count("\f", 0, begin) + 1 if "\f" in source else None
    where: dict[str, Any] = {"begin": begin, "end": end, "page": page}
    if boxes:
        where["box"] = box_of(boxes, begin, end)
    return {"span": where, "span_exact": span[2]}


def is_number(value: Any) -> bool:
    """Return whether a value of a record is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number_span(text: str, number: float) -> tuple[int, int, bool] | None:
    """Find the first occurrence of a number in a text.

    Returns:
        As `find_span`; the occurrence is exact if it equals the number's JSON.
    """
    span = find_number(number, text)
    if span is None:
        return None
    begin, end = span
    return begin, end, text[begin:end] == json.dumps(number)


def box_of(boxes: Sequence[TextBox], begin: int, end: int) -> list[float] | None:
    """Return the box around a part of a text: left, top, right and bottom (`TextBox`).

    Args:
        boxes: The boxes of the whole text.
        begin: The offset of the part's first character.
        end: The offset after its last character. Text on further pages is left out.
    """
    inside: list[TextBox] = []
    for box in boxes:
        if box.begin < end and begin < box.end and (not inside or box.page == inside[0].page):
            inside.append(box)
    if not inside:
        return None
    return [
        min(box.left for box in inside),
        min(box.top for box in inside),
        max(box.right for box in inside),
        max(box.bottom for box in inside),
    ]


def span_source(document: Document, columns: Sequence[str]) -> str:
    """Return the text that spans refer to: the document's only text column.

    It is empty if there are several columns, because raypd joins their texts.
    """
    return str(document.fields.get(columns[0])) if len(columns) == 1 else ""
