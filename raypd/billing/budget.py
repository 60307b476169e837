"""The arithmetic of a budget and a deadline: whether one more unit may be begun, and how many workers it takes.

No Ray, no clock. The budget has two lines. A unit is begun only where the bill, at the end of all that is in flight and
of this unit too, stays below the budget less a reserve. Where that guess was wrong (the first units, whose pace nobody
knows; a unit of long documents; nodes that came later), the run is stopped when the reserve is reached; what is in
flight is lost, and done again by the session that goes on.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from raypd.errors import ConfigError, RunError
from raypd.run.text import count, usd

_KEPT = 64  # units whose pace counts
_CAUTION = 1.25  # a unit may take this much longer than the slowest of those
NEVER = 1_000_000  # workers: no number is enough
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


class BudgetReached(RunError):
    """The run has ended because more would cost more than cost.budget_usd."""

    exit_code = 3


@dataclass
class Pace:
    """Seconds a document, from the begin of its unit to the commit, of the last units that ended."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def ended(self, seconds: float, documents: int) -> None:
        if documents > 0:
            self.seconds.append(seconds / documents)

    def cautious(self, documents: int) -> float:
        """Seconds that a unit may take, once one has ended."""
        return _CAUTION * max(self.seconds) * documents

    def mean(self) -> float | None:
        return statistics.fmean(self.seconds) if self.seconds else None


@dataclass
class InFlight:
    """A unit that was begun (unix seconds) and has not ended, and its documents."""

    began: float
    documents: int


def ends(now: float, units: Iterable[InFlight], pace: Pace) -> float:
    """When all units in flight are done, at the latest that is to be expected; now where nobody knows."""
    if pace.mean() is None:
        return now
    return max([now, *(unit.began + pace.cautious(unit.documents) for unit in units)])


def reached(budget: float, spent: float, done: int, documents: int, exact: bool = True) -> str:
    """The message at the end of the money. spent: USD of all sessions; done: documents of the run's."""
    about = "" if exact else "about "
    now = (
        f"cost.budget_usd {usd(budget)} is reached: {count(done)} of {about}{count(documents)} documents are done for "
    )
    now += usd(spent)
    if done <= 0:
        return f"{now}; the start of the workers alone may take more than that: raise cost.budget_usd"
    rest = spent / done * max(0, documents - done)
    wanted = math.ceil((spent + 1.15 * rest) * 100) / 100
    return (
        f"{now} ({usd(1000 * spent / done)} per 1,000). The rest takes about {usd(rest)}: the same command with "
        f"cost.budget_usd={wanted:.2f} goes on"
    )


def parse_deadline(given: str, now: float) -> float:
    """Unix seconds of a time (2026-11-30T18:00, local where it names no zone) or of a duration from now (8h, 1h30m).

    Raises ConfigError.
    """
    given = given.strip()
    match = _DURATION.fullmatch(given)
    if match and given:
        parts = [float(part or 0) for part in match.groups()]
        return now + sum(part * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=True))
    try:
        return datetime.fromisoformat(given).timestamp()
    except ValueError:
        raise ConfigError(
            f"cost.deadline {given!r}: is neither a time such as 2026-11-30T18:00 nor a duration such as 8h or 1h30m"
        ) from None


@dataclass(frozen=True)
class Need:
    """What it takes to be done in time. late: seconds after the deadline with the most workers, 0 when in time."""

    workers: int
    done_at: float
    late: float


def need(
    documents: int, seconds_left: float, per_worker: float, startup: float, running: int, most: int, now: float
) -> Need:
    """Workers for `documents` in `seconds_left`.

    per_worker: documents a second of one; startup: seconds that a new one loads, which those that run have behind
    them; most: cluster.max_workers.
    """

    def seconds(workers: int) -> float:
        """Until all is done with so many."""
        new = max(0, workers - running)
        alone = documents / (per_worker * running) if running else math.inf
        return min(alone, (documents + per_worker * new * startup) / (per_worker * workers))

    wanted = 1
    while wanted < NEVER and seconds(wanted) > seconds_left:
        if seconds_left <= (startup if wanted > running else 0):
            wanted = NEVER
            break
        wanted = max(wanted + 1, math.ceil(wanted * 1.02))
    done_at = now + seconds(min(wanted, most))
    return Need(wanted, done_at, max(0.0, done_at - now - seconds_left))


def clock(seconds: float) -> str:
    """A time of day, with the date where that is another day."""
    then = datetime.fromtimestamp(seconds)
    return then.strftime("%H:%M" if then.date() == datetime.now().date() else "%Y-%m-%d %H:%M")
