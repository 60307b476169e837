"""A document that does not fit the context: cut into windows that overlap, and the answers of all of them as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from raypd.config import Attribute
from raypd.tasks.values import CheckedValue, Rated

_BORDER = re.compile(r"\n|(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])")  # behind a line or a sentence
_OVERLAP = 8  # the end of a window, up to an eighth of it, is also the beginning of the next


def windows(text: str, encode: Callable[[str], list[int]], most: int) -> list[tuple[int, str, list[int]]]:
    """Cuts a text between sentences; one that does not fit by itself is cut between words, or within one.

    Args:
        text: of the document.
        encode: makes token ids of a text.
        most: tokens of a window.

    Returns:
        The windows, which together hold all of the text: the character at which each begins, its text and its ids.
    """
    pieces = list(_pieces(text, encode, most, 0))  # (begin, end, tokens)
    found: list[tuple[int, str, list[int]]] = []
    first = reached = 0
    while reached < len(pieces):
        begin, end, size = pieces[first][0], first + 1, pieces[first][2]
        while end < len(pieces) and size + pieces[end][2] <= most:
            size, end = size + pieces[end][2], end + 1
        # What is encoded as a whole may be a token longer than its parts are.
        while len(tokens := encode(text[begin : pieces[end - 1][1]])) > most and end > first + 1:
            end -= 1
        if end <= reached:  # what is repeated leaves no room for the next piece
            first = reached
            continue
        found.append((begin, text[begin : pieces[end - 1][1]], tokens[:most]))
        first, reached, room = end, end, most // _OVERLAP
        while first - 1 > 0 and pieces[first - 1][2] <= room and pieces[first - 1][0] > begin:
            first -= 1
            room -= pieces[first][2]
    return found


def _pieces(text: str, encode: Callable[[str], list[int]], most: int, at: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, tokens) of parts of a text, which fit a window each. at: where the text stands."""
    ends = [found.end() for found in _BORDER.finditer(text)]
    begin = 0
    for end in dict.fromkeys([*ends, len(text)]):
        part = text[begin:end]
        if part and (size := len(encode(part))) <= most:
            yield at + begin, at + end, size
        elif part:
            middle = part.rfind(" ", 1, len(part) // 2 + 1) + 1 or len(part) // 2
            if middle in (0, len(part)):  # a character of more tokens than a window has
                yield at + begin, at + end, most
            else:
                yield from _pieces(part[:middle], encode, most, at + begin)
                yield from _pieces(part[middle:], encode, most, at + begin + middle)
        begin = end


def merged(attributes: Sequence[Attribute], answers: Sequence[Sequence[Rated]]) -> list[tuple[int, Rated]]:
    """One value of each attribute, out of those of all windows.

    Args:
        attributes: of the category.
        answers: of each window, a value of each attribute.

    Returns:
        Of each attribute the window and its value: the one that is most sure of what it found, else of finding nothing.
        The lists of all windows are united, in their order; as sure as the least sure of those that had any.
    """
    found = []
    for place, attribute in enumerate(attributes):
        rated = [answer[place] for answer in answers]
        best = max(range(len(rated)), key=lambda window: _rank(*rated[window]))
        value, rating = rated[best]
        lists = [(checked.value, own) for checked, own in rated if checked.value] if attribute.many else []
        if len(lists) > 1:
            united = list(dict.fromkeys(item for items, _ in lists for item in items))
            ratings = [own for _, own in lists if own is not None]
            value = replace(value, value=united[: attribute.max_items])
            rating = min(ratings, default=None)
        found.append((best, (value, rating)))
    return found


def _rank(value: CheckedValue, confidence: float | None) -> tuple[bool, bool, float]:
    return value.value is not None, value.status in ("ok", "null"), confidence or 0.0
