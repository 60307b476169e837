"""A number that stands in a document only as an end of a range."""

import pytest

from raypd.schema import asks_for_an_end, is_end_of_range


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("Pay: 54k to 60k a year", (54000, 60000, 54, 60)),
        ("54k-60k", (54000, 60000)),
        ("54-60k", (54, 54000, 60000)),
        ("54K \u2013 60K EUR", (54000, 60000)),
        ("54,000 to 60,000", (54000, 60000)),
        ("$54,000 \u2014 $60,000", (54000, 60000)),
        ("USD 54,000 to USD 60,000", (54000, 60000)),
        ("EUR54,000-60,000", (54000, 60000)),
        ("54.000 bis 60.000 \u20ac", (54000, 60000)),
        ("54.000 \u20ac bis 60.000 \u20ac", (54000, 60000)),
        ("54 000 to 60 000", (54000, 60000)),
        ("54'000\u201360'000 CHF", (54000, 60000)),
        ("54k EUR to 60k EUR", (54000, 60000)),
        ("Gehalt: 54 bis 60 Tsd. Euro", (54, 54000, 60000)),
        ("between 3 and 5 years", (3, 5)),
        ("zwischen 3 und 5 Jahren", (3, 5)),
        ("entre 3 et 5 ans", (3, 5)),
        ("from 3 to 5 years", (3, 5)),
        ("von 3 bis 5 Jahren", (3, 5)),
        ("10\u201312 %", (10, 12)),
        ("10 % - 12 %", (10, 12)),
        ("10-12%", (10, 12)),
        ("1,5\u20132,0 l", (1.5, 2)),
        ("0.5 to 1.5 l", (0.5, 1.5)),
        ("5 kg to 10 kg", (5, 10)),
        ("20-30cm", (20, 30)),
        ("40-inch to 43-inch", (40, 43)),
        ("3...5", (3, 5)),
        ("3~5 days", (3, 5)),
        ("-5 to 40 \u00b0C", (-5, 40)),
        ("1.5 to 2 million", (1500000, 2000000)),
    ],
)
def test_an_end_of_a_range_is_not_the_number(text, ends):
    for end in ends:
        assert is_end_of_range(end, text), end
        assert is_end_of_range(end, f"A job.\nPay and more: {text}, apply now.")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # The number stands alone.
        ("54,000", 54000),
        ("54 000", 54000),
        ("-5 \u00b0C", -5),
        ("54k to 60k, for you 54k", 54000),
        ("Weighs 5 kg. For 5-10 people.", 5),
        # It is neither end.
        ("54k to 60k", 57000),
        ("2 rooms, 54k to 60k", 2),
        # Dates, times, codes, versions, ratios, telephone numbers.
        ("2024-01-05", 2024),
        ("2024-01-05", 1),
        ("01.05.2024 - 31.05.2024", 2024),
        ("9:00-17:00", 17),
        ("WH-1000-2000X5", 1000),
        ("A5-10", 5),
        ("1-2-3", 2),
        ("10-5", 5),
        ("4 to 1", 4),
        ("555-0123-4567", 555),
        # One end is no number.
        ("5 to ten", 5),
        ("from here to 60", 60),
        ("add 2 eggs to 500 g flour", 500),
        ("", 5),
        ("no digits", 5),
    ],
)
def test_a_number_outside_of_ranges_is_one(text, number):
    assert not is_end_of_range(number, text)


def test_both_ends_of_a_range_may_be_asked_for():
    assert not is_end_of_range(54000, "54k to 60k", [60000])
    assert not is_end_of_range(60000, "54k to 60k", [54000])
    assert is_end_of_range(54000, "54k to 60k", [40])


@pytest.mark.parametrize(
    ("name", "description", "asks"),
    [
        ("salary_min", "", True),
        ("salaryMax", "", True),
        ("Salary from", "", True),
        ("Mindestgehalt", "", True),
        ("Gehalt bis", "", True),
        ("pay.min", "", True),
        ("Battery life in h", "longest stated, without charging case", True),
        ("Salary", "the lower end of a range", True),
        ("Salary", "", False),
        ("Salary", "yearly, taken from the text", False),
        ("Gehalt", "im Jahr", False),
        ("Administration fee", "", False),
    ],
)
def test_an_attribute_may_ask_for_an_end(name, description, asks):
    assert asks_for_an_end(name, description) is asks
