"""The number that a text is, as documents write numbers."""

import math
import re
import unicodedata

from raypd.decoding import UNIT_BYTES

MONEY = "$¢£¥€₩₪₫₱₹₺₽฿₦₴₸₡₲₵"
# Blanks: also the no-break, the figure, the thin and the narrow one; and what is typed in place of
# an apostrophe.
_SEPARATORS = " \u00a0\u2007\u2009\u202f'\u2019\u2018`\u00b4\u02bc"
# Codes and names of currencies, as they stand before or behind a price.
CURRENCY = (
    r"(?:EUR|USD|GBP|CHF|JPY|CNY|RMB|INR|SEK|NOK|DKK|ISK|PLN|CZK|HUF|RON|BGN|HRK|RSD|TRY|RUB|UAH|AUD"
    r"|NZD|CAD|HKD|SGD|TWD|NTD|KRW|THB|MYR|IDR|PHP|VND|BRL|MXN|ARS|CLP|COP|PEN|ZAR|EGP|NGN|KES|GHS|MAD"
    r"|ILS|AED|SAR|QAR|KWD|DEM|ATS|FRF|ITL|ESP|NLG|Euros?|Dollars?|Pounds?|Rs|Fr|SFr|Fr[äa]nkli|Franken"
    r"|francs?|yen|yuan|won|rupees?|rupiah|kr|kronor|kroner|krona|krone|K\u010d|z\u0142|zloty|Ft|forint"
    r"|lei|DM|pesos?|reais|rand|lira|руб|грн|лв)"  # noqa: RUF001
)
# A sign in place of cents behind a whole amount: 1.299,- and 1'299.-- and 1 299:- and 1,299/=.
_DASH = "[-\u2010-\u2015]"
_NO_CENTS = rf"[.,:/]\s?(?:{_DASH}{{1,2}}|=)"
_PARTS = re.compile(
    rf"(?:(?:[~≈]|(?:ca|approx)\b\.?|circa|about)\s?)?(?P<sign>[-+]?)"
    rf"(?P<money>(?:(?:[A-Z]{{0,3}}[{MONEY}]|{CURRENCY}\.?)\s?)?)"
    rf"(?P<digits>\.?[0-9](?:[0-9.,{_SEPARATORS}]*[0-9])?(?:\.(?!\s?{_DASH}))?)"
    rf"(?P<exponent>[eE][-+]?[0-9]+)?(?P<no_cents>(?:{_NO_CENTS})?)(?P<unit>.*)",
    re.DOTALL | re.IGNORECASE,
)
_WORD = r"[^\W\d_²³]+[²³]?\.?"
_UNIT = re.compile(
    rf"(?:\s|-(?=[^\W\d_]))?[%‰°\"'\u2032\u2033\u201d{MONEY}]{{0,2}}[\s/]?(?:{_WORD}(?:[\s/·-]{{1,3}}{_WORD})*)?",
    re.IGNORECASE,
)
_NO_UNIT = re.compile(  # words that make another number of it, or no number at all
    "k|M|(?i:e|x|and|or|to|by|plus|und|oder|bis|mal|et|ou|y|st|nd|rd|th|dozen|dutzend|hundred|hundert"
    "|thousand|millions?|billions?|mil|mille|mio|mln|mrd|bn|tsd|tausend|millionen|milliarden?|lakh|crore"
    "|тыс|млн|млрд"
    # Of ranges and bounds.
    "|through|thru|till|until|hasta|up|more|less|fewer|over|under|above|below|mehr|weniger|minus"
    "|max|maximum|maximal|minimum|minimal|mindestens|höchstens"
    # Of versions.
    "|alpha|beta|rc|dev|snapshot|release|preview|build|patch|lts|final|stable"
    # Of dates and times of day.
    "|jan|january|januar|jänner|janvier|enero|gennaio|feb|february|februar|février|febrero|febbraio"
    "|mar|march|mär|märz|mars|marzo|apr|april|avril|abril|aprile|may|mai|mayo|maggio|jun|june|juni|juin"
    "|junio|giugno|jul|july|juli|juillet|julio|luglio|aug|august|août|agosto|sep|sept|september"
    "|septembre|septiembre|settembre|oct|october|okt|oktober|octobre|octubre|ottobre|nov|november"
    "|novembre|noviembre|dec|december|dez|dezember|décembre|diciembre|dicembre|am|pm|uhr|bc|bce|ce|ad)"
)
_OF_MONEY = re.compile(rf"[{MONEY}]|(?<![^\W\d_]){CURRENCY}(?![^\W\d_])", re.IGNORECASE)
# A whole amount: its groups cannot be a fraction.
_WHOLE = re.compile(
    rf"\d+|[1-9]\d{{0,2}}([.,{_SEPARATORS}])\d{{3}}(\1\d{{3}})*|[1-9]\d?(,\d\d)+,\d{{3}}", re.ASCII
)
# A price in dollars or in euros with thousands of either country.
THOUSANDS_OR_DECIMALS = re.compile(r"[1-9]\d{0,2}\.\d{3}", re.ASCII)
_OCTET = r"(?:0|[1-9]\d?|1\d\d|2[0-4]\d|25[0-5])"
_IP_ADDRESS = re.compile(rf"{_OCTET}(?:\.{_OCTET}){{3}}", re.ASCII)
_LEADING_ZEROS = re.compile(r"^([-+]?)0+(?=\d)", re.ASCII)
# Characters without a width that pages have between others, such as a soft hyphen.
_INVISIBLE = dict.fromkeys(map(ord, "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"))
# A day and a month, or a month and a year.
_DATE = re.compile(r"0[1-9]\.(?:0[1-9]|1[0-2]|(?:19|20)\d\d)", re.ASCII)
# Expressions for browsers and Python's `re`, which check a label while it is typed. They match all
# texts that `read_number` reads, and some that it does not.
_WHOLE_NUMBER = rf"\d+(?:(?:,\d{{2,3}})*,\d{{3}}|(?:\.\d{{3}})+|(?:[{_SEPARATORS}]\d{{3}})+)?"
_ANY_NUMBER = rf"{_WHOLE_NUMBER}(?:[.,]\d*)?"
_EXPONENT = r"[eE][+\-\u2212]?\d+"
# A point before the digits is a decimal one, unless it ends a word such as Rs.
_NO_POINT = r"(?:[^\d]*(?:[^\d.]|[^\s\d.+\-]\.))?"
# Texts with characters that nobody sees are not judged.
_UNJUDGED = rf"[\s\S]*[{''.join(map(chr, _INVISIBLE))}][\s\S]*"
NUMBER_PATTERN = rf"[^\d]*{_ANY_NUMBER}(?:{_EXPONENT})?[^\d]*|{_UNJUDGED}"
INTEGER_PATTERN = (
    rf"{_NO_POINT}(?:{_WHOLE_NUMBER}(?:[.,]0*)?|\.0+|\.?{_ANY_NUMBER}{_EXPONENT})[^\d]*"
    rf"|{_UNJUDGED}"
)
_PHONE_DIGITS = 8  # fewest of an international phone number, and ...
_PADDED_DIGITS = (
    7  # ... fewest of a number with zeros in front that is one of a phone or an article
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
    JSON's, whatever stands behind it: 1.000 is 1; but a price such as 1.299 € is None, as it may
    have thousands. A dash in place of cents makes a whole amount: 1.299,- and 1'299.-- are 1299.
    Zeros may lead (007). Around it may stand a sign (also U+2212), a currency ($1,299.00, CHF
    1'299.00), "about" (~, ≈, ca., approx.), an exponent (1.5E-3) and a short unit, which is left
    out (5 kg, 99%, 40-inch, 15.6", km/h). Digits of other scripts are digits. None, since one
    number would be another than is written: a fraction (7/8, ½, 1 1/2), a range (1-2, ±5), a bound
    (<5, 5+), two numbers (5 x 3, 5'10", 10 W / 12 W), a power (10²), a word that multiplies (5
    million, 5k, 5M; but 5K is kelvin) and any text longer than a unit. None, too, as they are no
    numbers: a date or a time (12.05.2024, 5 May, 5 pm), a version (1.2.3, 2.0-beta), an IP address
    (192.168.100.200), and a phone number (+49 171 123 456, 01711234567).
    """
    visible = text.translate(_INVISIBLE).strip()
    word = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in visible).replace(
        "\u2212", "-"
    )
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
    if _is_no_quantity(digits, parts["sign"], unit):
        return None
    if parts["no_cents"]:
        if parts["exponent"] or not _WHOLE.fullmatch(digits):
            return None
        plain = re.sub(r"\D", "", digits)
    elif THOUSANDS_OR_DECIMALS.fullmatch(digits) and (parts["money"] or _OF_MONEY.search(unit)):
        return None
    elif _POINT.fullmatch(digits):
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
    if not re.fullmatch(r"[-+]?\d+", plain):
        return number
    # Python refuses to read thousands of zeros.
    return int(_LEADING_ZEROS.sub(r"\1", plain))


def _is_no_quantity(digits: str, sign: str, unit: str) -> bool:
    """Whether digits without a unit are an address, a date or a number that is dialled."""
    if unit:
        return False
    if _IP_ADDRESS.fullmatch(digits) or _DATE.fullmatch(digits):
        return True
    if re.search(r"[.,]", digits):
        return False
    count = sum(char.isdecimal() for char in digits)
    if sign == "+" and count >= _PHONE_DIGITS:
        return True
    return digits.startswith("0") and count >= _PADDED_DIGITS
