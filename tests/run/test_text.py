"""Figures and foreign text."""

from raypd.run import text


def test_money_shares_and_durations():
    """No rounding hides a rest."""
    assert (text.cost(0.0), text.cost(0.67)) == ("no price", "$0.67")
    money = {0: "$0.00", 0.00002: "$0.00002", 0.0123: "$0.012", 0.67: "$0.67", 12.3456: "$12.35", 9999.99: "$9,999.99"}
    money |= {597_000.4: "$597,000", -3.5: "-$3.50"}
    assert {value: text.usd(value) for value in money} == money
    shares = {(0, 10): "0%", (1, 100_000): "<0.1%", (1, 40): "2.5%", (1, 3): "33%", (99_999, 100_000): ">99.9%"}
    shares |= {(5, 5): "100%", (1, 0): text.NONE}
    assert {value: text.share(*value) for value in shares} == shares
    times = {0.04: "0.0 s", 42.4: "42 s", 59.9: "1 min 0 s", 192: "3 min 12 s", 18_240: "5 h 4 min", 183_600: "2 d 3 h"}
    assert {value: text.duration(value) for value in times} == times


def test_foreign_text_is_made_visible_and_bounded():
    assert text.clean("a\0b\x1b[31m\u202ec\td\n") == "a\\u0000b\\u001b[31m\\u202ec\td\n"
    assert text.clean("x" * 20, 5) == "xxxxx… (20 characters)"
    assert text.clean("e" + "\u0301" * 50) == "e" + "\u0301" * 4
    assert text.clean("漢字 عربى é 👩‍👧") == "漢字 عربى é 👩‍👧"
