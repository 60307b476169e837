"""The scheduler of a run: a pool of decode workers, which are Ray actors.

Units come in the order of the plan, with the documents that readers have read ahead. A worker gets
one unit at a time, and a second one only once every worker has its first. When no unit is left to
assign, an idle worker steals one that another worker has not begun. The units of a dead worker go
to other workers. A worker on a draining node gets no more units: it finishes what it can finish in
time, and hands back the rest. If fewer workers are wanted, some get no more units and end.

Points in time are seconds of the monotonic clock.
"""

import math
import posixpath
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray

from raypd.cluster.document_stream import DocumentStream, StreamedUnit, StreamProgress
from raypd.cluster.faulty_gpus import workers_left
from raypd.cluster.nodes import NodeWatch, draining_message
from raypd.cluster.ray_session import WorkerResources
from raypd.cluster.unit_queue import UnitQueue
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.cluster.worker_deaths import WorkerDeaths
from raypd.cluster.worker_handle import Assignment, WorkerHandle
from raypd.config import ClusterConfig
from raypd.errors import RunError
from raypd.run import ReadingRecord, Unit, UnitResult, retry_policy
from raypd.text import Say

_WAIT_SECONDS = 0.25  # for a result, before units are assigned again
_STARVED_WAIT_SECONDS = 0.05  # the same while a worker waits for the readers
_POLL_SECONDS = 2.0
_IDLE_SECONDS = 5.0  # a worker that is idle this long while no unit is left to assign is released
# If an engine waits for input for a larger share of a unit's time, its worker overlaps more units.
_MAX_WAITING_SHARE = 0.05
_COMMIT_MARGIN = 5.0  # a unit must be committed this many seconds before its node ends


@dataclass
class UnitEnded:
    """Event: a unit has ended."""

    unit: Unit
    result: UnitResult


@dataclass
class Tick:
    """Progress event: no unit ended during this poll."""

    answered: int  # documents of units in flight
    failed: int  # documents of units in flight
    workers: int  # workers that have loaded their model
    units: int = 0  # units in flight
    stream: StreamProgress | None = None  # None if nothing is read ahead


class WorkerPool:
    """Runs units on a pool of decode workers.

    Attributes:
        wanted: The number of workers; may change during a run.
        closing: Set to begin no more units; may change during a run.
        admit: Returns whether a unit may begin on a worker, given how many others it has in flight.

    Args:
        spec: What each worker needs to start.
        resources: What each worker takes of the cluster.
        cluster: The section `cluster` of the configuration.
        say: Shows a line to the user.
    """

    def __init__(
        self, spec: WorkerSpec, resources: WorkerResources, cluster: ClusterConfig, say: Say
    ) -> None:
        self.spec = spec
        self.resources = resources
        self.cluster = cluster
        self.say = say
        self.wanted = cluster.max_workers
        self.closing = False
        self.admit: Callable[[Unit, int], bool] = lambda unit, beside: True
        self.workers: list[WorkerHandle] = []
        self.nodes = NodeWatch()
        self._max_workers = cluster.max_workers  # those with a GPU that is not faulty
        # Workers that reserve a faulty GPU so that nothing else is scheduled on it.
        self._pinning: list[WorkerHandle] = []
        self._queue = UnitQueue(())
        self._stream: DocumentStream | None = None
        # Numbers of units that should have been read ahead but were read by workers, by reason.
        self.read_by_workers: Counter[str] = Counter()
        self.reading = ReadingRecord()
        self._remaining = 0  # units that have not ended
        self._deaths = WorkerDeaths(spec, say)
        self._shown_waits = {""}  # what workers wait for, as shown to the user
        self._polled = 0.0
        self._unit_seconds = 0.0  # moving average of the seconds that a unit takes

    def run(self, units: Iterable[Unit], done: Set[str], count: int) -> Generator[UnitEnded | Tick]:
        """Run units until all have ended.

        Args:
            units: The units in the order in which they begin.
            done: Ids of units that are already committed.
            count: The number of units that are not.

        Yields:
            `UnitEnded` for each unit, and `Tick` for progress.

        Raises:
            RunError: If no worker can start, or if too many die.
        """
        source = (unit for unit in units if unit.id not in done)
        self._remaining = count
        self._deaths.attempted |= retry_policy.attempted(self.spec.output)
        if self.cluster.readers != 0:
            self._stream = DocumentStream(
                posixpath.basename(self.spec.output),
                source,
                self.spec.config,
                self.resources,
                self.reading,
            )
        self._queue = UnitQueue(source, self._stream)
        try:
            yield from self._run()
        finally:
            if self._stream is not None:
                self._stream.close()
                self._stream = None

    def _run(self) -> Iterator[UnitEnded | Tick]:
        while True:
            self._watch_nodes()
            self._retire()
            if self._stream is not None and not self.closing:
                self._stream.prepare()
            self._assign()
            self._resize()
            if self._all_assigned() and not any(worker.assignments for worker in self.workers):
                return
            yield from self._wait()
            yield self._tick()

    def _tick(self) -> Tick:
        """Sum up the progress of the units in flight, and show what workers wait for."""
        progress = [
            assignment.progress
            for worker in self.workers
            for assignment in worker.assignments.values()
        ]
        for waiting in {unit.waiting for unit in progress} - self._shown_waits:
            self._shown_waits.add(waiting)
            self.say(waiting)
        return Tick(
            answered=sum(unit.answered for unit in progress),
            failed=sum(unit.failed for unit in progress),
            workers=sum(worker.ready for worker in self.workers),
            units=len(progress),
            stream=self._stream.progress() if self._stream is not None else None,
        )

    def close(self) -> None:
        """End all workers."""
        for worker in list(self.workers):
            self._end(worker)
        while self._pinning:
            ray.kill(self._pinning.pop().actor)

    def _end(self, worker: WorkerHandle) -> None:
        ray.kill(worker.actor)
        self.workers.remove(worker)

    def _pin(self, worker: WorkerHandle, why: str) -> None:
        """Let a worker reserve a faulty GPU, so that nothing else is scheduled on it.

        Raises:
            RunError: If no other GPU is left.
        """
        self.say(why)
        self.workers.remove(worker)
        self._pinning.append(worker)
        self._max_workers = workers_left(
            len(self._pinning), self.resources.gpus, self.cluster.max_workers
        )
        if self._max_workers < 1:
            raise RunError(f"no GPU is left: {why}")

    def _all_assigned(self) -> bool:
        """Return whether no unit is left to begin."""
        return self.closing or self._queue.is_empty

    def _assign(self) -> None:
        """Give units to workers, those with the fewest units in flight first."""
        if self.closing:
            return
        is_dry = False  # whether the next unit of the plan is not read yet
        for depth in range(self.cluster.max_units_in_flight):
            for worker in self.workers:
                if len(worker.assignments) != depth or depth >= worker.depth:
                    continue
                if not worker.takes_units or is_dry:
                    continue
                streamed = self._queue.take(worker.starved_seconds())
                if streamed is None:
                    is_dry = not self._all_assigned()
                    break
                if not self.admit(streamed.unit, depth):
                    self._queue.put_back(streamed)
                    break
                self._start(worker, streamed)
        self._note_starved(is_dry)
        if is_dry or self._all_assigned():
            self._steal()

    def _note_starved(self, is_dry: bool) -> None:
        """Note since when each idle worker has been waiting for the readers."""
        for worker in self.workers:
            if worker.assignments or not worker.takes_units or not is_dry:
                worker.starved_since = None
            elif worker.starved_since is None:
                worker.starved_since = time.monotonic()

    def _start(self, worker: WorkerHandle, streamed: StreamedUnit) -> None:
        starved = worker.starved_seconds() or 0.0
        worker.starved_since = None
        if streamed.why_not:
            self.read_by_workers[streamed.why_not] += 1
        reference = worker.actor.run.remote(
            streamed.unit,
            block=streamed.block,
            starved=starved,
            again=streamed.unit.id in self._deaths.attempted,
        )
        worker.assignments[reference] = Assignment(streamed.unit, streamed.block)

    def _steal(self) -> None:
        """Ask busy workers for units that they have not begun, one for each idle worker."""
        idle_workers = 0
        for worker in self.workers:
            if worker.takes_units and not worker.assignments:
                idle_workers += 1
            # Units that have already been asked for are on their way to an idle worker.
            idle_workers -= sum(unit.is_cancelled for unit in worker.assignments.values())
        for worker in sorted(self.workers, key=lambda worker: -len(worker.assignments)):
            if idle_workers <= 0 or len(worker.assignments) < 2:
                return
            youngest = list(worker.assignments.values())[-1]
            if not youngest.is_cancelled and not youngest.progress.begun:
                worker.cancel(youngest, only_waiting=True)
                idle_workers -= 1

    def _retire(self) -> None:
        """Choose the workers that get no more units because fewer are wanted.

        Nodes are paid for as a whole, so a worker that is alone on its node ends first.
        """
        remaining = [worker for worker in self.workers if not worker.draining]
        surplus = len(remaining) - max(1, self.wanted)
        workers_of_node = Counter(worker.node for worker in remaining)

        def order(worker: WorkerHandle) -> tuple[bool, bool, int, str, int]:
            # A worker that is already retiring continues to do so, and one that is loading its
            # model has nothing to finish.
            in_flight = len(worker.assignments)
            on_node = workers_of_node[worker.node]
            return (not worker.retiring, worker.ready, on_node, worker.node, in_flight)

        for number, worker in enumerate(sorted(remaining, key=order)):
            worker.retiring = number < surplus
            if worker.retiring:
                for assignment in worker.assignments.values():
                    if not assignment.progress.begun:
                        worker.cancel(assignment, only_waiting=True)

    def _resize(self) -> None:
        """Start the workers that are missing, and end those that are no longer needed."""
        draining = [worker for worker in self.workers if worker.draining]
        for _ in range(self._target_size(draining) - (len(self.workers) - len(draining))):
            actor = self._actor_class.remote(self.spec)
            worker = WorkerHandle(actor, actor.hello.remote())
            worker.depth = self.cluster.first_units_in_flight
            self.workers.append(worker)
        for worker in list(self.workers):
            if not worker.assignments and self._is_spare(worker):
                self._end(worker)

    def _target_size(self, draining: list[WorkerHandle]) -> int:
        """Return how many workers to have besides those on draining nodes."""
        if self.closing or not self._remaining:
            return 0
        units = self._remaining - sum(len(worker.assignments) for worker in draining)
        useful = math.ceil(max(0, units) / self.cluster.first_units_in_flight)
        return min(self.wanted, self._max_workers, max(1, useful))

    @cached_property
    def _actor_class(self) -> Any:
        """Return the class of the workers, which is made once because Ray keeps every class."""
        return ray.remote(DecodeWorker).options(
            num_cpus=self.resources.cpus,
            num_gpus=self.resources.gpus or None,
            # One thread for each unit in flight, one for progress and one for cancel.
            max_concurrency=self.cluster.max_units_in_flight + 2,
            # Ray retries a failed task on the same actor only, so the pool reassigns units itself.
            max_restarts=0,
            max_task_retries=0,
        )

    def _is_spare(self, worker: WorkerHandle) -> bool:
        """Return whether an idle worker can be released, so that it costs nothing more."""
        if worker.draining or worker.retiring:
            return True
        if not self._all_assigned() or len(self.workers) <= self.cluster.min_workers:
            return False
        if not worker.ready:
            # The worker is useless unless another worker has a unit to steal.
            return all(len(peer.assignments) < 2 for peer in self.workers)
        return time.monotonic() - worker.idle_since > _IDLE_SECONDS

    def _watch_nodes(self) -> None:
        """Drain the workers of draining nodes: take back units that they cannot commit in time."""
        self.nodes.look()
        for worker in self.workers:
            seconds_left = self.nodes.seconds_left(worker.node)
            if seconds_left is None:
                continue
            if not worker.draining:
                worker.draining = True
                self.say(draining_message(worker.node, seconds_left))
            for assignment in worker.assignments.values():
                needed = assignment.seconds_left(self._unit_seconds)
                if not needed and assignment.progress.seconds_left is None:
                    # Nothing is known about the unit, so leave it only if there is ample time.
                    needed = 3 * _COMMIT_MARGIN
                if needed > seconds_left - _COMMIT_MARGIN:
                    worker.cancel(assignment, only_waiting=False)

    def _wait(self) -> Iterator[UnitEnded]:
        """Wait a moment for results, and yield the units that have ended."""
        owners: dict[Any, WorkerHandle] = {}
        for worker in self.workers:
            owners.update(dict.fromkeys(worker.assignments, worker))
            if worker.starting is not None:
                owners[worker.starting] = worker
        seconds = _WAIT_SECONDS
        if any(worker.starved_since is not None for worker in self.workers):
            seconds = _STARVED_WAIT_SECONDS
        if not owners:
            time.sleep(seconds)
            return
        references, _ = ray.wait(list(owners), num_returns=1, timeout=seconds)
        if references:
            references, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0)
        for reference in references:
            worker = owners[reference]
            # The worker may have been found dead with an earlier reference.
            if worker in self.workers:
                yield from self._take(worker, reference)
        if time.monotonic() - self._polled >= _POLL_SECONDS:
            self._polled = time.monotonic()
            for worker in self.workers:
                worker.poll()

    def _take(self, worker: WorkerHandle, reference: Any) -> Iterator[UnitEnded]:
        """Take a result of a worker, which is that of a unit or of its start."""
        try:
            result = ray.get(reference)
        except ray.exceptions.RayTaskError:
            # This is a bug in raypd, which would occur in every worker.
            raise
        except ray.exceptions.RayError as error:
            # The worker died, was killed for memory, or its result is gone.
            self._lost(worker, error)
            return
        worker.idle_since = time.monotonic()
        if reference == worker.starting:
            worker.starting = None
            worker.node, faulty_gpu = result
            if faulty_gpu is not None:
                self._pin(worker, faulty_gpu)
            self._deaths.while_loading = 0
        else:
            assignment = worker.assignments.pop(reference)
            self._adapt_depth(worker, assignment, result)
            yield from self._ended(assignment, result)

    def _adapt_depth(
        self, worker: WorkerHandle, assignment: Assignment, result: UnitResult
    ) -> None:
        """Let a worker overlap more units if its engine waited for a unit that it read itself."""
        waited = result.reading_seconds - worker.reading_seconds
        worker.reading_seconds = max(worker.reading_seconds, result.reading_seconds)
        seconds = time.monotonic() - assignment.since
        if waited > _MAX_WAITING_SHARE * seconds:
            worker.depth = min(worker.depth + 1, self.cluster.max_units_in_flight)

    def _ended(self, assignment: Assignment, result: UnitResult) -> Iterator[UnitEnded]:
        if result.fatal:
            raise RunError(result.error)
        if result.handed_back:
            self._queue.put_back(StreamedUnit(assignment.unit, assignment.block))
            return
        if result.why_read:
            self.read_by_workers[result.why_read] += 1
        if result.error is None:
            seconds = time.monotonic() - assignment.since
            self._unit_seconds += 0.2 * (seconds - self._unit_seconds)
            self._deaths.since_commit = 0
        self._remaining -= 1
        yield UnitEnded(assignment.unit, result)

    def _lost(self, worker: WorkerHandle, error: Exception) -> None:
        """Reassign the units of a worker that died."""
        self._end(worker)  # the process may only be out of reach
        for assignment in reversed(worker.assignments.values()):
            self._queue.put_back(StreamedUnit(assignment.unit, assignment.block))
        self._deaths.take(worker, error, self.wanted, len(self.workers))
