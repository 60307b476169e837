"""`cluster.executor: pool`: the scheduler of a pool of decode workers, which are Ray actors.

A worker gets one unit at a time, and a second one only once every worker has its first. When no
unit is left to assign, an idle worker steals one that another worker has not begun. The units of a
dead worker go to other workers. A worker on a draining node gets no more units: what it can finish
in time it finishes, and the rest it hands back.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Set
from functools import cached_property
from typing import Any

import ray

from raypd.cluster.faulty_gpus import workers_left
from raypd.cluster.in_flight import Assignment, Deaths, Ended, Tick, WorkerHandle
from raypd.cluster.nodes import NodeWatch, draining_message, is_alive
from raypd.cluster.ray_session import WorkerResources
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import ClusterConfig
from raypd.errors import RunError
from raypd.run import Unit, UnitResult, retry_policy
from raypd.text import Say

_WAIT_SECONDS = 0.25
_POLL_SECONDS = 2.0
_IDLE_SECONDS = 5.0  # a worker that idles this long while no unit is left to assign is released
_COMMIT_MARGIN = 5.0  # a unit must be committed this many seconds before its node ends


class PoolExecutor:
    """Runs units on a pool of decode workers.

    Attributes:
        wanted: The number of workers; may change during a run.
        closing: Set to begin no more units; may change during a run.
        admit: Returns whether a unit may begin on a worker that has so many others in flight.

    Args:
        spec: What each worker is made of.
        resources: What each worker takes of the cluster.
        cluster: The section `cluster` of the configuration.
        say: Shows the user a line.
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
        self._max_workers = cluster.max_workers  # as many as have a GPU that is not faulty
        self._returned: deque[Unit] = deque()  # units that were in flight and are not committed
        # Workers that pin a faulty GPU so that nothing else is scheduled on it.
        self._pinning: list[WorkerHandle] = []
        self._source: Iterator[Unit] = iter(())
        self._exhausted = False  # whether the source has no more units
        self._remaining = 0  # units that have not ended
        self._deaths = Deaths()
        self._shown_waits = {""}  # what workers wait for, as shown to the user
        self._polled = 0.0
        self._unit_seconds = 0.0  # moving average of the seconds that a unit takes

    def run(self, units: Iterable[Unit], done: Set[str], count: int) -> Generator[Ended | Tick]:
        """Run units until all have ended.

        Args:
            units: The units in the order in which they begin.
            done: Ids of units that are committed already.
            count: The number of units that are not.

        Yields:
            `Ended` for each unit, and `Tick` for progress.

        Raises:
            RunError: If no worker can start, or if too many die.
        """
        self._source = (unit for unit in units if unit.id not in done)
        self._remaining = count
        self._exhausted = False
        while True:
            self._watch_nodes()
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
        """Record that a worker pins a faulty GPU so that nothing else is scheduled on it.

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
        return self.closing or (self._exhausted and not self._returned)

    def _assign(self) -> None:
        """Give units to workers, those with the fewest units in flight first."""
        for depth in range(self.cluster.units_in_flight):
            for worker in self.workers:
                if not worker.ready or worker.draining or len(worker.assignments) != depth:
                    continue
                unit = None if self.closing else self._next()
                if unit is None:
                    break
                if not self.admit(unit, depth):
                    self._returned.appendleft(unit)
                    break
                self._start(worker, unit)
        if self._all_assigned() and not self.closing:
            self._steal()

    def _next(self) -> Unit | None:
        """Take the next unit to begin, or None if there is none."""
        if self._returned:
            return self._returned.popleft()
        if self._exhausted:
            return None
        unit = next(self._source, None)
        self._exhausted = unit is None
        return unit

    def _start(self, worker: WorkerHandle, unit: Unit) -> None:
        worker.assignments[worker.actor.run.remote(unit)] = Assignment(unit)

    def _steal(self) -> None:
        """Ask busy workers for units that they have not begun, one for each idle worker."""
        idle_workers = 0
        for worker in self.workers:
            if worker.ready and not worker.draining and not worker.assignments:
                idle_workers += 1
            # Units that were asked for already are on their way to an idle worker.
            idle_workers -= sum(unit.is_cancelled for unit in worker.assignments.values())
        for worker in sorted(self.workers, key=lambda worker: -len(worker.assignments)):
            if idle_workers <= 0 or len(worker.assignments) < 2:
                return
            youngest = list(worker.assignments.values())[-1]
            if not youngest.is_cancelled and not youngest.progress.begun:
                worker.cancel(youngest, only_waiting=True)
                idle_workers -= 1

    def _resize(self) -> None:
        """Start the workers that are missing, and end those that are not needed any more."""
        draining = [worker for worker in self.workers if worker.draining]
        for _ in range(self._target_size(draining) - (len(self.workers) - len(draining))):
            actor = self._actor_class.remote(self.spec)
            self.workers.append(WorkerHandle(actor, actor.hello.remote()))
        for worker in list(self.workers):
            if not worker.assignments and self._is_spare(worker):
                self._end(worker)

    def _target_size(self, draining: list[WorkerHandle]) -> int:
        """Return how many workers to have beside those on draining nodes."""
        if self.closing or not self._remaining:
            return 0
        units = self._remaining - sum(len(worker.assignments) for worker in draining)
        useful = math.ceil(max(0, units) / self.cluster.units_in_flight)
        return min(self.wanted, self._max_workers, max(1, useful))

    @cached_property
    def _actor_class(self) -> Any:
        """The class of the workers, made once because Ray keeps every class that is made."""
        return ray.remote(DecodeWorker).options(
            num_cpus=self.resources.cpus,
            num_gpus=self.resources.gpus or None,
            # One thread for each unit in flight, one for progress and one for cancel.
            max_concurrency=self.cluster.units_in_flight + 2,
            # Ray retries a failed task on the same actor only, so the pool reassigns units itself.
            max_restarts=0,
            max_task_retries=0,
        )

    def _is_spare(self, worker: WorkerHandle) -> bool:
        """Return whether an idle worker can be released, so that it costs nothing any more."""
        if worker.draining or len(self.workers) > max(1, self.wanted):
            return True
        if not self._all_assigned() or len(self.workers) <= self.cluster.min_workers:
            return False
        if not worker.ready:
            # It is of no use unless another worker has a unit to steal.
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

    def _wait(self) -> Iterator[Ended]:
        """Wait a moment for results, and yield the units that have ended."""
        owners: dict[Any, WorkerHandle] = {}
        for worker in self.workers:
            owners.update(dict.fromkeys(worker.assignments, worker))
            if worker.starting is not None:
                owners[worker.starting] = worker
        if not owners:
            time.sleep(_WAIT_SECONDS)
            return
        references, _ = ray.wait(list(owners), num_returns=1, timeout=_WAIT_SECONDS)
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

    def _take(self, worker: WorkerHandle, reference: Any) -> Iterator[Ended]:
        """Take a result of a worker, which is that of a unit or of its start."""
        try:
            result = ray.get(reference)
        except ray.exceptions.RayTaskError:
            # A bug of raypd, which would occur in every worker.
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
            self._deaths.loading = 0
        else:
            yield from self._ended(worker.assignments.pop(reference), result)

    def _ended(self, assignment: Assignment, result: UnitResult) -> Iterator[Ended]:
        if result.fatal:
            raise RunError(result.error)
        if result.handed_back:
            self._returned.appendleft(assignment.unit)
            return
        if result.error is None:
            seconds = time.monotonic() - assignment.since
            self._unit_seconds += 0.2 * (seconds - self._unit_seconds)
            self._deaths.with_units = 0
        self._remaining -= 1
        yield Ended(assignment.unit, result)

    def _lost(self, worker: WorkerHandle, error: Exception) -> None:
        """Reassign the units of a worker that died.

        The next worker reads on storage whether a unit is to blame (UnitLog).
        """
        self._end(worker)  # the process may only be out of reach
        units = [assignment.unit for assignment in worker.assignments.values()]
        self._returned.extendleft(reversed(units))
        preempted = worker.draining or getattr(error, "preempted", False)
        node_lost = preempted or (worker.node and not is_alive(worker.node))
        if node_lost:
            name = f"Node {worker.node[:8]}" if worker.node else "A node"
            self.say(f"{name} was lost; its units will be processed elsewhere.")
        elif units:
            self._deaths.with_units += 1
            cause = ""
            if "low on memory" in str(error):
                cause = " because the machine ran out of memory"
            self.say(f"A worker process died{cause}; its units will be retried.")
        if not worker.ready and not node_lost:
            self._deaths.loading += 1
        self._deaths.check(self.wanted, len(self.workers), f": {self._cause(error, units)}")

    def _cause(self, error: Exception, units: list[Unit]) -> str:
        """Describe why a worker died: Ray's last line, and what the worker wrote before."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        cause = lines[-1].strip()
        for name in [unit.id for unit in units] or [retry_policy.START]:
            reason = retry_policy.failure_reason(self.spec.output, name)
            if reason:
                return f"{cause}\nthe last error of a worker ({name}): {reason.strip()}"
        return cause
