"""The options of `raypd estimate`, checked."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from raypd.billing import prices
from raypd.errors import ConfigError
from raypd.estimate.machines import HEAD, gpu_kind


@dataclass(frozen=True)
class GivenSpeed:
    """Documents a second of one GPU, as the user states it. gpu "": that of the instance types asked for."""

    gpu: str
    per_second: float


@dataclass
class EstimateOptions:
    """Of the command line. sample: documents that are decoded; minutes: most time for that; nodes: table's last column.

    instances: the only types of the table. head: instance type of the head node, "none" for no head.
    """

    sample: int = 64
    minutes: float | None = None
    baseline: bool = True
    run: str | None = None
    throughput: list[GivenSpeed] = field(default_factory=list)
    baseline_throughput: list[GivenSpeed] = field(default_factory=list)
    documents: int | None = None
    instances: list[str] = field(default_factory=list)
    nodes: int = 8
    head: str = HEAD
    seed: int = 0


def parse(
    *,
    throughput: list[str] | None = None,
    baseline_throughput: list[str] | None = None,
    documents: float | None = None,
    instances: list[str] | None = None,
    head: str = HEAD,
    **more: Any,
) -> EstimateOptions:
    """The options as they were typed. Raises ConfigError at an unknown instance type or GPU, or what is no rate."""
    for name in [*(instances or []), *([head] if head != "none" else [])]:
        if name not in prices.INSTANCES:
            near = difflib.get_close_matches(name, prices.INSTANCES, 1)
            hint = f"; did you mean {near[0]}?" if near else "; `raypd prices show` lists those that are known"
            raise ConfigError(f"{name}: no such instance type{hint}")
    return EstimateOptions(
        throughput=[_speed("--throughput", text) for text in throughput or []],
        baseline_throughput=[_speed("--baseline", text) for text in baseline_throughput or []],
        documents=None if documents is None else int(documents),
        instances=instances or [],
        head=head,
        **more,
    )


def _speed(option: str, text: str) -> GivenSpeed:
    gpu, _, rate = text.rpartition("=")
    known = {gpu_kind(i.gpu, i.gpu_memory_gib) for i in prices.INSTANCES.values() if i.gpu}
    if gpu and gpu not in known:
        raise ConfigError(f"{option} {text}: no instance type has a {gpu}; choose from {', '.join(sorted(known))}")
    try:
        per_second = float(rate)
    except ValueError:
        per_second = 0.0
    if not 0 < per_second < float("inf"):
        raise ConfigError(f"{option} {text}: give documents per second of one GPU, as in {option} L40S=6.28")
    return GivenSpeed(gpu, per_second)
