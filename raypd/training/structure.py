"""What of an answer can be written side by side, by rules (APAR, appendix B).

The points of an ordered list, or the first sentence of a paragraph and the rest of it. Code, mathematics and addresses
of the web are one paragraph.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_POINT = re.compile(r"^(?P<root>\d+\.[ \t]+[^\n:]+?:)(?P<detail>.+?)(?=^\d+\.[ \t]|\n\n|\Z)", re.MULTILINE | re.DOTALL)
_NUMBER = r"^[ \t]*\d+\.\s"  # of a point; its full stop ends no sentence
_SENTENCE = re.compile(rf"(?:{_NUMBER}|(?!{_NUMBER}).)+?[.!?](?=\s)", re.MULTILINE | re.DOTALL)
_AMBIGUOUS = re.compile(
    r"```|`[^`]+`|\$[^$\n]+\$|\\[(\[]|https?://|www\.|^\s*(def|class|import|#include)\b", re.MULTILINE
)
_LEAST_POINTS, _LEAST_CHARACTERS = 3, 10


@dataclass
class AnswerTree:
    """A text, the detail that can be written beside what follows, and what follows; where `next` is, `detail` is."""

    text: str
    detail: AnswerTree | None = None
    next: AnswerTree | None = None


def answer_tree(answer: str) -> AnswerTree:
    """The tree of an answer, whose texts in order are the answer; one node where nothing is written side by side."""
    if _AMBIGUOUS.search(answer):
        return AnswerTree(answer)
    points = [(match.start("root"), match.end("root"), match.end()) for match in _POINT.finditer(answer)]
    least = min((end - begin for _, begin, end in points), default=0)
    if len(points) >= _LEAST_POINTS and least >= _LEAST_CHARACTERS:
        return _chain(answer, [(detail, end) for _, detail, end in points])
    return _chain(answer, _details(answer))


def _details(answer: str) -> list[tuple[int, int]]:
    """(begin, end) of the text behind the first sentence, for each paragraph that has more than one."""
    details, begin = [], 0
    for part in re.split(r"(\n\n+)", answer):
        sentence = _SENTENCE.match(part)
        detail = part[sentence.end() :] if sentence else ""
        if sentence and len(detail.strip()) >= _LEAST_CHARACTERS:
            details.append((begin + sentence.end(), begin + len(part)))
        begin += len(part)
    return details if len(details) > 1 else []


def _chain(answer: str, details: list[tuple[int, int]]) -> AnswerTree:
    """Roots, each with its detail, and the text behind the last detail."""
    behind = details[-1][1] if details else 0
    chain = AnswerTree(answer[behind:])
    for number in reversed(range(len(details))):
        begin, end = details[number]
        start = details[number - 1][1] if number else 0
        chain = AnswerTree(answer[start:begin], AnswerTree(answer[begin:end]), chain)
    return chain


LEAST_WORDS, TOPIC_WORDS = 5, 3


@dataclass
class Promise:
    """Text that the main thread leaves to a child, and the topic by which it is promised (PASTA, section 3)."""

    topic: str
    text: str


@dataclass
class Sync:
    """Here the main thread waits for all that it has promised."""


def promises(answer: str) -> list[str | Promise | Sync]:
    """An answer in the order of its text: what the main thread writes, blocks that it promises, and behind the last of
    these, where text follows, a sync.

    The details of `answer_tree`, where they have at least five words; a topic is at most three words of what stands
    before it. Together the texts are the answer.
    """
    pieces: list[str | Promise | Sync] = []
    node: AnswerTree | None = answer_tree(answer)
    while node is not None:
        pieces.append(node.text)
        if node.detail is not None:
            block = node.detail.text
            line = re.sub(r"^\d+\.", "", node.text.strip().rpartition("\n")[2])
            topic = " ".join(re.findall(r"[\w'-]+", line)[:TOPIC_WORDS])
            pieces.append(Promise(topic, block) if len(block.split()) >= LEAST_WORDS and topic else block)
        node = node.next
    behind = max((n for n, piece in enumerate(pieces, 1) if isinstance(piece, Promise)), default=len(pieces))
    if any(isinstance(piece, str) and piece.strip() for piece in pieces[behind:]):
        pieces.insert(behind, Sync())
    return pieces
