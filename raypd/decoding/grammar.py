"""What an answer slot may contain, token by token: an automaton applied to a vocabulary.

A slot knows when its value is complete (a closing quote, a newline, or only one possible
completion, which is not decoded) and which tokens may come next. The automata are in `automata` and
`value_automata`.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial, reduce
from heapq import heappop, heappush

import numpy as np

from raypd.decoding.automata import DEAD, Automaton
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.value_text import value_text
from raypd.decoding.vocabulary import Vocabulary

UNREACHABLE = 1_000_000
# The number of sets of allowed tokens that are cached, with their masks on a GPU.
_MAX_SETS = 1024


class Grammar:
    """An automaton over the tokens of a vocabulary.

    Results are cached per state, so that a decoding step costs only a lookup.
    """

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self.automaton = automaton
        self.vocabulary = vocabulary
        self.advance = cache(self._advance)
        self.done = cache(self._done)
        self._limited = cache(automaton.limited)
        self._edges = cache(partial(vocabulary.accepted, automaton))
        self._readable = cache(self._readable_tokens)
        self._forced = cache(self._forced_tokens)
        self._allowed: dict[tuple[int, int | None], AllowedTokens] = {}
        self._distances: dict[int, int] = {}

    def _advance(self, state: int, token: int) -> int:
        """Return the state after a token; DEAD if it cannot be read (where nothing is limited)."""
        # A token without text is an end token: it ends a value as a newline does.
        for char in self.vocabulary.texts[token] or "\n":
            if state == DEAD:
                return DEAD
            state = self.automaton.next(state, char)
        return state

    def _done(self, state: int) -> bool:
        return (
            state == DEAD
            or self.automaton.ended(state)
            or self.automaton.completion(state) is not None
        )

    def completion(self, state: int) -> str | None:
        """Return the JSON text of the value if the state alone determines it; otherwise None."""
        if state == DEAD:
            return None
        return self.automaton.completion(state)

    # -------------------------------------------------------------------------- the next token

    def allowed(self, state: int, remaining: int | None) -> AllowedTokens | None:
        """Return the tokens that may come next.

        Args:
            state: The state after the tokens decoded so far.
            remaining: The number of tokens that may still come, including this one; the value must
                be valid after the last of them. With None the value may be cut.

        Returns:
            The allowed tokens; None if all are allowed.
        """
        if not self._limited(state):
            return None
        if remaining is None:
            key = (state, None)
            if key not in self._allowed:
                self._remember(key, AllowedTokens(self._edges(state)[0]))
            return self._allowed[key]
        tokens, distances, levels = self._readable(state)
        # Tokens fit if the value can be completed with fewer than `remaining` tokens after them.
        level = int(levels.searchsorted(remaining))
        if level == len(levels):
            return tokens
        if (state, level) not in self._allowed:
            self._remember((state, level), tokens.where(distances < remaining))
        return self._allowed[state, level]

    def _remember(self, key: tuple[int, int | None], allowed: AllowedTokens) -> None:
        if len(self._allowed) == _MAX_SETS:
            self._allowed.clear()
        self._allowed[key] = allowed

    def _readable_tokens(self, state: int) -> tuple[AllowedTokens, np.ndarray, np.ndarray]:
        """Return the tokens that can be read in a state, and how far from a value each leaves it.

        Returns:
            The tokens [n], the remaining distance after each [n], and the distinct distances in
            ascending order.
        """
        ids, states_after = self._edges(state)
        states, state_of_token = np.unique(states_after, return_inverse=True)
        distances = np.array([self.distance(after) for after in states.tolist()], dtype=np.int64)
        outcomes = self._outcomes(states_after.tolist())
        return AllowedTokens(ids, outcomes), distances[state_of_token], np.unique(distances)

    def _outcomes(self, states: Sequence[int]) -> np.ndarray | None:
        """Return the first and the last value that are still possible in each state, [states, 2].

        Values are numbered in the order of their texts. Values with a common beginning are
        adjacent, so the possible ones form an interval. A state whose values cannot be listed gets
        its own number; if this applies to all states, the result is None.
        """
        open_values = [self.automaton.open_values(state) for state in states]
        if not any(open_values):
            return None
        ordered = sorted(set().union(*open_values))
        number = {value: i for i, value in enumerate(ordered)}
        intervals = np.zeros((len(states), 2), dtype=np.int64)
        for row, values in enumerate(open_values):
            if values:
                intervals[row] = number[min(values)], number[max(values)]
            else:
                intervals[row] = len(ordered) + row
        return intervals

    # -------------------------------------------------------------------------- forced tokens

    def forced(self, state: int, remaining: int | None) -> list[int]:
        """Return the tokens that must come next, whatever the model predicts.

        They encode the text for which the automaton leaves no choice, as the tokenizer writes it.
        The last one is left to the model if a longer token could take its place.

        Args:
            state: The state after the tokens decoded so far.
            remaining: As for `allowed`.
        """
        if self.vocabulary.encode is None or self.done(state):
            return []
        tokens = self._forced(state)
        if not tokens or remaining is None:
            return tokens
        after = reduce(self.advance, tokens, state)
        fits = len(tokens) + self.distance(after) <= remaining
        return tokens if fits else []

    def _forced_tokens(self, state: int) -> list[int]:
        text = self._forced_text(state)
        if not text:
            return []
        assert self.vocabulary.encode is not None
        tokens = list(self.vocabulary.encode(text))
        # Some tokenizers prepend a blank to a text.
        if not text.startswith("".join(self.vocabulary.texts[token] for token in tokens)):
            return []
        while tokens and not self._is_certain(state, tokens):
            tokens.pop()
        return tokens

    def _forced_text(self, state: int) -> str:
        """Return the text that must follow, until the value may end or continue in two ways."""
        text = ""
        visited = {state}
        while self.automaton.limited(state) and not self.automaton.accepting(state):
            heads = self.automaton.heads(state)
            if heads is None or len(heads) != 1:
                break
            (char,) = heads
            state = self.automaton.next(state, char)
            if state in visited:
                break
            if self.done(state) and not self.automaton.ended(state):
                break
            visited.add(state)
            text += char
        return text

    def _is_certain(self, state: int, tokens: Sequence[int]) -> bool:
        """Return whether no longer token could take the place of the last one."""
        before_last = reduce(self.advance, tokens[:-1], state)
        if self.automaton.ended(self.advance(before_last, tokens[-1])):
            return True
        texts = self.vocabulary.texts
        last = texts[tokens[-1]]
        for token in self._edges(before_last)[0].tolist():
            if len(texts[token]) > len(last) and texts[token].startswith(last):
                return False
        return True

    # -------------------------------------------------------------------------- lengths

    def distance(self, state: int = 0) -> int:
        """Return the smallest number of tokens from a state to a valid value, or UNREACHABLE."""
        if state not in self._distances:
            self._measure(state)
        return self._distances[state]

    def _measure(self, start: int) -> None:
        """Measure the distances of a state and of all states that can follow it.

        It searches backwards from the states in which a value is valid (Dijkstra's algorithm).
        """
        sources: dict[int, list[int]] = {}  # state -> states from which one token leads to it
        reached = {start}
        unread = [start]
        queue: list[tuple[int, int]] = []  # a heap of (distance, state)
        while unread:
            state = unread.pop()
            if self.automaton.accepting(state):
                self._distances[state] = 0
            # The distances of all states after a state of known distance are known as well.
            if state in self._distances:
                heappush(queue, (self._distances[state], state))
                continue
            for after in np.unique(self._edges(state)[1]).tolist():
                sources.setdefault(after, []).append(state)
                if after not in reached:
                    reached.add(after)
                    unread.append(after)
        while queue:
            distance, state = heappop(queue)
            for source in sources.get(state, ()):
                if source not in self._distances:
                    self._distances[source] = distance + 1
                    heappush(queue, (distance + 1, source))
        for state in reached:
            self._distances.setdefault(state, UNREACHABLE)

    def needed(self) -> int:
        """Return the smallest K_max that excludes no value: every value fits in that many tokens.

        If the values cannot be listed (a date, a pattern), it is the number of tokens within which
        every part of the automaton can be reached and left.
        """
        depths: dict[str, int] = {}
        for depth, states in self._states_by_depth():
            for state in states:
                value = self.automaton.completion(state)
                if value is not None:
                    depths.setdefault(value, depth)
                elif self.automaton.ended(state):
                    depths.setdefault(f"state {state}", depth)
                elif not self.automaton.limited(state):
                    # One more token ends it.
                    depths.setdefault("open", depth + 1)
                elif not self.automaton.open_values(state):
                    distance = self.distance(state)
                    if 0 < distance < UNREACHABLE:
                        depths["part"] = max(depths.get("part", 0), depth + distance)
        return max(self.distance(), *depths.values())

    def _states_by_depth(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (tokens read, states first reached with that many tokens), from one token on."""
        reached = {0}
        sources = [0]
        depth = 0
        while sources:
            depth += 1
            after: set[int] = set()
            for source in sources:
                after.update(self._edges(source)[1].tolist())
            states = sorted(after - reached)
            reached.update(states)
            yield depth, states
            sources = [
                state for state in states if self.automaton.limited(state) and not self.done(state)
            ]

    # -------------------------------------------------------------------------- a value's text

    def remainder(self, tokens: Sequence[int]) -> str:
        """Return the text that completes a value after all of its tokens except the last.

        Usually this is the last token's text. It is shorter if that token continues past the value
        (`",`), and longer if the value was determined early or was cut.
        """
        count, value = self._value(tokens)
        return value[len(self._text(tokens[:count])) :]

    def closing(self, tokens: Sequence[int]) -> list[int]:
        """Return `remainder` as token ids: the last token itself if it fits, then the rest."""
        assert self.vocabulary.encode is not None
        remainder = self.remainder(tokens)
        last = self.vocabulary.texts[tokens[-1]]
        closing: list[int] = []
        if last and remainder.startswith(last):
            closing.append(tokens[-1])
            remainder = remainder[len(last) :]
        if remainder:
            closing += self.vocabulary.encode(remainder)
        return closing

    def behind(self, tokens: Sequence[int]) -> int:
        """Count the tokens before the last one that come after the value.

        Such a token is a comma that was read to detect the end of a number.
        """
        count, _ = self._value(tokens)
        return len(tokens) - 1 - count

    def _value(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Return (how many tokens, without the last, are within the value; the value's text)."""
        state = reduce(self.advance, tokens, 0)
        value = value_text(self._text(tokens), self.completion(state), self.automaton)
        count = len(tokens) - 1
        while count and len(self._text(tokens[:count])) > len(value):
            count -= 1
        return count, value

    def _text(self, tokens: Sequence[int]) -> str:
        return "".join(self.vocabulary.texts[token] for token in tokens)


class Bounded:
    """A grammar's rules for a value of at most `limit` tokens, given the tokens decoded so far.

    With a limit of None the value may be cut.
    """

    def __init__(self, grammar: Grammar, limit: int | None) -> None:
        self.grammar = grammar
        self.limit = limit

    def allowed_token_ids(self, tokens: Sequence[int]) -> AllowedTokens | None:
        """Return the tokens that may come next; None: all."""
        return self.grammar.allowed(self._state(tokens), self._remaining(tokens))

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that must come next."""
        return self.grammar.forced(self._state(tokens), self._remaining(tokens))

    def stops(self, tokens: Sequence[int]) -> bool:
        """Return whether the value is complete."""
        return self.grammar.done(self._state(tokens))

    def completion(self, tokens: Sequence[int]) -> str | None:
        """Return the value's JSON text if the tokens determine it; otherwise None."""
        return self.grammar.completion(self._state(tokens))

    def _state(self, tokens: Sequence[int]) -> int:
        return reduce(self.grammar.advance, tokens, 0)

    def _remaining(self, tokens: Sequence[int]) -> int | None:
        if self.limit is None:
            return None
        return self.limit - len(tokens)
