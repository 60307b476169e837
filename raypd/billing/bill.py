"""The arithmetic of a bill, without Ray, clock or files.

Money is in whole micro-dollars and is divided by largest remainder, so that the shares of nodes and
of parts each add up to the total. A node's money is divided over its slots, one for each worker
that fits on it. A worker's seconds go to what the worker did with them. A slot without a worker is
startup time before the first worker of the node, and idle time afterwards.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from raypd.billing.meter import Seconds, WorkerTime
from raypd.run import Counts, Usage, UsageKey

MICRO = 1_000_000
PARTS = ("decode", "prefill", "startup", "idle", "lost", "head", "other", "endpoint")
_DEAD_SECONDS = 20.0  # a worker without a report for this long has died
_Name = TypeVar("_Name", str, UsageKey)


@dataclass
class NodeTime:
    """A node of the cluster, its price, and what a session pays for it."""

    node: str
    began: float  # when the node came up; on a bill, when the session began to pay for it
    head: bool = False
    instance_type: str | None = None
    market: str = "local"
    region: str | None = None
    usd_per_hour: float = 0.0
    price_source: str = ""
    ended: float | None = None  # None while the node is up
    gpus: float = 0.0
    slots: int = 0  # workers that fit on it
    seconds: float = 0.0  # seconds that the session pays for
    usd: float = 0.0
    came: float | None = None  # on a bill: when the node came up


@dataclass
class Bill:
    """ledger/<session>.json: the bill of a session as of `until`."""

    session: str
    began: float
    usd: float
    until: float = 0.0
    final: bool = False  # whether the session has ended
    currency: str = "USD"
    budget_usd: float | None = None
    deadline: str | None = None
    nodes: list[NodeTime] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)  # USD by `PARTS`
    seconds: dict[str, float] = field(default_factory=dict)  # slot seconds by `PARTS`
    # The whole bill, divided by the busy seconds of each category and model, and of each method.
    categories: Usage = field(default_factory=dict)
    methods: dict[str, Counts] = field(default_factory=dict)
    workers: list[WorkerTime] = field(default_factory=list)
    # Points of (unix second, USD, documents, failed documents, decoded tokens).
    series: list[list[float]] = field(default_factory=list)
    kwh: float | None = None  # energy of the GPUs; None if one of them was not measured
    totals: dict[str, int] = field(default_factory=dict)  # documents, ok, failed, tokens by kind
    # (unix second, number of runs that share the cluster from then on)
    shares: list[tuple[float, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.until = self.until or self.began


@dataclass(frozen=True)
class Charges:
    """What is to be paid, in micro-dollars, and the seconds that it is for."""

    nodes: dict[str, int]  # by node id
    parts: dict[str, int]  # by `PARTS`
    total: int
    seconds: dict[str, float]  # slot seconds by `PARTS`


def ended(worker: WorkerTime, until: float, final: bool) -> float | None:
    """Return when a worker ended, or None while it works.

    Args:
        worker: The last report of the worker.
        until: The unix second up to which the bill goes.
        final: Whether the session has ended, and all workers with it.
    """
    if worker.ended is not None:
        return worker.ended
    if until - worker.heard > _DEAD_SECONDS:
        return worker.heard
    if final:
        return max(worker.heard, until)
    return None


def settled(worker: WorkerTime, until: float, final: bool) -> Seconds:
    """Return a worker's seconds; if it has ended, the seconds of its units in flight are lost."""
    seconds = replace(worker.seconds)
    if ended(worker, until, final) is not None:
        for prefill, decode in worker.open.values():
            seconds.lose(prefill, decode)
    return seconds


def input_bound(workers: Iterable[WorkerTime]) -> float:
    """Return the share of the workers' time after startup in which engines waited for input."""
    waited = 0.0
    seconds = 0.0
    for worker in workers:
        waited += worker.input_seconds
        seconds += worker.seconds.total() - worker.seconds.startup
    return waited / seconds if seconds else 0.0


def apportion(total: int, weights: Mapping[_Name, float]) -> dict[_Name, int]:
    """Divide a total into whole shares in proportion to weights.

    Args:
        total: The amount to divide.
        weights: Weights of at least 0.

    Returns:
        Shares that add up to the total; all are 0 if no weight is above 0.
    """
    weight_sum = sum(weights.values())
    if weight_sum <= 0:
        return dict.fromkeys(weights, 0)
    exact = {name: total * (weight / weight_sum) for name, weight in weights.items()}
    shares = {name: int(value) for name, value in exact.items()}
    remaining = total - sum(shares.values())
    positive = [name for name in weights if weights[name] > 0]
    order = sorted(positive, key=lambda name: (shares[name] - exact[name], name))
    # Each share gets at most one unit, except for what floats cannot express in huge totals.
    step = 1 if remaining > 0 else -1
    for i in range(abs(remaining)):
        shares[order[i % len(order)]] += step
    return shares


def shared_seconds(began: float, ended: float, shares: Sequence[tuple[float, int]]) -> float:
    """Return the seconds of an interval that one run pays for.

    While n runs share a cluster, each of them pays 1/n of the time.

    Args:
        began: The beginning of the interval, in unix seconds.
        ended: The end of the interval, in unix seconds.
        shares: (unix second, number of runs from then on); before the first of them, one run.
    """
    seconds = 0.0
    changes = [(float("-inf"), 1), *shares, (float("inf"), 1)]
    for (start, runs), (end, _) in pairwise(changes):
        overlap = min(end, ended) - max(start, began)
        seconds += max(0.0, overlap) / max(1, runs)
    return seconds


def interval(node: NodeTime, began: float, until: float) -> tuple[float, float]:
    """Return when a session began to pay for a node and when it stopped, or else `until`."""
    start = max(node.began, began)
    node_end = until if node.ended is None else node.ended
    return start, max(start, min(until, node_end))


def make(
    nodes: Sequence[NodeTime], workers: Sequence[WorkerTime], last: Bill, until: float
) -> Charges:
    """Charge a session for the nodes of its cluster.

    Args:
        nodes: All nodes of the cluster, with prices.
        workers: The last reports of all workers.
        last: The latest version of the bill: its beginning, its shares and whether it is final.
        until: The unix second up to which to charge.
    """
    node_usd: dict[str, int] = {}
    parts = dict.fromkeys(PARTS, 0)
    seconds = dict.fromkeys(PARTS, 0.0)
    workers_by_node: defaultdict[str, list[WorkerTime]] = defaultdict(list)
    for worker in workers:
        workers_by_node[worker.node].append(worker)
    for node in nodes:
        start, end = interval(node, last.began, until)
        hours = shared_seconds(start, end, last.shares) / 3600
        node_usd[node.node] = round(hours * node.usd_per_hour * MICRO)
        spent = _node_seconds(node, workers_by_node[node.node], start, end, until, last.final)
        for name, value in spent.items():
            seconds[name] += value
        # Even a time that is too short for anything to be done costs money.
        weights = spent if sum(spent.values()) > 0 else {"other": 1.0}
        for name, share in apportion(node_usd[node.node], weights).items():
            parts[name] += share
    return Charges(node_usd, parts, sum(node_usd.values()), seconds)


def make_for_workers(
    nodes: Sequence[NodeTime], workers: Sequence[WorkerTime], last: Bill, until: float
) -> Charges:
    """Charge a pipeline for the seconds of its own workers, and not for the rest of their nodes.

    The arguments are those of `make`. A worker pays for one slot of its node.
    """
    node_usd = {node.node: 0 for node in nodes}
    slot_usd_per_hour = {node.node: node.usd_per_hour / max(1, node.slots) for node in nodes}
    parts = dict.fromkeys(PARTS, 0)
    seconds = dict.fromkeys(PARTS, 0.0)
    for worker in workers:
        spent = settled(worker, until, last.final)
        hours = spent.total() / 3600
        usd = round(hours * slot_usd_per_hour.get(worker.node, 0.0) * MICRO)
        node_usd[worker.node] = node_usd.get(worker.node, 0) + usd
        for name, value in vars(spent).items():
            seconds[name] += value
        for name, share in apportion(usd, vars(spent)).items():
            parts[name] += share
    return Charges(node_usd, parts, sum(node_usd.values()), seconds)


def _node_seconds(
    node: NodeTime,
    workers: Sequence[WorkerTime],
    start: float,
    end: float,
    until: float,
    final: bool,
) -> dict[str, float]:
    """Divide the slot seconds of a node over the parts of the bill."""
    length = end - start
    slots = max(1, node.slots)
    if not workers:
        if node.head:
            return {"head": length}
        if not node.slots:
            return {"other": length}
        return {"idle": length * slots}
    spent = dict.fromkeys(PARTS, 0.0)
    alive = 0.0
    for worker in workers:
        seconds = settled(worker, until, final)
        worker_end = ended(worker, until, final)
        if worker_end is None:
            worker_end = end
        # A worker cannot report more than its lifetime, except if clocks differ. The node's time is
        # what is paid, so such a report is scaled down.
        lived = max(0.0, min(end, worker_end) - max(start, worker.began))
        alive += lived
        scale = min(1.0, lived / seconds.total()) if seconds.total() else 0.0
        for name, value in vars(seconds).items():
            spent[name] += value * scale
        spent["idle"] += lived - seconds.total() * scale
    first_worker = min(worker.began for worker in workers)
    before_workers = max(0.0, min(first_worker, end) - start) * slots
    spent["startup"] += before_workers
    spent["idle"] += max(0.0, length * slots - before_workers - alive)
    return spent


def usd(micro: int) -> float:
    """Convert micro-dollars to USD."""
    return round(micro / MICRO, 6)


def shared_out(total: int, counts: Mapping[_Name, Counts]) -> dict[_Name, Counts]:
    """Add the field `usd` to counts: the total, divided in proportion to their busy seconds.

    Args:
        total: The whole bill in micro-dollars.
        counts: The counts by category, method, ...
    """
    shares = apportion(total, {name: count["seconds"] for name, count in counts.items()})
    return {name: {**count, "usd": usd(shares[name])} for name, count in counts.items()}
