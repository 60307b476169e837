"""One of several given texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raypd.decoding import Automaton, OneOf, TransitionTable, one_of
from raypd.schema.names import PLAIN, fits_json
from raypd.schema.reading import as_text, dumps
from raypd.schema.record import literal
from raypd.schema.slots import as_bytes
from raypd.schema.types.base import LabelError, Tree, ValueType

# The limit on one value.
_MAX_CHARACTERS = 1000
# The limit on all values, because each character is a state of the automaton.
_MAX_TOTAL_CHARACTERS = 400_000


class EnumType(ValueType):
    name = "enum"
    keys = frozenset({"values"})

    @classmethod
    def from_values(cls, values: list[Any]) -> Tree | None:
        if not all(isinstance(value, str) for value in values):
            return None
        return {"type": "enum", "values": values}

    def problem(self) -> str | None:
        if not self.attribute.values:
            return "type enum needs `values`"
        return problem_of_values(self.attribute.values)

    def json_schema(self) -> Tree:
        return {"type": "string", "enum": list(self.attribute.values)}

    def column_hint(self) -> str:
        return f"one of: {', '.join(self.attribute.values)}"

    def automaton(self, bare: bool = False) -> Automaton:
        texts = self._quoted_values()
        if self.attribute.nullable:
            texts.append("null")
        return OneOf(texts)

    def table(self) -> TransitionTable:
        return one_of(self._quoted_values())

    def _quoted_values(self) -> list[str]:
        return [as_bytes(f'"{value}"') for value in self.attribute.values]

    def expression(self) -> str:
        return "|".join(literal(f'"{value}"') for value in self.attribute.values)

    def says_null(self, word: str) -> bool:
        # "None" may be one of the values.
        return super().says_null(word) and self.convert(word) is None

    def convert(self, word: str) -> str | None:
        """Return the value that a text is; case counts only if values differ in nothing else."""
        folded = word.casefold()
        alike = [value for value in self.attribute.values if value.casefold() == folded]
        if word in alike:
            return word
        return alike[0] if len(alike) == 1 else None

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.attribute.values

    def label_text(self, value: Any, bare: bool = False) -> str:
        text = as_text(value)
        if text not in self.attribute.values:
            raise LabelError("a label is not one of its values")
        return f" {dumps(text)}"


def problem_of_values(values: Sequence[str]) -> str | None:
    """Return why some values cannot be decoded, or None if they can."""
    if len(set(values)) != len(values):
        return "a value occurs twice"
    longest = max(map(len, values), default=0)
    if longest > _MAX_CHARACTERS:
        return f"an enum value of {longest:,} characters; limit {_MAX_CHARACTERS:,}"
    characters = sum(map(len, values))
    if characters > _MAX_TOTAL_CHARACTERS:
        return f"values of {characters:,} characters; limit {_MAX_TOTAL_CHARACTERS:,}"
    if not all(value and fits_json(value) for value in values):
        return f"enum values are {PLAIN}"
    return None
