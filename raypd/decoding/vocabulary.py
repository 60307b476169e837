"""Finding the tokens of a vocabulary that an automaton can read in a state.

The texts of all tokens are kept sorted. Tokens with a common beginning are then adjacent, so an
automaton that can read only a few characters in a state rules out whole ranges of tokens at once.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain, pairwise

import numpy as np

from raypd.decoding.automata import DEAD, Automaton

# If more characters than this may come next, all tokens are read together, column by column.
_FEW_CHARACTERS = 16
# A state and a character are packed into one number; every Unicode character fits into 21 bits.
_CHARACTER_BITS = 21
_CHARACTER_MASK = (1 << _CHARACTER_BITS) - 1


class Vocabulary:
    """The texts of all token ids.

    Args:
        texts: The bytes of each token, read as latin-1: one character per byte.
        encode: Turns such a text into the token ids that the tokenizer gives it. With None,
            `Grammar.forced` never forces a token.
    """

    def __init__(
        self, texts: Sequence[str], encode: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        self.texts = texts
        self.encode = encode
        nonempty = [token for token, text in enumerate(texts) if text]
        self._order = sorted(nonempty, key=lambda token: texts[token])
        self._sorted = [texts[token] for token in self._order]
        self._ids = np.array(self._order, dtype=np.int64)
        # The concatenated characters of all sorted texts, as numbers, and where each text begins.
        self._starts = np.cumsum([0, *map(len, self._sorted)])
        self._chars = np.fromiter(
            map(ord, chain.from_iterable(self._sorted)), np.int64, self._starts[-1]
        )
        self._by_first_character = self._group_by_first_character()

    def _group_by_first_character(self) -> list[tuple[str, np.ndarray]]:
        """Return (character, rows of the sorted texts that begin with it)."""
        first_chars = self._chars[self._starts[:-1]]
        changes = np.flatnonzero(np.diff(first_chars, prepend=-1)).tolist()
        return [
            (chr(first_chars[begin]), np.arange(begin, end))
            for begin, end in pairwise([*changes, len(first_chars)])
        ]

    def accepted(self, automaton: Automaton, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the tokens that an automaton can read in a state.

        Args:
            automaton: Reads the characters of the tokens.
            state: The state that it is in.

        Returns:
            Token ids in ascending order and the state after each, both of shape [n].
        """
        read: list[tuple[int, int]] = []
        tables: list[np.ndarray] = []
        # Each entry represents the rows [low, high), which agree in their first `depth` characters.
        stack = [(0, len(self._sorted), 0, state)]
        while stack:
            low, high, depth, reached = stack.pop()
            heads = automaton.heads(reached)
            if heads is None or len(heads) > _FEW_CHARACTERS:
                tables += self._read_by_column(automaton, reached, np.arange(low, high), depth)
                continue
            while low < high and len(self._sorted[low]) == depth:
                read.append((self._order[low], reached))
                low += 1
            if low == high:
                continue
            prefix = self._sorted[low][:depth]
            for char in heads:
                begin = bisect_left(self._sorted, prefix + char, low, high)
                end = bisect_left(self._sorted, prefix + chr(ord(char) + 1), begin, high)
                if begin < end:
                    stack.append((begin, end, depth + 1, automaton.next(reached, char)))
        table = np.concatenate([np.array(read, dtype=np.int64).reshape(-1, 2), *tables])
        table = table[table[:, 0].argsort()]
        return table[:, 0], table[:, 1]

    def _read_by_column(
        self, automaton: Automaton, state: int, rows: np.ndarray, depth: int
    ) -> list[np.ndarray]:
        """Read some rows from character `depth` on, one character of all of them at a time.

        Returns:
            Tables [n, 2] of token ids and the states after them.
        """
        if depth == 0:
            readable = [
                group
                for char, group in self._by_first_character
                if automaton.next(state, char) != DEAD
            ]
            rows = np.concatenate([rows[:0], *readable])
        tables: list[np.ndarray] = []
        states = np.full(len(rows), state)
        while len(rows):
            complete = self._starts[rows] + depth == self._starts[rows + 1]
            tables.append(np.column_stack([self._ids[rows[complete]], states[complete]]))
            rows = rows[~complete]
            states = states[~complete]
            # Many rows are in the same state before the same character, so each pair is read only
            # once.
            chars = self._chars[self._starts[rows] + depth]
            pairs, pair_of_row = np.unique(states << _CHARACTER_BITS | chars, return_inverse=True)
            states_after_pairs = [
                automaton.next(pair >> _CHARACTER_BITS, chr(pair & _CHARACTER_MASK))
                for pair in pairs.tolist()
            ]
            states = np.array(states_after_pairs, dtype=np.int64)[pair_of_row]
            rows = rows[states != DEAD]
            states = states[states != DEAD]
            depth += 1
        return tables
