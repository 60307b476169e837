"""Figures as people read them, and foreign text made safe to show."""

import unicodedata

import pytest

from raypd import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "$0.00"),
        (0.00002, "$0.00002"),
        (0.0123, "$0.012"),
        (0.67, "$0.67"),
        (12.3456, "$12.35"),
        (9999.99, "$9,999.99"),
        (597_000.4, "$597,000"),
        (-3.5, "-$3.50"),
    ],
)
def test_dollars_have_as_many_digits_as_matter(value, shown):
    assert text.usd(value) == shown


def test_a_bill_of_nothing_means_that_there_is_no_price():
    assert text.cost(0.0) == "no price"
    assert text.cost(0.67) == "$0.67"


@pytest.mark.parametrize(
    ("part", "total", "shown"),
    [
        (0, 10, "0%"),
        (1, 100_000, "<0.1%"),
        (1, 40, "2.5%"),
        (1, 3, "33%"),
        (99_999, 100_000, ">99.9%"),
        (5, 5, "100%"),
        (1, 0, text.NONE),
    ],
)
def test_a_share_is_rounded_neither_to_nothing_nor_to_all(part, total, shown):
    assert text.share(part, total) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (42.4, "42 s"),
        (59.9, "1 min 0 s"),
        (192, "3 min 12 s"),
        (18_240, "5 h 4 min"),
        (183_600, "2 d 3 h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds, shown):
    assert text.duration(seconds) == shown


def test_control_and_direction_characters_become_visible():
    assert text.clean("a\0b\x1b[31m\u202ec\td\n") == "a\\u0000b\\u001b[31m\\u202ec\td\n"


def test_long_text_is_cut_and_says_how_long_it_was():
    assert text.clean("x" * 20, 5) == "xxxxx… (20 characters)"


def test_stacked_accents_are_limited():
    assert text.clean("e" + "\u0301" * 50) == "e" + "\u0301" * 4


def test_text_of_any_script_stays_as_it_is():
    foreign = "漢字 عربى é 👩‍👧"
    assert text.clean(foreign) == foreign


def test_the_characters_that_need_no_look_are_all_safe():
    safe = [chr(code) for code in range(0x300) if text._PLAIN.fullmatch(chr(code))]
    assert len(safe) > 600
    for character in safe:
        assert text._is_safe(character)
        assert not unicodedata.combining(character)
    assert not text._PLAIN.fullmatch("a\u202eb")
