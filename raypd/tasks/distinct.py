"""Documents of a unit that say the same are decoded once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from raypd.config import GenerationConfig, RunConfig
from raypd.tasks.base import Document, Record, Request, Task


def gives_the_same(config: RunConfig) -> bool:
    """Whether documents that say the same get the same answer: none is drawn at random, or depends
    on its stack.
    """
    # Each request has its sampling.
    own_parameters = isinstance(config.task, GenerationConfig) and config.task.openai
    return (
        config.decoding.sampling.temperature == 0
        and not config.decoding.stacked
        and not own_parameters
    )


class Distinct:
    """Another task, which gives the same answers to the same texts; its requests answer all
    documents with one.
    """

    def __init__(self, task: Task, config: RunConfig) -> None:
        self.task = task
        columns = {
            key: name for key, name in config.wanted_columns().items() if key != "input.id_column"
        }
        self._columns = sorted({*columns.values(), *filter(None, [config.input.category_column])})

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        rows: dict[str | int, list[int]] = {}  # what documents say -> which say it
        for document in documents:
            content = repr([document.fields.get(name) for name in self._columns])
            rows.setdefault(document.index if document.error is not None else content, []).append(
                document.index
            )
        same = {indices[0]: indices for indices in rows.values()}
        for item in self.task.plan([document for document in documents if document.index in same]):
            yield from _for_all(item, same)


def _for_all(item: Request | Record, same: dict[int, list[int]]) -> list[Request | Record]:
    """A record, or a request's, for all documents that say the same. same: their indices, by the
    one decoded.
    """
    if isinstance(item, Record):
        return [replace(item, index=index) for index in same[item.index]]

    def copied(results: Sequence[Record | Request]) -> list[Any]:
        return [copy for result in results for copy in _for_all(result, same)]

    return [
        item.then(
            copied, documents=[index for decoded in item.documents for index in same[decoded]]
        )
    ]
