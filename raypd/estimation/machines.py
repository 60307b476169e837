"""What the corpus takes and costs on each kind of machine.

Quantities: arrays as in `bootstrap`, seconds or USD. A speed holds for the GPU it was measured on;
a type with another gets no figure. One worker: one GPU, or its cores.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from raypd.billing import prices
from raypd.config import CostConfig, RunConfig
from raypd.dataset import documents_of_last_unit
from raypd.errors import ConfigError, did_you_mean
from raypd.estimation.bootstrap import Array, figure
from raypd.estimation.records import BillEstimate, Estimate, MachineEstimate, SpeedEstimate

# of a document, as the meter counts them -> as tables call them
TOKENS = {"prefill_tokens": "prefilled", "shared_tokens": "shared", "decode_tokens": "decoded"}
GIVEN = "as given"  # the source of a speed that the user states


@dataclass
class EstimateOptions:
    """Options of `raypd estimate`.

    Raises ConfigError at an unknown instance type, or if they do not go together.
    """

    sample: int = 64  # documents that are decoded
    minutes: float | None = None  # most time for that
    baseline: bool = False  # decode them autoregressively, too
    run: str | None = None
    throughput: list[str] | None = None  # `[GPU=]RATE`, documents a second of one GPU
    baseline_throughput: list[str] | None = None
    model: str | None = None  # of which the speed is predicted
    tokens: tuple[float, ...] = ()  # for that: see prediction.DocumentTokens
    documents: float | None = None
    instances: list[str] | None = None  # the only types of the table
    nodes: int = 8  # its last column
    head: str = "m7i.2xlarge"  # of the head node, as infra/cluster.yaml has it; "none" for no head

    def __post_init__(self) -> None:
        for name in [*(self.instances or []), *([self.head] if self.head != "none" else [])]:
            known_type(name)
        sources = {"--throughput": self.throughput, "--from": self.run, "--model": self.model}
        given = [option for option, value in sources.items() if value]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)}: the speed is from one of them, leave the other out"
            )
        if self.baseline and given:
            instead = "; --baseline-throughput gives its speed" if self.throughput else ""
            raise ConfigError(
                f"--baseline decodes a sample, and {given[0]} decodes nothing: leave it "
                f"out{instead}"
            )
        if self.baseline_throughput and not self.throughput:
            raise ConfigError(
                "--baseline-throughput goes with --throughput; --baseline measures it instead"
            )


@dataclass(frozen=True)
class Overhead:
    """What a run takes beside the seconds of its documents."""

    # Seconds from when its nodes are paid until a worker decodes as fast as it will.
    startup: float = 0.0
    unpaid: float = 0.0  # seconds of the run before and after its nodes are paid
    unit_documents: int = 0  # of a unit; 0: the corpus is not cut into units
    units_in_flight: int = 1  # of a worker


@dataclass
class MethodSpeed:
    """What a document takes on one worker."""

    method: str
    seconds: Array
    source: str  # where it is from, in words
    # That it holds for, as instance types have it; None for others and for a CPU.
    gpu: str | None = None
    machine: str | None = None  # that measured it; None where the speed was given
    tokens: dict[str, Array] = field(default_factory=dict)

    def estimate(self, baseline: "MethodSpeed | None") -> SpeedEstimate:
        return SpeedEstimate(
            method=self.method,
            gpu=self.gpu,
            source=self.source,
            documents_per_second=figure(1 / self.seconds),
            tokens_per_document={name: figure(tokens) for name, tokens in self.tokens.items()},
            times_autoregressive=None
            if baseline is None
            else figure(baseline.seconds / self.seconds),
        )


@dataclass(frozen=True)
class NodeKind:
    name: str
    workers: int  # of one node
    usd_per_hour: float
    price_source: str
    market: str = "on-demand"
    head_usd_per_hour: float = 0.0  # of a node beside them on which no worker runs
    instance_type: str | None = None  # None for a machine that is not known to be of one

    def usd_per_1000(self, seconds: Array) -> Array:
        """Price of the seconds that 1,000 documents are decoded, as papers count: without start-up,
        tail and head.
        """
        return seconds * (1000 * self.usd_per_hour / self.workers / 3600)


def bill(
    documents: Array, seconds: Array, kind: NodeKind, nodes: int, overhead: Overhead
) -> BillEstimate:
    """The corpus on `nodes` nodes, paid from the first node's start to the last worker's end.
    seconds: a document's. The tail: workers that end at chance times within one of the last units
    leave the others idle for half of it on average. A small corpus has few units: no more workers
    start than have as many as one overlaps.
    """
    workers = nodes * kind.workers
    unit = overhead.unit_documents
    last_unit = documents_of_last_unit(documents[0], unit)
    work = documents * seconds
    share = work / workers  # of each worker, if they all ended together
    tail = 0.5 * np.minimum(documents, last_unit) * seconds * (1 - 1 / workers)
    least = np.minimum(documents, unit * overhead.units_in_flight if workers > 1 else 0) * seconds
    busy = np.maximum(share + tail, least)
    rate = nodes * kind.usd_per_hour / 3600
    head = kind.head_usd_per_hour / 3600
    startup = overhead.startup * rate + 0 * share
    usd = {"decoding": share * rate, "startup": startup, "idle": (busy - share) * rate}
    usd["head"] = (overhead.startup + busy) * head
    hours = (overhead.unpaid + overhead.startup + busy) / 3600
    parts = {name: float(usd[name][0]) for name in usd}
    return BillEstimate(
        nodes, figure(hours), figure(work / 3600), figure(np.sum([*usd.values()], axis=0)), parts
    )


def assemble(
    config: RunConfig | None,
    options: EstimateOptions,
    documents: Array,
    main: Sequence[MethodSpeed],
    baseline: Sequence[MethodSpeed],
    overhead: Overhead | None,
    notes: list[str],
) -> Estimate:
    """The speeds on every machine that they hold for. overhead: its seconds; None where they are
    not known.
    """
    cost = config.cost if config is not None else CostConfig()
    on_top = overhead or Overhead()
    if config is not None:
        cluster = config.cluster
        on_top = replace(
            on_top, unit_documents=cluster.unit_documents, units_in_flight=cluster.units_in_flight
        )
    of_gpu = {speed.gpu: speed for speed in baseline}
    machines: list[MachineEstimate] = []
    for speed in main:
        kinds = _with_gpu(speed.gpu, options, cost, notes) if speed.gpu is not None else []
        nodes = sorted({1 << i for i in range(options.nodes.bit_length())} | {options.nodes})
        if not kinds and speed.machine is not None and config is not None:
            kinds = [here(config, speed.machine)]
            nodes = [1]
            if not kinds[0].usd_per_hour:
                notes.append(
                    "this machine has no price: cost.prices.local (USD per hour) gives it one"
                )
        for kind in kinds:
            bills = [bill(documents, speed.seconds, kind, n, on_top) for n in nodes]
            machines.append(_machine(kind, speed, of_gpu.get(speed.gpu), documents, bills))
    machines.sort(key=lambda machine: (machine.usd_per_1000.value, machine.workers))
    if overhead is None:
        notes.append("start-up is not in the bill: it was not measured")
    elif any(machine.gpu for machine in machines):
        notes.append(
            f"start-up is as measured here, {overhead.startup:.0f} s; the time to boot a node "
            "comes on top"
        )
    return Estimate(
        documents=figure(documents),
        speeds=[speed.estimate(of_gpu.get(speed.gpu)) for speed in main],
        baseline=[speed.estimate(None) for speed in baseline],
        machines=machines,
        startup_seconds=overhead.startup if overhead is not None else None,
        notes=list(dict.fromkeys(notes)),
    )


def _machine(
    kind: NodeKind,
    speed: MethodSpeed,
    baseline: MethodSpeed | None,
    documents: Array,
    bills: list[BillEstimate],
) -> MachineEstimate:
    usd = kind.usd_per_1000(speed.seconds)
    node = {name: value for name, value in vars(kind).items() if name != "head_usd_per_hour"}
    machine = MachineEstimate(**node, gpu=speed.gpu, usd_per_1000=figure(usd), bills=bills)
    if baseline is not None:
        baseline_usd = kind.usd_per_1000(baseline.seconds)
        machine.baseline_usd_per_1000 = figure(baseline_usd)
        machine.saved_usd = figure(documents / 1000 * (baseline_usd - usd))
    return machine


def known_type(name: str) -> prices.Instance:
    """What an instance type has. Raises ConfigError where none is called so."""
    if name not in prices.INSTANCES:
        hint = (
            did_you_mean(name, prices.INSTANCES, str)
            or "`raypd prices show` lists those that are known"
        )
        raise ConfigError(f"{name}: no such instance type; {hint}")
    return prices.INSTANCES[name]


def instance_gpu(name: str, memory_gib: float) -> str | None:
    """The GPU of instance types that CUDA calls `name`: NVIDIA L40S is L40S; None for one that no
    type has.
    """
    if "PCIe" in name or "NVL" in name:  # these are slower than those of the instance types
        return None
    for instance in prices.INSTANCES.values():
        near = 0.8 < memory_gib / max(instance.gpu_memory_gib, 1) < 1.25
        if instance.gpu and near and re.search(rf"\b{instance.gpu.partition(' ')[0]}\b", name):
            return instance.gpu
    return None


def here(config: RunConfig, machine: str) -> NodeKind:
    """The machine that was measured, as the run would use it.

    Raises ConfigError where its type has no known price.
    """
    cost = config.cost
    workers = config.cluster.max_workers
    price = prices.price(cost.instance_type, None, None, cost)
    name = cost.instance_type or f"this machine ({machine})"
    market = cost.market or "local"
    return NodeKind(
        name, workers, price.usd_per_hour, price.source, market, instance_type=cost.instance_type
    )


def _with_gpu(
    gpu: str, options: EstimateOptions, cost: CostConfig, notes: list[str]
) -> list[NodeKind]:
    table = prices.table()
    market = cost.market or "on-demand"
    kinds: list[NodeKind] = []
    head = 0.0
    if options.head != "none" and cost.bill_head:
        head = prices.price(options.head, None, "on-demand", cost, rows=table).usd_per_hour
    listed = [name for name, instance in prices.INSTANCES.items() if instance.gpu == gpu]
    for name in (name for name in listed if not options.instances or name in options.instances):
        price = prices.price_or_bound(name, None, None, cost, rows=table)
        if price is None:
            notes.append(f"{name}: no {market} price is known in {cost.region or 'us-east-1'}")
        else:
            source = f"{price.source}, {price.date}".removesuffix(", ")
            gpus = prices.INSTANCES[name].gpus
            kinds.append(NodeKind(name, gpus, price.usd_per_hour, source, market, head, name))
    return kinds
