"""What an executor knows and says of workers and of units in flight.

Times: seconds, monotonic clock.
"""

import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import Any

from raypd.answering.request_queue import Progress
from raypd.errors import RunError
from raypd.run.records import UnitResult
from raypd.run.unit import Unit

_CANCEL_AGAIN_SECONDS = 2.0
_STARTS_WITHOUT_SUCCESS = 4  # a worker that dies so often while it loads its model will not come up
# Workers that die so often while nothing is committed: not a matter of a document.
_DEATHS_WITHOUT_COMMIT = 30


@dataclass
class Ended:
    unit: Unit
    result: UnitResult


@dataclass
class Tick:
    """Nothing ended for a moment.

    `answered`, `failed`: documents of units in flight. `workers`: that are ready.
    """

    answered: int
    failed: int
    workers: int


@dataclass
class Deaths:
    """Worker processes that died since the last success: while they loaded, and with a unit."""

    loading: int = 0
    with_units: int = 0

    def check(self, pool_size: int, workers: int, cause: str = "") -> None:
        """Raises RunError where there are too many of them."""
        if self.loading >= _STARTS_WITHOUT_SUCCESS * max(1, pool_size):
            raise RunError(
                f"worker processes die while they load the model (out of memory?){cause}"
            )
        if self.with_units >= _DEATHS_WITHOUT_COMMIT + workers:
            raise RunError(f"worker processes die, and nothing gets done{cause}")


@dataclass(eq=False)
class Assignment:
    """A unit that a worker was given. progress: as last reported, at `reported`. cancelled: when it
    last was.
    """

    unit: Unit
    since: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)
    reported: float = 0.0
    cancelled: float = -math.inf

    @property
    def is_cancelled(self) -> bool:
        """Whether it may still be handed back.

        A worker that has not got the unit yet misses the call.
        """
        return time.monotonic() - self.cancelled < _CANCEL_AGAIN_SECONDS

    def seconds_left(self, typical: float) -> float:
        """Until its worker has done it: at its pace so far, else if it takes `typical` seconds."""
        if self.progress.seconds_left is not None:
            return max(0.0, self.reported + self.progress.seconds_left - time.monotonic())
        return max(0.0, self.since + typical - time.monotonic())


@dataclass(eq=False)
class WorkerHandle:
    """An actor.

    `starting`: the answer of hello(), while it loads its model. `leaving`: its node was given
    notice.
    """

    actor: Any
    starting: Any = None
    node: str = ""
    # By the result that is awaited, oldest first.
    assignments: dict[Any, Assignment] = field(default_factory=dict)
    idle_since: float = 0.0
    leaving: bool = False
    _report: Any = None  # that was asked for

    @property
    def ready(self) -> bool:
        return self.starting is None

    def cancel(self, assignment: Assignment, only_waiting: bool) -> None:
        """Asks for a unit back. only_waiting: unless some of it was begun."""
        if not assignment.is_cancelled:
            assignment.cancelled = time.monotonic()
            self.actor.cancel.remote(assignment.unit.id, only_waiting)

    def poll(self) -> None:
        """Takes the progress that was asked for, if it is there, and asks again."""
        import ray

        if self._report is not None:
            if not ray.wait([self._report], timeout=0)[0]:
                return
            with contextlib.suppress(ray.exceptions.RayError):  # it died: its units show it
                progress: dict[str, Progress] = ray.get(self._report)
                for assignment in self.assignments.values():
                    if assignment.unit.id in progress:
                        assignment.progress = progress[assignment.unit.id]
                        assignment.reported = time.monotonic()
        self._report = self.actor.progress.remote() if self.assignments else None
