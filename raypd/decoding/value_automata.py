"""Automata of JSON values: text, number, null, lists and objects.

Inside an open text the model is not restricted: it may write anything until the closing character.
"""

from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum, auto
from typing import NamedTuple

from raypd.decoding.automata import DEAD, Automaton, TransitionTable

# The largest number of bytes after the last digit of a number; anything longer is not a unit.
UNIT_BYTES = 24

_NULL_TEXT = "null"
# States of `OrNull`. After the start and a blank, there is one state per letter of null (_NULL + i:
# i + 1 letters were read), and then come the states of the value, offset by _TYPED.
_START = 0
_BLANK = 1
_NULL = 2
_TYPED = _NULL + len(_NULL_TEXT)

_BYTES = [chr(byte) for byte in range(256)]
_CLOSING = {"{": "}", "[": "]"}


def _row(*transitions: tuple[Iterable[str], int]) -> dict[str, int]:
    """Build a row of a transition table from (characters, the state after them).

    If a character is given twice, the later transition counts.
    """
    row: dict[str, int] = {}
    for chars, state in transitions:
        row.update(dict.fromkeys(chars, state))
    return row


class OrNull(Automaton):
    """A value, optionally after a blank, or null, which is determined by its first letter."""

    def __init__(self, value: Automaton, null: bool = True) -> None:
        self.value = value
        self.null = null

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
        if state < _TYPED or self.ended(state):
            return None
        return self.value.heads(state - _TYPED)

    def accepting(self, state: int) -> bool:
        if state < _TYPED:
            return state >= _NULL
        return self.value.accepting(state - _TYPED)

    def completion(self, state: int) -> str | None:
        if _NULL <= state < _TYPED:
            return _NULL_TEXT
        return None

    def open_values(self, state: int) -> Collection[str]:
        if _NULL <= state < _TYPED:
            return [_NULL_TEXT]
        return []

    def ended(self, state: int) -> bool:
        return state >= _TYPED and self.value.ended(state - _TYPED)

    def limited(self, state: int) -> bool:
        return state < _TYPED or self.value.limited(state - _TYPED)


class JsonString(OrNull):
    """A JSON string or null.

    Only its beginning is restricted. It ends at its closing quote or at a newline.
    """

    def __init__(self) -> None:
        begin = {'"': 1}
        inside = _row((_BYTES, 1), ('"\n', 3), ("\\", 2))
        behind_backslash = _row((_BYTES, 1))
        closed: dict[str, int] = {}
        table = [begin, inside, behind_backslash, closed]
        super().__init__(TransitionTable(table, [3], standing=[1, 3], free=[1, 2]))


class Number(OrNull):
    """A number as documents write it, or null; the reader decides later whether it is one number.

    Only its beginning is restricted: marks (`-`, `<`, `$`, ...) and then a digit. After that,
    anything may be copied (groups of digits, a fraction, a range, a unit) until a newline, a brace
    or a comma without a digit after it, but at most UNIT_BYTES after the last digit. A comma that
    is a separate token after a digit takes one more token. A dash after such a comma means no
    cents, as in 1.299,- EUR, and belongs to the number. Quotes are excluded, because an untrained
    model always opens them and then continues with the whole listing.
    """

    def __init__(self) -> None:
        mark, latin_mark, comma, end, tail = range(1, 6)
        digits = ("0123456789", tail)
        # Signs, bounds and currencies outside ASCII are at U+00A0 and at U+2000 and above. Their
        # UTF-8 encoding is \xc2 or \xe2, then bytes from \x80 to \xbf.
        start = _row(("+-.<>=~$\xe2", mark), ("\xc2", latin_mark), digits)
        behind_mark = _row((_BYTES[0x80:0xC0], mark), (" ", mark)) | start
        # The last bytes of the signs for a quarter, a half and three quarters.
        behind_latin_mark = behind_mark | _row(("\xbc\xbd\xbe", tail))
        # After a digit and a comma, two bytes are read when a dash follows.
        behind_comma = _row((_BYTES, end), ("-=\xe2", tail + 2), digits)
        ended: dict[str, int] = {}
        table = [start, behind_mark, behind_latin_mark, behind_comma, ended]
        # State tail + n: n bytes were read after the last digit.
        for count in range(UNIT_BYTES):
            after_comma = end if count else comma
            table.append(_row((_BYTES, tail + count + 1), ("}\n", end), (",", after_comma), digits))
        table.append(_row((_BYTES, end), digits))
        digit_read = range(comma, len(table))
        super().__init__(TransitionTable(table, [end], standing=digit_read, free=digit_read))


_INSIDE_STRING = {*_BYTES} - {'"', "\\", "\n"}
# A JSON string alone. States: before it, inside it, after a backslash, after it.
STRING = TransitionTable(
    [
        {'"': 1},
        {**dict.fromkeys(_INSIDE_STRING, 1), '"': 3, "\\": 2},
        dict.fromkeys(_INSIDE_STRING | {'"', "\\"}, 1),
        {},
    ],
    [3],
    free=[1, 2],
)
# A text without quotes, up to a newline; an empty text is null.
BARE_TEXT = TransitionTable(
    [{**dict.fromkeys(_INSIDE_STRING | {'"', "\\"}, 0), "\n": 1}, {}],
    [1],
    standing=[0, 1],
    free=[0],
)


class _InList(IntEnum):
    """How far a list has been read."""

    START = auto()
    OPENED = auto()
    BEHIND_COMMA = auto()
    BEHIND_BLANK = auto()
    ITEM = auto()
    END = auto()


class _ListState(NamedTuple):
    part: _InList
    values: int = 0  # the number of values so far, up to the limit that counts
    item_state: int = 0


class ListOf(Automaton):
    """A JSON list of `min_items` to `max_items` values.

    If the values are texts, the list may be cut anywhere, and a text may break off.
    """

    def __init__(
        self, item: TransitionTable, max_items: int | None = None, min_items: int = 0
    ) -> None:
        self.item = item
        self.max_items = max_items
        self.min_items = min_items
        self._states = [_ListState(_InList.START)]
        self._numbers = {self._states[0]: 0}

    def _number(self, part: _InList, count: int = 0, item_state: int = 0) -> int:
        """Return the number of a state; a new state is added."""
        # Beyond the last limit that counts, all numbers of values are equivalent.
        counted = min(count, self.max_items or self.min_items)
        key = _ListState(part, counted, item_state)
        if key not in self._numbers:
            self._numbers[key] = len(self._states)
            self._states.append(key)
        return self._numbers[key]

    def next(self, state: int, char: str) -> int:
        part, count, item_state = self._states[state]
        if part == _InList.START:
            return self._number(_InList.OPENED) if char == "[" else DEAD
        if part == _InList.END:
            return state
        if part == _InList.ITEM:
            return self._next_in_item(count, item_state, char)
        if part == _InList.OPENED and char == "]" and not self.min_items:
            return self._number(_InList.END)
        if part == _InList.BEHIND_COMMA and char == " ":
            return self._number(_InList.BEHIND_BLANK, count)
        after = self.item.next(0, char)
        return DEAD if after == DEAD else self._number(_InList.ITEM, count + 1, after)

    def _next_in_item(self, count: int, item_state: int, char: str) -> int:
        after = self.item.next(item_state, char)
        if after != DEAD:
            return self._number(_InList.ITEM, count, after)
        if item_state not in self.item.finals:
            return DEAD
        if char == "]" and count >= self.min_items:
            return self._number(_InList.END)
        if char == "," and (self.max_items is None or count < self.max_items):
            return self._number(_InList.BEHIND_COMMA, count)
        return DEAD

    def accepting(self, state: int) -> bool:
        return self.ended(state) or not self.limited(state)

    def ended(self, state: int) -> bool:
        return self._states[state].part == _InList.END

    def limited(self, state: int) -> bool:
        part, _, item_state = self._states[state]
        return part != _InList.ITEM or self.item.limited(item_state)


class _InObject(IntEnum):
    """How far an object has been read."""

    START = auto()
    OPENED = auto()  # after the brace or bracket that was opened last
    VALUE = auto()  # before a value
    VALUE_BLANK = auto()  # before a value, whose blank was read
    MEMBER = auto()  # before a key
    MEMBER_BLANK = auto()  # before a key, whose blank was read
    SCALAR = auto()
    KEY = auto()
    COLON = auto()  # before a colon
    BEHIND_VALUE = auto()
    END = auto()


class _ObjectState(NamedTuple):
    opened: str  # the braces and brackets that are open, the innermost last
    part: _InObject
    scalar: int = 0  # which of the scalars is read
    scalar_state: int = 0


class JsonObject(Automaton):
    """A JSON object of any depth, with at most one blank after a colon or comma.

    Args:
        text: The automaton of a string.
        scalars: The automata of all other values that contain no values: numbers, true, false,
            null.
    """

    def __init__(self, text: TransitionTable, scalars: Sequence[TransitionTable]) -> None:
        self._keys = [text]
        self._scalars = [text, *scalars]
        self._states = [_ObjectState("", _InObject.START)]
        self._numbers = {self._states[0]: 0}

    def next(self, state: int, char: str) -> int:
        after = self._after(self._states[state], char)
        if after is None:
            return DEAD
        if after not in self._numbers:
            self._numbers[after] = len(self._states)
            self._states.append(after)
        return self._numbers[after]

    def _after(self, state: _ObjectState, char: str) -> _ObjectState | None:
        opened = state.opened
        match state.part:
            case _InObject.START:
                return _ObjectState("{", _InObject.OPENED) if char == "{" else None
            case _InObject.END:
                return None
            case _InObject.SCALAR | _InObject.KEY:
                return self._after_in_scalar(state, char)
            case _InObject.COLON:
                return _ObjectState(opened, _InObject.VALUE) if char == ":" else None
            case _InObject.BEHIND_VALUE:
                return self._after_value(opened, char)
            case _InObject.OPENED if char == _CLOSING[opened[-1]]:
                return self._closed(opened)
            case _InObject.OPENED:
                return self._begun(opened, char, is_key=opened[-1] == "{")
            case _InObject.VALUE if char == " ":
                return _ObjectState(opened, _InObject.VALUE_BLANK)
            case _InObject.MEMBER if char == " ":
                return _ObjectState(opened, _InObject.MEMBER_BLANK)
        is_key = state.part in (_InObject.MEMBER, _InObject.MEMBER_BLANK)
        return self._begun(opened, char, is_key)

    def _begun(self, opened: str, char: str, is_key: bool) -> _ObjectState | None:
        """Return the state after the first character of a key or value."""
        if not is_key and char in _CLOSING:
            return _ObjectState(opened + char, _InObject.OPENED)
        part = _InObject.KEY if is_key else _InObject.SCALAR
        for number, scalar in enumerate(self._keys if is_key else self._scalars):
            after = scalar.next(0, char)
            if after != DEAD:
                return _ObjectState(opened, part, number, after)
        return None

    def _after_in_scalar(self, state: _ObjectState, char: str) -> _ObjectState | None:
        scalar = self._scalars[state.scalar]
        after = scalar.next(state.scalar_state, char)
        if after == DEAD:
            # Only the character after a number shows that it has ended.
            if state.scalar_state in scalar.finals:
                return self._after_value(state.opened, char)
            return None
        if state.part == _InObject.KEY and scalar.ended(after):
            return _ObjectState(state.opened, _InObject.COLON)
        return state._replace(scalar_state=after)

    def _after_value(self, opened: str, char: str) -> _ObjectState | None:
        if char == _CLOSING[opened[-1]]:
            return self._closed(opened)
        if char != ",":
            return None
        in_list = opened[-1] == "["
        return _ObjectState(opened, _InObject.VALUE if in_list else _InObject.MEMBER)

    def _closed(self, opened: str) -> _ObjectState:
        outer = opened[:-1]
        return _ObjectState(outer, _InObject.BEHIND_VALUE if outer else _InObject.END)

    def ended(self, state: int) -> bool:
        return self._states[state].part == _InObject.END
