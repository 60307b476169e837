"""One call: every document comes out, in its place, or the call says so."""

import pytest

from raypd.answering.answer import answer
from raypd.answering.components import build
from raypd.billing.meter import Meter
from raypd.errors import RunError
from raypd.tasks.base import Document, Record
from tests.runs import run_config


class LosingTask:
    """Answers documents in reverse, and leaves out those called `lost`."""

    def plan(self, documents):
        for document in reversed(documents):
            if document.id != "lost":
                yield Record(document.index, {"text": document.id})


def answered(*ids):
    parts = build(run_config("generation", model={"name": "fake"}), None)
    parts.task = LosingTask()
    return answer(parts, [Document(i, name, {}) for i, name in enumerate(ids)], Meter("", "autoregressive"))


def test_records_stand_in_the_order_of_the_documents():
    texts = [[record.columns["text"] for record in records] for records in answered("a", "b", "c")]
    assert texts == [["a"], ["b"], ["c"]]


def test_a_document_without_a_record_is_named():
    with pytest.raises(RunError, match="1 documents got no answer, 'lost' among them"):
        answered("a", "lost", "c")
