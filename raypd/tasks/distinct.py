"""Documents of a unit that say the same are decoded once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from raypd.config import GenerationConfig, RunConfig
from raypd.tasks.base import Document, Record, Request, Task


def gives_the_same(config: RunConfig) -> bool:
    """Whether documents that say the same get the same answer: none is drawn at random, or depends on its stack."""
    own_parameters = isinstance(config.task, GenerationConfig) and config.task.openai  # each request has its sampling
    return config.decoding.sampling.temperature == 0 and not config.decoding.stacked and not own_parameters


class Distinct:
    """Another task, whose requests answer all documents that say what theirs say.

    Args:
        task: gives documents that say the same the same answers.
        config: names the columns that it reads.
    """

    def __init__(self, task: Task, config: RunConfig) -> None:
        self.task = task
        columns = {key: name for key, name in config.wanted_columns().items() if key != "input.id_column"}
        self._columns = sorted({*columns.values(), *filter(None, [config.input.category_column])})

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        rows: dict[str | int, list[int]] = {}  # what a document says -> those that say it
        for document in documents:
            said = repr([document.fields.get(name) for name in self._columns])
            rows.setdefault(document.index if document.error is not None else said, []).append(document.index)
        same = {of[0]: of for of in rows.values()}
        for item in self.task.plan([document for document in documents if document.index in same]):
            yield from _for_all(item, same)


def _for_all(item: Request | Record, same: dict[int, list[int]]) -> list[Request | Record]:
    """A record, or what a request finds, for all rows of a document. same: by the row that is decoded."""
    if isinstance(item, Record):
        return [dataclasses.replace(item, index=row) for row in same[item.index]]

    def copied(found: Sequence[Record | Request]) -> list[Record | Request]:
        return [one for own in found for one in _for_all(own, same)]

    rows = [row for own in item.documents for row in same[own]]
    failed = lambda reason: [one for one in copied(item.fail(reason)) if isinstance(one, Record)]  # noqa: E731
    finish = lambda answer: copied(item.finish(answer))  # noqa: E731
    return [dataclasses.replace(item, documents=rows, finish=finish, failed=failed)]
