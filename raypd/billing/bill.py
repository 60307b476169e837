"""The arithmetic of a bill, without Ray, clock or files.

Money is whole micro-dollars, shared out by largest remainder, so that nodes and parts each add up
to the total. A node's money is divided over its slots, one for each worker that fits: a worker's
seconds go to what it did, a slot without one is startup before the node's first worker, then idle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from raypd.run.records import Bill, Counts, NodeTime, Seconds, WorkerTime

MICRO = 1_000_000
PARTS = ("decode", "prefill", "startup", "idle", "lost", "head", "other", "endpoint")
_GONE_SECONDS = 20.0  # a worker that was not heard of for so long has died


@dataclass(frozen=True)
class Charges:
    """In micro-dollars: of each node by its id, of each part, and together; seconds of each part
    over all slots.
    """

    nodes: dict[str, int]
    parts: dict[str, int]
    total: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class WorkersBill:
    documents: int  # that were answered
    failed: int  # of these: error rows
    prompt_tokens: int
    decoded_tokens: int
    # Startup, prefill, decode, idle, lost (in batches that were not finished)
    seconds: dict[str, float]
    usd: float | None  # of these seconds, and a server's tokens; None where a place has no price


def of_workers(
    reports: Sequence[WorkerTime], until: float, usd_per_second: Mapping[str, float | None]
) -> WorkersBill:
    """The bill of workers that pay for their own seconds alone. usd_per_second: of a worker's place
    on each node.
    """
    spent = [settled(report, until, final=False) for report in reports]
    prices = [usd_per_second[report.node] for report in reports]
    counts = [counts for report in reports for counts in report.categories.values()]
    kinds = ("prefill_tokens", "shared_tokens", "decode_tokens")
    prefill, shared, decode = (int(sum(count[kind] for count in counts)) for kind in kinds)
    ok, failed = (sum(getattr(report, name) for report in reports) for name in ("ok", "failed"))
    seconds = {name: sum(getattr(each, name) for each in spent) for name in vars(Seconds())}
    if None in prices:
        usd = None
    else:
        usd = sum(s.total() * (price or 0.0) for s, price in zip(spent, prices, strict=True))
    return WorkersBill(ok + failed, failed, prefill + shared, decode, seconds, usd)


def ended(worker: WorkerTime, until: float, final: bool) -> float | None:
    """When a worker ended, as far as is known at `until`; None while it works."""
    if worker.ended is not None:
        return worker.ended
    if until - worker.heard > _GONE_SECONDS:
        return worker.heard
    return max(worker.heard, until) if final else None


def settled(worker: WorkerTime, until: float, final: bool) -> Seconds:
    """A worker's seconds up to `until`; those of open units are lost when it has ended."""
    seconds = replace(worker.seconds)
    if ended(worker, until, final) is not None:
        for prefill, decode in worker.open.values():
            seconds.lose(prefill, decode)
    return seconds


def apportion(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Whole shares of `total` in proportion to weights >= 0, which add up to it; all 0 without any
    weight.
    """
    weight_sum = sum(weights.values())
    if weight_sum <= 0:
        return dict.fromkeys(weights, 0)
    exact = {name: total * (weight / weight_sum) for name, weight in weights.items()}
    shares = {name: int(value) for name, value in exact.items()}
    remaining = total - sum(shares.values())
    order = sorted((n for n in weights if weights[n] > 0), key=lambda n: (shares[n] - exact[n], n))
    # At most one each, but for what floats cannot hold of huge totals.
    for i in range(abs(remaining)):
        shares[order[i % len(order)]] += 1 if remaining > 0 else -1
    return shares


def shared_seconds(began: float, ended: float, shares: Sequence[tuple[float, int]]) -> float:
    """Seconds of [began, ended) that this run pays: of a time with n runs 1/n. shares: (from when,
    n); one at first.
    """
    seconds = 0.0
    for (start, runs), (end, _) in pairwise([(float("-inf"), 1), *shares, (float("inf"), 1)]):
        seconds += max(0.0, min(end, ended) - max(start, began)) / max(1, runs)
    return seconds


def interval(node: NodeTime, began: float, until: float) -> tuple[float, float]:
    """When the session began to pay for a node, and when it ceased or how far the bill goes."""
    start = max(node.began, began)
    return start, max(start, min(until, node.ended if node.ended is not None else until))


def make(
    nodes: Sequence[NodeTime], workers: Sequence[WorkerTime], last: Bill, until: float
) -> Charges:
    """The bill of a session as it stands at `until`. last: its last form, of which began, shares
    and final count.
    """
    usd: dict[str, int] = {}
    parts = dict.fromkeys(PARTS, 0)
    seconds = dict.fromkeys(PARTS, 0.0)
    for node in nodes:
        start, end = interval(node, last.began, until)
        usd[node.node] = round(
            shared_seconds(start, end, last.shares) * node.usd_per_hour / 3600 * MICRO
        )
        node_workers = [worker for worker in workers if worker.node == node.node]
        spent = _node_seconds(node, node_workers, start, end, until, last.final)
        for name, value in spent.items():
            seconds[name] += value
        # Time so short that nobody did anything in it is still money.
        weights = spent if sum(spent.values()) > 0 else {"other": 1.0}
        for name, share in apportion(usd[node.node], weights).items():
            parts[name] += share
    return Charges(usd, parts, sum(usd.values()), seconds)


def _node_seconds(
    node: NodeTime,
    workers: Sequence[WorkerTime],
    start: float,
    end: float,
    until: float,
    final: bool,
) -> dict[str, float]:
    length = end - start
    if not workers:
        if node.head or not node.slots:
            return {"head" if node.head else "other": length}
        return {"idle": length * node.slots}
    spent = dict.fromkeys(PARTS, 0.0)
    alive = 0.0
    for worker in workers:
        seconds = settled(worker, until, final)
        gone = ended(worker, until, final)
        # What it reported cannot be more than what it lived, but for clocks; the node's time is
        # what is paid.
        lived = max(0.0, min(end, end if gone is None else gone) - max(start, worker.began))
        alive += lived
        scale = min(1.0, lived / seconds.total()) if seconds.total() else 0.0
        for name, value in vars(seconds).items():
            spent[name] += value * scale
        spent["idle"] += lived - seconds.total() * scale
    before = max(0.0, min(min(worker.began for worker in workers), end) - start) * max(
        1, node.slots
    )
    spent["startup"] += before
    spent["idle"] += max(0.0, length * max(1, node.slots) - before - alive)
    return spent


def usd(micro: int) -> float:
    """Micro-dollars as USD."""
    return round(micro / MICRO, 6)


def shared_out(total: int, counts: Mapping[str, Counts]) -> dict[str, Counts]:
    """`counts` by name with the money of each: the whole bill in proportion to the busy seconds
    behind it.
    """
    shares = apportion(total, {name: count["seconds"] for name, count in counts.items()})
    return {name: {**count, "usd": usd(shares[name])} for name, count in counts.items()}
