"""Reads decoded text as JSON, as far as it is valid JSON."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "null", "truncated", "invalid", "ambiguous", "unsure"]


def _refuse_constant(text: str) -> None:
    """Refuse NaN and Infinity, which Python reads although JSON does not have them."""
    raise ValueError(f"{text} is not JSON")


# A model may write a line break or a tab into a string.
DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
NULLS = frozenset({"", "null", "none", "n/a"})
# A dash may replace the cents, as in 1.299,- and 1.299,--: in an object, its comma separates
# nothing. Dashes other than the hyphen are in this block.
DASHES = "-=\u2000-\u2fff"
# Up to a brace, a newline, or a comma that neither a digit nor a dash follows.
BARE_VALUE = re.compile(rf"(?:[^,}}\n]|,(?= *\d|[{DASHES}]))*")
# A list item that is not a string, list or object. A hyphen before a digit is a minus there.
_BARE_ITEM = re.compile(rf"(?:[^,\]\n]|,(?=[{DASHES}]{{1,2}}(?![\d.])))*")
_BETWEEN_ITEMS = re.compile(r"[\s,]*")
# Up to a quote that is not escaped, or a newline.
STRING_BODY = re.compile(r'(?:[^"\\\n]|\\.)*', re.DOTALL)
# Strings and brackets of a list or an object; here a string may span several lines.
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|["\[\]{}]', re.DOTALL)
_WHOLE_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.|\Z)", re.DOTALL)
_HALF_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?\Z")
_ESCAPED = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
# Three letters may be a currency, such as EUR.
_BEGINS_AS_NUMBER = re.compile(r"(?:[A-Z]{3}[^\S\n]?)?[^a-zA-Z[{]*[\d¼½¾]")


@dataclass
class CheckedValue:
    """A value that was read and checked."""

    status: Status
    # The value as JSON has it. It is None unless the status is ok or, for a text or a list,
    # truncated.
    value: Any
    # The decoded text, as JSON.
    raw: str


def dumps(value: Any) -> str:
    """Return the JSON of a value, with characters beyond ASCII unescaped."""
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON."""
    if isinstance(value, str):
        return value
    return dumps(value)


def read_scalar(text: str, closed: bool = True) -> tuple[object, Status]:
    """Read the scalar that a text begins with.

    A string may end at a newline. A value that begins like a number is kept in its notation,
    because it may turn out not to be one, such as 7/8 or 1,000.

    Args:
        text: The decoded text.
        closed: Whether the value is complete; otherwise the text was cut.

    Returns:
        The value and whether it is ok, null, truncated or invalid.
    """
    text = text.lstrip()
    if text.startswith('"'):
        return _read_string(text, closed)
    bare_text = BARE_VALUE.match(text).group().strip()  # type: ignore[union-attr]
    if _BEGINS_AS_NUMBER.match(bare_text):
        return bare_text, _status_of_cut(closed)
    try:
        value, _ = DECODER.raw_decode(bare_text)
    except ValueError:
        return None, "invalid"
    if isinstance(value, (dict, list)):
        return None, "invalid"
    return value, "null" if value is None else "ok"


def _read_string(text: str, closed: bool) -> tuple[str, Status]:
    end = string_end(text)
    if end is None or text[end] != '"':
        return decode_string(text[1:end], cut=True).rstrip(), _status_of_cut(closed)
    return decode_string(text[1:end]), "ok"


def _status_of_cut(closed: bool) -> Status:
    return "ok" if closed else "truncated"


def string_end(text: str) -> int | None:
    """Return the offset of the quote or newline that ends the string at the beginning of a text."""
    end = STRING_BODY.match(text, 1).end()  # type: ignore[union-attr]
    return end if text[end : end + 1] in ('"', "\n") else None


def decode_string(body: str, cut: bool = False) -> str:
    """Return the text that the body of a JSON string encodes.

    An escape that JSON does not know, such as \\d, is kept literally and disables no other. In a
    string that contains one, \\b and \\f before a letter are kept, too: they begin words such as
    \\beta and \\frac. Half of a surrogate pair is dropped, because no text can contain it, and so
    is NUL, because it ends a text for many programs that read tables.

    Args:
        body: The characters between the quotes.
        cut: Whether the string was cut. Its last escape, or its last UTF-8 character, is dropped if
            it is incomplete.
    """
    if cut:
        body = _HALF_ESCAPE.sub(r"\1", body).removesuffix("\ufffd")
    has_unknown = any(map(_is_unknown, _ESCAPE.finditer(body)))

    def decoded(escape: re.Match[str]) -> str:
        if _is_unknown(escape):
            return escape.group()
        letter = escape.group()[1]
        if letter == "u":
            return chr(int(escape.group()[2:], 16))
        following = body[escape.end() : escape.end() + 1]
        if letter in "bf" and has_unknown and following.isalpha():
            return escape.group()
        return _ESCAPED[letter]

    text = _ESCAPE.sub(decoded, body)
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore")
    return text.replace("\0", "")


def _is_unknown(escape: re.Match[str]) -> bool:
    """Return whether JSON does not know an escape."""
    written = escape.group()[1:]
    return written not in _ESCAPED and len(written) != len("u0000")


def repaired(text: str) -> str:
    """Return JSON with its unknown escapes made literal, so that it can be decoded."""

    def known(escape: re.Match[str]) -> str:
        return "\\" + escape.group() if _is_unknown(escape) else escape.group()

    return _ESCAPE.sub(known, text)


def list_items(text: str) -> tuple[list[str], bool]:
    """Return the JSON texts of a list's items, and whether the list is complete.

    The last item of a list that was cut is left out, because a number that lost digits would be a
    different number.
    """
    items: list[str] = []
    offset = 1
    while True:
        offset = _BETWEEN_ITEMS.match(text, offset).end()  # type: ignore[union-attr]
        first = text[offset : offset + 1]
        if first in ("", "]"):
            return items, first == "]"
        end = _item_end(text, offset)
        if end is None:
            return items, False
        # A bracket or a brace that opens nothing is also an item.
        end = max(end, offset + 1)
        items.append(text[offset:end].strip())
        offset = end


def _item_end(text: str, start: int) -> int | None:
    """Return the offset after the item of a list, or None if the item was cut."""
    first = text[start]
    if first == '"':
        string = _WHOLE_STRING.match(text, start)
        return None if string is None else string.end()
    if first in "[{":
        return structure_end(text, start)
    end = _BARE_ITEM.match(text, start).end()  # type: ignore[union-attr]
    return end if end < len(text) else None


def structure_end(text: str, start: int) -> int | None:
    """Return the offset after the list or object that begins at `start`, or None if it was cut."""
    depth = 0
    for part in _STRUCTURE.finditer(text, start):
        mark = part.group()
        if mark == '"':
            return None
        if mark in ("[", "{"):
            depth += 1
        elif mark in ("]", "}"):
            depth -= 1
            if depth == 0:
                return part.end()
    return None
