"""The driver's side of a session's money and time: starts the ledger, holds the budget, works
towards the deadline.
"""

import contextlib
import time
from collections import deque
from typing import Any

import ray

from raypd.billing import book, budget
from raypd.cluster import ledger_actor
from raypd.cluster.ray_session import WorkerResources
from raypd.config import RunConfig, deadline_at
from raypd.dataset.plan import Plan
from raypd.run.lease import RunLease
from raypd.run.text import Say, counted, duration, number
from raypd.run.unit import Unit

_ASK_SECONDS = 1.0
_BILL_SECONDS = 60.0  # that the first unit waits for the bill's file, and then goes without
_PACES = 64  # units whose pace counts
_SLACK = 0.9  # of the time to the deadline that is planned with: workers also read, write and wait
_RETHINK_SECONDS = 30.0  # between two changes of how many workers are wanted


class Accounts:
    """One session's.

    Raises ConfigError at a bad deadline or a budget without prices, BudgetReached. share: what one
    worker takes. done: documents of the plan that were committed before. say: shows the user a
    line.
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
        self.deadline = None if cost.deadline is None else deadline_at(cost.deadline, began)
        self.earlier = sum(bill.usd for bill in book.bills(output))
        self._standing = ledger_actor.Standing(began, 0.0, 0.0, 0, 0.0, 0.0, None)
        if cost.budget_usd is not None and self.earlier >= cost.budget_usd:
            raise self.reached()
        if self.deadline is not None and self.deadline <= began:
            say(
                f"the deadline, {budget.clock(self.deadline)}, has passed: the run goes on "
                "without one"
            )
            self.deadline = None
        self.ledger = ledger_actor.start(config, output, lease.id, began, share.cpus, share.gpus)
        self.held = False
        # A unit of a batch API may take a day: none waits for it.
        models = (config.model, config.cascade.model)
        self._asks_server = any(
            model and model.endpoint and not model.endpoint.batch for model in models
        )
        # Unix second of a unit's begin, and its documents.
        self._in_flight: dict[str, tuple[float, int]] = {}
        # The same of ended units (monotonic), newer than the standing.
        self._unbilled: list[tuple[float, int]] = []
        # Seconds a document, from a unit's begin to its commit.
        self._paces: deque[float] = deque(maxlen=_PACES)
        self._asked, self._began = 0.0, time.monotonic()
        self._answer: Any = None
        self._thought = 0.0
        self._shown: set[str] = set()  # what the user has been shown once

    def admit(self, unit: Unit, beside: int) -> bool:
        """Whether a unit may be begun, on a worker that has `beside` others in flight; once not,
        never again.
        """
        now = time.time()
        if not self._standing.kept:
            if time.monotonic() - self._began < _BILL_SECONDS:
                return False
            line = (
                "the bill cannot be written yet: what this session costs from here on may be "
                "missing"
            )
            self._say_once("bill", line)
        candidate = (now, unit.expected)
        if self.config.cost.budget_usd is not None:
            in_flight = [started for name, started in self._in_flight.items() if name != unit.id]
            unknown = (not self._paces and beside) or (
                self._asks_server and not self._standing.documents
            )
            if unknown and in_flight:
                # Nobody knows yet how long one takes, or what its tokens cost: a second one can
                # wait.
                return False
            seconds = (
                budget.ends(now, [*in_flight, candidate], self._paces)
                - now
                + self.config.cost.reserve_seconds
            )
            if not self._holds(
                seconds, sum(count for _, count in [*in_flight, candidate, *self._unbilled])
            ):
                self.held = True
                return False
        self._in_flight[unit.id] = candidate
        return True

    def ended(self, unit: Unit, documents: int | None) -> None:
        """A unit is not in flight any more. documents: of one that was committed; None: it
        failed.
        """
        started = self._in_flight.pop(unit.id, None)
        self._unbilled.append((time.monotonic(), unit.expected))
        if documents is not None:
            self.done += documents
            if started is not None and documents:
                self._paces.append((time.time() - started[0]) / documents)

    def _spent(self) -> float:
        standing = self._standing
        return standing.usd + standing.usd_per_second * max(0.0, time.time() - standing.at)

    def _holds(self, seconds: float, documents: int = 0) -> bool:
        """Whether so many seconds more can be paid, and the tokens of so many documents."""
        standing = self._standing
        remaining = (self.config.cost.budget_usd or 0.0) - self.earlier
        tokens = max(
            0.0, budget.CAUTION * standing.usd_per_document * documents - standing.open_usd
        )
        return self._spent() + standing.usd_per_second * seconds + tokens < remaining

    def look(self, running: int) -> int | None:
        """To be called often: how many workers are wanted; None: as before. running: loaded.

        Raises BudgetReached.
        """
        self._ask()
        unpriced = self._standing.unpriced
        if unpriced is not None:
            self._say_once(
                unpriced, f"price {unpriced}: it stands on the bill with $0; set cost.prices"
            )
        if self.config.cost.budget_usd is not None and not self._holds(
            self.config.cost.reserve_seconds
        ):
            self.held = True
            raise self.reached()
        return self._towards_deadline(running)

    def _say_once(self, subject: str, line: str) -> None:
        if subject not in self._shown:
            self._shown.add(subject)
            self._say(line)

    def _ask(self) -> None:
        """Takes the ledger's answer when there is one, and asks again every second."""
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            # Restarting: the last standing goes on by the clock.
            with contextlib.suppress(ray.exceptions.RayError):
                self._standing = ray.get(self._answer)
                self._unbilled = [unit for unit in self._unbilled if unit[0] > self._asked]
            self._answer = None
        if self._answer is None and time.monotonic() - self._asked >= _ASK_SECONDS:
            self._asked = time.monotonic()
            self._answer = self.ledger.standing.remote()

    def _towards_deadline(self, running: int) -> int | None:
        standing = self._standing
        now = time.time()
        max_workers = self.config.cluster.max_workers
        if (
            self.deadline is None
            or not self._paces
            or not standing.documents
            or not standing.busy_seconds
        ):
            return None
        if self._thought and now - self._thought < _RETHINK_SECONDS:
            return None
        self._thought = now
        remaining = max(0, self.plan.documents - self.done)
        seconds = _SLACK * (self.deadline - now)
        per_worker = standing.documents / standing.busy_seconds
        workers, needed = budget.need(
            remaining, seconds, per_worker, standing.startup_seconds, running, max_workers
        )
        late = now + needed - self.deadline
        if workers > max_workers and late > 0:
            if workers < budget.NEVER:
                enough = counted(workers, "worker")
            else:
                enough = "no number of workers"
            self._say_once(
                "late",
                f"the deadline, {budget.clock(self.deadline)}, cannot be met: "
                f"{counted(remaining, 'document')} left, "
                f"{counted(max_workers, 'worker')} (cluster.max_workers), "
                f"{number(per_worker * max_workers)} documents"
                f"/s: done at about {budget.clock(now + needed)}, {duration(late)} late; "
                f"{enough} would do",
            )
        return min(max(workers, self.config.cluster.min_workers, 1), max_workers)

    def reached(self) -> budget.BudgetReached:
        cap = self.config.cost.budget_usd or 0.0
        spent = self.earlier + self._spent()
        return budget.BudgetReached(
            budget.reached(cap, spent, self.done, self.plan.documents, self.plan.exact)
        )

    def close(self) -> None:
        ledger_actor.close(self.ledger)
