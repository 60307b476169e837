"""Automata of patterns, for the slots of values.

Their characters are the bytes of a text, as latin-1.
"""

from functools import lru_cache

import raypd.schema.pattern_table as pattern_table
from raypd.decoding import TransitionTable
from raypd.schema.patterns import without_anchors
from raypd.schema.separate_process import Unfinished, run_apart

# The characters that a JSON string has to escape.
_ESCAPED = '"\\' + "".join(map(chr, range(32)))
_SHOWN_LETTERS = 200


def as_bytes(text: str) -> str:
    """Return a text in the form that automata read: one character for each byte."""
    return text.encode().decode("latin-1")


def pattern_automaton(pattern: str, is_ours: bool = False) -> TransitionTable:
    """Build the automaton of a regular expression.

    Args:
        pattern: The expression, which matches a whole text.
        is_ours: Whether the pattern belongs to raypd and is ready in milliseconds. Others are
            prepared in a process with limits.

    Raises:
        ValueError: The pattern cannot be decoded, or is too large.
    """
    table, finals = pattern_edges(pattern, is_ours=is_ours)
    return TransitionTable(table, finals)


def quoted_pattern_automaton(pattern: str, is_ours: bool = False) -> TransitionTable:
    """Build the automaton of the JSON strings that need no escape and whose text a pattern matches.

    Args and Raises are those of `pattern_automaton`.
    """
    table, finals = pattern_edges(without_anchors(pattern), without=_ESCAPED, is_ours=is_ours)
    # State 0 is before the opening quote, so all states of the pattern move by one.
    end = len(table) + 1
    quoted = [{'"': 1}]
    for row in table:
        quoted.append({char: after + 1 for char, after in row.items()})
    for state in finals:
        quoted[state + 1]['"'] = end
    quoted.append({})
    return TransitionTable(quoted, [end])


@lru_cache(64)
def pattern_edges(
    pattern: str, without: str = "", is_ours: bool = False
) -> tuple[pattern_table.Edges, list[int]]:
    """Return the transitions and the final states of a regular expression.

    Args:
        pattern: The expression, which matches a whole text.
        without: Characters that no text contains.
        is_ours: As for `pattern_automaton`.

    Raises:
        ValueError: The pattern cannot be decoded, or is too large.
    """
    if is_ours:
        return pattern_table.table_of(pattern, without)
    try:
        answer = run_apart(pattern_table.__file__, (pattern, without))
    except Unfinished as unfinished:
        answer = [str(unfinished), [], []]
    if answer is None or answer[0] == "":
        raise ValueError(
            f"the pattern {_shown(pattern)} takes too long to compile: write [0-9A-Za-z] instead "
            "of \\w and ., and + with max_length instead of a range of repetitions"
        )
    reason, table, finals = answer
    if reason is not None:
        cause = reason.partition(". This may")[0]
        raise ValueError(f"the pattern {_shown(pattern)} cannot be decoded: {cause}")
    return table, finals


def _shown(pattern: str) -> str:
    if len(pattern) > _SHOWN_LETTERS:
        pattern = f"{pattern[:_SHOWN_LETTERS]}..."
    return repr(pattern)
