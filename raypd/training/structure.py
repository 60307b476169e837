"""What of an answer can be written side by side, by rules (APAR, appendix B): the points of an
ordered list, or the first sentence of a paragraph and its rest. Code, mathematics and addresses of
the web are one paragraph.
"""

import re
from dataclasses import dataclass

_POINT = re.compile(
    r"^(?P<root>\d+\.[ \t]+[^\n:]+?:)(?P<detail>.+?)(?=^\d+\.[ \t]|\n\n|\Z)",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = r"^[ \t]*\d+\.\s"  # of a point; its full stop ends no sentence
_SENTENCE = re.compile(rf"(?:{_NUMBER}|(?!{_NUMBER}).)+?[.!?](?=\s)", re.MULTILINE | re.DOTALL)
_AMBIGUOUS = re.compile(
    r"```|`[^`]+`|\$[^$\n]+\$|\\[(\[]|https?://|www\.|^\s*(def|class|import|#include)\b",
    re.MULTILINE,
)
_LEAST_POINTS, _LEAST_CHARACTERS = 3, 10
LEAST_WORDS, TOPIC_WORDS = 5, 3


def outline(answer: str) -> list[tuple[str, str]]:
    """(root, detail that can be written beside what follows), which joined are the answer; the last
    has no detail.
    """
    parts, end = [], 0
    for begin, following in [] if _AMBIGUOUS.search(answer) else _details(answer):
        parts.append((answer[end:begin], answer[begin:following]))
        end = following
    return [*parts, (answer[end:], "")]


def _details(answer: str) -> list[tuple[int, int]]:
    """(begin, end) of the points' texts, or of what stands behind the first sentence of each
    paragraph.
    """
    points = list(_POINT.finditer(answer))
    if len(points) >= _LEAST_POINTS and min(len(match[0]) for match in points) >= _LEAST_CHARACTERS:
        return [match.span("detail") for match in points]
    details, begin = [], 0
    for part in re.split(r"(\n\n+)", answer):
        sentence = _SENTENCE.match(part)
        if sentence and len(part[sentence.end() :].strip()) >= _LEAST_CHARACTERS:
            details.append((begin + sentence.end(), begin + len(part)))
        begin += len(part)
    return details if len(details) > 1 else []


@dataclass
class Promise:
    """Text that the main thread leaves to a child, and the topic by which it is promised (PASTA,
    section 3).
    """

    topic: str
    text: str


@dataclass
class Sync:
    """Here the main thread waits for all that it has promised."""


def promises(answer: str) -> list[str | Promise | Sync]:
    """An answer in the order of its text: the main thread's, promised blocks, and a sync where text
    follows the last. Blocks are the details of `outline` of five words or more; a topic is at most
    three words of what stands before.
    """
    pieces: list[str | Promise | Sync] = []
    for root, detail in outline(answer):
        line = re.sub(r"^\d+\.", "", root.strip().rpartition("\n")[2])
        topic = " ".join(re.findall(r"[\w'-]+", line)[:TOPIC_WORDS])
        pieces += [
            root,
            Promise(topic, detail) if len(detail.split()) >= LEAST_WORDS and topic else detail,
        ]
    behind = max(
        (n for n, piece in enumerate(pieces, 1) if isinstance(piece, Promise)), default=len(pieces)
    )
    if any(isinstance(piece, str) and piece.strip() for piece in pieces[behind:]):
        pieces.insert(behind, Sync())
    return pieces
