"""A text that matches a pattern from the configuration."""

from __future__ import annotations

from raypd.schema.types.base import Tree, UnsupportedSchema
from raypd.schema.types.date import FORMATS
from raypd.schema.types.formatted import (
    FormattedText,
    ascii_digits,
    matches,
    problem_of_pattern,
    searched,
)
from raypd.schema.types.text import LENGTH_KEYS, fits_lengths, lengths, problem_of_lengths

_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class PatternType(FormattedText):
    name = "pattern"
    keys = LENGTH_KEYS | {"pattern"}
    regex_is_ours = False

    @property
    def regex(self) -> str:
        return ascii_digits(self.attribute.pattern or "")

    @classmethod
    def from_json_schema(cls, schema: Tree) -> Tree | None:
        if schema.get("type") != "string":
            return None
        pattern = schema.get("pattern")
        if schema.get("format") == "uuid":
            if pattern is not None:
                raise UnsupportedSchema(
                    "pattern", "beside format uuid it cannot be enforced; keep one"
                )
            return {"type": "pattern", "pattern": _UUID, **lengths(schema)}
        if pattern is None or schema.get("format") in FORMATS:
            return None
        return {"type": "pattern", "pattern": searched(pattern), **lengths(schema)}

    def problem(self) -> str | None:
        if not self.attribute.pattern:
            return "type pattern needs `pattern`"
        return problem_of_lengths(self) or problem_of_pattern(self.attribute.pattern)

    def says_null(self, word: str) -> bool:
        if not super().says_null(word):
            return False
        # A pattern without null may match a word that otherwise means null.
        return not (self.attribute.required and self.fits(word))

    def fits(self, value: object) -> bool:
        return isinstance(value, str) and matches(self.regex, value) and fits_lengths(self, value)
