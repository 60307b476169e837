"""The numbers that occur in a text, each with all of its possible readings."""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from raypd.schema.numbers import CURRENCY, MONEY, read_number

# Words that can only mean thousands, millions or billions. Short forms that may also be a unit
# (m, t, mo) are listed separately.
THOUSANDS = r"tsd\.?|tausend|thousands?|mila|mille|тыс\.?"
MILLIONS = r"mio\.?|mln\.?|mill?ion(?:en|s|i|e|es)?|mill?ones|млн\.?"
BILLIONS = r"bn|mrd\.?|milliarden?|billions?|млрд\.?"
_THOUSAND = rf"k|t|mil|{THOUSANDS}"
_MILLION = rf"m|mo\.?|{MILLIONS}"
_BILLION = rf"mia\.?|{BILLIONS}"
_FACTORS = (
    (re.compile(_THOUSAND, re.IGNORECASE), 1_000),
    (re.compile(_MILLION, re.IGNORECASE), 1_000_000),
    (re.compile(_BILLION, re.IGNORECASE), 1_000_000_000),
)
DIGITS = (
    "(?:[0-9]{1,3}(?:[ \u00a0\u2007\u2009\u202f][0-9]{3})+(?![0-9])|[0-9]+(?:[.,'\u2019][0-9]+)*)"
)
FACTOR = rf"(?:\s?(?:{_THOUSAND}|{_MILLION}|{_BILLION})(?![^\W_]))?"
_DASH = "[-\u2010-\u2015\u2212]"
BETWEEN = (
    rf"(?:\s?(?:{_DASH}|~|\u301c|\uff5e|\.\.\.?|\u2026)\s?"
    r"|\s(?:to|bis|till|until|through|thru|à|a|hasta|jusqu'à|fino a|tot|до)\s)"
)
MENTION = re.compile(rf"(?P<digits>{DIGITS})(?P<factor>{FACTOR})", re.IGNORECASE)
MONEY_BEFORE = re.compile(rf"(?:[{MONEY}]|\b{CURRENCY})\s?$", re.IGNORECASE)
_MONEY_BEHIND = re.compile(rf"\s?(?:[{MONEY}]|{CURRENCY}\b)", re.IGNORECASE)
# The number of characters around a number that are searched for its currency.
AROUND = 10
# These digits are either a whole number with thousands, or one with three decimals.
_ONE_GROUP = re.compile(r"(?P<whole>[1-9][0-9]{0,2})(?P<separator>[^0-9])(?P<group>[0-9]{3})")
_DECIMAL_COMMA = re.compile(r"(?:[0-9]{1,3}(?:\.[0-9]{3})+|[0-9]+),[0-9]{1,2}|0,[0-9]+")
# Amounts in these units are usually in the thousands: 42.003 km on the odometer of a car.
_UNIT_OF_THOUSANDS = re.compile(
    r"[\s-]?(?:kms?|kilomet(?:er|re)[ns]?|mi|miles?|Meilen?)(?![\w/])", re.IGNORECASE
)
# A thousand of these units make another unit, in which a model may answer: 2,500 g as 2.5 kg.
_UNIT_WITH_PREFIX = re.compile(
    r"[\s-]?(?:[nu\u00b5\u03bcmkMG]?(?:g|l|L|W|Wh|V|VA|A|Ah|Hz|J|Pa|N|B|bit|s|cal)|[nu\u00b5\u03bcm]?m|t"
    r"|(?i:(?:milli|mi[ck]ro|kilo|mega)?(?:gram(?:m|mes?|s)?|lit(?:er|re)[ns]?|met(?:er|re)[ns]?"
    r"|watts?|volts?|hertz|bytes?|seconds?|sekunden?)))(?![^\W_])"
)
_WORD = re.compile(r"[A-Z]*[^\W\d_A-Z]+|[A-Z]+")


class Mention(NamedTuple):
    """A number in a text.

    Attributes:
        begin: The offset of its first character.
        end: The offset after its last character, or after a factor that follows it, such as the k
            of 54k.
        digits: Its digits with their separators.
        readings: The numbers that it may be read as.
        doubtful: Its value if its last three digits are read as decimals although they are probably
            thousands, such as 1.299 of "1.299 €"; None for other numbers.
    """

    begin: int
    end: int
    digits: str
    readings: list[float]
    doubtful: float | None


@lru_cache(maxsize=16)
def mentions(text: str) -> tuple[Mention, ...]:
    matches = list(MENTION.finditer(text))
    has_decimal_comma = any(_DECIMAL_COMMA.fullmatch(match["digits"]) for match in matches)
    found = []
    for match in matches:
        digits = match["digits"]
        readings = readings_of(digits, {factor_of(match["factor"])})
        doubtful = _doubtful_reading(match, has_decimal_comma=has_decimal_comma)
        found.append(Mention(match.start(), match.end(), digits, readings, doubtful))
    return tuple(found)


def _doubtful_reading(mention: re.Match[str], *, has_decimal_comma: bool) -> float | None:
    """Return a number's value with three decimals if these are probably thousands.

    Args:
        mention: The number.
        has_decimal_comma: Whether the text uses a decimal comma.
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
    """Return whether a currency precedes or follows a number."""
    text = mention.string
    before = text[max(0, mention.start() - AROUND) : mention.start()]
    behind = text[mention.end() : mention.end() + AROUND]
    return bool(MONEY_BEFORE.search(before) or _MONEY_BEHIND.match(behind))


def find_number(number: float, text: str) -> tuple[int, int] | None:
    """Find the first place where a text contains a number, in whatever notation.

    Args:
        number: The number. Its sign is not compared.
        text: The text.

    Returns:
        The start and end offsets, including a factor such as the k of 54k if the number needs it.
        None if the text does not contain the number in digits.
    """
    for mention in mentions(text):
        if is_among(number, readings_of(mention.digits, set())):
            return mention.begin, mention.begin + len(mention.digits)
        if is_among(number, mention.readings):
            return mention.begin, mention.end
    return None


def readings_of(digits: str, factors: set[int]) -> list[float]:
    """Return what digits may mean, with or without factors such as thousand."""
    numbers: set[float] = set()
    number = read_number(digits)
    if number is not None and math.isfinite(number):
        numbers.add(number)
    groups = re.split(r"\D", digits)
    if len(groups) > 1 and all(len(group) == 3 for group in groups[1:]):
        numbers.add(int("".join(groups)))
    return [number * factor for number in numbers for factor in {1, *factors}]


def factor_of(text: str) -> int:
    """Return the number that a word such as "k" stands for; 1 for an empty text."""
    for pattern, factor in _FACTORS:
        if pattern.fullmatch(text.strip()):
            return factor
    return 1


def words_of(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def is_among(number: float, readings: Sequence[float]) -> bool:
    """Return whether a number is one of the readings; a sign may belong to the range."""
    return any(math.isclose(abs(number), reading, rel_tol=1e-9) for reading in readings)
