"""A number that is only a part of an amount that a document states."""

import pytest

from raypd.schema import asks_for_multiples, is_misread, lacks_multiplier


@pytest.mark.parametrize(
    ("raw", "number", "text"),
    [
        ("16.303", 16.303, "Nettobetrag: 16.303,76 EUR"),
        ("-16.303", -16.303, "Saldo -16.303,76"),
        ("2", 2, "Net: 2,642.70"),
        ("12", 12, "12'500.- CHF, 12.5 kg"),
        ("31.500", 31.5, "EUR 31,500 a year"),
        ("$ 36.000", 36, "from 36,000 USD"),
        ("1.299,", 1.299, "1 299 kr"),
        ("20.500", 20.5, "20.500 \u20ac a year"),
        ("20.500", 20.5, "Gehalt: EUR 20.500, sofort"),
        ("20.5", 20.5, "20.500 Euro"),
        # The model left out the zeros at the end.
        ("37.09", 37.09, "Plug-in hybrid. \u20ac37,090 (VAT not reclaimable). Mileage 22516 km."),
        ("23.89", 23.89, "\u20ac23,890 incl. VAT. 40,768 km on the clock."),
        ("28.95", 28.95, "155,905 km on the clock. \u20ac28,950 incl. VAT."),
        ("13.8", 13.8, "\u20ac13,800, a litre of petrol on 5,3 litres"),
        ("-37.09", -37.09, "balance: -37,090 USD"),
        ("37.09", 37.09, "37'090 CHF"),
        ("1.29", 1.29, "1 290 kr"),
        ("40.76", 40.76, "40,760 visitors in 2019"),
        ("2.5", 2.5, "2,500 m\u00b2"),
        # Of these units there are thousands.
        ("42.003", 42.003, "Runs on petrol. 42.003 km. Never crashed."),
        ("209.49", 209.49, "209.490 km"),
        ("102.66", 102.66, "102.660 Kilometer, 2.0 TDI"),
        ("40.76", 40.76, "40,760 miles, 5,3 l"),
        ("88.09", 88.09, "88.090km"),
    ],
)
def test_a_number_with_the_digits_of_another_one_is_not_the_number(raw, number, text):
    assert is_misread(number, raw, text)


@pytest.mark.parametrize(
    ("raw", "number", "text"),
    [
        ('"16.303,76"', 16303.76, "16.303,76 EUR"),
        ("16303.76", 16303.76, "16.303,76 EUR"),
        ("1.299", 1.299, "1.299 kg"),
        ("20500", 20500, "20.500 \u20ac a year"),
        ("20.50", 20.5, "20.50 \u20ac"),
        ("20.5", 20.5, "20.500 \u20ac, that is 20.5 thousand"),
        ("54", 54, "54k to 60k"),
        # The number stands alone, too.
        ("2", 2, "2 pieces at 2,642.70"),
        # No longer number begins with it.
        ("1", 1, "sizes 1,2,3"),
        ("12", 12, "12.05.2024"),
        ("3", 3, "version 3.1.4"),
        ("6", 6, "16,50"),
        ("5", 5, "52,50"),
        ("315", 315, "31500"),
        # Other units, a share, and rounding.
        ("2.5", 2.5, "2,500 g"),
        ("2.5", 2.5, "2,500 m, 1'500 ml"),
        ("1.5", 1.5, "2,500 m, 1'500 ml"),
        ("1.25", 1.25, "1,250 grams"),
        ("1.25", 1.25, "1.250 kg"),
        ("0.125", 0.125, "0.125"),
        ("0.125", 0.125, "0,125 km"),
        ("12.345", 12.345, "12.345 s"),
        ("1.25", 1.25, "1.250"),
        ("1.25", 1.25, "1.250 km/h"),
        # The document has decimal commas.
        ("1.25", 1.25, "1,250 bar, 3,5 bar"),
        # The number stands in the document, too.
        ("42.003", 42.003, "42.003 km, reading 42.003"),
        ("42.5", 42.5, "42.500 km, or 42.5 thousand"),
        # It is read as thousands.
        ("42003", 42003, "42.003 km"),
        ("37090", 37090, "\u20ac37,090"),
        ("1500", 1500, "1.5 km"),
        ("0.125", 0.125, "12.5%"),
        ("3", 3, "3.5 kg"),
        # The model did not copy it.
        ("7", 7, "no number"),
    ],
)
def test_a_number_that_was_not_misread_is_one(raw, number, text):
    assert not is_misread(number, raw, text)


def test_a_number_that_the_attribute_cannot_have_was_not_misread():
    text = "I am the only driver. We will drive 1,850 km."
    assert is_misread(1, "1", text)
    assert not is_misread(1, "1", text, allows=lambda number: number <= 9)
    assert is_misread(1, "1", text, allows=lambda number: number <= 1850)
    assert not is_misread(37.09, "37.09", "\u20ac37,090", allows=lambda number: number <= 100)


def test_the_beginning_of_a_number_that_another_attribute_has_was_not_misread():
    text = "I am the only driver. We will drive 1,850 km."
    assert not is_misread(1, "1", text, others=[1850])
    # The other attribute has another number, or there is one more number that begins so.
    assert is_misread(1, "1", text, others=[850])
    assert is_misread(1, "1", f"{text} We pay 1,200 EUR.", others=[1850])
    # With a separator, the digits of the whole number are no coincidence.
    assert is_misread(1.85, "1.850", text, others=[1850])


def test_thousands_that_were_asked_for_are_not_misread():
    for text in ("\u20ac37,090", "37.090 \u20ac", "37,090 visitors"):
        assert is_misread(37.09, "37.09", text)
        assert not is_misread(37.09, "37.09", text, of_multiples=True)
    assert is_misread(16.303, "16.303", "16.303,76 EUR", of_multiples=True)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (37, "37k"),
        (37, "\u00a337k"),
        (37, "37 k"),
        (37, "37 million"),
        (37, "\u00a337K"),
        (37, "EUR 37K"),
        (37.5, "$37.5m"),
        (37.5, "37,5 Mio. \u20ac"),
        (37, "37k\u20ac"),
        (37, "37 TEUR"),
        (37, "37 Tsd. Euro"),
        (2, "2 dozen"),
        # Both ends of a range.
        (30, "30-40k"),
        (40, "30-40k"),
        (30, "\u00a330K to \u00a340K"),
    ],
)
def test_a_number_without_the_word_that_multiplies_it_is_not_the_number(number, text):
    assert lacks_multiplier(number, text)
    assert lacks_multiplier(number, f"Nurse (York). {text} plus benefits, in ward 8.")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (37000, "\u00a337k"),
        (37000000, "37 million"),
        (37, "\u00a337"),
        # The number stands alone, too.
        (37, "\u00a337k for 37 hours a week"),
        (37, "37 hours a week for \u00a337k"),
        # It is what another mention says.
        (1000, "1000k pieces, or 1k"),
        # Kelvin, metres, tonnes, and a size.
        (4000, "4000K"),
        (5, "5 m"),
        (5, "5 t"),
        (38, "38 M"),
        (5, "5 kg"),
        (3, "3 Milton Road"),
        # Another number, and none.
        (7, "37k"),
        (2000, "Competitive pay"),
    ],
)
def test_a_number_that_nothing_multiplies_is_one(number, text):
    assert not lacks_multiplier(number, text)


@pytest.mark.parametrize(
    ("name", "description", "asks"),
    [
        ("salary_k", "", True),
        ("salary", "in thousands", True),
        ("revenue", "of the year, in million euros", True),
        ("revenue", "in \u00a3k", True),
        ("Umsatz", "in Mio. Euro", True),
        ("Umsatz in TEUR", "", True),
        ("salary", "in pounds per year", False),
        ("salary", "the full amount in pounds: 37k is 37000", False),
        ("salary", "in pounds, not in thousands", False),
    ],
)
def test_an_attribute_may_ask_for_thousands(name, description, asks):
    assert asks_for_multiples(name, description) is asks
