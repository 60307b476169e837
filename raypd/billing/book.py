"""A session's book: nodes, workers' reports and prices in, the bill as it stands in <run>/ledger/<session>.json out.

The file holds all that the book knows, so that a ledger that died goes on from it. No Ray here.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from raypd import storage
from raypd.billing import bill as billing
from raypd.billing import energy
from raypd.billing.bill import Node, Seconds, Worker
from raypd.billing.meter import COUNTS, Report, coarser, zero
from raypd.run import layout
from raypd.run.records import UnitSummary

CURRENCY = "USD"
_MOST_POINTS = 2000  # of the series
_MOST_SPANS = 4000  # of all workers
_STALE_SECONDS = 60.0  # a file that is not final and so old has lost its session


def folder(output: str) -> str:
    return storage.join(output, layout.LEDGER)


def path(output: str, session: str) -> str:
    return storage.join(folder(output), f"{session}.json")


@dataclass
class Book:
    """The state of one session's bill. Safe in threads."""

    session: str
    began: float
    budget_usd: float | None = None
    deadline: str | None = None
    co2e_grams_per_kwh: float | None = None
    watts_per_gpu: float | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)  # the last of every worker
    shares: list[tuple[float, int]] = field(default_factory=list)
    series: list[list[float]] = field(default_factory=list)
    until: float = 0.0
    final: bool = False
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self.until = self.until or self.began

    # ------------------------------------------------------------------------------------------------------------- in

    def take(self, report: Report) -> bool:
        """A worker's report; False when a later one is here already."""
        with self._lock:
            known = self.workers.get(report.worker)
            if self.final or (known is not None and known.sequence >= report.sequence):
                return False
            self.reports[report.worker] = report
            self.workers[report.worker] = Worker(
                report.worker,
                report.node,
                report.began,
                report.heard,
                None,
                report.sequence,
                report.seconds,
                report.open,
                report.spans,
            )
            return True

    def see(self, nodes: Iterable[Node], runs: int, now: float) -> None:
        """The nodes of the cluster as they are now, and how many runs are on it."""
        with self._lock:
            there = set()
            for node in nodes:
                there.add(node.node)
                if node.node in self.nodes:  # a price holds from the first look on
                    self.nodes[node.node].ended = node.ended
                else:
                    self.nodes[node.node] = node
            for node in self.nodes.values():
                if node.node not in there and node.ended is None:
                    node.ended = max(self.until, node.began)  # it went while nobody looked
            if (self.shares[-1][1] if self.shares else 1) != runs:
                self.shares.append((now, runs))

    def note(self, text: str) -> None:
        """Something that a reader of the bill has to know; once."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)

    # ------------------------------------------------------------------------------------------------------------ out

    def bill(self, until: float) -> billing.Bill:
        with self._lock:
            return billing.make(
                list(self.nodes.values()),
                list(self.workers.values()),
                self.began,
                until,
                shares=self.shares,
                final=self.final,
            )

    def close(self, now: float) -> None:
        """No report counts after this, and what is in hand is lost."""
        with self._lock:
            self.until, self.final = max(now, self.until), True

    def totals(self) -> dict[str, int]:
        counts = dict.fromkeys(("documents", "ok", "failed", *COUNTS[1:]), 0)
        with self._lock:
            for report in self.reports.values():
                counts["ok"] += report.ok
                counts["failed"] += report.failed
                for own in report.categories.values():
                    for name in COUNTS[1:]:
                        counts[name] += int(own[name])
        counts["documents"] = counts["ok"] + counts["failed"]
        return counts

    def _counts(self, by_method: bool) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, float]] = {}
        for report in self.reports.values():
            for category, own in report.categories.items():
                _add(found.setdefault(report.method if by_method else category, zero()), own)
        return {name: _whole(own) for name, own in sorted(found.items())}

    def tree(self, now: float) -> dict[str, Any]:
        """The bill as it stands, and all that the book knows: what the file holds."""
        with self._lock:
            if not self.final:
                self.until = max(self.until, now)
            bill, totals = self.bill(self.until), self.totals()
            point = [round(self.until, 3), billing.usd(bill.total), totals["documents"], totals["failed"]]
            self._draw([*point, totals["decode_tokens"]])
            return {
                "session": self.session,
                "began": self.began,
                "until": self.until,
                "final": self.final,
                "currency": CURRENCY,
                "budget_usd": self.budget_usd,
                "deadline": self.deadline,
                "nodes": [self._node(node, bill) for node in self.nodes.values()],
                "usd": billing.usd(bill.total),
                "parts": {name: billing.usd(value) for name, value in bill.parts.items()},
                "seconds": {name: round(value, 3) for name, value in bill.seconds.items()},
                "categories": billing.shared_out(bill.total, self._counts(by_method=False)),
                "methods": billing.shared_out(bill.total, self._counts(by_method=True)),
                "workers": [self._worker(name) for name in self.workers],
                "series": self.series,
                "energy": energy.of(self.reports.values(), self.watts_per_gpu, self.co2e_grams_per_kwh),
                "totals": totals,
                "shares": self.shares,
                "notes": self.notes,
            }

    def _draw(self, point: list[float]) -> None:
        if self.series and self.series[-1][0] >= point[0]:
            self.series[-1] = point
        else:
            self.series.append(point)
        if len(self.series) > _MOST_POINTS:
            self.series = [self.series[0], *self.series[1:-1:2], self.series[-1]]

    def _node(self, node: Node, bill: billing.Bill) -> dict[str, Any]:
        start, end = billing.interval(node, self.began, self.until)
        tree = {**vars(node), "seconds": round(end - start, 3), "usd": billing.usd(bill.nodes[node.node])}
        return {**tree, "began": start, "came": node.began}

    def _worker(self, name: str) -> dict[str, Any]:
        worker, report = self.workers[name], self.reports[name]
        spans = worker.spans
        while len(spans) > max(8, _MOST_SPANS // len(self.workers)):
            spans = coarser(spans)
        ended = worker.left(self.until, self.final)
        spans = _until(spans, worker, ended)
        own = {"ok": report.ok, "failed": report.failed, "categories": report.categories, "method": report.method}
        return {
            "worker": name,
            "node": worker.node,
            "pid": report.pid,
            "began": worker.began,
            "ended": ended,
            "heard": worker.heard,
            "sequence": worker.sequence,
            "seconds": {k: round(v, 6) for k, v in vars(worker.seconds).items()},
            "open": worker.open,
            "spans": [[round(a, 3), round(b, 3), kind, unit] for a, b, kind, unit in spans],
            "gpus": report.gpus,
            "joules": report.joules,
            **own,
        }


def _until(spans: billing.Spans, worker: Worker, ended: float | None) -> billing.Spans:
    """Spans for the picture: what a worker that has died had in hand is lost."""
    if ended is None or not worker.open:
        return spans
    return [(a, b, "lost" if kind == "busy" and unit in worker.open else kind, unit) for a, b, kind, unit in spans]


def _add(total: dict[str, float], own: dict[str, float]) -> None:
    for name, value in own.items():
        total[name] += value


def _whole(counts: dict[str, float]) -> dict[str, Any]:
    return {name: value if name == "seconds" else int(value) for name, value in counts.items()}


# ------------------------------------------------------------------------------------------------------------- the file


def from_tree(tree: dict[str, Any], **settings: Any) -> Book:
    """The book that a file was written from. Raises KeyError, TypeError, ValueError when it is not one."""
    book = Book(session=tree["session"], began=tree["began"], **settings)
    for own in tree["nodes"]:
        kept = {key: value for key, value in own.items() if key not in ("seconds", "usd", "came")}
        book.nodes[own["node"]] = Node(**{**kept, "began": own["came"]})
    for own in tree["workers"]:
        report = Report(
            worker=own["worker"],
            node=own["node"],
            pid=own["pid"],
            sequence=own["sequence"],
            began=own["began"],
            heard=own["heard"],
            seconds=Seconds(**own["seconds"]),
            open={unit: (busy[0], busy[1]) for unit, busy in own["open"].items()},
            spans=[(a, b, kind, unit) for a, b, kind, unit in own["spans"]],
            categories=own["categories"],
            method=own["method"],
            ok=own["ok"],
            failed=own["failed"],
            gpus=own["gpus"],
            joules=own["joules"],
        )
        book.take(report)
    book.shares = [(at, runs) for at, runs in tree["shares"]]
    book.series, book.notes = tree["series"], tree["notes"]
    book.until, book.final = tree["until"], tree["final"]
    return book


def read(output: str, session: str) -> dict[str, Any] | None:
    """A session's bill as it stands in its file; None where there is none. Raises ValueError when it is damaged."""
    try:
        found = json.loads(storage.read(path(output, session)))
    except FileNotFoundError:
        return None
    if not isinstance(found, dict) or "usd" not in found:
        raise ValueError(f"{path(output, session)}: not a bill of raypd")
    return found


def write(output: str, tree: dict[str, Any]) -> None:
    """Puts a bill's file whole. Raises OSError."""
    storage.put(path(output, tree["session"]), (json.dumps(tree) + "\n").encode())


def bills(output: str, now: float | None = None) -> list[dict[str, Any]]:
    """The bills of all sessions, the oldest first; damaged files are left out.

    now: a bill that is not final and has not moved for a minute before it is of a session that died; what its workers
    had in hand is then lost.
    """
    found = []
    for name in storage.names(folder(output)):
        if not name.endswith(".json"):
            continue
        with contextlib.suppress(ValueError):
            tree = read(output, name.removesuffix(".json"))
            if tree is not None:
                found.append(settled(tree, now) if now is not None else tree)
    return sorted(found, key=lambda tree: float(tree["began"]))


def settled(tree: dict[str, Any], now: float) -> dict[str, Any]:
    """A bill of a session that has died, closed at its last word; any other as it is."""
    if tree["final"] or now - tree["until"] < _STALE_SECONDS:
        return tree
    try:
        book = from_tree(tree, budget_usd=tree["budget_usd"], deadline=tree["deadline"])
    except (KeyError, TypeError, ValueError):
        return tree
    book.close(book.until)
    return {**book.tree(book.until), "energy": tree["energy"]}


def reconcile(tree: dict[str, Any], units: Iterable[UnitSummary]) -> bool:
    """Brings the documents and tokens of a closed bill up to those of the session's committed units; whether it had to.

    A worker that dies between a commit and its report leaves the bill without that unit's counts. units: summaries
    (UnitSummary); those of a raypd that did not count by category leave the bill as it is.
    """
    units = list(units)
    if not all(unit.categories for unit in units if unit.documents):
        return False
    totals = {
        "documents": sum(unit.documents for unit in units),
        "ok": sum(unit.ok for unit in units),
        "failed": sum(unit.failed for unit in units),
        **{name: sum(unit.counts.get(name, 0) for unit in units) for name in COUNTS[1:]},
    }
    if totals == tree["totals"]:
        return False
    categories: dict[str, dict[str, float]] = {}
    for unit in units:
        for name, own in unit.categories.items():
            _add(categories.setdefault(name, zero()), own)
    total = round(tree["usd"] * billing.MICRO)
    tree["totals"] = totals
    tree["categories"] = billing.shared_out(total, {name: _whole(own) for name, own in sorted(categories.items())})
    if len(tree["methods"]) <= 1:  # a run has one
        whole = zero()
        for own in categories.values():
            _add(whole, own)
        method = next(iter(tree["methods"]), "")
        tree["methods"] = billing.shared_out(total, {method: _whole(whole)}) if method else {}
    return True


def of_run(output: str, units: Iterable[UnitSummary]) -> dict[str, Any] | None:
    """The bills of all sessions, summed; their documents and tokens are those that the committed objects hold."""
    own: dict[str, list[UnitSummary]] = {}
    for unit in units:
        own.setdefault(unit.session, []).append(unit)
    found = bills(output, time.time())
    for tree in found:
        if tree["final"] and reconcile(tree, own.get(tree["session"], [])):
            write(output, tree)
    return summed(found)


def spent(output: str, but: str | None = None) -> float:
    """USD of all sessions together, without session `but`."""
    return round(sum(tree["usd"] for tree in bills(output) if tree["session"] != but), 6)


def summed(trees: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The run's bill: its sessions' together, as the manifest holds it; None without any."""
    found = list(trees)
    if not found:
        return None
    usd = round(sum(tree["usd"] for tree in found), 6)
    documents = sum(tree["totals"]["documents"] for tree in found)
    parts = {name: round(sum(tree["parts"].get(name, 0) for tree in found), 6) for name in billing.PARTS}
    kwh = [tree["energy"]["kwh"] for tree in found if tree["energy"]["kwh"] is not None]
    co2e = [tree["energy"]["co2e_kg"] for tree in found if tree["energy"]["co2e_kg"] is not None]
    return {
        "usd": usd,
        "usd_per_1000_documents": round(1000 * usd / documents, 6) if documents else None,
        "parts": parts,
        "seconds": {n: round(sum(t["seconds"].get(n, 0) for t in found), 3) for n in billing.PARTS},
        "sessions": len(found),
        "documents": documents,
        "kwh": round(sum(kwh), 6) if kwh else None,
        "co2e_kg": round(sum(co2e), 6) if co2e else None,
        "prices": sorted({node["price_source"] for tree in found for node in tree["nodes"]}),
        "notes": sorted({note for tree in found for note in tree["notes"]}),
    }
