"""The decode worker: one model and one engine in an actor, several units in hand so that the engine never drains.

The pool calls the worker once a unit, each call in a thread of its own. The thread reads its unit, plans work as the
engine has room, turns answers into records and commits. One thread drives the engine and does nothing else. A younger
unit plans only when the older ones have nothing more to plan: units end one after the other, and the engine's batch
is full across their border.
"""

from __future__ import annotations

import gzip
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypd.cluster import attempts, commit, storage
from raypd.cluster.attempts import Attempt
from raypd.cluster.cost import energy
from raypd.cluster.cost.meter import Meter, Reporter
from raypd.cluster.input.reading import read_unit
from raypd.cluster.input.units import Unit
from raypd.cluster.parts import Parts, build
from raypd.config import RunConfig
from raypd.errors import InputError, UserError
from raypd.tasks.base import Document, Record, Work
from raypd.tasks.documents import billed_as

__all__ = ["DecodeWorker", "EngineBroken", "HandedBack", "Order", "Parts", "build"]


@dataclass
class Order:
    """What all workers of a run are told.

    threads: CPU threads of one worker; gpus: that it has. ledger: handle of the actor that keeps the bill, or None.
    """

    config: RunConfig
    output: str
    session: str
    threads: int | None = None
    build: Callable[[RunConfig, int | None], Parts] = build
    ledger: Any = None
    gpus: float = 0.0


@dataclass
class _Job:
    """A unit in hand."""

    number: int
    unit: str
    more: bool = False  # its plan has more work
    open: int = 0  # works submitted and not finished
    finished: deque[tuple[Work, Any]] = field(default_factory=deque)
    records: list[Record] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(commit.COUNTS, 0))
    begun: bool = False  # some of it was planned
    wanted_back: bool = False
    answered: int = 0  # documents
    failed: int = 0
    categories: dict[int, str] = field(default_factory=dict)  # of every row


class EngineBroken(Exception):
    """The engine itself failed: nothing that is in it will end."""


class HandedBack(Exception):
    """The pool wanted the unit back."""


class DecodeWorker:
    """Answers units: `run` for the pool, `run_unit` for everyone else."""

    def __init__(self, order: Order) -> None:
        self.order, self.config = order, order.config
        self._fingerprint = order.config.fingerprint()
        self._changed = threading.Condition()
        self._jobs: dict[str, _Job] = {}  # by the unit's id, in the order in which they came
        self._queue: deque[tuple[_Job, Work]] = deque()
        self._in_engine = 0
        self._numbers = 0
        self._broken: str | None = None
        self._closed = False
        self._task_lock = threading.Lock()  # tokenizers and tasks are not promised to be safe in threads
        self._unfit: str | None = None  # why this worker cannot work at all
        self._load: dict[str, int] = {}  # programs in the engine, by unit
        self.meter = Meter(_node(), order.config.decoding.method, order.gpus, power=energy.meter(order.gpus))
        self._reporter = Reporter(self.meter, order.ledger) if order.ledger is not None else None
        try:
            storage.configure(order.config.storage)
            if not storage.exists(storage.join(order.output, "run.json")):
                raise UserError(
                    f"{order.output}: a worker does not see the output folder; give output.path on storage that all "
                    "nodes of the cluster share"
                )
            self.parts = order.build(order.config, order.threads)
            self._schema = self.parts.task.columns()
            commit.output_schema(self._schema, order.config.output.partition)
        except (UserError, storage.StorageError) as error:
            self._unfit = str(error)
        except Exception:
            # Raised here, every replacement would raise it again; told with the first unit, it ends the run once.
            self._unfit = "the worker could not start:\n" + traceback.format_exc()
        else:
            self.meter.ready()
            threading.Thread(target=self._drive, name="engine", daemon=True).start()

    # ---------------------------------------------------------------------------------------------- what the pool asks

    def hello(self) -> str:
        """The id of this worker's node; the first answer means that the model is loaded."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def progress(self) -> dict[str, tuple[int, int]]:
        """Documents (answered, failed) of every unit in hand."""
        with self._changed:
            return {unit: (job.answered, job.failed) for unit, job in self._jobs.items()}

    def hand_back(self, unit: str, only_waiting: bool) -> None:
        """Stops work on a unit, whose `run` then says so. only_waiting: unless some of it was begun."""
        with self._changed:
            job = self._jobs.get(unit)
            if job is not None and not (only_waiting and job.begun):
                job.wanted_back = True
                self._changed.notify_all()

    def run(self, attempt: Attempt) -> dict[str, Any]:
        """Answers and commits a unit.

        error: why that did not work, and then retry: whether it may at another time. fatal: no worker can.
        handed_back: at the pool's own wish. unreadable: it is the input's fault alone.
        """
        said: dict[str, Any] = {"ok": 0, "failed": 0, "error": None}
        said |= {"retry": False, "fatal": False, "handed_back": False, "unreadable": False}
        if self._unfit is not None:
            return said | {"error": self._unfit, "fatal": True}
        try:
            summary = self.run_unit(attempt.unit, attempt)
            return said | {"ok": summary.ok, "failed": summary.failed}
        except HandedBack:
            return said | {"handed_back": True}
        except EngineBroken as error:
            # A broken engine (a lost device, a bug) taints its process: end it, and the pool tries the units that it
            # held in a new one, a finite number of times.
            print(f"raypd: the engine failed, this worker ends: {error}", file=sys.stderr, flush=True)
            self._note(attempt.unit, str(error))
            os._exit(1)
        except InputError as error:
            passes = _may_pass(error.__cause__)
            return said | {"error": str(error), "retry": passes, "unreadable": not passes}
        except UserError as error:
            passes = _may_pass(error) or _may_pass(error.__cause__)  # errors of S3 are errors of both kinds
            return said | {"error": str(error), "retry": passes}
        except OSError as error:
            return said | {"error": _reason(error), "retry": _may_pass(error)}
        except Exception:
            return said | {"error": traceback.format_exc()}

    # ------------------------------------------------------------------------------------------------------ one unit

    def run_unit(self, unit: Unit, attempt: Attempt | None = None) -> commit.UnitSummary:
        """Reads, decodes and commits one unit; what it holds when it is committed already.

        Raises InputError when the unit cannot be read, OSError when it cannot be written, EngineBroken, HandedBack.
        """
        attempt = attempt or Attempt(unit)
        job = self._open_job(unit)
        self.meter.begin(unit.id)
        try:
            return self._run_job(unit, attempt, job)
        finally:
            self.meter.lose(unit.id)  # what was not committed came to nothing
            if self._reporter is not None:
                self._reporter.now()

    def _run_job(self, unit: Unit, attempt: Attempt, job: _Job) -> commit.UnitSummary:
        began, partition = time.time(), self.config.output.partition
        try:
            if commit.is_committed(self.order.output, unit.id, partition):
                return commit.read_summary(self.order.output, unit.id)
            started = time.monotonic()
            if attempt.careful:  # what the attempt before this one left is no word on this one
                attempts.mark(self.order.output, unit.id, [])
            documents = read_unit(unit, self.config, self.parts.task.input_columns())
            job.categories = {document.row: billed_as(document, self.config) for document in documents}
            self.meter.documents(unit.id, job.categories.values())
            self._answer_all(job, documents, attempt)
        finally:
            self._close_job(unit, job)
        table = commit.make_table(documents, job.records, self._schema, attempt.number)
        ok, failed = commit.count_documents(table)
        spent = self.meter.end(unit.id)
        summary = commit.UnitSummary(
            unit=unit.id,
            fingerprint=self._fingerprint,
            session=self.order.session,
            source=unit.name,
            start=unit.start,
            documents=len(documents),
            ok=ok,
            failed=failed,
            seconds=round(time.monotonic() - started, 3),
            counts=job.counts,
            worker=self.meter.id,
            began=began,
            busy_seconds=round(spent.prefill + spent.decode, 6),
            categories=spent.categories,
        )
        if not commit.commit(self.order.output, table, summary, partition):
            return commit.read_summary(self.order.output, unit.id)  # another attempt was first
        self.meter.commit(unit.id, spent, ok, failed)
        return summary

    def close(self) -> None:
        """Ends the engine's thread, which else holds the model as long as the process lives."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _answer_all(self, job: _Job, documents: list[Document], attempt: Attempt) -> None:
        """Answers the documents: all at once, or group by group with a mark before each where a worker died of them."""
        by_row = {document.row: document for document in documents}
        word = attempts.last_word(self.order.output, attempt.unit.id) if attempt.quarantined else None
        for row in attempt.quarantined:
            job.records.append(Record(row, error=attempt.reason(row, word)))
        for group in attempt.groups(list(by_row)):
            if attempt.careful:
                attempts.mark(self.order.output, attempt.unit.id, group)
            self._answer(job, [by_row[row] for row in group])

    def _answer(self, job: _Job, documents: list[Document]) -> None:
        """Feeds the documents' plan to the engine as it has room, and collects the records of what ends."""
        plan = self._plan(documents)
        with self._changed:
            job.more = True
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._broken or job.wanted_back or job.finished or self._may_plan(job) or _done(job)
                )
                if self._broken:
                    raise EngineBroken(self._broken)
                if job.wanted_back:
                    raise HandedBack
                finished = list(job.finished)
                job.finished.clear()
                may_plan = self._may_plan(job)
                job.begun = job.begun or may_plan
                if not finished and not may_plan and _done(job):
                    return
            records = self._sort(job, [item for work, result in finished for item in self._finish(job, work, result)])
            with self._changed:
                job.open -= len(finished)
            if may_plan:
                records += self._plan_next(job, plan)
            job.records += records
            job.answered += len({record.row for record in records})
            job.failed += len({record.row for record in records if record.error is not None})

    def _may_plan(self, job: _Job) -> bool:
        room = 2 * self.config.engine.batch - len(self._queue) - self._in_engine
        return job.more and room > 0 and not any(j.more for j in self._jobs.values() if j.number < job.number)

    def _plan_next(self, job: _Job, plan: Iterator[Work | Record]) -> list[Record]:
        with self._task_lock:
            item = next(plan, None)
        records = [] if item is None else self._sort(job, [item])
        with self._changed:
            job.more = item is not None
            self._changed.notify_all()
        return records

    def _sort(self, job: _Job, items: list[Work | Record]) -> list[Record]:
        """Queues works; returns the records."""
        works = [item for item in items if isinstance(item, Work)]
        with self._changed:
            job.open += len(works)
            self._queue += [(job, work) for work in works]
            self._changed.notify_all()
        return [item for item in items if isinstance(item, Record)]

    def _plan(self, documents: list[Document]) -> Iterator[Work | Record]:
        """The task's plan; from where it raises on, document by document, so that only the bad one is lost."""
        left = {document.row: document for document in documents}
        try:
            for item in self.parts.task.plan(documents):
                for row in item.rows if isinstance(item, Work) else [item.row]:
                    left.pop(row, None)
                yield item
        except Exception:
            traceback.print_exc()
            for document in left.values():
                try:
                    yield from self.parts.task.plan([document])
                except Exception as error:
                    yield Record(document.row, error=_reason(error))

    def _finish(self, job: _Job, work: Work, result: Any) -> Sequence[Record | Work]:
        """The records of a work that ended, and the works that follow on it."""
        if isinstance(result, Exception):  # it could not even be submitted
            return work.fail(_reason(result))
        for name in commit.COUNTS:
            job.counts[name] += int(getattr(result.counts, name, 0))
        self.meter.tokens(job.unit, job.categories.get(work.rows[0], ""), result.counts)
        if result.error is not None:
            return work.fail(_reason(result.error))
        try:
            with self._task_lock:
                return work.finish(result.answer)
        except Exception as error:
            traceback.print_exc()
            return work.fail(_reason(error))

    def _open_job(self, unit: Unit) -> _Job:
        with self._changed:
            self._numbers += 1
            job = self._jobs[unit.id] = _Job(self._numbers, unit.id)
            return job

    def _close_job(self, unit: Unit, job: _Job) -> None:
        with self._changed:
            del self._jobs[unit.id]
            self._queue = deque(item for item in self._queue if item[0] is not job)
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------------- the engine

    def _drive(self) -> None:
        """The engine's thread: submit what is queued, step, hand back what ended."""
        engine = self.parts.engine
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._queue or engine.pending)
                    if self._closed:
                        return
                    taken = list(self._queue)
                    self._queue.clear()
                    self._in_engine += len(taken)
                for job, work in taken:
                    try:
                        engine.submit(work.program, tag=(job, work), sampling=self.parts.sampling, seed=work.seed)
                        self._load[job.unit] = self._load.get(job.unit, 0) + 1
                    except Exception as error:
                        self._hand_back(job, work, error)
                if engine.pending:
                    for result in self.meter.step(engine, self._load):
                        job, work = result.tag
                        self._load[job.unit] -= 1
                        if not self._load[job.unit]:
                            del self._load[job.unit]
                        self._hand_back(job, work, result)
        except BaseException:
            with self._changed:
                self._broken = traceback.format_exc()
                self._changed.notify_all()

    def _hand_back(self, job: _Job, work: Work, result: Any) -> None:
        with self._changed:
            self._in_engine -= 1
            job.finished.append((work, result))
            self._changed.notify_all()

    def _note(self, unit: Unit, reason: str) -> None:
        """Leaves word of why the process died with a unit: what Ray says of it does not name the cause."""
        try:
            storage.put(attempts.failure_path(self.order.output, unit.id), reason.encode())
        except OSError:
            traceback.print_exc()


def _may_pass(error: BaseException | None) -> bool:
    """Whether it may work at another time: storage that was out of reach, slow or full, not a file that is gone."""
    lasting = (FileNotFoundError, PermissionError, storage.Changed, gzip.BadGzipFile)
    # What Arrow says of damaged data is an OSError too, of no errno.
    damage = type(error) is OSError and error.errno is None
    return isinstance(error, OSError) and not isinstance(error, lasting) and not damage


def _done(job: _Job) -> bool:
    return not job.more and job.open == 0


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _node() -> str:
    """The id of this process's node; "" outside Ray."""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
