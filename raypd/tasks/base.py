"""The interface of a task: documents in, requests and records out.

A request is a program to decode together with a way to read its answer. A task knows nothing of
engines, Ray or files, so that a worker, a test and a notebook can drive it the same way:

    for item in task.plan(documents):
        # A record is final. A request is decoded first.
        engine.submit(item.program, tag=item, seed=item.seed)
    # When the program of a request has finished:
    for item in request.finish(answer): ...
    # When it failed:
    for record in request.fail(reason): ...
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from raypd.run import FIRST

if TYPE_CHECKING:
    # Both import torch, which a worker without weights does not need.
    from raypd.decoding import Program, Sampling


class TextBox(NamedTuple):
    """The position of a part of a document's text on a page that was recognized.

    Attributes:
        begin: The offset of its first character.
        end: The offset after its last character.
        page: The page, from 1.
        left: Its left edge, as a fraction of the page's width.
        top: Its upper edge, as a fraction of the page's height, from the top.
        right: Its right edge.
        bottom: Its lower edge.
    """

    begin: int
    end: int
    page: int
    left: float
    top: float
    right: float
    bottom: float


@dataclass
class Document:
    """One document of a unit.

    Attributes:
        index: Its number in the unit, from 0.
        id: Its id.
        fields: Its values by column.
        error: Why it could not be read, or None.
        source: The name of the object that it was read from.
        row: Its row number in a Parquet object; otherwise the byte at which it begins in the
            object's text. Together with `source` it is unique.
        boxes: The positions of its text on its pages, if it was recognized (OCR).
    """

    index: int
    id: str
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    source: str = ""
    row: int = 0
    boxes: list[TextBox] = field(default_factory=list)


@dataclass
class Record:
    """One row of the output.

    Attributes:
        index: The index of its document.
        columns: The task's columns. A record with an error has only those that identify what
            failed.
        error: Why there is no answer, or None.
    """

    index: int
    columns: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Request:
    """A program to decode, and how its answer becomes one or more records per document.

    Attributes:
        documents: The indices of the documents that it answers.
        program: The program.
        finish: Turns the program's answer into records, and into requests that follow from it, such
            as the next turn of a conversation.
        seed: The seed for sampling. It depends on the documents' ids, so that sampled answers do
            not depend on which documents are batched together.
        failed: Turns the reason for a failure into records; None: an error record per document.
        sampling: How tokens are sampled; None: as in the configuration of the run.
        model: Which model of a cascade decodes the program, for the bill.
    """

    documents: list[int]
    program: Program[Any]
    finish: Callable[[Any], Sequence[Record | Request]]
    seed: int = 0
    failed: Callable[[str], list[Record]] | None = None
    sampling: Sampling | None = None
    model: str = FIRST

    def fail(self, reason: str) -> list[Record]:
        """Return the records of a program that could not be decoded."""
        if self.failed is not None:
            return self.failed(reason)
        return [Record(index, error=reason) for index in self.documents]

    def then(
        self, take: Callable[[Sequence[Record | Request]], list[Any]], **changes: Any
    ) -> Request:
        """Return a copy of the request whose results go through another function.

        Args:
            take: Gets the results of the request, or the records of its failure, and returns the
                results of the copy.
            **changes: New values of other fields of the copy.
        """

        def finish(answer: Any) -> list[Any]:
            return take(self.finish(answer))

        def failed(reason: str) -> list[Any]:
            return take(self.fail(reason))

        return replace(self, finish=finish, failed=failed, **changes)


class Task(Protocol):
    """A kind of job, such as extraction, question answering or generation."""

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """Yield requests that together answer all documents.

        A document that needs no decoding, such as one with an error, yields its record.
        """


def confidence(logprobs: Sequence[float], choice: bool = False) -> float | None:
    """Return how sure the model is of a value.

    Args:
        logprobs: The log probability of each token of the value.
        choice: Whether the value was chosen from a list. Then the result is its probability among
            the permitted values. Otherwise it is the geometric mean of the tokens' probabilities,
            so a text is not unsure only because it is long.

    Returns:
        A probability, or None for a value without tokens.
    """
    if not logprobs:
        return None
    total = sum(logprobs)
    if choice:
        return math.exp(total)
    return math.exp(total / len(logprobs))


def seed_of(seed: int, ids: Sequence[str | int]) -> int:
    """Return the seed of a request.

    Args:
        seed: The seed of the configuration.
        ids: The ids of the documents that it answers, and numbers within them.

    Returns:
        An integer of 64 bits.
    """
    digest = hashlib.sha256(json.dumps([seed, *ids]).encode()).digest()
    return int.from_bytes(digest[:8], "big")
