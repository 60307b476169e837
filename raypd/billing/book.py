"""A session's book: nodes, reports, prices in, the bill's file out, from which a ledger that died
goes on. No Ray.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from raypd import storage
from raypd.billing import bill as billing
from raypd.billing import energy
from raypd.billing.meter import COUNTS, added, coarser, zero
from raypd.config import CostConfig, ModelConfig, RunConfig
from raypd.run import layout, read, records
from raypd.run.records import Bill, NodeTime, RunCost, UnitSummary, WorkerTime
from raypd.tasks.base import SECOND

_MOST_POINTS = 2000  # of the series
_MOST_SPANS = 4000  # of all workers
# Of WorkerTime, that count tokens.
TOKEN_FIELDS = ("categories", "open_categories", "lost_categories")


class Book:
    """What a session's bill is made of; goes on from `last`, its last form.

    Safe in threads. config: of the run; None: what servers took for tokens stays as it is on
    `last`.
    """

    def __init__(self, last: Bill, config: RunConfig | None = None) -> None:
        self.last, self._cost = last, config.cost if config is not None else CostConfig()
        self._models = (config.model, config.cascade.model) if config is not None else (None, None)
        if config is not None:
            self._tokens_before = 0
        else:
            self._tokens_before = round(last.parts.get("endpoint", 0.0) * billing.MICRO)
        self._lock = threading.RLock()
        self.nodes = {
            n.node: replace(n, began=n.began if n.came is None else n.came) for n in last.nodes
        }
        # Last reports.
        self.workers = {worker.worker: replace(worker, ended=None) for worker in last.workers}

    def take(self, report: WorkerTime) -> bool:
        """A worker's report; False when a later one is here already."""
        with self._lock:
            earlier = self.workers.get(report.worker)
            if self.last.final or (earlier is not None and earlier.sequence >= report.sequence):
                return False
            self.workers[report.worker] = report
            return True

    def see(self, nodes: Iterable[NodeTime], runs: int, now: float) -> None:
        """Notes all nodes of the cluster and how many runs of raypd are on it, at the unix second
        `now`.
        """
        with self._lock:
            there = {node.node: node for node in nodes}
            for name, node in there.items():
                # A price holds from the first look on.
                self.nodes.setdefault(name, node).ended = node.ended
            for name, node in self.nodes.items():
                if name not in there and node.ended is None:
                    node.ended = max(self.last.until, node.began)  # it went while nobody looked
            if self.runs != runs:
                self.last = replace(self.last, shares=[*self.last.shares, (now, runs)])

    @property
    def runs(self) -> int:
        return self.last.shares[-1][1] if self.last.shares else 1

    def note(self, text: str) -> None:
        """Adds what a reader of the bill has to know; once."""
        with self._lock:
            if text not in self.last.notes:
                self.last = replace(self.last, notes=[*self.last.notes, text])

    def charges(self, until: float) -> billing.Charges:
        """What is to be paid up to a time, in micro-dollars."""
        with self._lock:
            workers = list(self.workers.values())
            charges = billing.make(list(self.nodes.values()), workers, self.last, until)
        tokens = self._tokens_before + round(
            sum(self.tokens_usd(workers, kind) for kind in TOKEN_FIELDS)
        )
        return replace(
            charges, parts={**charges.parts, "endpoint": tokens}, total=charges.total + tokens
        )

    def tokens_usd(self, workers: Iterable[WorkerTime], kind: str) -> float:
        """Micro-dollars that servers take for the tokens of some workers. kind: the field of them
        that counts these.
        """
        counts = [each for worker in workers for each in getattr(worker, kind).items()]
        committed = kind == "categories"
        return sum(
            token_usd(count, self._models[name.endswith(SECOND)], committed)
            for name, count in counts
        )

    def close(self, now: float) -> None:
        """No report counts after this, and open units are lost."""
        with self._lock:
            self.last = replace(self.last, until=max(now, self.last.until), final=True)

    def totals(self) -> dict[str, int]:
        with self._lock:
            workers = list(self.workers.values())
        return _totals(
            workers, [count for worker in workers for count in worker.categories.values()]
        )

    def bill(self, now: float) -> Bill:
        with self._lock:
            until = self.last.until if self.last.final else max(self.last.until, now)
            charges = self.charges(until)
            totals = self.totals()
            point = [round(until, 3), billing.usd(charges.total)]
            point += [totals["documents"], totals["failed"], totals["decode_tokens"]]
            workers = list(self.workers.values())
            by_category = [each for worker in workers for each in worker.categories.items()]
            by_method = [
                (worker.method, count) for worker in workers for count in worker.categories.values()
            ]
            series = [earlier for earlier in self.last.series if earlier[0] < point[0]] + [point]
            if len(series) > _MOST_POINTS:
                series = [series[0], *series[1:-1:2], point]
            self.last = replace(
                self.last,
                until=until,
                usd=billing.usd(charges.total),
                series=series,
                totals=totals,
                nodes=[self._node(node, until, charges) for node in self.nodes.values()],
                parts={name: billing.usd(value) for name, value in charges.parts.items()},
                seconds={name: round(value, 3) for name, value in charges.seconds.items()},
                categories=billing.shared_out(charges.total, added(by_category)),
                methods=billing.shared_out(charges.total, added(by_method)),
                workers=[self._worker(worker, until) for worker in workers],
                kwh=energy.kwh(workers),
            )
            return self.last

    def _node(self, node: NodeTime, until: float, charges: billing.Charges) -> NodeTime:
        start, end = billing.interval(node, self.last.began, until)
        usd = billing.usd(charges.nodes[node.node])
        return replace(node, began=start, came=node.began, seconds=round(end - start, 3), usd=usd)

    def _worker(self, worker: WorkerTime, until: float) -> WorkerTime:
        """A worker for the file: with its end, rounded, and with as many spans as all have room
        for.
        """
        spans = worker.spans
        while len(spans) > max(8, _MOST_SPANS // len(self.workers)):
            spans = coarser(spans)
        ended = billing.ended(worker, until, self.last.final)
        if ended is not None:  # for the picture, what it was busy with in its open units is lost
            lost = {("busy", unit) for unit in worker.open}
            spans = [
                (a, b, "lost" if (kind, unit) in lost else kind, unit) for a, b, kind, unit in spans
            ]
        seconds = records.Seconds(*(round(value, 6) for value in vars(worker.seconds).values()))
        spans = [(round(a, 3), round(b, 3), kind, unit) for a, b, kind, unit in spans]
        return replace(worker, ended=ended, seconds=seconds, spans=spans)


def token_usd(
    counts: Mapping[str, float], model: ModelConfig | None, committed: bool = True
) -> float:
    """Micro-dollars that a server behind `model.endpoint` takes for tokens; 0 where there is
    none.
    """
    server = model.endpoint if model is not None else None
    # The next attempt finds these batches, and pays nothing.
    if server is None or (server.batch and not committed):
        return 0.0
    prompt = counts["prefill_tokens"] + counts["shared_tokens"]
    answer = counts["decode_tokens"]
    return (
        prompt * server.usd_per_million_prompt_tokens
        + answer * server.usd_per_million_answer_tokens
    )


def _totals(
    of: Sequence[WorkerTime] | Sequence[UnitSummary], tokens: Sequence[Mapping[str, float]]
) -> dict[str, int]:
    ok, failed = (sum(getattr(item, name) for item in of) for name in ("ok", "failed"))
    tokens_by_name = {name: int(sum(count.get(name, 0) for count in tokens)) for name in COUNTS[1:]}
    return {"documents": ok + failed, "ok": ok, "failed": failed, **tokens_by_name}


def write(output: str, bill: Bill) -> None:
    """Writes a session's bill into the run's folder `output`, whole or not at all.

    Raises OSError.
    """
    records.write(storage.join(output, layout.LEDGER, f"{bill.session}.json"), bill, indent=None)


def bills(output: str) -> list[Bill]:
    """The bills of all sessions, the oldest first; torn files are left out. Raises OSError."""
    return read.bills([output])[0]


def reconcile(bill: Bill, units: Sequence[UnitSummary]) -> bool:
    """Brings a closed bill's counts up to committed units (a worker may die before it reports);
    whether it had to.
    """
    totals = _totals(units, [unit.counts for unit in units])
    if totals == bill.totals:
        return False
    counts = [each for unit in units for each in unit.categories.items()]
    total = round(bill.usd * billing.MICRO)
    bill.totals = totals
    # Of a retry: its documents and tokens count where the rows are, its money is for the same.
    if not units:
        bill.categories, bill.methods = (
            {name: {**zero(), "usd": count["usd"]} for name, count in shares.items()}
            for shares in (bill.categories, bill.methods)
        )
        return True
    bill.categories = billing.shared_out(total, added(counts))
    if len(bill.methods) <= 1:  # a run has one
        bill.methods = billing.shared_out(
            total, added((name, count) for name in bill.methods for _, count in counts)
        )
    return True


def of_run(output: str, units: Iterable[UnitSummary]) -> RunCost | None:
    """The bills of all sessions, brought up to all committed `units` and summed; None without
    any.
    """
    by_session = defaultdict(list)
    documents = 0
    settled = []
    for unit in units:
        by_session[unit.session].append(unit)
        documents += unit.documents
    for bill in bills(output):
        if not bill.final:  # who asks has ended: this session has died, and its open units are lost
            book = Book(bill)
            book.close(bill.until)
            bill = replace(book.bill(bill.until), kwh=bill.kwh)
        if reconcile(bill, by_session[bill.session]):
            write(output, bill)
        settled.append(bill)
    return summed(settled, documents)


def summed(bills: Sequence[Bill], documents: int | None = None) -> RunCost | None:
    """The bills of a run's sessions, summed; None without any. documents: committed; None: as the
    bills count them.
    """
    if not bills:
        return None
    usd = round(sum(bill.usd for bill in bills), 6)
    if documents is None:
        documents = sum(bill.totals.get("documents", 0) for bill in bills)
    measured = [bill.kwh for bill in bills if bill.kwh is not None]
    return RunCost(
        usd=usd,
        usd_per_1000_documents=round(1000 * usd / documents, 6) if documents else None,
        parts={
            name: round(sum(bill.parts.get(name, 0) for bill in bills), 6) for name in billing.PARTS
        },
        seconds={
            name: round(sum(bill.seconds.get(name, 0) for bill in bills), 3)
            for name in billing.PARTS
        },
        sessions=len(bills),
        documents=documents,
        kwh=round(sum(measured), 6) if measured else None,
        cards=energy.together(worker.cards for bill in bills for worker in bill.workers),
        prices=sorted({node.price_source for bill in bills for node in bill.nodes}),
        notes=sorted({note for bill in bills for note in bill.notes}),
    )
