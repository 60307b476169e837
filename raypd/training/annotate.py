"""A teacher puts tags around parts of an answer that can be written side by side (PASTA, section 4
and appendix A), which count where the text without them is the answer, blocks have at least five
words and topics at most three.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from raypd.config import RunConfig
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.dataset.writer import rows_of
from raypd.errors import InputError
from raypd.tasks.base import Document
from raypd.training.example import Skip
from raypd.training.structure import LEAST_WORDS, TOPIC_WORDS, Promise, Sync

# Of a document: the tagged text of each of its responses, None where there is none.
COLUMN = "training.annotations"
_TAG = re.compile(
    r'<async topic="(?P<topic>[^"]*)">(?P<block>.*?)</async>|(?P<sync><sync/>)', re.DOTALL
)
_ANY = re.compile(r"</?(async|sync|promise)\b")
_PROMPT = (Path(__file__).parent / "templates" / "annotate.txt").read_text(encoding="utf-8")


def requests(config: RunConfig) -> Iterator[dict[str, str]]:
    """What the teacher is asked about every response of the input, as documents for `raypd
    generate`.
    """
    column = config.training.labels_column
    for unit in plan(config):
        for document in read_unit(unit, config, [column]):
            for turn, answer in enumerate(_responses(document, column)):
                if isinstance(answer, str) and answer.strip():
                    yield {
                        "id": _id(document, turn, answer),
                        "prompt": _PROMPT.format(answer=answer.strip()),
                    }


def _responses(document: Document, column: str) -> list[Any]:
    responses = document.fields.get(column)
    responses = [responses] if isinstance(responses, str) else responses
    return responses if isinstance(responses, list) else []


def _id(document: Document, turn: int, answer: str) -> str:
    """The id of a response, with a digest of its text, since tags of another text cannot be
    used.
    """
    return json.dumps(
        [document.source, document.place, turn, hashlib.sha256(answer.encode()).hexdigest()[:8]]
    )


def label(documents: Sequence[Document], config: RunConfig) -> None:
    """Puts what the teacher wrote into COLUMN.

    Raises InputError where `training.annotations` marks no response.
    """
    rows = rows_of(str(config.training.annotations), ["id", "status", "text", "finish_reason"])
    tagged = {
        row["id"]: row["text"]
        for row in rows
        if row["status"] == "ok" and row["finish_reason"] == "stop"
    }
    matched = False
    for document in documents:
        responses = enumerate(_responses(document, config.training.labels_column))
        document.fields[COLUMN] = [
            tagged.get(_id(document, turn, str(answer))) for turn, answer in responses
        ]
        matched |= any(document.fields[COLUMN])
    if not matched:
        advice = "give the teacher's run over the responses of this input, or keys of its model"
        run = config.training.annotations
        raise InputError(f"training.annotations {run}: marks no response of input.path; {advice}")


def marked(tagged: str | None, answer: str) -> list[str | Promise | Sync]:
    """An answer in parts, as marked in `tagged` (None: nothing).

    Raises Skip for broken tags or another text.
    """
    if tagged is None:
        raise Skip("responses that the teacher did not mark")
    text = re.sub(r"<async\s+topic=", "<async topic=", tagged.strip())
    pieces: list[str | Promise | Sync] = []
    end = 0
    for tag in _TAG.finditer(text):
        pieces += [
            text[end : tag.start()],
            Sync() if tag["sync"] else Promise(tag["topic"], tag["block"]),
        ]
        end = tag.end()
    pieces.append(text[end:])
    plain = [
        piece if isinstance(piece, str) else piece.text
        for piece in pieces
        if not isinstance(piece, Sync)
    ]
    if any(_ANY.search(part) for part in plain):
        raise Skip("responses whose marks are not well-formed")
    if "".join(plain) != answer.strip():
        raise Skip("responses that the teacher changed")
    blocks = [piece for piece in pieces if isinstance(piece, Promise)]
    if any(len(block.text.split()) < LEAST_WORDS for block in blocks):
        raise Skip(f"marked parts of less than {LEAST_WORDS} words")
    if any(not 1 <= len(block.topic.split()) <= TOPIC_WORDS for block in blocks):
        raise Skip(f"topics of no words, or of more than {TOPIC_WORDS}")
    return [piece for piece in pieces if piece != ""]
