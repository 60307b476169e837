"""The estimate that stands in a run's folder (`raypd estimate` writes it), and how the run's bill held against it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from raypd.report.ledger import RunBill
from raypd.run.records import NodeTime


@dataclass(frozen=True)
class Figure:
    """An estimated quantity with the ends of its 95% interval; None where the estimate could not tell them."""

    value: float
    low: float | None
    high: float | None

    @property
    def counted(self) -> bool:
        """Whether it was counted or given, not estimated."""
        return self.low == self.value == self.high

    def holds(self, value: float) -> bool | None:
        """Whether a value lies in the interval; None without one."""
        return None if self.low is None or self.high is None else self.low <= value <= self.high


@dataclass
class Speed:
    """Of one worker. tokens: of one document, by kind. gain: times autoregressive decoding."""

    method: str
    gpu: str | None
    source: str
    per_second: Figure
    gain: Figure | None
    tokens: dict[str, Figure]


@dataclass
class Nodes:
    """The whole corpus on a number of nodes. hours: from the first start to the last end; usd: the whole bill."""

    nodes: int
    hours: Figure
    gpu_hours: Figure
    usd: Figure


@dataclass
class Machine:
    """One kind of node. per_1000, baseline_per_1000: USD of decoding alone; saved: USD over the corpus."""

    name: str
    instance_type: str | None
    market: str
    usd_per_hour: float
    per_1000: Figure
    baseline_per_1000: Figure | None
    saved: Figure | None
    bills: list[Nodes]


@dataclass
class Forecast:
    """An estimate as it was written. created: unix seconds. not_measured: GPU -> instance types."""

    fingerprint: str | None
    model: str | None
    task: str | None
    created: float
    documents: Figure
    speeds: list[Speed]
    baseline: list[Speed]
    machines: list[Machine]
    not_measured: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)


def forecast_of(tree: dict[str, Any]) -> Forecast:
    """Raises KeyError, TypeError, ValueError when it is no estimate."""
    return Forecast(
        fingerprint=_text(tree.get("fingerprint")),
        model=_text(tree.get("model")),
        task=_text(tree.get("task")),
        created=datetime.fromisoformat(tree["created"]).timestamp(),
        documents=_figure(tree["documents"]),
        speeds=[_speed(one) for one in tree["speeds"]],
        baseline=[_speed(one) for one in tree["baseline"]],
        machines=[_machine(one) for one in tree["machines"]],
        not_measured={str(gpu): [str(name) for name in names] for gpu, names in tree["not_measured"].items()},
        notes=list(dict.fromkeys(str(note) for note in tree["notes"])),
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _figure(tree: dict[str, Any]) -> Figure:
    low, high = tree.get("low"), tree.get("high")
    return Figure(float(tree["value"]), None if low is None else float(low), None if high is None else float(high))


def _optional(tree: dict[str, Any] | None) -> Figure | None:
    return None if tree is None else _figure(tree)


def _speed(tree: dict[str, Any]) -> Speed:
    tokens = {str(kind): _figure(one) for kind, one in tree["tokens_per_document"].items()}
    gain = _optional(tree.get("times_autoregressive"))
    per_second = _figure(tree["documents_per_second"])
    return Speed(str(tree["method"]), _text(tree["gpu"]), str(tree["source"]), per_second, gain, tokens)


def _machine(tree: dict[str, Any]) -> Machine:
    bills = [
        Nodes(int(one["nodes"]), _figure(one["hours"]), _figure(one["gpu_hours"]), _figure(one["usd"]))
        for one in tree["bills"]
    ]
    return Machine(
        name=str(tree["name"]),
        instance_type=_text(tree.get("instance_type")),
        market=str(tree["market"]),
        usd_per_hour=float(tree["usd_per_hour"]),
        per_1000=_figure(tree["usd_per_1000"]),
        baseline_per_1000=_optional(tree["baseline_usd_per_1000"]),
        saved=_optional(tree["saved_usd"]),
        bills=bills,
    )


# ------------------------------------------------------------------------------------------------- against a real bill


@dataclass
class Held:
    """The part of an estimate that is about the machines of the run. nodes: as many as the run had at a time."""

    machine: Machine
    bill: Nodes
    nodes: int


def held(forecast: Forecast, bill: RunBill) -> Held | None:
    """What was estimated for the kind and number of machines that the run's workers had; None where nothing was."""
    with_workers = {worker.node for worker in bill.workers}
    nodes = [node for node in bill.nodes if node.node in with_workers] or bill.nodes
    kinds = {node.instance_type for node in nodes}
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    machine = next((one for one in forecast.machines if one.instance_type == kind and one.bills), None)
    if machine is None:
        return None
    count = _most_at_once(nodes, bill.newest.until)
    nearest = min(machine.bills, key=lambda one: abs(math.log(one.nodes / count)))
    return Held(machine, nearest, count)


def _most_at_once(nodes: Sequence[NodeTime], until: float) -> int:
    """The most machines that were there at the same time, 1 at least."""

    def changes() -> Iterator[tuple[float, int]]:
        for node in nodes:
            yield node.began, 1
            yield until if node.ended is None else node.ended, -1

    there = most = 0
    for _, change in sorted(changes()):
        there += change
        most = max(most, there)
    return max(1, most)
