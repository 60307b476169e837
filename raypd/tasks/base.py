"""The interface of a task: documents in, requests (programs with a way to read their answer),
records out.

It knows nothing of engines, Ray or files, so that a worker, a test and a notebook drive it the same
way:

    for request in task.plan(documents):          # or a record, where nothing is to be decoded
        engine.submit(request.program, tag=request, seed=request.seed)   # ... and when it ends with
            `answer`:
        for item in request.finish(answer): ...   # or request.fail(reason)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from raypd.run.usage import FIRST

if TYPE_CHECKING:  # it brings torch, which a worker without weights does without
    from raypd.decoding.program import Program
    from raypd.decoding.sampling import Sampling


@dataclass
class Document:
    """One document of a unit, as it was read. No other document has the same source and place."""

    index: int  # in the unit, from 0
    id: str
    fields: dict[str, Any] = field(default_factory=dict)  # by column
    error: str | None = None  # why it could not be read
    source: str = ""  # name of its object
    # In that object: the row's number in Parquet, else the byte of the text at which it begins.
    place: int = 0


@dataclass
class Record:
    """One output row of the document `index`: `columns` are the task's; of an error those that say
    what it is of.
    """

    index: int
    columns: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Request:
    """A program to decode, the documents it answers, and how its answer becomes records (one or
    more a document).
    """

    documents: list[int]  # the index of each
    program: Program[Any]
    # Requests follow on this one, as a conversation's next turn.
    finish: Callable[[Any], Sequence[Record | Request]]
    # Made of the documents' ids, so that sampled answers do not depend on what they are batched
    # with.
    seed: int = 0
    # Takes the reason; None: an error record a document.
    failed: Callable[[str], list[Record]] | None = None
    sampling: Sampling | None = None  # None: as the run's
    model: str = FIRST  # which model of a cascade decodes it, for the bill

    def fail(self, reason: str) -> list[Record]:
        """The records of a program that could not be decoded."""
        if self.failed is not None:
            return self.failed(reason)
        return [Record(index, error=reason) for index in self.documents]

    def then(
        self, take: Callable[[Sequence[Record | Request]], list[Any]], **changes: Any
    ) -> Request:
        """It with some changes; `take` makes its results out of those that it has, of a failure
        too.
        """
        finish, failed = (
            (lambda answer: take(self.finish(answer))),
            (lambda reason: take(self.fail(reason))),
        )
        return replace(self, finish=finish, failed=failed, **changes)


class Task(Protocol):
    """A kind of job: extraction, question answering, generation."""

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """Requests that together answer every document; of one that needs no decoding (an error)
        its record.
        """


def confidence(logprobs: Sequence[float], choice: bool = False) -> float | None:
    """How sure the model is: of a choice its probability among what was allowed, else the geometric
    mean of the tokens' probabilities, so that a long text is not unsure for its length. None where
    there is no token.
    """
    return math.exp(sum(logprobs) / (1 if choice else len(logprobs))) if logprobs else None


def seed_of(seed: int, ids: Sequence[str | int]) -> int:
    """A request's seed, out of the configuration's and of the ids (and places below these) of what
    it answers.
    """
    return int.from_bytes(hashlib.sha256(json.dumps([seed, *ids]).encode()).digest()[:8], "big")
