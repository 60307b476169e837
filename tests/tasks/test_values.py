"""Typed, checked values from decoded text."""

import pytest

from raypd.config import Attribute
from raypd.tasks.values import JsonObjectEnd, check, find_value

TEXT = Attribute(name="a")
NUMBER = Attribute(name="a", type="number")
BOOLEAN = Attribute(name="a", type="boolean")
ENUM = Attribute(name="a", type="enum", values=["red", "Red wine", "größe"])


@pytest.mark.parametrize(("attribute", "text", "status", "value"), [
    (TEXT, ' "Florsheim",\n', "ok", "Florsheim"), (TEXT, ' "15.6\\" screen"', "ok", '15.6" screen'),
    (TEXT, ' "C:\\dir"', "ok", "C:\\dir"),  # \d is no JSON escape: kept as it is written
    (TEXT, ' "caf\\u00e9"', "ok", "café"), (TEXT, ' "cut by the line\n', "ok", "cut by the line"),
    (TEXT, ' "ends with a \\"', "ok", 'ends with a \\"'), (TEXT, " null", "null", None),
    (TEXT, ' "null"', "null", None), (TEXT, ' ""', "null", None), (TEXT, ' "N/A"', "null", None),
    (TEXT, " 42", "ok", "42"), (TEXT, " true,", "ok", "true"), (TEXT, " oops", "invalid", None),
    (TEXT, ' ["a"]', "invalid", None), (TEXT, "", "invalid", None),
    (TEXT, " 7/8,\n", "ok", "7/8"), (TEXT, " 1,000,\n", "ok", "1,000"), (TEXT, " 1.50,\n", "ok", "1.50"),
    (TEXT, " 12 in,\n", "ok", "12 in"),
    (NUMBER, ' "7.5"', "ok", 7.5), (NUMBER, " true", "invalid", None), (NUMBER, " null", "null", None),
    (BOOLEAN, " false", "ok", False), (BOOLEAN, ' "Yes"', "ok", True), (BOOLEAN, ' "maybe"', "invalid", None),
    (ENUM, ' "RED"', "ok", "red"), (ENUM, ' "red wine"', "ok", "Red wine"), (ENUM, ' "größe"', "ok", "größe"),
    (ENUM, ' "blue"', "invalid", None)])  # fmt: skip
def test_check(attribute, text, status, value):
    checked = check(attribute, text)
    assert (checked.status, checked.value, type(checked.value)) == (status, value, type(value))


def test_a_text_that_was_cut_is_kept_and_a_number_is_no_value():
    checked = check(TEXT, ' "a very long', closed=False)
    assert (checked.status, checked.value) == ("truncated", "a very long")
    for text in (" 12", ' "1,0', ' "12 k', " 1,", " 7"):
        checked = check(NUMBER, text, closed=False)
        assert (checked.status, checked.value, checked.raw) == ("truncated", None, text)


@pytest.mark.parametrize(("text", "name", "found"), [
    ('"a": "x, y", "b": 2}', "a", ('"x, y"', True)), ('"a": "x", "b": 2}', "b", ("2", True)),
    ('"a" : null\n}', "a", ("null", True)), ('"A": 1,', "a", ("1", True)),
    ('"a": 1,000,\n"b": 2', "a", ("1,000", True)), ('"a": 12, 15}', "a", ("12, 15", True)),
    ('"a": 1, "b": 2}', "a", ("1", True)), ('"a": "cut', "a", ('"cut', False)), ('"a": 12', "a", ("12", False)),
    ('"b": 1', "a", None), ('"größe": "xl"', "größe", ('"xl"', True)), ('"a.c": 1', "abc", None),
    ('"model_name": "x"', "Model name", ('"x"', True)), ('"a", "b": 1', "a b", None), ('"C": 1', "C++", None),
])  # fmt: skip
def test_find_value_in_an_autoregressive_answer(text, name, found):
    place = find_value(text, name)
    assert (place if place is None else (text[place[0] : place[1]], place[2])) == found


@pytest.mark.parametrize(("text", "end"), [
    ('"a": 1}', -1), ('"a": "}"', None), ('"a": "\\"}"', None), ('"a": {"b": 1}', None), ('"a": {"b": 1}}', -1),
    ('"a": "not closed\n}', -1), ('"x": "not closed\n"x": 1', '"x":'),
    ('"a": {"b": 1, "b": 2}', None),  # a key of an inner object is none of ours
    ('"a": 1, "x": "a:b", "c": 3, "a": 4, "y": 5', '"a":'),
    ('"a": 1,\n"B": 2,\n"c": 3', "2,\n"),  # the number could go on behind its comma
    ('"b": "x", "a": 2, "c": 3', "2, "), ('"b": "x", "a": 1,000, "c": 3', "1,000, "),
    ('"b": "x", "a": 1,000}', -1), ('"a": 1,000,"b": 3,"c": 4', '3,"'), ('"b": 1, "A": "x", "more": 2', '"x",'),
    ('"b_": 1, "A": "x", "more": 2', '"x",'), ('"c": 1, "c++": 2, "d": 3', None),
    ('"b": 1, "A": "x, y", "more": 2', '"x, y",'), ("\x00", -1)])  # fmt: skip
def test_the_end_of_a_json_object(text, end):
    """`end`: what the answer ends with (the last time it stands there); -1: its last character; None: it goes on."""
    stops, tokens = JsonObjectEnd([chr(i) for i in range(128)], frozenset([0]), ["a", "b"]), [*map(ord, text)]
    stopped = next((n for n in range(1, len(tokens) + 1) if stops(tokens[:n])), None)
    assert stopped == (len(text) if end == -1 else None if end is None else text.rindex(end) + len(end))
