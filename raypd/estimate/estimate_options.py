"""The options of `raypd estimate`, as they were typed and checked (`estimate_command` reads them)."""

from __future__ import annotations

from dataclasses import dataclass, field

HEAD = "m7i.2xlarge"  # as infra/cluster.yaml has it


@dataclass(frozen=True)
class Given:
    """Documents a second of one GPU, as the user says. gpu "": that of the instance types asked for."""

    gpu: str
    per_second: float


@dataclass
class Options:
    """Of the command line. sample: documents that are decoded; minutes: most time for that; nodes: table's last column.

    instances: the only types of the table. head: instance type of the head node, "none" for no head.
    """

    sample: int = 64
    minutes: float | None = None
    baseline: bool = True
    run: str | None = None
    throughput: list[Given] = field(default_factory=list)
    baseline_throughput: list[Given] = field(default_factory=list)
    documents: int | None = None
    instances: list[str] = field(default_factory=list)
    nodes: int = 8
    head: str = HEAD
    seed: int = 0
