"""What a changed schema asks for, and rows of old and added values."""

import json

import pytest

from raypd.config import Category, RunConfig
from raypd.nights.schema_change import compare, join
from tests.runs import extraction, run_config

TYPES = ("text", "number", "text")
A, B, C = ({"name": n, "description": "", "type": t, "values": []} for n, t in zip("abc", TYPES, strict=True))


def config(*attributes) -> RunConfig:
    return run_config(extraction(x=attributes), model="fake")


@pytest.mark.parametrize(("old", "new", "asked"), [
    ({"x": [A], "y": [A]}, {"x": [A, B, C], "y": [A]}, "x: b, c"),
    ({"x": [A, B]}, {"x": [{**A, "description": "in cm"}, B]}, "x: a"),  # another attribute
    ({"x": [A, B]}, {"x": [{**A, "type": "number"}, B]}, "x: a"),
    ({"x": [A, B]}, {"x": [B, A]}, "attributes were removed, and there is nothing to extract"),
    ({"x": [A, B]}, {"x": [B]}, "attributes were removed, and there is nothing to extract"),
    ({"x": [A]}, {"x": [B]}, "x: everything"),
    ({"x": [A]}, {"y": [A]}, "x: everything"),  # y had no documents with answers
])  # fmt: skip
def test_what_is_extracted_after_a_change(old, new, asked: str) -> None:
    before = {name: {"attributes": attributes} for name, attributes in old.items()}
    found = compare(before, {name: Category(attributes=attributes) for name, attributes in new.items()})
    assert found.describe() == asked
    assert compare(before, {"x": Category(attributes=old["x"], description="other")}).anew == set(old)


def row(values: dict[str, str | None], **more: object):
    own = {"id": "1", "status": "ok", "error": None, "attempts": 1, "truncated": False, "category": "x"}
    listed = [{"name": k, "value": v} for k, v in values.items()]
    return {**own, "record": json.dumps(values) if values else None, "values": listed or None, **more}


NEW, FAILED = row({"c": "3", "b": None}, truncated=True, attempts=2), row({}, status="error", error="too long")


@pytest.mark.parametrize(("attributes", "added", "record", "names", "own"), [
    ((C, B, A), NEW, {"c": "3", "b": None, "a": "1"}, "cba", {"status": "ok", "truncated": True, "attempts": 2}),
    ((A, B), FAILED, {"a": "1", "b": None}, "a", {"status": "error", "error": "added attributes: too long"}),
    ((A,), None, {"a": "1"}, "a", {"status": "ok"}),  # removed attributes leave the row without any run
])  # fmt: skip
def test_one_row_with_old_and_added_values_in_the_order_of_the_schema(attributes, added, record, names, own) -> None:
    made = join(row({"a": "1", "gone": "2"}), added, config(*attributes))
    assert list(json.loads(made["record"]).items()) == list(record.items())
    assert [v["name"] for v in made["values"]] == list(names)
    assert own.items() <= made.items()


def test_a_row_of_a_category_that_is_gone_stays() -> None:
    old = row({"a": "1"}, category="gone")
    assert join(old, None, config(A)) == old
