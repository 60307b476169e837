"""Figures, and text from outside, made readable."""

import re
import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime

from raypd.config.secrets import redact

NONE = "\N{EN DASH}"  # where there is no figure
Show = Callable[[float], str]  # a figure as people read it
Say = Callable[[str], None]  # tells the user a line
_MINUTE = 60
_HOUR = 3600
_DAY = 86400
_MARKS = 4  # accents on one letter
# Characters that change what stands around them: directions of writing, and separators that end a
# line of a script.
_TURNING = {
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
    0x200E,
    0x200F,
    0x061C,
    0x2028,
    0x2029,
    0xFEFF,
}

# How a formula begins, also in full width and behind blanks, tabs and line breaks, which a
# spreadsheet may drop. A number may have a sign.
_FORMULA = re.compile(r"\s*([=@\uff1d\uff20]|[+\uff0b\uff0d-](?![0-9.]+\s*\Z)|\t|\r)")


def count(value: float) -> str:
    """1234567 -> 1,234,567."""
    return f"{value:,.0f}"


def counted(value: int, noun: str) -> str:
    """1 unit; 1,234 units."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def compact(value: float) -> str:
    """A count in a few characters: 1,234 stays, 2,345,678 -> 2.35 M."""
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return count(value)


def number(value: float) -> str:
    """Three figures: 0.0123, 1.23, 12.3, 1,230."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def usd(value: float) -> str:
    """Dollars: cents, and more digits where cents would hide all; whole dollars from 10,000 up."""
    sign = "-" if value < 0 else ""
    value = abs(value)
    if value >= 10_000:
        return f"{sign}${value:,.0f}"
    if value >= 1 or value == 0:
        return f"{sign}${value:,.2f}"
    return f"{sign}${value:.{2 if value >= 0.1 else 3 if value >= 0.01 else 5}f}"


def cost(value: float) -> str:
    """Dollars that were billed: a bill of nothing is one of machines without a price."""
    return usd(value) if value else "no price"


def share(part: float, total: float) -> str:
    """A percentage that never rounds something to 0% or not all to 100%; NONE for a total that is
    not above 0.
    """
    if total <= 0:
        return NONE
    value = 100 * part / total
    if 0 < value < 0.1:
        return "<0.1%"
    if 99.9 < value < 100:
        return ">99.9%"
    return f"{value:.0f}%" if value >= 10 or value == 0 else f"{value:.1f}%"


def duration(seconds: float) -> str:
    """42 s, 3 min 12 s, 5 h 4 min, 2 d 3 h."""
    if seconds < _MINUTE - 0.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    rounded = round(seconds)
    if rounded < _HOUR:
        return f"{rounded // _MINUTE} min {rounded % _MINUTE} s"
    if rounded < _DAY:
        return f"{rounded // _HOUR} h {rounded % _HOUR // _MINUTE} min"
    return f"{rounded // _DAY} d {rounded % _DAY // _HOUR} h"


def when(seconds: float) -> str:
    """A point in time, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(seconds: float | None = None) -> str:
    """A point in time (None: now), in UTC as ISO 8601."""
    time = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return time.isoformat(timespec="seconds")


def clean(value: object, limit: int = 0) -> str:
    """Foreign text, control and direction characters made visible, cut after `limit` (0: never); no
    HTML escaping.
    """
    text = str(value)
    if limit and len(text) > limit:
        text = f"{text[:limit]}… ({count(len(text))} characters)"
    out = ""
    marks = 0
    for c in text:
        marks = marks + 1 if unicodedata.combining(c) else 0
        if marks <= _MARKS:  # more of them would cover the lines above
            harmless = c in "\n\t" or (
                unicodedata.category(c) not in ("Cc", "Cs", "Cn") and ord(c) not in _TURNING
            )
            out += c if harmless else f"\\u{ord(c):04x}"
    return out


def is_formula(cell: str) -> bool:
    """Return whether a spreadsheet may take a cell of a CSV for a formula. A number is none."""
    return _FORMULA.match(cell) is not None


def one_line(value: object, limit: int = 0) -> str:
    """As `clean`, and line ends and tabs visible too: an id must not look like lines of raypd's
    own.
    """
    return clean(value, limit).replace("\n", "\\n").replace("\t", "\\t")


def said(value: object) -> str:
    """A message as it may stand on a terminal and in a log: as `clean`, and without secrets (by
    their form).
    """
    return clean(redact(str(value)))
