"""A document that does not fit the context: cut into windows that overlap, and the answers of all
of them as one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from raypd.config import Attribute
from raypd.schema.types import ListType
from raypd.tasks.values import CheckedValue, Rated

_BORDER = re.compile(r"\n|(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])")  # behind a line or a sentence
_OVERLAP = 8  # the end of a window, up to an eighth of it, is also the beginning of the next


def windows(
    text: str, encode: Callable[[str], list[int]], limit: int
) -> list[tuple[int, str, list[int]]]:
    """First character, text and ids of windows that hold all of a text; cut between sentences, else
    between words.
    """
    pieces = list(_pieces(text, encode, limit, 0))  # (begin, end, tokens)
    result: list[tuple[int, str, list[int]]] = []
    first = reached = 0
    while reached < len(pieces):
        begin, end, size = pieces[first][0], first + 1, pieces[first][2]
        while end < len(pieces) and size + pieces[end][2] <= limit:
            size, end = size + pieces[end][2], end + 1
        # Together pieces may be a token longer than one by one.
        while len(tokens := encode(text[begin : pieces[end - 1][1]])) > limit and end > first + 1:
            end -= 1
        if end <= reached:  # what is repeated leaves no room for the next piece
            first = reached
            continue
        result.append((begin, text[begin : pieces[end - 1][1]], tokens[:limit]))
        first, reached, room = end, end, limit // _OVERLAP
        while first - 1 > 0 and pieces[first - 1][2] <= room and pieces[first - 1][0] > begin:
            first -= 1
            room -= pieces[first][2]
    return result


def _pieces(
    text: str, encode: Callable[[str], list[int]], limit: int, offset: int
) -> Iterator[tuple[int, int, int]]:
    """(begin, end, tokens) of parts of a text, which fit a window each. offset: where the text
    stands.
    """
    ends = [border.end() for border in _BORDER.finditer(text)]
    begin = 0
    for end in dict.fromkeys([*ends, len(text)]):
        part = text[begin:end]
        if part and (size := len(encode(part))) <= limit:
            yield offset + begin, offset + end, size
        elif part:
            middle = part.rfind(" ", 1, len(part) // 2 + 1) + 1 or len(part) // 2
            if middle in (0, len(part)):  # a character of more tokens than a window has
                yield offset + begin, offset + end, limit
            else:
                yield from _pieces(part[:middle], encode, limit, offset + begin)
                yield from _pieces(part[middle:], encode, limit, offset + begin + middle)
        begin = end


def merged(
    attributes: Sequence[Attribute], answers: Sequence[Sequence[Rated]]
) -> list[tuple[int, Rated]]:
    """Unite the answers of a document's windows.

    Args:
        attributes: The attributes of the document's category.
        answers: Of each window, the value and the confidence of each attribute.

    Returns:
        For each attribute the window and its value: the surest value, or else the surest null.
        Lists are united.
    """
    result = []
    for column, attribute in enumerate(attributes):
        rated = [answer[column] for answer in answers]
        ranks = [_rank(value, rating) for value, rating in rated]
        best = ranks.index(max(ranks))
        value, rating = rated[best]
        filled = [(other.value, sure) for other, sure in rated if other.value]
        value_type = attribute.value_type
        if isinstance(value_type, ListType) and len(filled) > 1:
            united = value_type.united([items for items, _ in filled])
            value = replace(value, value=united)
            rating = min((sure for _, sure in filled if sure is not None), default=None)
        result.append((best, (value, rating)))
    return result


def _rank(value: CheckedValue, rating: float | None) -> tuple[bool, bool, float]:
    return value.value is not None, value.status in ("ok", "null"), rating or 0.0
