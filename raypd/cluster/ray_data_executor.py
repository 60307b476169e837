"""`cluster.executor: ray_data`: units are streamed by Ray Data through an actor pool, whose actors commit them.

Ray Data decides which worker gets which unit. For what it cannot say there is an actor between the driver and
the workers, which also holds the pool. A worker asks there before it begins a unit, and the driver answers (budget,
spot notices, the end of the run); it tells there how far it is. A task whose worker died is not done again by Ray Data,
which would do so without end: when all else of a pass has ended, what is not committed goes into another, as careful as
`retry_policy` says.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
import pickle
import queue
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import ray

from raypd.answering.request_queue import Progress
from raypd.cluster.in_flight import Assignment, WorkerHandle
from raypd.cluster.ray_session import WorkerResources
from raypd.cluster.scheduler import STARTS_WITHOUT_SUCCESS, Ended, Scheduler, Tick
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import ClusterConfig
from raypd.dataset import writer
from raypd.errors import ConfigError, RunError
from raypd.run.records import UnitResult
from raypd.run.retry_policy import Attempt
from raypd.run.unit import Unit

_SLICE = 4096  # units of a pass: Ray Data's driver holds something for every block
_WAIT_SECONDS = 0.25
_REPORT_SECONDS = 1.0
_GONE_SECONDS = 30.0  # without a report: a worker that died
_EMPTY_PASSES = 3  # in a row, in which nothing was done


@dataclass
class WorkerReport:
    """What a worker says of itself. progress: of its units in flight; ready: it has loaded its model."""

    id: str
    node: str
    ready: bool
    progress: dict[str, Progress] = field(default_factory=dict)


@dataclass
class PassState:
    """What the pass's actor has for the driver.

    asks: units that wait for the driver's leave, and who asks. workers: their last reports. results: by unit, of tasks
    that ended since the last look. ended: whether the pass has; error: why, where it went wrong.
    """

    asks: dict[str, WorkerReport]
    workers: list[WorkerReport]
    results: list[tuple[str, UnitResult]]
    ended: bool
    error: str | None


class PassActor:
    """An actor that streams a pass through a pool, which ends with it, and stands between the driver and the workers.

    Args:
        spec, resources: of a worker.
        attempts: of the pass.
        size, in_flight: workers, and units of each at the same time.
    """

    def __init__(
        self, spec: WorkerSpec, resources: WorkerResources, attempts: Sequence[Attempt], size: int, in_flight: int
    ) -> None:
        self._spec, self._resources, self._size, self._in_flight = spec, resources, size, in_flight
        self._closed = self._ended = False
        self._error: str | None = None
        self._cancelled: set[str] = set()
        self._asks: dict[str, tuple[WorkerReport, asyncio.Future[bool]]] = {}
        self._workers: dict[str, tuple[float, WorkerReport]] = {}  # with when they were last heard of
        self._results: queue.SimpleQueue[tuple[str, UnitResult]] = queue.SimpleQueue()
        me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._stream, args=(attempts, me), name="Ray Data", daemon=True).start()

    async def begin(self, unit: str, worker: WorkerReport) -> bool:
        """Whether a worker may begin a unit; waits for the driver's answer."""
        if self._closed:
            return False
        answer = asyncio.get_running_loop().create_future()
        self._asks[unit] = worker, answer
        return await answer

    async def report(self, worker: WorkerReport) -> set[str]:
        """Takes a worker's report; which of its units it is to hand back."""
        self._workers[worker.id] = time.monotonic(), worker
        return self._cancelled & worker.progress.keys()

    async def look(self, answers: dict[str, bool], cancelled: set[str], closed: bool) -> PassState:
        """Takes the driver's answers: which units may be begun, which are wanted back, and whether no more is begun."""
        self._closed, self._cancelled = closed, cancelled
        for unit in [*(self._asks if closed else answers)]:
            _, answer = self._asks.pop(unit, (None, None))
            if answer is not None and not answer.done():
                answer.set_result(answers.get(unit, False))
        since = time.monotonic() - _GONE_SECONDS
        self._workers = {name: own for name, own in self._workers.items() if own[0] > since}
        asks = {unit: worker for unit, (worker, _) in self._asks.items()}
        ended = self._ended  # before the results, which are all there then
        results = [self._results.get() for _ in range(self._results.qsize())]
        return PassState(asks, [worker for _, worker in self._workers.values()], results, ended, self._error)

    def _stream(self, attempts: Sequence[Attempt], me: Any) -> None:
        try:
            from ray import data

            items = [{"unit": own.unit.id, "attempt": pickle.dumps(own)} for own in attempts]
            dataset = data.from_items(items, override_num_blocks=len(items))  # a unit a block
            context = dataset.context
            context.enable_progress_bars = context.print_on_execution_start = False
            context.max_errored_blocks = -1  # of a task that was lost with its worker
            context.max_consecutive_actor_init_deaths = -1  # the driver counts them
            context.execution_no_progress_timeout_s = -1  # a budget or a cluster may keep all waiting
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*ray_remote_args")
                dataset = dataset.map_batches(
                    UnitStage,
                    batch_size=1,
                    batch_format="pyarrow",
                    # Of one size: a pool that may shrink does where the cluster has yet to grow.
                    compute=data.ActorPoolStrategy(
                        size=self._size,
                        max_concurrent_calls_per_actor=self._in_flight,
                        max_tasks_in_flight_per_actor=self._in_flight,  # what waits at a worker would die with it
                        enable_true_multi_threading=True,
                    ),
                    fn_constructor_args=(self._spec, me),
                    num_cpus=self._resources.cpus,
                    num_gpus=self._resources.gpus or None,
                    max_restarts=-1,  # with an end to them, the place of a dead worker stays empty
                    max_task_retries=0,  # else a document that kills its worker would do so without end
                )
            for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for row in batch.to_pylist():
                    self._results.put((row["unit"], pickle.loads(row["result"])))
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        self._ended = True


class UnitStage:
    """A decode worker in Ray Data's pool."""

    def __init__(self, spec: WorkerSpec, actor: Any) -> None:
        context = ray.get_runtime_context()
        self.actor, self.worker = actor, None
        self._me = uuid.uuid4().hex, context.get_node_id()
        threading.Thread(target=self._report, name="report", daemon=True).start()
        self.worker = DecodeWorker(spec)

    def __call__(self, batch: pa.Table) -> pa.Table:
        results = []
        for packed in batch["attempt"].to_pylist():
            attempt = pickle.loads(packed)
            if self.worker is not None and ray.get(self.actor.begin.remote(attempt.unit.id, self._state())):
                results.append(self.worker.run(attempt))
            else:
                results.append(UnitResult(handed_back=True))
        return pa.table({"unit": batch["unit"], "result": [pickle.dumps(result) for result in results]})

    def _state(self) -> WorkerReport:
        return WorkerReport(*self._me, self.worker is not None, self.worker.progress() if self.worker else {})

    def _report(self) -> None:
        while True:
            for unit in ray.get(self.actor.report.remote(self._state())):
                if self.worker is not None:
                    self.worker.cancel(unit, only_waiting=False)
            time.sleep(_REPORT_SECONDS)


class PoolWorker(WorkerHandle):
    """What is known of a worker of the pool; its assignments are by the unit's id."""

    def cancel(self, assignment: Assignment, only_waiting: bool) -> None:
        """Asks for a unit back, through the pass's actor."""
        assignment.cancelled = time.monotonic()


class RayDataExecutor(Scheduler):
    """Runs units as `Scheduler` does, whose ways with nodes, errors and deaths it has; Ray Data does the rest."""

    def __init__(
        self, spec: WorkerSpec, resources: WorkerResources, cluster: ClusterConfig, say: Callable[[str], None]
    ) -> None:
        super().__init__(spec, resources, cluster, say)
        if importlib.util.find_spec("pandas") is None:
            raise ConfigError("cluster.executor ray_data needs Ray Data: pip install 'raypd[data]'")
        self._actor: Any = None
        self._known: dict[str, PoolWorker] = {}  # by the worker's own id
        self._open: dict[str, Attempt] = {}  # units of the pass that have not ended

    def run(self, units: Iterator[Unit], count: int) -> Iterator[Ended | Tick]:
        """As `Scheduler.run`, in passes of a slice of the units each."""
        self._left, empty = count, 0
        while not self.closing:
            # Where a deadline changes how many workers are wanted, passes are short: a pool keeps its size.
            size = _SLICE if self.wanted >= self.cluster.max_workers else 8 * self.wanted
            attempts = [attempt for _, attempt in self._again if not attempt.bisecting]
            attempts += [Attempt(unit) for unit in itertools.islice(units, max(0, size - len(attempts)))]
            attempts = attempts or [attempt for _, attempt in self._again]
            if not attempts:
                return
            self._open = {attempt.unit.id: attempt for attempt in attempts}
            self._again = deque(item for item in self._again if item[1].unit.id not in self._open)
            fruitful = yield from self._pass(attempts)
            empty = 0 if fruitful else empty + 1
            if empty == _EMPTY_PASSES:
                raise RunError(f"{_EMPTY_PASSES} passes of Ray Data in a row have ended without anything done")

    def close(self) -> None:
        """Ends the pool, with what is in flight."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor, self._known, self.workers = None, {}, []

    def _pass(self, attempts: Sequence[Attempt]) -> Generator[Ended | Tick, None, bool]:
        """Streams attempts through a pool of their own; whether a unit ended, or cost its worker."""
        in_flight = 1 if attempts[0].bisecting else self.cluster.units_in_flight
        size = max(1, min(self.wanted, math.ceil(len(attempts) / in_flight)))
        head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}, "max_concurrency": 1000}
        self._actor = ray.remote(PassActor).options(**head).remote(self.spec, self.resources, attempts, size, in_flight)
        answers: dict[str, bool] = {}
        lost = False
        while True:
            try:
                state = self._look(answers)
            except ray.exceptions.RayActorError:
                self.say("the actor that streams the units is gone; they are streamed by another")
                lost = True
                break
            for unit, result in state.results:
                owner = next((worker for worker in self.workers if unit in worker.assignments), None)
                attempt = self._open.pop(unit)
                yield from self._ended(owner.assignments.pop(unit) if owner else Assignment(attempt), result)
            if state.error is not None:
                raise RunError(f"Ray Data: {state.error}")
            progress = [own.progress for worker in self.workers for own in worker.assignments.values()]
            answered, failed = sum(own.answered for own in progress), sum(own.failed for own in progress)
            yield Tick(answered, failed, sum(worker.ready for worker in self.workers))
            if state.ended:
                break
            answers = self._answers(state.asks)
            if not answers and not state.results:
                time.sleep(_WAIT_SECONDS)
        fruitful = len(self._open) < len(attempts) or (any(worker.assignments for worker in self.workers) and not lost)
        yield from self._missing(lost)
        self.close()
        return fruitful

    def _look(self, answers: dict[str, bool]) -> PassState:
        """Gives the driver's answers to the pass's actor, takes what is there, and notes the workers' reports."""
        given = (own for worker in self.workers for own in worker.assignments.values())
        cancelled = {own.attempt.unit.id for own in given if own.cancelled > -math.inf}
        state: PassState = ray.get(self._actor.look.remote(answers, cancelled, self.closing))
        now = time.monotonic()
        for own in [*state.workers, *state.asks.values()]:
            worker = self._known.get(own.id)
            if worker is None:
                worker = self._known[own.id] = PoolWorker(None, starting=own, node=own.node)
                self.workers.append(worker)
            if own.ready and not worker.ready:
                worker.starting, self._starts = None, 0
            for unit, progress in own.progress.items():
                if unit in worker.assignments:
                    worker.assignments[unit].progress, worker.assignments[unit].reported = progress, now
        heard = {own.id for own in state.workers}
        for name, worker in list(self._known.items()):
            if name not in heard and not worker.ready:
                self._end(worker)
                self._starts += 1
                if self._starts >= STARTS_WITHOUT_SUCCESS * max(1, self.wanted):
                    raise RunError("worker processes die while they load the model (out of memory?)")
        self._watch_nodes()
        return state

    def _answers(self, asks: dict[str, WorkerReport]) -> dict[str, bool]:
        """Which of the units that workers ask for they may begin; those that have to wait are left out."""
        answers = {}
        for unit, own in asks.items():
            worker, attempt = self._known[own.id], self._open[unit]
            if self.closing or worker.leaving:
                answers[unit] = False
            elif self.admit(attempt.unit, len(worker.assignments)):
                answers[unit] = True
                self._start(worker, attempt)
        return answers

    def _start(self, worker: WorkerHandle, attempt: Attempt) -> None:
        worker.assignments[attempt.unit.id] = Assignment(attempt)

    def _end(self, worker: WorkerHandle) -> None:
        self._known = {name: own for name, own in self._known.items() if own is not worker}
        self.workers = [own for own in self.workers if own is not worker]

    def _missing(self, lost: bool) -> Iterator[Ended]:
        """Units of which Ray Data has nothing: done again, more carefully where their worker died. lost: so did it."""
        for unit, attempt in list(self._open.items()):
            if writer.is_committed(self.spec.output, unit, self.spec.config.output.partition):
                for worker in self.workers:
                    worker.assignments.pop(unit, None)
                done = writer.read_summary(self.spec.output, unit)
                yield from self._ended(Assignment(attempt), UnitResult(ok=done.ok, failed=done.failed))
            elif lost or not any(unit in worker.assignments for worker in self.workers):
                self._again.append((0.0, attempt))
        for worker in list(self.workers):
            if worker.assignments and not lost:
                yield from self._lost(worker, RunError("it died"))
