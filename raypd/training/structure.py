"""Rules that find which parts of an answer can be written side by side (APAR, appendix B).

These are the points of an ordered list, or what follows the first sentence of each paragraph. An
answer that contains code, mathematics or web addresses is left in one piece.
"""

import re
from dataclasses import dataclass

_POINT = re.compile(
    r"^(?P<root>\d+\.[ \t]+[^\n:]+?:)(?P<detail>.+?)(?=^\d+\.[ \t]|\n\n|\Z)",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = r"^[ \t]*\d+\.\s"  # the number of a point, whose full stop ends no sentence
_SENTENCE = re.compile(rf"(?:{_NUMBER}|(?!{_NUMBER}).)+?[.!?](?=\s)", re.MULTILINE | re.DOTALL)
_AMBIGUOUS = re.compile(
    r"```|`[^`]+`|\$[^$\n]+\$|\\[(\[]|https?://|www\.|^\s*(def|class|import|#include)\b",
    re.MULTILINE,
)
_MIN_POINTS = 3
_MIN_CHARACTERS = 10
MIN_BLOCK_WORDS = 5
MAX_TOPIC_WORDS = 3


def outline(answer: str) -> list[tuple[str, str]]:
    """Split an answer into roots and details.

    Args:
        answer: The text of an answer.

    Returns:
        (root, detail) pairs, which joined give the answer. A detail can be written in parallel with
        what follows it. The last detail is empty.
    """
    if _AMBIGUOUS.search(answer):
        return [(answer, "")]
    parts = []
    end = 0
    for detail_start, detail_end in _details(answer):
        parts.append((answer[end:detail_start], answer[detail_start:detail_end]))
        end = detail_end
    parts.append((answer[end:], ""))
    return parts


def _details(answer: str) -> list[tuple[int, int]]:
    """Return (start, end) of the details in a text.

    These are the texts of the points of a list; without a list, what follows the first sentence of
    each paragraph.
    """
    points = list(_POINT.finditer(answer))
    if len(points) >= _MIN_POINTS and min(len(match[0]) for match in points) >= _MIN_CHARACTERS:
        return [match.span("detail") for match in points]
    details = []
    offset = 0
    for part in re.split(r"(\n\n+)", answer):
        sentence = _SENTENCE.match(part)
        if sentence and len(part[sentence.end() :].strip()) >= _MIN_CHARACTERS:
            details.append((offset + sentence.end(), offset + len(part)))
        offset += len(part)
    return details if len(details) > 1 else []


@dataclass
class Promise:
    """A text that the main thread leaves to a child, and its topic (PASTA, section 3)."""

    topic: str
    text: str


@dataclass
class Sync:
    """The main thread waits here for everything that it has promised."""


Piece = str | Promise | Sync  # of an answer; a text is written by the main thread


def promises(answer: str) -> list[Piece]:
    """Split an answer into the texts of the main thread and promised blocks, by rules.

    The details of `outline` with at least five words become blocks. A topic is at most three words
    of the text before the block. A sync comes after the last block if text follows it.

    Args:
        answer: The text of an answer.

    Returns:
        The pieces in the order of the text.
    """
    pieces: list[Piece] = []
    end_of_last_block = None
    for root, detail in outline(answer):
        line = re.sub(r"^\d+\.", "", root.strip().rpartition("\n")[2])
        topic = " ".join(re.findall(r"[\w'-]+", line)[:MAX_TOPIC_WORDS])
        pieces.append(root)
        if topic and len(detail.split()) >= MIN_BLOCK_WORDS:
            pieces.append(Promise(topic, detail))
            end_of_last_block = len(pieces)
        else:
            pieces.append(detail)
    if end_of_last_block is not None:
        following = pieces[end_of_last_block:]
        if any(isinstance(piece, str) and piece.strip() for piece in following):
            pieces.insert(end_of_last_block, Sync())
    return pieces
