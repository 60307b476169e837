"""What the scheduler knows of a worker, and of every unit and every lent share that the worker has in hand.

Times are of the monotonic clock, in seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from raypd.cluster.shares import Progress
from raypd.run.retry_policy import Attempt

_NOTHING = Progress()
_ASK_AGAIN_SECONDS = 2.0


@dataclass(eq=False, kw_only=True)
class Given:
    """A unit in a worker's hand.

    progress: the last that the worker told, at `heard`. wanted: when the worker was last told to hand it back. asked:
    it was asked for shares, and the answer is not there yet; empty: it had none to give. alone: a worker that had
    borrowed of the unit failed, and its own worker is to do the rest.
    """

    attempt: Attempt
    since: float = field(default_factory=time.monotonic)
    progress: Progress = _NOTHING
    heard: float | None = None
    wanted: float = -math.inf
    asked: bool = False
    empty: bool = False
    alone: bool = False
    deaths: int = 0  # of workers that had borrowed of it

    @property
    def key(self) -> str:
        """What its worker knows it by."""
        return self.attempt.unit.id

    @property
    def unit(self) -> Given:
        """The unit that it is, or is a share of."""
        return self

    @property
    def asked_back(self) -> bool:
        """Whether it may still be handed back. A worker overhears the wish for a unit that is on its way to it."""
        return time.monotonic() - self.wanted < _ASK_AGAIN_SECONDS

    def told(self, progress: Progress) -> None:
        self.progress, self.heard = progress, time.monotonic()

    def seconds_left(self, like_others: float) -> float:
        """Until its worker has done its own part: at its pace so far, else if it takes what units took lately."""
        now = time.monotonic()
        if self.progress.needs is not None and self.heard is not None:
            return max(0.0, self.progress.needs - (now - self.heard))
        return max(0.0, like_others - (now - self.since))

    def burdened(self, attempt: Attempt) -> Attempt:
        """An attempt at it with the deaths of its borrowers: they may have died of one of its documents."""
        return replace(attempt, deaths=attempt.deaths + self.deaths) if self.deaths else attempt


@dataclass(eq=False, kw_only=True)
class Lent(Given):
    """A share of a unit, in the hand of the worker that borrowed it. attempt: the unit's.

    dropped: nobody waits for it any more. answer: what the worker gives, on Ray's side.
    """

    name: str
    lender: Given
    worker: Worker  # of the lender
    answer: Any
    dropped: bool = False

    @property
    def key(self) -> str:
        return self.name

    @property
    def unit(self) -> Given:
        return self.lender.unit


@dataclass(eq=False)
class Worker:
    """An actor. `ready` once it has loaded its model; `leaving` when its node was given notice."""

    actor: Any
    starting: Any = None  # the answer of hello(), while it loads its model
    node: str = ""
    given: dict[Any, Given] = field(default_factory=dict)  # by the answer that is awaited
    poll: Any = None
    idle_since: float = 0.0
    leaving: bool = False

    @property
    def ready(self) -> bool:
        return self.starting is None

    @property
    def bisecting(self) -> bool:
        return any(given.attempt.bisecting for given in self.given.values())

    @property
    def units(self) -> list[Given]:
        """What it has in hand without what it has borrowed."""
        return [given for given in self.given.values() if not isinstance(given, Lent)]


def shares(workers: Iterable[Worker]) -> list[tuple[Worker, Lent]]:
    """All shares that are lent, and who has them."""
    return [(worker, given) for worker in workers for given in worker.given.values() if isinstance(given, Lent)]
