"""The ledger: an actor that keeps the bill of a session or of a pipeline.

It runs on the head node, whose death ends the run anyway. If only the actor dies, Ray restarts it
and it resumes from the bill's file. If the driver is killed, the bill stays as it was last written.
"""

import contextlib
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

import raypd.cluster.machines as machines
from raypd import storage
from raypd.billing import Bill, Receipt, WorkerTime, bill as billing, book, prices
from raypd.cluster.metrics import Metrics
from raypd.config import RunConfig
from raypd.errors import ConfigError
from raypd.run import layout, read

_ROUND_SECONDS = 3.0  # between two rounds of checking the nodes and writing the bill
_ANSWER_SECONDS = 30.0  # a ledger that does not answer for this long (a restart takes less) is lost
_NO_NVML = (
    "GPU use is unknown: NVML (package nvidia-ml-py, NVIDIA's driver) does not answer on a node"
)
# An actor on the head node that takes no CPU.
_ON_HEAD: dict[str, Any] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}


@dataclass(frozen=True)
class Standing:
    """The state of a session's bill, from which the driver decides whether to begin more units."""

    as_of: float  # unix second
    usd: float  # of this session
    usd_per_second: float
    documents: int
    busy_seconds: float  # of all workers
    startup_seconds: float  # mean over workers
    unpriced: str | None  # why a node appears on the bill with $0
    stored: bool = False  # whether the bill's file is on storage
    usd_per_document: float = 0.0  # what servers charged for the tokens of a committed document
    open_usd: float = 0.0  # what they charged for units in flight; it is part of `usd`


class PipelineLedger:
    """The ledger of a pipeline, which pays for its own workers' seconds; it writes no file.

    Args:
        config: The configuration of the pipeline.
        nodes: Returns the nodes of the cluster.
    """

    def __init__(self, config: RunConfig, nodes: machines.Nodes) -> None:
        self._nodes = nodes
        models = book.models_of(config.model, config.cascade)
        self.book = book.Book(Bill("", time.time(), 0.0), models, workers_only=True)

    def report(self, report: WorkerTime) -> Receipt:
        """Take a worker's report."""
        self.book.take(report)
        return self.book.receipt(report.worker)

    def bill(self) -> book.WorkersBill:
        """Return the current bill."""
        now = time.time()
        self.book.see(self._nodes(), 1, now)
        return self.book.workers_bill(now)


class Ledger:
    """The ledger of a run's session.

    Its methods return quickly. A thread checks the nodes and writes the bill's file.

    Args:
        config: The configuration of the run.
        output: The folder of the run.
        session: The id of the session.
        began: When the session began, in unix seconds.
        nodes: Returns the nodes of the cluster.
    """

    def __init__(
        self, config: RunConfig, output: str, session: str, began: float, nodes: machines.Nodes
    ) -> None:
        storage.configure(config.storage)
        self._output = output
        self._nodes = nodes
        cost = config.cost
        new_bill = Bill(session, began, 0.0, budget_usd=cost.budget_usd, deadline=cost.deadline)
        models = book.models_of(config.model, config.cascade)
        self.book = book.Book(_stored_bill(output, session) or new_bill, models)
        self._metrics: Metrics | None = None
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._stored = False
        self._look()
        # The bill is written before the first unit is assigned, so that every session that commits
        # units has one.
        self._try(self._flush)
        threading.Thread(target=self._run, name="ledger", daemon=True).start()

    def report(self, report: WorkerTime) -> Receipt:
        """Take a worker's report."""
        self.book.take(report)
        if report.gpus and report.gpu_use is None:
            self.book.note(_NO_NVML)
        return self.book.receipt(report.worker)

    def standing(self) -> Standing:
        """Return the current state of the bill."""
        now = time.time()
        workers = list(self.book.workers.values())
        nodes = list(self.book.nodes.values())
        live_nodes = [node for node in nodes if node.ended is None or node.ended > now]
        working = [worker for worker in workers if billing.ended(worker, now, final=False) is None]
        startups = [
            worker.seconds.startup
            for worker in workers
            if worker.seconds.total() > worker.seconds.startup
        ]
        documents = self.book.totals()["documents"]
        usd_per_document = 0.0
        if documents:
            usd_per_document = self.book.committed_usd() / documents / billing.MICRO
        unpriced = [
            node.price_source for node in nodes if node.price_source.startswith(machines.UNKNOWN)
        ]
        return Standing(
            as_of=now,
            usd=billing.usd(self.book.charges(now).total),
            usd_per_second=sum(node.usd_per_hour for node in live_nodes) / 3600 / self.book.runs,
            documents=documents,
            busy_seconds=sum(billing.settled(worker, now, final=False).busy for worker in workers),
            startup_seconds=sum(startups) / len(startups) if startups else 0.0,
            unpriced=next(iter(unpriced), None),
            stored=self._stored,
            usd_per_document=usd_per_document,
            open_usd=self.book.open_usd(working) / billing.MICRO,
        )

    def close(self) -> None:
        """Close the bill and write it."""
        # If the nodes cannot be checked now, their last state is used.
        with contextlib.suppress(Exception):
            self._look()
        self._ended.set()
        self.book.close(time.time())
        self._flush()

    def _run(self) -> None:
        while not self.book.last.final and not self._ended.wait(_ROUND_SECONDS):
            self._try(self._look)
            self._try(self._flush)

    def _try(self, step: Callable[[], None]) -> None:
        """Run a step; if storage or Ray does not respond, the next round repeats it."""
        try:
            step()
        except Exception:
            traceback.print_exc()
            print("raypd: the ledger continues with the next round", file=sys.stderr, flush=True)

    def _look(self) -> None:
        nodes = self._nodes()
        runs = machines.runs()
        if runs > 1:
            self.book.note(
                "other runs used the cluster at the same time; each pays its share of that time"
            )
        for node in nodes:
            if node.price_source.startswith(machines.UNKNOWN):
                self.book.note(f"price {node.price_source}: it appears on the bill with $0")
        self.book.see(nodes, runs, time.time())

    def _flush(self) -> None:
        with self._writing:
            bill = self.book.bill(time.time())
            book.write(self._output, bill)
            self.book.stored(bill)
            self._stored = True
        # The bill does not depend on the metrics.
        try:
            if self._metrics is None:
                self._metrics = Metrics(self._output.rstrip("/").rpartition("/")[2])
            self._metrics.show(bill)
        except Exception:
            traceback.print_exc()


def start(
    config: RunConfig, output: str, session: str, began: float, cpus: float, gpus: float
) -> Any:
    """Start the ledger of a session on the head node of the cluster.

    Args:
        config: The configuration of the run.
        output: The folder of the run.
        session: The id of the session.
        began: When the session began, in unix seconds.
        cpus: CPUs of a worker.
        gpus: GPUs of a worker.

    Returns:
        The handle of the actor.

    Raises:
        ConfigError: If there is a budget and the price of a node is unknown.
    """
    nodes = partial(machines.look, config.cost, prices.table(), cpus, gpus)
    if config.cost.budget_usd is not None:
        _check_prices(config, nodes)
    actor = ray.remote(Ledger).options(
        name=f"{machines.LEDGER}{session}",
        namespace=machines.NAMESPACE,
        max_restarts=-1,
        # Every call can be repeated.
        max_task_retries=-1,
        **_ON_HEAD,
    )
    return actor.remote(config, output, session, began, nodes)


def _check_prices(config: RunConfig, nodes: machines.Nodes) -> None:
    """Raise ConfigError if a node has no price, because no budget could then end the run."""
    for node in nodes():
        instance_type = node.instance_type or prices.LOCAL
        if node.ended is not None or node.usd_per_hour or instance_type in config.cost.prices:
            continue
        raise ConfigError(
            "cost.budget_usd is set, but the price of this cluster's machines is unknown "
            f"({node.price_source}). Set cost.prices.{instance_type} in USD per hour"
        )


def start_for_pipeline(config: RunConfig, nodes: machines.Nodes) -> Any:
    """Start the ledger of a pipeline on the head node of the cluster, and return its handle."""
    actor = ray.remote(PipelineLedger).options(
        name=f"data-ledger-{uuid.uuid4().hex[:12]}", namespace=machines.NAMESPACE, **_ON_HEAD
    )
    return actor.remote(config, nodes)


def _stored_bill(output: str, session: str) -> Bill | None:
    """Read the bill that an earlier ledger of the session left, if there is one.

    This waits until storage responds, because an error here would end the actor.
    """
    while True:
        try:
            return read.record(Bill, output, layout.LEDGER, f"{session}.json")
        except OSError:
            traceback.print_exc()
            time.sleep(_ROUND_SECONDS)


def close(handle: Any) -> None:
    """Close the bill of a session and end its ledger.

    If the ledger is lost, the bill's file stays as it was last written.
    """
    with contextlib.suppress(Exception):
        ray.get(handle.close.remote(), timeout=_ANSWER_SECONDS)
    with contextlib.suppress(Exception):
        ray.kill(handle)
