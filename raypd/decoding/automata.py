"""Automata of typed values beside those in `grammar`: tables that are put together, lists, any JSON
object.
"""

from collections.abc import Sequence

from raypd.decoding.grammar import DEAD, Automaton, TransitionTable

# Places in a list; _NEXT: behind a comma, _BEGIN: and its blank.
_OPEN, _FIRST, _NEXT, _BEGIN, _ITEM, _END = range(6)
# Places in an object: before it, behind an opening brace, at a value or a member (+ 1: its blank
# was read), ...
_OBJECT, _INSIDE, _VALUE, _, _MEMBER, _, _SCALAR, _KEY, _COLON, _BEHIND, _OVER = range(11)
_CLOSING = {"{": "}", "[": "]"}


def joined(parts: Sequence[TransitionTable]) -> TransitionTable:
    """The table of one text of each part in turn, none of which goes on as the next begins."""
    table: list[dict[str, int]] = [{}]
    ends = [0]
    for part in parts:
        first = len(table)
        table += [{char: after + first for char, after in row.items()} for row in part.table]
        for end in ends:
            table[end] |= table[first]
        ends = [first + state for state in part.finals]
    return TransitionTable(table, ends)


def intersection(first: TransitionTable, second: TransitionTable) -> TransitionTable:
    """The table of the texts that two tables accept. States that lead to none of them are left out.

    Raises ValueError where no text is accepted by both.
    """
    start = (0, 0)
    pairs = [start]
    numbers = {start: 0}
    table: list[dict[str, int]] = []
    # The list of pairs grows while it is read.
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


_OTHER = {chr(byte) for byte in range(256)} - {'"', "\\", "\n"}
# A JSON string: once it is open, its model is not limited. States: before it, inside, behind a
# backslash, behind it.
STRING = TransitionTable(
    [
        {'"': 1},
        {**dict.fromkeys(_OTHER, 1), '"': 3, "\\": 2},
        dict.fromkeys(_OTHER | {'"', "\\"}, 1),
        {},
    ],
    [3],
    free=[1, 2],
)
# A text without quotes, up to a newline; an empty one is null.
BARE_TEXT = TransitionTable(
    [{**dict.fromkeys(_OTHER | {'"', "\\"}, 0), "\n": 1}, {}], [1], standing=[0, 1], free=[0]
)


class ListOf(Automaton):
    """A JSON list of `fewest` to `most` values.

    Where they are texts it may be cut, or break off where it is none.
    """

    def __init__(self, item: TransitionTable, most: int | None = None, fewest: int = 0) -> None:
        self.item, self.most, self.fewest = item, most, fewest
        # Of every state: the place, values so far (as far as they count), their state.
        self._places = [(_OPEN, 0, 0)]
        self._states = {self._places[0]: 0}

    def _state(self, *place: int) -> int:
        key = (place[0], min(place[1], self.most or self.fewest), place[2])
        if key not in self._states:
            self._states[key] = len(self._places)
            self._places.append(key)
        return self._states[key]

    def next(self, state: int, char: str) -> int:
        place, count, inner = self._places[state]
        if place == _OPEN:
            return self._state(_FIRST, 0, 0) if char == "[" else DEAD
        if place in (_FIRST, _NEXT, _BEGIN):
            if place == _FIRST and char == "]" and not self.fewest:
                return self._state(_END, 0, 0)
            if place == _NEXT and char == " ":
                return self._state(_BEGIN, count, 0)
            after = self.item.next(0, char)
            return DEAD if after == DEAD else self._state(_ITEM, count + 1, after)
        if place == _END:
            return state
        if (after := self.item.next(inner, char)) != DEAD:
            return self._state(_ITEM, count, after)
        if inner in self.item.finals and char == "]" and count >= self.fewest:
            return self._state(_END, 0, 0)
        goes_on = (
            inner in self.item.finals and char == "," and (self.most is None or count < self.most)
        )
        return self._state(_NEXT, count, 0) if goes_on else DEAD

    def accepting(self, state: int) -> bool:
        return self.ended(state) or not self.limited(state)

    def ended(self, state: int) -> bool:
        return self._places[state][0] == _END

    def limited(self, state: int) -> bool:
        place, _, inner = self._places[state]
        return place != _ITEM or self.item.limited(inner)


class JsonObject(Automaton):
    """A JSON object of any depth, at most one blank behind a colon or comma; `scalars`: numbers,
    true, false, null.
    """

    def __init__(self, text: TransitionTable, scalars: Sequence[TransitionTable]) -> None:
        self._scalars = [text, *scalars]
        # Of every state: what is open, the place, which scalar, its state.
        self._places = [("", _OBJECT, 0, 0)]
        self._states = {self._places[0]: 0}

    def next(self, state: int, char: str) -> int:
        key = self._after(*self._places[state], char)
        if key is None:
            return DEAD
        if key not in self._states:
            self._states[key] = len(self._places)
            self._places.append(key)
        return self._states[key]

    def _after(
        self, opened: str, place: int, kind: int, inner: int, char: str
    ) -> tuple[str, int, int, int] | None:
        if place == _OBJECT:
            return ("{", _INSIDE, 0, 0) if char == "{" else None
        if place == _OVER:
            return None
        if place in (_SCALAR, _KEY):
            scalar = self._scalars[kind]
            if (after := scalar.next(inner, char)) != DEAD:
                return (
                    (opened, _COLON, 0, 0)
                    if place == _KEY and scalar.ended(after)
                    else (opened, place, kind, after)
                )
            if inner not in scalar.finals:
                return None
            place = _BEHIND
        if place in (_INSIDE, _BEHIND) and char == _CLOSING[opened[-1]]:
            return opened[:-1], _BEHIND if opened[1:] else _OVER, 0, 0
        if place in (_BEHIND, _COLON):
            if char != (":" if place == _COLON else ","):
                return None
            return opened, _VALUE if place == _COLON or opened[-1] == "[" else _MEMBER, 0, 0
        if place in (_VALUE, _MEMBER) and char == " ":
            return opened, place + 1, 0, 0
        keyed = place in (_MEMBER, _MEMBER + 1) or (place == _INSIDE and opened[-1] == "{")
        if not keyed and char in _CLOSING:
            return opened + char, _INSIDE, 0, 0
        for number, scalar in enumerate(self._scalars[:1] if keyed else self._scalars):
            if (after := scalar.next(0, char)) != DEAD:
                return opened, _KEY if keyed else _SCALAR, number, after
        return None

    def ended(self, state: int) -> bool:
        return self._places[state][1] == _OVER
