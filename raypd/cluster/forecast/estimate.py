"""`raypd estimate`: what a corpus will take and cost, before it is run.

The speed of a document comes from one of three places: a sample that is decoded here (`sampling`, `measuring`), an
earlier run, or the user. It holds for the GPU that it was measured on and for no other: an instance type with another
GPU gets no figure.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import fmean
from typing import TYPE_CHECKING, Any

from raypd.cluster import storage
from raypd.cluster.cost import pricing
from raypd.cluster.forecast import estimation, sampling
from raypd.cluster.forecast.clock import Cost
from raypd.cluster.forecast.estimation import Bill, Group, Machines, Mean, Speed, Surroundings
from raypd.cluster.forecast.measuring import Measured
from raypd.cluster.forecast.sampling import Sample
from raypd.config import METHODS, CostConfig, RunConfig
from raypd.errors import ConfigError, RunError

if TYPE_CHECKING:
    from raypd.cluster import worker

FILE = "estimate.json"  # in the run's folder
HEAD = "m7i.2xlarge"  # as infra/cluster.yaml has it
_TOKENS = ("prefill_tokens", "shared_tokens", "decode_tokens")


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


@dataclass
class Row:
    """One kind of machine with what the corpus takes on 1, 2, 4, ... nodes of it."""

    machines: Machines
    ours: Speed
    baseline: Speed | None
    bills: list[Bill]
    saved: Mean | None

    def tree(self) -> dict[str, Any]:
        machines = self.machines
        return {
            "name": machines.name,
            "gpu": self.ours.gpu,
            "workers": machines.workers,
            "market": machines.market,
            "usd_per_hour": machines.usd_per_hour,
            "price_source": machines.source,
            "usd_per_1000": estimation.usd_per_1000(self.ours, machines).tree(),
            "baseline_usd_per_1000": estimation.usd_per_1000(self.baseline, machines).tree() if self.baseline else None,
            "saved_usd": self.saved.tree() if self.saved else None,
            "bills": [bill.tree() for bill in self.bills],
        }


@dataclass
class Estimate:
    """All that was found. notes: what a reader has to know of how far it holds."""

    documents: Mean
    ours: list[Speed]
    baseline: list[Speed]
    rows: list[Row]
    not_measured: dict[str, list[str]]  # GPU -> instance types
    startup_seconds: float | None
    notes: list[str]
    fingerprint: str | None = None
    sample: dict[str, Any] | None = None

    def tree(self) -> dict[str, Any]:
        """As JSON, for --json and the run's folder. Rates are of one worker, prices USD."""
        return {
            "fingerprint": self.fingerprint,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "documents": self.documents.tree(),
            "speeds": [speed.tree() for speed in self.ours],
            "baseline": [speed.tree() for speed in self.baseline],
            "machines": [row.tree() for row in self.rows],
            "not_measured": self.not_measured,
            "startup_seconds": self.startup_seconds,
            "sample": self.sample,
            "notes": self.notes,
        }


def estimate(
    config: RunConfig | None,
    options: Options,
    *,
    verbose: bool = False,
    build: Callable[[RunConfig, int | None], worker.Parts] | None = None,
) -> Estimate:
    """Makes the estimate. build: as in `pipeline.run_extract`.

    Raises ConfigError, InputError, ModelError before anything is measured; RunError when the sample cannot be decoded.
    """
    if config is not None:
        storage.configure(config.storage)
    if options.throughput:
        return _fed(config, options)
    if config is None:
        raise ConfigError("give a configuration, or --throughput with --documents and --instance")
    if options.run is not None:
        from raypd.cluster.forecast import earlier

        return earlier.estimate_from(config, options)
    return _measured(config, options, verbose, build)


# ----------------------------------------------------------------------------------------------- from a decoded sample


def _measured(
    config: RunConfig,
    options: Options,
    verbose: bool,
    build: Callable[[RunConfig, int | None], worker.Parts] | None,
) -> Estimate:
    from raypd.cluster.forecast.bench import Workbench

    check_model(config)
    sample = sampling.draw(config, options.sample, seed=options.seed)
    documents = sampling.ring_order(sample.documents, options.seed)
    ends = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    notes: list[str] = []
    with Workbench(config, verbose, build) as bench:
        measured = bench.measure(config, documents, _left(ends), f"measure {config.decoding.method}")
        startup = bench.startup_seconds + measured.load_seconds
        check_sample(measured, documents)
        ours = speed_of(sample, documents, measured, notes)
        baseline: list[Speed] = []
        if options.baseline and config.decoding.method != "autoregressive":
            theirs = with_method(config, "autoregressive")
            if ends is not None and time.monotonic() > ends:
                notes.append("no time was left to measure autoregressive decoding: raise --minutes")
            else:
                found = bench.measure(theirs, documents, _left(ends), "measure autoregressive")
                if found.documents and found.seconds > 0:
                    baseline = [speed_of(sample, documents, found, notes)]
                else:
                    notes.append("autoregressive decoding came to no figure in the time given: raise --minutes")
    total = sample.look.documents if options.documents is None else Mean(options.documents)
    notes += _notes(config, sample, measured)
    result = assemble(config, options, total, [ours], baseline, startup, notes)
    result.fingerprint = config.fingerprint()
    result.sample = {
        "documents": len(documents),
        "strata": len(sample.strata),
        "seconds": round(measured.seconds, 3),
        "warmup_seconds": round(measured.warmup_seconds, 3),
        "load_seconds": round(measured.load_seconds, 3),
        "machine": measured.machine,
        "complete": measured.complete,
    }
    return result


def check_model(config: RunConfig) -> None:
    """Raises ModelError for what can be known before any weights are loaded."""
    if not config.model.is_fake:
        from raypd.models.load import check_model_config

        check_model_config(config.model, machine=False)


def _left(ends: float | None) -> float | None:
    return None if ends is None else max(1.0, ends - time.monotonic())


def with_method(config: RunConfig, method: str) -> RunConfig:
    """The configuration with another decoding method. Raises ConfigError where the task has no such method."""
    if method not in METHODS[config.task.kind]:
        raise ConfigError(f"decoding.method {method} does not do {config.task.kind}")
    tree = config.model_dump()
    tree["decoding"] |= {"method": method}
    return RunConfig.model_validate(tree)


def check_sample(measured: Measured, documents: Sequence[Any]) -> None:
    """Raises RunError where the sample gave nothing to go by."""
    done = [cost for cost in measured.costs if cost is not None]
    failed = [cost for cost in done if cost.error is not None]
    if not done or measured.seconds <= 0:
        raise RunError(
            f"not one of {len(documents)} documents was done in the time given: raise --minutes or lower engine.batch"
        )
    if len(failed) == len(done):
        raise RunError(f"every document of the sample failed, the first because: {failed[0].error}")


def speed_of(sample: Sample, documents: Sequence[Any], measured: Measured, notes: list[str]) -> Speed:
    """The speed over the corpus: strata by their weights, with the scatter of documents and of the machine."""
    cost_of = {id(d): c for d, c in zip(documents, measured.costs, strict=True) if c is not None}
    found = [{i: cost_of[id(d)] for i, d in enumerate(s.documents) if id(d) in cost_of} for s in sample.strata]
    if missing := sum(s.population for s, costs in zip(sample.strata, found, strict=True) if not costs):
        share = missing / max(1, sum(s.population for s in sample.strata))
        notes.append(f"{measured.method}: {share:.0%} of the corpus is of a kind of which no document was done in time")

    def mean(value: Callable[[Cost], float]) -> Mean:
        return _over_strata(sample, [{at: value(cost) for at, cost in costs.items()} for costs in found])

    per_token = estimation.ratio([s for _, s in measured.stretches], [t for t, _ in measured.stretches])
    machine = Mean(1.0, per_token.relative if per_token.value else math.nan, per_token.degrees)
    tokens = {name: mean(lambda cost, name=name: getattr(cost, name)) for name in _TOKENS}  # type: ignore[misc]
    failed = [cost for costs in found for cost in costs.values() if cost.error is not None]
    if failed:
        count = sum(map(len, found))
        notes.append(f"{measured.method}: {len(failed)} of {count} documents failed, the first: {failed[0].error}")
    return Speed(
        measured.method,
        estimation.product(mean(lambda cost: cost.seconds), machine),
        f"measured on {measured.machine}, {sum(map(len, found))} documents, {measured.seconds:.0f} s",
        instance_gpu(measured.gpu, measured.gpu_memory_gib) if measured.gpu else None,
        measured.machine,
        **tokens,
    )


def _over_strata(sample: Sample, values: Sequence[dict[int, float]]) -> Mean:
    """The mean of a document of the corpus, those that cannot be read included (they take nothing).

    values: for each stratum {place in it: value}.
    """
    look = sample.look
    there = [(s, v) for s, v in zip(sample.strata, values, strict=True) if v]
    seen = sum(s.population for s, _ in there)
    scale = look.documents.value / max(1, len(look.seen))
    groups = [
        Group(
            s.population / seen, s.population * scale, list(v.values()), [s.chosen[i].length for i in v], s.mean_length
        )
        for s, v in there
    ]
    mean = estimation.stratified(groups)
    readable = Mean(1 - sample.unreadable / max(1, len(look.seen)))
    if look.whole or mean.value <= 0:
        return estimation.product(mean, readable)
    # The shares of the strata are estimates themselves, from units that differ.
    totals, counts = [0.0] * len(look.units), [0.0] * len(look.units)
    for stratum, own in there:
        for one in stratum.members:
            totals[one.unit] += fmean(own.values())
    for one in look.seen:
        counts[one.unit] += 1
    shares = estimation.ratio(totals, counts, look.units_planned)
    return estimation.product(mean, readable, Mean(1.0, shares.relative, shares.degrees))


def _notes(config: RunConfig, sample: Sample, measured: Measured) -> list[str]:
    look = sample.look
    notes = []
    if config.model.is_fake:
        notes.append("model: fake. These figures are made up: no model read the documents")
    if not measured.complete:
        notes.append("the time given ended before the sample was done: what is missing is not in the figures")
    if len(sample.documents) < 30:
        notes.append(f"the sample is small ({len(sample.documents)} documents): raise --sample for a narrower interval")
    if not look.whole:
        notes.append(f"shares of categories and lengths are from {len(look.units)} of {look.units_planned} units")
    if sample.unreadable:
        notes.append(f"{sample.unreadable} of {len(look.seen)} documents cannot be read and become error rows")
    return notes


# ----------------------------------------------------------------------------------------------------- from the user


def _fed(config: RunConfig | None, options: Options) -> Estimate:
    """From throughputs that were given; the corpus is planned unless its size was given."""
    if options.documents is not None:
        total = Mean(options.documents)
    elif config is not None:
        total = sampling.look(config, options.seed).documents
    else:
        raise ConfigError("--throughput without a configuration: give --documents, too")
    method = config.decoding.method if config is not None else "given"

    def speeds(given: Sequence[Given], method: str) -> list[Speed]:
        found = []
        for one in given:
            gpu = one.gpu or _gpu_of_instances(options.instances)
            found.append(Speed(method, Mean(1 / one.per_second), "as given", gpu))
        return found

    ours, theirs = speeds(options.throughput, method), speeds(options.baseline_throughput, "autoregressive")
    result = assemble(config, options, total, ours, theirs, None, [])
    result.fingerprint = config.fingerprint() if config is not None else None
    return result


def _gpu_of_instances(names: Sequence[str]) -> str:
    gpus = {pricing.INSTANCES[name].gpu for name in names}
    if len(gpus) != 1:
        known = sorted({i.gpu for i in pricing.INSTANCES.values() if i.gpu})
        raise ConfigError(
            "which GPU does --throughput hold for? Give --instance with types of one GPU, or --throughput GPU=RATE "
            f"with one of {', '.join(known)}"
        )
    return gpus.pop()


# ------------------------------------------------------------------------------------------------------- on machines


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
    for name, instance in pricing.INSTANCES.items():
        if instance.gpu and (not options.instances or name in options.instances):
            kind = gpu_kind(instance.gpu, instance.gpu_memory_gib)
            if kind not in held and instance.gpu not in held:
                missing.setdefault(instance.gpu, []).append(name)
    return Estimate(documents, list(ours), list(baseline), rows, missing, startup_seconds, notes)


def has_gpu(instance_type: str, gpu: str) -> bool:
    """Whether a known instance type has the GPU of this name."""
    instance = pricing.INSTANCES[instance_type]
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
    for instance in pricing.INSTANCES.values():
        near = 0.8 < memory_gib / max(instance.gpu_memory_gib, 1) < 1.25
        if instance.gpu and near and re.search(rf"\b{instance.gpu}\b", name):
            return gpu_kind(instance.gpu, instance.gpu_memory_gib)
    return None


def here(config: RunConfig, machine: str) -> Machines:
    """The machine that was measured, with the workers that the run would have on it; its price by the configuration.

    Raises ConfigError where cost.instance_type has no known price.
    """
    cost = config.cost
    price = pricing.price(cost.instance_type, None, None, cost)
    name = cost.instance_type or f"this machine ({machine})"
    return Machines(name, config.cluster.max_workers, price.usd_per_hour, price.source, cost.market or "local")


def _with_gpu(gpu: str, options: Options, cost: CostConfig, notes: list[str]) -> list[Machines]:
    known = pricing.table()
    found: list[Machines] = []
    head = 0.0
    if options.head != "none" and cost.bill_head:
        head = pricing.price(options.head, None, "on-demand", cost, known=known).usd_per_hour
    for name, instance in pricing.INSTANCES.items():
        if not has_gpu(name, gpu):
            continue
        if options.instances and name not in options.instances:
            continue
        price = pricing.price_or_bound(name, None, None, cost, known=known)
        if price is None:
            notes.append(f"{name}: no {cost.market or 'on-demand'} price is known in {cost.region or 'us-east-1'}")
            continue
        source = f"{price.source}, {price.date}" if price.date else price.source
        found.append(Machines(name, instance.gpus, price.usd_per_hour, source, cost.market or "on-demand", head))
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


def write(result: Estimate, config: RunConfig) -> str | None:
    """Puts the estimate into the run's folder, for its report; its path, or None where the folder is another run's."""
    from raypd.cluster.pipeline import output_folder

    output = output_folder(config)
    try:
        theirs = json.loads(storage.read(storage.join(output, "run.json"))).get("fingerprint")
    except FileNotFoundError:
        theirs = None
    except (ValueError, AttributeError):
        return None
    if theirs not in (None, config.fingerprint()):
        return None
    path = storage.join(output, FILE)
    try:
        storage.put(path, (json.dumps(result.tree(), indent=2, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise RunError(f"output.path {output}: cannot be written: {error}") from None
    return path
