"""Numbers; whole numbers are in `integer`."""

from __future__ import annotations

import json
import math
import re
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

from raypd.decoding import Automaton, Number, OrNull, TransitionTable, one_of
from raypd.schema.numbers import NUMBER_PATTERN, read_number
from raypd.schema.reading import CheckedValue, Status
from raypd.schema.record import literal
from raypd.schema.slots import pattern_automaton
from raypd.schema.types.base import LabelError, Tree, ValueType
from raypd.schema.types.enum import problem_of_values

if TYPE_CHECKING:
    import pyarrow as pa

# A number that is one of `values` is followed by one of these: a comma that no digit follows, a
# brace or the end of the line.
_ENDS = (", ", ",\n", ',"', ",}", "}", "\n")


class NumberType(ValueType):
    """A number as documents write it, such as 1,000 or $5."""

    name = "number"
    keys = frozenset({"minimum", "maximum", "values"})
    always_nullable = True
    column_type = "number"
    label_end = "\n"
    example = "7.5"
    # The regular expression of such a number in JSON.
    json_pattern: ClassVar[str] = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"
    python_types: ClassVar[tuple[type, ...]] = (int, float)

    def label_pattern(self) -> str:
        return NUMBER_PATTERN

    @classmethod
    def normalized(cls, keys: Tree) -> Tree:
        """Turn numbers among `values` into their JSON text."""
        values = keys.get("values")
        if not isinstance(values, list):
            return keys
        texts = []
        for value in values:
            if type(value) in (int, float):
                value = json.dumps(value)
            texts.append(value)
        return {**keys, "values": texts}

    @classmethod
    def from_json_schema(cls, schema: Tree) -> Tree | None:
        if schema.get("type") != cls.name:
            return None
        return {"type": cls.name, **bounds(schema, is_integer=cls.name == "integer")}

    @classmethod
    def from_values(cls, values: list[Any]) -> Tree | None:
        types = {type(value) for value in values}
        if float not in types or not types <= {int, float}:
            return None
        return {"type": cls.name, "values": values}

    def problem(self) -> str | None:
        minimum = self.attribute.minimum
        maximum = self.attribute.maximum
        if minimum is not None and maximum is not None and minimum > maximum:
            return f"`minimum` ({minimum:g}) is above `maximum` ({maximum:g})"
        for value in self.attribute.values:
            if not re.fullmatch(self.json_pattern, value):
                return f"value {value!r}: write it as a JSON value of type {self.name}"
        return problem_of_values(self.attribute.values)

    def json_schema(self) -> Tree:
        schema: Tree = {"type": self.name}
        if self.attribute.values:
            schema["enum"] = [json.loads(value) for value in self.attribute.values]
        return schema

    def hint(self) -> str:
        if self.attribute.values:
            return f"one of {', '.join(self.attribute.values)}"
        return ""

    def column_hint(self) -> str:
        return self.hint() or "a number"

    def automaton(self, bare: bool = False) -> Automaton:
        if self.attribute.values:
            return OrNull(self._one_of_some(), self.attribute.nullable)
        return self._any_number()

    def _any_number(self) -> Automaton:
        return Number()

    def _one_of_some(self) -> TransitionTable:
        """Return the automaton of one of `values` and its end, which a complete value may lack."""
        values = self.attribute.values
        table = one_of([value + end for value in values for end in _ENDS])
        complete = set(table.finals)
        for value in values:
            complete.add(reduce(table.next, value, 0))
            complete.add(reduce(table.next, value + ",", 0))
        return TransitionTable(table.table, table.finals, standing=complete)

    def table(self) -> TransitionTable:
        if self.attribute.values:
            return one_of(self.attribute.values)
        return pattern_automaton(self.json_pattern, is_ours=True)

    def expression(self) -> str:
        if self.attribute.values:
            return "|".join(map(literal, self.attribute.values))
        return self.json_pattern

    def read_value(self, value: object, status: Status, text: str) -> CheckedValue:
        if not isinstance(value, str) or not any(map(str.isnumeric, value)):
            return CheckedValue("invalid", None, text)
        if status == "truncated":
            return CheckedValue("truncated", None, text)
        number = read_number(value)
        if number is None:
            return CheckedValue("ambiguous", None, text)
        if not math.isfinite(number):
            return CheckedValue("invalid", None, text)
        return CheckedValue("ok", self.rounded(number), text)

    def rounded(self, number: int | float) -> int | float:
        """Return a number in Python's type for it; an integer type turns 3.0 into 3."""
        return number

    def fits(self, value: Any) -> bool:
        is_number = isinstance(value, self.python_types)
        return is_number and not isinstance(value, bool) and self.allows(value)

    def allows(self, number: float) -> bool:
        """Return whether a number is within the bounds, and one of `values` if there are any."""
        if self.attribute.values and number not in map(float, self.attribute.values):
            return False
        # Comparisons with NaN are false, so NaN fits no bounds.
        low = number if self.attribute.minimum is None else self.attribute.minimum
        high = number if self.attribute.maximum is None else self.attribute.maximum
        return bool(low <= number <= high)

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.float64()

    def stored(self, value: Any) -> int | float:
        return float(value)

    def label_text(self, value: Any, bare: bool = False) -> str:
        if self.attribute.values:
            return super().label_text(value)
        is_number = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        if not is_number or not any(map(str.isdigit, str(value))):
            raise LabelError("a label is not a valid number")
        return f" {value}{self.label_end}"


def bounds(schema: Tree, is_integer: bool) -> Tree:
    """Return `minimum` and `maximum` of a JSON Schema; an exclusive bound becomes the next number.

    Args:
        schema: The schema of a number.
        is_integer: Whether the next number is the next integer.
    """
    lower, above = _bound(schema, "minimum", "exclusiveMinimum")
    upper, below = _bound(schema, "maximum", "exclusiveMaximum")
    if above is not None and is_integer:
        lower.append(math.floor(above) + 1)
    elif above is not None:
        lower.append(math.nextafter(above, math.inf))
    if below is not None and is_integer:
        upper.append(math.ceil(below) - 1)
    elif below is not None:
        upper.append(math.nextafter(below, -math.inf))
    limits: Tree = {}
    if lower:
        limits["minimum"] = max(lower)
    if upper:
        limits["maximum"] = min(upper)
    return limits


def _bound(schema: Tree, keyword: str, exclusive_keyword: str) -> tuple[list[Any], Any]:
    """Return the inclusive bounds of a keyword, a list of at most one, and its exclusive bound."""
    inclusive = schema.get(keyword)
    exclusive = schema.get(exclusive_keyword)
    if exclusive is True:
        # In draft 4, the other keyword makes the bound exclusive.
        return [], inclusive
    if exclusive is False:
        exclusive = None
    if inclusive is None:
        return [], exclusive
    return [inclusive], exclusive
