"""What may stand in an answer slot: automata over characters, applied to a vocabulary's tokens.

A slot knows when its value is complete (closing quote, newline, or one completion left, not
decoded) and, by its type, the next tokens.
"""

import contextlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial, reduce
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise
from typing import Protocol

import numpy as np

from raypd.decoding.sampling import AllowedTokens

# Up to its closing quote, a newline, or where it was cut.
_STRING = re.compile(r' ?"(?:[^"\\\n]|\\.)*', re.DOTALL)
# Up to a comma that is not within a number, a brace or a newline.
_BARE = re.compile(r"(?:[^,}\n]|(?<=\d),(?=\d))*")
UNIT_BYTES = 24  # most that a number has behind its last digit: what is longer is no unit
DEAD = -1
_FEW = 16  # characters that may come: more are found faster all at once
UNREACHABLE = 1_000_000
_SETS_KEPT = 1024  # of allowed tokens, with their masks on a GPU


class Vocabulary:
    """The texts of all token ids, sorted, so that the tokens an automaton accepts are found by
    descent. `texts`: bytes as latin-1; `encode`: such a text as the tokenizer writes it (None:
    `Grammar.forced` forces nothing).
    """

    def __init__(
        self, texts: Sequence[str], encode: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        self.texts, self.encode = texts, encode
        self._order = sorted((i for i, text in enumerate(texts) if text), key=lambda i: texts[i])
        self._sorted = [texts[i] for i in self._order]
        self._ids = np.array(self._order, dtype=np.int64)
        # Every text's characters and where they begin, in the same order; characters as numbers.
        self._starts = np.cumsum([0, *map(len, self._sorted)])
        self._chars = np.fromiter(
            map(ord, chain.from_iterable(self._sorted)), np.int64, self._starts[-1]
        )
        heads = self._chars[self._starts[:-1]]
        bounds = pairwise([*np.flatnonzero(np.diff(heads, prepend=-1)).tolist(), len(heads)])
        self._heads = [(chr(heads[begin]), np.arange(begin, end)) for begin, end in bounds]

    def accepted(self, automaton: "Automaton", state: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that an automaton can read in a state, in rising order, and the states after them:
        [n] each.
        """
        read: list[tuple[int, int]] = []
        rows: list[np.ndarray] = []
        # Tokens [low, high) agree in their first `depth` characters.
        stack = [(0, len(self._sorted), 0, state)]
        while stack:
            low, high, depth, reached = stack.pop()
            heads = automaton.heads(reached)
            if heads is None or len(heads) > _FEW:
                rows += self._by_column(automaton, reached, np.arange(low, high), depth)
                continue
            while low < high and len(self._sorted[low]) == depth:
                read.append((self._order[low], reached))
                low += 1
            for char in heads if low < high else ():
                begin = bisect_left(self._sorted, self._sorted[low][:depth] + char, low, high)
                end = bisect_left(
                    self._sorted, self._sorted[low][:depth] + chr(ord(char) + 1), begin, high
                )
                if begin < end:
                    stack.append((begin, end, depth + 1, automaton.next(reached, char)))
        table = np.concatenate([np.array(read, dtype=np.int64).reshape(-1, 2), *rows])
        table = table[table[:, 0].argsort()]
        return table[:, 0], table[:, 1]

    def _by_column(
        self, automaton: "Automaton", state: int, places: np.ndarray, depth: int
    ) -> list[np.ndarray]:
        """[n, 2] each, of tokens at these places, character by character of all of them: where most
        can be read.
        """
        if not depth:
            ranges = [some for head, some in self._heads if automaton.next(state, head) != DEAD]
            places = np.concatenate([places[:0], *ranges])
        rows, states = [], np.full(len(places), state)
        while len(places):
            over = self._starts[places] + depth == self._starts[places + 1]
            rows.append(np.column_stack([self._ids[places[over]], states[over]]))
            places, states = places[~over], states[~over]
            steps, which = np.unique(
                states << 21 | self._chars[self._starts[places] + depth], return_inverse=True
            )
            next_states = [
                automaton.next(step >> 21, chr(step & 0x1FFFFF)) for step in steps.tolist()
            ]
            after, depth = np.array(next_states, dtype=np.int64)[which], depth + 1
            places, states = places[after != DEAD], after[after != DEAD]
        return rows


class Automaton(Protocol):
    """Reads characters; state 0 is the start."""

    def next(self, state: int, char: str) -> int:
        """The state after a character, or DEAD."""

    def heads(self, state: int) -> Collection[str] | None:
        """The characters that it can read, where they are few and known; None: each is to be
        tried.
        """
        return None

    def accepting(self, state: int) -> bool:
        """Whether what was read may stand as it is."""
        return self.ended(state)

    def completion(self, state: int) -> str | None:
        """The whole value, once only one is possible."""
        return None

    def open_values(self, state: int) -> Collection[str]:
        """The values that are still possible, where they are few; none where anything may come."""
        return ()

    def ended(self, state: int) -> bool:
        """Whether the closing character was read."""

    def limited(self, state: int) -> bool:
        """Whether tokens that the automaton cannot read must be kept out here."""
        return True


class Grammar:
    """An automaton over the tokens of a vocabulary; states are remembered, so that a step costs a
    look-up.
    """

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self.automaton, self.vocabulary = automaton, vocabulary
        self.advance = cache(self._next)
        self._edges = cache(partial(vocabulary.accepted, automaton))
        self._reads, self._forced = cache(self._read), cache(self._write)
        self._limited, self.done = cache(automaton.limited), cache(self._ended)
        self._allowed: dict[tuple[int, int | None], AllowedTokens] = {}
        self._distances: dict[int, int] = {}

    def _next(self, state: int, token: int) -> int:
        """The state after a token; a token that cannot be read (where nothing is limited) leaves
        DEAD.
        """
        # An end token ends a value as its line would.
        for char in self.vocabulary.texts[token] or "\n":
            state = DEAD if state == DEAD else self.automaton.next(state, char)
        return state

    def allowed(self, state: int, remaining: int | None) -> AllowedTokens | None:
        """What may come next, of which the last must leave a value that can stand; None: all
        tokens. `remaining`: tokens that may still come, this one counted; None: they may end before
        the value does.
        """
        if not self._limited(state):
            return None
        level = None  # of the distances that tokens leave: those below it fit
        if remaining is not None:
            tokens, distances, levels = self._reads(state)
            if (level := int(levels.searchsorted(remaining))) == len(levels):
                return tokens
        if (state, level) not in self._allowed:
            if len(self._allowed) == _SETS_KEPT:
                self._allowed.clear()
            self._allowed[state, level] = (
                AllowedTokens(self._edges(state)[0])
                if level is None
                else tokens.where(distances < remaining)
            )
        return self._allowed[state, level]

    def forced(self, state: int, remaining: int | None) -> list[int]:
        """The tokens that come next whatever the model says: of a text that the automaton leaves no
        choice in, as the tokenizer writes it. The last is left to the model where a longer token
        may stand in its place.
        """
        if self.vocabulary.encode is None or self.done(state):
            return []
        tokens = self._forced(state)
        if tokens and remaining is not None:
            return (
                tokens
                if len(tokens) + self.distance(reduce(self.advance, tokens, state)) <= remaining
                else []
            )
        return tokens

    def _only_text(self, state: int) -> str:
        """What must follow on a state, up to where the value may end or go on in two ways."""
        text, passed = "", {state}
        while self.automaton.limited(state) and not self.automaton.accepting(state):
            heads = self.automaton.heads(state)
            if heads is None or len(heads) != 1:
                break
            (char,) = heads
            state = self.automaton.next(state, char)
            if state in passed or (self.done(state) and not self.automaton.ended(state)):
                break
            passed.add(state)
            text += char
        return text

    def _write(self, state: int) -> list[int]:
        """The tokens of what must follow on a state, without those that others may stand for."""
        assert self.vocabulary.encode is not None
        texts, text = self.vocabulary.texts, self._only_text(state)
        tokens = list(self.vocabulary.encode(text)) if text else []
        # Some tokenizers put a blank before a text.
        if not text.startswith("".join(texts[token] for token in tokens)):
            return []
        while tokens:
            before = reduce(self.advance, tokens[:-1], state)
            last = texts[tokens[-1]]
            longer = (texts[candidate] for candidate in self._edges(before)[0].tolist())
            ended = self.automaton.ended(self.advance(before, tokens[-1]))
            if ended or not any(
                len(candidate) > len(last) and candidate.startswith(last) for candidate in longer
            ):
                break
            tokens.pop()
        return tokens

    def distance(self, state: int = 0) -> int:
        if state not in self._distances:
            self._measure(state)
        return self._distances[state]

    def _measure(self, state: int) -> None:
        """Distances of a state and of all that can come behind it, backwards from where a value can
        stand.
        """
        sources: dict[int, list[int]] = {}  # state -> those from which one token leads to it
        unknown, new = {state}, [state]
        # A heap of (distance, state): what lies behind a known state is known.
        front: list[tuple[int, int]] = []
        while new:
            current = new.pop()
            if self.automaton.accepting(current):
                self._distances[current] = 0
            if current in self._distances:
                heappush(front, (self._distances[current], current))
                continue
            for after in np.unique(self._edges(current)[1]).tolist():
                sources.setdefault(after, []).append(current)
                if after not in unknown:
                    unknown.add(after)
                    new.append(after)
        while front:
            near, current = heappop(front)
            for source in sources.get(current, ()):
                if source not in self._distances:
                    self._distances[source] = near + 1
                    heappush(front, (near + 1, source))
        self._distances.update(
            {current: UNREACHABLE for current in unknown if current not in self._distances}
        )

    def needed(self) -> int:
        """Tokens that every value can be written in: the least K_max that leaves no choice out.

        Of values that are not told one by one (a date, a pattern): tokens in which every part can
        be passed through.
        """
        depths: dict[str, int] = {}
        reached, front, depth = {0}, [0], 0
        while front:
            depth += 1
            front = sorted(
                set().union(*(self._edges(source)[1].tolist() for source in front)) - reached
            )
            reached.update(front)
            for state in front:
                if (value := self.automaton.completion(state)) is not None:
                    depths.setdefault(value, depth)
                elif self.automaton.ended(state):
                    depths.setdefault(str(state), depth)
                elif not self.automaton.limited(state):
                    depths.setdefault("open", depth + 1)  # what ends it
                elif (
                    not self.automaton.open_values(state) and 0 < self.distance(state) < UNREACHABLE
                ):
                    depths["part"] = max(depths.get("part", 0), depth + self.distance(state))
            front = [
                source
                for source in front
                if self.automaton.limited(source) and not self.done(source)
            ]
        return max(self.distance(), *depths.values())

    def rest(self, tokens: Sequence[int]) -> str:
        """What must follow on all tokens of a value but the last for it to stand whole in a text;
        what is `behind` it is gone. As a rule the last one's text; less where that goes on (`",`),
        more for a value clear early, or cut.
        """
        return self._split(tokens)[1]

    def closing(self, tokens: Sequence[int]) -> list[int]:
        """`rest` as ids: the last token itself where it stands there, and what is left to be
        written.
        """
        assert self.vocabulary.encode is not None
        text, last = self.rest(tokens), self.vocabulary.texts[tokens[-1]]
        kept, text = (
            ([tokens[-1]], text[len(last) :]) if last and text.startswith(last) else ([], text)
        )
        return [*kept, *self.vocabulary.encode(text)] if text else kept

    def behind(self, tokens: Sequence[int]) -> int:
        """How many tokens before the last are behind the value: a comma that was read to see the
        end of a number.
        """
        return len(tokens) - 1 - self._split(tokens)[0]

    def _split(self, tokens: Sequence[int]) -> tuple[int, str]:
        """(tokens but the last that are of the value, its text behind them)"""
        texts = [self.vocabulary.texts[token] for token in tokens]
        state, joined = reduce(self.advance, tokens, 0), "".join(texts)
        if (value := self.completion(state)) is not None:
            value = " " + value if joined.startswith(" ") else value
        elif joined.lstrip(" ").startswith("["):
            value = self._whole_list(joined)
        elif string := _STRING.match(joined):
            # Cut within an escape.
            value = string.group() + ('\\\\"' if joined[string.end() :] == "\\" else '"')
        else:
            value = _BARE.match(joined).group()  # type: ignore[union-attr]
        kept = len(tokens) - 1
        while kept and len("".join(texts[:kept])) > len(value):
            kept -= 1
        return kept, value[len("".join(texts[:kept])) :]

    def _whole_list(self, text: str) -> str:
        """What was decoded of a JSON list, up to its end; one that was cut is closed behind its
        last whole part.
        """
        state = end = 0
        while end < len(text) and not self.automaton.ended(state):
            state = self.automaton.next(state, text[end])
            if state == DEAD:
                break
            end += 1
        if state != DEAD and self.automaton.ended(state):
            return text[:end]
        for cut in range(end, 0, -1):
            for closing in ('"]', "]"):
                with contextlib.suppress(ValueError):
                    json.loads(text[:cut] + closing, strict=False)
                    return text[:cut] + closing
        return "[]"

    def _read(self, state: int) -> tuple[AllowedTokens, np.ndarray, np.ndarray]:
        """Tokens that can be read in a state, how far from a value each leaves, and these
        distances, each once.
        """
        ids, after = self._edges(state)
        states, which = np.unique(after, return_inverse=True)
        far = np.array([self.distance(reached) for reached in states.tolist()], dtype=np.int64)
        return AllowedTokens(ids, self._outcomes(after.tolist())), far[which], np.unique(far)

    def _outcomes(self, states: Sequence[int]) -> np.ndarray | None:
        """[states, 2] the first and last value that each leaves open; what may still be anything is
        one of its own (None: all are). Values that begin alike stand side by side in their order,
        so that they are an interval.
        """
        values = [self.automaton.open_values(state) for state in states]
        if not any(values):
            return None
        place = {
            value: i for i, value in enumerate(sorted({value for some in values for value in some}))
        }
        spans = [
            (place[min(some)], place[max(some)]) if some else (i, i)
            for i, some in enumerate(values, len(place))
        ]
        return np.array(spans, dtype=np.int64).reshape(-1, 2)

    def _ended(self, state: int) -> bool:
        return (
            state == DEAD
            or self.automaton.ended(state)
            or self.automaton.completion(state) is not None
        )

    def completion(self, state: int) -> str | None:
        """The value's JSON text where the state alone tells it."""
        return None if state == DEAD else self.automaton.completion(state)


class Bounded:
    """A grammar's rules over the tokens decoded so far: of a value of at most `limit`; None: it may
    be cut.
    """

    def __init__(self, grammar: Grammar, limit: int | None) -> None:
        self.grammar, self.limit = grammar, limit

    def allowed_token_ids(self, tokens: Sequence[int]) -> AllowedTokens | None:
        return self.grammar.allowed(
            self._state(tokens), None if self.limit is None else self.limit - len(tokens)
        )

    def forced(self, tokens: Sequence[int]) -> list[int]:
        return self.grammar.forced(
            self._state(tokens), None if self.limit is None else self.limit - len(tokens)
        )

    def stops(self, tokens: Sequence[int]) -> bool:
        return self.grammar.done(self._state(tokens))

    def completion(self, tokens: Sequence[int]) -> str | None:
        return self.grammar.completion(self._state(tokens))

    def _state(self, tokens: Sequence[int]) -> int:
        return reduce(self.grammar.advance, tokens, 0)


# States: a blank before a value was read (some vocabularies write " 7" as two tokens); _NULL + i: i
# + 1 letters of null
_START, _BLANK, _NULL = range(3)
_NULL_TEXT = "null"
_TYPED = _NULL + len(_NULL_TEXT)  # + state of what may stand in place of null


class TransitionTable(Automaton):
    def __init__(
        self,
        table: Sequence[Mapping[str, int]],  # of every state, character -> the state after it
        # States of a whole value; one without a way on has read its closing character.
        finals: Collection[int],
        # In which it may stand where it is cut; None: `finals`.
        standing: Collection[int] | None = None,
        free: Collection[int] = (),  # in which any token may come
    ) -> None:
        self.table, self.finals, self._free = table, frozenset(finals), frozenset(free)
        self._standing = self.finals if standing is None else frozenset(standing)

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


class OrNull(Automaton):
    """A value, with a blank before it if need be, or (`null`) null, which is clear with its first
    letter.
    """

    def __init__(self, value: Automaton, null: bool = True) -> None:
        self.value, self.null = value, null

    def next(self, state: int, char: str) -> int:
        if state == _TYPED - 1 or self.ended(state):
            return state
        if _NULL <= state < _TYPED:
            return state + 1 if char == _NULL_TEXT[state - _NULL + 1] else DEAD
        if state <= _BLANK and char == " ":
            return _BLANK if state == _START else DEAD
        if state <= _BLANK and char == "n" and self.null:
            return _NULL
        after = self.value.next(max(0, state - _TYPED), char)
        return DEAD if after == DEAD else after + _TYPED

    def heads(self, state: int) -> Collection[str] | None:
        return None if state < _TYPED or self.ended(state) else self.value.heads(state - _TYPED)

    def accepting(self, state: int) -> bool:
        return _NULL <= state < _TYPED or (state >= _TYPED and self.value.accepting(state - _TYPED))

    def completion(self, state: int) -> str | None:
        return _NULL_TEXT if _NULL <= state < _TYPED else None

    def open_values(self, state: int) -> Collection[str]:
        return [_NULL_TEXT] if _NULL <= state < _TYPED else []

    def ended(self, state: int) -> bool:
        return state >= _TYPED and self.value.ended(state - _TYPED)

    def limited(self, state: int) -> bool:
        return state < _TYPED or self.value.limited(state - _TYPED)


def _row(*parts: tuple[Iterable[str], int]) -> dict[str, int]:
    """Characters and the states after them; the later parts hold."""
    return {char: after for chars, after in parts for char in chars}


_ANY = [chr(byte) for byte in range(256)]


class JsonString(OrNull):
    """A JSON string or null.

    Only how it begins is limited; it ends at its closing quote or at a newline.
    """

    def __init__(self) -> None:
        inside = _row((_ANY, 1), ('"\n', 3), ("\\", 2))  # 2: behind a backslash
        super().__init__(
            TransitionTable(
                [{'"': 1}, inside, _row((_ANY, 1)), {}], [3], standing=[1, 3], free=[1, 2]
            )
        )


class Number(OrNull):
    """A number as documents write it, or null; whether it is one number is for its reader to say.

    Only how it begins is limited: marks (`-`, `<`, `$`, ...) and then a digit. Behind that anything
    may be copied, groups of digits, a fraction, a range, a unit, until a newline, a brace or a
    comma that no digit follows; but no more than UNIT_BYTES behind the last digit. A comma that is
    a token of its own behind a digit takes a token more. Quotes are not let in: an untrained model
    always opens them, and then goes on about the whole listing.
    """

    def __init__(self) -> None:
        # Tail + i: i bytes were read behind the last digit.
        mark, latin, comma, end, tail = range(1, 6)
        digits = "0123456789", tail
        # the signs, bounds and currencies that are not ASCII stand from U+00A0 and U+2000 on; these
        # are their bytes
        start = _row(("+-.<>=~$\xe2", mark), ("\xc2", latin), digits)
        marked = _row((_ANY[0x80:0xC0], mark), (" ", mark)) | start
        # The last byte of a quarter, a half, three quarters.
        latins = marked | _row(("\xbc\xbd\xbe", tail))
        rows = [start, marked, latins, _row((_ANY, end), digits), {}]
        for i in range(UNIT_BYTES + 1):
            after = end if i == UNIT_BYTES else tail + i + 1
            rows.append(_row((_ANY, after), ("}\n", end), (",", end if i else comma), digits))
        whole = range(comma, len(rows))
        super().__init__(TransitionTable(rows, [end], standing=whole, free=whole))


def one_of(texts: Sequence[str]) -> TransitionTable:
    """The table of some texts, of which none begins another."""
    table: list[dict[str, int]] = [{}]
    finals = []
    for text in texts:
        state = 0
        for char in text:
            if char not in table[state]:
                table[state][char] = len(table)
                table.append({})
            state = table[state][char]
        finals.append(state)
    return TransitionTable(table, finals)


class Choice(TransitionTable):
    """One of some texts, whichever is told apart first, and nothing behind it: "All" is no token
    for "A".
    """

    def __init__(self, texts: Sequence[str]) -> None:
        forms = [form for text in texts for form in (text, " " + text)]
        trie = one_of(forms)
        super().__init__(
            [{} if state in trie.finals else row for state, row in enumerate(trie.table)],
            trie.finals,
        )
        # Of every state, the texts that begin so.
        self._below: list[set[str]] = [set() for _ in self.table]
        for number, form in enumerate(forms):
            for state in accumulate(form, trie.next, initial=0):
                self._below[state].add(texts[number // 2])

    def accepting(self, state: int) -> bool:
        return self.completion(state) is not None

    def completion(self, state: int) -> str | None:
        return next(iter(self._below[state])) if len(self._below[state]) == 1 else None

    def open_values(self, state: int) -> Collection[str]:
        return self._below[state]


class OneOf(Choice):
    """One of some JSON texts (an enum's quoted values, true and false, null), and whatever a token
    has behind it.
    """

    def next(self, state: int, char: str) -> int:
        return state if self.ended(state) else super().next(state, char)

    def heads(self, state: int) -> Collection[str] | None:
        return None if self.ended(state) else super().heads(state)
