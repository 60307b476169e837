"""What a task is to the rest: documents in, works (programs with a way to read their answer), records out.

A task knows prompts and answers and nothing of engines, Ray or files, so that a worker, a test and a notebook drive it
the same way:

    for work in task.plan(documents):
        engine.submit(work.program, tag=work, seed=work.seed)   # ... and when it ends with `answer`:
        for item in work.finish(answer): ...      # or work.fail(reason)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

if TYPE_CHECKING:  # it brings torch, which a worker without weights does without
    from raypd.decoding.program import Program


@dataclass
class Document:
    """One document of a unit, as it was read.

    `row` is its place in the unit (0 based) and `error` says why it could not be read (then `fields` may be empty).
    `source` and `place` say where it stands in the input: the object's name, and the row's number in Parquet or the
    byte at which its line begins in (uncompressed) JSONL. No other document has both.
    """

    row: int
    id: str
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    source: str = ""
    place: int = 0


@dataclass
class Record:
    """One output row: `columns` are the task's own (see `Task.columns`); an error leaves them empty."""

    row: int
    columns: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Request:
    """A program to decode, the rows it answers, and how its answer becomes records (one or more a row).

    `finish` may also give works that follow on this one, such as the next turn of a conversation.
    `seed` comes from the documents' ids, so that sampled answers do not depend on what they are batched with.
    """

    rows: list[int]
    program: Program[Any]
    finish: Callable[[Any], Sequence[Record | Request]]
    seed: int = 0

    def fail(self, reason: str) -> list[Record]:
        """Error records for all rows of a program that could not be decoded."""
        return [Record(row=row, error=reason) for row in self.rows]


class Task(Protocol):
    """A kind of job: extraction, question answering, generation."""

    def input_columns(self) -> list[str]:
        """Columns that the input must have."""

    def columns(self) -> pa.Schema:
        """The task's own output columns, the same for every unit whatever it holds."""

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """Works that together answer every document; a document that needs no decoding (an error) as its record."""
