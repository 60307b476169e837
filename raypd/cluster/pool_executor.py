"""`cluster.executor: pool`: decode workers, actors that come and go.

Each gets units one by one, a second one only when every worker has its first; when none is left, an
idle worker gets one that another has not begun. A dead worker's units go to others; a node that is
given notice gets no more, and finishes what is in flight or hands it back.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Set
from functools import cached_property
from typing import Any

import ray

from raypd.cluster.card import workers_left
from raypd.cluster.in_flight import Assignment, Deaths, Ended, Tick, WorkerHandle
from raypd.cluster.nodes import NodeWatch, going_away, is_alive
from raypd.cluster.ray_session import WorkerResources
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import ClusterConfig
from raypd.errors import RunError
from raypd.run import retry_policy
from raypd.run.records import UnitResult
from raypd.run.text import Say
from raypd.run.unit import Unit

_WAIT_SECONDS = 0.25
_POLL_SECONDS = 2.0
_IDLE_SECONDS = 5.0  # a worker that is idle that long while no unit is left to assign is let go
_COMMIT_MARGIN = 5.0  # seconds before a node's end by which a unit must be committed


class PoolExecutor:
    """Runs units through workers. wanted: how many; closing: nothing is begun any more; both may
    change while it runs. admit: whether a unit may be begun on a worker that has so many others in
    flight. say: shows the user a line.
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
        self._most = cluster.max_workers  # that there are cards for
        self.admit: Callable[[Unit, int], bool] = lambda unit, beside: True
        self.workers: list[WorkerHandle] = []
        self.nodes = NodeWatch()
        self._again: deque[Unit] = deque()  # that were in flight before
        # On cards that fail, which they hold so that no other worker gets them.
        self._left_out: list[WorkerHandle] = []
        self._source: Iterator[Unit] = iter(())
        self._exhausted = False  # the source is
        self._left = 0  # units that have not ended
        self._deaths = Deaths()
        self._waits = {""}  # of workers, that were said
        self._polled = 0.0
        self._unit_seconds = 0.0  # what units took lately

    def run(self, units: Iterable[Unit], done: Set[str], count: int) -> Generator[Ended | Tick]:
        """Yields the end of `count` units not `done`, and ticks.

        Raises RunError: no worker starts, or all die.
        """
        self._source = (unit for unit in units if unit.id not in done)
        self._left = count
        self._exhausted = False
        while True:
            self._watch_nodes()
            self._assign()
            self._resize()
            if self._all_assigned() and not any(worker.assignments for worker in self.workers):
                return
            yield from self._wait()
            progress = [
                unit.progress for worker in self.workers for unit in worker.assignments.values()
            ]
            for waiting in {unit.waiting for unit in progress} - self._waits:
                self._waits.add(waiting)
                self.say(waiting)
            answered = sum(unit.answered for unit in progress)
            failed = sum(unit.failed for unit in progress)
            yield Tick(answered, failed, sum(worker.ready for worker in self.workers))

    def close(self) -> None:
        for worker in list(self.workers):
            self._end(worker)
        while self._left_out:
            ray.kill(self._left_out.pop().actor)

    def _end(self, worker: WorkerHandle) -> None:
        ray.kill(worker.actor)
        self.workers.remove(worker)

    def _leave_out(self, worker: WorkerHandle, why: str) -> None:
        """Raises RunError where no card is left."""
        self.say(why)
        self.workers.remove(worker)
        self._left_out.append(worker)
        self._most = workers_left(
            len(self._left_out), self.resources.gpus, self.cluster.max_workers
        )
        if self._most < 1:
            raise RunError(f"no GPU is left: {why}")

    def _all_assigned(self) -> bool:
        return self.closing or (self._exhausted and not self._again)

    def _assign(self) -> None:
        for depth in range(self.cluster.units_in_flight):
            for worker in self.workers:
                if not worker.ready or worker.leaving or len(worker.assignments) != depth:
                    continue
                unit = None if self.closing else self._next()
                if unit is None:
                    break
                if not self.admit(unit, depth):
                    self._again.appendleft(unit)
                    break
                self._start(worker, unit)
        if self._all_assigned() and not self.closing:
            self._spread()

    def _next(self) -> Unit | None:
        if self._again:
            return self._again.popleft()
        unit = None if self._exhausted else next(self._source, None)
        self._exhausted = unit is None
        return unit

    def _start(self, worker: WorkerHandle, unit: Unit) -> None:
        worker.assignments[worker.actor.run.remote(unit)] = Assignment(unit)

    def _spread(self) -> None:
        """Takes units that have not begun back for workers that are idle."""
        idle = sum(
            worker.ready and not worker.leaving and not worker.assignments
            for worker in self.workers
        )
        idle -= sum(
            assignment.is_cancelled
            for worker in self.workers
            for assignment in worker.assignments.values()
        )
        for worker in sorted(self.workers, key=lambda worker: -len(worker.assignments)):
            if idle <= 0 or len(worker.assignments) < 2:
                return
            youngest = list(worker.assignments.values())[-1]
            if not youngest.is_cancelled and not youngest.progress.begun:
                worker.cancel(youngest, only_waiting=True)
                idle -= 1

    def _resize(self) -> None:
        leaving = [worker for worker in self.workers if worker.leaving]
        remaining = max(0, self._left - sum(len(worker.assignments) for worker in leaving))
        useful = max(math.ceil(remaining / self.cluster.units_in_flight), 1 if self._left else 0)
        workers = 0 if self.closing else min(self.wanted, self._most, useful)
        for _ in range(workers - (len(self.workers) - len(leaving))):
            actor = self._actor_class.remote(self.spec)
            self.workers.append(WorkerHandle(actor, actor.hello.remote()))
        for worker in list(self.workers):
            if not worker.assignments and self._is_spare(worker):
                self._end(worker)

    @cached_property
    def _actor_class(self) -> Any:
        """Made once, since Ray keeps every class that is made."""
        return ray.remote(DecodeWorker).options(
            num_cpus=self.resources.cpus,
            num_gpus=self.resources.gpus or None,
            max_concurrency=self.cluster.units_in_flight + 2,  # units, progress, cancel
            max_restarts=0,  # the scheduler replaces what dies, and knows why
            max_task_retries=0,
        )

    def _is_spare(self, worker: WorkerHandle) -> bool:
        """Whether an idle worker can go: its machine may have other work, or costs money."""
        if worker.leaving or len(self.workers) > max(1, self.wanted):
            return True
        if not self._all_assigned() or len(self.workers) <= self.cluster.min_workers:
            return False
        if not worker.ready:  # nobody has a unit that it could take over
            return all(len(peer.assignments) < 2 for peer in self.workers)
        return time.monotonic() - worker.idle_since > _IDLE_SECONDS

    def _watch_nodes(self) -> None:
        self.nodes.look()
        for worker in self.workers:
            seconds = self.nodes.seconds_left(worker.node)
            if seconds is None:
                continue
            if not worker.leaving:
                worker.leaving = True
                self.say(going_away(seconds))
            for assignment in worker.assignments.values():
                needed = assignment.seconds_left(self._unit_seconds)
                if not needed and assignment.progress.seconds_left is None:  # nothing is known
                    needed = 3 * _COMMIT_MARGIN
                if needed > seconds - _COMMIT_MARGIN:
                    worker.cancel(assignment, only_waiting=False)

    def _wait(self) -> Iterator[Ended]:
        owners = {ref: worker for worker in self.workers for ref in worker.assignments}
        owners |= {
            worker.starting: worker for worker in self.workers if worker.starting is not None
        }
        if not owners:
            time.sleep(_WAIT_SECONDS)
            return
        ended, _ = ray.wait(list(owners), num_returns=1, timeout=_WAIT_SECONDS)
        if ended:
            ended, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0)
        for ref in ended:
            worker = owners[ref]
            if worker not in self.workers:
                continue  # it was found dead a moment ago, and this with it
            try:
                result = ray.get(ref)
            # A fault of raypd: it would come again in every worker.
            except ray.exceptions.RayTaskError:
                raise
            # It died, was killed for memory, or its result is gone.
            except ray.exceptions.RayError as error:
                self._lost(worker, error)
                continue
            worker.idle_since = time.monotonic()
            if ref == worker.starting:
                worker.starting, (worker.node, left_out) = None, result
                if left_out is not None:
                    self._leave_out(worker, left_out)
                self._deaths.loading = 0
            else:
                yield from self._ended(worker.assignments.pop(ref), result)
        if time.monotonic() - self._polled >= _POLL_SECONDS:
            self._polled = time.monotonic()
            for worker in self.workers:
                worker.poll()

    def _ended(self, assignment: Assignment, result: UnitResult) -> Iterator[Ended]:
        if result.fatal:
            raise RunError(result.error)
        if result.handed_back:
            self._again.appendleft(assignment.unit)
            return
        if result.error is None:
            self._unit_seconds += 0.2 * (time.monotonic() - assignment.since - self._unit_seconds)
            self._deaths.with_units = 0
        self._left -= 1
        yield Ended(assignment.unit, result)

    def _lost(self, worker: WorkerHandle, error: Exception) -> None:
        """A worker is gone.

        Its units go to others, which find on storage whether they are to blame (UnitLog).
        """
        self._end(worker)  # where it is only out of reach
        units = [assignment.unit for assignment in worker.assignments.values()]
        names = [unit.id for unit in units] or [retry_policy.START]
        self._again.extendleft(reversed(units))
        gone = (
            worker.leaving
            or getattr(error, "preempted", False)
            or (worker.node and not is_alive(worker.node))
        )
        self._deaths.loading += not (worker.ready or gone)
        if gone:
            self.say("a node is gone; its units are done elsewhere")
        elif units:
            self._deaths.with_units += 1
            if "low on memory" in str(error):
                memory = " because the machine ran out of memory"
            else:
                memory = ""
            self.say(f"a worker process died{memory}; its units are tried again")
        reasons = ((name, retry_policy.failure_reason(self.spec.output, name)) for name in names)
        cause = next(
            (
                f"\nthe last error of a worker ({unit}): {why.strip()}"
                for unit, why in reasons
                if why
            ),
            "",
        )
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        self._deaths.check(self.wanted, len(self.workers), f": {last}{cause}")
