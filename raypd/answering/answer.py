"""One call: documents to records, in this process."""

import contextlib
from collections.abc import Sequence

from raypd.answering.components import WorkerComponents
from raypd.answering.request_queue import RequestQueue
from raypd.billing.meter import Meter
from raypd.errors import RunError
from raypd.tasks.base import Document, Record


def answer(parts: WorkerComponents, documents: Sequence[Document], meter: Meter) -> list[list[Record]]:
    """The records of each document, whose indices count from 0. Raises EngineBroken; RunError for a fault of raypd."""
    queue = RequestQueue(parts, meter)
    with contextlib.closing(queue), queue.unit("call") as unit:
        meter.ready()
        queue.answer(unit, documents)
    records: list[list[Record]] = [[] for _ in documents]
    for record in unit.records:
        records[record.index].append(record)
    missing = [document.id for document, answers in zip(documents, records, strict=True) if not answers]
    if missing:
        raise RunError(f"{len(missing)} documents got no answer, {missing[0]!r} among them; this is a fault of raypd")
    return records
