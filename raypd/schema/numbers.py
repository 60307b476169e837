"""Reads a text that is a number in one of the notations that documents use."""

import math
import re
import unicodedata

from raypd.decoding import UNIT_BYTES

MONEY = "$¢£¥€₩₪₫₱₹₺₽฿₦₴₸₡₲₵"
# Blanks, including the no-break, figure, thin and narrow ones, and the characters that people type
# instead of an apostrophe.
_SEPARATORS = " \u00a0\u2007\u2009\u202f'\u2019\u2018`\u00b4\u02bc"
# Codes and names of currencies, which precede or follow a price.
CURRENCY = (
    r"(?:EUR|USD|GBP|CHF|JPY|CNY|RMB|INR|SEK|NOK|DKK|ISK|PLN|CZK|HUF|RON|BGN|HRK|RSD|TRY|RUB|UAH|AUD"
    r"|NZD|CAD|HKD|SGD|TWD|NTD|KRW|THB|MYR|IDR|PHP|VND|BRL|MXN|ARS|CLP|COP|PEN|ZAR|EGP|NGN|KES|GHS|MAD"
    r"|ILS|AED|SAR|QAR|KWD|DEM|ATS|FRF|ITL|ESP|NLG|Euros?|Dollars?|Pounds?|Rs|Fr|SFr|Fr[äa]nkli|Franken"
    r"|francs?|yen|yuan|won|rupees?|rupiah|kr|kronor|kroner|krona|krone|K\u010d|z\u0142|zloty|Ft|forint"
    r"|lei|DM|pesos?|reais|rand|lira|руб|грн|лв)"  # noqa: RUF001
)
# A sign that replaces the cents after a whole amount: 1.299,- and 1'299.-- and 1 299:- and 1,299/=.
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
# Words that change the number, or make it no number at all.
_NO_UNIT = re.compile(
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
# A whole amount, whose groups cannot be a fraction.
_WHOLE = re.compile(
    rf"\d+|[1-9]\d{{0,2}}([.,{_SEPARATORS}])\d{{3}}(\1\d{{3}})*|[1-9]\d?(,\d\d)+,\d{{3}}", re.ASCII
)
# A price that is either in dollars with three decimals or in euros with thousands.
THOUSANDS_OR_DECIMALS = re.compile(r"[1-9]\d{0,2}\.\d{3}", re.ASCII)
_OCTET = r"(?:0|[1-9]\d?|1\d\d|2[0-4]\d|25[0-5])"
_IP_ADDRESS = re.compile(rf"{_OCTET}(?:\.{_OCTET}){{3}}", re.ASCII)
_LEADING_ZEROS = re.compile(r"^([-+]?)0+(?=\d)", re.ASCII)
# Zero-width characters that web pages have between others, such as a soft hyphen.
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
# The fewest digits of an international phone number.
_PHONE_DIGITS = 8
# The fewest digits of a number with leading zeros that is a phone or an article number.
_PADDED_DIGITS = 7
# English notation, which JSON shares, with Indian groups; continental notation if it cannot be
# English; groups separated by blanks.
_POINT = re.compile(
    r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?|[1-9]\d?(,\d\d)+,\d{3}(\.\d+)?|\d+\.?\d*|\.\d+", re.ASCII
)
_COMMA = re.compile(
    r"[1-9]\d{0,2}(\.\d{3})+,\d+|[1-9]\d{0,2}(\.\d{3}){2,}|0,\d{3}|\d+,(\d{1,2}|\d{4,})", re.ASCII
)
_BLANKS = re.compile(rf"[1-9]\d{{0,2}}([{_SEPARATORS}])\d{{3}}(\1\d{{3}})*([.,]\d+)?", re.ASCII)


def read_number(text: str) -> int | float | None:
    """Return the number that a text is in the notation of a document, or None if it is not a number
    or if its value is doubtful.

    Thousands may be grouped: 1,000 and 1,234.5 (English), 12,34,567 (Indian), 1 000 and 1'000
    (blanks of any width, apostrophes), and 1.000.000 and 1.000,5, which cannot be English. A comma
    that is followed by three digits is English (1,234 is 1234) unless it cannot be (0,125 is 0.125;
    1234,567 is neither, so it gives None); otherwise it is a decimal comma (3,5). A single point is
    read as in JSON, whatever follows it: 1.000 is 1; but a price such as 1.299 € gives None,
    because its digits may be thousands. A dash that replaces the cents ends a whole amount: 1.299,-
    and 1'299.-- are 1299. Leading zeros are allowed (007). The number may have a sign (also
    U+2212), a currency ($1,299.00, CHF 1'299.00), "about" (~, ≈, ca., approx.), an exponent
    (1.5E-3) and a short unit, which is ignored (5 kg, 99%, 40-inch, 15.6", km/h). Digits of other
    scripts are read as digits.

    The result is None if a single number would differ from what is written: a fraction (7/8, ½, 1
    1/2), a range (1-2, ±5), a bound (<5, 5+), two numbers (5 x 3, 5'10", 10 W / 12 W), a power
    (10²), a word that multiplies (5 million, 5k, 5M; but 5K is kelvin) and any text longer than a
    unit. It is also None for texts that are not numbers: a date or a time (12.05.2024, 5 May, 5
    pm), a version (1.2.3, 2.0-beta), an IP address (192.168.100.200) and a phone number (+49 171
    123 456, 01711234567).
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
        # It is too large, or too small, for a float.
        return math.inf
    if not re.fullmatch(r"[-+]?\d+", plain):
        return number
    # Python refuses to read thousands of zeros.
    return int(_LEADING_ZEROS.sub(r"\1", plain))


def _is_no_quantity(digits: str, sign: str, unit: str) -> bool:
    """Return whether digits without a unit are an address, a date or a phone number."""
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
