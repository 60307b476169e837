"""Feeds one engine with the requests of several units, so that it never drains, and collects their
records. Each unit has a thread that plans requests, one more drives the engine alone. A younger
unit plans only when the older ones have nothing more to plan: units end one after the other, and
the engine's batch is full across their border.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from raypd.answering.components import WorkerComponents
from raypd.billing.meter import Meter
from raypd.config.secrets import redact
from raypd.dataset import writer
from raypd.errors import RunError
from raypd.tasks.base import Document, Record, Request

_CLOSE_SECONDS = 10.0


class EngineBroken(Exception):
    """The engine itself failed: nothing that is in it will end."""


class Cancelled(Exception):
    """The unit is wanted back."""


class Progress(NamedTuple):
    answered: int = 0  # documents
    failed: int = 0  # of these
    begun: bool = False  # whether its first document was planned
    # Until all of it is answered, at its pace so far, where there is one.
    seconds_left: float | None = None
    waiting: str = ""  # what the engine waits for, if it does so for long


@dataclass(eq=False)
class UnitState:
    """A unit in flight. more: its plan has more requests. begun: when the first was planned
    (monotonic).
    """

    number: int
    unit: str
    documents: int = 0
    more: bool = False
    begun: float | None = None
    cancelled: bool = False
    # Row -> its requests: queued, in the engine, not read yet.
    open: Counter[int] = field(default_factory=Counter)
    finished: deque[tuple[Request, Any]] = field(default_factory=deque)  # not read yet
    records: list[Record] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(writer.COUNTS, 0))
    categories: dict[int, str] = field(default_factory=dict)  # of every row

    @property
    def answered(self) -> set[int]:
        """Rows of which nothing is queued or in the engine any more."""
        return {record.index for record in self.records} - self.open.keys()

    def progress(self) -> Progress:
        answered = len(self.answered)
        failed = len({record.index for record in self.records if record.error is not None})
        if self.begun is None or not answered:
            return Progress(answered, failed, self.begun is not None)
        seconds = time.monotonic() - self.begun
        return Progress(answered, failed, True, seconds / answered * (self.documents - answered))


class RequestQueue:
    """Requests on their way to an engine, the capacity of which it keeps filled.

    Safe in threads.
    """

    def __init__(self, parts: WorkerComponents, meter: Meter) -> None:
        self.parts, self.meter, self.batch = parts, meter, parts.capacity()
        self._changed = threading.Condition()
        self._units: dict[str, UnitState] = {}  # by id, in the order in which they came
        self._queue: deque[tuple[UnitState, Request]] = deque()
        self._in_engine = 0
        self._numbers = 0
        self._broken: str | None = None
        self._closed = False
        # Tokenizers and tasks are not promised to be safe in threads.
        self._task_lock = threading.Lock()
        self._load: Counter[str] = Counter()  # programs in the engine, by unit
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the engine's thread, which else holds the model as long as the process lives."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # The end of Python in the midst of its pass would be a crash.
        self._thread.join(_CLOSE_SECONDS)

    def progress(self) -> dict[str, Progress]:
        with self._changed:
            waiting = self.parts.engine.waiting
            return {
                unit: state.progress()._replace(waiting=waiting)
                for unit, state in self._units.items()
            }

    def cancel(self, unit: str, only_waiting: bool) -> None:
        """Stops a unit, if it is in flight. only_waiting: unless some of it was begun."""
        with self._changed:
            state = self._units.get(unit)
            if state is not None and not (only_waiting and state.begun is not None):
                state.cancelled = True
                self._changed.notify_all()

    @contextlib.contextmanager
    def unit(self, unit: str) -> Iterator[UnitState]:
        """A unit for the length of a block; what is not answered by then is dropped, what is not
        committed lost.
        """
        self.meter.begin(unit)
        with self._changed:
            self._numbers += 1
            state = self._units[unit] = UnitState(self._numbers, unit)
        try:
            yield state
        finally:
            with self._changed:
                if self._units.get(unit) is state:
                    del self._units[unit]
                self._queue = deque(item for item in self._queue if item[0] is not state)
                self._changed.notify_all()
                self._bill_unread(state)
            self.meter.lose(unit)

    def count(self, state: UnitState, categories: dict[int, str]) -> None:
        """Notes the documents of a unit by their index, with what each is billed as."""
        state.documents = len(categories)
        state.categories = categories
        self.meter.documents(state.unit, categories.values())

    @contextlib.contextmanager
    def answering(self, state: UnitState, documents: Sequence[Document]) -> Iterator[Future[None]]:
        """`answer` in a thread beside a block, whose end cancels it."""
        with ThreadPoolExecutor(1) as pool:
            try:
                yield pool.submit(self.answer, state, documents)
            finally:
                self.cancel(state.unit, only_waiting=False)

    def answer(self, state: UnitState, documents: Sequence[Document]) -> None:
        """Plans documents as the engine has room, and collects records.

        Raises EngineBroken; Cancelled by `cancel`.
        """
        plan = self._plan(documents)
        state.more = True

        def due() -> bool:
            return self._may_plan(state) or not (state.more or state.open)

        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._broken or state.cancelled or state.finished or due()
                )
                if self._broken:
                    raise EngineBroken(self._broken)
                if state.cancelled:
                    raise Cancelled
                finished = list(state.finished)
                state.finished.clear()
                may_plan = self._may_plan(state)
                if may_plan and state.begun is None:
                    state.begun = time.monotonic()
                if not finished and not may_plan:
                    return
            for request, result in finished:
                items = self._read(state, request, result)
                with self._changed:
                    self._add(state, items)
                    # Drops rows of which no request is left.
                    state.open -= Counter(set(request.documents))
            if may_plan:
                with self._task_lock:
                    item = next(plan, None)
                with self._changed:
                    self._add(state, [] if item is None else [item])
                    state.more = item is not None

    def _may_plan(self, state: UnitState) -> bool:
        if not state.more or len(self._queue) + self._in_engine >= 2 * self.batch:
            return False
        return not any(unit.more for unit in self._units.values() if unit.number < state.number)

    def _add(self, state: UnitState, items: Sequence[Request | Record]) -> None:
        """Queues requests and keeps records. Under the lock."""
        requests = [item for item in items if isinstance(item, Request)]
        state.records += [item for item in items if isinstance(item, Record)]
        for request in requests:
            state.open.update(set(request.documents))
        self._queue += [(state, request) for request in requests]
        self._changed.notify_all()

    def _plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """The task's plan; from where it raises on, document by document, so that only the bad one
        is lost.
        """
        unplanned = {document.index: document for document in documents}
        try:
            for item in self.parts.task.plan(documents):
                for row in item.documents if isinstance(item, Request) else [item.index]:
                    unplanned.pop(row, None)
                yield item
        except Exception:
            traceback.print_exc()
            for document in unplanned.values():
                try:
                    yield from self.parts.task.plan([document])
                except Exception as error:
                    yield Record(document.index, error=reason(error))

    def _read(self, state: UnitState, request: Request, result: Any) -> Sequence[Record | Request]:
        if isinstance(result, Exception):  # it could not even be submitted
            return request.fail(reason(result))
        for name in writer.COUNTS:
            state.counts[name] += int(getattr(result.counts, name, 0))
        self._bill(state.unit, state, request, result)
        if result.error is not None:
            return request.fail(reason(result.error))
        try:
            with self._task_lock:
                return request.finish(result.answer)
        except Exception as error:
            traceback.print_exc()
            return request.fail(reason(error))

    def _drive(self) -> None:
        """The engine's thread: submit what it has room for, step, pass on what ended."""
        engine = self.parts.engine
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._queue or engine.pending)
                    if self._closed:
                        return
                    self.batch = self.parts.capacity(self.batch)
                    room = min(len(self._queue), self.batch - self._in_engine)
                    admitted = [self._queue.popleft() for _ in range(room)]
                    self._in_engine += len(admitted)
                for state, request in admitted:
                    try:
                        sampling = request.sampling or self.parts.sampling
                        engine.submit(
                            request.program,
                            tag=(state, request),
                            sampling=sampling,
                            seed=request.seed,
                        )
                        self._load[state.unit] += 1
                    except Exception as error:
                        self._ended(state, request, error)
                if engine.pending:
                    for result in self.meter.step(engine, self._load):
                        state, request = result.tag
                        self._load[state.unit] -= 1
                        self._ended(state, request, result)
                    self._load += Counter()  # drops the units that have nothing in the engine
        except BaseException:
            with self._changed:
                self._broken = traceback.format_exc()
                self._changed.notify_all()

    def _ended(self, state: UnitState, request: Request, result: Any) -> None:
        with self._changed:
            self._in_engine -= 1
            state.finished.append((request, result))
            self._changed.notify_all()
            if self._units.get(state.unit) is not state:
                self._bill_unread(state)

    def _bill_unread(self, state: UnitState) -> None:
        """Counts as lost what came for a unit that has ended, of which another attempt may be in
        flight.
        """
        for request, result in state.finished:
            self._bill(f"{state.unit} (ended)", state, request, result)
        state.finished.clear()
        self.meter.lose(f"{state.unit} (ended)")

    def _bill(self, unit: str, state: UnitState, request: Request, result: Any) -> None:
        billed = [state.categories.get(row, "") + request.billed for row in request.documents]
        self.meter.tokens(unit, billed, getattr(result, "counts", None))


def answer(
    parts: WorkerComponents, documents: Sequence[Document], meter: Meter
) -> list[list[Record]]:
    """The records of each document, whose indices count from 0.

    Raises EngineBroken; RunError for a fault of raypd.
    """
    queue = RequestQueue(parts, meter)
    with contextlib.closing(queue), queue.unit("call") as unit:
        meter.ready()
        queue.answer(unit, documents)
    records: list[list[Record]] = [[] for _ in documents]
    for record in unit.records:
        records[record.index].append(record)
    missing = [
        document.id for document, answers in zip(documents, records, strict=True) if not answers
    ]
    if missing:
        raise RunError(
            f"{len(missing)} documents got no answer, {missing[0]!r} among them; this is a "
            "fault of raypd"
        )
    return records


def reason(error: BaseException) -> str:
    """An error in one line, for the row that it spoils."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def end_process(error: EngineBroken, keep: Callable[[str], None] = lambda text: None) -> NoReturn:
    """Ends this process, which a broken engine taints. keep: stores the reason, which Ray's report
    of a death lacks.
    """
    text = redact(str(error))
    print(f"raypd: the engine failed, this worker ends: {text}", file=sys.stderr, flush=True)
    try:
        keep(text)
    except OSError:
        traceback.print_exc()
    os._exit(1)
