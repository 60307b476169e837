"""The bill of a run, which combines the bills of its sessions and retries."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from raypd import storage
from raypd.billing import Bill, NodeTime, WorkerTime, added, book
from raypd.config import UNNAMED_CATEGORY
from raypd.run import RunCost, UsageKey, layout

_Time = TypeVar("_Time", NodeTime, WorkerTime)
# Unnamed categories: of documents that failed before they had a category, and of all others.
_UNNAMED = ("", UNNAMED_CATEGORY)
_PART_NAMES = {
    "decode": "decoding answers",
    "prefill": "reading prompts",
    "startup": "starting workers",
    "idle": "idle workers",
    "lost": "work that was lost",
    "head": "the head machine",
    "other": "everything else",
    "endpoint": "tokens of the model's server",
    "retry": "retrying failed documents",
}


@dataclass
class RunBill:
    """The bills of a run's sessions, the oldest first, and of its retries.

    Attributes:
        sessions: The bills of sessions.
        retries: The bills of retries.
        torn: Files that cannot be read.
        all: All bills.
        newest: The bill of the last session.
        cost: The cost of all sessions.
        usd: The price of everything.
        parts: USD by part, with retries as a single part.
        spent: USD by part in words.
        categories: Tokens by category, and by model if no category has a name.
        nodes: All nodes; a node without an end gets the end of its session's bill.
    """

    sessions: list[Bill]
    retries: list[Bill] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all = [*self.sessions, *self.retries]
        self.newest = Bill("", 0.0, 0.0, final=True)
        if self.sessions:
            self.newest = self.sessions[-1]
        self.cost = book.summed(self.sessions) or RunCost(0.0)
        self.usd = sum(bill.usd for bill in self.all)
        self.parts = dict(self.cost.parts)
        if self.retries:
            # The sessions already count the documents of a retry.
            self.parts["retry"] = sum(bill.usd for bill in self.retries)
        self.spent = {_PART_NAMES[name]: usd for name, usd in self.parts.items() if usd}
        categories = added(
            category for bill in self.sessions for category in bill.categories.items()
        )
        self.has_categories = any(key.category not in _UNNAMED for key in categories)
        if not self.has_categories:
            categories = added(
                (UsageKey("", key.model), counts) for key, counts in categories.items()
            )
        self.categories = {self._name(key): counts for key, counts in categories.items()}
        self.nodes = [_with_end(node, bill.until) for bill in self.all for node in bill.nodes]

    def _name(self, key: UsageKey) -> str:
        """Return the name of a category and a model on the page."""
        if self.has_categories:
            return str(key)
        return f"{key.model} model"

    @property
    def machines(self) -> list[tuple[tuple[str, str, float, str], list[NodeTime]]]:
        """Nodes by kind, dearest first: ((kind, market, USD per hour, price source), nodes)."""
        groups: dict[tuple[str, str, float, str], list[NodeTime]] = {}
        for node in self.nodes:
            kind = node.instance_type
            if not kind and node.market == "local":
                kind = "local machine"
            elif not kind:
                kind = "machine of unknown type"
            if node.region:
                kind += f" in {node.region}"
            key = (kind, node.market, node.usd_per_hour, node.price_source)
            groups.setdefault(key, []).append(node)
        return sorted(groups.items(), key=lambda group: -sum(node.usd for node in group[1]))

    @property
    def workers(self) -> list[WorkerTime]:
        """The workers of sessions, each with an end time."""
        return [_with_end(worker, bill.until) for bill in self.sessions for worker in bill.workers]

    @property
    def series(self) -> list[tuple[float, float]]:
        """Points (time, USD of all sessions until then)."""
        points = []
        earlier_usd = 0.0
        for bill in self.sessions:
            for time, usd, *_ in bill.series:
                points.append((time, earlier_usd + usd))
            earlier_usd += bill.usd
        for bill in self.retries:
            earlier_usd += bill.usd
            points.append((bill.until, earlier_usd))
        return points


def _with_end(time: _Time, until: float) -> _Time:
    """Return the time of a node or worker, which ends no later than its bill."""
    if time.ended is not None:
        return time
    return replace(time, ended=until)


def read_bill(runs: Sequence[str]) -> RunBill | None:
    """Read the bills of runs.

    Raises:
        OSError: The storage does not respond.
    """
    retry_folders = []
    for run in runs:
        folder = storage.join(run, layout.RETRIES)
        retry_folders += [storage.join(folder, name) for name in storage.folders(folder)]
    retries, torn_retries = book.read_bills(retry_folders)
    sessions, torn_sessions = book.read_bills(runs)
    torn = torn_retries + torn_sessions
    # The bills of a completed retry are copied into the bills of the run.
    retried = {bill.session for bill in retries}
    sessions = [bill for bill in sessions if bill.session not in retried]
    if not sessions and not torn:
        return None
    return RunBill(sessions, retries, torn)
