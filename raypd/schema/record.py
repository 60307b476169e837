"""All attributes of a record: its JSON Schema, and the regular expression of its text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raypd.schema.reading import dumps

if TYPE_CHECKING:
    from raypd.schema.types.base import AttributeKeys

_SPECIAL = r"\.^$*+?()[]{}|"


def record_schema(attributes: Sequence["AttributeKeys"]) -> dict[str, Any]:
    """Return the JSON Schema of an answer, for a server that enforces it.

    Every attribute is a key, in order. Its value may be null if the attribute is nullable.
    """
    properties = {}
    for attribute in attributes:
        properties[attribute.name] = _nullable_schema(attribute)
    return {
        "type": "object",
        "properties": properties,
        "required": [attribute.name for attribute in attributes],
        "additionalProperties": False,
    }


def _nullable_schema(attribute: "AttributeKeys") -> dict[str, Any]:
    schema = attribute.value_type.json_schema()
    if not attribute.nullable:
        return schema
    if "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    return {**schema, "type": [schema["type"], "null"]}


def record_pattern(attributes: Sequence["AttributeKeys"]) -> str:
    """Return the regular expression of an answer after its opening brace, one line per member."""
    return ",\n".join(members(attributes)) + "\n\\}"


def members(attributes: Sequence["AttributeKeys"]) -> list[str]:
    """Return the regular expression of each attribute's key and value in a JSON object."""
    expressions = []
    for attribute in attributes:
        value = attribute.value_type.expression()
        if attribute.nullable:
            value += "|null"
        expressions.append(f"{literal(dumps(attribute.name))}: ({value})")
    return expressions


def literal(text: str) -> str:
    """Return the regular expression that matches only this text."""
    return "".join("\\" + char if char in _SPECIAL else char for char in text)
