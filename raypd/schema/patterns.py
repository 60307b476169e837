"""Turns patterns of JSON Schema, which are searches, into expressions that match a whole text.

A pattern of JSON Schema (and of pydantic) matches anywhere in a text, but a decoder needs an
expression of the whole text. Python's parser reads the pattern into a small tree. Its anchors are
resolved, its lengths are bounded, and it is written as an expression again: as a plain one, or as
one of the text inside a JSON string.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from re import (  # type: ignore[attr-defined]
    _constants as codes,
    _parser as parser,
)
from typing import Any

# Any text, including line breaks.
ANYTHING = "(?s:.*)"
# The limit on the nodes of a pattern whose lengths are bounded.
_MOST_NODES = 2_000
_SPECIAL = frozenset(r"\.^$*+?()[]{}|")
_SPECIAL_IN_CLASS = frozenset("\\]^-[&~")
# The characters that a JSON string has to escape, as members of a class.
_NOT_IN_JSON = r'"\\\x00-\x1f'
_SHORT_ESCAPES = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", '"': '"', "\\": "\\"}
_CATEGORIES = {
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}
_OPPOSITES = {r"\D": r"\d", r"\S": r"\s", r"\W": r"\w"}
_UNSUPPORTED = {
    codes.ASSERT: "look-around",
    codes.ASSERT_NOT: "look-around",
    codes.GROUPREF: "a back-reference",
    codes.GROUPREF_EXISTS: "a back-reference",
    codes.ATOMIC_GROUP: "an atomic group",
    codes.POSSESSIVE_REPEAT: "a possessive quantifier",
}


class UnsupportedPattern(ValueError):
    """A pattern that cannot be decoded, and why."""


@dataclass(frozen=True)
class Literal:
    """One character."""

    char: str


@dataclass(frozen=True)
class CharacterClass:
    """One character of a class, or one outside of it if `negated`.

    Attributes:
        ranges: The first and the last character of each part.
        categories: Categories such as `\\w`, in the notation of expressions.
    """

    ranges: tuple[tuple[str, str], ...] = ()
    categories: tuple[str, ...] = ()
    negated: bool = False


@dataclass(frozen=True)
class Concatenation:
    items: tuple["Node", ...]


@dataclass(frozen=True)
class Alternatives:
    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    item: "Node"
    minimum: int
    # None means that there is no limit.
    maximum: int | None


Node = Literal | CharacterClass | Concatenation | Alternatives | Repeat
EMPTY = Concatenation(())
# Any character, including line breaks.
ANY_CHARACTER = CharacterClass(negated=True)
ANY_TEXT = Repeat(ANY_CHARACTER, 0, None)


def whole_text(pattern: str) -> str:
    """Turn a pattern of JSON Schema, which is a search, into an expression that matches whole
    texts.

    A pattern that is anchored at both ends is returned unchanged.

    Args:
        pattern: A regular expression of JSON Schema; it may begin with `(?i)`.

    Returns:
        The expression, which matches the whole of each text in which the pattern is found.

    Raises:
        UnsupportedPattern: It is not a regular expression, or it has look-around, a back-reference
            or another part that no automaton can read.
    """
    if pattern.startswith("(?i)"):
        return f"(?i:{written(search_tree(pattern.removeprefix('(?i)')))})"
    tree = search_tree(pattern)
    inner = pattern[1:-1]
    is_anchored = pattern.startswith("^") and pattern.endswith("$") and not inner.endswith("\\")
    if is_anchored and not re.search(r"[|^$]", inner):
        return pattern
    return written(tree)


def in_json_string(pattern: str) -> str:
    """Return the expression of the inside of a JSON string whose text matches a pattern of raypd's.

    A pattern that cannot be parsed into a tree only loses its outer anchors.
    """
    try:
        return written(match_tree(pattern), json_string=True)
    except UnsupportedPattern:
        return pattern.removeprefix("^").removesuffix("$")


def without_anchors(pattern: str) -> str:
    """Return one of raypd's own patterns, which match whole texts, without `^` and `$`."""
    inner = pattern.removeprefix("^")
    if not inner.endswith("\\$"):
        inner = inner.removesuffix("$")
    if not re.search(r"[|^$]", inner):
        return inner
    try:
        return written(match_tree(pattern))
    except UnsupportedPattern:
        return inner


@lru_cache(256)
def search_tree(pattern: str) -> Node:
    """Return the tree of the texts in which a pattern of JSON Schema is found.

    Raises:
        UnsupportedPattern: The pattern cannot be decoded.
    """
    return simplified(_Anchors().searched(_parsed(pattern)))


@lru_cache(256)
def match_tree(pattern: str) -> Node:
    """Return the tree of all texts that a pattern matches from end to end.

    Raises:
        UnsupportedPattern: The pattern cannot be decoded.
    """
    tree = _Anchors().resolved(_parsed(pattern), starts=True, ends=True)
    if tree is None:
        raise UnsupportedPattern("no text matches it")
    return simplified(tree)


def _parsed(pattern: str) -> Any:
    try:
        tree = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedPattern(f"it is not a regular expression: {error}") from None
    if tree.state.flags & ~re.UNICODE.value:
        raise UnsupportedPattern("inline flags such as (?i) cannot be decoded")
    return tree


class _Anchors:
    """Turns Python's tree of a pattern into a tree without anchors."""

    def searched(self, items: Any) -> Node:
        branches = [items]
        if len(items) == 1 and items[0][0] is codes.BRANCH:
            branches = items[0][1][1]
        options: list[Node] = []
        for branch in branches:
            has_start, has_end = self._anchors_in(branch)
            # Text may precede a match only if no `^` has to hold, and follow it only if no `$` has
            # to.
            for starts in (True, False) if has_start else (False,):
                for ends in (True, False) if has_end else (False,):
                    tree = self.resolved(branch, starts, ends)
                    if tree is None:
                        continue
                    before = _surrounding(has_start, starts)
                    behind = _surrounding(has_end, ends)
                    options.append(Concatenation((before, tree, behind)))
        if not options:
            raise UnsupportedPattern("no text matches it")
        return Alternatives(tuple(options))

    def resolved(self, items: Any, starts: bool, ends: bool) -> Node | None:
        """Return the tree of a sequence, or None if an anchor in it can never hold.

        Args:
            items: The sequence.
            starts: Whether the text begins where the sequence begins.
            ends: Whether the text ends where the sequence ends.
        """
        widths = [_width_of_item(items.state, item) for item in items]
        nodes = []
        for number, item in enumerate(items):
            has_start, has_end = self._anchors_in([item])
            item_starts = starts and _is_empty(widths[:number], has_start)
            item_ends = ends and _is_empty(widths[number + 1 :], has_end)
            node = self._item(item, item_starts, item_ends)
            if node is None:
                return None
            nodes.append(node)
        return Concatenation(tuple(nodes))

    def _item(self, item: Any, starts: bool, ends: bool) -> Node | None:
        code, value = item
        if code is codes.AT:
            return self._anchor(value, starts, ends)
        if code is codes.LITERAL:
            return Literal(chr(value))
        if code is codes.NOT_LITERAL:
            return CharacterClass(((chr(value), chr(value)),), negated=True)
        if code is codes.ANY:
            return CharacterClass((("\n", "\n"),), negated=True)
        if code is codes.IN:
            return _character_class(value)
        if code is codes.SUBPATTERN:
            _, added_flags, removed_flags, inner = value
            if added_flags or removed_flags:
                raise UnsupportedPattern("inline flags such as (?i:...) cannot be decoded")
            return self.resolved(inner, starts, ends)
        if code is codes.BRANCH:
            resolved = [self.resolved(branch, starts, ends) for branch in value[1]]
            options = tuple(option for option in resolved if option is not None)
            return Alternatives(options) if options else None
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._repeat(value, starts, ends)
        raise UnsupportedPattern(f"{_UNSUPPORTED.get(code, str(code))} cannot be decoded")

    def _anchor(self, value: Any, starts: bool, ends: bool) -> Node | None:
        if value in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
            return EMPTY if starts else None
        if value in (codes.AT_END, codes.AT_END_STRING):
            return EMPTY if ends else None
        raise UnsupportedPattern(r"a word boundary (\b) cannot be decoded")

    def _repeat(self, value: Any, starts: bool, ends: bool) -> Node | None:
        minimum, maximum, inner = value
        limit = None if maximum is codes.MAXREPEAT else int(maximum)
        if any(self._anchors_in(inner)) and (limit is None or limit > 1):
            raise UnsupportedPattern("an anchor in a repetition cannot be decoded")
        item = self.resolved(inner, starts, ends)
        if item is None:
            return EMPTY if minimum == 0 else None
        return Repeat(item, int(minimum), limit)

    def _anchors_in(self, items: Any) -> tuple[bool, bool]:
        """Return whether some items contain `^` and whether they contain `$`, at any depth."""
        has_start = False
        has_end = False
        for code, value in items:
            if code is codes.AT:
                has_start |= value in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)
                has_end |= value in (codes.AT_END, codes.AT_END_STRING)
            for inner in _inner_sequences(code, value):
                inner_start, inner_end = self._anchors_in(inner)
                has_start |= inner_start
                has_end |= inner_end
        return has_start, has_end


def _width_of_item(state: Any, item: Any) -> tuple[int, int]:
    """Return the fewest and the most characters of an item of Python's tree."""
    if item[0] is codes.AT:
        return 0, 0
    minimum, maximum = parser.SubPattern(state, [item]).getwidth()
    return int(minimum), int(maximum)


def _inner_sequences(code: Any, value: Any) -> Sequence[Any]:
    if code is codes.SUBPATTERN:
        return [value[3]]
    if code is codes.BRANCH:
        return list(value[1])
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        return [value[2]]
    return []


def _surrounding(has_anchor: bool, holds: bool) -> Node:
    """Return the text before or after a match, on the side of an anchor."""
    if not has_anchor:
        return ANY_TEXT
    return EMPTY if holds else Repeat(ANY_CHARACTER, 1, None)


def _is_empty(widths: Sequence[tuple[int, int]], matters: bool) -> bool:
    """Return whether items of these widths are always empty.

    Args:
        widths: The fewest and the most characters of each item.
        matters: Whether an anchor beside the items depends on it.

    Raises:
        UnsupportedPattern: The items may or may not be empty, and an anchor depends on it.
    """
    if any(minimum > 0 for minimum, _ in widths):
        return False
    may_be_longer = any(maximum > 0 for _, maximum in widths)
    if may_be_longer and matters:
        raise UnsupportedPattern("an anchor beside a part that may be empty cannot be decoded")
    return not may_be_longer


def _character_class(members: Any) -> CharacterClass:
    negated = False
    ranges = []
    categories = []
    for code, value in members:
        if code is codes.NEGATE:
            negated = True
        elif code is codes.LITERAL:
            ranges.append((chr(value), chr(value)))
        elif code is codes.RANGE:
            ranges.append((chr(value[0]), chr(value[1])))
        elif code is codes.CATEGORY and value is codes.CATEGORY_DIGIT:
            ranges.append(("0", "9"))
        elif code is codes.CATEGORY:
            categories.append(_CATEGORIES[value])
        else:
            raise UnsupportedPattern(f"{code} in a class cannot be decoded")
    is_one_category = len(categories) == 1 and not ranges and not negated
    if is_one_category and categories[0] in _OPPOSITES:
        opposite = _OPPOSITES[categories[0]]
        if opposite == r"\d":
            return CharacterClass((("0", "9"),), negated=True)
        return CharacterClass(categories=(opposite,), negated=True)
    return CharacterClass(tuple(ranges), tuple(categories), negated)


def simplified(node: Node) -> Node:
    """Return a tree of the same texts with less nesting."""
    if isinstance(node, Concatenation):
        items: list[Node] = []
        for item in map(simplified, node.items):
            if isinstance(item, Concatenation):
                items += item.items
            elif not (item == ANY_TEXT and items[-1:] == [ANY_TEXT]):
                items.append(item)
        return items[0] if len(items) == 1 else Concatenation(tuple(items))
    if isinstance(node, Alternatives):
        options = tuple(dict.fromkeys(map(simplified, node.options)))
        return options[0] if len(options) == 1 else Alternatives(options)
    if isinstance(node, Repeat):
        item = simplified(node.item)
        if item == EMPTY or node.maximum == 0:
            return EMPTY
        if (node.minimum, node.maximum) == (1, 1):
            return item
        return Repeat(item, node.minimum, node.maximum)
    return node


def width(node: Node) -> tuple[int, int | None]:
    """Return the fewest and the most characters of a tree's texts; the most are None without a
    limit.
    """
    if isinstance(node, Literal | CharacterClass):
        return 1, 1
    if isinstance(node, Repeat):
        minimum, maximum = width(node.item)
        if maximum == 0 or node.maximum == 0:
            return 0, 0
        if maximum is None or node.maximum is None:
            return minimum * node.minimum, None
        return minimum * node.minimum, maximum * node.maximum
    parts = [
        width(item) for item in (node.items if isinstance(node, Concatenation) else node.options)
    ]
    limits = [maximum for _, maximum in parts]
    finite = [maximum for maximum in limits if maximum is not None]
    if isinstance(node, Concatenation):
        shortest = sum(minimum for minimum, _ in parts)
        longest = sum(finite)
    else:
        shortest = min((minimum for minimum, _ in parts), default=0)
        longest = max(finite, default=0)
    return shortest, longest if len(finite) == len(limits) else None


class LengthBounds:
    """Restricts trees to texts of some lengths, up to a number of nodes."""

    def __init__(self) -> None:
        self._nodes = 0

    def bounded(self, node: Node, minimum: int, maximum: int | None) -> Node | None:
        """Return the tree of a tree's texts that have `minimum` to `maximum` characters, or None if
        it has no such texts.

        Raises:
            UnsupportedPattern: The result would be too large a tree.
        """
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise UnsupportedPattern(
                "it cannot be combined with minLength and maxLength; put the length into the "
                "pattern"
            )
        shortest, longest = width(node)
        if maximum is not None and shortest > maximum:
            return None
        if longest is not None and longest < minimum:
            return None
        if minimum <= shortest and (
            maximum is None or (longest is not None and longest <= maximum)
        ):
            return node
        if isinstance(node, Alternatives):
            options = [self.bounded(option, minimum, maximum) for option in node.options]
            return _any_of(options)
        if isinstance(node, Concatenation):
            return self._sequence(node.items, minimum, maximum)
        assert isinstance(node, Repeat)
        return self._repeat(node, minimum, maximum)

    def _repeat(self, node: Repeat, minimum: int, maximum: int | None) -> Node | None:
        shortest, longest = width(node.item)
        if shortest != longest or shortest == 0:
            raise UnsupportedPattern(
                "minLength and maxLength beside a repetition of parts of several lengths cannot "
                "be decoded; put the length into the pattern"
            )
        lower = max(node.minimum, -(-minimum // shortest))
        limits = []
        if node.maximum is not None:
            limits.append(node.maximum)
        if maximum is not None:
            limits.append(maximum // shortest)
        upper = min(limits, default=None)
        if upper is not None and lower > upper:
            return None
        return Repeat(node.item, lower, upper)

    def _sequence(self, items: Sequence[Node], minimum: int, maximum: int | None) -> Node | None:
        """Return alternatives, one for each length of the first item as long as the lengths of the
        items after it depend on that length.
        """
        if len(items) == 1:
            return self.bounded(items[0], minimum, maximum)
        first = items[0]
        behind = items[1:]
        first_shortest, first_longest = width(first)
        behind_shortest, behind_longest = width(Concatenation(tuple(behind)))
        options: list[Node | None] = []
        last = first_longest
        if maximum is not None:
            room = maximum - behind_shortest
            last = room if last is None else min(last, room)
        # From this length of the first item on, the items after it need no lower bound.
        enough = max(first_shortest, minimum - behind_shortest)
        length = first_shortest
        while last is None or length <= last:
            left = None if maximum is None else maximum - length
            fits_left = left is None or (behind_longest is not None and behind_longest <= left)
            if fits_left and length >= enough:
                # All longer ones are alike, as long as the items after them always fit.
                end = last
                if maximum is not None and behind_longest is not None:
                    end = maximum - behind_longest
                    if last is not None:
                        end = min(end, last)
                head = self.bounded(first, length, end)
                options.append(_both(head, Concatenation(tuple(behind))))
                if end is None or end == last:
                    break
                length = end + 1
                continue
            head = self.bounded(first, length, length)
            if head is not None:
                tail = self._sequence(behind, max(0, minimum - length), left)
                options.append(_both(head, tail))
            length += 1
        return _any_of(options)


def _both(first: Node | None, second: Node | None) -> Node | None:
    if first is None or second is None:
        return None
    return Concatenation((first, second))


def _any_of(options: Sequence[Node | None]) -> Node | None:
    present = tuple(option for option in options if option is not None)
    return Alternatives(present) if present else None


def written(node: Node, json_string: bool = False) -> str:
    """Return a tree as a regular expression, which matches whole texts.

    Args:
        node: The tree.
        json_string: Whether to write the text in the form that it has inside a JSON string. A
            literal that JSON escapes is escaped; a class omits the characters that JSON would
            escape.
    """
    if isinstance(node, Literal):
        return _json_literal(node.char) if json_string else _escaped(node.char)
    if isinstance(node, CharacterClass):
        return _written_class(node, json_string)
    if isinstance(node, Alternatives):
        return f"({'|'.join(written(option, json_string) for option in node.options)})"
    if isinstance(node, Concatenation):
        return "".join(written(item, json_string) for item in node.items)
    if node == ANY_TEXT and not json_string:
        return ANYTHING
    item = written(node.item, json_string)
    is_single = isinstance(node.item, CharacterClass | Alternatives) or len(item) == 1
    return f"{item if is_single else f'({item})'}{_quantifier(node.minimum, node.maximum)}"


def _written_class(node: CharacterClass, json_string: bool) -> str:
    if node == ANY_CHARACTER and not json_string:
        return "(?s:.)"
    categories = "".join(node.categories)
    members = "".join(map(_written_range, node.ranges)) + categories
    if not json_string:
        return f"[{'^' * node.negated}{members}]"
    if node.negated:
        return f"[^{members}{_NOT_IN_JSON}]"
    if any(category in _OPPOSITES for category in node.categories):
        return f"[{members}&&[^{_NOT_IN_JSON}]]"
    if r"\s" in node.categories:
        categories = categories.replace(r"\s", " ")
    plain: list[tuple[str, str]] = []
    for first, last in node.ranges:
        plain += _without_escaped(first, last)
    if plain or categories:
        return f"[{''.join(map(_written_range, plain))}{categories}]"
    # JSON escapes every character of the class.
    escaped: list[str] = []
    for first, last in node.ranges:
        escaped += [_json_literal(chr(code)) for code in range(ord(first), ord(last) + 1)]
    return f"({'|'.join(escaped)})"


def _without_escaped(first: str, last: str) -> list[tuple[str, str]]:
    """Return a range of characters without those that JSON escapes."""
    ranges = []
    start = max(first, " ")
    for char in ('"', "\\"):
        if start <= char <= last:
            if start < char:
                ranges.append((start, chr(ord(char) - 1)))
            start = chr(ord(char) + 1)
    if start <= last:
        ranges.append((start, last))
    return ranges


def _written_range(bounds: tuple[str, str]) -> str:
    first, last = bounds
    if first == last:
        return _escaped_in_class(first)
    return f"{_escaped_in_class(first)}-{_escaped_in_class(last)}"


def _quantifier(minimum: int, maximum: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((minimum, maximum))
    if short is not None:
        return short
    if minimum == maximum:
        return f"{{{minimum}}}"
    return f"{{{minimum},{'' if maximum is None else maximum}}}"


def _json_literal(char: str) -> str:
    if char in _SHORT_ESCAPES:
        return "\\\\" + _escaped(_SHORT_ESCAPES[char])
    if char < " ":
        return rf"\\u{ord(char):04x}"
    return _escaped(char)


def _escaped(char: str) -> str:
    if char in _SPECIAL:
        return "\\" + char
    return char if char.isprintable() else _code_point(char)


def _escaped_in_class(char: str) -> str:
    if char in _SPECIAL_IN_CLASS:
        return "\\" + char
    return char if char.isprintable() else _code_point(char)


def _code_point(char: str) -> str:
    code = ord(char)
    if code < 256:
        return f"\\x{code:02x}"
    if code < 65536:
        return f"\\u{code:04x}"
    return char


def pattern_widths(pattern: str) -> tuple[int, int]:
    """Return the fewest and the most characters of a pattern's values.

    Args:
        pattern: A pattern that was checked. If it has no limit, the most are a very large number.
    """
    minimum, maximum = parser.parse(pattern).getwidth()
    return int(minimum), int(maximum)
