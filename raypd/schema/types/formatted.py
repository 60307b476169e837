"""Texts that a regular expression describes, which dates and patterns share."""

from __future__ import annotations

import re
from typing import Any

import regex

from raypd.decoding import TransitionTable
from raypd.schema.patterns import ANYTHING, UnsupportedPattern, in_json_string, whole_text
from raypd.schema.slots import quoted_pattern_automaton
from raypd.schema.types.base import Tree, UnsupportedSchema, ValueType

# The limit on the processor time of one match.
_MATCH_SECONDS = 1.0


class FormattedText(ValueType):
    """A text that matches `regex` from its beginning to its end."""

    # raypd's own expressions are ready in milliseconds; others are prepared within limits.
    regex_is_ours = True

    @property
    def regex(self) -> str:
        """The regular expression of a whole value."""
        raise NotImplementedError

    def hint(self) -> str:
        if not self.attribute.pattern:
            return ""
        return f"it matches {self.attribute.pattern.replace(ANYTHING, '.*')}"

    def json_schema(self) -> Tree:
        return {"type": "string", "pattern": f"^(?:{self.regex})$"}

    def table(self) -> TransitionTable:
        return quoted_pattern_automaton(self.regex, self.regex_is_ours)

    def expression(self) -> str:
        # A pattern in addition to a date's format is checked when the value is read, because no
        # single expression says both.
        return f'"({in_json_string(self.regex)})"'

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and matches(self.regex, value)

    def cannot_write(self, text: str) -> bool:
        # The automaton of a pattern never writes an escape.
        return "\\" in text


def ascii_digits(pattern: str) -> str:
    r"""Return a regular expression in which \d is 0 to 9, as in JSON Schema.

    A pattern that begins with (?u) is returned unchanged.
    """
    if pattern.startswith("(?u)"):
        return pattern
    is_in_class = False

    def replacement(match: re.Match[str]) -> str:
        nonlocal is_in_class
        if match[0] in "[]":
            is_in_class = match[0] == "["
        if match[0] != r"\d":
            return match[0]
        return "0-9" if is_in_class else "[0-9]"

    return re.sub(r"\\.|[\[\]]", replacement, pattern)


def matches(pattern: str, text: str) -> bool:
    r"""Return whether a pattern matches a whole text.

    Python's `re` does not end for (a+)+, and its \w differs from the decoder's.
    """
    try:
        return regex.fullmatch(pattern, text, timeout=_MATCH_SECONDS) is not None
    except TimeoutError:
        return False


def problem_of_pattern(pattern: str) -> str | None:
    try:
        re.compile(pattern)
        regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        return f"the pattern is not a regular expression: {error}"
    return None


def searched(pattern: str) -> str:
    """Return the pattern of a JSON Schema, which is a search, as an expression of the whole text.

    Raises:
        UnsupportedSchema: The pattern cannot be decoded.
    """
    try:
        return whole_text(pattern)
    except UnsupportedPattern as error:
        raise UnsupportedSchema("pattern", str(error)) from None
