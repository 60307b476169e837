"""Compute the hours and the cost of a corpus on each kind of machine.

Quantities are arrays as in `bootstrap`, in seconds or USD. A speed applies to the GPU that it was
measured on; instance types with another GPU get no figure. One worker uses one GPU, or all cores.
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

# Tokens of a document: the name in the meter -> the name in tables.
TOKENS = {"prefill_tokens": "prefilled", "shared_tokens": "shared", "decode_tokens": "decoded"}
EARLIER_MACHINE = "the machine of that run"  # of an earlier run, if nothing more is known
MOST_NODES = 8  # in the table, unless the user gives another number
GIVEN = "as given"  # the source of a speed that the user states


@dataclass
class EstimateOptions:
    """Options of `raypd estimate`.

    Raises:
        ConfigError: If an instance type is unknown, or if options exclude each other.
    """

    sample: int = 64  # documents to decode
    minutes: float | None = None  # limit of the measurement
    baseline: bool = False  # also decode them autoregressively
    run: str | None = None  # an earlier run whose speed is used
    throughput: list[str] | None = None  # each `[GPU=]RATE`, documents per second of one GPU
    baseline_throughput: list[str] | None = None  # likewise, of autoregressive decoding
    model: str | None = None  # the model whose speed is predicted
    # For a prediction: see roofline.DocumentTokens; None uses those of the configuration.
    tokens: tuple[float, ...] | None = None
    documents: float | None = None  # size of the corpus; None to count it
    instances: list[str] | None = None  # restricts the table to these instance types
    nodes: int | None = None  # the largest number of nodes in the table; None for MOST_NODES
    # The type of the head node, as in infra/cluster.yaml; "none" if there is no head node.
    head: str = "m7i.2xlarge"
    # The names of `sample` and `minutes` in messages, because a fit has keys for them.
    sample_option: str = "--sample"
    minutes_option: str = "--minutes"

    def __post_init__(self) -> None:
        for name in self.instances or []:
            known_type(name)
        if self.head != "none":
            known_type(self.head)
        sources = {"--throughput": self.throughput, "--from": self.run, "--model": self.model}
        speed_options = [option for option, value in sources.items() if value]
        if len(speed_options) > 1:
            raise ConfigError(
                f"{' and '.join(speed_options)}: each of them sets the speed; keep one of them"
            )
        if self.baseline and speed_options:
            advice = ""
            if self.throughput:
                advice = "; --baseline-throughput gives its speed"
            raise ConfigError(
                f"--baseline decodes a sample, but {speed_options[0]} decodes nothing: leave "
                f"--baseline out{advice}"
            )
        if self.baseline_throughput and not self.throughput:
            raise ConfigError(
                "--baseline-throughput needs --throughput; --baseline measures it instead"
            )


@dataclass(frozen=True)
class Overhead:
    """The time of a run besides the seconds of its documents."""

    # Seconds from when a node is paid for until its worker decodes at full speed.
    startup: float = 0.0
    # Seconds of the run before and after its nodes are paid for.
    unpaid: float = 0.0
    unit_documents: int = 0  # documents per unit; 0 if the corpus is not cut into units
    units_in_flight: int = 1  # per worker


@dataclass
class MethodSpeed:
    """What a document takes on one worker."""

    method: str
    seconds: Array  # per document
    source: str  # in words: where the speed comes from
    # The GPU that the speed applies to, as instance types name it; None on a CPU or another GPU.
    gpu: str | None = None
    machine: str | None = None  # the machine that was measured; None if the speed was given
    tokens: dict[str, Array] = field(default_factory=dict)  # per document

    def estimate(self, baseline: "MethodSpeed | None") -> SpeedEstimate:
        """Return the speed as a record, compared with a baseline if there is one."""
        times_autoregressive = None
        if baseline is not None:
            times_autoregressive = figure(baseline.seconds / self.seconds)
        return SpeedEstimate(
            method=self.method,
            gpu=self.gpu,
            source=self.source,
            documents_per_second=figure(1 / self.seconds),
            tokens_per_document={name: figure(tokens) for name, tokens in self.tokens.items()},
            times_autoregressive=times_autoregressive,
        )


@dataclass(frozen=True)
class NodeKind:
    """A type of machine with its price."""

    name: str
    workers: int  # per node
    usd_per_hour: float
    price_source: str
    market: str = "on-demand"
    head_usd_per_hour: float = 0.0  # of the head node, on which no worker runs
    instance_type: str | None = None  # None if the machine has no known type

    def usd_per_1000(self, seconds: Array) -> Array:
        """Return the price of decoding 1,000 documents.

        Start-up, tail and head node are not included, as in the papers.

        Args:
            seconds: Seconds per document of one worker.
        """
        return seconds * (1000 * self.usd_per_hour / self.workers / 3600)


def bill(
    documents: Array, seconds: Array, kind: NodeKind, nodes: int, overhead: Overhead
) -> BillEstimate:
    """Estimate the bill, which runs from the first node's start to the last worker's end.

    At the end of a run there is a tail: workers finish at random times within one of the last
    units, so on average each of the others idles for half of it. A small corpus has few units,
    and only as many workers start as there are units, considering that a worker overlaps several.

    Args:
        documents: Documents of the corpus.
        seconds: Seconds per document of one worker.
        kind: The type of the nodes.
        nodes: Number of nodes.
        overhead: The time besides decoding.
    """
    workers = nodes * kind.workers
    unit_documents = overhead.unit_documents
    last_unit = documents_of_last_unit(documents[0], unit_documents)
    work = documents * seconds
    # The seconds of each worker if all of them ended together.
    decoding_seconds = work / workers
    tail = 0.5 * np.minimum(documents, last_unit) * seconds * (1 - 1 / workers)
    overlapped_documents = 0
    if workers > 1:
        overlapped_documents = unit_documents * overhead.units_in_flight
    minimum = np.minimum(documents, overlapped_documents) * seconds
    busy_seconds = np.maximum(decoding_seconds + tail, minimum)
    usd_per_second = nodes * kind.usd_per_hour / 3600
    head_usd_per_second = kind.head_usd_per_hour / 3600
    usd = {
        "decoding": decoding_seconds * usd_per_second,
        "startup": np.full_like(decoding_seconds, overhead.startup * usd_per_second),
        "idle": (busy_seconds - decoding_seconds) * usd_per_second,
        "head": (overhead.startup + busy_seconds) * head_usd_per_second,
    }
    return BillEstimate(
        nodes,
        figure((overhead.unpaid + overhead.startup + busy_seconds) / 3600),
        figure(work / 3600),
        figure(np.sum([*usd.values()], axis=0)),
        {name: float(amounts[0]) for name, amounts in usd.items()},
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
    """Combine speeds and prices into an estimate for every machine that the speeds apply to.

    Args:
        config: The configuration; None if there is none.
        options: The options of the command.
        documents: Documents of the corpus.
        main: The speeds of the configured method, one per GPU.
        baseline: The speeds of autoregressive decoding, one per GPU.
        overhead: The time besides decoding; None if it is not known.
        notes: Notes on the speeds; notes on prices are appended.
    """
    baselines = {speed.gpu: speed for speed in baseline}
    machines: list[MachineEstimate] = []
    for speed in main:
        machines += _machines(
            config, options, documents, speed, baselines.get(speed.gpu), overhead, notes
        )
    notes += _missing_instances(options, main, machines)
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
        speeds=[speed.estimate(baselines.get(speed.gpu)) for speed in main],
        baseline=[speed.estimate(None) for speed in baseline],
        machines=machines,
        startup_seconds=overhead.startup if overhead is not None else None,
        notes=list(dict.fromkeys(notes)),
    )


def _missing_instances(
    options: EstimateOptions, speeds: Sequence[MethodSpeed], machines: Sequence[MachineEstimate]
) -> list[str]:
    """Return why the table lacks instance types that --instance names."""
    shown = {machine.instance_type for machine in machines}
    gpus = {speed.gpu for speed in speeds if speed.gpu is not None}
    notes = []
    for name in options.instances or []:
        gpu = prices.INSTANCES[name].gpu
        if name in shown or gpu in gpus:
            # For a type whose GPU is known, there is already a note that it lacks a price.
            continue
        measured = ", ".join(sorted(gpus))
        if not measured:
            measured = ", ".join(speed.machine for speed in speeds if speed.machine) or "no GPU"
        kind = f"its {gpu}"
        if not gpu:
            kind = "its CPU"
        advice = "estimate on such a machine"
        if gpu:
            advice += f", give --throughput '{gpu}=RATE', or predict with --model NAME"
        notes.append(
            f"--instance {name} is not in the tables: the speed was measured on {measured}, "
            f"and says nothing about {kind}; {advice}"
        )
    return notes


def _machines(
    config: RunConfig | None,
    options: EstimateOptions,
    documents: Array,
    speed: MethodSpeed,
    baseline: MethodSpeed | None,
    overhead: Overhead | None,
    notes: list[str],
) -> list[MachineEstimate]:
    """Estimate the corpus on every instance type with the speed's GPU, or else on this machine."""
    bill_overhead = overhead or Overhead()
    cost = CostConfig()
    if config is not None:
        cost = config.cost
        bill_overhead = replace(
            bill_overhead,
            unit_documents=config.cluster.unit_documents,
            units_in_flight=config.cluster.first_units_in_flight,
        )
    kinds: list[NodeKind] = []
    node_counts = _node_counts(options.nodes or MOST_NODES)
    if speed.gpu is not None:
        kinds = _with_gpu(speed.gpu, options, cost, notes)
    if not kinds and speed.machine is not None and config is not None:
        kinds = [here(config, speed.machine)]
        node_counts = [1]
        if not kinds[0].usd_per_hour:
            notes.append("this machine has no price: set cost.prices.local (USD per hour)")
        if options.nodes is not None and options.nodes > 1:
            notes.append(
                f"--nodes {options.nodes} does not apply: the bill is that of one machine. Bills "
                "by the number of nodes are for instance types with the GPU that was measured or "
                "given (--throughput GPU=RATE)"
            )
    machines = []
    for kind in kinds:
        bills = [
            bill(documents, speed.seconds, kind, nodes, bill_overhead) for nodes in node_counts
        ]
        machines.append(_machine(kind, speed, baseline, documents, bills))
    return machines


def _node_counts(limit: int) -> list[int]:
    """Return the powers of two up to a limit, and the limit."""
    counts = {limit}
    count = 1
    while count <= limit:
        counts.add(count)
        count *= 2
    return sorted(counts)


def _machine(
    kind: NodeKind,
    speed: MethodSpeed,
    baseline: MethodSpeed | None,
    documents: Array,
    bills: list[BillEstimate],
) -> MachineEstimate:
    """Describe one type of machine, and compare it with the baseline if there is one."""
    usd = kind.usd_per_1000(speed.seconds)
    machine = MachineEstimate(
        name=kind.name,
        workers=kind.workers,
        usd_per_hour=kind.usd_per_hour,
        price_source=kind.price_source,
        market=kind.market,
        instance_type=kind.instance_type,
        gpu=speed.gpu,
        usd_per_1000=figure(usd),
        bills=bills,
    )
    if baseline is not None:
        baseline_usd = kind.usd_per_1000(baseline.seconds)
        machine.baseline_usd_per_1000 = figure(baseline_usd)
        machine.saved_usd = figure(documents / 1000 * (baseline_usd - usd))
    return machine


def known_type(name: str) -> prices.Instance:
    """Return an instance type.

    Raises:
        ConfigError: If no instance type has this name.
    """
    if name not in prices.INSTANCES:
        suggestion = did_you_mean(name, prices.INSTANCES, str)
        hint = suggestion or "`raypd prices show` lists the known types"
        raise ConfigError(f"{name}: no such instance type; {hint}")
    return prices.INSTANCES[name]


def instance_gpu(name: str, memory_gib: float) -> str | None:
    """Return the name that instance types have for a GPU of CUDA; None if no type has this GPU.

    For example, NVIDIA L40S is L40S.

    Args:
        name: The name that CUDA reports.
        memory_gib: The GPU's memory in GiB.
    """
    # PCIe and NVL cards are slower than the cards of the instance types.
    if "PCIe" in name or "NVL" in name:
        return None
    for instance in prices.INSTANCES.values():
        if not instance.gpu:
            continue
        similar_memory = 0.8 < memory_gib / max(instance.gpu_memory_gib, 1) < 1.25
        model_name = instance.gpu.partition(" ")[0]
        if similar_memory and re.search(rf"\b{model_name}\b", name):
            return instance.gpu
    return None


def here(config: RunConfig, machine: str) -> NodeKind:
    """Return the machine that was measured, as the run would use it.

    Raises:
        ConfigError: If the price of its type is unknown.
    """
    cost = config.cost
    price = prices.price(cost.instance_type, None, None, cost)
    name = f"this machine ({machine})"
    if machine == EARLIER_MACHINE:
        name = machine
    return NodeKind(
        name=cost.instance_type or name,
        workers=config.cluster.max_workers,
        usd_per_hour=price.usd_per_hour,
        price_source=price.source,
        market=cost.market or "local",
        instance_type=cost.instance_type,
    )


def _with_gpu(
    gpu: str, options: EstimateOptions, cost: CostConfig, notes: list[str]
) -> list[NodeKind]:
    """Return the instance types with this GPU that have a price; a note names the others."""
    table = prices.table()
    market = cost.market or "on-demand"
    head_usd_per_hour = 0.0
    if options.head != "none":
        head_price = prices.price(options.head, None, "on-demand", cost, rows=table)
        head_usd_per_hour = head_price.usd_per_hour
    kinds: list[NodeKind] = []
    for name, instance in prices.INSTANCES.items():
        if instance.gpu != gpu or (options.instances and name not in options.instances):
            continue
        price = prices.price_or_bound(name, None, None, cost, rows=table)
        if price is None:
            notes.append(f"{name}: no {market} price is known in {cost.region or 'us-east-1'}")
            continue
        kind = NodeKind(
            name=name,
            workers=instance.gpus,
            usd_per_hour=price.usd_per_hour,
            price_source=f"{price.source}, {price.date}".removesuffix(", "),
            market=market,
            head_usd_per_hour=head_usd_per_hour,
            instance_type=name,
        )
        kinds.append(kind)
    return kinds
