"""Whole numbers of 64 bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from raypd.decoding import Automaton, OrNull, TransitionTable
from raypd.schema.numbers import INTEGER_PATTERN
from raypd.schema.slots import pattern_edges
from raypd.schema.types.base import Tree, ValueType
from raypd.schema.types.number import NumberType

if TYPE_CHECKING:
    import pyarrow as pa

# In a slot, thousands may be grouped. A comma that no digit follows, a brace or the end of the line
# closes it.
_SLOT_PATTERN = r"-?(0|[1-9][0-9]{0,17}|[1-9][0-9]{0,2}(,[0-9]{3}){1,5})(,[ \n\"}]|[}\n])"

_LIMIT = 2**63


class IntegerType(NumberType):
    name = "integer"
    always_nullable = False
    column_type = "integer"
    example = "7"
    json_pattern = "-?(0|[1-9][0-9]{0,17})"
    python_types = (int,)

    def label_pattern(self) -> str:
        return INTEGER_PATTERN

    @classmethod
    def from_values(cls, values: list[Any]) -> Tree | None:
        if {type(value) for value in values} != {int}:
            return None
        return {"type": "integer", "values": values}

    def problem(self) -> str | None:
        problem = super().problem()
        if problem is not None:
            return problem
        minimum = self.attribute.minimum
        maximum = self.attribute.maximum
        if minimum is not None and minimum >= _LIMIT:
            return f"`minimum` ({minimum:g}) is above every integer of 64 bits"
        if maximum is not None and maximum < -_LIMIT:
            return f"`maximum` ({maximum:g}) is below every integer of 64 bits"
        if minimum is None or maximum is None or math.ceil(minimum) <= math.floor(maximum):
            return None
        return f"no integer is from {minimum:g} to {maximum:g}"

    def hint(self) -> str:
        return super().hint() or "a whole number"

    def _any_number(self) -> Automaton:
        table, finals = pattern_edges(_SLOT_PATTERN, is_ours=True)
        # A number that is cut before its first digit is not a number.
        without_digit = {0, table[0]["-"]}
        standing = set(range(len(table))) - without_digit
        number = TransitionTable(table, finals, standing=standing)
        return OrNull(number, self.attribute.nullable)

    def rounded(self, number: int | float) -> int | float:
        return int(number) if number == int(number) else number

    def fits(self, value: Any) -> bool:
        return super().fits(value) and -_LIMIT <= value < _LIMIT

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.int64()

    def stored(self, value: Any) -> int | float:
        return int(value)

    def label_text(self, value: Any, bare: bool = False) -> str:
        # The label of a number may keep the document's notation; an integer is written as JSON.
        return ValueType.label_text(self, value)
