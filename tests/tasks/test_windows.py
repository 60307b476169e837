"""Documents in windows: nothing of the text is left out, and each value comes from the window that was surest."""

import re
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypd.config import Attribute
from raypd.tasks.base import Request
from raypd.tasks.columns import columns_of, record_row, typed_row
from raypd.tasks.extraction import _Body
from raypd.tasks.values import CheckedValue
from raypd.tasks.windows import merged, windows
from tests.runs import run_config
from tests.tasks.test_extraction import TREE, answers, document, make


def encode(text: str) -> list[int]:
    """Up to four letters, or white space before one, are a token: a whole may have fewer than its parts, or more."""
    return [hash(token) for token in re.findall(r"\s?\w{1,4}|\s+|[^\w\s]", text)]


@given(st.text(alphabet="ab .!\n\u3002", max_size=400) | st.text(max_size=80), st.integers(1, 40))
def test_windows_hold_all_of_the_text(text: str, most: int) -> None:
    found, reached = windows(text, encode, most), 0
    for begin, own, tokens in found:
        assert text[begin : begin + len(own)] == own
        assert begin <= reached < begin + len(own)  # nothing between two, and each goes on
        assert len(tokens) <= most
        reached = begin + len(own)
    assert (reached, [begin for begin, *_ in found]) == (len(text), sorted({begin for begin, *_ in found}))


def test_windows_end_with_sentences_and_overlap() -> None:
    found = windows("".join([f"Sentence number {n} is here. " for n in range(60)]), encode, 100)
    assert len(found) > 2
    assert {(own[:8], own[-6:]) for _, own, _ in found} == {("Sentence", "here. ")}
    assert all(second[0] < first[0] + len(first[1]) for first, second in pairwise(found))


def test_the_surest_value_counts_and_lists_are_united() -> None:
    attributes = [Attribute(name="a"), Attribute(name="b"), Attribute(name="c", many=True, max_items=3)]
    of_windows = [[("x", 0.4), (None, 0.9), (["p", "q"], 0.8)], [(None, 0.99), (None, 0.95), (["q", "r", "s"], 0.5)],
                  [("y", 0.6), (None, 0.3), (None, 0.7)]]  # fmt: skip
    found = merged(attributes, [[(CheckedValue("null" if value is None else "ok", value, ""), rating)
                                 for value, rating in own] for own in of_windows])  # fmt: skip
    expected = [(2, "y", 0.6), (1, None, 0.95), (0, ["p", "q", "r"], 0.5)]
    assert [(window, one.value, rating) for window, (one, rating) in found] == expected


def test_a_long_document_is_answered_window_by_window() -> None:
    text = " ".join(f"Part {n} tells of boots of size {n}." for n in range(60))
    task = make(task={"too_long": "windows", "max_document_tokens": 400})
    found = answers(task, [document(0, text), document(1, "short")])
    long, short = found[0].columns, found[1].columns
    assert ({value["window"] for value in short["values"]}, long["truncated"]) == ({None}, False)
    # Each window is answered as it is alone.
    alone = make()
    parts = windows(f"title: {text}", alone._encode, 400)
    assert len(parts) > 4
    alone._bodies = lambda one, category: [_Body(one, *parts[one.index][1:])]
    single = answers(alone, [document(number) for number in range(len(parts))])
    for value in long["values"]:
        (own,) = (one for one in single[value["window"]].columns["values"] if one["name"] == value["name"])
        assert (value["value"], value["status"]) == (own["value"], own["status"])
        # In float32 a product of other sizes rounds otherwise.
        assert value["confidence"] == pytest.approx(own["confidence"], abs=1e-6)


def test_the_span_of_a_value_counts_from_the_beginning_of_the_document() -> None:
    task = make(task={"too_long": "windows", "max_document_tokens": 60})
    text = "A tin. " * 30 + "The tea is Oolong of spring. " + "A tin. " * 30
    asked, category = document(0, text, "tea"), task._categories["tea"]
    bodies = task._bodies(asked, category)
    window = next(number for number, body in enumerate(bodies) if "Oolong" in body.text)
    assert window > 0
    record = task._record(category, [(bodies[window], window, (CheckedValue("ok", "Oolong", ""), 0.9))])
    (value,) = record.columns["values"]
    assert (f"title: {text}"[value["span"]["begin"] : value["span"]["end"]], value["window"]) == ("Oolong", window)
    config = run_config(TREE["task"] | {"too_long": "windows"}, output={"columns": "typed"})
    found = pa.Table.from_pylist([typed_row(record.columns, config)], columns_of(config)).to_pylist()[0]
    assert found[value["name"] + "__window"] == window
    back = {own["name"]: own["window"] for own in record_row({"status": "ok", **found})["values"]}
    assert back[value["name"]] == window


def test_a_window_that_fails_makes_the_document_an_error_row() -> None:
    task = make(task={"too_long": "windows", "max_document_tokens": 100})
    requests = [one for one in task.plan([document(0, "word " * 300)]) if isinstance(one, Request)]
    assert len(requests) > 2
    found = [record for request in requests for record in request.fail("no memory")]
    assert [(record.index, record.error) for record in found] == [(0, f"window 1 of {len(requests)}: no memory")]
