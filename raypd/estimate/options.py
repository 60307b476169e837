"""The options of `raypd estimate`."""

from __future__ import annotations

from dataclasses import dataclass

from raypd.estimate.machines import HEAD, known_type


@dataclass
class EstimateOptions:
    """Of the command line. sample: documents that are decoded; minutes: most time for that; nodes: table's last column.

    throughput, baseline_throughput: `[GPU=]RATE`, documents a second of one GPU. instances: the only types of the
    table. head: instance type of the head node, "none" for no head. Raises ConfigError at an unknown instance type.
    """

    sample: int = 64
    minutes: float | None = None
    baseline: bool = True
    run: str | None = None
    throughput: list[str] | None = None
    baseline_throughput: list[str] | None = None
    documents: float | None = None
    instances: list[str] | None = None
    nodes: int = 8
    head: str = HEAD
    seed: int = 0

    def __post_init__(self) -> None:
        for name in [*(self.instances or []), *([self.head] if self.head != "none" else [])]:
            known_type(name)
