"""A text of any content."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from raypd.decoding import BARE_TEXT, STRING, Automaton, JsonString, TransitionTable
from raypd.schema.reading import CheckedValue, Status, as_text, dumps
from raypd.schema.types.base import LabelError, Tree, ValueType

# xgrammar takes milliseconds per token if the same language is one alternative under a star.
JSON_STRING = r'"[^"\\\x00-\x1f]*(\\(["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*"'
LENGTH_KEYS = frozenset({"min_length", "max_length"})
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class TextType(ValueType):
    """A text, with quotes or, in the slots skeleton, without them.

    A text without quotes has no control characters, because nothing escapes them and not every
    tokenizer can write them. Labels and answers have blanks instead.
    """

    name = "text"
    keys = LENGTH_KEYS
    always_nullable = True

    @classmethod
    def from_json_schema(cls, schema: Tree) -> Tree | None:
        if schema.get("type") != "string" or schema.get("pattern") is not None:
            return None
        return {"type": "text", **lengths(schema)}

    def problem(self) -> str | None:
        return problem_of_lengths(self)

    def automaton(self, bare: bool = False) -> Automaton:
        return BARE_TEXT if bare else JsonString()

    def table(self) -> TransitionTable:
        return STRING

    def expression(self) -> str:
        return JSON_STRING

    def read(self, text: str, closed: bool, bare: bool = False) -> CheckedValue:
        if not bare:
            return super().read(text, closed)
        line = without_controls(text.partition("\n")[0])
        checked = super().read(dumps(line), closed=True)
        if closed or checked.value is None:
            return checked
        return replace(checked, status="truncated")

    def read_value(self, value: object, status: Status, text: str) -> CheckedValue:
        # A text that was cut is still useful, unlike a part of another value.
        return CheckedValue(status, as_text(value).strip(), text)

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and fits_lengths(self, value)

    def null_text(self, bare: bool) -> str:
        return "\n" if bare else super().null_text(bare)

    def label_text(self, value: Any, bare: bool = False) -> str:
        text = as_text(value).strip()
        if bare:
            text = " ".join(without_controls(text).split())
        if not text:
            raise LabelError("a label is empty text; null says that there is no value")
        if bare:
            return f" {text}\n"
        return f" {dumps(text)}"


def without_controls(text: str) -> str:
    """Return a text with blanks instead of control characters, and without blanks at its ends."""
    return _CONTROLS.sub(" ", text).strip()


def lengths(schema: Tree) -> Tree:
    """Return the bounds of a JSON Schema's texts as keys of an attribute."""
    return {"min_length": schema.get("minLength"), "max_length": schema.get("maxLength")}


def problem_of_lengths(value_type: ValueType) -> str | None:
    shortest = value_type.attribute.min_length or 0
    longest = value_type.attribute.max_length
    if longest is not None and shortest > longest:
        return f"`min_length` ({shortest}) is above `max_length` ({longest})"
    return None


def fits_lengths(value_type: ValueType, text: str) -> bool:
    shortest = value_type.attribute.min_length or 0
    longest = value_type.attribute.max_length
    return shortest <= len(text) and (longest is None or len(text) <= longest)
