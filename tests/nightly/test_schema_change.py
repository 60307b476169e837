"""What a changed schema asks for, and rows of old and added values."""

from __future__ import annotations

import json

from raypd.config import Category, RunConfig
from raypd.nightly.schema_change import answers_base, compare, join, only_added

A = {"name": "a", "description": "", "type": "text", "values": []}
B = {"name": "b", "description": "", "type": "number", "values": []}
C = {"name": "c", "description": "", "type": "text", "values": []}


def category(*attributes: dict, description: str = "") -> Category:
    return Category.model_validate({"description": description, "attributes": list(attributes)})


def change(old: dict[str, Category], new: dict[str, Category]):
    return compare({name: c.model_dump(mode="json") for name, c in old.items()}, new)


def test_only_what_was_added_is_extracted() -> None:
    found = change({"x": category(A), "y": category(A)}, {"x": category(A, B, C), "y": category(A)})
    assert {name: [a.name for a in attributes] for name, attributes in found.added.items()} == {"x": ["b", "c"]}
    assert found.anew == set()
    assert found.describe() == "x: b, c"


def test_an_attribute_with_another_description_is_another_attribute() -> None:
    found = change({"x": category(A, B)}, {"x": category({**A, "description": "in cm"}, B)})
    assert [a.description for a in found.added["x"]] == ["in cm"]
    for key, value in (("type", "number"), ("name", "z")):
        assert len(change({"x": category(A, B)}, {"x": category({**A, key: value}, B)}).added["x"]) == 1


def test_order_and_removal_ask_for_nothing() -> None:
    for attributes in ((B, A), (B,)):
        found = change({"x": category(A, B)}, {"x": category(*attributes)})
        assert (found.added, found.anew) == ({}, set())
    assert "nothing to extract" in found.describe()


def test_what_leaves_nothing_of_use_is_extracted_anew() -> None:
    assert change({"x": category(A)}, {"x": category(B)}).anew == {"x"}
    assert change({"x": category(A)}, {"x": category(A, description="other")}).anew == {"x"}
    assert change({"x": category(A)}, {"y": category(A)}).anew == {"x"}  # y had no documents with answers


def run(*attributes: dict, **model: str) -> RunConfig:
    tree = {"input": {"path": "x"}, "output": {"path": "y"}, "model": model or {"name": "fake"}}
    return RunConfig.model_validate({**tree, "task": {"categories": {"x": {"attributes": list(attributes)}}}})


def test_the_base_is_everything_but_the_categories() -> None:
    assert answers_base(run(A)) == answers_base(run(A, B))
    assert answers_base(run(A)) != answers_base(run(A, name="other"))
    assert answers_base(run(A)) != answers_base(
        run(A).model_copy(update={"decoding": run(A).decoding.model_copy(update={"max_value_tokens": 3})})
    )


def test_the_run_of_the_added_attributes_alone() -> None:
    made = only_added(run(A, B), change({"x": category(A)}, {"x": category(A, B)}))
    assert [a.name for a in made.task.categories["x"].attributes] == ["b"]


def row(values: dict[str, str | None], **more: object) -> dict:
    own = {"id": "1", "status": "ok", "error": None, "attempts": 1, "truncated": False}
    listed = [{"name": k, "value": v} for k, v in values.items()]
    return {**own, "record": json.dumps(values) if values else None, "values": listed or None, **more}


def test_one_row_with_old_and_added_values_in_the_order_of_the_schema() -> None:
    attributes = category(C, B, A).attributes
    made = join(row({"a": "1", "gone": "2"}), row({"c": "3", "b": None}, truncated=True, attempts=2), attributes)
    assert list(json.loads(made["record"]).items()) == [("c", "3"), ("b", None), ("a", "1")]
    assert [v["name"] for v in made["values"]] == ["c", "b", "a"]
    assert (made["status"], made["truncated"], made["attempts"]) == ("ok", True, 2)


def test_where_the_added_attributes_failed_the_old_values_stay() -> None:
    made = join(row({"a": "1"}), row({}, status="error", error="too long"), category(A, B).attributes)
    assert (made["status"], made["error"]) == ("error", "added attributes: too long")
    assert json.loads(made["record"]) == {"a": "1", "b": None}


def test_removed_attributes_leave_the_row_without_any_run() -> None:
    made = join(row({"a": "1", "b": "2"}), None, category(B).attributes)
    assert json.loads(made["record"]) == {"b": "2"}
    assert made["status"] == "ok"
