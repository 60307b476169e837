"""Feeds one engine with the requests of several units, so that it never runs empty.

Each unit has its own thread, which plans requests and reads answers; one more thread drives the
engine. A newer unit plans only when no older unit has anything left to plan. So units finish one
after the other, and the engine's batch stays full from one unit to the next.

    unit threads:   plan documents -> queue        finished results -> records
    engine thread:         queue -> submit -> step -> finished results
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
from raypd.billing import Meter
from raypd.config import redact
from raypd.dataset import COUNTS
from raypd.errors import RunError
from raypd.tasks import Document, Record, Request

# Seconds to wait for the engine's thread to end.
_CLOSE_SECONDS = 10.0
# A unit plans ahead until this many times the engine's capacity is queued or in flight.
_PLAN_AHEAD = 2


class EngineBroken(Exception):
    """The engine itself failed; no program in it will finish."""


class Cancelled(Exception):
    """The unit was cancelled."""


class UnitProgress(NamedTuple):
    """How far a unit is.

    Attributes:
        answered: Documents answered.
        failed: Documents answered with an error.
        begun: Whether the unit's first document was planned.
        seconds_left: An estimate of the seconds until all documents are answered, from the unit's
            pace so far; None while there is no pace.
        waiting: What the engine has been waiting for, if it has been waiting for long.
    """

    answered: int = 0
    failed: int = 0
    begun: bool = False
    seconds_left: float | None = None
    waiting: str = ""


@dataclass(eq=False)
class UnitState:
    """A unit in flight.

    Attributes:
        number: Increases with every unit; an older unit has a smaller number.
        unit: The unit's id.
        documents: Number of documents.
        has_more: Whether its plan may yield more requests.
        begun: When its first request was planned (monotonic), or None.
        cancelled: Whether the unit was cancelled.
        open_requests: For each row, how many of its requests are queued, in the engine, or finished
            but not read yet.
        finished: Results that were not read yet.
        records: Records of the documents answered so far.
        counts: Token counts so far, by the names of `COUNTS`.
        categories: The category of every row.
    """

    number: int
    unit: str
    documents: int = 0
    has_more: bool = False
    begun: float | None = None
    cancelled: bool = False
    open_requests: Counter[int] = field(default_factory=Counter)
    finished: deque[tuple[Request, Any]] = field(default_factory=deque)
    records: list[Record] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    categories: dict[int, str] = field(default_factory=dict)
    usage_by_row: dict[tuple[int, str], Counter[str]] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all documents are planned and all of their results are read."""
        return not (self.has_more or self.open_requests)

    @property
    def answered(self) -> set[int]:
        """Rows whose requests have all been read."""
        return {record.index for record in self.records} - self.open_requests.keys()

    def progress(self) -> UnitProgress:
        """Return how far the unit is."""
        answered = len(self.answered)
        failed = len({record.index for record in self.records if record.error is not None})
        if self.begun is None or answered == 0:
            return UnitProgress(answered, failed, self.begun is not None)
        seconds_per_document = (time.monotonic() - self.begun) / answered
        seconds_left = seconds_per_document * (self.documents - answered)
        return UnitProgress(answered, failed, True, seconds_left)


class RequestQueue:
    """Keeps an engine filled with the requests of the units in flight.

    All methods may be called from any thread. `_changed` guards every attribute that several
    threads use; it is notified whenever one of them may be able to continue.
    """

    def __init__(self, parts: WorkerComponents, meter: Meter) -> None:
        self.parts = parts
        self.meter = meter
        # Programs that the engine should hold.
        self.capacity = parts.capacity()
        self._changed = threading.Condition()
        # Units in flight by id, the oldest first.
        self._units: dict[str, UnitState] = {}
        self._queue: deque[tuple[UnitState, Request]] = deque()
        self._in_engine = 0
        self._unit_count = 0
        self._failure: str | None = None
        self._closed = False
        # Tokenizers and tasks need not be thread-safe.
        self._task_lock = threading.Lock()
        # Programs in the engine, by unit id. Only the engine's thread uses it.
        self._programs: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the engine's thread, which would otherwise keep the model in memory."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # Python crashes if it exits in the middle of a forward pass.
        self._thread.join(_CLOSE_SECONDS)

    def progress(self) -> dict[str, UnitProgress]:
        """Return the progress of every unit in flight, by its id."""
        with self._changed:
            waiting = self.parts.engine.waiting
            return {
                unit: state.progress()._replace(waiting=waiting)
                for unit, state in self._units.items()
            }

    def cancel(self, unit: str, only_waiting: bool) -> None:
        """Stop a unit that is in flight; its `answer` raises Cancelled.

        Args:
            unit: The unit's id. Nothing happens if it is not in flight.
            only_waiting: Do nothing if any of the unit's documents has been planned.
        """
        with self._changed:
            state = self._units.get(unit)
            if state is None:
                return
            if only_waiting and state.begun is not None:
                return
            state.cancelled = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def unit(self, unit: str) -> Iterator[UnitState]:
        """Keep a unit in flight for the duration of a block.

        At the end of the block, its unanswered requests are dropped, and whatever was not committed
        in the meter counts as lost.
        """
        self.meter.begin(unit)
        with self._changed:
            self._unit_count += 1
            state = UnitState(self._unit_count, unit)
            self._units[unit] = state
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
        """Record the documents of a unit.

        Args:
            state: The unit.
            categories: For the row of each document, the category that it is billed as.
        """
        state.documents = len(categories)
        state.categories = categories
        self.meter.documents(state.unit, categories.values())

    @contextlib.contextmanager
    def answering(self, state: UnitState, documents: Sequence[Document]) -> Iterator[Future[None]]:
        """Run `answer` in a thread during a block; the end of the block cancels it."""
        with ThreadPoolExecutor(1) as pool:
            try:
                yield pool.submit(self.answer, state, documents)
            finally:
                self.cancel(state.unit, only_waiting=False)

    def answer(self, state: UnitState, documents: Sequence[Document]) -> None:
        """Plan documents while the engine has room, and collect their records in `state`.

        Raises:
            EngineBroken: If the engine fails.
            Cancelled: If the unit is cancelled.
        """
        plan = self._plan(documents)
        with self._changed:
            state.has_more = True
        while True:
            finished, may_plan = self._wait(state)
            if state.is_done:
                return
            for request, result in finished:
                items = self._read(state, request, result)
                with self._changed:
                    self._add(state, items)
                    # Subtraction also drops the rows that have no open request left.
                    state.open_requests -= Counter(set(request.documents))
            if may_plan:
                with self._task_lock:
                    item = next(plan, None)
                with self._changed:
                    if item is None:
                        state.has_more = False
                        self._changed.notify_all()
                    else:
                        self._add(state, [item])

    def _wait(self, state: UnitState) -> tuple[list[tuple[Request, Any]], bool]:
        """Wait until a unit can continue.

        Returns:
            (results to read, whether the unit may plan).
        """

        def can_continue() -> bool:
            if self._failure or state.cancelled or state.finished:
                return True
            return state.is_done or self._may_plan(state)

        with self._changed:
            self._changed.wait_for(can_continue)
            if self._failure:
                raise EngineBroken(self._failure)
            if state.cancelled:
                raise Cancelled
            finished = list(state.finished)
            state.finished.clear()
            may_plan = self._may_plan(state)
            if may_plan and state.begun is None:
                state.begun = time.monotonic()
            return finished, may_plan

    def _may_plan(self, state: UnitState) -> bool:
        """Return whether a unit is the oldest with more to plan, and the engine needs more."""
        if not state.has_more:
            return False
        if len(self._queue) + self._in_engine >= _PLAN_AHEAD * self.capacity:
            return False
        return not any(unit.has_more for unit in self._units.values() if unit.number < state.number)

    def _add(self, state: UnitState, items: Sequence[Request | Record]) -> None:
        """Queue requests and keep records. The caller holds the lock."""
        for item in items:
            if isinstance(item, Record):
                state.records.append(item)
            else:
                state.open_requests.update(set(item.documents))
                self._queue.append((state, item))
        self._changed.notify_all()

    def _plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """Yield the task's plan.

        If the task raises an error, the remaining documents are planned one by one, so that only
        the bad ones fail.
        """
        unplanned = {document.index: document for document in documents}
        try:
            for item in self.parts.task.plan(documents):
                rows = item.documents if isinstance(item, Request) else [item.index]
                for row in rows:
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
        """Turn a result into records, or into the task's next requests for these documents."""
        if isinstance(result, Exception):
            # The engine rejected the request at submission.
            return request.fail(reason(result))
        for name in COUNTS:
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
        """Run the engine's thread: submit requests, step, pass results to their units."""
        try:
            while True:
                admitted = self._admit()
                if admitted is None:
                    return
                for state, request in admitted:
                    self._submit(state, request)
                if self.parts.engine.pending:
                    self._step()
        except BaseException:
            with self._changed:
                self._failure = traceback.format_exc()
                self._changed.notify_all()

    def _admit(self) -> list[tuple[UnitState, Request]] | None:
        """Wait for work and take the requests that the engine has room for; None after `close`."""
        engine = self.parts.engine
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue or engine.pending)
            if self._closed:
                return None
            self.capacity = self.parts.capacity(self.capacity)
            room = min(len(self._queue), self.capacity - self._in_engine)
            admitted = [self._queue.popleft() for _ in range(room)]
            self._in_engine += len(admitted)
            return admitted

    def _submit(self, state: UnitState, request: Request) -> None:
        try:
            self.parts.engine.submit(
                request.program,
                tag=(state, request),
                sampling=request.sampling or self.parts.sampling,
                seed=request.seed,
            )
            self._programs[state.unit] += 1
        except Exception as error:
            self._finish(state, request, error)

    def _step(self) -> None:
        for result in self.meter.step(self.parts.engine, self._programs):
            state, request = result.tag
            self._programs[state.unit] -= 1
            self._finish(state, request, result)
        # Adding an empty counter drops the units without programs in the engine.
        self._programs += Counter()

    def _finish(self, state: UnitState, request: Request, result: Any) -> None:
        """Pass a result, or the error of a rejected request, to its unit."""
        with self._changed:
            self._in_engine -= 1
            state.finished.append((request, result))
            self._changed.notify_all()
            if self._units.get(state.unit) is not state:
                self._bill_unread(state)

    def _bill_unread(self, state: UnitState) -> None:
        """Bill as lost the results of a unit that has ended.

        The account has a separate name, because another attempt at the unit may be in flight.
        """
        account = f"{state.unit} (ended)"
        for request, result in state.finished:
            self._bill(account, state, request, result)
        state.finished.clear()
        self.meter.lose(account)

    def _bill(self, unit: str, state: UnitState, request: Request, result: Any) -> None:
        categories = [state.categories.get(row, "") for row in request.documents]
        counts = getattr(result, "counts", None)
        shares = self.meter.tokens(unit, categories, counts, request.model)
        for row, share in zip(request.documents, shares, strict=True):
            usage = state.usage_by_row.setdefault((row, request.model), Counter())
            usage.update(share)


def answer(
    parts: WorkerComponents, documents: Sequence[Document], meter: Meter
) -> list[list[Record]]:
    """Answer documents without a unit of work.

    Args:
        parts: The engine and the task.
        documents: Their indices count from 0.
        meter: Books the time and tokens.

    Returns:
        The records of each document, in the documents' order.

    Raises:
        EngineBroken: If the engine fails.
        RunError: If a document got no record, which is a bug in raypd.
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
            f"internal error: {len(missing)} documents got no answer, for example {missing[0]!r}; "
            "please report this"
        )
    return records


def reason(error: BaseException) -> str:
    """Return an error in one line, for the row of the document that it concerns."""
    text = str(error).strip()
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def end_process(error: EngineBroken, keep: Callable[[str], None] = lambda text: None) -> NoReturn:
    """End this process, because a broken engine may have corrupted it.

    Args:
        error: Why the engine failed.
        keep: Stores the reason, which Ray's report of the death does not contain.
    """
    text = redact(str(error))
    print(f"raypd: the engine failed, this worker ends: {text}", file=sys.stderr, flush=True)
    try:
        keep(text)
    except OSError:
        traceback.print_exc()
    os._exit(1)
