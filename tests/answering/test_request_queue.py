"""The request queue: planning, admission, results, failures, cancellation, and what is billed."""

import contextlib
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from raypd.answering.components import WorkerComponents
from raypd.answering.request_queue import Cancelled, EngineBroken, RequestQueue, answer
from raypd.billing.meter import Meter
from raypd.decoding.counts import Finished, TokenCounts
from raypd.run.usage import FIRST
from raypd.tasks.base import Document, Record, Request
from tests.processes import wait_for


class Engine:
    """Finishes its oldest program in each step, once `gate` is open."""

    patience = None
    waiting = ""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.programs = []
        self.sequences = []
        self.most_pending = 0
        self.submitted = []
        self.error = None

    @property
    def pending(self):
        return len(self.programs)

    def submit(self, program, *, tag, sampling, seed):
        if program == "rejected":
            raise ValueError("the prompt is too long")
        self.submitted.append((program, sampling, seed))
        self.programs.append((program, tag))
        self.most_pending = max(self.most_pending, self.pending)

    def step(self):
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        program, tag = self.programs.pop(0)
        error = ValueError("no grammar matches") if program == "fails" else None
        return [Finished(tag, program.upper(), error, TokenCounts(10, 4, 3, 2))]


class Task:
    """One request per document, whose text is the program; some texts make it misbehave."""

    def __init__(self):
        self.planned = []

    def plan(self, documents):
        for document in documents:
            text = document.fields["text"]
            self.planned.append(text)
            if text == "no plan":
                raise ValueError("no category fits")
            if text == "no request":
                yield Record(document.index, error="empty text")
            else:
                yield Request([document.index], text, self.reader(document), seed=7)

    def reader(self, document):
        def read(text):
            if text == "UNREADABLE":
                raise KeyError("value")
            if text == "TWO TURNS":
                return [Request([document.index], "turn", self.reader(document))]
            return [Record(document.index, {"text": text})]

        return read


class NoMeter(Meter):
    """A meter that also keeps what it was told."""

    def __init__(self):
        super().__init__("", "guided")
        self.token_calls = []
        self.lost_units = []

    def tokens(self, unit, categories, counts, model=FIRST):
        self.token_calls.append((unit, list(categories), counts))
        return super().tokens(unit, categories, counts, model)

    def lose(self, unit):
        self.lost_units.append(unit)
        super().lose(unit)


def documents_of(*texts):
    return [Document(index, f"id{index}", {"text": text}) for index, text in enumerate(texts)]


@pytest.fixture
def queue():
    """A queue over the engine and the task of this file, for four programs at a time."""
    engine = Engine()
    queue = RequestQueue(WorkerComponents(engine, Task(), "greedy", 4), NoMeter())
    queue.meter.ready()
    yield queue
    engine.gate.set()
    queue.close()


@contextlib.contextmanager
def in_thread(function, *arguments):
    """Run a function in a thread; gives an object whose `error` is what it raised."""
    outcome = SimpleNamespace(error=None)

    def run():
        try:
            function(*arguments)
        except BaseException as error:
            outcome.error = error

    outcome.thread = threading.Thread(target=run)
    outcome.thread.start()
    yield outcome
    outcome.thread.join(60)
    assert not outcome.thread.is_alive()


def answered(queue, *texts):
    """The records of a unit of these texts: {text of the document: its record}."""
    documents = documents_of(*texts)
    with queue.unit("u") as state:
        queue.count(state, dict.fromkeys(range(len(documents)), "shoes"))
        queue.answer(state, documents)
    assert Counter(record.index for record in state.records) == Counter(range(len(documents)))
    return {texts[record.index]: record for record in state.records}


def test_every_document_gets_its_record(queue):
    texts = [f"text {number}" for number in range(50)]
    records = answered(queue, *texts)
    assert {text: record.columns["text"] for text, record in records.items()} == {
        text: text.upper() for text in texts
    }


def test_the_engine_never_holds_more_programs_than_its_capacity(queue):
    queue.parts.engine.gate.clear()
    with queue.unit("u") as state, in_thread(queue.answer, state, documents_of(*["a"] * 40)):
        # Four programs are in the engine, and four more are planned ahead.
        wait_for(lambda: len(queue.parts.task.planned) == 8, "nothing was planned ahead")
        assert queue.parts.engine.pending <= 4
        queue.parts.engine.gate.set()
    assert queue.parts.engine.most_pending == 4
    assert len(state.records) == 40


def test_a_request_goes_to_the_engine_with_the_sampling_of_the_run_and_its_own_seed(queue):
    answered(queue, "a")
    assert queue.parts.engine.submitted == [("a", "greedy", 7)]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("fails", "ValueError: no grammar matches"),
        ("rejected", "ValueError: the prompt is too long"),
        ("unreadable", "KeyError: 'value'"),
        ("no plan", "ValueError: no category fits"),
        ("no request", "empty text"),
    ],
)
def test_a_failure_concerns_its_document_alone(queue, text, error):
    records = answered(queue, "good", text, "also good")
    assert records[text].error == error
    assert records["good"].columns == {"text": "GOOD"}
    assert records["also good"].columns == {"text": "ALSO GOOD"}


def test_a_request_that_follows_on_another_is_decoded_before_its_document_is_answered(queue):
    records = answered(queue, "two turns", "a")
    assert records["two turns"].columns == {"text": "TURN"}


def test_a_broken_engine_ends_every_unit_with_its_traceback(queue):
    queue.parts.engine.error = RuntimeError("the device is gone")
    with queue.unit("u") as state, pytest.raises(EngineBroken, match="the device is gone"):
        queue.answer(state, documents_of("a"))


def test_a_cancelled_unit_ends_and_its_requests_leave_the_queue(queue):
    engine = queue.parts.engine
    engine.gate.clear()
    with (
        in_thread(lambda: answered(queue, *["a"] * 20)) as outcome,
    ):
        wait_for(lambda: engine.pending == 4, "the engine got nothing")
        queue.cancel("u", only_waiting=True)
        assert queue.progress()["u"].begun
        queue.cancel("u", only_waiting=False)
        outcome.thread.join(60)
        assert isinstance(outcome.error, Cancelled)
        assert queue.progress() == {}
        assert len(queue._queue) == 0
        engine.gate.set()
        # The four programs that were in the engine finish, and count as lost.
        wait_for(lambda: "u (ended)" in queue.meter.lost_units, "nothing was lost")


def test_a_unit_that_has_not_begun_can_be_taken_back_alone(queue):
    engine = queue.parts.engine
    engine.gate.clear()
    with (
        queue.unit("old") as old,
        queue.unit("young") as young,
        in_thread(queue.answer, old, documents_of(*["a"] * 20)),
        in_thread(queue.answer, young, documents_of("b")) as younger,
    ):
        wait_for(lambda: engine.pending == 4, "the engine got nothing")
        queue.cancel("young", only_waiting=True)
        younger.thread.join(60)
        assert isinstance(younger.error, Cancelled)
        assert "b" not in queue.parts.task.planned
        engine.gate.set()
    assert len(old.records) == 20


def test_a_younger_unit_is_planned_only_when_the_older_ones_have_nothing_left(queue):
    engine = queue.parts.engine
    engine.gate.clear()
    planned = queue.parts.task.planned
    with (
        queue.unit("old") as old,
        queue.unit("young") as young,
        in_thread(queue.answer, old, documents_of(*["a"] * 60)),
    ):
        wait_for(lambda: len(planned) == 8, "the older unit plans nothing")
        with in_thread(queue.answer, young, documents_of(*["b"] * 60)):
            engine.gate.set()
    assert planned == ["a"] * 60 + ["b"] * 60
    assert len(old.records) == len(young.records) == 60


class BeginsInBetween:
    """An older unit that begins to plan between the first two looks of a younger one at it."""

    number = 0

    def __init__(self):
        self.looks = 0

    @property
    def has_more(self):
        self.looks += 1
        return self.looks == 2


def test_a_unit_whose_turn_passes_before_it_plans_is_still_answered(queue):
    older = BeginsInBetween()
    queue._units["older"] = older
    assert set(answered(queue, "a", "b")) == {"a", "b"}
    assert older.looks > 2
    del queue._units["older"]


def test_tokens_are_billed_to_the_unit_and_the_category_of_each_row(queue):
    answered(queue, "a", "fails")
    assert [(unit, categories) for unit, categories, _ in queue.meter.token_calls] == [
        ("u", ["shoes"]),
        ("u", ["shoes"]),
    ]
    assert all(counts.prefill_tokens == 10 for _, _, counts in queue.meter.token_calls)


def test_the_usage_of_each_row_is_counted_by_model(queue):
    with queue.unit("u") as state:
        queue.answer(state, documents_of("a", "b"))
    assert state.usage_by_row.keys() == {(0, FIRST), (1, FIRST)}
    assert state.usage_by_row[0, FIRST]["prefill_tokens"] == 10


def test_the_counts_of_a_unit_are_the_sums_over_its_programs(queue):
    with queue.unit("u") as state:
        queue.answer(state, documents_of("a", "b", "c"))
    assert state.counts["prefill_tokens"] == 30


def test_progress_counts_answered_and_failed_documents(queue):
    with queue.unit("u") as state:
        queue.count(state, dict.fromkeys(range(4), ""))
        queue.answer(state, documents_of("a", "fails"))
        progress = queue.progress()["u"]
    assert progress.answered == 2
    assert progress.failed == 1
    assert progress.begun
    assert progress.seconds_left is not None
    assert progress.seconds_left > 0


def test_progress_says_what_the_engine_waits_for(queue):
    queue.parts.engine.waiting = "the server refuses requests"
    with queue.unit("u"):
        assert queue.progress()["u"].waiting == "the server refuses requests"


def test_closing_ends_the_thread_of_the_engine(queue):
    queue.close()
    assert not queue._thread.is_alive()


def test_answer_returns_the_records_in_the_order_of_the_documents():
    parts = WorkerComponents(Engine(), Task(), None, 4)
    records = answer(parts, documents_of("a", "no request", "c"), NoMeter())
    assert [[record.error or record.columns["text"] for record in each] for each in records] == [
        ["A"],
        ["empty text"],
        ["C"],
    ]
