"""Whether a number is only a part of what a document says: of a range, of a longer number, or of
an amount such as "37k".

A model that is asked for one number often writes an end of the range that a document states, such
as 54000 of "54k to 60k". Nothing says that this end is the answer, so the value is ambiguous,
unless the attribute asks for an end ("minimum salary") or another attribute of the record has the
other end.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from raypd.schema.numbers import CURRENCY, MONEY, read_number

_THOUSAND = r"k|tsd\.?|t(?:ausend|housand)|mila|mil|mille|тыс\.?"
_MILLION = r"m|mi?o\.?|mln\.?|mill?ion(?:en|s|i|e|es)?|mill?ones|млн\.?"
_BILLION = r"bn|mrd\.?|mia\.?|milliarden?|billions?|млрд\.?"
_FACTORS = (
    (re.compile(_THOUSAND, re.IGNORECASE), 1_000),
    (re.compile(_MILLION, re.IGNORECASE), 1_000_000),
    (re.compile(_BILLION, re.IGNORECASE), 1_000_000_000),
)
_DIGITS = (
    "(?:[0-9]{1,3}(?:[ \u00a0\u2007\u2009\u202f][0-9]{3})+(?![0-9])|[0-9]+(?:[.,'\u2019][0-9]+)*)"
)
_FACTOR = rf"(?:\s?(?:{_THOUSAND}|{_MILLION}|{_BILLION})(?![^\W_]))?"
_SIGN = "[-+\u2212]?"
# A unit between the ends counts if it is a sign, or if the other end has the same one.
_UNIT = rf"(?:[\s-]?(?P<unit>[^\W\d_]{{1,12}}[²³]?)|\s?[%‰°{MONEY}]{{1,2}}[CF]?)?"
_DASH = "[-\u2010-\u2015\u2212]"
_BETWEEN = (
    rf"(?:\s?(?:{_DASH}|~|\u301c|\uff5e|\.\.\.?|\u2026)\s?"
    r"|\s(?:to|bis|till|until|through|thru|à|a|hasta|jusqu'à|fino a|tot|до)\s)"
)
_AND = r"\s(?:and|und|et|y|e|и)\s"
# No part of a date, a time, a version or a code stands around a range.
_BEFORE = r"(?:(?<![\w.,/:#\-\u2013\u2212])|(?<=EUR|USD|GBP|CHF))"
_BEHIND = r"(?![0-9_]|[-\u2013/:.,'\u2019][0-9]|[^\W\d_]+[-_]?[0-9])"


def _end(name: str) -> str:
    return rf"(?P<{name}>{_DIGITS})(?P<{name}_factor>{_FACTOR})"


_LOW = rf"{_SIGN}{_end('low')}"
_HIGH = rf"{_SIGN}(?:(?:[{MONEY}]|{CURRENCY}\.?)\s?)?{_end('high')}"
_RANGE = re.compile(
    rf"{_BEFORE}{_LOW}{_UNIT}{_BETWEEN}{_HIGH}"
    rf"(?(unit)[\s-]?(?P=unit)(?![^\W_])|{_BEHIND})",
    re.IGNORECASE,
)
_RANGE_OF_WORDS = re.compile(
    rf"\b(?:between|zwischen|entre|tra|fra|между)\s(?:[{MONEY}]|{CURRENCY}\s)?"
    rf"{_LOW}{_UNIT}{_AND}{_HIGH}{_BEHIND}",
    re.IGNORECASE,
)
_MENTION = re.compile(rf"(?P<digits>{_DIGITS})(?P<factor>{_FACTOR})", re.IGNORECASE)
_MONEY_BEFORE = re.compile(rf"(?:[{MONEY}]|\b{CURRENCY})\s?$", re.IGNORECASE)
_MONEY_BEHIND = re.compile(rf"\s?(?:[{MONEY}]|{CURRENCY}\b)", re.IGNORECASE)
# The characters around a number in which its currency is looked for.
_AROUND = 10
# These digits are either a whole number with thousands, or one with three decimals.
_ONE_GROUP = re.compile(r"(?P<whole>[1-9][0-9]{0,2})(?P<separator>[^0-9])(?P<group>[0-9]{3})")
_DECIMAL_COMMA = re.compile(r"(?:[0-9]{1,3}(?:\.[0-9]{3})+|[0-9]+),[0-9]{1,2}|0,[0-9]+")
# Of these units there are usually thousands: 42.003 km on the clock of a car.
_UNIT_OF_THOUSANDS = re.compile(
    r"[\s-]?(?:kms?|kilomet(?:er|re)[ns]?|mi|miles?|Meilen?)(?![\w/])", re.IGNORECASE
)
# A thousand of these units are another one, in which a model may have answered: 2,500 g as 2.5 kg.
_UNIT_WITH_PREFIX = re.compile(
    r"[\s-]?(?:[nu\u00b5\u03bcmkMG]?(?:g|l|L|W|Wh|V|VA|A|Ah|Hz|J|Pa|N|B|bit|s|cal)|[nu\u00b5\u03bcm]?m|t"
    r"|(?i:(?:milli|mi[ck]ro|kilo|mega)?(?:gram(?:m|mes?|s)?|lit(?:er|re)[ns]?|met(?:er|re)[ns]?"
    r"|watts?|volts?|hertz|bytes?|seconds?|sekunden?)))(?![^\W_])"
)
_WORD = re.compile(r"[A-Z]*[^\W\d_A-Z]+|[A-Z]+")
# What multiplies a number, whatever stands around it. Other letters are units too: "5 m", "5 t".
_MULTIPLIER = (
    rf"k(?:[{MONEY}]|EUR|USD|GBP|CHF)?|T(?:€|EUR)|M(?:[{MONEY}]|EUR|USD|GBP|CHF)|bn"
    r"|(?i:thousands?|tsd\.?|tausend|mille|mila|тыс\.?|millions?|millionen|millones|milioni|mio\.?|mln\.?"
    r"|млн\.?|billions?|milliarden?|mrd\.?|млрд\.?|trillions?|lakhs?|crores?|hundred|hundert|dozen"
    r"|dutzend)"
)
# These letters multiply an amount of money: £37K, $5m. Without a currency, K is kelvin.
_MULTIPLIER_OF_MONEY = "[KmMbB]"
# The factor of the upper end of a range is that of the lower end, too: 30-40k.
_MULTIPLIED = re.compile(
    rf"{_DIGITS}(?:{_BETWEEN}(?:[{MONEY}]|{CURRENCY}\s)?{_DIGITS})?"
    rf"(?:\s?(?:{_MULTIPLIER})(?![^\W_])|(?P<of_money>{_MULTIPLIER_OF_MONEY})(?![^\W_]))"
)
_MULTIPLIER_NAMES = (
    r"k|T|m|thousands?|tsd\.?|tausend|mio\.?|mln\.?|millions?|millionen|bn|billions?|mrd\.?|milliarden"
    r"|milliers|millones|lakhs?|crores?|hundreds|dozens"
)
_MULTIPLIER_WORD = re.compile(rf"{_MULTIPLIER_NAMES}|teur", re.IGNORECASE)
_IN_MULTIPLES = re.compile(
    rf"(?<!not\s)(?<!nicht\s)\b(?:in|en)\s(?:[{MONEY}]|{CURRENCY}\s)?"
    rf"(?:{_MULTIPLIER_NAMES})(?:[{MONEY}]|{CURRENCY})?(?![^\W_])",
    re.IGNORECASE,
)
# What asks for an end of a range, in a name or a description. Other words ("from", "first") say so
# in a name alone, because descriptions have them in other meanings.
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
        begin: Its first character.
        end: The character after its last one.
        low: What its lower end may be read as.
        high: What its upper end may be read as.
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
    names = _words(name)
    if any(map(_ENDS_IN_NAMES.fullmatch, names)):
        return True
    return any(map(_ENDS.fullmatch, [*names, *_words(description)]))


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def is_end_of_range(number: float, text: str, others: Sequence[float] = ()) -> bool:
    """Return whether a number stands in a text only as an end of ranges.

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
            if _is_among(number, end):
                is_end = True
                if any(_is_among(other, other_end) for other in others):
                    return False
    return is_end and not _stands_alone(number, text, ranges)


def is_misread(number: float, raw: str, text: str, *, of_multiples: bool = False) -> bool:
    """Return whether a number has the digits of a number in a text, but another value.

    A model that copies "16.303,76" as a number of JSON stops at the comma, which ends a value
    there, and 16.303 is left. Others write 31.500 or 31.5 where the text has "31,500", or leave
    out the currency of "31.500 €", without which nothing says that these are thousands. All are
    wrong by a factor of a thousand.

    Args:
        number: The number.
        raw: The number as the model wrote it.
        text: The text of the document.
        of_multiples: Whether thousands or other multiples were asked for. Then 31.5 is right where
            the text has "31,500".
    """
    answer = _MENTION.search(raw)
    if answer is None:
        return False
    written = answer["digits"]
    stands_otherwise = False
    for mention in _mentions(text):
        if mention.doubtful is not None and _is_among(number, [mention.doubtful]):
            if of_multiples:
                return False
            stands_otherwise = True
            continue
        if _is_among(number, mention.readings):
            return False
        is_beginning = _is_beginning(written, mention.digits)
        if is_beginning or _only_digits(mention.digits) == _only_digits(written):
            # A date, a version or a list is not one number.
            stands_otherwise = stands_otherwise or read_number(mention.digits) is not None
    return stands_otherwise


@lru_cache(maxsize=1024)
def asks_for_multiples(name: str, description: str) -> bool:
    """Return whether an attribute asks for thousands or other multiples, such as "in thousands".

    Args:
        name: The attribute's name.
        description: Its description.
    """
    if any(map(_MULTIPLIER_WORD.fullmatch, _words(name))):
        return True
    return bool(_IN_MULTIPLES.search(f"{name}\n{description}"))


def lacks_multiplier(number: float, text: str) -> bool:
    """Return whether a number stands in a text only before a word or letter that multiplies it.

    A model that is asked for a number often copies 37 of "£37k", which is wrong by a factor of a
    thousand.

    Args:
        number: The number.
        text: The text of the document.
    """
    lacks = False
    for mention in _mentions(text):
        if not _is_among(number, mention.readings):
            continue
        is_as_written = _is_among(number, _readings(mention.digits, set()))
        if not is_as_written or not _is_multiplied(mention, text):
            return False
        lacks = True
    return lacks


def _is_multiplied(mention: "_Mention", text: str) -> bool:
    """Return whether a word or letter behind a number multiplies it."""
    match = _MULTIPLIED.match(text, mention.begin)
    if match is None:
        return False
    if match["of_money"] is None:
        return True
    return bool(_MONEY_BEFORE.search(text[max(0, mention.begin - _AROUND) : mention.begin]))


def _is_beginning(written: str, digits: str) -> bool:
    """Return whether a number was written up to one of its separators.

    A fraction that was left out does not count, because that is rounding.
    """
    rest = digits.removeprefix(written)
    if rest == digits or not rest or rest[0].isdecimal():
        return False
    return rest[0] != "." or not rest[1:].isdecimal()


def _only_digits(number: str) -> str:
    return re.sub(r"\D", "", number)


# All numbers of a record are looked for in the same text, one after the other.
@lru_cache(maxsize=16)
def _ranges(text: str) -> tuple[_Range, ...]:
    ranges = []
    for pattern in (_RANGE, _RANGE_OF_WORDS):
        for match in pattern.finditer(text):
            factors = {_factor(match["low_factor"]), _factor(match["high_factor"])}
            low = _readings(match["low"], factors)
            high = _readings(match["high"], factors)
            if low and high and min(low) < max(high):
                ranges.append(_Range(match.start(), match.end(), low, high))
    return tuple(ranges)


class _Mention(NamedTuple):
    """A number in a text.

    Attributes:
        begin: Its first character.
        digits: Its digits with their separators.
        readings: What it may be read as.
        doubtful: What it is if its last three digits are decimals, where they are probably
            thousands, such as 1.299 of "1.299 €"; None for other numbers.
    """

    begin: int
    digits: str
    readings: list[float]
    doubtful: float | None


@lru_cache(maxsize=16)
def _mentions(text: str) -> tuple[_Mention, ...]:
    matches = list(_MENTION.finditer(text))
    has_decimal_comma = any(_DECIMAL_COMMA.fullmatch(match["digits"]) for match in matches)
    mentions = []
    for match in matches:
        digits = match["digits"]
        readings = _readings(digits, {_factor(match["factor"])})
        doubtful = _doubtful_reading(match, has_decimal_comma=has_decimal_comma)
        mentions.append(_Mention(match.start(), digits, readings, doubtful))
    return tuple(mentions)


def _doubtful_reading(mention: re.Match[str], *, has_decimal_comma: bool) -> float | None:
    """Return what a number is with three decimals, if these are probably thousands.

    Args:
        mention: The number.
        has_decimal_comma: Whether the text writes decimals behind a comma.
    """
    group = _ONE_GROUP.fullmatch(mention["digits"])
    if group is None:
        return None
    text, end = mention.string, mention.end("digits")
    if not _is_money(mention) and not _UNIT_OF_THOUSANDS.match(text, end):
        separator = group["separator"]
        if separator == "." or (separator == "," and has_decimal_comma):
            return None
        if _UNIT_WITH_PREFIX.match(text, end):
            return None
    return float(f"{group['whole']}.{group['group']}")


def _is_money(mention: re.Match[str]) -> bool:
    """Return whether a currency stands before or behind a number."""
    text = mention.string
    before = text[max(0, mention.start() - _AROUND) : mention.start()]
    behind = text[mention.end() : mention.end() + _AROUND]
    return bool(_MONEY_BEFORE.search(before) or _MONEY_BEHIND.match(behind))


def _stands_alone(number: float, text: str, ranges: Sequence[_Range]) -> bool:
    """Return whether a number stands somewhere outside of ranges."""
    for mention in _mentions(text):
        if any(each.begin <= mention.begin < each.end for each in ranges):
            continue
        if _is_among(number, mention.readings):
            return True
    return False


def _readings(digits: str, factors: set[int]) -> list[float]:
    """Return what digits may mean, with or without factors such as thousand."""
    numbers: set[float] = set()
    number = read_number(digits)
    if number is not None and math.isfinite(number):
        numbers.add(number)
    groups = re.split(r"\D", digits)
    if len(groups) > 1 and all(len(group) == 3 for group in groups[1:]):
        numbers.add(int("".join(groups)))
    return [number * factor for number in numbers for factor in {1, *factors}]


def _factor(text: str) -> int:
    """Return the number that a word such as "k" stands for; 1 for an empty text."""
    for pattern, factor in _FACTORS:
        if pattern.fullmatch(text.strip()):
            return factor
    return 1


def _is_among(number: float, readings: Sequence[float]) -> bool:
    """Return whether a number is one of the readings; a sign may belong to the range."""
    return any(math.isclose(abs(number), reading, rel_tol=1e-9) for reading in readings)
