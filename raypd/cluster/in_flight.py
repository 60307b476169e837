"""What the scheduler knows of a worker, and of the units that it has in flight. Times: seconds, monotonic clock."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import Any

from raypd.answering.request_queue import Progress
from raypd.run.retry_policy import Attempt

_CANCEL_AGAIN_SECONDS = 2.0


@dataclass(eq=False)
class Assignment:
    """A unit that a worker was given. progress: as last reported, at `reported`. cancelled: when it last was."""

    attempt: Attempt
    since: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)
    reported: float = 0.0
    cancelled: float = -math.inf

    @property
    def is_cancelled(self) -> bool:
        """Whether it may still be handed back. A worker that has not got the unit yet misses the call."""
        return time.monotonic() - self.cancelled < _CANCEL_AGAIN_SECONDS

    def seconds_left(self, typical: float) -> float:
        """Until its worker has done it: at its pace so far, else if it takes `typical` seconds."""
        if self.progress.seconds_left is not None:
            return max(0.0, self.reported + self.progress.seconds_left - time.monotonic())
        return max(0.0, self.since + typical - time.monotonic())


@dataclass(eq=False)
class WorkerHandle:
    """An actor. `starting`: the answer of hello(), while it loads its model. `leaving`: its node was given notice."""

    actor: Any
    starting: Any = None
    node: str = ""
    assignments: dict[Any, Assignment] = field(default_factory=dict)  # by the result that is awaited, oldest first
    idle_since: float = 0.0
    leaving: bool = False
    _report: Any = None  # that was asked for

    @property
    def ready(self) -> bool:
        return self.starting is None

    @property
    def bisecting(self) -> bool:
        return any(assignment.attempt.bisecting for assignment in self.assignments.values())

    def cancel(self, assignment: Assignment, only_waiting: bool) -> None:
        """Asks for a unit back. only_waiting: unless some of it was begun."""
        if not assignment.is_cancelled:
            assignment.cancelled = time.monotonic()
            self.actor.cancel.remote(assignment.attempt.unit.id, only_waiting)

    def poll(self) -> None:
        """Takes the progress that was asked for, if it is there, and asks again."""
        import ray

        if self._report is not None:
            if not ray.wait([self._report], timeout=0)[0]:
                return
            with contextlib.suppress(ray.exceptions.RayError):  # it died: its units show it
                progress: dict[str, Progress] = ray.get(self._report)
                for assignment in self.assignments.values():
                    if assignment.attempt.unit.id in progress:
                        assignment.progress = progress[assignment.attempt.unit.id]
                        assignment.reported = time.monotonic()
        self._report = self.actor.progress.remote() if self.assignments else None
