"""The arithmetic of a budget and a deadline.

A unit is begun only where the bill, at the end of all in flight and of it too, stays below the
budget less a reserve. Where that guess was wrong (unknown pace, long documents, late nodes), the
run is stopped at the reserve; what is in flight is lost, and done again by the session that goes
on.
"""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime

from raypd.errors import RunError
from raypd.run.text import count, counted, usd

# A unit may take this much longer than the slowest of the last ones, and its documents more tokens.
CAUTION = 1.25
NEVER = 1_000_000  # workers: no number is enough


class BudgetReached(RunError):
    """The run has ended because more would cost more than cost.budget_usd."""

    exit_code = 3
    how = "budget"


def ends(now: float, units: Iterable[tuple[float, int]], paces: Sequence[float]) -> float:
    """The unix second at which units are done, at the latest to expect; now where nobody knows.
    units: in flight, (unix second of the begin, documents). paces: seconds a document of the last
    ones that ended.
    """
    if not paces:
        return now
    return max([now, *(began + CAUTION * max(paces) * documents for began, documents in units)])


def reached(budget: float, spent: float, done: int, documents: int, exact: bool = True) -> str:
    """The message at the end of the money. exact: `documents` was counted, not estimated."""
    of = ("" if exact else "about ") + counted(documents, "document")
    now = f"cost.budget_usd {usd(budget)} is reached: {count(done)} of {of} done for {usd(spent)}"
    if done <= 0:
        return (
            f"{now}; the start of the workers alone may take more than that: raise cost.budget_usd"
        )
    remaining = spent / done * max(0, documents - done)
    budget_needed = math.ceil((spent + 1.15 * remaining) * 100) / 100
    return (
        f"{now} ({usd(1000 * spent / done)} per 1,000). The rest takes about "
        f"{usd(remaining)}: the same command with "
        f"cost.budget_usd={budget_needed:.2f} goes on"
    )


def need(
    documents: int,
    seconds_left: float,
    per_worker: float,
    startup: float,
    running: int,
    max_workers: int,
) -> tuple[int, float]:
    """Workers to be done in time (`NEVER`: no number is enough), and seconds until all is done by
    them, or the most. per_worker: documents a second. startup: seconds that a new worker loads, and
    one of `running` does not.
    """

    def seconds(workers: int) -> float:
        new = max(0, workers - running)
        alone = documents / (per_worker * running) if running else math.inf
        return min(alone, (documents + per_worker * new * startup) / (per_worker * workers))

    needed = 1
    while needed < NEVER and seconds(needed) > seconds_left:
        in_time = seconds_left > (startup if needed > running else 0)
        needed = max(needed + 1, math.ceil(needed * 1.02)) if in_time else NEVER
    return needed, seconds(min(needed, max_workers))


def clock(seconds: float) -> str:
    """A time of day, with the date where that is another day."""
    then = datetime.fromtimestamp(seconds)
    return then.strftime("%H:%M" if then.date() == datetime.now().date() else "%Y-%m-%d %H:%M")
