"""What an executor knows of its workers and of the units in flight.

Points in time are seconds of the monotonic clock.
"""

import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import Any

from raypd.answering import Progress
from raypd.errors import RunError
from raypd.run import Unit, UnitResult

_CANCEL_SECONDS = 2.0  # after which a cancellation that had no effect is repeated
# A worker that dies this often while it loads its model will not start.
_MAX_FAILED_STARTS = 4
# Worker deaths without any commit in between that no single document can explain.
_MAX_DEATHS_WITHOUT_COMMIT = 30


@dataclass
class Ended:
    """Event: a unit has ended."""

    unit: Unit
    result: UnitResult


@dataclass
class Tick:
    """Progress event: no unit ended during this poll."""

    answered: int  # documents of units in flight
    failed: int  # documents of units in flight
    workers: int  # workers that have loaded their model


@dataclass
class Deaths:
    """Worker processes that died since the last success, while loading and with a unit."""

    loading: int = 0
    with_units: int = 0

    def check(self, pool_size: int, workers: int, cause: str = "") -> None:
        """Raise RunError if too many workers have died.

        Args:
            pool_size: The number of workers that are wanted.
            workers: The number of workers that are running.
            cause: The reason of the last death, for the message.
        """
        if self.loading >= _MAX_FAILED_STARTS * max(1, pool_size):
            raise RunError(
                f"worker processes die while they load the model (out of memory?){cause}"
            )
        if self.with_units >= _MAX_DEATHS_WITHOUT_COMMIT + workers:
            raise RunError(f"worker processes keep dying and no unit is committed{cause}")


@dataclass(eq=False)
class Assignment:
    """A unit in flight on a worker."""

    unit: Unit
    since: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)  # as last reported
    reported: float = 0.0  # when it was reported
    cancelled: float = -math.inf  # when it was last cancelled

    @property
    def is_cancelled(self) -> bool:
        """Whether the unit may still be handed back.

        A worker that has not received the unit yet ignores the cancellation.
        """
        return time.monotonic() - self.cancelled < _CANCEL_SECONDS

    def seconds_left(self, typical: float) -> float:
        """Estimate the seconds until the unit ends.

        Args:
            typical: Seconds that a unit takes, for a unit without progress.
        """
        if self.progress.seconds_left is not None:
            return max(0.0, self.reported + self.progress.seconds_left - time.monotonic())
        return max(0.0, self.since + typical - time.monotonic())


@dataclass(eq=False)
class WorkerHandle:
    """A decode worker as the scheduler sees it."""

    actor: Any
    starting: Any = None  # reference to the answer of hello() while the worker loads its model
    node: str = ""
    # Units in flight by the reference to their result, oldest first.
    assignments: dict[Any, Assignment] = field(default_factory=dict)
    idle_since: float = 0.0
    draining: bool = False  # whether its node is draining
    _report: Any = None  # reference to the progress that was requested

    @property
    def ready(self) -> bool:
        """Whether the worker has loaded its model."""
        return self.starting is None

    def cancel(self, assignment: Assignment, only_waiting: bool) -> None:
        """Ask the worker to hand a unit back.

        Args:
            assignment: The unit in flight.
            only_waiting: Leave the unit alone if some of it has begun.
        """
        if not assignment.is_cancelled:
            assignment.cancelled = time.monotonic()
            self.actor.cancel.remote(assignment.unit.id, only_waiting)

    def poll(self) -> None:
        """Take the progress that was requested, if it has arrived, and request it again."""
        import ray

        if self._report is not None:
            if not ray.wait([self._report], timeout=0)[0]:
                return
            # If the worker has died, the results of its units will show it.
            with contextlib.suppress(ray.exceptions.RayError):
                progress: dict[str, Progress] = ray.get(self._report)
                for assignment in self.assignments.values():
                    if assignment.unit.id in progress:
                        assignment.progress = progress[assignment.unit.id]
                        assignment.reported = time.monotonic()
        self._report = self.actor.progress.remote() if self.assignments else None
