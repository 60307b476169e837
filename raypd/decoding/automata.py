"""Automata over characters: what an answer slot may contain, described without tokens.

`Grammar` applies an automaton to the tokens of a vocabulary. `value_automata` builds those of JSON
values from the ones here.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

DEAD = -1


class Automaton(Protocol):
    """An automaton that reads a text character by character, starting in state 0."""

    def next(self, state: int, char: str) -> int:
        """Return the state after a character, or DEAD if it cannot be read."""

    def heads(self, state: int) -> Collection[str] | None:
        """Return the characters that can be read, or None if all of them have to be tried."""
        return None

    def accepting(self, state: int) -> bool:
        """Return whether the text read so far is a complete value."""
        return self.ended(state)

    def completion(self, state: int) -> str | None:
        """Return the text of the value if only one value is still possible; otherwise None."""
        return None

    def open_values(self, state: int) -> Collection[str]:
        """Return the values that are still possible; empty if they cannot be listed."""
        return ()

    def ended(self, state: int) -> bool:
        """Return whether the character that closes the value was read."""

    def limited(self, state: int) -> bool:
        """Return whether tokens that the automaton cannot read must be excluded in this state."""
        return True


class TransitionTable(Automaton):
    """An automaton defined by a transition table.

    Args:
        table: For every state, the state after each character that can be read.
        finals: States in which a value is complete. A final state without transitions has read the
            closing character.
        standing: States in which a value that is cut is still valid; `finals` if None.
        free: States in which any token is allowed.
    """

    def __init__(
        self,
        table: Sequence[Mapping[str, int]],
        finals: Collection[int],
        standing: Collection[int] | None = None,
        free: Collection[int] = (),
    ) -> None:
        self.table = table
        self.finals = frozenset(finals)
        self._standing = self.finals if standing is None else frozenset(standing)
        self._free = frozenset(free)

    def next(self, state: int, char: str) -> int:
        return self.table[state].get(char, DEAD)

    def heads(self, state: int) -> Collection[str] | None:
        return self.table[state]

    def accepting(self, state: int) -> bool:
        return state in self._standing

    def ended(self, state: int) -> bool:
        return state in self.finals and not self.table[state]

    def limited(self, state: int) -> bool:
        return state not in self._free


def one_of(texts: Sequence[str]) -> TransitionTable:
    """Build the table of several texts, none of which is a prefix of another."""
    table: list[dict[str, int]] = [{}]
    finals: list[int] = []
    for text in texts:
        state = 0
        for char in text:
            if char not in table[state]:
                table[state][char] = len(table)
                table.append({})
            state = table[state][char]
        finals.append(state)
    return TransitionTable(table, finals)


def joined(parts: Sequence[TransitionTable]) -> TransitionTable:
    """Build the table of texts that consist of one text of each part, in order.

    No part may be able to continue with a character that the next part can begin with.
    """
    table: list[dict[str, int]] = [{}]
    ends = [0]
    for part in parts:
        offset = len(table)
        for row in part.table:
            table.append({char: state + offset for char, state in row.items()})
        for end in ends:
            table[end] |= table[offset]
        ends = [state + offset for state in part.finals]
    return TransitionTable(table, ends)


def intersection(first: TransitionTable, second: TransitionTable) -> TransitionTable:
    """Return the table of the texts that both tables accept, without dead ends.

    Raises:
        ValueError: If no text is accepted by both.
    """
    start = (0, 0)
    pairs = [start]
    numbers = {start: 0}
    table: list[dict[str, int]] = []
    # The list of pairs grows during the iteration.
    for first_state, second_state in pairs:
        row = {}
        second_row = second.table[second_state]
        for char, first_after in first.table[first_state].items():
            if char not in second_row:
                continue
            after = (first_after, second_row[char])
            if after not in numbers:
                numbers[after] = len(pairs)
                pairs.append(after)
            row[char] = numbers[after]
        table.append(row)
    finals = [
        number
        for (first_state, second_state), number in numbers.items()
        if first_state in first.finals and second_state in second.finals
    ]
    sources: list[list[int]] = [[] for _ in table]
    for state, row in enumerate(table):
        for after_state in row.values():
            sources[after_state].append(state)
    live = set(finals)
    front = list(finals)
    while front:
        for source in sources[front.pop()]:
            if source not in live:
                live.add(source)
                front.append(source)
    if 0 not in live:
        raise ValueError("no text matches both the format and the pattern")
    return TransitionTable(
        [{char: after for char, after in row.items() if after in live} for row in table], finals
    )


class Choice(TransitionTable):
    """One of several texts, chosen as soon as it is unambiguous, with nothing after it.

    A token that starts with a whole text but continues differently is rejected: "All" is not "A".
    """

    def __init__(self, texts: Sequence[str]) -> None:
        # Some vocabularies encode the blank before a word as a separate token.
        forms = [*texts, *(" " + text for text in texts)]
        trie = one_of(forms)
        table = list(trie.table)
        for state in trie.finals:
            table[state] = {}
        super().__init__(table, trie.finals)
        # For every state, the texts that can still follow.
        self._possible: list[set[str]] = [set() for _ in table]
        for text, form in zip([*texts, *texts], forms, strict=True):
            for state in accumulate(form, trie.next, initial=0):
                self._possible[state].add(text)

    def accepting(self, state: int) -> bool:
        return self.completion(state) is not None

    def completion(self, state: int) -> str | None:
        if len(self._possible[state]) > 1:
            return None
        return next(iter(self._possible[state]))

    def open_values(self, state: int) -> Collection[str]:
        return self._possible[state]


class OneOf(Choice):
    """One of several JSON texts, whatever follows it in its last token.

    The texts are an enum's quoted values, true and false, or null.
    """

    def next(self, state: int, char: str) -> int:
        if self.ended(state):
            return state
        return super().next(state, char)

    def heads(self, state: int) -> Collection[str] | None:
        if self.ended(state):
            return None
        return super().heads(state)
