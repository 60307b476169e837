"""Decodes documents of a unit that have the same content only once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from raypd.config import (
    DecodingConfig,
    GenerationConfig,
    InputConfig,
    QuestionAnsweringConfig,
    TaskSection,
)
from raypd.tasks.base import Document, Record, Request, Task


def gives_the_same(task: TaskSection, decoding: DecodingConfig) -> bool:
    """Return whether documents with the same content always get the same answer.

    They do not if answers are sampled or depend on the other documents of a prompt.
    """
    if isinstance(task, GenerationConfig) and task.openai:
        # Each request of a batch file sets its own sampling.
        return False
    if decoding.stacked:
        return False
    return decoding.sampling.temperature == 0


class Distinct:
    """A task that decodes each content once and copies the answer to all documents that have it.

    Args:
        task: The task.
        section: Its section of the configuration.
        source: Section `input`.
    """

    def __init__(self, task: Task, section: TaskSection, source: InputConfig) -> None:
        self.task = task
        columns = set(section.wanted_columns(source).values())
        if source.category_column:
            columns.add(source.category_column)
        if isinstance(section, QuestionAnsweringConfig):
            columns.update(section.asked_columns)
        self._columns = sorted(columns)

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """Yield the wrapped task's items for one document of each content."""
        # The indices of the documents, by content. Each document with an error is separate.
        indices_of: dict[str | int, list[int]] = {}
        for document in documents:
            key: str | int = document.index
            if document.error is None:
                values = [document.fields.get(name) for name in self._columns]
                # In scans with equal text, the values have different positions on the pages.
                key = repr([values, document.boxes])
            indices_of.setdefault(key, []).append(document.index)
        copies = {indices[0]: indices for indices in indices_of.values()}
        distinct = [document for document in documents if document.index in copies]
        for item in self.task.plan(distinct):
            yield from _for_all(item, copies)


def _for_all(item: Request | Record, copies: dict[int, list[int]]) -> list[Request | Record]:
    """Return an item of the wrapped task, made to answer all documents with the same content.

    Args:
        item: A record or a request.
        copies: The indices of the documents with the same content, by the index of the document
            that is decoded.
    """
    if isinstance(item, Record):
        return [replace(item, index=index) for index in copies[item.index]]

    def copy_results(results: Sequence[Record | Request]) -> list[Any]:
        items: list[Any] = []
        for result in results:
            items += _for_all(result, copies)
        return items

    indices: list[int] = []
    for decoded in item.documents:
        indices += copies[decoded]
    return [item.then(copy_results, documents=indices)]
