"""The decode worker: one model and one engine in an actor, several units in hand so that the engine never drains.

Ray Data calls the worker once a unit, each call in a thread of its own. The thread reads its unit, plans work as the
engine has room, turns answers into records and commits. One thread drives the engine and does nothing else. A younger
unit plans only when the older ones have nothing more to plan: units end one after the other, and the engine's batch
is full across their border.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypd.cluster import commit, storage
from raypd.cluster.reading import read_unit
from raypd.cluster.units import Unit
from raypd.config import RunConfig
from raypd.errors import ModelError, UserError
from raypd.tasks.base import Document, Record, Task, Work

_REPORT_SECONDS = 2.0


class Engine(Protocol):
    """What a worker needs of raypd.decoding.engine.Engine."""

    @property
    def pending(self) -> int: ...

    def submit(self, program: Any, *, tag: Any, sampling: Any, seed: int) -> Any: ...

    def step(self) -> list[Any]: ...


@dataclass
class Parts:
    """What a worker is built from."""

    engine: Engine
    task: Task
    sampling: Any


def build(config: RunConfig, threads: int | None) -> Parts:
    """Loads the model and makes engine and task. Raises ModelError, ConfigError."""
    if config.model.is_fake:
        from raypd.cluster import fake

        engine, task = fake.make(config)
        return Parts(engine, task, None)
    return _build_real(config, threads)


def _build_real(config: RunConfig, threads: int | None) -> Parts:
    import torch

    from raypd.decoding import engine as decoding
    from raypd.decoding.assisted import AssistedEngine, AssistedGenerator
    from raypd.decoding.sampling import Sampling
    from raypd.models.load import load_model
    from raypd.tasks import build_task
    from raypd.tasks.prompting import end_tokens

    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(config.model)
    sizes, sampling = config.engine, config.decoding.sampling
    engine: Engine
    if config.decoding.method == "speculative":
        draft = load_model(config.model.model_copy(update={"name": config.decoding.draft_model, "adapter": None}))
        try:
            pair = AssistedGenerator(loaded.model, draft.model, loaded.tokenizer, draft.tokenizer)
        except ValueError as error:
            raise ModelError(f"decoding.draft_model: {error}") from None
        engine = AssistedEngine(pair, config.decoding.max_new_tokens, end_tokens(loaded.tokenizer))
    else:
        engine = decoding.Engine(
            loaded.model, batch=sizes.batch, token_budget=sizes.token_budget, cache_tokens=sizes.cache_tokens
        )
    task = build_task(config, loaded.tokenizer, loaded.context_length, loaded.model)
    return Parts(engine, task, Sampling(sampling.temperature, sampling.top_k, sampling.top_p))


@dataclass
class Order:
    """What all workers of a run are told. `threads`: CPU threads of one worker."""

    config: RunConfig
    output: str
    session: str
    threads: int | None = None
    build: Callable[[RunConfig, int | None], Parts] = build


@dataclass
class _Job:
    """A unit in hand."""

    number: int
    more: bool = True  # its plan has more work
    open: int = 0  # works submitted and not finished
    finished: deque[tuple[Work, Any]] = field(default_factory=deque)
    records: list[Record] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(commit.COUNTS, 0))


class EngineBroken(Exception):
    """The engine itself failed: nothing that is in it will end."""


class DecodeWorker:
    """Answers units: `__call__` for Ray Data, `run_unit` for everyone else.

    board: a Ray actor handle (`progress.Board`) that is told what goes on, or None.
    """

    def __init__(self, order: Order, board: Any = None) -> None:
        self.order, self.config, self.board = order, order.config, board
        self._fingerprint = order.config.fingerprint()
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}
        self._queue: deque[tuple[_Job, Work]] = deque()
        self._in_engine = 0
        self._numbers = 0
        self._broken: str | None = None
        self._task_lock = threading.Lock()  # tokenizers and tasks are not promised to be safe in threads
        self._unfit: str | None = None  # why this worker cannot work at all
        if board is not None:
            board.starting.remote()
        try:
            storage.configure(order.config.storage)
            if not storage.exists(storage.join(order.output, "run.json")):
                raise UserError(
                    f"{order.output}: a worker does not see the output folder; give output.path on storage that all "
                    "nodes of the cluster share"
                )
            self.parts = order.build(order.config, order.threads)
            self._schema = self.parts.task.columns()
            commit.output_schema(self._schema)
        except (UserError, storage.StorageError) as error:
            self._unfit = str(error)
        except Exception:
            # Raised here, it would be retried and printed by Ray at length; told in a summary, it ends the run once.
            self._unfit = "the worker could not start:\n" + traceback.format_exc()
        else:
            threading.Thread(target=self._drive, name="engine", daemon=True).start()
        if board is not None:
            board.ready.remote()

    # ------------------------------------------------------------------------------------------------------ one unit

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Ray Data's entry: a batch of units as JSON in column `unit`; one summary row for each."""
        rows: list[dict[str, Any]] = []
        for text in batch["unit"]:
            unit = Unit.from_json(str(text))
            row: dict[str, Any] = {"unit": unit.id, "ok": 0, "failed": 0, "error": None, "fatal": False}
            try:
                if self._unfit is not None:
                    row |= {"error": self._unfit, "fatal": True}
                else:
                    summary = self.run_unit(unit)
                    row |= {"ok": summary.ok, "failed": summary.failed}
            except EngineBroken as error:
                # A broken engine (a lost device, a bug) taints its process: end it, and Ray tries the units that
                # it held in a new one, a finite number of times.
                print(f"raypd: the engine failed, this worker ends: {error}", file=sys.stderr, flush=True)
                self._note(unit, str(error))
                os._exit(1)
            except (UserError, OSError) as error:
                row["error"] = str(error)
            except Exception:
                row["error"] = traceback.format_exc()
            rows.append(row)
        return {key: [row[key] for row in rows] for key in rows[0]}

    def run_unit(self, unit: Unit) -> commit.UnitSummary:
        """Reads, decodes and commits one unit; what it holds when it is committed already.

        Raises InputError when the unit cannot be read, OSError when it cannot be written, EngineBroken.
        """
        if commit.is_committed(self.order.output, unit.id):
            return commit.read_summary(self.order.output, unit.id)
        attempt = self._begin(unit)
        started = time.monotonic()
        documents = read_unit(unit, self.config, self.parts.task.input_columns())
        job = self._open_job()
        try:
            self._answer(job, documents, unit)
        finally:
            self._close_job(job)
        table = commit.make_table(unit, documents, job.records, self._schema, attempt)
        ok, failed = commit.count_documents(table)
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
        )
        if not commit.commit(self.order.output, table, summary):
            return commit.read_summary(self.order.output, unit.id)  # another attempt was first
        return summary

    def _answer(self, job: _Job, documents: list[Document], unit: Unit) -> None:
        """Feeds the unit's plan to the engine as it has room, and collects the records of what ends."""
        plan = self._plan(documents)
        answered = failed = 0
        reported = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._broken or job.finished or self._may_plan(job) or _done(job))
                if self._broken:
                    raise EngineBroken(self._broken)
                finished = list(job.finished)
                job.finished.clear()
                may_plan = self._may_plan(job)
                if not finished and not may_plan and _done(job):
                    return
            records = self._sort(job, [item for work, result in finished for item in self._finish(job, work, result)])
            with self._changed:
                job.open -= len(finished)
            if may_plan:
                records += self._plan_next(job, plan)
            job.records += records
            answered += len({record.row for record in records})
            failed += len({record.row for record in records if record.error is not None})
            if self.board is not None and time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                self.board.report.remote(unit.id, answered, failed)

    def _may_plan(self, job: _Job) -> bool:
        room = len(self._queue) + self._in_engine < 2 * self.config.engine.batch
        return job.more and room and not any(j.more for j in self._jobs.values() if j.number < job.number)

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
        if result.error is not None:
            return work.fail(_reason(result.error))
        try:
            with self._task_lock:
                return work.finish(result.answer)
        except Exception as error:
            traceback.print_exc()
            return work.fail(_reason(error))

    def _open_job(self) -> _Job:
        with self._changed:
            self._numbers += 1
            job = self._jobs[self._numbers] = _Job(self._numbers)
            return job

    def _close_job(self, job: _Job) -> None:
        with self._changed:
            del self._jobs[job.number]
            self._queue = deque(item for item in self._queue if item[0] is not job)
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------------- the engine

    def _drive(self) -> None:
        """The engine's thread: submit what is queued, step, hand back what ended."""
        engine = self.parts.engine
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or engine.pending)
                    taken = list(self._queue)
                    self._queue.clear()
                    self._in_engine += len(taken)
                for job, work in taken:
                    try:
                        engine.submit(work.program, tag=(job, work), sampling=self.parts.sampling, seed=work.seed)
                    except Exception as error:
                        self._hand_back(job, work, error)
                if engine.pending:
                    for result in engine.step():
                        job, work = result.tag
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

    # -------------------------------------------------------------------------------------------------- around a unit

    def _begin(self, unit: Unit) -> int:
        """Tells the board; the number of this attempt at the unit in this session (1 when the board is gone)."""
        if self.board is None:
            return 1
        import ray

        try:
            return int(ray.get(self.board.begin.remote(unit.id), timeout=10))
        except ray.exceptions.RayError:
            return 1

    def _note(self, unit: Unit, reason: str) -> None:
        """Leaves word of why the process died with a unit: what Ray says of it does not name the cause."""
        try:
            storage.put(commit.failure_path(self.order.output, unit.id), reason.encode())
        except OSError:
            traceback.print_exc()


def _done(job: _Job) -> bool:
    return not job.more and job.open == 0


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
