"""Formats figures for people, and makes text from outside safe to show."""

import re
import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime

from raypd.config import redact

# It replaces a figure that is unknown.
NONE = "\N{EN DASH}"
# A function that formats a figure.
Show = Callable[[float], str]
# A function that shows the user a line.
Say = Callable[[str], None]
_MINUTE = 60
_HOUR = 3600
_DAY = 86400
# The limit on the accents of one letter; more would cover the lines above.
_MAX_ACCENTS = 4
# Characters that change the text around them: writing directions, and separators that end a line of
# a script.
_UNSAFE = {
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
    0x200E,
    0x200F,
    0x061C,
    0x2028,
    0x2029,
    0xFEFF,
}


# Text without any character that `clean` changes or counts: printable Latin with line ends and
# tabs. Most text is of this kind and need not be examined character by character.
_PLAIN = re.compile(r"[\n\t\x20-\x7e\u00a0-\u02ff]*")

# The beginning of a formula, also with full-width characters and after blanks, tabs and line
# breaks, which a spreadsheet may drop. A number may have a sign.
_FORMULA = re.compile(r"\s*([=@\uff1d\uff20]|[+\uff0b\uff0d-](?![0-9.]+\s*\Z)|\t|\r)")


def count(value: float) -> str:
    """Format a count with separators: 1234567 -> 1,234,567."""
    return f"{value:,.0f}"


def counted(value: int, noun: str) -> str:
    """Format a count with its noun: 1 unit, 1,234 units."""
    plural = "" if value == 1 else "s"
    return f"{count(value)} {noun}{plural}"


def compact(value: float) -> str:
    """Format a count in few characters: 1234 -> 1,234, 2345678 -> 2.35 M."""
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return count(value)


def number(value: float) -> str:
    """Format a number with three significant digits: 0.0123, 1.23, 12.3, 1,230."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def usd(value: float) -> str:
    """Format dollars: with cents, with more digits for small amounts, without cents from
    $10,000.
    """
    sign = "-" if value < 0 else ""
    value = abs(value)
    if value >= 10_000:
        return f"{sign}${value:,.0f}"
    if value >= 1 or value == 0:
        return f"{sign}${value:,.2f}"
    if value >= 0.1:
        return f"{sign}${value:.2f}"
    if value >= 0.01:
        return f"{sign}${value:.3f}"
    return f"{sign}${value:.5f}"


def cost(value: float) -> str:
    """Format dollars on a bill. A bill of 0 means that the machines have no price."""
    if not value:
        return "no price"
    return usd(value)


def share(part: float, total: float) -> str:
    """Format a percentage without rounding it to 0% or 100%.

    Returns:
        NONE if the total is not positive.
    """
    if total <= 0:
        return NONE
    value = 100 * part / total
    if 0 < value < 0.1:
        return "<0.1%"
    if 99.9 < value < 100:
        return ">99.9%"
    if value >= 10 or value == 0:
        return f"{value:.0f}%"
    return f"{value:.1f}%"


def duration(seconds: float) -> str:
    """Format a duration: 42 s, 3 min 12 s, 5 h 4 min, 2 d 3 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < _MINUTE - 0.5:
        return f"{seconds:.0f} s"
    rounded = round(seconds)
    if rounded < _HOUR:
        return f"{rounded // _MINUTE} min {rounded % _MINUTE} s"
    if rounded < _DAY:
        return f"{rounded // _HOUR} h {rounded % _HOUR // _MINUTE} min"
    return f"{rounded // _DAY} d {rounded % _DAY // _HOUR} h"


def when(seconds: float) -> str:
    """Format a Unix second as a date and time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(seconds: float | None = None) -> str:
    """Format a Unix second, or the current time, in UTC as ISO 8601."""
    if seconds is None:
        time = datetime.now(UTC)
    else:
        time = datetime.fromtimestamp(seconds, UTC)
    return time.isoformat(timespec="seconds")


def clean(value: object, limit: int = 0) -> str:
    """Make control and direction characters of foreign text visible. HTML is not escaped.

    Args:
        value: The text.
        limit: The number of characters after which the text is cut; 0 for no limit.
    """
    text = str(value)
    if limit and len(text) > limit:
        text = f"{text[:limit]}… ({count(len(text))} characters)"
    if _PLAIN.fullmatch(text):
        return text
    cleaned = []
    accents = 0
    for character in text:
        accents = accents + 1 if unicodedata.combining(character) else 0
        if accents > _MAX_ACCENTS:
            continue
        cleaned.append(character if _is_safe(character) else f"\\u{ord(character):04x}")
    return "".join(cleaned)


def _is_safe(character: str) -> bool:
    """Return whether a character has no effect on the terminal and the text around it."""
    if character in "\n\t":
        return True
    is_control = unicodedata.category(character) in ("Cc", "Cs", "Cn")
    return not is_control and ord(character) not in _UNSAFE


def is_formula(cell: str) -> bool:
    """Return whether a spreadsheet may take a cell of a CSV for a formula. A number is not one."""
    return _FORMULA.match(cell) is not None


def one_line(value: object, limit: int = 0) -> str:
    """Clean text as `clean` does, and make line ends and tabs visible.

    An id with line ends could look like lines that raypd itself prints.
    """
    return clean(value, limit).replace("\n", "\\n").replace("\t", "\\t")


def said(value: object) -> str:
    """Clean a message for a terminal or a log, and redact anything that looks like a secret."""
    return clean(redact(str(value)))


def without_halves(text: str) -> str:
    """Return a text without halves of surrogate pairs, such as those of an emoji that was cut.

    They cannot be encoded as UTF-8.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore")


# Up to this number, a float represents every whole number exactly.
_EXACT = 2**53


def id_text(value: object) -> str:
    """Return a document's id as text.

    pandas stores a column of whole numbers with a gap as floats, so 17.0 is the id 17.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)
    # Half of a surrogate pair cannot be encoded.
    return str(value).encode("utf-8", "replace").decode()
