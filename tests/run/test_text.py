"""Figures and foreign text."""

from __future__ import annotations

import pytest

from raypd.run import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "$0.00"), (0.00002, "$0.00002"), (0.0123, "$0.012"), (0.67, "$0.67"), (12.3456, "$12.35"),
     (9999.99, "$9,999.99"), (597_000.4, "$597,000"), (-3.5, "-$3.50")],
)  # fmt: skip
def test_money(value, shown):
    assert text.usd(value) == shown


@pytest.mark.parametrize(
    ("part", "whole", "shown"),
    [(0, 10, "0%"), (1, 100_000, "<0.1%"), (1, 40, "2.5%"), (1, 3, "33%"), (99_999, 100_000, ">99.9%"), (5, 5, "100%"),
     (1, 0, text.NONE)],
)  # fmt: skip
def test_a_share_never_hides_a_rest(part, whole, shown):
    assert text.share(part, whole) == shown


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
def test_durations(seconds, shown):
    assert text.duration(seconds) == shown


def test_foreign_text_is_made_visible_and_bounded():
    assert text.clean("a\0b\x1b[31m\u202ec\td\n") == "a\\u0000b\\u001b[31m\\u202ec\td\n"
    assert text.clean("x" * 20, 5) == "xxxxx… (20 characters)"
    assert text.clean("e" + "\u0301" * 50) == "e" + "\u0301" * 4
    assert text.clean("漢字 عربى é 👩‍👧") == "漢字 عربى é 👩‍👧"
