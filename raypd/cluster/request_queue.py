"""Feeds one engine with the works of several units, so that it never drains, and collects their records.

Every unit in hand is a job with a thread of its own, which plans works as the engine has room. One more thread drives
the engine and does nothing else. A younger job plans only when the older ones have nothing more to plan: jobs end one
after the other, and the engine's batch is full across their border. The engine gets only what it can begin at once;
what waits here can still be lent to another worker (shares.py).
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypd.billing.meter import Meter
from raypd.cluster import shares
from raypd.cluster.components import WorkerComponents
from raypd.cluster.shares import Answer, Groups, Progress
from raypd.dataset import writer
from raypd.tasks.base import Document, Record, Request


class EngineBroken(Exception):
    """The engine itself failed: nothing that is in it will end."""


class HandedBack(Exception):
    """The pool wanted the unit back."""


@dataclass(eq=False)
class UnitState:
    """A unit in hand, or a share of one that another worker has lent. All counts of documents are sets of rows."""

    number: int
    key: str  # of the unit, or of the share
    lendable: bool = False
    documents: int = 0  # how many it has
    more: bool = False  # its plan has more works
    planned: bool = False  # it had them all
    asked: bool = False  # somebody wants to take over a part: plan all that is left
    begun: float | None = None  # when the first of it was planned (monotonic)
    wanted_back: bool = False
    open: dict[int, int] = field(default_factory=dict)  # row -> works queued or in the engine
    fixed: set[int] = field(default_factory=set)  # rows of which any work or record was begun: never lent
    finished: deque[tuple[Request, Any]] = field(default_factory=deque)
    unread: int = 0  # works that are not wholly done: queued, in the engine or finished
    lent: dict[str, list[Request]] = field(default_factory=dict)  # by the share's key
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    by_others: int = 0  # of `done`, rows that came back from others
    records: list[Record] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(writer.COUNTS, 0))
    answers: list[Answer] = field(default_factory=list)  # of shares that came back
    categories: dict[int, str] = field(default_factory=dict)  # of every row

    @property
    def complete(self) -> bool:
        return not self.more and not self.unread and not self.lent

    def keep(self, records: Sequence[Record]) -> None:
        self.records += records
        rows = {record.row for record in records}
        self.fixed |= rows
        self.done |= {row for row in rows if row not in self.open}
        self.failed |= {record.row for record in records if record.error is not None}

    def progress(self) -> Progress:
        left = self.documents - len(self.done) - sum(map(len, map(shares.rows_of, self.lent.values())))
        own = len(self.done) - self.by_others
        if self.begun is None or not own:
            return Progress(len(self.done), len(self.failed), self.begun is not None, left)
        needs = (time.monotonic() - self.begun) / own * left
        return Progress(len(self.done), len(self.failed), True, left, needs)


class RequestQueue:
    """batch: programs that the engine decodes at the same time. Safe in threads."""

    def __init__(self, parts: WorkerComponents, batch: int, meter: Meter) -> None:
        self.parts, self.batch, self.meter = parts, batch, meter
        self._changed = threading.Condition()
        self._jobs: dict[str, UnitState] = {}  # by key, in the order in which they came
        self._queue: deque[tuple[UnitState, Request]] = deque()
        self._in_engine = 0
        self._numbers = 0
        self._broken: str | None = None
        self._closed = False
        self._task_lock = threading.Lock()  # tokenizers and tasks are not promised to be safe in threads
        self._load: dict[str, int] = {}  # programs in the engine, by job
        threading.Thread(target=self._drive, name="engine", daemon=True).start()

    def close(self) -> None:
        """Ends the engine's thread, which else holds the model as long as the process lives."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ----------------------------------------------------------------------------------------- what the scheduler asks

    def progress(self) -> dict[str, Progress]:
        """How far every job in hand is."""
        with self._changed:
            return {key: job.progress() for key, job in self._jobs.items()}

    def hand_back(self, key: str, only_waiting: bool) -> None:
        """Stops work on a job. only_waiting: unless some of it was begun."""
        with self._changed:
            job = self._jobs.get(key)
            if job is not None and not (only_waiting and job.begun is not None):
                job.wanted_back = True
                self._changed.notify_all()

    def lend(self, key: str, names: Sequence[str]) -> dict[str, Groups]:
        """Gives the later part of what is not begun of a job away: groups of rows by the names of the shares.

        Waits until all that is left of the job is planned. Fewer shares than were asked for, or none, where there is
        not so much to give.
        """
        with self._changed:
            job = self._jobs.get(key)
            if job is None or not job.lendable:
                return {}
            job.asked = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._broken or self._jobs.get(key) is not job or job.wanted_back or job.planned
            )
            if self._broken or self._jobs.get(key) is not job or job.wanted_back:
                return {}
            groups = shares.groups_of([work for own, work in self._queue if own is job], job.fixed)
            begun = job.documents - len(job.done) - sum(map(len, map(shares.rows_of, job.lent.values())))
            begun -= sum(len(shares.rows_of(group)) for group in groups)
            found = dict(zip(names, shares.divided(groups, begun, len(names) + 1), strict=False))
            for share, given in found.items():
                self._give_away(job, share, [work for group in given for work in group])
            return {share: [sorted(shares.rows_of(group)) for group in given] for share, given in found.items()}

    def _give_away(self, job: UnitState, share: str, works: list[Request]) -> None:
        gone = set(map(id, works))
        self._queue = deque(item for item in self._queue if id(item[1]) not in gone)
        job.lent[share] = works
        job.unread -= len(works)
        for row in shares.rows_of(works):
            del job.open[row]

    def returned(self, key: str, share: str, answer: Answer) -> None:
        """What became of a share that was lent; one that nobody waits for is dropped."""
        with self._changed:
            job = self._jobs.get(key)
            works = job.lent.pop(share, None) if job is not None else None
            if job is None or works is None:
                return
            rows = shares.rows_of(works)
            job.done |= rows
            job.failed |= {record.row for record in answer.records if record.error is not None}
            job.by_others += len(rows)
            job.answers.append(answer)
            self._changed.notify_all()

    def take_back(self, key: str, share: str) -> None:
        """A share that was lent will not come back: its works are done here."""
        with self._changed:
            job = self._jobs.get(key)
            if job is not None and share in job.lent:
                self._enqueue(job, job.lent.pop(share))

    # --------------------------------------------------------------------------------------------------------- one job

    def open(self, key: str, lendable: bool = False) -> UnitState:
        with self._changed:
            self._numbers += 1
            job = self._jobs[key] = UnitState(self._numbers, key, lendable)
            return job

    def shut(self, job: UnitState) -> None:
        """Ends a job; what is left of it in the engine spoils nothing."""
        with self._changed:
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
            self._queue = deque(item for item in self._queue if item[0] is not job)
            self._changed.notify_all()

    def answer(self, job: UnitState, plan: Iterator[Request | Record]) -> None:
        """Feeds a plan to the engine as it has room, and collects the records of what ends.

        A lendable job has one plan. Raises EngineBroken, HandedBack.
        """
        with self._changed:
            job.more = True
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._broken or job.wanted_back or job.finished or self._may_plan(job) or job.complete
                )
                if self._broken:
                    raise EngineBroken(self._broken)
                if job.wanted_back:
                    raise HandedBack
                finished = list(job.finished)
                job.finished.clear()
                may_plan = self._may_plan(job)
                if may_plan and job.begun is None:
                    job.begun = time.monotonic()
                if not finished and not may_plan and job.complete:
                    return
            for work, result in finished:
                self._take(job, self._finish(job, work, result), work)
            if may_plan:
                self._plan_next(job, plan)

    def _may_plan(self, job: UnitState) -> bool:
        room = 2 * self.batch - len(self._queue) - self._in_engine
        if not job.more or (room <= 0 and not job.asked):
            return False
        return not any(other.more for other in self._jobs.values() if other.number < job.number)

    def _plan_next(self, job: UnitState, plan: Iterator[Request | Record]) -> None:
        with self._task_lock:
            item = next(plan, None)
        if item is not None:
            self._take(job, [item])
            return
        with self._changed:
            job.more, job.planned = False, True
            self._changed.notify_all()

    def _take(self, job: UnitState, items: Sequence[Request | Record], ended: Request | None = None) -> None:
        """Queues works and keeps records: of the plan, or of a work that ended."""
        with self._changed:
            self._enqueue(job, [item for item in items if isinstance(item, Request)])
            if ended is not None:
                job.unread -= 1
                for row in set(ended.rows):
                    job.open[row] -= 1
                    if not job.open[row]:
                        del job.open[row]
                        job.done.add(row)
            job.keep([item for item in items if isinstance(item, Record)])
            self._changed.notify_all()

    def _enqueue(self, job: UnitState, works: Sequence[Request]) -> None:
        job.unread += len(works)
        for work in works:
            for row in set(work.rows):
                job.open[row] = job.open.get(row, 0) + 1
                job.done.discard(row)
        self._queue += [(job, work) for work in works]
        self._changed.notify_all()

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        """The task's plan; from where it raises on, document by document, so that only the bad one is lost."""
        left = {document.row: document for document in documents}
        try:
            for item in self.parts.task.plan(documents):
                for row in item.rows if isinstance(item, Request) else [item.row]:
                    left.pop(row, None)
                yield item
        except Exception:
            traceback.print_exc()
            for document in left.values():
                try:
                    yield from self.parts.task.plan([document])
                except Exception as error:
                    yield Record(document.row, error=reason(error))

    def _finish(self, job: UnitState, work: Request, result: Any) -> Sequence[Record | Request]:
        """The records of a work that ended, and the works that follow on it."""
        if isinstance(result, Exception):  # it could not even be submitted
            return work.fail(reason(result))
        for name in writer.COUNTS:
            job.counts[name] += int(getattr(result.counts, name, 0))
        self.meter.tokens(job.key, [job.categories.get(row, "") for row in work.rows], result.counts)
        if result.error is not None:
            return work.fail(reason(result.error))
        try:
            with self._task_lock:
                return work.finish(result.answer)
        except Exception as error:
            traceback.print_exc()
            return work.fail(reason(error))

    # ---------------------------------------------------------------------------------------------------- the engine

    def _drive(self) -> None:
        """The engine's thread: submit what it has room for, step, hand back what ended."""
        engine = self.parts.engine
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._queue or engine.pending)
                    if self._closed:
                        return
                    room = min(len(self._queue), self.batch - self._in_engine)
                    taken = [self._queue.popleft() for _ in range(room)]
                    self._in_engine += len(taken)
                    for job, work in taken:
                        job.fixed.update(work.rows)
                for job, work in taken:
                    try:
                        engine.submit(work.program, tag=(job, work), sampling=self.parts.sampling, seed=work.seed)
                        self._load[job.key] = self._load.get(job.key, 0) + 1
                    except Exception as error:
                        self._ended(job, work, error)
                if engine.pending:
                    for result in self.meter.step(engine, self._load):
                        job, work = result.tag
                        self._load[job.key] -= 1
                        if not self._load[job.key]:
                            del self._load[job.key]
                        self._ended(job, work, result)
        except BaseException:
            with self._changed:
                self._broken = traceback.format_exc()
                self._changed.notify_all()

    def _ended(self, job: UnitState, work: Request, result: Any) -> None:
        with self._changed:
            self._in_engine -= 1
            job.finished.append((work, result))
            self._changed.notify_all()


def reason(error: BaseException) -> str:
    """An error in one line, for the row that it spoils."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
