"""What may stand in an attribute's slot, as an automaton; its characters are the bytes of the text, as latin-1."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

import outlines_core
from outlines_core import Index
from transformers import PreTrainedTokenizerBase

from raypd.config import Attribute
from raypd.decoding.automata import STRING, JsonObject, ListOf, OrNull, TransitionTable, one_of
from raypd.decoding.grammar import Automaton, JsonString, Number, OneOf, Vocabulary
from raypd.models.vocabulary import token_bytes
from raypd.tasks.prompting import encode

_END_TOKEN = 256  # the index has one beside the bytes
_END = 1  # a character that no value has
_MOST_EDGES = 25_000
_INTEGER = "-?(0|[1-9][0-9]{0,17})"
# In a slot thousands may be grouped, and a comma that no digit follows, a brace or the line's end closes it.
_INTEGER_SLOT = r"-?(0|[1-9][0-9]{0,17}|[1-9][0-9]{0,2}(,[0-9]{3}){1,5})(,[ \n\"}]|[}\n])"
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"
# Unrolled: as an alternative under a star the same language takes xgrammar milliseconds a token.
_JSON_STRING = r'"[^"\\\x00-\x1f]*(\\(["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*"'
_JSON_NUMBER = _NUMBER + r"([eE][+-]?[0-9]+)?"
_PATTERNS = {"text": _JSON_STRING, "integer": _INTEGER, "number": _NUMBER}
Edges = list[dict[str, int]]


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """A tokenizer's vocabulary as these automata read it."""

    def tokens_of(text: str) -> list[int]:
        return encode(tokenizer, text.encode("latin-1").decode(errors="ignore"), special=False)

    return Vocabulary([token.decode("latin-1") for token in token_bytes(tokenizer)], tokens_of)


def automaton_of(attribute: Attribute) -> Automaton:
    """The automaton of an attribute's slot. Raises ValueError where its pattern cannot be used."""
    null = not attribute.required
    if attribute.many:
        return OrNull(ListOf(_item(attribute), attribute.max_items), null)
    if attribute.type == "text":
        return JsonString()
    if attribute.type == "number":
        return Number()
    if attribute.type == "integer":
        table, finals = _edges(_INTEGER_SLOT)
        begun = {0, table[0]["-"]}
        return OrNull(TransitionTable(table, finals, standing=set(range(len(table))) - begun), null)
    if attribute.type in ("boolean", "enum"):
        return OneOf([*map(_as_bytes, _words(attribute)), *["null"] * null])
    return OrNull(_item(attribute), null)


def record_pattern(attributes: Sequence[Attribute]) -> str:
    """What stands behind an object's opening brace and newline, as a regular expression: one member a line."""
    members = (f"{_literal(json.dumps(a.name, ensure_ascii=False))}: {_value_pattern(a)}" for a in attributes)
    return ",\n".join(members) + "\n\\}"


def _value_pattern(attribute: Attribute) -> str:
    if attribute.type in _PATTERNS:
        item = _PATTERNS[attribute.type]
    elif attribute.type in ("boolean", "enum"):
        item = "|".join(map(_literal, _words(attribute)))
    else:
        item = f'"({str(attribute.regex).removeprefix("^").removesuffix("$")})"'
    if attribute.many:
        repeated = "*" if attribute.max_items is None else f"{{0,{attribute.max_items - 1}}}"
        item = rf"\[(({item})(, ({item})){repeated})?\]"
    null = not attribute.required or (attribute.type in ("text", "number") and not attribute.many)
    return f"({item}|null)" if null else f"({item})"


def _literal(text: str) -> str:
    return "".join("\\" + char if char in r"\.^$*+?()[]{}|" else char for char in text)


def json_object(pattern: str | None) -> Automaton:
    """A JSON object: one that a pattern describes, or any. Raises ValueError where the pattern cannot be used."""
    if pattern is None:
        scalars = [TransitionTable(*_edges(_JSON_NUMBER)), one_of(["true", "false", "null"])]
        return JsonObject(TransitionTable(*_edges(_JSON_STRING)), scalars)
    return TransitionTable(*_edges(pattern))


def _item(attribute: Attribute) -> TransitionTable:
    """The automaton of a value that stands in a list, or by itself where its text tells its end."""
    if attribute.type == "text":
        return STRING
    if attribute.type in ("boolean", "enum"):
        return one_of(list(map(_as_bytes, _words(attribute))))
    if attribute.type in _PATTERNS:
        return TransitionTable(*_edges(_PATTERNS[attribute.type]))
    return TransitionTable(*_quoted(str(attribute.regex)))


def _words(attribute: Attribute) -> list[str]:
    return ["true", "false"] if attribute.type == "boolean" else [f'"{value}"' for value in attribute.values]


def _as_bytes(text: str) -> str:
    return text.encode().decode("latin-1")


def _quoted(pattern: str) -> tuple[Edges, list[int]]:
    """A JSON string of a pattern's values that have no quote, backslash or control character: all need no escape."""
    bare = pattern.removeprefix("^").removesuffix("$") if not pattern.endswith("\\$") else pattern.removeprefix("^")
    table, finals = _edges(bare, without='"\\' + "".join(map(chr, range(32))))
    end = len(table) + 1
    moved = [{char: after + 1 for char, after in row.items()} for row in table]
    for state in finals:
        moved[state]['"'] = end
    return [{'"': 1}, *moved, {}], [end]


@lru_cache(64)
def _edges(pattern: str, without: str = "") -> tuple[Edges, list[int]]:
    """(transitions, final states) of a regular expression: the index of a vocabulary of single bytes.

    An end stands behind it: out of a final state the index takes no way that is longer than a token.
    """
    tokens: dict[str | bytes, list[int]] = {bytes([b]): [b] for b in range(256) if chr(b) not in without or b == _END}
    try:
        index = Index(f"({pattern}){chr(_END)}", outlines_core.Vocabulary(_END_TOKEN, tokens))
    except ValueError as error:
        reason = str(error).partition(". This may")[0]
        raise ValueError(f"the pattern {pattern!r} cannot be decoded: {reason}") from None
    transitions, ended = index.get_transitions(), set(index.get_final_states())
    table: Edges = []
    finals = []
    number = {index.get_initial_state(): 0}
    states = list(number)
    for state in states:  # grows
        edges = transitions.get(state, {})
        row = {chr(b): after for b, after in edges.items() if b not in (_END, _END_TOKEN)}
        for after in row.values():
            if after not in number:
                number[after] = len(states)
                states.append(after)
        table.append({char: number[after] for char, after in row.items()})
        finals += [number[state]] * (edges.get(_END) in ended)
    if sum(map(len, table)) > _MOST_EDGES:
        raise ValueError(
            f"the pattern {pattern!r} is too large to be ready in a few seconds: say [0-9A-Za-z] in place of "
            "\\w and ., and + with max_length in place of a range of repetitions"
        )
    return table, finals
