"""What may stand in an attribute's slot, as an automaton; its characters are the bytes of the text,
as latin-1.
"""

import json
from collections.abc import Sequence
from functools import lru_cache, reduce

from transformers import PreTrainedTokenizerBase

from raypd.config import FORMATS, NUMBERS, Attribute, ascii_digits
from raypd.config.patterns import in_json_string, without_anchors
from raypd.decoding.automata import (
    Automaton,
    OneOf,
    TransitionTable,
    intersection,
    joined,
    one_of,
)
from raypd.decoding.value_automata import (
    BARE_TEXT,
    STRING,
    JsonObject,
    JsonString,
    ListOf,
    Number,
    OrNull,
)
from raypd.decoding.vocabulary import Vocabulary
from raypd.models.vocabulary import token_bytes
from raypd.tasks import pattern_table
from raypd.tasks.prompting import encode
from raypd.tasks.sandbox import Unfinished, run_once

# In a slot thousands may be grouped, and a comma that no digit follows, a brace or the line's end
# closes it.
_INTEGER_SLOT = r"-?(0|[1-9][0-9]{0,17}|[1-9][0-9]{0,2}(,[0-9]{3}){1,5})(,[ \n\"}]|[}\n])"
_ENDS = (", ", ",\n", ',"', ",}", "}", "\n")  # of one of some numbers, likewise
# Unrolled: as an alternative under a star the same language takes xgrammar milliseconds a token.
_JSON_STRING = r'"[^"\\\x00-\x1f]*(\\(["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*"'
_JSON_NUMBER = NUMBERS["number"] + r"([eE][+-]?[0-9]+)?"
_PATTERNS = {"text": _JSON_STRING, **NUMBERS}
# Ready in milliseconds.
_OURS = frozenset({_INTEGER_SLOT, _JSON_NUMBER, *_PATTERNS.values(), *FORMATS.values()})


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """A tokenizer's vocabulary as these automata read it."""

    def tokens_of(text: str) -> list[int]:
        return encode(tokenizer, text.encode("latin-1").decode(errors="ignore"), special=False)

    return Vocabulary([token.decode("latin-1") for token in token_bytes(tokenizer)], tokens_of)


def automaton_of(attribute: Attribute, bare: bool = False) -> Automaton:
    """The automaton of an attribute's slot; of a text, `bare`, without quotes.

    Raises ValueError where its pattern cannot be used.
    """
    null = attribute.nullable
    if attribute.many:
        return OrNull(ListOf(_item(attribute), attribute.max_items, attribute.min_items or 0), null)
    if attribute.type == "text":
        return BARE_TEXT if bare else JsonString()
    if attribute.values and attribute.type != "enum":
        numbers = one_of([value + end for value in attribute.values for end in _ENDS])
        whole = {
            reduce(numbers.next, value + end, 0) for value in attribute.values for end in ("", ",")
        }
        return OrNull(
            TransitionTable(numbers.table, numbers.finals, standing=whole | numbers.finals), null
        )
    if attribute.type == "number":
        return Number()
    if attribute.type == "integer":
        table, finals = _edges(_INTEGER_SLOT)
        return OrNull(
            TransitionTable(table, finals, standing=set(range(len(table))) - {0, table[0]["-"]}),
            null,
        )
    if attribute.type in ("boolean", "enum"):
        return OneOf([*map(_as_bytes, _words(attribute)), *["null"] * null])
    return OrNull(_item(attribute), null)


def record_pattern(attributes: Sequence[Attribute]) -> str:
    """What stands behind an object's opening brace and newline, as a regular expression: one member
    a line.
    """
    members = (
        f"{_literal(json.dumps(a.name, ensure_ascii=False))}: {_value_pattern(a)}"
        for a in attributes
    )
    return ",\n".join(members) + "\n\\}"


def _value_pattern(attribute: Attribute) -> str:
    if attribute.type in ("boolean", "enum") or attribute.values:
        item = "|".join(map(_literal, _words(attribute)))
    elif attribute.type in _PATTERNS:
        item = _PATTERNS[attribute.type]
    elif attribute.type == "rows":
        cells = (
            f"{_literal(json.dumps(c.name, ensure_ascii=False))}: {_value_pattern(c)}"
            for c in attribute.columns
        )
        item = rf"\{{{', '.join(cells)}\}}"
    else:
        # A date's own pattern is left to the reader: no expression says both.
        item = f'"({in_json_string(str(attribute.regex))})"'
    if attribute.many:
        fewest, most = max((attribute.min_items or 0) - 1, 0), attribute.max_items
        repeated = f"{{{fewest},{'' if most is None else most - 1}}}"
        item = rf"\[(({item})(, ({item})){repeated}){'' if attribute.min_items else '?'}\]"
    return f"({item}|null)" if attribute.nullable else f"({item})"


def _literal(text: str) -> str:
    return "".join("\\" + char if char in r"\.^$*+?()[]{}|" else char for char in text)


def json_object(pattern: str | None) -> Automaton:
    """A JSON object: one that a pattern describes, or any.

    Raises ValueError where the pattern cannot be used.
    """
    if pattern is None:
        scalars = [TransitionTable(*_edges(_JSON_NUMBER)), one_of(["true", "false", "null"])]
        return JsonObject(TransitionTable(*_edges(_JSON_STRING)), scalars)
    return TransitionTable(*_edges(pattern))


def _item(attribute: Attribute) -> TransitionTable:
    """The automaton of a value that stands in a list, or by itself where its text tells its end."""
    if attribute.type == "text":
        return STRING
    if attribute.type == "rows":
        parts: list[TransitionTable] = []
        for column in attribute.columns:
            key = json.dumps(column.name, ensure_ascii=False)
            parts += [one_of([_as_bytes(f"{', ' if parts else '{'}{key}: ")]), _cell(column)]
        return joined([*parts, one_of(["}"])])
    if attribute.type in ("boolean", "enum") or attribute.values:
        return one_of(list(map(_as_bytes, _words(attribute))))
    if attribute.type in _PATTERNS:
        return TransitionTable(*_edges(_PATTERNS[attribute.type]))
    table = TransitionTable(*_quoted(str(attribute.regex)))
    if attribute.type == "pattern" or not attribute.pattern:
        return table
    return intersection(table, TransitionTable(*_quoted(ascii_digits(attribute.pattern))))


def _cell(column: Attribute) -> TransitionTable:
    """A value in a row, or null."""
    value = _item(column)
    if not column.nullable:
        return value
    null, first = one_of(["null"]), len(value.table)
    after = [{char: state + first for char, state in row.items()} for row in null.table]
    return TransitionTable(
        [{**value.table[0], **after[0]}, *value.table[1:], *after], [*value.finals, first + 4]
    )


def _words(attribute: Attribute) -> list[str]:
    if attribute.type == "boolean":
        return ["true", "false"]
    return (
        [f'"{value}"' for value in attribute.values]
        if attribute.type == "enum"
        else attribute.values
    )


def _as_bytes(text: str) -> str:
    return text.encode().decode("latin-1")


def _quoted(pattern: str) -> tuple[pattern_table.Edges, list[int]]:
    """A JSON string of a pattern's values that have no quote, backslash or control character: all
    need no escape.
    """
    table, finals = _edges(without_anchors(pattern), without='"\\' + "".join(map(chr, range(32))))
    end = len(table) + 1
    moved = [{char: after + 1 for char, after in row.items()} for row in table]
    for state in finals:
        moved[state]['"'] = end
    return [{'"': 1}, *moved, {}], [end]


@lru_cache(64)
def _edges(pattern: str, without: str = "") -> tuple[pattern_table.Edges, list[int]]:
    """(transitions, final states) of a regular expression, as `table_of`.

    Raises ValueError where it cannot be used.
    """
    if pattern in _OURS:
        return pattern_table.table_of(pattern, without)
    try:
        reason, table, finals = run_once(pattern_table.__file__, (pattern, without)) or ("", [], [])
    except Unfinished as unfinished:
        reason, table, finals = str(unfinished), [], []
    if reason:
        raise ValueError(
            f"the pattern {_shown(pattern)} cannot be decoded: {reason.partition('. This may')[0]}"
        )
    if reason is not None:
        advice = (
            "say [0-9A-Za-z] in place of \\w and ., and + with max_length in place of a range "
            "of repetitions"
        )
        raise ValueError(
            f"the pattern {_shown(pattern)} is too large to be ready in a few seconds: {advice}"
        )
    return table, finals


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 200 else f"{pattern[:200]}...")
