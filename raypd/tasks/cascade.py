"""Answers with two models: the second model decodes the documents that the first is unsure of.

The record of such a document has the first model's values where that model is sure, and the second
model's values everywhere else.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raypd.config import CascadeConfig, Category
from raypd.run import FIRST, SECOND
from raypd.tasks.base import Document, Record, Request, Task
from raypd.tasks.record import Row, record_of, value_in

# The names of the two models in rows.
MODELS = (FIRST, SECOND)
# The least sure documents are chosen from groups of this size.
_GROUP_SIZE = 100


@dataclass(frozen=True)
class SecondProgram:
    """A program for the second model's engine."""

    program: Any


class Cascade:
    """The task of a run with a second model."""

    def __init__(
        self,
        first: Task,
        second: Task,
        settings: CascadeConfig,
        categories: Mapping[str, Category],
        second_sampling: Any = None,
    ) -> None:
        """Combine the tasks of both models.

        Args:
            first: The task of the first model, which answers all documents.
            second: The same task for the second model.
            settings: Section `cascade`.
            categories: The categories of the documents.
            second_sampling: The sampling of the second model's requests; None: that of the run.
        """
        self.first = first
        self.second = second
        self.second_sampling = second_sampling
        self.settings = settings
        self.categories = categories

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """Yield the first model's requests; the second model's follow from their answers."""
        answers = _FirstAnswers(self, documents)
        for item in self.first.plan(documents):
            yield from answers.take([item])


@dataclass
class _DocumentGroup:
    """Documents of which a limited share may go to the second model.

    Attributes:
        documents: The number of documents.
        unanswered: Documents that the first model has not answered yet.
        unsure: Records of the first model that have unsure values and were not passed on yet.
    """

    documents: int
    unanswered: int
    unsure: list[Record] = field(default_factory=list)


class _FirstAnswers:
    """Collects the first model's answers until the documents for the second model are chosen."""

    def __init__(self, cascade: Cascade, documents: Sequence[Document]) -> None:
        self.cascade = cascade
        self.documents = {document.index: document for document in documents}
        self.group_of: dict[int, _DocumentGroup] = {}
        for begin in range(0, len(documents), _GROUP_SIZE):
            members = documents[begin : begin + _GROUP_SIZE]
            group = _DocumentGroup(documents=len(members), unanswered=len(members))
            for document in members:
                self.group_of[document.index] = group

    def take(self, items: Sequence[Request | Record]) -> list[Request | Record]:
        """Return the first model's requests and sure records, and requests to the second model."""
        output: list[Request | Record] = []
        for item in items:
            if isinstance(item, Request):
                output.append(item.then(self.take))
                continue
            group = self.group_of[item.index]
            group.unanswered -= 1
            values = item.columns.get("values") or []
            if doubt(values, self.cascade.settings.under):
                group.unsure.append(item)
            else:
                output.append(marked(item))
            # With a share of 1 there is nothing to choose, so no document waits for its group.
            if self.cascade.settings.share == 1 or group.unanswered == 0:
                output += self._ask_second(group)
        return output

    def _ask_second(self, group: _DocumentGroup) -> list[Request | Record]:
        """Plan the least sure documents of a group again; the other records are final."""
        settings = self.cascade.settings
        # In floating point, 0.07 * 100 is slightly more than 7.
        limit = math.ceil(settings.share * group.documents - 1e-9)

        def rank(record: Record) -> tuple[float, int]:
            return -doubt(record.columns["values"], settings.under), record.index

        ranked = sorted(group.unsure, key=rank)
        group.unsure = []
        output: list[Request | Record] = [marked(record) for record in ranked[limit:]]
        for record in ranked[:limit]:
            try:
                items = list(self.cascade.second.plan([self.documents[record.index]]))
            except Exception as error:
                # The other documents are not affected.
                items = [Record(record.index, error=f"{type(error).__name__}: {error}")]
            output += self._merged(record, items)
        return output

    def _merged(self, record: Record, items: Sequence[Request | Record]) -> list[Any]:
        """Return the second model's requests, and its records merged with the first model's."""
        cascade = self.cascade
        output: list[Request | Record] = []
        for item in items:
            if isinstance(item, Record):
                category = cascade.categories[record.columns["category"]]
                output.append(merged(record, item, category, cascade.settings.under))
                continue
            request = item.then(
                partial(self._merged, record),
                program=SecondProgram(item.program),
                sampling=cascade.second_sampling,
                model=SECOND,
            )
            output.append(request)
        return output


def is_unsure(value: Row, under: float) -> bool:
    """Return whether a value's confidence is unknown or below the threshold `under`."""
    return value["confidence"] is None or value["confidence"] < under


def doubt(values: Sequence[Row], under: float) -> float:
    """Return how many of a document's unsure values are expected to be wrong.

    Args:
        values: The rows of the document's values.
        under: The confidence below which a value is unsure.

    Returns:
        The sum of 1 - confidence over the unsure values; 0 if none is unsure.
    """
    return sum(1 - (value["confidence"] or 0.0) for value in values if is_unsure(value, under))


def merged(first: Record, second: Record, category: Category, under: float) -> Record:
    """Return the first model's record with the second model's values for the unsure ones.

    Args:
        first: The record of the first model, without an error.
        second: The record of the second model. Its error becomes the document's error.
        category: The category of the document.
        under: The confidence below which a value is unsure.
    """
    if second.error is not None:
        return Record(first.index, error=f"the cascade's second model: {second.error}")
    records = [first.columns["record"], second.columns["record"]]
    values = []
    value_of: dict[str, Any] = {}
    for attribute, first_row, second_row in zip(
        category.attributes, first.columns["values"], second.columns["values"], strict=True
    ):
        model = 0
        row = first_row
        if is_unsure(first_row, under):
            model = 1
            row = second_row
        values.append({**row, "model": MODELS[model]})
        value_of[attribute.name] = value_in(records[model], attribute)
    columns = {
        **first.columns,
        "record": record_of(category, value_of),
        "values": values,
        "truncated": first.columns["truncated"] or second.columns["truncated"],
    }
    return Record(first.index, columns)


def marked(record: Record) -> Record:
    """Return a record with its values marked as the first model's."""
    if record.error is not None:
        return record
    values = [{**value, "model": MODELS[0]} for value in record.columns["values"]]
    return replace(record, columns={**record.columns, "values": values})
