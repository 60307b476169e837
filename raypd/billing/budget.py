"""The arithmetic of a budget and a deadline.

A unit begins only if the bill stays below the budget minus a reserve once this unit and all units
in flight have ended. That estimate can be wrong: the pace may be unknown, documents may be long,
or nodes may be late. In that case the run stops when it reaches the reserve. Units in flight are
lost, and the session that resumes the run processes them again.
"""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime

from raypd.errors import RunError
from raypd.text import count, counted, usd

# A unit may take this many times as long as the slowest of the recent ones, and its documents may
# have this many times as many tokens.
CAUTION = 1.25
NEVER = 1_000_000  # a number of workers that means "no number is enough"
# The budget reserves this many seconds, at the current price of all nodes, for the end of the run.
RESERVE_SECONDS = 10.0
# A message suggests this many times the estimate for the rest as an addition to the budget.
_BUDGET_MARGIN = 1.15


class BudgetReached(RunError):
    """The run has ended because going further would cost more than cost.budget_usd."""

    exit_code = 3
    how = "budget"


def ends(now: float, units: Iterable[tuple[float, int]], paces: Sequence[float]) -> float:
    """Estimate the latest time at which units in flight will have ended.

    Args:
        now: The time, in unix seconds.
        units: (begin in unix seconds, documents) of each unit in flight.
        paces: Seconds per document of the units that ended most recently.

    Returns:
        A unix second; `now` if there is no pace.
    """
    if not paces:
        return now
    slowest = CAUTION * max(paces)
    return max([now, *(began + slowest * documents for began, documents in units)])


def reached(budget: float, spent: float, done: int, documents: int, exact: bool = True) -> str:
    """Return a message that the budget is reached, with the budget that the rest would need.

    Args:
        budget: cost.budget_usd.
        spent: USD spent in all sessions.
        done: Documents that are committed.
        documents: Documents of the input.
        exact: Whether `documents` was counted rather than estimated.
    """
    prefix = "" if exact else "about "
    message = (
        f"cost.budget_usd {usd(budget)} is reached: {count(done)} of {prefix}"
        f"{counted(documents, 'document')} done for {usd(spent)}"
    )
    if done <= 0:
        return (
            f"{message}. Starting the workers alone may cost more than the budget: raise "
            "cost.budget_usd"
        )
    remaining_usd = spent / done * max(0, documents - done)
    # A run ends before its budget is spent, so what the rest needs is added to the whole budget.
    needed_usd = max(spent, budget) + _BUDGET_MARGIN * remaining_usd
    next_budget = math.ceil(needed_usd * 100) / 100
    return (
        f"{message} ({usd(1000 * spent / done)} per 1,000). The rest will cost about "
        f"{usd(remaining_usd)}. To resume, run the same command with "
        f"cost.budget_usd={next_budget:.2f}"
    )


def need(
    documents: int,
    seconds_left: float,
    per_worker: float,
    startup: float,
    running: int,
    max_workers: int,
) -> tuple[int, float]:
    """Return how many workers are needed to meet a deadline.

    Args:
        documents: Documents that remain.
        seconds_left: Seconds until the deadline.
        per_worker: Documents per second of a worker.
        startup: Seconds that a new worker takes to load its model.
        running: Workers that have loaded theirs.
        max_workers: The maximum number of workers.

    Returns:
        The number of workers, or `NEVER` if no number is enough, and the seconds that they need, or
        that `max_workers` need if more would be required.
    """

    def seconds(workers: int) -> float:
        new_workers = max(0, workers - running)
        together = (documents + per_worker * new_workers * startup) / (per_worker * workers)
        if not running:
            return together
        # The workers that are running may be done before a new one has started.
        return min(documents / (per_worker * running), together)

    needed = 1
    while needed < NEVER and seconds(needed) > seconds_left:
        latest_start = startup if needed > running else 0
        if seconds_left <= latest_start:
            needed = NEVER
        else:
            needed = max(needed + 1, math.ceil(needed * 1.02))
    return needed, seconds(min(needed, max_workers))


def clock(seconds: float) -> str:
    """Return a time of day, with the date unless it is today."""
    time = datetime.fromtimestamp(seconds)
    if time.date() == datetime.now().date():
        return time.strftime("%H:%M")
    return time.strftime("%Y-%m-%d %H:%M")
