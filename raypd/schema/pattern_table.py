"""Turns a regular expression into a table of states. A user's pattern is turned in a separate
process, which runs this file.

Preparing a pattern can take minutes and all memory, because nested repetitions multiply.
"""

import contextlib
import json
import sys
from typing import Any

import outlines_core

CPU_SECONDS, _MEMORY = 10, 1 << 30
MOST_EDGES = 25_000
# The index has one token in addition to the bytes.
_END_TOKEN = 256
# A character that no value contains.
_END = 1
Edges = list[dict[str, int]]


def table_of(pattern: str, without: str = "") -> tuple[Edges, list[int]]:
    """Return the transitions and the final states of a pattern.

    They are those of its index over a vocabulary of all single bytes except the ones in `without`.
    The pattern is followed by an end character, because a final state of the index leads
    only to the end token.

    Raises:
        ValueError: The pattern is invalid, or has no end.
    """
    tokens: dict[str | bytes, list[int]] = {
        bytes([b]): [b] for b in range(256) if chr(b) not in without or b == _END
    }
    index = outlines_core.Index(
        f"({pattern}){chr(_END)}", outlines_core.Vocabulary(_END_TOKEN, tokens)
    )
    transitions, ended = index.get_transitions(), set(index.get_final_states())
    table: Edges = []
    finals = []
    number = {index.get_initial_state(): 0}
    states = list(number)
    # The loop appends to the list that it iterates over.
    for state in states:
        edges = transitions.get(state, {})
        row = {chr(b): after for b, after in edges.items() if b not in (_END, _END_TOKEN)}
        for after in row.values():
            if after not in number:
                number[after] = len(states)
                states.append(after)
        table.append({char: number[after] for char, after in row.items()})
        finals += [number[state]] * (edges.get(_END) in ended)
    return table, finals


def _main() -> None:
    # This module does not exist on every system.
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    # macOS has no such limit.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    request = json.load(sys.stdin)
    try:
        table, finals = table_of(*request)
        large = sum(map(len, table)) > MOST_EDGES
        answer: list[Any] = [None, table, finals]
    except ValueError as error:
        large, answer = False, [str(error), [], []]
    json.dump(["", [], []] if large else answer, sys.stdout)


if __name__ == "__main__":
    _main()
