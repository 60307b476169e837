"""True or false."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raypd.decoding import Automaton, OneOf, TransitionTable, one_of
from raypd.schema.reading import dumps
from raypd.schema.types.base import LabelError, Tree, ValueType

if TYPE_CHECKING:
    import pyarrow as pa

_JSON_VALUES = ["true", "false"]
# A model may also write yes or no.
_MEANINGS = {"true": True, "false": False, "yes": True, "no": False}


class BooleanType(ValueType):
    name = "boolean"
    has_span = False
    column_type = "boolean"
    example = "true or false"

    @classmethod
    def from_json_schema(cls, schema: Tree) -> Tree | None:
        if schema.get("type") != "boolean":
            return None
        return {"type": "boolean"}

    def json_schema(self) -> Tree:
        return {"type": "boolean"}

    def column_hint(self) -> str:
        return "true or false"

    def automaton(self, bare: bool = False) -> Automaton:
        if self.attribute.nullable:
            return OneOf([*_JSON_VALUES, "null"])
        return OneOf(_JSON_VALUES)

    def table(self) -> TransitionTable:
        return one_of(_JSON_VALUES)

    def expression(self) -> str:
        return "|".join(_JSON_VALUES)

    def convert(self, word: str) -> bool | None:
        return _MEANINGS.get(word.casefold())

    def fits(self, value: Any) -> bool:
        return isinstance(value, bool)

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.bool_()

    def label_text(self, value: Any, bare: bool = False) -> str:
        if not isinstance(value, bool):
            raise LabelError("a label is not true, false or null")
        return f" {dumps(value)}\n"
