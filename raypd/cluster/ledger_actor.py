"""The ledger: one actor that keeps a session's bill, and what the driver asks of it.

It is on the head node, whose death ends the run anyway; restarted from its file. A killed driver's
bill ends as last written.
"""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from raypd import storage
from raypd.billing import bill as billing
from raypd.billing import book, prices
from raypd.cluster import machines
from raypd.cluster.metrics import Metrics
from raypd.config import RunConfig
from raypd.errors import ConfigError
from raypd.run import layout, read
from raypd.run.records import Bill, UnitResult, WorkerTime
from raypd.run.unit import Unit

_ROUND_SECONDS = 3.0  # between two looks at the nodes, after each of which the bill is written
_GONE_SECONDS = 30.0  # without a report: a worker that is gone
_UNWATCHED = (
    "the GPUs' use is not known: NVML (package nvidia-ml-py, NVIDIA's driver) does not "
    "answer on a node"
)
_ANSWER_SECONDS = 30.0  # a ledger that is away that long (a restart takes one) does not answer


@dataclass(frozen=True)
class Standing:
    at: float  # unix second
    usd: float  # of this session
    usd_per_second: float
    documents: int
    busy_seconds: float  # of all workers
    startup_seconds: float  # that one took on average
    unpriced: str | None  # why a node stands on the bill with $0
    kept: bool = False  # whether the bill's file is on storage
    usd_per_document: float = 0.0  # that servers took for the tokens of committed ones
    open_usd: float = 0.0  # that they took for units in flight, a part of `usd`


@dataclass(frozen=True)
class Ask:
    """A worker that wants to begin a unit, beside so many others that it has in flight."""

    unit: Unit
    worker: str
    node: str
    beside: int


@dataclass
class PoolState:
    """What the ledger knows of the workers of a run that Ray Data streams, since its own process
    began.
    """

    asks: list[Ask]  # that are not answered
    working: set[str]  # heard of lately
    ready: set[str]  # of these, that have loaded
    answered: int  # documents of units in flight
    failed: int  # of these
    starts: int  # of processes, since one was ready
    deaths: int  # of processes that had a unit
    left_out: set[str]  # why cards are
    ended: list[tuple[Unit, UnitResult]]  # units, since the last look


class Ledger:
    """The actor.

    Its methods are quick; a thread looks at nodes and writes the file. nodes: by ids of worker
    nodes.
    """

    def __init__(
        self, config: RunConfig, output: str, session: str, began: float, nodes: machines.Nodes
    ) -> None:
        storage.configure(config.storage)
        self._output = output
        self._nodes = nodes
        cost = config.cost
        new = Bill(session, began, 0.0, budget_usd=cost.budget_usd, deadline=cost.deadline)
        self.book = book.Book(_kept(output, session) or new, config)
        self._asks: dict[Ask, bool | None] = {}  # with the driver's answer, where there is one
        # Worker -> when (monotonic), its documents in flight.
        self._heard: dict[str, tuple[float, int, int]] = {}
        self._ready: set[str] = set()  # workers
        self._left_out: dict[str, str] = {}  # worker -> why its card is
        self._ended_units: list[tuple[Unit, UnitResult]] = []
        self._starts = self._deaths = 0
        self._metrics: Metrics | None = None
        self._writing, self._ended, self._kept = threading.Lock(), threading.Event(), False
        self._look()
        # Before the first unit is assigned: a session that commits has a bill.
        self._try(self._flush)
        threading.Thread(target=self._run, name="ledger", daemon=True).start()

    def report(self, report: WorkerTime, in_flight: tuple[int, int]) -> None:
        """Takes a worker's report. in_flight: documents of its units in flight that are answered,
        and failed.
        """
        self._starts += report.worker not in self._heard
        self._heard[report.worker] = time.monotonic(), *in_flight
        self.book.take(report)
        if report.gpus and report.cards is None:
            self.book.note(_UNWATCHED)

    def standing(self) -> Standing:
        now = time.time()
        workers = list(self.book.workers.values())
        nodes = list(self.book.nodes.values())
        loaded = [
            worker.seconds for worker in workers if worker.seconds.total() > worker.seconds.startup
        ]
        live = [node for node in nodes if node.ended is None or node.ended > now]
        working = [worker for worker in workers if billing.ended(worker, now, final=False) is None]
        documents = self.book.totals()["documents"]
        tokens_usd = self.book.tokens_usd(workers, "categories")
        return Standing(
            at=now,
            usd=billing.usd(self.book.charges(now).total),
            usd_per_second=sum(node.usd_per_hour for node in live) / 3600 / self.book.runs,
            documents=documents,
            busy_seconds=sum(billing.settled(worker, now, final=False).busy for worker in workers),
            startup_seconds=sum(seconds.startup for seconds in loaded) / len(loaded)
            if loaded
            else 0.0,
            unpriced=next(
                (n.price_source for n in nodes if n.price_source.startswith(machines.UNKNOWN)), None
            ),
            kept=self._kept,
            usd_per_document=tokens_usd / documents / billing.MICRO if documents else 0.0,
            open_usd=self.book.tokens_usd(working, "open_categories") / billing.MICRO,
        )

    def begin(self, ask: Ask) -> bool | None:
        """Whether a worker may begin a unit; None: it is to ask again."""
        self._ready.add(ask.worker)
        self._starts = 0
        return None if self._asks.setdefault(ask, None) is None else self._asks.pop(ask)

    def ended(self, unit: Unit, result: UnitResult) -> None:
        """What became of a unit. Where the ledger loses it, the next pass finds it on storage."""
        self._ended_units.append((unit, result))

    def died(self) -> None:
        self._deaths += 1

    def leave_out(self, worker: str, why: str) -> None:
        """A worker does nothing but hold its card."""
        self._left_out[worker] = why

    def look(self, answers: dict[Ask, bool]) -> PoolState:
        """Takes the driver's answers to asks, and says how the workers are."""
        self._asks.update((ask, answer) for ask, answer in answers.items() if ask in self._asks)
        since = time.monotonic() - _GONE_SECONDS
        working = {
            name
            for name, (heard, *_) in self._heard.items()
            if heard > since and name not in self._left_out
        }
        asks = [
            ask for ask, answer in self._asks.items() if answer is None and ask.worker in working
        ]
        answered, failed = (sum(self._heard[name][place] for name in working) for place in (1, 2))
        ready = working & self._ready
        left_out = set(self._left_out.values())
        ended = self._ended_units
        self._ended_units = []
        return PoolState(
            asks,
            working,
            ready,
            int(answered),
            int(failed),
            self._starts,
            self._deaths,
            left_out,
            ended,
        )

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the nodes as they were last seen do
            self._look()
        self._ended.set()
        self.book.close(time.time())
        self._flush()

    def _run(self) -> None:
        while not self.book.last.final and not self._ended.wait(_ROUND_SECONDS):
            self._try(self._look)
            self._try(self._flush)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # storage or Ray is away for a moment: the next round tries again
            traceback.print_exc()
            print("raypd: the ledger goes on", file=sys.stderr, flush=True)

    def _look(self) -> None:
        nodes = self._nodes({worker.node for worker in list(self.book.workers.values())})
        runs = machines.runs()
        if runs > 1:
            self.book.note(
                "other runs used the cluster at the same time; each pays its share of that time"
            )
        for node in nodes:
            if node.price_source.startswith(machines.UNKNOWN):
                self.book.note(f"price {node.price_source}: it stands on the bill with $0")
        self.book.see(nodes, runs, time.time())

    def _flush(self) -> None:
        with self._writing:
            bill = self.book.bill(time.time())
            book.write(self._output, bill)
            self._kept = True
        try:
            if self._metrics is None:
                self._metrics = Metrics(self._output.rstrip("/").rpartition("/")[2])
            self._metrics.show(bill)
        except Exception:  # the bill does not need them
            traceback.print_exc()


def start(
    config: RunConfig, output: str, session: str, began: float, cpus: float, gpus: float
) -> Any:
    """Starts it on the cluster's head. cpus, gpus: of a worker.

    Raises ConfigError: a budget, but unknown prices.
    """
    nodes = partial(machines.look, config.cost, prices.table(), cpus, gpus)
    for node in nodes(set()) if config.cost.budget_usd is not None else ():
        kind = node.instance_type or prices.LOCAL
        if node.ended is None and node.usd_per_hour == 0 and kind not in config.cost.prices:
            raise ConfigError(  # machines at $0 would run without end
                "cost.budget_usd is set, and the price of this cluster's machines is not "
                f"known ({node.price_source}): "
                f"set cost.prices.{kind} in USD per hour"
            )
    actor = ray.remote(Ledger).options(
        name=f"{machines.LEDGER}{session}",
        namespace=machines.NAMESPACE,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,  # all that it is asked can be asked again
        resources={"node:__internal_head__": 0.001},
    )
    return actor.remote(config, output, session, began, nodes)


def _kept(output: str, session: str) -> Bill | None:
    """A session's bill as a ledger that died has left it, once storage says whether there is
    one.
    """
    while True:
        try:
            return read.record(Bill, output, layout.LEDGER, f"{session}.json")
        except OSError:  # an error here would be this actor's end
            traceback.print_exc()
            time.sleep(_ROUND_SECONDS)


def close(handle: Any) -> None:
    """Ends a session's bill; of a ledger that is gone the file stays as it is."""
    with contextlib.suppress(Exception):  # whatever Ray has come to
        ray.get(handle.close.remote(), timeout=_ANSWER_SECONDS)
    with contextlib.suppress(Exception):
        ray.kill(handle)
