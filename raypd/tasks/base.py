"""The interface of a task: documents in, requests (programs with a way to read their answer), records out.

A task knows prompts and answers and nothing of engines, Ray or files, so that a worker, a test and a notebook drive it
the same way:

    for request in task.plan(documents):          # or a record, where nothing is to be decoded
        engine.submit(request.program, tag=request, seed=request.seed)   # ... and when it ends with `answer`:
        for item in request.finish(answer): ...   # or request.fail(reason)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # it brings torch, which a worker without weights does without
    from raypd.decoding.program import Program
    from raypd.decoding.sampling import Sampling


@dataclass
class Document:
    """One document of a unit, as it was read. No other document has the same source and place.

    Attributes:
        index: its place in the unit, from 0.
        fields: by column; may be empty where there is an error.
        error: why it could not be read.
        source: name of the object that it stands in.
        place: in that object: the row's number in Parquet; of JSONL and CSV the byte of the (uncompressed) text at
            which it begins.
    """

    index: int
    id: str
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    source: str = ""
    place: int = 0


@dataclass
class Record:
    """One output row of the document `index`: `columns` are the task's (`Task.columns`); an error leaves them empty."""

    index: int
    columns: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Request:
    """A program to decode, the documents it answers, and how its answer becomes records (one or more a document).

    Attributes:
        documents: the index of each.
        finish: also returns requests that follow on this one, such as the next turn of a conversation.
        seed: made of the documents' ids, so that sampled answers do not depend on what they are batched with.
        failed: the records of a program that could not be decoded, given the reason; None: an error record a document.
        sampling: how its tokens are picked; None: as those of the run.
    """

    documents: list[int]
    program: Program[Any]
    finish: Callable[[Any], Sequence[Record | Request]]
    seed: int = 0
    failed: Callable[[str], list[Record]] | None = None
    sampling: Sampling | None = None

    def fail(self, reason: str) -> list[Record]:
        """The records of a program that could not be decoded."""
        if self.failed is not None:
            return self.failed(reason)
        return [Record(index, error=reason) for index in self.documents]


class Task(Protocol):
    """A kind of job: extraction, question answering, generation."""

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """Requests that together answer every document; of one that needs no decoding (an error) its record."""


def confidence(logprobs: Sequence[float], choice: bool = False) -> float | None:
    """How sure the model is of what it decoded; None where there is no token.

    choice: it is one of a few that were allowed, and this is its probability among them. Otherwise the geometric mean
    of the token probabilities, so that a long text is not unsure for its length.
    """
    return math.exp(sum(logprobs) / (1 if choice else len(logprobs))) if logprobs else None


def seed_of(seed: int, ids: Sequence[str | int]) -> int:
    """A request's seed, out of the configuration's and of the ids (and places below these) of what it answers."""
    return int.from_bytes(hashlib.sha256(json.dumps([seed, *ids]).encode()).digest()[:8], "big")
