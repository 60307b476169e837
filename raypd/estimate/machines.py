"""Which machines a speed holds for, and what the corpus takes and costs on them.

A speed holds for the GPU that it was measured on and for no other: an instance type with another GPU gets no figure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from raypd.billing import prices
from raypd.config import CostConfig, RunConfig
from raypd.estimate import estimation
from raypd.estimate.estimate_options import Options
from raypd.estimate.estimate_result import Estimate, Row
from raypd.estimate.estimation import Machines, Mean, Speed, Surroundings


def assemble(
    config: RunConfig | None,
    options: Options,
    documents: Mean,
    ours: Sequence[Speed],
    baseline: Sequence[Speed],
    startup_seconds: float | None,
    notes: list[str],
) -> Estimate:
    """The speeds on every machine that they hold for."""
    cost = config.cost if config is not None else CostConfig()
    around = Surroundings(startup_seconds, config.cluster.unit_documents if config is not None else 0)
    rows: list[Row] = []
    for speed in ours:
        theirs = next((one for one in baseline if one.gpu == speed.gpu), None)
        kinds = _with_gpu(speed.gpu, options, cost, notes) if speed.gpu is not None else []
        nodes = _nodes(options.nodes)
        if not kinds and speed.machine is not None and config is not None:
            kinds, nodes = [here(config, speed.machine)], [1]
        for machines in kinds:
            bills = [estimation.bill(documents, speed, machines, count, around) for count in nodes]
            gain = estimation.saved(documents, speed, theirs, machines) if theirs is not None else None
            rows.append(Row(machines, speed, theirs, bills, gain))
    rows.sort(key=lambda row: (estimation.usd_per_1000(row.ours, row.machines).value, row.machines.workers))
    notes = notes + _machine_notes(rows, startup_seconds)
    held = {speed.gpu for speed in ours}
    missing: dict[str, list[str]] = {}
    for name, instance in prices.INSTANCES.items():
        if instance.gpu and (not options.instances or name in options.instances):
            kind = gpu_kind(instance.gpu, instance.gpu_memory_gib)
            if kind not in held and instance.gpu not in held:
                missing.setdefault(instance.gpu, []).append(name)
    return Estimate(documents, list(ours), list(baseline), rows, missing, startup_seconds, notes)


def has_gpu(instance_type: str, gpu: str) -> bool:
    """Whether a known instance type has the GPU of this name."""
    instance = prices.INSTANCES[instance_type]
    return gpu in (instance.gpu, gpu_kind(instance.gpu, instance.gpu_memory_gib))


def _nodes(most: int) -> list[int]:
    """1, 2, 4, ... and the last."""
    return sorted({1 << i for i in range(most.bit_length()) if 1 << i <= most} | {most})


def gpu_kind(gpu: str, memory_gib: float) -> str:
    """The name of a GPU that tells it from its kin: of the A100, the one with more memory is also the faster one."""
    return f"{gpu} {memory_gib:.0f}GB" if gpu == "A100" else gpu


def instance_gpu(name: str, memory_gib: float) -> str | None:
    """The GPU of instance types that CUDA calls `name`: NVIDIA L40S is L40S; None for one that no type has."""
    if "PCIe" in name or "NVL" in name:  # these are slower than those of the instance types
        return None
    for instance in prices.INSTANCES.values():
        near = 0.8 < memory_gib / max(instance.gpu_memory_gib, 1) < 1.25
        if instance.gpu and near and re.search(rf"\b{instance.gpu}\b", name):
            return gpu_kind(instance.gpu, instance.gpu_memory_gib)
    return None


def here(config: RunConfig, machine: str) -> Machines:
    """The machine that was measured, with the workers that the run would have on it; its price by the configuration.

    Raises ConfigError where cost.instance_type has no known price.
    """
    cost = config.cost
    price = prices.price(cost.instance_type, None, None, cost)
    name = cost.instance_type or f"this machine ({machine})"
    return Machines(
        name,
        config.cluster.max_workers,
        price.usd_per_hour,
        price.source,
        cost.market or "local",
        instance_type=cost.instance_type,
    )


def _with_gpu(gpu: str, options: Options, cost: CostConfig, notes: list[str]) -> list[Machines]:
    known = prices.table()
    found: list[Machines] = []
    head = 0.0
    if options.head != "none" and cost.bill_head:
        head = prices.price(options.head, None, "on-demand", cost, known=known).usd_per_hour
    for name, instance in prices.INSTANCES.items():
        if not has_gpu(name, gpu):
            continue
        if options.instances and name not in options.instances:
            continue
        price = prices.price_or_bound(name, None, None, cost, known=known)
        if price is None:
            notes.append(f"{name}: no {cost.market or 'on-demand'} price is known in {cost.region or 'us-east-1'}")
            continue
        source = f"{price.source}, {price.date}" if price.date else price.source
        market = cost.market or "on-demand"
        found.append(Machines(name, instance.gpus, price.usd_per_hour, source, market, head, name))
    return found


def _machine_notes(rows: Sequence[Row], startup_seconds: float | None) -> list[str]:
    notes = []
    if any(row.ours.machine and not row.machines.usd_per_hour for row in rows):
        notes.append("this machine has no price: cost.prices.local (USD per hour) gives it one")
    if startup_seconds is None:
        notes.append("start-up is not in the bill: it was not measured")
    elif any(row.ours.gpu for row in rows):
        notes.append(f"start-up is as measured here, {startup_seconds:.0f} s; the time to boot a node comes on top")
    return notes
