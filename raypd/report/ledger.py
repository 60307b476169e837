"""The bill of a run: those of its sessions and retries together."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from raypd import storage
from raypd.billing import book
from raypd.billing.bill import Bill, NodeTime
from raypd.billing.meter import WorkerTime, added
from raypd.run import layout
from raypd.run.usage import RunCost

_PART_NAMES = {
    "decode": "decoding answers",
    "prefill": "reading prompts",
    "startup": "starting workers",
    "idle": "idle workers",
    "lost": "work that was lost",
    "head": "the head machine",
    "other": "everything else",
    "endpoint": "tokens of the model's server",
    "retry": "trying failed documents again",
}


@dataclass
class RunBill:
    """The bills of a run's sessions, oldest first, and of its retries."""

    sessions: list[Bill]
    retries: list[Bill] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)  # files that cannot be read

    def __post_init__(self) -> None:
        self.all = [*self.sessions, *self.retries]
        self.newest = self.sessions[-1] if self.sessions else Bill("", 0.0, 0.0, final=True)
        self.cost = book.summed(self.sessions) or RunCost(0.0)
        self.usd = sum(bill.usd for bill in self.all)
        self.parts = dict(self.cost.parts)
        if self.retries:  # all that they took, since their documents were there already
            self.parts["retry"] = sum(bill.usd for bill in self.retries)
        self.spent = {_PART_NAMES[name]: usd for name, usd in self.parts.items() if usd}
        categories = added(each for bill in self.sessions for each in bill.categories.items())
        self.categories = {str(key): counts for key, counts in categories.items()}
        nodes = ((node, bill.until) for bill in self.all for node in bill.nodes)
        # Each with an end: where it is there, how far the bill of its session goes.
        self.nodes = [
            replace(node, ended=until if node.ended is None else node.ended)
            for node, until in nodes
        ]

    @property
    def machines(self) -> list[tuple[tuple[str, str, float, str], list[NodeTime]]]:
        """((kind, market, USD per hour, where that is from), nodes): those of one kind together,
        the dearest first.
        """
        groups: dict[tuple[str, str, float, str], list[NodeTime]] = {}
        for node in self.nodes:
            kind = node.instance_type or (
                "local machine" if node.market == "local" else "machine of unknown type"
            )
            place = f" in {node.region}" if node.region else ""
            groups.setdefault(
                (kind + place, node.market, node.usd_per_hour, node.price_source), []
            ).append(node)
        return sorted(groups.items(), key=lambda group: -sum(node.usd for node in group[1]))

    @property
    def workers(self) -> list[WorkerTime]:
        """Of the sessions, each with an end."""
        pairs = [(worker, bill.until) for bill in self.sessions for worker in bill.workers]
        return [
            replace(worker, ended=until if worker.ended is None else worker.ended)
            for worker, until in pairs
        ]

    @property
    def series(self) -> list[tuple[float, float]]:
        """(time, USD of all sessions by then)."""
        before = accumulate((bill.usd for bill in self.all), initial=0.0)
        series = [bill.series for bill in self.sessions] + [
            [[bill.until, bill.usd]] for bill in self.retries
        ]
        return [
            (time, spent + usd)
            for points, spent in zip(series, before, strict=False)
            for time, usd, *_ in points
        ]


def read_bill(runs: Sequence[str]) -> RunBill | None:
    """The bill of some runs together, None where none was kept.

    Raises OSError when storage does not answer.
    """
    folders = [storage.join(run, layout.RETRIES) for run in runs]
    retries, torn = book.read_bills(
        [storage.join(folder, name) for folder in folders for name in storage.folders(folder)]
    )
    sessions, torn_sessions = book.read_bills(runs)
    # The bills of a retry that has ended are copied into the run's own.
    retried = {bill.session for bill in retries}
    sessions = [bill for bill in sessions if bill.session not in retried]
    torn += torn_sessions
    return RunBill(sessions, retries, torn) if sessions or torn else None
