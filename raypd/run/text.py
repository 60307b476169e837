"""Figures and foreign text as people read them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime

from raypd.config.secrets import redact

NONE = "\N{EN DASH}"  # where there is no figure
Show = Callable[[float], str]  # a figure as people read it
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_MARKS = 4  # accents on one letter
# Characters that change what stands around them: directions of writing, and separators that end a line of a script.
_TURNING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C, 0x2028, 0x2029, 0xFEFF}


def count(value: float) -> str:
    """1234567 -> 1,234,567."""
    return f"{value:,.0f}"


def counted(value: int, what: str) -> str:
    """1 unit; 1,234 units.

    Args:
        value, what: how many, and the word for one of them.
    """
    return f"{count(value)} {what}{'' if value == 1 else 's'}"


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
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def usd(value: float) -> str:
    """Dollars: cents, and more digits where cents would hide all; whole dollars from 10,000 up."""
    sign, value = ("-" if value < 0 else ""), abs(value)
    if value >= 10_000:
        return f"{sign}${value:,.0f}"
    if value >= 1 or value == 0:
        return f"{sign}${value:,.2f}"
    return f"{sign}${value:.{2 if value >= 0.1 else 3 if value >= 0.01 else 5}f}"


def cost(value: float) -> str:
    """Dollars that were billed: a bill of nothing is one of machines without a price."""
    return usd(value) if value else "no price"


def share(part: float, whole: float) -> str:
    """A percentage that never rounds something to 0% or not all to 100%.

    Args:
        part, whole: in one unit; of a whole that is not above 0 there is no share.
    """
    if whole <= 0:
        return NONE
    value = 100 * part / whole
    if 0 < value < 0.1:
        return "<0.1%"
    if 99.9 < value < 100:
        return ">99.9%"
    return f"{value:.0f}%" if value >= 10 or value == 0 else f"{value:.1f}%"


def duration(seconds: float) -> str:
    """42 s, 3 min 12 s, 5 h 4 min, 2 d 3 h."""
    if seconds < _MINUTE - 0.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def when(seconds: float | None) -> str:
    """A point in time, in UTC."""
    if seconds is None:
        return NONE
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clean(value: object, most: int = 0) -> str:
    """Foreign text with control and direction characters made visible; escaping for HTML is the template's work.

    Args:
        value, most: what to show, and after how many characters it is cut; 0: never.
    """
    text = str(value)
    if most and len(text) > most:
        text = f"{text[:most]}… ({count(len(text))} characters)"
    out = []
    marks = 0
    for c in text:
        marks = marks + 1 if unicodedata.combining(c) else 0
        if marks <= _MARKS:  # more of them would climb over the lines around
            harmless = c in "\n\t" or (unicodedata.category(c) not in ("Cc", "Cs", "Cn") and ord(c) not in _TURNING)
            out.append(c if harmless else f"\\u{ord(c):04x}")
    return "".join(out)


def one_line(value: object, most: int = 0) -> str:
    """As `clean`, and line ends and tabs visible too: an id must not look like lines of raypd's own."""
    return clean(value, most).replace("\n", "\\n").replace("\t", "\\t")


def said(value: object) -> str:
    """A message as it may stand on a terminal and in a log: as `clean`, and without secrets (by their form)."""
    return clean(redact(str(value)))
