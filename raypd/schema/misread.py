"""Detects numbers that are only a part of an amount that a document states: of a longer number, or
of an amount such as "37k". Such a value is wrong by a factor of a thousand or more, so it is
ambiguous.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from raypd.schema.mentions import (
    AROUND,
    BETWEEN,
    BILLIONS,
    DIGITS,
    MENTION,
    MILLIONS,
    MONEY_BEFORE,
    THOUSANDS,
    Mention,
    is_among,
    mentions,
    readings_of,
    words_of,
)
from raypd.schema.numbers import CURRENCY, MONEY, read_number

# Words that multiply a number and have no other meaning.
_MULTIPLES = (
    rf"{THOUSANDS}|{MILLIONS}|{BILLIONS}|trillions?|lakhs?|crores?|hundreds?|hundert|dozens?"
    "|dutzend"
)
# Whatever multiplies a number in any context. Other letters are units as well: "5 m", "5 t".
_MULTIPLIER = rf"(?:k|T|M)(?:[{MONEY}]|EUR|USD|GBP|CHF)|k|(?i:{_MULTIPLES})"
# These letters multiply an amount of money: £37K, $5m. Without a currency, K is kelvin.
_MULTIPLIER_OF_MONEY = "[KmMbB]"
# The factor of the upper end of a range also applies to the lower end: 30-40k.
_MULTIPLIED = re.compile(
    rf"{DIGITS}(?:{BETWEEN}(?:[{MONEY}]|{CURRENCY}\s)?{DIGITS})?"
    rf"(?:\s?(?:{_MULTIPLIER})(?![^\W_])|(?P<of_money>{_MULTIPLIER_OF_MONEY})(?![^\W_]))"
)
# Units that an attribute may ask for although no text contains them: an amount in k.
_ASKED_MULTIPLES = rf"[ktm]|milliers|{_MULTIPLES}"
_MULTIPLIER_WORD = re.compile(rf"{_ASKED_MULTIPLES}|teur", re.IGNORECASE)
_IN_MULTIPLES = re.compile(
    rf"(?<!not\s)(?<!nicht\s)\b(?:in|en)\s(?:[{MONEY}]|{CURRENCY}\s)?"
    rf"(?:{_ASKED_MULTIPLES})(?:[{MONEY}]|{CURRENCY})?(?![^\W_])",
    re.IGNORECASE,
)


def is_misread(
    number: float,
    raw: str,
    text: str,
    *,
    of_multiples: bool = False,
    allows: Callable[[float], bool] | None = None,
    others: Sequence[float] = (),
) -> bool:
    """Return whether a number has the digits of a number in a text but a different value.

    A model that copies "16.303,76" as a JSON number stops at the comma, which ends a value in JSON,
    so 16.303 is left. Other models write 31.500 or 31.5 for the "31,500" of the text, or leave out
    the currency of "31.500 €", which alone shows that these are thousands. All of them are wrong by
    a factor of a thousand.

    Args:
        number: The number.
        raw: The number as the model wrote it.
        text: The text of the document.
        of_multiples: Whether thousands or other multiples were asked for. Then 31.5 is correct for
            a text that contains "31,500".
        allows: Whether the attribute may have a number. One that it cannot have was not misread.
        others: The other numbers of the record. The model has read these in full, so another number
            is not the beginning of one of them: 1 in a text with "1,850 km" may count something
            else.
    """
    answer = MENTION.search(raw)
    if answer is None:
        return False
    written = answer["digits"]
    stands_otherwise = False
    for mention in mentions(text):
        if allows is not None and not any(map(allows, mention.readings)):
            continue
        if mention.doubtful is not None and is_among(number, [mention.doubtful]):
            if of_multiples:
                return False
            stands_otherwise = True
            continue
        if is_among(number, mention.readings):
            return False
        is_beginning = _is_beginning(written, mention.digits)
        if is_beginning and any(is_among(other, mention.readings) for other in others):
            continue
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
    if any(map(_MULTIPLIER_WORD.fullmatch, words_of(name))):
        return True
    return bool(_IN_MULTIPLES.search(f"{name}\n{description}"))


def lacks_multiplier(number: float, text: str) -> bool:
    """Return whether a text contains a number only before a word or letter that multiplies it.

    A model that is asked for a number often copies 37 of "£37k", which is wrong by a factor of a
    thousand.

    Args:
        number: The number.
        text: The text of the document.
    """
    lacks = False
    for mention in mentions(text):
        if not is_among(number, mention.readings):
            continue
        is_as_written = is_among(number, readings_of(mention.digits, set()))
        if not is_as_written or not _is_multiplied(mention, text):
            return False
        lacks = True
    return lacks


def _is_multiplied(mention: Mention, text: str) -> bool:
    """Return whether a word or letter after a number multiplies it."""
    match = _MULTIPLIED.match(text, mention.begin)
    if match is None:
        return False
    if match["of_money"] is None:
        return True
    return bool(MONEY_BEFORE.search(text[max(0, mention.begin - AROUND) : mention.begin]))


def _is_beginning(written: str, digits: str) -> bool:
    """Return whether a written number breaks off at one of the separators of the full number.

    An omitted fraction does not count, because that is rounding.
    """
    rest = digits.removeprefix(written)
    if rest == digits or not rest or rest[0].isdecimal():
        return False
    return rest[0] != "." or not rest[1:].isdecimal()


def _only_digits(number: str) -> str:
    return re.sub(r"\D", "", number)
