"""Live metrics of a run for Prometheus, through Ray: a view of the ledger, never the truth.

Ray exports each as `ray_` + its name (counters + `_total`) from the ledger's node;
infra/grafana/raypd.json draws them.
"""

from collections import Counter
from collections.abc import Mapping

from raypd.run.records import Bill

COUNTERS = {  # name: (what it counts, the tag beside `run`)
    "raypd_documents": ("Documents that were committed, by status", "status"),
    "raypd_tokens": ("Tokens, by kind: prefill, shared (taken from the cache), decode", "kind"),
    "raypd_category_documents": ("Documents that were committed, by category", "category"),
}
GAUGES = {
    "raypd_cost_usd": ("The bill so far, by part", "part"),
    "raypd_budget_usd": ("cost.budget_usd; no series where there is none", ""),
    "raypd_nodes": ("Nodes that are billed, by market", "market"),
    "raypd_workers": ("Workers, by what they do: startup, busy, idle", "state"),
}


class Metrics:
    """A run's metrics in this process. run: the value of the tag `run`."""

    def __init__(self, run: str) -> None:
        from ray.util import metrics

        self._run = run
        self._shown: dict[tuple[str, str], float] = {}
        tags = {
            name: ("run", tag) if tag else ("run",)
            for name, (_, tag) in (COUNTERS | GAUGES).items()
        }
        self._counters = {
            name: metrics.Counter(name, text, tags[name]) for name, (text, _) in COUNTERS.items()
        }
        self._gauges = {
            name: metrics.Gauge(name, text, tags[name]) for name, (text, _) in GAUGES.items()
        }

    def show(self, bill: Bill) -> None:
        """Brings the metrics up to a session's bill."""
        totals = bill.totals
        self._count("raypd_documents", {status: totals[status] for status in ("ok", "failed")})
        self._count(
            "raypd_tokens",
            {kind: totals[f"{kind}_tokens"] for kind in ("prefill", "shared", "decode")},
        )
        self._count(
            "raypd_category_documents",
            {name: counts["documents"] for name, counts in bill.categories.items()},
        )
        self._set("raypd_cost_usd", bill.parts)
        if bill.budget_usd is not None:
            self._set("raypd_budget_usd", {"": bill.budget_usd})
        self._set("raypd_nodes", Counter(node.market for node in bill.nodes if node.ended is None))
        states = Counter(worker.state for worker in bill.workers)
        states.pop("ended", None)
        self._set("raypd_workers", states)

    def _count(self, name: str, values: Mapping[str, float]) -> None:
        tag = COUNTERS[name][1]
        for value, total in values.items():
            increase = total - self._shown.get((name, value), 0)
            if increase > 0:  # a counter never falls
                self._counters[name].inc(increase, {"run": self._run, tag: value})
                self._shown[name, value] = total

    def _set(self, name: str, values: Mapping[str, float]) -> None:
        tag = GAUGES[name][1]
        gone = {value: 0.0 for n, value in self._shown if n == name and value not in values}
        for value, amount in {**gone, **values}.items():
            self._gauges[name].set(amount, {"run": self._run, **({tag: value} if tag else {})})
            self._shown[name, value] = amount
