"""A teacher marks the parts of an answer that can be written side by side (PASTA, section 4).

The teacher copies the answer and puts tags around such parts (appendix A). Its marks are used if
the text without the tags is the answer, every block has at least five words and every topic at most
three.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from raypd.config import RunConfig
from raypd.dataset import planner, read_unit, rows_of
from raypd.errors import InputError
from raypd.tasks import Document
from raypd.training.example import Skip
from raypd.training.structure import MAX_TOPIC_WORDS, MIN_BLOCK_WORDS, Piece, Promise, Sync

# The column that holds the tagged text of each response of a document; None for an unmarked one.
COLUMN = "training.annotations"
_TAG = re.compile(
    r'<async topic="(?P<topic>[^"]*)">(?P<block>.*?)</async>|(?P<sync><sync/>)', re.DOTALL
)
_ANY_TAG = re.compile(r"</?(async|sync|promise)\b")
_PROMPT = (Path(__file__).parent / "templates" / "annotate.txt").read_text(encoding="utf-8")


def requests(config: RunConfig) -> Iterator[dict[str, str]]:
    """Yield the teacher's prompt for every response of the input, as rows {id, prompt}."""
    column = config.training.labels_column
    for unit in planner.plan(config):
        for document in read_unit(unit, config, [column]):
            for turn, answer in enumerate(_responses(document, column)):
                if isinstance(answer, str) and answer.strip():
                    prompt = _PROMPT.format(answer=answer.strip())
                    yield {"id": _id(document, turn, answer), "prompt": prompt}


def _responses(document: Document, column: str) -> list[Any]:
    responses = document.fields.get(column)
    if isinstance(responses, str):
        return [responses]
    return responses if isinstance(responses, list) else []


def _id(document: Document, turn: int, answer: str) -> str:
    """Return the id of a response.

    It contains a digest of the text, because tags of another text cannot be used.
    """
    digest = hashlib.sha256(answer.encode()).hexdigest()[:8]
    return json.dumps([document.source, document.row, turn, digest])


def label(documents: Sequence[Document], config: RunConfig) -> None:
    """Put the teacher's tagged texts into COLUMN of each document.

    Args:
        documents: The documents, which are changed in place.
        config: The configuration; `training.annotations` is the folder of the teacher's run.

    Raises:
        InputError: If the run marks no response of the documents.
    """
    rows = rows_of(str(config.training.annotations), ["id", "status", "text", "finish_reason"])
    tagged_texts = {
        row["id"]: row["text"]
        for row in rows
        if row["status"] == "ok" and row["finish_reason"] == "stop"
    }
    has_marks = False
    for document in documents:
        responses = _responses(document, config.training.labels_column)
        document.fields[COLUMN] = [
            tagged_texts.get(_id(document, turn, str(answer)))
            for turn, answer in enumerate(responses)
        ]
        has_marks |= any(document.fields[COLUMN])
    if not has_marks:
        advice = "give the teacher's run over the responses of this input, or keys of its model"
        run = config.training.annotations
        raise InputError(f"training.annotations {run}: marks no response of input.path; {advice}")


def marked(tagged: str | None, answer: str) -> list[Piece]:
    """Split an answer into the pieces that the teacher marked.

    Args:
        tagged: The teacher's copy of the answer, with tags; None if it wrote nothing.
        answer: The text of the answer.

    Returns:
        The pieces in the order of the text.

    Raises:
        Skip: If tags are broken, the text is another one, or a block or topic has a wrong length.
    """
    if tagged is None:
        raise Skip("responses that the teacher did not mark")
    pieces = _pieces(re.sub(r"<async\s+topic=", "<async topic=", tagged.strip()))
    blocks = [piece for piece in pieces if isinstance(piece, Promise)]
    plain = []
    for piece in pieces:
        if isinstance(piece, Promise):
            plain.append(piece.text)
        elif isinstance(piece, str):
            plain.append(piece)
    if any(_ANY_TAG.search(text) for text in plain):
        raise Skip("responses whose marks are not well-formed")
    if "".join(plain) != answer.strip():
        raise Skip("responses that the teacher changed")
    if any(len(block.text.split()) < MIN_BLOCK_WORDS for block in blocks):
        raise Skip(f"marked parts of less than {MIN_BLOCK_WORDS} words")
    if any(not 1 <= len(block.topic.split()) <= MAX_TOPIC_WORDS for block in blocks):
        raise Skip(f"topics of no words, or of more than {MAX_TOPIC_WORDS}")
    return [piece for piece in pieces if piece != ""]


def _pieces(text: str) -> list[Piece]:
    """Split a tagged text at its tags."""
    pieces: list[Piece] = []
    end = 0
    for tag in _TAG.finditer(text):
        pieces.append(text[end : tag.start()])
        if tag["sync"]:
            pieces.append(Sync())
        else:
            pieces.append(Promise(tag["topic"], tag["block"]))
        end = tag.end()
    pieces.append(text[end:])
    return pieces
