"""The picture of a terminal holds what a command printed."""

from xml.etree import ElementTree

from benchmarks.terminal import COLUMNS, picture


def test_the_picture_holds_every_line_as_far_as_the_terminal_is_wide() -> None:
    printed = f"a <b> & c\n\x1b[31mred\x1b[0m\n{'x' * 2 * COLUMNS}"
    svg = ElementTree.fromstring(picture(printed))
    shown = "".join(svg.itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "a <b> & c" in shown
    assert "red" in shown
    assert "\x1b" not in shown
    assert "x" * (COLUMNS - 1) in shown
    assert "x" * COLUMNS not in shown
