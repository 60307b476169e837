"""The driver's side of the bill: start the ledger, keep to the budget and meet the deadline."""

import contextlib
import time
from collections import deque
from typing import Any

import ray

import raypd.cluster.ledger_actor as ledger_actor
from raypd.billing import book, budget
from raypd.cluster.ray_session import WorkerResources
from raypd.config import RunConfig, deadline_at
from raypd.dataset import Plan
from raypd.run import RunLease, Unit
from raypd.text import Say, counted, duration, number

_ASK_SECONDS = 1.0  # between two requests to the ledger
# How long the first unit waits for the bill's file before it begins without it.
_BILL_SECONDS = 60.0
_MAX_PACES = 64  # units whose pace is used
# Share of the time to the deadline that is planned with, because workers also read, write and wait.
_PLANNED_SHARE = 0.9
_RETHINK_SECONDS = 30.0  # between two changes of the number of workers


class Accounts:
    """The money and the time that one session may spend.

    Args:
        config: The configuration of the run.
        output: The folder of the run.
        lease: The lease of the session.
        share: What a worker takes of the cluster.
        plan: The plan of the run.
        done: Documents of the plan that were committed before.
        say: Shows a line to the user.

    Raises:
        ConfigError: If the deadline is invalid, or if there is a budget and a price is unknown.
        BudgetReached: If the budget is spent.
    """

    def __init__(
        self,
        config: RunConfig,
        output: str,
        lease: RunLease,
        share: WorkerResources,
        plan: Plan,
        done: int,
        say: Say,
    ) -> None:
        self.config = config
        self.plan = plan
        self.done = done
        self._say = say
        cost = config.cost
        began = lease.began
        self.deadline: float | None = None  # unix second
        if cost.deadline is not None:
            self.deadline = deadline_at(cost.deadline, began)
        self.earlier = sum(bill.usd for bill in book.bills(output))  # USD of earlier sessions
        self._standing = ledger_actor.Standing(began, 0.0, 0.0, 0, 0.0, 0.0, None)
        if cost.budget_usd is not None and self.earlier >= cost.budget_usd:
            raise self.reached()
        if self.deadline is not None and self.deadline <= began:
            say(
                f"the deadline, {budget.clock(self.deadline)}, has passed; the run continues "
                "without one"
            )
            self.deadline = None
        self.ledger = ledger_actor.start(config, output, lease.id, began, share.cpus, share.gpus)
        self.held = False  # whether the budget allows no more units
        # A unit of a batch API may take a day, so units do not wait for the first of them.
        self._asks_server = any(
            model and model.endpoint and not model.endpoint.batch
            for model in (config.model, config.cascade.model)
        )
        # Units in flight: (begin in unix seconds, documents).
        self._in_flight: dict[str, tuple[float, int]] = {}
        # Units that ended after the last standing: (end on the monotonic clock, documents).
        self._unbilled: list[tuple[float, int]] = []
        # Seconds per document from the beginning of a unit to its commit.
        self._paces: deque[float] = deque(maxlen=_MAX_PACES)
        self._asked = 0.0
        self._began = time.monotonic()
        self._answer: Any = None  # reference to the ledger's next standing
        self._thought = 0.0  # when the number of workers was last computed
        self._shown: set[str] = set()  # subjects of lines that are shown once

    def admit(self, unit: Unit, beside: int) -> bool:
        """Return whether a unit may begin. Once the budget forbids it, no later unit may.

        Args:
            unit: The unit.
            beside: The number of units in flight on the same worker.
        """
        if not self._standing.stored:
            if time.monotonic() - self._began < _BILL_SECONDS:
                return False
            self._say_once(
                "bill",
                "the bill cannot be written yet; what this session costs from here on may be "
                "missing",
            )
        candidate = (time.time(), unit.expected)
        if self.config.cost.budget_usd is not None and not self._fits(unit, candidate, beside):
            return False
        self._in_flight[unit.id] = candidate
        return True

    def _fits(self, unit: Unit, candidate: tuple[float, int], beside: int) -> bool:
        """Return whether the budget allows a unit to begin now."""
        in_flight = [started for name, started in self._in_flight.items() if name != unit.id]
        pace_unknown = not self._paces and beside
        price_unknown = self._asks_server and not self._standing.documents
        if in_flight and (pace_unknown or price_unknown):
            # Wait for a first unit to show how long one takes and what its tokens cost.
            return False
        now = candidate[0]
        seconds = budget.ends(now, [*in_flight, candidate], self._paces) - now
        documents = sum(count for _, count in [*in_flight, candidate, *self._unbilled])
        if self._affords(seconds + budget.RESERVE_SECONDS, documents):
            return True
        self.held = True
        return False

    def ended(self, unit: Unit, documents: int | None) -> None:
        """Note that a unit is no longer in flight.

        Args:
            unit: The unit.
            documents: Its documents if it was committed; None if it failed.
        """
        started = self._in_flight.pop(unit.id, None)
        self._unbilled.append((time.monotonic(), unit.expected))
        if documents is None:
            return
        self.done += documents
        if started is not None and documents:
            self._paces.append((time.time() - started[0]) / documents)

    def _spent(self) -> float:
        """Estimate the USD that this session has spent until now."""
        standing = self._standing
        return standing.usd + standing.usd_per_second * max(0.0, time.time() - standing.as_of)

    def _affords(self, seconds: float, documents: int = 0) -> bool:
        """Return whether the budget pays for more time, and for the tokens of more documents."""
        standing = self._standing
        remaining = (self.config.cost.budget_usd or 0.0) - self.earlier
        tokens_usd = budget.CAUTION * standing.usd_per_document * documents
        # The money for units in flight is part of what is already spent.
        unpaid_usd = max(0.0, tokens_usd - standing.open_usd)
        return self._spent() + standing.usd_per_second * seconds + unpaid_usd < remaining

    def look(self, running: int) -> int | None:
        """Check the budget and the deadline. The driver calls this often.

        Args:
            running: Workers that have loaded their model.

        Returns:
            How many workers to have; None if that does not change.

        Raises:
            BudgetReached: If only the reserve of the budget is left.
        """
        self._ask()
        unpriced = self._standing.unpriced
        if unpriced is not None:
            self._say_once(
                unpriced, f"price {unpriced}: it appears on the bill with $0; set cost.prices"
            )
        cost = self.config.cost
        if cost.budget_usd is not None and not self._affords(budget.RESERVE_SECONDS):
            self.held = True
            raise self.reached()
        return self._workers_for_deadline(running)

    def _say_once(self, subject: str, line: str) -> None:
        if subject not in self._shown:
            self._shown.add(subject)
            self._say(line)

    def _ask(self) -> None:
        """Take the ledger's standing if it has arrived, and ask again every second."""
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            # While the ledger restarts, the last standing is extrapolated.
            with contextlib.suppress(ray.exceptions.RayError):
                self._standing = ray.get(self._answer)
                self._unbilled = [unit for unit in self._unbilled if unit[0] > self._asked]
            self._answer = None
        if self._answer is None and time.monotonic() - self._asked >= _ASK_SECONDS:
            self._asked = time.monotonic()
            self._answer = self.ledger.standing.remote()

    def _workers_for_deadline(self, running: int) -> int | None:
        """Return how many workers the deadline requires, or None if that does not change now."""
        standing = self._standing
        if self.deadline is None or not self._paces:
            return None
        if not standing.documents or not standing.busy_seconds:
            return None
        now = time.time()
        if self._thought and now - self._thought < _RETHINK_SECONDS:
            return None
        self._thought = now
        cluster = self.config.cluster
        remaining = max(0, self.plan.documents - self.done)
        per_worker = standing.documents / standing.busy_seconds
        workers, seconds = budget.need(
            documents=remaining,
            seconds_left=_PLANNED_SHARE * (self.deadline - now),
            per_worker=per_worker,
            startup=standing.startup_seconds,
            running=running,
            max_workers=cluster.max_workers,
        )
        late = now + seconds - self.deadline
        if workers > cluster.max_workers and late > 0:
            enough = "no number of workers"
            if workers < budget.NEVER:
                enough = counted(workers, "worker")
            self._say_once(
                "late",
                f"the deadline, {budget.clock(self.deadline)}, cannot be met: "
                f"{counted(remaining, 'document')} left, "
                f"{counted(cluster.max_workers, 'worker')} (cluster.max_workers), "
                f"{number(per_worker * cluster.max_workers)} documents/s: done at about "
                f"{budget.clock(now + seconds)}, {duration(late)} late; {enough} would be enough",
            )
        return min(max(workers, cluster.min_workers, 1), cluster.max_workers)

    def reached(self) -> budget.BudgetReached:
        """Return the error that says that the budget is reached."""
        message = budget.reached(
            budget=self.config.cost.budget_usd or 0.0,
            spent=self.earlier + self._spent(),
            done=self.done,
            documents=self.plan.documents,
            exact=self.plan.exact,
        )
        return budget.BudgetReached(message)

    def close(self) -> None:
        """Close the bill and end the ledger."""
        ledger_actor.close(self.ledger)
