"""A category as a JSON Schema, for a server that holds an answer to one: all keys, null where there is no value."""

import json
from collections.abc import Sequence
from typing import Any

from raypd.config import FORMATS, Attribute

_TYPES = {"number": "number", "integer": "integer", "boolean": "boolean"}


def record_schema(attributes: Sequence[Attribute]) -> dict[str, Any]:
    """The schema of an answer: an object with the attributes' names as keys, in their order."""
    return {
        "type": "object",
        "properties": {attribute.name: _schema(attribute) for attribute in attributes},
        "required": [attribute.name for attribute in attributes],
        "additionalProperties": False,
    }


def _schema(attribute: Attribute) -> dict[str, Any]:
    schema = _value(attribute)
    if attribute.many:
        schema = {"type": "array", "items": schema}
        if attribute.max_items is not None:
            schema["maxItems"] = attribute.max_items
        if attribute.min_items is not None:
            schema["minItems"] = attribute.min_items
    if not attribute.nullable:
        return schema
    if "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    return {**schema, "type": [schema["type"], "null"]}


def _value(attribute: Attribute) -> dict[str, Any]:
    if attribute.type == "rows":
        return record_schema(attribute.columns)
    schema: dict[str, Any] = {"type": _TYPES.get(attribute.type, "string")}
    if attribute.values:
        schema["enum"] = [value if attribute.type == "enum" else json.loads(value) for value in attribute.values]
    elif attribute.type in FORMATS:
        schema["format"] = attribute.type
    elif attribute.type == "pattern":
        schema["pattern"] = f"^(?:{attribute.regex})$"
    return schema
