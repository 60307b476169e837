"""Dates and times of RFC 3339, in the years 1000 to 2999."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Any, ClassVar

from raypd.decoding import TransitionTable, intersection
from raypd.schema.slots import quoted_pattern_automaton
from raypd.schema.types.base import Tree, UnsupportedSchema
from raypd.schema.types.formatted import (
    FormattedText,
    ascii_digits,
    matches,
    problem_of_pattern,
    searched,
)

if TYPE_CHECKING:
    import pyarrow as pa

_HOUR = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_LEAP_YEAR = r"[12][0-9](0[48]|[2468][048]|[13579][26])|(1[26]|2[048])00"
_DAY = r"(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31"
_DATE = rf"([12][0-9]{{3}}-((0[1-9]|1[0-2])-{_DAY})|({_LEAP_YEAR})-02-29)"
# Only a time of day has no offset.
FORMATS = {
    "date": _DATE,
    "time": rf"{_HOUR}:[0-5][0-9]",
    "date-time": rf"{_DATE}T{_HOUR}:[0-5][0-9](Z|[+-]{_HOUR})",
}


class _Moment(FormattedText):
    """A date or time, which may have to match a pattern in addition to its format."""

    keys = frozenset({"pattern"})
    description: ClassVar[str]
    # The possible lengths of its texts, in characters.
    text_lengths: ClassVar[tuple[int, ...]]

    @property
    def regex(self) -> str:
        return FORMATS[self.name]

    def label_pattern(self) -> str:
        return self.regex

    @classmethod
    def from_json_schema(cls, schema: Tree) -> Tree | None:
        if schema.get("type") != "string" or schema.get("format") != cls.name:
            return None
        for length in cls.text_lengths:
            shortest = schema.get("minLength") or 0
            longest = schema.get("maxLength")
            if length < shortest or (longest is not None and length > longest):
                keyword = "minLength" if length < shortest else "maxLength"
                raise UnsupportedSchema(
                    keyword, f"beside format {cls.name}, whose texts have {length} characters"
                )
        pattern = schema.get("pattern")
        if pattern is None:
            return {"type": cls.name}
        return {"type": cls.name, "pattern": searched(pattern)}

    def problem(self) -> str | None:
        if not self.attribute.pattern:
            return None
        return problem_of_pattern(self.attribute.pattern)

    def json_schema(self) -> Tree:
        return {"type": "string", "format": self.name}

    def hint(self) -> str:
        return "; ".join(filter(None, [self.description, super().hint()]))

    def table(self) -> TransitionTable:
        table = super().table()
        if not self.attribute.pattern:
            return table
        return intersection(table, quoted_pattern_automaton(ascii_digits(self.attribute.pattern)))

    def fits(self, value: Any) -> bool:
        if not super().fits(value):
            return False
        pattern = self.attribute.pattern
        return not pattern or matches(ascii_digits(pattern), value)


class DateType(_Moment):
    name = "date"
    description = "a date, as YYYY-MM-DD"
    example = "2026-03-16"
    text_lengths = (10,)
    column_type = "date"

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.date32()

    def stored(self, value: str) -> date:
        return date.fromisoformat(value)


class TimeType(_Moment):
    """A time of day. Its column is text, which Spark and Athena read."""

    name = "time"
    description = "a time of day, as hh:mm:ss"
    example = "18:30:00"
    text_lengths = (8,)


class DateTimeType(_Moment):
    """A date and time with its offset. Its column is text, which keeps the offset."""

    name = "date-time"
    description = "a date and time with its offset, as YYYY-MM-DDThh:mm:ssZ"
    example = "2026-03-16T18:30:00Z"
    text_lengths = (20, 25)
