"""The ledger: one actor that keeps a session's bill, and what the driver asks of it.

It stands on the head node, whose death ends the run anyway, and is restarted there for ever: after its own death it
goes on from its file. It belongs to the driver and ends with it, so that no bill runs on; the bill of a driver that
was killed ends where its file was last written, a few seconds before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from raypd import storage
from raypd.billing import bill as billing
from raypd.billing import book
from raypd.billing import prices as pricing
from raypd.billing.book import Book
from raypd.cluster import machines
from raypd.config import CostConfig, RunConfig
from raypd.errors import ConfigError
from raypd.run.records import Bill, WorkerTime

_LOOK_SECONDS = 5.0  # between two looks at the nodes
_FLUSH_SECONDS = 3.0
_ANSWER_SECONDS = 30.0  # a ledger that is away that long (a restart takes one) does not answer


@dataclass
class LedgerSpec:
    """What a session's ledger is made with. cpus, gpus: of one worker."""

    config: RunConfig
    output: str
    session: str
    began: float
    cpus: float
    gpus: float
    prices: pricing.Table = field(default_factory=dict)

    @property
    def cost(self) -> CostConfig:
        return self.config.cost


@dataclass(frozen=True)
class Standing:
    """Where a session stands, at a unix second.

    usd: of this session. busy_seconds: of all workers; startup_seconds: that one took on average; unpriced: why a node
    stands on the bill with $0.
    """

    at: float
    usd: float
    usd_per_second: float
    documents: int
    busy_seconds: float
    startup_seconds: float
    unpriced: str | None


class Ledger:
    """The actor. Its methods are quick; a thread looks at the nodes and writes the file."""

    def __init__(self, order: LedgerSpec) -> None:
        storage.configure(order.config.storage)
        self.order = order
        cost = order.cost
        settings: dict[str, Any] = {
            "budget_usd": cost.budget_usd,
            "deadline": cost.deadline,
            "watts_per_gpu": cost.watts_per_gpu,
            "co2e_grams_per_kwh": cost.co2e_grams_per_kwh,
        }
        kept = book.read(order.output, order.session)
        self.book = book.from_bill(kept, **settings) if kept else Book(order.session, order.began, **settings)
        self._metrics: Any = None
        self._writing = threading.Lock()
        self._durable = {worker.worker: worker.sequence for worker in self.book.workers.values()}
        self._look()
        threading.Thread(target=self._run, name="ledger", daemon=True).start()

    def report(self, report: WorkerTime) -> int:
        """Takes a worker's report; the number of this worker's last one that is on storage (-1: none)."""
        self.book.take(report)
        return self._durable.get(report.worker, -1)

    def standing(self) -> Standing:
        now = time.time()
        workers, nodes = list(self.book.workers.values()), list(self.book.nodes.values())
        loaded = [own.seconds for own in workers if own.seconds.total() > own.seconds.startup]
        unpriced = [node.price_source for node in nodes if node.price_source.startswith(machines.UNKNOWN)]
        return Standing(
            at=now,
            usd=billing.usd(self.book.charges(now).total),
            usd_per_second=self._rate(now),
            documents=self.book.totals()["documents"],
            busy_seconds=sum(billing.settled(own, now, final=False).busy for own in workers),
            startup_seconds=sum(own.startup for own in loaded) / len(loaded) if loaded else 0.0,
            unpriced=unpriced[0] if unpriced else None,
        )

    def close(self) -> Bill:
        """Ends the bill, now, and writes it; it as it stands."""
        with contextlib.suppress(Exception):  # the nodes as they were last seen do
            self._look()
        self.book.close(time.time())
        return self._flush()

    # -------------------------------------------------------------------------------------------------------- inside

    def _rate(self, now: float) -> float:
        """USD a second of the nodes that are there now."""
        runs = self.book.shares[-1][1] if self.book.shares else 1
        live = [node for node in list(self.book.nodes.values()) if node.ended is None or node.ended > now]
        return sum(node.usd_per_hour for node in live) / 3600 / runs

    def _run(self) -> None:
        looked = flushed = time.monotonic()
        while not self.book.final:
            time.sleep(0.5)
            now = time.monotonic()
            try:
                if now - looked >= _LOOK_SECONDS:
                    looked = now
                    self._look()
                if now - flushed >= _FLUSH_SECONDS and not self.book.final:
                    flushed = now
                    self._flush()
            except Exception:  # storage or Ray is away for a moment: the next round tries again
                traceback.print_exc()
                print("raypd: the ledger goes on", file=sys.stderr, flush=True)

    def _look(self) -> None:
        order = self.order
        worked = {worker.node for worker in list(self.book.workers.values())}
        found = machines.look(order.cost, order.prices, order.cpus, order.gpus, worked)
        runs = machines.runs()
        if runs > 1:
            self.book.note("other runs used the cluster at the same time; each pays its share of that time")
        for node in found:
            if node.price_source.startswith(machines.UNKNOWN):
                self.book.note(f"price {node.price_source}: it stands on the bill with $0")
        self.book.see(found, runs, time.time())

    def _flush(self) -> Bill:
        with self._writing:
            bill = self.book.bill(time.time())
            book.write(self.order.output, bill)
            self._durable = {own.worker: own.sequence for own in bill.workers}
        self._show(bill)
        return bill

    def _show(self, bill: Bill) -> None:
        """The live metrics: a view of the bill."""
        from raypd.cluster.metrics import Metrics

        try:
            if self._metrics is None:
                self._metrics = Metrics(self.order.output.rstrip("/").rpartition("/")[2])
            self._metrics.show(bill)
        except Exception:
            traceback.print_exc()


# ---------------------------------------------------------------------------------------------------------- the driver


def start(config: RunConfig, output: str, session: str, began: float, cpus: float, gpus: float) -> Any:
    """Starts the session's ledger on the head of the connected cluster; its handle.

    Raises ConfigError where a budget is to be held on machines whose price nobody knows.
    """
    import ray

    order = LedgerSpec(config, output, session, began, cpus, gpus, pricing.table())
    if config.cost.budget_usd is not None:
        _check_prices(order)
    actor = ray.remote(Ledger).options(
        name=f"{machines.LEDGER}{session}",
        namespace=machines.NAMESPACE,
        num_cpus=0,
        max_restarts=-1,
        resources={"node:__internal_head__": 0.001},
    )
    return actor.remote(order)


def _check_prices(order: LedgerSpec) -> None:
    """A budget needs prices: machines at $0 would run for ever."""
    for node in machines.look(order.cost, order.prices, order.cpus, order.gpus, set()):
        kind = node.instance_type or pricing.LOCAL
        if node.ended is None and node.usd_per_hour == 0 and kind not in order.cost.prices:
            raise ConfigError(
                f"cost.budget_usd is set, and the price of this cluster's machines is not known ({node.price_source}): "
                f"set cost.prices.{kind} in USD per hour"
            )


def ask(call: Any, seconds: float = _ANSWER_SECONDS) -> Any:
    """A method's answer; tries again while the ledger is being restarted. Raises ray.exceptions.RayError in the end."""
    import ray

    end = time.monotonic() + seconds
    while True:
        try:
            return ray.get(call.remote(), timeout=max(0.1, end - time.monotonic()))
        except ray.exceptions.RayActorError:
            if time.monotonic() > end:
                raise
            time.sleep(0.3)


def close(handle: Any, output: str, session: str) -> Bill | None:
    """Ends a session's bill; the bill, or what its file holds when the ledger is gone."""
    import ray

    with contextlib.suppress(Exception):  # whatever Ray has come to, the file stays
        bill: Bill = ask(handle.close)
        ray.kill(handle)
        return bill
    with contextlib.suppress(OSError, ValueError):
        return book.read(output, session)
    return None
