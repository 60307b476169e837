"""A cascade: of the documents that the first model is not sure of a second is asked, for the unsure
values.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raypd.config import Category, RunConfig
from raypd.run.usage import FIRST, SECOND
from raypd.tasks.base import Document, Record, Request, Task
from raypd.tasks.columns import Row, record_of, value_in

MODELS = (FIRST, SECOND)  # as the rows name them
_TOGETHER = 100  # documents, of which the least sure share is chosen


@dataclass(frozen=True)
class SecondProgram:
    """A program for the second model's engine."""

    program: Any


class Cascade:
    """The task of a run with a second model."""

    def __init__(
        self, first: Task, second: Task, config: RunConfig, second_sampling: Any = None
    ) -> None:
        self.first, self.second, self.second_sampling = first, second, second_sampling
        self.settings, self.categories = config.cascade, config.extraction.categories

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        answers = _Answers(self, documents)
        for item in self.first.plan(documents):
            yield from answers.take([item])


@dataclass
class _Group:
    """Documents of which a share may go to the second model. unsure: the first model's records, not
    passed on yet.
    """

    documents: int
    unanswered: int
    unsure: list[Record] = field(default_factory=list)


class _Answers:
    """The first model's answers to the documents of one plan, until it is known which of them the
    second is asked.
    """

    def __init__(self, cascade: Cascade, documents: Sequence[Document]) -> None:
        self.cascade = cascade
        self.documents = {document.index: document for document in documents}
        self.group_of: dict[int, _Group] = {}
        for begin in range(0, len(documents), _TOGETHER):
            members = [document.index for document in documents[begin : begin + _TOGETHER]]
            self.group_of |= dict.fromkeys(members, _Group(len(members), len(members)))

    def take(self, items: Sequence[Request | Record]) -> list[Request | Record]:
        """The first model's requests, its records that stand, and requests to the second model."""
        out: list[Request | Record] = []
        for item in items:
            if isinstance(item, Request):
                out.append(item.then(self.take))
                continue
            group = self.group_of[item.index]
            group.unanswered -= 1
            if doubt(item.columns.get("values") or [], self.cascade.settings.under):
                group.unsure.append(item)
            else:
                out.append(marked(item))
            if self.cascade.settings.share == 1 or not group.unanswered:
                out += self._ask(group)
        return out

    def _ask(self, group: _Group) -> list[Request | Record]:
        """Asks the second model of the least sure documents of a group; the other records stand."""
        settings = self.cascade.settings
        most = math.ceil(settings.share * group.documents - 1e-9)  # 0.07 * 100 is a little over 7
        ranked = sorted(
            group.unsure, key=lambda r: (-doubt(r.columns["values"], settings.under), r.index)
        )
        group.unsure = []
        out: list[Request | Record] = [marked(record) for record in ranked[most:]]
        for record in ranked[:most]:
            try:
                items = list(self.cascade.second.plan([self.documents[record.index]]))
            except Exception as error:  # of this document alone
                items = [Record(record.index, error=f"{type(error).__name__}: {error}")]
            out += self._merged(record, items)
        return out

    def _merged(self, record: Record, items: Sequence[Request | Record]) -> list[Any]:
        """The second model's requests, and its records put together with the first model's."""
        cascade, take = self.cascade, partial(self._merged, record)
        out: list[Request | Record] = []
        for item in items:
            if isinstance(item, Record):
                category = cascade.categories[record.columns["category"]]
                out.append(merged(record, item, category, cascade.settings.under))
            else:
                program = SecondProgram(item.program)
                out.append(
                    item.then(take, program=program, sampling=cascade.second_sampling, model=SECOND)
                )
        return out


def is_unsure(value: Row, under: float) -> bool:
    return value["confidence"] is None or value["confidence"] < under


def doubt(values: Sequence[Row], under: float) -> float:
    """How many of a document's unsure values will be wrong, by their confidences; 0: none is
    unsure.
    """
    return sum(1 - (value["confidence"] or 0.0) for value in values if is_unsure(value, under))


def merged(first: Record, second: Record, category: Category, under: float) -> Record:
    """The first model's record with the second's values for the unsure ones."""
    if second.error is not None:
        return Record(first.index, error=f"the cascade's second model: {second.error}")
    records = [json.loads(record.columns["record"]) for record in (first, second)]
    values, named = [], {}
    for attribute, *rows in zip(
        category.attributes, first.columns["values"], second.columns["values"], strict=True
    ):
        by = int(is_unsure(rows[0], under))
        values.append({**rows[by], "model": MODELS[by]})
        named[attribute.name] = value_in(records[by], attribute)
    record = json.dumps(record_of(category, named), ensure_ascii=False)
    truncated = first.columns["truncated"] or second.columns["truncated"]
    return Record(
        first.index, {**first.columns, "record": record, "values": values, "truncated": truncated}
    )


def marked(record: Record) -> Record:
    """A record that the first model answered alone."""
    if record.error is not None:
        return record
    values = [{**value, "model": MODELS[0]} for value in record.columns["values"]]
    return replace(record, columns={**record.columns, "values": values})
