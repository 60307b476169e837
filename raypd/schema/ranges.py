"""Detects numbers that are only an end of a range that a document states.

A model that is asked for one number often answers with an end of such a range, such as 54000 for
"54k to 60k". Nothing shows that this end is the answer, so the value is ambiguous, unless the
attribute asks for an end ("minimum salary") or another attribute of the record has the other end.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from raypd.schema.mentions import (
    BETWEEN,
    DIGITS,
    FACTOR,
    factor_of,
    is_among,
    mentions,
    readings_of,
    words_of,
)
from raypd.schema.numbers import CURRENCY, MONEY

_SIGN = "[-+\u2212]?"
# A unit between the ends counts if it is a sign, or if the other end has the same one.
_UNIT = rf"(?:[\s-]?(?P<unit>[^\W\d_]{{1,12}}[²³]?)|\s?[%‰°{MONEY}]{{1,2}}[CF]?)?"
_AND = r"\s(?:and|und|et|y|e|и)\s"
# The characters around a range must not belong to a date, a time, a version or a code.
_BEFORE = r"(?:(?<![\w.,/:#\-\u2013\u2212])|(?<=EUR|USD|GBP|CHF))"
_BEHIND = r"(?![0-9_]|[-\u2013/:.,'\u2019][0-9]|[^\W\d_]+[-_]?[0-9])"


def _end(name: str) -> str:
    return rf"(?P<{name}>{DIGITS})(?P<{name}_factor>{FACTOR})"


_LOW = rf"{_SIGN}{_end('low')}"
_HIGH = rf"{_SIGN}(?:(?:[{MONEY}]|{CURRENCY}\.?)\s?)?{_end('high')}"
_RANGE = re.compile(
    rf"{_BEFORE}{_LOW}{_UNIT}{BETWEEN}{_HIGH}"
    rf"(?(unit)[\s-]?(?P=unit)(?![^\W_])|{_BEHIND})",
    re.IGNORECASE,
)
_RANGE_OF_WORDS = re.compile(
    rf"\b(?:between|zwischen|entre|tra|fra|между)\s(?:[{MONEY}]|{CURRENCY}\s)?"
    rf"{_LOW}{_UNIT}{_AND}{_HIGH}{_BEHIND}",
    re.IGNORECASE,
)
# Words in a name or a description that ask for an end of a range. Other words ("from", "first") do
# so only in a name, because they have other meanings in descriptions.
_ENDS = re.compile(
    "min|minim(?:um|al|ale|o|a|i)|mindest.*|least|lowest|lower|smallest|shortest|earliest|floor"
    "|kleinste.*|kürzeste.*|niedrigste.*|unter(?:e|er|es|grenze)|früheste.*|mínim.*"
    "|max|maxim(?:um|al|ale|o|a|i)|höchst.*|most|highest|upper|largest|biggest|longest|greatest"
    "|latest|größte.*|längste.*|ober(?:e|er|es|grenze)|späteste.*|máxim.*"
)
_ENDS_IN_NAMES = re.compile(
    "from|start|begin|beginning|first|low|bottom|since|von|ab|anfang|beginn|erste.*|desde|début"
    "|to|until|till|end|last|high|top|limit|bis|ende|letzte.*|hasta|fin"
)


class _Range(NamedTuple):
    """A range in a text.

    Attributes:
        begin: The offset of its first character.
        end: The offset after its last character.
        low: The numbers that its lower end may be read as.
        high: The numbers that its upper end may be read as.
    """

    begin: int
    end: int
    low: list[float]
    high: list[float]


@lru_cache(maxsize=1024)
def asks_for_an_end(name: str, description: str) -> bool:
    """Return whether an attribute asks for an end of a range, such as a minimum.

    Args:
        name: The attribute's name.
        description: Its description.
    """
    names = words_of(name)
    if any(map(_ENDS_IN_NAMES.fullmatch, names)):
        return True
    return any(map(_ENDS.fullmatch, [*names, *words_of(description)]))


def is_end_of_range(number: float, text: str, others: Sequence[float] = ()) -> bool:
    """Return whether a text contains a number only as an end of ranges.

    Args:
        number: The number.
        text: The text of the document.
        others: The other numbers of the record. If the other end is among them, both ends were
            asked for.
    """
    if not any(map(str.isdecimal, text)):
        return False
    ranges = _ranges(text)
    is_end = False
    for low, high in ((each.low, each.high) for each in ranges):
        for end, other_end in ((low, high), (high, low)):
            if is_among(number, end):
                is_end = True
                if any(is_among(other, other_end) for other in others):
                    return False
    return is_end and not _stands_alone(number, text, ranges)


# All numbers of a record are searched for in the same text, one after the other.
@lru_cache(maxsize=16)
def _ranges(text: str) -> tuple[_Range, ...]:
    ranges = []
    for pattern in (_RANGE, _RANGE_OF_WORDS):
        for match in pattern.finditer(text):
            factors = {factor_of(match["low_factor"]), factor_of(match["high_factor"])}
            low = readings_of(match["low"], factors)
            high = readings_of(match["high"], factors)
            if low and high and min(low) < max(high):
                ranges.append(_Range(match.start(), match.end(), low, high))
    return tuple(ranges)


def _stands_alone(number: float, text: str, ranges: Sequence[_Range]) -> bool:
    """Return whether a number occurs somewhere outside of ranges."""
    for mention in mentions(text):
        if any(each.begin <= mention.begin < each.end for each in ranges):
            continue
        if is_among(number, mention.readings):
            return True
    return False
