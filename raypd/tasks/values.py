"""From decoded text to typed, checked values, and where in a document's text they stand."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from raypd.config import Attribute, bare
from raypd.tasks.base import Document
from raypd.tasks.numbers import read_number

Status = Literal["ok", "null", "truncated", "invalid", "ambiguous", "unsure"]
_DECODER = json.JSONDecoder(strict=False)
_NULLS = {"", "null", "none", "n/a"}
# A dash stands in place of cents, as in 1.299,- and 1.299,--: in an object its comma separates
# nothing. Dashes other than the hyphen are of this block.
_DASHES = "-=\u2000-\u2fff"
# Up to a comma that no digit and no dash follows, a brace or a newline.
_BARE = re.compile(rf"(?:[^,}}\n]|,(?= *\d|[{_DASHES}]))*")
# An item of a list that is no string, list or object. There a hyphen before a digit is a minus.
_BARE_ITEM = re.compile(rf"(?:[^,\]\n]|,(?=[{_DASHES}]{{1,2}}(?![\d.])))*")
_BETWEEN = re.compile(r"[\s,]*")
# Up to a quote that is not escaped, or a newline.
_STRING = re.compile(r'(?:[^"\\\n]|\\.)*', re.DOTALL)
_QUOTED = re.compile(rf'"{_STRING.pattern}"?', re.DOTALL)
# Strings and brackets of a list or an object; a string here may go over lines.
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|["\[\]{}]', re.DOTALL)
_WHOLE_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.|\Z)", re.DOTALL)
_HALF_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?\Z")
_ESCAPED = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_BEGINS_AS_NUMBER = re.compile(r"(?:[A-Z]{3}[^\S\n]?)?[^a-zA-Z[{]*[\d¼½¾]")


@dataclass
class CheckedValue:
    status: Status
    # Typed, as JSON has it; None unless the status is ok or, of a text or a list, truncated.
    value: Any
    raw: str  # what was decoded, as JSON


Rated = tuple[CheckedValue, float | None]  # a value and its confidence


def _read_json(text: str, closed: bool = True) -> tuple[object, Status]:
    """The scalar that `text` begins with; a string may end at a newline or, not `closed`, where it
    was cut. What begins as a number is kept as it is written: it may go on as none, such as 7/8 or
    1,000.
    """
    text = text.lstrip()
    if not text.startswith('"'):
        bare = _BARE.match(text).group().strip()  # type: ignore[union-attr]
        if _BEGINS_AS_NUMBER.match(bare):
            return bare, "ok" if closed else "truncated"
        try:
            value, _ = _DECODER.raw_decode(bare)
        except ValueError:
            return None, "invalid"
        if isinstance(value, (dict, list)):
            return None, "invalid"
        return value, "null" if value is None else "ok"
    end = _string_end(text)
    if end is not None and text[end] == '"':
        return decode_string(text[1:end]), "ok"
    return decode_string(text[1:end], cut=True).rstrip(), "ok" if closed else "truncated"


def decode_string(body: str, cut: bool = False) -> str:
    """Returns the text that the body of a JSON string stands for.

    An escape that JSON does not know, such as \\d, is kept as it is written and disables no other.
    In a string that has one, \\b and \\f before a letter are kept, too: they begin words such as
    \\beta and \\frac. Half of a surrogate pair is dropped, as no text can hold it.

    Args:
        body: What stands between the quotes.
        cut: Whether the string was cut, so that its last escape, or its last character in UTF-8,
            may be incomplete: such a rest is dropped.
    """
    if cut:
        body = _HALF_ESCAPE.sub(r"\1", body).removesuffix("\ufffd")
    is_strict = not any(map(_is_unknown, _ESCAPE.finditer(body)))

    def decoded(escape: re.Match[str]) -> str:
        if _is_unknown(escape):
            return escape.group()
        letter = escape.group()[1]
        if letter == "u":
            return chr(int(escape.group()[2:], 16))
        if letter in "bf" and not is_strict and body[escape.end() : escape.end() + 1].isalpha():
            return escape.group()
        return _ESCAPED[letter]

    text = _ESCAPE.sub(decoded, body)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore")


def _is_unknown(escape: re.Match[str]) -> bool:
    """Whether JSON does not know an escape."""
    written = escape.group()[1:]
    return written not in _ESCAPED and len(written) != len("u0000")


def _repaired(text: str) -> str:
    """JSON whose unknown escapes are kept as they are written, so that it can be decoded."""
    return _ESCAPE.sub(
        lambda escape: "\\" + escape.group() if _is_unknown(escape) else escape.group(), text
    )


def _string_end(text: str) -> int | None:
    end = _STRING.match(text, 1).end()  # type: ignore[union-attr]
    return end if text[end : end + 1] in ('"', "\n") else None


def check(attribute: Attribute, text: str, closed: bool = True, bare: bool = False) -> CheckedValue:
    """What was decoded for an attribute. bare: a text has no quotes, and ends at a newline."""
    kind = (
        _check_list
        if attribute.many
        else _check_bare
        if bare and attribute.type == "text"
        else _check_item
    )
    checked = kind(attribute, text, closed)
    valid = checked.value is None or checked.status == "truncated" or attribute.fits(checked.value)
    return checked if valid else CheckedValue("invalid", None, text)


def _check_bare(attribute: Attribute, text: str, closed: bool) -> CheckedValue:
    checked = _check_item(
        attribute, json.dumps(text.partition("\n")[0].strip(), ensure_ascii=False), True
    )
    return checked if closed or checked.value is None else replace(checked, status="truncated")


def _check_list(attribute: Attribute, text: str, closed: bool) -> CheckedValue:
    """A list; a single value stands for a list of it. What was cut keeps its whole values."""
    text = text.strip()
    if not text.startswith("["):
        item = _check_item(attribute, text, closed)
        return CheckedValue(item.status, [item.value] if item.status == "ok" else None, text)
    items, complete = _list_items(text)
    checked = [_check_item(attribute, item, True) for item in items]
    if any(item.status not in ("ok", "null") for item in checked):
        return CheckedValue("invalid", None, text)
    status: Status = "ok" if complete and closed else "truncated"
    return CheckedValue(status, [item.value for item in checked if item.status == "ok"], text)


def _list_items(text: str) -> tuple[list[str], bool]:
    """The JSON texts of a list's items, and whether the list is complete.

    The last item of one that was cut is left out: the digits of a number that are missing would
    make it another.
    """
    items: list[str] = []
    position = 1
    while True:
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        first = text[position : position + 1]
        if first in ("", "]"):
            return items, first == "]"
        if first == '"':
            string = _WHOLE_STRING.match(text, position)
            end = string.end() if string is not None else None
        elif first in "[{":
            end = _structure_end(text, position)
        else:
            end = _BARE_ITEM.match(text, position).end()  # type: ignore[union-attr]
            end = end if end < len(text) else None
        if end is None:
            return items, False
        if end == position:
            # A bracket or a brace that opens nothing.
            items.append(first)
            end += 1
        else:
            items.append(text[position:end].strip())
        position = end


def _structure_end(text: str, start: int) -> int | None:
    """The character behind the list or object that begins at `start`; None where it is not
    closed.
    """
    depth = 0
    for part in _STRUCTURE.finditer(text, start):
        if part.group() == '"':
            return None
        if part.group() in ("[", "{"):
            depth += 1
        elif part.group() in ("]", "}"):
            depth -= 1
            if depth == 0:
                return part.end()
    return None


def _check_row(attribute: Attribute, text: str, closed: bool) -> CheckedValue:
    """An object of a list; its keys may differ in case and punctuation."""
    try:
        cells = {
            bare(name): json.dumps(cell, ensure_ascii=False)
            for name, cell in _DECODER.decode(_repaired(text)).items()
        }
    except (ValueError, AttributeError):
        return CheckedValue(
            "null" if text.casefold() in _NULLS else "invalid" if closed else "truncated",
            None,
            text,
        )
    row = {
        column.name: _check_item(column, cells.get(bare(column.name), "null"), True)
        for column in attribute.columns
    }
    if any(cell.status not in ("ok", "null") for cell in row.values()):
        return CheckedValue("invalid", None, text)
    empty = all(cell.value is None for cell in row.values())
    return CheckedValue(
        "null" if empty else "ok", None if empty else {n: c.value for n, c in row.items()}, text
    )


def _check_item(attribute: Attribute, text: str, closed: bool) -> CheckedValue:
    if attribute.type == "rows":
        return _check_row(attribute, text, closed)
    value, status = _read_json(text, closed)
    if status == "invalid":
        return CheckedValue("invalid", None, text)
    if value is None or (isinstance(value, str) and _says_null(attribute, value.strip())):
        return CheckedValue("null", None, text)
    if attribute.type not in ("number", "integer"):
        if status == "truncated" and attribute.type != "text":  # a part of it is another
            return CheckedValue("truncated", None, text)
        typed = _typed(attribute, value)
        return CheckedValue("invalid" if typed is None else status, typed, text)
    if not isinstance(value, str) or not any(map(str.isnumeric, value)):
        return CheckedValue("invalid", None, text)
    if status == "truncated":
        return CheckedValue("truncated", None, text)
    number = read_number(value)
    if number is None:
        return CheckedValue("ambiguous", None, text)
    if attribute.type == "integer" and math.isfinite(number) and number == int(number):
        number = int(number)
    return (
        CheckedValue("ok", number, text)
        if math.isfinite(number)
        else CheckedValue("invalid", None, text)
    )


def _says_null(attribute: Attribute, word: str) -> bool:
    """Whether a text stands for null: not where it is an enum's value, or of a pattern that has no
    null.
    """
    asked = attribute.type == "enum" or (attribute.type == "pattern" and attribute.required)
    return word.casefold() in _NULLS and not (
        asked and attribute.item.fits(_typed(attribute, word))
    )


def _typed(attribute: Attribute, value: object) -> str | bool | None:
    word = (value if isinstance(value, str) else json.dumps(value)).strip()
    if attribute.type == "boolean":
        return {"true": True, "false": False, "yes": True, "no": False}.get(word.casefold())
    if attribute.type == "enum":
        alike = [value for value in attribute.values if value.casefold() == word.casefold()]
        return word if word in alike else alike[0] if len(alike) == 1 else None
    return word


def _depth(text: str) -> int:
    """Of objects and lists that are open at the end of a piece of JSON."""
    rest = _QUOTED.sub("", text)
    return sum(map(rest.count, "[{")) - sum(map(rest.count, "]}"))


def find_value(text: str, name: str) -> tuple[int, int, bool] | None:
    """Where in an autoregressive answer the value of key `name` stands: (start, end, closed); None
    if it does not.
    """
    # Servers in Python often write a key in ASCII, "gr\\u00f6\\u00dfe" for "größe".
    spellings = (json.dumps(name, ensure_ascii=False), json.dumps(name))
    exact = "|".join(map(re.escape, dict.fromkeys(spellings)))
    # a model may write Model name as model_name
    words = r"[ _./-]*".join(map(re.escape, re.split(r"[ _./-]+", name)))
    keys = [
        *re.finditer(rf"(?:{exact})\s*:\s*", text),
        *re.finditer(rf'"{words}"\s*:\s*', text, re.IGNORECASE),
    ]
    top = _depth(text.partition('"')[0])
    if (key := next((key for key in keys if _depth(text[: key.start()]) == top), None)) is None:
        return None
    start = key.end()
    if text[start : start + 1] == "[":
        list_end = _structure_end(text, start)
        if list_end is None:
            return start, len(text), False
        return start, list_end, True
    if text[start : start + 1] == '"':
        end = _string_end(text[start:])
        return (start, len(text), False) if end is None else (start, start + end + 1, True)
    end = start + len(_BARE.match(text[start:]).group())  # type: ignore[union-attr]
    return start, end, end < len(text)


class JsonObjectEnd:
    """Tells when an answer that begins inside a JSON object is complete.

    Call with all tokens so far, after each token. That is at its closing brace, at an end token,
    when every name has its value, and when a key comes a second time (the first one counts; a small
    model may go round in circles).
    """

    def __init__(
        self, texts: Sequence[str], end_tokens: frozenset[int], names: Sequence[str]
    ) -> None:
        self._texts, self._ends = texts, end_tokens
        self._names = set(map(bare, names))
        self._keys: set[str] = set()
        self._read = 0
        self._depth = 1
        self._inside = self._escaped = self._after_colon = self._over = False
        self._word = self._last = ""

    def __call__(self, tokens: Sequence[int]) -> bool:
        for token in tokens[self._read :]:
            if token in self._ends:
                return True
            for char in self._texts[token]:
                self._next(char)
        self._read = len(tokens)
        return self._over

    def _next(self, char: str) -> None:
        last, self._last = self._last, char
        if last == "1," and not char.isdecimal() and not _is_dash(char):
            self._end_value()
        if self._inside:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char in '"\n':
                self._inside = False
                # A string that was cut by the line is a value.
                self._after_colon &= char == '"' or self._depth > 1
            self._word += char
        elif char == '"':
            self._inside, self._word = True, ""
        elif char == ":" and self._depth == 1 and not self._after_colon:
            key = bare(self._word)
            self._over |= key in self._keys
            self._keys.add(key)
            self._after_colon = True
        elif char in "{}[]":  # commas in a list end no value
            self._depth += 1 if char in "{[" else -1
            self._over |= self._depth <= 0
        elif char == "," and last.isdecimal():
            self._last = "1,"  # the next character tells whether the number goes on
        elif char in ",\n":
            self._end_value()

    def _end_value(self) -> None:
        if self._depth == 1 and self._after_colon:
            self._after_colon = False
            self._over |= self._names <= self._keys


def _is_dash(char: str) -> bool:
    """Whether a character behind a comma may begin a dash in place of cents, which belongs to the
    number. A token that holds only the first byte of a dash reads as U+FFFD.
    """
    return char == "\ufffd" or re.match(f"[{_DASHES}]", char) is not None


def find_span(text: str, value: str) -> tuple[int, int, bool] | None:
    """(begin, end, exact) of a value's first place, whole words first; not exact: in another case
    or white space.
    """
    if not value.strip():
        return None
    if (begin := _place(text, value)) is not None:
        return begin, begin + len(value), True
    folded = text.casefold()
    if any(word.casefold() not in folded for word in value.split()):
        return None  # a pattern of each value would take longer than the rest of a record
    body = r"\s+".join(map(re.escape, value.split()))
    for pattern in (rf"(?<!\w){body}(?!\w)", body):
        if match := re.search(pattern, text, re.IGNORECASE):
            return match.start(), match.end(), False
    return None


def _place(text: str, value: str) -> int | None:
    """Where a value is written, as most are."""
    first = begin = text.find(value)
    while begin >= 0:
        end = begin + len(value)
        if not (_is_word(text[begin - 1 : begin]) or _is_word(text[end : end + 1])):
            return begin
        begin = text.find(value, begin + 1)
    return first if first >= 0 else None


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def span_of(
    attribute: Attribute, value: Any, text: str, begins: int, source: str
) -> dict[str, Any]:
    """`span` and `span_exact` of a value that is a text, in `text`: a part of source that `begins`
    at a character.
    """
    span = find_span(text, value) if isinstance(value, str) and not attribute.many else None
    if span is None:
        return {"span": None, "span_exact": None}
    begin, end = begins + span[0], begins + span[1]
    page = source.count("\f", 0, begin) + 1 if "\f" in source else None
    return {"span": {"begin": begin, "end": end, "page": page}, "span_exact": span[2]}


def span_source(document: Document, columns: Sequence[str]) -> str:
    """What spans count in: the document's one text column; of several nothing, as their text is
    raypd's.
    """
    return str(document.fields.get(columns[0])) if len(columns) == 1 else ""
