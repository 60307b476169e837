"""A teacher marks the parts of answers that can be written side by side (PASTA, section 4 and appendix A).

    python -m raypd.training.annotate configs/train/pasta.yaml > responses.jsonl
    raypd generate responses.jsonl -o runs/annotated --model TEACHER
    raypd train configs/train/pasta.yaml training.annotations=runs/annotated

The teacher copies an answer and puts tags into it. What it returns counts where the answer is left when the tags are
taken out, blocks have at least five words and topics at most three; other answers are left out, and counted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from raypd import storage
from raypd.config import RunConfig
from raypd.config.load import load_config
from raypd.dataset import writer
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import ConfigError, InputError, UserError
from raypd.tasks.base import Document
from raypd.training.example import Skip
from raypd.training.structure import LEAST_WORDS, TOPIC_WORDS, Promise, Sync

COLUMN = "training.annotations"  # of a document: the tagged text of each of its responses, None where there is none
_TAG = re.compile(r'<async topic="(?P<topic>[^"]*)">(?P<block>.*?)</async>|(?P<sync><sync/>)', re.DOTALL)
_ANY = re.compile(r"</?(async|sync|promise)\b")
_PROMPT = """Below is an answer that an assistant gave. Some parts of it do not need each other and could be written at
the same time by several writers. Copy the answer and mark these parts:

- Put <async topic="..."> in front of such a part and </async> behind it. The topic has one to three words. Whoever
  writes what follows sees the topic, not the part.
- Mark only what nothing behind it builds on. A part has at least five words, and never another part in it.
- Where the text behind needs what the parts said, write <sync/> first. It makes everybody wait: use it seldom.
- Change nothing else: not a word, mark or line break. If no part can be written on its own, copy the answer as it is.

Answer:
Two cities fit. Porto is small and cheap, with the sea close by. Vienna has more museums than one week can hold. \
Both can be reached by night train.

Marked:
Two cities fit. <async topic="Porto">Porto is small and cheap, with the sea close by.</async> \
<async topic="Vienna">Vienna has more museums than one week can hold.</async> Both can be reached by night train.

Answer:
1. Soak the beans over night, so that they cook evenly.
2. Boil them for an hour without any salt.
Season at the end, when all of this is done.

Marked:
1. <async topic="soaking">Soak the beans over night, so that they cook evenly.</async>
2. <async topic="boiling">Boil them for an hour without any salt.</async>
<sync/>Season at the end, when all of this is done.

Answer:
The train left at nine, because the first one had been cancelled.

Marked:
The train left at nine, because the first one had been cancelled.

Answer:
{answer}

Marked:
"""


def requests(config: RunConfig) -> Iterator[dict[str, str]]:
    """What the teacher is asked, as documents for `raypd generate`: every response of the input."""
    column = config.training.labels_column
    for unit in plan(config):
        for document in read_unit(unit, config, [column]):
            for turn, answer in enumerate(_responses(document, column)):
                if isinstance(answer, str) and answer.strip():
                    yield {"id": _id(document, turn, answer), "prompt": _PROMPT.format(answer=answer.strip())}


def _responses(document: Document, column: str) -> list[Any]:
    responses = document.fields.get(column)
    if isinstance(responses, str):
        return [responses]
    return responses if isinstance(responses, list) else []


def _id(document: Document, turn: int, answer: str) -> str:
    """The id of a response, with a digest of its text, since tags of another text cannot be used."""
    return json.dumps([document.source, document.place, turn, hashlib.sha256(answer.encode()).hexdigest()[:8]])


def label(documents: Sequence[Document], config: RunConfig) -> None:
    """Puts what the teacher wrote into COLUMN of the documents.

    Raises:
        InputError: the run `training.annotations` is over other responses, or holds no answers.
    """
    folder = storage.absolute(str(config.training.annotations))
    tagged: dict[str, str] = {}
    for unit, path in writer.objects(folder):
        rows = writer.read_table(folder, unit, ["id", "status", "text", "finish_reason"], path)[1].to_pylist()
        tagged |= {row["id"]: row["text"] for row in rows if row["status"] == "ok" and row["finish_reason"] == "stop"}
    matched = 0
    for document in documents:
        texts = [
            tagged.get(_id(document, turn, answer)) if isinstance(answer, str) else None
            for turn, answer in enumerate(_responses(document, config.training.labels_column))
        ]
        matched += any(text is not None for text in texts)
        document.fields[COLUMN] = texts
    if not matched:
        raise InputError(
            f"training.annotations {config.training.annotations}: marks no response of input.path; give a run over the "
            "file that `python -m raypd.training.annotate` wrote for this input"
        )


def marked(tagged: str | None, answer: str) -> list[str | Promise | Sync]:
    """An answer in the order of its text, as the teacher has marked it in `tagged` (None: it wrote nothing).

    Raises:
        Skip: the tags are not well-formed, or the text without them is not the answer.
    """
    if tagged is None:
        raise Skip("responses that the teacher did not mark")
    text = re.sub(r"<async\s+topic=", "<async topic=", tagged.strip())
    pieces: list[str | Promise | Sync] = []
    end = 0
    for tag in _TAG.finditer(text):
        pieces.append(text[end : tag.start()])
        pieces.append(Sync() if tag["sync"] else Promise(tag["topic"], tag["block"]))
        end = tag.end()
    pieces.append(text[end:])
    plain = ["" if isinstance(piece, Sync) else piece.text if isinstance(piece, Promise) else piece for piece in pieces]
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


def check(config: RunConfig) -> None:
    """Raises ConfigError where annotations are asked for with a method that does not read them."""
    if config.training.annotations is not None and config.decoding.method != "pasta":
        raise ConfigError(f"training.annotations is for decoding.method pasta, and this is {config.decoding.method}")


def main(
    config: Annotated[Path, typer.Argument(help="Configuration of a training")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set, dotted")] = None,
) -> None:
    """Print what a teacher is to mark, as JSON lines for `raypd generate`."""
    try:
        loaded: Any = load_config(config, overrides or [])
        storage.configure(loaded.storage)
        for request in requests(loaded):
            print(json.dumps(request, ensure_ascii=False))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    typer.run(main)
