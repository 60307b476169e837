"""Gold values as the text that decoding would have written, and the teacher that answers with their tokens."""

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

from raypd.config import NUMBERS, Attribute
from raypd.decoding.program import Feed
from raypd.tasks.columns import value_in
from raypd.tasks.values import CheckedValue, check
from raypd.training.example import Skip, Teacher


def value_text(attribute: Attribute, value: object) -> str:
    """A gold value as it stands behind its key, up to the closing quote or newline. Raises Skip for another type."""
    if value is None:
        if not attribute.nullable:
            raise Skip(f"attribute {attribute.name!r}: it is required, and has no label")
        return " null\n"
    if attribute.type == "rows" and isinstance(value, list) and all(isinstance(row, dict) for row in value):
        value = [{column.name: row.get(column.name) for column in attribute.columns} for row in value]
    exact = attribute.many or attribute.regex is not None or attribute.type == "integer"
    if exact or (attribute.type == "number" and attribute.values):
        text = json.dumps(value, ensure_ascii=False)
        if check(attribute, text) != CheckedValue("ok", value, text) or (attribute.regex is not None and "\\" in text):
            raise Skip(f"attribute {attribute.name!r}: a label is no {'list of ' * attribute.many}{attribute.type}")
        return f" {text}\n" if attribute.type in NUMBERS and not attribute.many else f" {text}"
    if attribute.type == "number":
        if isinstance(value, bool) or not isinstance(value, (int, float, str)) or not any(map(str.isdigit, str(value))):
            raise Skip(f"attribute {attribute.name!r}: a label is no number")
        return f" {value}\n"
    if attribute.type == "boolean":
        if not isinstance(value, bool):
            raise Skip(f"attribute {attribute.name!r}: a label is not true, false or null")
        return f" {json.dumps(value)}\n"
    text = value if isinstance(value, str) else json.dumps(value)
    if attribute.type == "enum" and text not in attribute.values:
        raise Skip(f"attribute {attribute.name!r}: a label is none of its values")
    if not text.strip():
        raise Skip(f"attribute {attribute.name!r}: a label is empty text; null says that there is no value")
    return f" {json.dumps(text.strip(), ensure_ascii=False)}"


def record_text(attributes: Sequence[Attribute], target: dict[str, Any]) -> str:
    """The whole answer behind its opening brace and newline, as an autoregressive model is to write it."""
    names = (json.dumps(attribute.name, ensure_ascii=False) for attribute in attributes)
    values = (value_text(attribute, value_in(target, attribute)).rstrip() for attribute in attributes)
    return ",\n".join(f"{name}:{value}" for name, value in zip(names, values, strict=True)) + "\n}"


def slots_teacher(gold: Sequence[Sequence[int]]) -> Teacher:
    """Answers the slots of `hyper_parallel` with their values' tokens. Its first feed asks at the end of every slot;
    the k-th behind it feeds the last token of every open slot, whose place is k tokens behind the slot's end."""
    numbers: dict[int, int] = {}  # position of a slot's end -> number of the slot
    feeds = count()

    def teacher(feed: Feed) -> list[int]:
        k = next(feeds)
        ends = [feed.positions[index] - k for index in feed.sample_at]
        if k == 0:
            numbers.update(zip(ends, count()))
        return [gold[numbers[end]][k] for end in ends]

    return teacher
