"""The scheduler: decode workers, actors that come and go, and who of them gets which unit.

The driver gives units out one by one, as workers have room: a second unit only when every worker has its first, so
that none is idle while another has a queue. When nothing is left to give out, idle workers get units that others have
not begun, and then parts of units that others have begun (work_stealing.py). The driver holds what is in flight and no
more, whatever the size of the run.
A worker that dies is replaced, and its units go to others; a node that is given notice gets no more units, and what is
in flight on it is finished if there is time, else handed back.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from raypd.cluster.in_hand import Given, Lent, Worker
from raypd.cluster.nodes import Nodes, is_alive
from raypd.cluster.shares import Progress
from raypd.cluster.work_stealing import Lending
from raypd.config import ClusterConfig
from raypd.errors import RunError
from raypd.run import retry_policy
from raypd.run.records import UnitResult
from raypd.run.retry_policy import Attempt
from raypd.run.unit import Unit

if TYPE_CHECKING:
    from raypd.cluster.ray_session import WorkerResources
    from raypd.cluster.worker import WorkerSpec

_WAIT_SECONDS = 0.25
_POLL_SECONDS = 2.0
_POLL_TAIL_SECONDS = 0.5  # while a worker has nothing to do, and others may lend to it
_IDLE_SECONDS = 5.0  # a worker with nothing to do that long, and nothing left to give out, is let go
_STARTS_WITHOUT_SUCCESS = 4  # a worker that dies so often while it loads its model will not come up
_DEATHS_WITHOUT_COMMIT = 30  # workers that die so often while nothing is committed: not a matter of a document
_RETRY_SECONDS = 2.0
_HAND_BACK_MARGIN = 5.0  # seconds before a node's end by which a unit must be committed


@dataclass
class Ended:
    """A unit that was committed, or given up with an error. `unreadable`: because its input cannot be read."""

    unit: Unit
    ok: int = 0
    failed: int = 0
    error: str | None = None
    unreadable: bool = False


@dataclass
class Tick:
    """Nothing ended for a moment. `working`: documents (answered, failed) of the units in hand, as last reported."""

    working: tuple[int, int]
    workers: int


class Scheduler:
    """Runs units through workers: `for event in pool.run(units, count)`.

    say: tells the user a line. Raises RunError when workers cannot start or die without end.
    """

    def __init__(
        self, order: WorkerSpec, share: WorkerResources, cluster: ClusterConfig, say: Callable[[str], None]
    ) -> None:
        self.order, self.share, self.cluster, self.say = order, share, cluster, say
        self.wanted = cluster.max_workers  # may be changed while it runs
        self.admit: Callable[[Unit, int], bool] = lambda unit, beside: True  # whether a unit may be given out
        self.closing = False  # nothing is given out any more: what is in hand is finished
        self.workers: list[Worker] = []
        self.lending = Lending(self.workers)
        self.nodes = Nodes()
        self._again: deque[tuple[float, Attempt]] = deque()  # (not before, attempt)
        self._source: Iterator[Unit] = iter(())
        self._dry = False
        self._left = 0
        self._starts = self._deaths = 0  # without a success since
        self._polled = 0.0
        self._unit_seconds = 0.0  # what units took lately

    def run(self, units: Iterator[Unit], count: int) -> Iterator[Ended | Tick]:
        """Streams `count` units (about) through the workers; an event for each that ended, and ticks in between."""
        self._source, self._left, self._dry = iter(units), count, False
        while True:
            self._look_at_nodes()
            self.lending.remind()
            self._assign()
            self._resize()
            if self._done_giving() and not any(worker.units for worker in self.workers):
                return
            yield from self._wait()
            yield Tick(self._working(), sum(worker.ready for worker in self.workers))

    def _done_giving(self) -> bool:
        return self.closing or (self._dry and not self._again)

    def close(self) -> None:
        """Ends all workers, and what they have in hand with them."""
        import ray

        for worker in self.workers:
            ray.kill(worker.actor)
        self.workers.clear()

    # ---------------------------------------------------------------------------------------------------- giving out

    def _assign(self) -> None:
        """Fills the workers level by level."""
        for depth in range(self.cluster.units_in_flight):
            for worker in self.workers:
                if not worker.ready or worker.leaving or len(worker.given) != depth or worker.bisecting:
                    continue
                attempt = None if self.closing else self._next(alone=depth == 0)
                if attempt is None:
                    break
                if not self.admit(attempt.unit, depth):
                    self._again.appendleft((0.0, attempt))
                    break
                self._give(worker, attempt)
        if self._tail():
            self._spread()
            self.lending.offer(self._unit_seconds)

    def _tail(self) -> bool:
        """Whether nothing is left to give out, and the run goes on."""
        return self._dry and not self._again and not self.closing

    def _next(self, alone: bool) -> Attempt | None:
        """What is to be done next; an attempt that wants a worker for itself only where `alone`."""
        now = time.monotonic()
        for place, (not_before, attempt) in enumerate(self._again):
            if not_before <= now and (alone or not attempt.bisecting):
                del self._again[place]
                return attempt
        unit = None if self._dry else next(self._source, None)
        self._dry = unit is None
        return Attempt(unit) if unit is not None else None

    def _give(self, worker: Worker, attempt: Attempt) -> None:
        worker.given[worker.actor.run.remote(attempt)] = Given(attempt=attempt)

    def _spread(self) -> None:
        """The tail: a worker that has run dry gets the unit that another has not begun."""
        idle = sum(worker.ready and not worker.leaving and not worker.given for worker in self.workers)
        idle -= sum(given.asked_back for worker in self.workers for given in worker.units)
        for worker in sorted(self.workers, key=lambda worker: -len(worker.given)):
            if idle <= 0 or len(worker.given) < 2:
                return
            youngest = list(worker.given.values())[-1]
            if not youngest.asked_back and not youngest.progress.begun and not isinstance(youngest, Lent):
                youngest.wanted = time.monotonic()
                worker.actor.hand_back.remote(youngest.key, True)
                idle -= 1

    # ------------------------------------------------------------------------------------------------ coming and going

    def _resize(self) -> None:
        """Starts workers where units wait, lets those go that nothing is left for."""
        import ray

        in_hand = sum(len(worker.units) for worker in self.workers if worker.leaving)
        useful = math.ceil(max(0, self._left - in_hand) / self.cluster.units_in_flight)
        staying = [worker for worker in self.workers if not worker.leaving]
        for _ in range(0 if self.closing else min(self.wanted, max(useful, 1 if self._left else 0)) - len(staying)):
            actor = self._kind.remote(self.order)
            self.workers.append(Worker(actor, actor.hello.remote()))
        for worker in [worker for worker in self.workers if not worker.given and self._spare(worker)]:
            ray.kill(worker.actor)
            self.workers.remove(worker)

    @cached_property
    def _kind(self) -> Any:
        """The actor class; made once, since Ray keeps every class that is made."""
        import ray

        from raypd.cluster.worker import DecodeWorker

        return ray.remote(DecodeWorker).options(
            num_cpus=self.share.cpus,
            num_gpus=self.share.gpus or None,
            max_concurrency=self.cluster.units_in_flight + 3,  # units or a share, and the calls that ask and tell
            max_restarts=0,  # the pool replaces what dies, and knows why
            max_task_retries=0,
        )

    def _spare(self, worker: Worker) -> bool:
        """Whether a worker with nothing in hand can go: its machine may have other work, or costs money."""
        if worker.leaving:
            return True
        if len(self.workers) > max(1, self.wanted):
            return True
        if not self._done_giving() or len(self.workers) <= self.cluster.min_workers:
            return False
        if not worker.ready:  # nobody has a unit that it could take over
            return all(len(other.given) < 2 for other in self.workers)
        return time.monotonic() - worker.idle_since > _IDLE_SECONDS and not self.lending.asking

    def _look_at_nodes(self) -> None:
        self.nodes.look()
        for worker in self.workers:
            left = self.nodes.seconds_left(worker.node)
            if left is None:
                continue
            if not worker.leaving:
                worker.leaving = True
                self.say(f"a node is going away{'' if math.isinf(left) else f' in {left:.0f} s'}: no more units for it")
            for given in worker.given.values():
                if not given.asked_back and self._seconds_needed(given) > left - _HAND_BACK_MARGIN:
                    given.wanted = time.monotonic()
                    worker.actor.hand_back.remote(given.key, False)

    def _seconds_needed(self, given: Given) -> float:
        """Until what a worker has in hand is done, with what others have borrowed of it."""
        own = given.seconds_left(self._unit_seconds)
        if given.progress.needs is None:
            own = own or 3 * _HAND_BACK_MARGIN
        return max([own, *(lent.seconds_left(self._unit_seconds) for _, lent in self.lending.of(given))])

    # --------------------------------------------------------------------------------------------------- taking back

    def _wait(self) -> Iterator[Ended]:
        """Waits a moment for answers, and takes all that are there."""
        import ray

        whose: dict[Any, Worker | None] = {ref: worker for worker in self.workers for ref in worker.given}
        whose |= {worker.starting: worker for worker in self.workers if worker.starting is not None}
        whose |= dict.fromkeys(self.lending.awaited())
        if not whose:
            time.sleep(_WAIT_SECONDS)
            return
        there, _ = ray.wait(list(whose), num_returns=1, timeout=_WAIT_SECONDS)
        if there:
            there, _ = ray.wait(list(whose), num_returns=len(whose), timeout=0)
        for ref in there:
            worker = whose[ref]
            if worker is None:
                self.lending.take(ref, self.closing)
                continue
            if worker not in self.workers:
                continue  # it was found dead a moment ago, and this with it
            try:
                answer = ray.get(ref)
            except ray.exceptions.RayActorError as error:
                yield from self._lost(worker, error)
                continue
            if ref == worker.starting:
                worker.starting, worker.node = None, answer
                worker.idle_since = time.monotonic()
                self._starts = 0
            else:
                yield from self._ended(worker, worker.given.pop(ref), answer)
        self._poll()

    def _ended(self, worker: Worker, given: Given, result: UnitResult) -> Iterator[Ended]:
        """A worker is done with a unit or a share, well or not."""
        if isinstance(given, Lent):
            if result.fatal:
                raise RunError(result.error)
            worker.idle_since = time.monotonic()
            self.lending.answered(given, result)
            return
        self.lending.drop(given)
        if result.done:
            self._unit_seconds += 0.2 * (time.monotonic() - given.since - self._unit_seconds)
        yield from self._answered(worker, given.burdened(given.attempt), result)

    def _answered(self, worker: Worker, attempt: Attempt, result: UnitResult) -> Iterator[Ended]:
        """A worker's word on a unit."""
        if result.fatal:
            raise RunError(result.error)
        worker.idle_since = time.monotonic()
        if result.handed_back:
            self._again.appendleft((0.0, attempt))
            return
        if result.error is None:
            self._deaths = 0
            self._left -= 1
            yield Ended(attempt.unit, result.ok, result.failed)
            return
        again = attempt.after_error() if result.retry else None
        if again is not None:
            self._again.append((time.monotonic() + _RETRY_SECONDS * attempt.number, again))
            return
        self._left -= 1
        yield Ended(attempt.unit, error=result.error, unreadable=result.unreadable)

    def _lost(self, worker: Worker, error: Exception) -> Iterator[Ended]:
        """A worker is gone. Its units go to others; those of a process that died count an attempt."""
        import ray

        self.workers.remove(worker)
        ray.kill(worker.actor)  # where it is out of reach only
        with_its_node = (
            worker.leaving or getattr(error, "preempted", False) or (worker.node and not is_alive(worker.node))
        )
        if not worker.ready:
            self._starts += 1
            if self._starts >= _STARTS_WITHOUT_SUCCESS * max(1, self.wanted):
                raise RunError(f"worker processes die while they load the model (out of memory?): {_cause(error)}")
        for given in worker.given.values():
            self.lending.drop(given)
            if isinstance(given, Lent):
                self.lending.lost(given, blame=not with_its_node and given.unit not in worker.units)
        if with_its_node:
            self.say("a node is gone; its units are done elsewhere")
            self._again.extendleft((0.0, given.burdened(given.attempt)) for given in worker.units)
            return
        if worker.given:
            self._deaths += 1
            what = "its units are tried again" if worker.units else "what it helped with is done elsewhere"
            self.say(f"a worker process died{_of_memory(error)}; {what}")
        if self._deaths >= _DEATHS_WITHOUT_COMMIT + len(self.workers):
            raise RunError(
                f"worker processes die, and nothing gets done: {_cause(error)}{self._failure_reason(worker)}"
            )
        for given in worker.units:
            unit = given.attempt.unit
            in_hand = retry_policy.checkpointed(self.order.output, unit.id) if given.attempt.bisecting else None
            again = given.attempt.after_death(in_hand)
            if again is not None:
                self._again.append((0.0, given.burdened(again)))
                continue
            self._left -= 1
            word = retry_policy.failure_reason(self.order.output, unit.id) or _cause(error)
            yield Ended(unit, error=f"its worker processes died each time: {word}")

    def _failure_reason(self, worker: Worker) -> str:
        for given in worker.given.values():
            if word := retry_policy.failure_reason(self.order.output, given.attempt.unit.id):
                return f"\nthe last word of a worker ({given.attempt.unit.id}): {word.strip()}"
        return ""

    # ------------------------------------------------------------------------------------------------------- progress

    def _working(self) -> tuple[int, int]:
        told = [given.progress for worker in self.workers for given in worker.given.values()]
        return sum(progress.answered for progress in told), sum(progress.failed for progress in told)

    def _poll(self) -> None:
        """Asks the workers how far they are; takes the answers that came since the last time."""
        import ray

        pause = _POLL_TAIL_SECONDS if self._tail() and self.lending.free() else _POLL_SECONDS
        if time.monotonic() - self._polled < pause:
            return
        self._polled = time.monotonic()
        polls = {worker.poll: worker for worker in self.workers if worker.poll is not None}
        there, _ = ray.wait(list(polls), num_returns=len(polls), timeout=0) if polls else ([], [])
        for ref in there:
            worker = polls[ref]
            worker.poll = None
            try:
                progress: dict[str, Progress] = ray.get(ref)
            except ray.exceptions.RayError:
                continue  # it died: its units say so
            for given in worker.given.values():
                if given.key in progress:
                    given.told(progress[given.key])
        for worker in self.workers:
            if worker.poll is None and worker.given:
                worker.poll = worker.actor.progress.remote()


def _cause(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _of_memory(error: Exception) -> str:
    return " because the machine ran out of memory" if "low on memory" in str(error) else ""
