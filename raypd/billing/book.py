"""The book of a session: reports of nodes and workers come in, the file of its bill goes out.

A ledger that dies resumes from that file. This module does not need Ray.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import raypd.billing.bill as billing
import raypd.billing.energy as energy
from raypd import storage
from raypd.billing.bill import Bill, NodeTime
from raypd.billing.meter import (
    TOKEN_COUNTS,
    Receipt,
    Seconds,
    WorkerTime,
    add_to,
    added,
    coarser,
    zero,
)
from raypd.config import CascadeConfig, ModelConfig
from raypd.run import (
    FIRST,
    SECOND,
    Counts,
    RunCost,
    SessionUnits,
    UnitTotals,
    Usage,
    layout,
    records,
)

_MAX_POINTS = 2000  # of the series
_MAX_SPANS = 4000  # of all workers together
_MIN_SPANS = 8  # of each worker


@dataclass(frozen=True)
class WorkersBill:
    """What the workers of a pipeline did and cost."""

    documents: int  # documents that were answered, failed ones included
    failed: int
    prompt_tokens: int
    decoded_tokens: int
    # Worker seconds: startup, prefill, decode, idle, and lost in batches that were not finished.
    seconds: dict[str, float]
    usd: float | None  # of these seconds and of a server's tokens; None if a node has no price


class Book:
    """Everything that goes into a session's bill. The methods are thread-safe.

    Args:
        last: The latest version of the bill, from which the book resumes.
        models: The models of the run (`models_of`). Without them, the money that servers charged
            for tokens stays as it is on `last`.
        workers_only: Charge for the seconds of the workers instead of for whole nodes, because a
            pipeline shares its cluster with other stages.
    """

    def __init__(
        self,
        last: Bill,
        models: Mapping[str, ModelConfig | None] | None = None,
        workers_only: bool = False,
    ) -> None:
        self.last = last
        self.workers_only = workers_only
        self._tokens_before = 0
        self._models = models or {}
        if models is None:
            self._tokens_before = round(last.parts.get("endpoint", 0.0) * billing.MICRO)
        self._lock = threading.RLock()
        self.nodes: dict[str, NodeTime] = {}
        for node in last.nodes:
            came = node.began if node.came is None else node.came
            self.nodes[node.node] = replace(node, began=came)
        # The last report of each worker.
        self.workers = {worker.worker: replace(worker, ended=None) for worker in last.workers}
        # Of committed units, by category and model, and by method.
        self.usage: Usage = {key: _without_usd(counts) for key, counts in last.categories.items()}
        self._by_method = {name: _without_usd(counts) for name, counts in last.methods.items()}
        # Worker -> the sequence of the last change of its usage that is in the bill's file.
        self._stored = {worker.worker: worker.counted for worker in last.workers}

    def take(self, report: WorkerTime) -> bool:
        """Take a worker's report.

        Returns:
            False if a later report of the worker is known, or if the book is closed.
        """
        with self._lock:
            earlier = self.workers.get(report.worker)
            if self.last.final:
                return False
            if earlier is not None and earlier.sequence >= report.sequence:
                return False
            counted = -1 if earlier is None else earlier.counted
            # After a restart, changes may be missing; the receipt says from which one on.
            if report.since <= counted:
                for change in report.changes:
                    if change.sequence > counted:
                        add_to(self.usage, change.usage)
                        for counts in change.usage.values():
                            add_to(self._by_method, {report.method: counts})
                counted = max(counted, report.sequence)
            self.workers[report.worker] = replace(report, changes=[], counted=counted)
            return True

    def receipt(self, worker: str) -> Receipt:
        """Return which changes of a worker's usage are counted."""
        with self._lock:
            report = self.workers.get(worker)
            counted = -1 if report is None else report.counted
            return Receipt(counted, self._stored.get(worker, -1))

    def stored(self, bill: Bill) -> None:
        """Note that a bill is in its file now."""
        with self._lock:
            self._stored = {worker.worker: worker.counted for worker in bill.workers}

    def see(self, nodes: Iterable[NodeTime], runs: int, now: float) -> None:
        """Note the state of the cluster.

        Args:
            nodes: All nodes of the cluster.
            runs: The number of raypd runs on the cluster.
            now: The time, in unix seconds.
        """
        with self._lock:
            present = {node.node: node for node in nodes}
            for name, node in present.items():
                # The first price that is known stays valid.
                self.nodes.setdefault(name, node).ended = node.ended
            for name, node in self.nodes.items():
                if name not in present and node.ended is None:
                    # The node disappeared between two checks.
                    node.ended = max(self.last.until, node.began)
            if self.runs != runs:
                self.last = replace(self.last, shares=[*self.last.shares, (now, runs)])

    @property
    def runs(self) -> int:
        """The number of raypd runs that share the cluster."""
        return self.last.shares[-1][1] if self.last.shares else 1

    def note(self, text: str) -> None:
        """Add a note for readers of the bill, once."""
        with self._lock:
            if text not in self.last.notes:
                self.last = replace(self.last, notes=[*self.last.notes, text])

    def charges(self, until: float) -> billing.Charges:
        """Return what is to be paid up to a time, in micro-dollars."""
        make = billing.make_for_workers if self.workers_only else billing.make
        with self._lock:
            workers = list(self.workers.values())
            charges = make(list(self.nodes.values()), workers, self.last, until)
            tokens = self.committed_usd() + self.open_usd(workers) + self._lost_usd(workers)
        endpoint = self._tokens_before + round(tokens)
        parts = {**charges.parts, "endpoint": endpoint}
        return replace(charges, parts=parts, total=charges.total + endpoint)

    def committed_usd(self) -> float:
        """Return the micro-dollars that servers charge for the tokens of committed units."""
        with self._lock:
            return usage_usd(self.usage, self._models)

    def open_usd(self, workers: Iterable[WorkerTime]) -> float:
        """Return the micro-dollars that servers charge for the units in flight on some workers."""
        return sum(
            usage_usd(worker.open_usage, self._models, committed=False) for worker in workers
        )

    def _lost_usd(self, workers: Iterable[WorkerTime]) -> float:
        """Return the micro-dollars that servers charge for the failed attempts of some workers."""
        return sum(
            usage_usd(worker.lost_usage, self._models, committed=False) for worker in workers
        )

    def close(self, now: float) -> None:
        """Close the book: no later report counts, and units in flight are lost."""
        with self._lock:
            self.last = replace(self.last, until=max(now, self.last.until), final=True)

    def totals(self) -> dict[str, int]:
        """Return the documents and tokens of all committed units."""
        with self._lock:
            return _totals(list(self.workers.values()), list(self.usage.values()))

    def workers_bill(self, now: float) -> WorkersBill:
        """Return the current bill of a pipeline."""
        with self._lock:
            charges = self.charges(now)
            totals = self.totals()
            worker_nodes = {worker.node for worker in self.workers.values()}
            priced_nodes = {name for name, node in self.nodes.items() if node.usd_per_hour}
        usd = None
        if worker_nodes <= priced_nodes or charges.parts["endpoint"]:
            usd = billing.usd(charges.total)
        return WorkersBill(
            documents=totals["documents"],
            failed=totals["failed"],
            prompt_tokens=totals["prefill_tokens"] + totals["shared_tokens"],
            decoded_tokens=totals["decode_tokens"],
            seconds={name: charges.seconds[name] for name in vars(Seconds())},
            usd=usd,
        )

    def bill(self, now: float) -> Bill:
        """Return the current bill; a closed one no longer changes."""
        with self._lock:
            until = self.last.until if self.last.final else max(self.last.until, now)
            charges = self.charges(until)
            totals = self.totals()
            workers = list(self.workers.values())
            self.last = replace(
                self.last,
                until=until,
                usd=billing.usd(charges.total),
                series=self._series(until, charges, totals),
                totals=totals,
                nodes=[self._node_entry(node, until, charges) for node in self.nodes.values()],
                parts={name: billing.usd(value) for name, value in charges.parts.items()},
                seconds={name: round(value, 3) for name, value in charges.seconds.items()},
                categories=billing.shared_out(charges.total, dict(sorted(self.usage.items()))),
                methods=billing.shared_out(charges.total, self._by_method),
                workers=[self._worker_entry(worker, until) for worker in workers],
                kwh=energy.kwh(workers),
            )
            return self.last

    def _series(
        self, until: float, charges: billing.Charges, totals: Mapping[str, int]
    ) -> list[list[float]]:
        """Append the newest point to the series, and halve the series if it is long."""
        point = [
            round(until, 3),
            billing.usd(charges.total),
            totals["documents"],
            totals["failed"],
            totals["decode_tokens"],
        ]
        series = [earlier for earlier in self.last.series if earlier[0] < point[0]]
        series.append(point)
        if len(series) > _MAX_POINTS:
            series = [series[0], *series[1:-1:2], point]
        return series

    def _node_entry(self, node: NodeTime, until: float, charges: billing.Charges) -> NodeTime:
        """Return a node's entry on the bill."""
        start, end = billing.interval(node, self.last.began, until)
        usd = billing.usd(charges.nodes[node.node])
        return replace(node, began=start, came=node.began, seconds=round(end - start, 3), usd=usd)

    def _worker_entry(self, worker: WorkerTime, until: float) -> WorkerTime:
        """Return a worker's entry on the bill: with its end, rounded, and with few spans."""
        spans = worker.spans
        while len(spans) > max(_MIN_SPANS, _MAX_SPANS // len(self.workers)):
            spans = coarser(spans)
        ended = billing.ended(worker, until, self.last.final)
        # The busy time of a unit that was in flight when its worker ended is lost.
        lost_units = set(worker.open) if ended is not None else set()
        entry_spans = []
        for span_began, span_ended, kind, unit in spans:
            if kind == "busy" and unit in lost_units:
                kind = "lost"
            entry_spans.append((round(span_began, 3), round(span_ended, 3), kind, unit))
        seconds = {name: round(value, 6) for name, value in vars(worker.seconds).items()}
        return replace(worker, ended=ended, seconds=Seconds(**seconds), spans=entry_spans)


def _without_usd(counts: Mapping[str, float]) -> Counts:
    return {kind: value for kind, value in counts.items() if kind != "usd"}


def models_of(model: ModelConfig, cascade: CascadeConfig) -> dict[str, ModelConfig | None]:
    """Return the models of a run by the `model` of a `UsageKey`."""
    return {FIRST: model, SECOND: cascade.model}


def usage_usd(
    usage: Usage, models: Mapping[str, ModelConfig | None], committed: bool = True
) -> float:
    """Return the micro-dollars that the servers of some models charge for tokens.

    Args:
        usage: The tokens by category and model.
        models: The models, as `models_of` returns them.
        committed: Whether the tokens belong to committed units.
    """
    return sum(token_usd(counts, models.get(key.model), committed) for key, counts in usage.items())


def token_usd(
    counts: Mapping[str, float], model: ModelConfig | None, committed: bool = True
) -> float:
    """Return the micro-dollars that the server of a model charges for tokens.

    Args:
        counts: The tokens by kind.
        model: The model; it costs nothing here unless it has an endpoint.
        committed: Whether the tokens belong to committed units.
    """
    server = model.endpoint if model is not None else None
    if server is None:
        return 0.0
    # The next attempt finds the batches of a failed one, and does not pay for them again.
    if server.batch and not committed:
        return 0.0
    prompt_tokens = counts["prefill_tokens"] + counts["shared_tokens"]
    return (
        prompt_tokens * server.usd_per_million_prompt_tokens
        + counts["decode_tokens"] * server.usd_per_million_answer_tokens
    )


def _totals(
    items: Sequence[WorkerTime] | Sequence[SessionUnits], tokens: Sequence[Mapping[str, float]]
) -> dict[str, int]:
    ok = sum(item.ok for item in items)
    failed = sum(item.failed for item in items)
    totals = {"documents": ok + failed, "ok": ok, "failed": failed}
    for kind in TOKEN_COUNTS:
        totals[kind] = int(sum(count.get(kind, 0) for count in tokens))
    return totals


def write(output: str, bill: Bill) -> None:
    """Write a session's bill into the folder of a run, atomically.

    Raises:
        OSError: If it cannot be written.
    """
    path = storage.join(output, layout.LEDGER, f"{bill.session}.json")
    records.write(path, bill, indent=None)


def read_bills(outputs: Sequence[str]) -> tuple[list[Bill], list[str]]:
    """Read the bills of all sessions of some runs.

    Returns:
        The bills, oldest first, and the paths of damaged files.

    Raises:
        OSError: If a folder cannot be read.
    """
    intact = []
    damaged = []
    for output in outputs:
        folder = storage.join(output, layout.LEDGER)
        for name in storage.names(folder):
            if not name.endswith(".json"):
                continue
            path = storage.join(folder, name)
            try:
                intact.append(records.read(Bill, path))
            except records.RecordError:
                damaged.append(path)
    return sorted(intact, key=lambda bill: bill.began), damaged


def bills(output: str) -> list[Bill]:
    """Read the bills of all sessions of a run, oldest first, without damaged files.

    Raises:
        OSError: If the folder cannot be read.
    """
    intact, _ = read_bills([output])
    return intact


def reconcile(
    bill: Bill, units: SessionUnits, models: Mapping[str, ModelConfig | None] | None = None
) -> bool:
    """Correct the counts of a closed bill, whose workers may have died before their last report.

    Args:
        bill: The bill, which is changed.
        units: The units that the session committed.
        models: The models of the run (`models_of`). Their servers charge at least for the tokens of
            these units.

    Returns:
        Whether the bill had to be corrected.
    """
    totals = _totals([units], [units.counts])
    if totals == bill.totals:
        return False
    bill.totals = totals
    if not units.units:
        # This is the bill of a retry. Its documents and tokens are counted where the rows are,
        # but its money stays here.
        bill.categories = {
            key: {**zero(), "usd": count["usd"]} for key, count in bill.categories.items()
        }
        bill.methods = {
            name: {**zero(), "usd": count["usd"]} for name, count in bill.methods.items()
        }
        return True
    usage = added(units.usage.items())
    total = round(bill.usd * billing.MICRO)
    charged = round(bill.parts.get("endpoint", 0.0) * billing.MICRO)
    missing = round(usage_usd(usage, models or {})) - charged
    if missing > 0:
        total += missing
        bill.usd = billing.usd(total)
        bill.parts["endpoint"] = billing.usd(charged + missing)
    bill.categories = billing.shared_out(total, usage)
    # A run has one method.
    if len(bill.methods) <= 1:
        by_method = [(name, count) for name in bill.methods for count in usage.values()]
        bill.methods = billing.shared_out(total, added(by_method))
    return True


def of_run(
    output: str, units: UnitTotals, models: Mapping[str, ModelConfig | None] | None = None
) -> RunCost | None:
    """Add up the bills of all sessions of a run that has ended.

    Args:
        output: The folder of the run.
        units: Totals of all committed units, to which the bills are corrected.
        models: The models of the run, as for `reconcile`.

    Returns:
        None if there is no bill.
    """
    settled = []
    for bill in bills(output):
        if not bill.final:
            # The session died, and its units in flight are lost.
            book = Book(bill)
            book.close(bill.until)
            bill = replace(book.bill(bill.until), kwh=bill.kwh)
        if reconcile(bill, units.sessions.get(bill.session, SessionUnits()), models):
            write(output, bill)
        settled.append(bill)
    return summed(settled, units.total("documents"))


def summed(bills: Sequence[Bill], documents: int | None = None) -> RunCost | None:
    """Add up the bills of a run's sessions.

    Args:
        bills: The bills.
        documents: The committed documents; None to take the count of the bills.

    Returns:
        None if there is no bill.
    """
    if not bills:
        return None
    usd = round(sum(bill.usd for bill in bills), 6)
    if documents is None:
        documents = sum(bill.totals.get("documents", 0) for bill in bills)
    usd_per_1000_documents = None
    if documents:
        usd_per_1000_documents = round(1000 * usd / documents, 6)
    measured_kwh = [bill.kwh for bill in bills if bill.kwh is not None]
    parts = {}
    seconds = {}
    for name in billing.PARTS:
        parts[name] = round(sum(bill.parts.get(name, 0) for bill in bills), 6)
        seconds[name] = round(sum(bill.seconds.get(name, 0) for bill in bills), 3)
    input_bound = billing.input_bound(worker for bill in bills for worker in bill.workers)
    return RunCost(
        usd=usd,
        usd_per_1000_documents=usd_per_1000_documents,
        parts=parts,
        seconds=seconds,
        sessions=len(bills),
        documents=documents,
        kwh=round(sum(measured_kwh), 6) if measured_kwh else None,
        gpu_use=energy.together(worker.gpu_use for bill in bills for worker in bill.workers),
        prices=sorted({node.price_source for bill in bills for node in bill.nodes}),
        notes=sorted({note for bill in bills for note in bill.notes}),
        input_bound=round(input_bound, 4),
    )
