"""A decode worker, and the units in flight on it, as the scheduler sees them.

Points in time are seconds of the monotonic clock.
"""

import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from raypd.answering import UnitProgress
from raypd.cluster.unit_block import UnitBlock
from raypd.run import Unit

_CANCEL_SECONDS = 2.0  # after which a cancellation that had no effect is repeated


@dataclass(eq=False)
class Assignment:
    """A unit in flight on a worker."""

    unit: Unit
    block: UnitBlock | None = None  # its documents, if they were read ahead
    since: float = field(default_factory=time.monotonic)
    progress: UnitProgress = field(default_factory=UnitProgress)  # as last reported
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
    starting: Any = None  # reference to the result of hello() while the worker loads its model
    node: str = ""
    # Units in flight by the reference to their result, oldest first.
    assignments: dict[Any, Assignment] = field(default_factory=dict)
    idle_since: float = 0.0
    draining: bool = False  # whether its node is draining
    retiring: bool = False  # whether it ends after its units in flight, as fewer are wanted
    depth: int = 1  # units that it may have in flight
    # Since when it has had nothing to do because no unit was read yet.
    starved_since: float | None = None
    reading_seconds: float = 0.0  # that its engine had waited for units it read itself
    _report: Any = None  # reference to the progress that was requested

    @property
    def ready(self) -> bool:
        """Whether the worker has loaded its model."""
        return self.starting is None

    @property
    def takes_units(self) -> bool:
        """Whether the worker may get more units."""
        return self.ready and not self.draining and not self.retiring

    def starved_seconds(self) -> float | None:
        """Return how long it has had nothing to do; None if it has a unit."""
        if self.assignments:
            return None
        if self.starved_since is None:
            return 0.0
        return time.monotonic() - self.starved_since

    def cancel(self, assignment: Assignment, only_waiting: bool) -> None:
        """Ask the worker to hand back a unit.

        Args:
            assignment: The unit in flight.
            only_waiting: Do nothing if any of the unit has begun.
        """
        if not assignment.is_cancelled:
            assignment.cancelled = time.monotonic()
            self.actor.cancel.remote(assignment.unit.id, only_waiting)

    def poll(self) -> None:
        """Take the progress that was requested, if it has arrived, and request it again."""
        if self._report is not None:
            if not ray.wait([self._report], timeout=0)[0]:
                return
            # If the worker has died, the results of its units will show it.
            with contextlib.suppress(ray.exceptions.RayError):
                progress: dict[str, UnitProgress] = ray.get(self._report)
                for assignment in self.assignments.values():
                    if assignment.unit.id in progress:
                        assignment.progress = progress[assignment.unit.id]
                        assignment.reported = time.monotonic()
        self._report = self.actor.progress.remote() if self.assignments else None
