"""The number that a text is, as documents write numbers."""

import math
import re
import unicodedata

from raypd.decoding.value_automata import UNIT_BYTES

_MONEY = "$¢£¥€₩₪₫₱₹₺₽฿"
# Blanks: also the no-break, the figure, the thin and the narrow one.
_SEPARATORS = " \u00a0\u2007\u2009\u202f'\u2019"
_PARTS = re.compile(
    rf"(?:(?:[~≈]|(?:ca|approx)\b\.?|circa|about)\s?)?(?P<sign>[-+]?)(?:[{_MONEY}]\s?)?"
    rf"(?P<digits>\.?[0-9](?:[0-9.,{_SEPARATORS}]*[0-9])?\.?)(?P<exponent>[eE][-+]?[0-9]+)?(?P<unit>.*)",
    re.DOTALL | re.IGNORECASE,
)
_WORD = r"[^\W\d_²³]+[²³]?\.?"
_UNIT = re.compile(
    rf"(?:\s|-(?=[^\W\d_]))?[%‰°\"'\u2032\u2033\u201d{_MONEY}]{{0,2}}[\s/]?(?:{_WORD}(?:[\s/·-]{{1,3}}{_WORD})*)?",
    re.IGNORECASE,
)
_NO_UNIT = re.compile(  # words that make another number of it
    "k|M|(?i:e|x|and|or|to|by|plus|und|oder|bis|mal|et|ou|y|st|nd|rd|th|dozen|hundred|thousand|millions?|billions?|mil"
    "|mille|mio|mln|mrd|bn|tsd|tausend|millionen|milliarden?|lakh|crore|тыс|млн|млрд)"
)
# English, which is JSON's, with Indian groups; continental where it cannot be English; groups
# between blanks
_POINT = re.compile(
    r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?|[1-9]\d?(,\d\d)+,\d{3}(\.\d+)?|\d+\.?\d*|\.\d+", re.ASCII
)
_COMMA = re.compile(
    r"[1-9]\d{0,2}(\.\d{3})+,\d+|[1-9]\d{0,2}(\.\d{3}){2,}|0,\d{3}|\d+,(\d{1,2}|\d{4,})", re.ASCII
)
_BLANKS = re.compile(rf"[1-9]\d{{0,2}}([{_SEPARATORS}])\d{{3}}(\1\d{{3}})*([.,]\d+)?", re.ASCII)


def read_number(text: str) -> int | float | None:
    """The one number that a text is, as documents write it; None where it is none, or not surely
    one.

    Grouped thousands: 1,000 and 1,234.5 (English), 12,34,567 (Indian), 1 000 and 1'000 (blanks of
    any width, apostrophes), and 1.000.000 and 1.000,5, which cannot be English. A comma with three
    digits behind it is English (1,234 is 1234) unless it cannot be (0,125 is 0.125; 1234,567 is
    neither, and None); with more or less of them it is a decimal comma (3,5). A single point is
    JSON's, whatever stands behind it: 1.000 is 1. Zeros may lead (007). Around it may stand a sign
    (also U+2212), a currency ($1,299.00), "about" (~, ≈, ca., approx.), an exponent (1.5E-3) and a
    short unit, which is left out (5 kg, 99%, 40-inch, 15.6", km/h). Digits of other scripts are
    digits. None, since one number would be another than is written: a fraction (7/8, ½, 1 1/2), a
    range (1-2, ±5), a bound (<5, 5+), two numbers (5 x 3, 5'10", 10 W / 12 W), a date, a version, a
    power (10²), a word that multiplies (5 million, 5k, 5M; but 5K is kelvin) and any text longer
    than a unit.
    """
    word = "".join(
        str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text.strip()
    ).replace("\u2212", "-")
    parts = _PARTS.fullmatch(word)
    if parts is None:
        return None
    digits, unit = parts["digits"], parts["unit"]
    if unit and (
        digits.endswith(".")
        or len(unit.encode()) > UNIT_BYTES
        or not _UNIT.fullmatch(unit)
        or any(c.isnumeric() and c not in "²³" for c in unit)
        or any(map(_NO_UNIT.fullmatch, re.findall(r"[^\W\d_]+", unit)))
    ):
        return None
    if _POINT.fullmatch(digits):
        plain = digits.replace(",", "")
    elif _COMMA.fullmatch(digits):
        plain = digits.replace(".", "").replace(",", ".")
    elif _BLANKS.fullmatch(digits):
        plain = re.sub(rf"[{_SEPARATORS}]", "", digits).replace(",", ".")
    else:
        return None
    plain = parts["sign"] + plain + (parts["exponent"] or "")
    number = float(plain)
    if not math.isfinite(number) or (
        number == 0 and re.search("[1-9]", re.split("[eE]", plain)[0])
    ):
        return math.inf  # too large, or too small, to be held
    return int(plain) if re.fullmatch(r"[-+]?\d+", plain) else number
