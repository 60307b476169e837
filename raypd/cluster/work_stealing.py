"""The tail of a run: a worker that has run dry takes over documents of a unit that another one has in hand.

The pool asks the worker with most left to lend (`lend`), gives the shares that it cuts off to those that have nothing
to do (`borrow`), and passes what they answer to the lender (`returned`), which commits the unit as a whole: ids, plan
and output are those of a run without lending. A share can be lent on. Where a borrower is lost, fails or hands back,
the lender takes the share back (`take_back`); where the lender is, its shares are dropped and its unit is tried again.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raypd.cluster.in_hand import Given, Lent, Worker, shares
from raypd.run.records import UnitResult

if TYPE_CHECKING:
    from raypd.cluster.shares import Groups

# Seconds that a worker must have left for each that shares them. To take documents over costs about one: the unit is
# read and its prompts are made once more, and the engine is not full at the start and the end of a share.
WORTH_SECONDS = 4.0


@dataclass
class _Ask:
    worker: Worker
    given: Given
    names: list[str]


class Lending:
    """workers: the pool's list, which it goes on changing."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._asks: dict[Any, _Ask] = {}
        self._returns: dict[Any, Lent] = {}
        self._numbers = itertools.count(1)

    def offer(self, like_others: float) -> None:
        """Asks those with most left for as many shares as workers have nothing to do.

        like_others: seconds that units took lately.
        """
        free = len(self.free()) - sum(len(ask.names) for ask in self._asks.values())
        if free <= 0:
            return
        lenders = [(worker, given) for worker in self._workers for given in worker.given.values()]
        lenders = [(worker, given) for worker, given in lenders if _can_lend(worker, given)]
        seconds = [given.seconds_left(like_others) for _, given in lenders]
        heads = [1] * len(lenders)
        for _ in range(free if lenders else 0):
            most = max(range(len(lenders)), key=lambda i: seconds[i] / heads[i])
            if seconds[most] / heads[most] <= WORTH_SECONDS:
                break
            heads[most] += 1
        for (worker, given), count in zip(lenders, heads, strict=True):
            if count > 1:
                names = [f"{given.unit.key}/{next(self._numbers)}" for _ in range(count - 1)]
                given.asked = True
                self._asks[worker.actor.lend.remote(given.key, names)] = _Ask(worker, given, names)

    def free(self) -> list[Worker]:
        """Workers with nothing to do: without anything in hand, or only waiting for what they have lent."""
        waiting = {id(lent.lender) for _, lent in shares(self._workers)}
        return [
            worker
            for worker in self._workers
            if worker.ready
            and not worker.leaving
            and all(
                id(given) in waiting and given.heard is not None and not given.progress.left
                for given in worker.given.values()
            )
        ]

    def of(self, given: Given) -> list[tuple[Worker, Lent]]:
        """The shares of a unit or a share that others have, and who has them."""
        return [(worker, lent) for worker, lent in shares(self._workers) if lent.lender is given]

    # -------------------------------------------------------------------------------------------------------- answers

    @property
    def asking(self) -> bool:
        """Whether there may be shares for workers with nothing to do in a moment."""
        return bool(self._asks)

    def awaited(self) -> list[Any]:
        """Answers that are to be waited for, beside those of the workers' units and shares."""
        return [*self._asks, *self._returns]

    def take(self, ref: Any, closing: bool) -> None:
        """An answer is there. closing: nothing new is begun."""
        import ray

        if ref in self._asks:
            ask = self._asks.pop(ref)
            ask.given.asked = False
            try:
                self._lend(ask, ray.get(ref), closing)
            except ray.exceptions.RayActorError:
                return  # it has died, and the unit that it had says so, too
            return
        lent = self._returns.pop(ref)
        try:
            ray.get(ref)
        except ray.exceptions.RayActorError:
            return
        except ray.exceptions.RayError:  # the borrower's node is gone, and the answer with it
            self._take_back(lent)

    def _lend(self, ask: _Ask, found: dict[str, Groups], closing: bool) -> None:
        if ask.given not in ask.worker.given.values():
            return  # it ended meanwhile, with all that it wanted to lend
        ask.given.heard = None  # it has less left now
        ask.given.empty = not found
        free = self.free()
        for name, groups in found.items():
            if closing or not free:
                ask.given.empty = False
                ask.worker.actor.take_back.remote(ask.given.key, name)
            else:
                self._borrow(free.pop(), ask, name, groups)

    def _borrow(self, worker: Worker, ask: _Ask, name: str, groups: Groups) -> None:
        attempt = ask.given.attempt
        said, answer = worker.actor.borrow.options(num_returns=2).remote(attempt.unit, name, groups)
        worker.given[said] = Lent(attempt=attempt, name=name, lender=ask.given, worker=ask.worker, answer=answer)

    def answered(self, lent: Lent, result: UnitResult) -> None:
        """A borrower's word on its share."""
        self.drop(lent)  # of what it has lent on nothing is out any more, unless it failed
        if lent.dropped:
            return
        if result.done:
            ref = lent.worker.actor.returned.remote(lent.lender.key, lent.name, lent.answer)
            self._returns[ref] = lent
            return
        if result.error is not None:
            lent.unit.alone = True  # who has the unit has read it, which others cannot, or something is wrong with it
        self._take_back(lent)

    # --------------------------------------------------------------------------------------------------------- faults

    def lost(self, lent: Lent, blame: bool) -> None:
        """The borrower is gone. blame: its process died, perhaps of a document of the share."""
        self.drop(lent)
        if blame:
            # The lender does the rest by itself. Should it die of it, too, the unit is tried with care.
            lent.unit.alone = True
            lent.unit.deaths += 1
        self._take_back(lent)

    def _take_back(self, lent: Lent) -> None:
        if not lent.dropped:
            lent.lender.empty = False
            lent.worker.actor.take_back.remote(lent.lender.key, lent.name)

    def drop(self, given: Given) -> None:
        """What it has lent is for nothing: those who have it stop."""
        for _, lent in self.of(given):
            if not lent.dropped:
                lent.dropped = True
                self.drop(lent)
        for lent in self._returns.values():
            lent.dropped = lent.dropped or lent.lender is given
        self.remind()

    def remind(self) -> None:
        """Those who have a share that nobody waits for are told, until they stop."""
        for worker, lent in shares(self._workers):
            if lent.dropped and not lent.asked_back:
                lent.wanted = time.monotonic()
                worker.actor.hand_back.remote(lent.name, False)


def _can_lend(worker: Worker, given: Given) -> bool:
    if worker.leaving or given.asked or given.asked_back or given.attempt.bisecting:
        return False
    if isinstance(given, Lent) and given.dropped:
        return False
    return not given.empty and not given.unit.alone and given.heard is not None and given.progress.begun
