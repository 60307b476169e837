"""Cuts a document that does not fit the context into overlapping windows, and merges the answers of
the windows into one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from raypd.schema import Attribute, ListType
from raypd.tasks.values import CheckedValue, Rated

# A window may begin after a line or a sentence.
_BORDER = re.compile(r"\n|(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])")
# The end of a window, up to an eighth of it, is repeated at the beginning of the next window.
_OVERLAP = 8


class _TextPiece(NamedTuple):
    """A part of a text that fits into one window.

    Attributes:
        begin: The offset of its first character.
        end: The offset after its last character.
        tokens: The number of its tokens if it is encoded alone.
    """

    begin: int
    end: int
    tokens: int


def windows(
    text: str, encode: Callable[[str], list[int]], limit: int
) -> list[tuple[int, str, list[int]]]:
    """Cut a text into overlapping windows, between sentences if possible, otherwise between words.

    Args:
        text: The text of a document.
        encode: Turns text into token ids.
        limit: The maximum number of tokens of a window.

    Returns: The start offset, the text and the token ids of each window. Together the windows
    contain the whole text.
    """
    pieces = list(_pieces(text, encode, limit, 0))
    result: list[tuple[int, str, list[int]]] = []
    # The window's first piece, and the number of pieces in earlier windows.
    first = 0
    covered = 0
    while covered < len(pieces):
        end = _last_fitting(pieces, first, limit)
        begin = pieces[first].begin
        tokens = encode(text[begin : pieces[end - 1].end])
        # Pieces that are encoded together may take a token more than separately.
        while len(tokens) > limit and end > first + 1:
            end -= 1
            tokens = encode(text[begin : pieces[end - 1].end])
        if end <= covered:
            # The overlap leaves no room for the next piece, so this window starts without an
            # overlap.
            first = covered
            continue
        result.append((begin, text[begin : pieces[end - 1].end], tokens[:limit]))
        covered = end
        first = _overlap_start(pieces, end, begin, limit // _OVERLAP)
    return result


def _last_fitting(pieces: Sequence[_TextPiece], first: int, limit: int) -> int:
    """Return the end of the range of pieces from `first` that fit into `limit` tokens."""
    end = first + 1
    tokens = pieces[first].tokens
    while end < len(pieces) and tokens + pieces[end].tokens <= limit:
        tokens += pieces[end].tokens
        end += 1
    return end


def _overlap_start(pieces: Sequence[_TextPiece], end: int, begin: int, max_tokens: int) -> int:
    """Return the first piece of the window that follows one that ends before the piece `end`.

    Args:
        pieces: All pieces of the text.
        end: The first piece that is in no window yet.
        begin: The offset of the previous window, after which the next one must begin.
        max_tokens: The maximum number of tokens that both windows share.
    """
    first = end
    remaining = max_tokens
    while first > 1:
        previous = pieces[first - 1]
        if previous.tokens > remaining or previous.begin <= begin:
            break
        first -= 1
        remaining -= previous.tokens
    return first


def _pieces(
    text: str, encode: Callable[[str], list[int]], limit: int, offset: int
) -> Iterator[_TextPiece]:
    """Yield the pieces of a text; one that does not fit into a window is cut in the middle.

    Args:
        text: The text, or a part of it.
        encode: Turns text into token ids.
        limit: The maximum number of tokens of a window.
        offset: The offset of the document at which `text` begins, in characters.
    """
    ends = [border.end() for border in _BORDER.finditer(text)]
    begin = 0
    for end in dict.fromkeys([*ends, len(text)]):
        part = text[begin:end]
        if part:
            yield from _fitting(part, encode, limit, offset + begin)
        begin = end


def _fitting(
    part: str, encode: Callable[[str], list[int]], limit: int, offset: int
) -> Iterator[_TextPiece]:
    tokens = len(encode(part))
    if tokens <= limit:
        yield _TextPiece(offset, offset + len(part), tokens)
        return
    middle = part.rfind(" ", 1, len(part) // 2 + 1) + 1 or len(part) // 2
    if middle in (0, len(part)):
        # A single character takes more tokens than fit into a window.
        yield _TextPiece(offset, offset + len(part), limit)
        return
    yield from _pieces(part[:middle], encode, limit, offset)
    yield from _pieces(part[middle:], encode, limit, offset + middle)


def merged(
    attributes: Sequence[Attribute], answers: Sequence[Sequence[Rated]]
) -> list[tuple[int, Rated]]:
    """Unite the answers of a document's windows.

    Args:
        attributes: The attributes of the document's category.
        answers: For each window, the value and the confidence of each attribute.

    Returns:
        For each attribute, the window and its value: the surest value, or else the surest null.
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
