"""Live metrics of a run for Prometheus, exported through Ray.

They are a view of the ledger and never the source of truth. Ray exports each metric as `ray_` and
its name (counters also get the suffix `_total`) from the ledger's node. infra/grafana/raypd.json
draws them.
"""

from collections import Counter
from collections.abc import Mapping

from raypd.billing import Bill

COUNTERS = {  # name: (description, the tag besides `run`)
    "raypd_documents": ("Documents that were committed, by status", "status"),
    "raypd_tokens": ("Tokens, by kind: prefill, shared (taken from the cache), decode", "kind"),
    "raypd_category_documents": ("Documents that were committed, by category", "category"),
}
GAUGES = {
    "raypd_cost_usd": ("The bill so far, by part", "part"),
    "raypd_budget_usd": ("cost.budget_usd; no series if it is not set", ""),
    "raypd_nodes": ("Nodes that are billed, by market", "market"),
    "raypd_workers": ("Workers by state: startup, busy, idle", "state"),
}


class Metrics:
    """The metrics of a run in this process.

    Args:
        run: The value of the tag `run`.
    """

    def __init__(self, run: str) -> None:
        from ray.util import metrics

        self._run = run
        self._shown: dict[tuple[str, str], float] = {}
        self._counters = {}
        for name, (description, tag) in COUNTERS.items():
            self._counters[name] = metrics.Counter(name, description, ("run", tag))
        self._gauges = {}
        for name, (description, tag) in GAUGES.items():
            tags = ("run", tag) if tag else ("run",)
            self._gauges[name] = metrics.Gauge(name, description, tags)

    def show(self, bill: Bill) -> None:
        """Update the metrics from a session's bill."""
        totals = bill.totals
        self._count("raypd_documents", {status: totals[status] for status in ("ok", "failed")})
        self._count(
            "raypd_tokens",
            {kind: totals[f"{kind}_tokens"] for kind in ("prefill", "shared", "decode")},
        )
        documents: Counter[str] = Counter()
        for key, counts in bill.categories.items():
            documents[key.category] += int(counts["documents"])
        self._count("raypd_category_documents", documents)
        self._set("raypd_cost_usd", bill.parts)
        if bill.budget_usd is not None:
            self._set("raypd_budget_usd", {"": bill.budget_usd})
        self._set("raypd_nodes", Counter(node.market for node in bill.nodes if node.ended is None))
        states = Counter(worker.state for worker in bill.workers)
        states.pop("ended", None)
        self._set("raypd_workers", states)

    def _count(self, name: str, values: Mapping[str, float]) -> None:
        """Increase the counters of a metric to the given totals, by the value of its tag."""
        tag = COUNTERS[name][1]
        for value, total in values.items():
            increase = total - self._shown.get((name, value), 0)
            # A counter never decreases.
            if increase > 0:
                self._counters[name].inc(increase, {"run": self._run, tag: value})
                self._shown[name, value] = total

    def _set(self, name: str, values: Mapping[str, float]) -> None:
        """Set the gauges of a metric; those that no longer have a value are set to 0."""
        tag = GAUGES[name][1]
        vanished = {
            value: 0.0 for shown, value in self._shown if shown == name and value not in values
        }
        for value, amount in {**vanished, **values}.items():
            tags = {"run": self._run}
            if tag:
                tags[tag] = value
            self._gauges[name].set(amount, tags)
            self._shown[name, value] = amount
