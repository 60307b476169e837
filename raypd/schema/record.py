"""All attributes of a record: its JSON Schema, and the regular expression of its text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raypd.schema.reading import dumps

if TYPE_CHECKING:
    from raypd.schema.types.base import AttributeKeys

_SPECIAL = r"\.^$*+?()[]{}|"


def record_schema(attributes: Sequence["AttributeKeys"]) -> dict[str, Any]:
    """The JSON Schema of an answer, for a server that enforces it.

    Every attribute is a key, in order; its value may be null where the attribute's may.
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
    """The regular expression of an answer behind its opening brace: a line for each member."""
    return ",\n".join(members(attributes)) + "\n\\}"


def members(attributes: Sequence["AttributeKeys"]) -> list[str]:
    """The regular expression of each attribute's key and value in a JSON object."""
    expressions = []
    for attribute in attributes:
        value = attribute.value_type.expression()
        if attribute.nullable:
            value += "|null"
        expressions.append(f"{literal(dumps(attribute.name))}: ({value})")
    return expressions


def literal(text: str) -> str:
    """A text as a regular expression."""
    return "".join("\\" + char if char in _SPECIAL else char for char in text)
