"""One call: every document comes out, or the call says so. That each is in its place: tests/tasks/test_cascade.py."""

import threading

import pytest

from raypd.answering.components import build
from raypd.answering.request_queue import answer
from raypd.billing.meter import Meter
from raypd.errors import RunError
from raypd.tasks.base import Document, Record
from tests.runs import run_config


class LosingTask:
    """Answers the first and the last document."""

    def plan(self, documents):
        yield from (Record(document.index, {"text": document.id}) for document in (documents[0], documents[-1]))


def test_a_document_without_a_record_is_named():
    parts = build(run_config("generation", model={"name": "fake"}), None)
    parts.task = LosingTask()
    before = {*threading.enumerate()}
    with pytest.raises(RunError, match="1 documents got no answer, 'lost' among them"):
        answer(parts, [Document(i, name, {}) for i, name in enumerate(("a", "lost", "c"))], Meter("", "autoregressive"))
    # At the end of Python a thread in a pass would crash.
    assert "engine" not in {thread.name for thread in {*threading.enumerate()} - before}
