"""The bill of a run: one file a session below ledger/, added up; one that is torn is named."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from raypd import storage
from raypd.run import layout


@dataclass(frozen=True)
class Point:
    """Money and documents up to a time (unix seconds), all sessions so far together."""

    at: float
    usd: float
    documents: int


@dataclass
class Share:
    """What a category or a method took."""

    name: str
    documents: int = 0
    usd: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass
class Node:
    """A machine of the bill; times are unix seconds."""

    id: str
    instance_type: str | None
    market: str
    region: str | None
    usd_per_hour: float
    source: str
    began: float
    ended: float | None
    seconds: float
    usd: float
    gpus: float


@dataclass
class Worker:
    """A decode worker and what it did when: (began, ended, kind), kind startup, busy, idle or lost."""

    id: str
    node: str
    session: str
    began: float
    ended: float
    gone: bool  # it has ended; else `ended` is when it was last heard of
    spans: list[tuple[float, float, str]]

    def seconds(self, kind: str) -> float:
        return sum(ended - began for began, ended, what in self.spans if what == kind)

    @property
    def busy(self) -> float:
        """The share of its time in which it answered documents, 0 to 1."""
        return self.seconds("busy") / max(self.ended - self.began, 1e-9)


@dataclass
class Bill:
    """All sessions of a run. `until`: when the newest figures were written (unix seconds)."""

    usd: float = 0.0
    until: float = 0.0
    final: bool = True
    budget_usd: float | None = None
    deadline: str | None = None
    kwh: float | None = None
    co2e_kg: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    categories: list[Share] = field(default_factory=list)
    methods: list[Share] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    series: list[Point] = field(default_factory=list)
    sessions: dict[str, float] = field(default_factory=dict)  # USD of each
    began: dict[str, float] = field(default_factory=dict)  # of each session
    heard: dict[str, float] = field(default_factory=dict)  # when each session's bill was last written
    notes: list[str] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)  # files that cannot be read


def read_bill(root: str) -> Bill | None:
    """The bill of the run at `root`, None where none was kept. Raises OSError when storage does not answer.

    What it cost to try failed documents again (runs of their own below retries/) stands on it as the part `retry`.
    """
    torn: list[str] = []
    bill = add_up(_files(root, torn), torn)
    folder = storage.join(root, layout.RETRIES)
    for number in storage.folders(folder):
        for tree in _files(storage.join(folder, number), torn):
            _add_retry(bill, tree)
    return bill if bill.began or torn else None


def _files(root: str, torn: list[str]) -> list[dict[str, Any]]:
    """The bills of a run's sessions; paths of those that cannot be read go to `torn`."""
    folder = storage.join(root, layout.LEDGER)
    trees = []
    for name in storage.names(folder):
        if not name.endswith(".json"):
            continue
        path = storage.join(folder, name)
        try:
            tree = json.loads(storage.read(path))
            float(tree["usd"]), float(tree["began"]), str(tree["session"])
            trees.append(tree)
        except (ValueError, KeyError, TypeError):
            torn.append(path)
    return trees


def _add_retry(bill: Bill, tree: dict[str, Any]) -> None:
    usd, until = float(tree["usd"]), float(tree.get("until") or tree["began"])
    bill.usd += usd
    bill.parts["retry"] = bill.parts.get("retry", 0.0) + usd
    bill.nodes += [_node(n, until) for n in tree.get("nodes") or []]
    documents = bill.series[-1].documents if bill.series else 0
    bill.series.append(Point(until, bill.usd, documents))


def add_up(trees: Iterable[dict[str, Any]], torn: list[str] | None = None) -> Bill:
    """One bill of the files of all sessions."""
    bill = Bill(torn=torn or [])
    categories: dict[str, Share] = {}
    methods: dict[str, Share] = {}
    documents = 0
    for tree in sorted(trees, key=lambda t: float(t["began"])):
        session = str(tree["session"])
        for point in tree.get("series") or []:
            bill.series.append(Point(float(point[0]), bill.usd + float(point[1]), documents + int(point[2])))
        bill.usd += float(tree["usd"])
        bill.sessions[session] = float(tree["usd"])
        bill.began[session] = float(tree["began"])
        bill.heard[session] = float(tree.get("until") or tree["began"])
        bill.until = max(bill.until, bill.heard[session])
        bill.notes += [str(note) for note in tree.get("notes") or [] if note not in bill.notes]
        bill.final = bool(tree.get("final"))
        bill.budget_usd = _optional(tree.get("budget_usd"))  # the newest session's: a resumption may raise it
        bill.deadline = tree.get("deadline")
        for name, usd in (tree.get("parts") or {}).items():
            bill.parts[str(name)] = bill.parts.get(str(name), 0.0) + float(usd)
        _add_shares(categories, tree.get("categories"))
        _add_shares(methods, tree.get("methods"))
        bill.nodes += [_node(n, bill.until) for n in tree.get("nodes") or []]
        bill.workers += [_worker(w, session, bill.until) for w in tree.get("workers") or []]
        for name, value in (tree.get("totals") or {}).items():
            bill.totals[str(name)] = bill.totals.get(str(name), 0) + int(value or 0)
        energy = tree.get("energy") or {}
        bill.kwh = _plus(bill.kwh, energy.get("kwh"))
        bill.co2e_kg = _plus(bill.co2e_kg, energy.get("co2e_kg"))
        documents += int((tree.get("totals") or {}).get("documents") or 0)
    bill.categories = sorted(categories.values(), key=lambda s: -s.usd)
    bill.methods = sorted(methods.values(), key=lambda s: -s.usd)
    return bill


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def _plus(so_far: float | None, more: Any) -> float | None:
    return so_far if more is None else (so_far or 0.0) + float(more)


def _add_shares(into: dict[str, Share], tree: Any) -> None:
    for name, figures in (tree or {}).items():
        one = into.setdefault(str(name), Share(str(name)))
        one.documents += int(figures.get("documents") or 0)
        one.usd += float(figures.get("usd") or 0)
        one.prefill_tokens += int(figures.get("prefill_tokens") or 0)
        one.decode_tokens += int(figures.get("decode_tokens") or 0)


def _node(tree: dict[str, Any], until: float) -> Node:
    began, ended = float(tree["began"]), _optional(tree.get("ended"))
    return Node(
        id=str(tree["node"]),
        instance_type=tree.get("instance_type"),
        market=str(tree.get("market") or "local"),
        region=tree.get("region"),
        usd_per_hour=float(tree.get("usd_per_hour") or 0),
        source=str(tree.get("price_source") or ""),
        began=began,
        ended=ended,
        seconds=float(tree.get("seconds") or (ended or until) - began),
        usd=float(tree.get("usd") or 0),
        gpus=float(tree.get("gpus") or 0),
    )


def _worker(tree: dict[str, Any], session: str, until: float) -> Worker:
    began, ended = float(tree["began"]), _optional(tree.get("ended"))
    spans = sorted(
        (float(s[0]), float(s[1]) if s[1] is not None else until, str(s[2])) for s in tree.get("spans") or []
    )
    return Worker(
        str(tree["worker"]), str(tree.get("node") or ""), session, began, ended or until, ended is not None, spans
    )
