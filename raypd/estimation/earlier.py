"""An estimate from what an earlier run's committed units took: the sample, drawn in the order of
the input.
"""

import numpy as np

from raypd import storage
from raypd.billing import book
from raypd.billing.bill import MICRO, Bill
from raypd.billing.prices import INSTANCES
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.errors import ConfigError
from raypd.estimation import bootstrap, sampling
from raypd.estimation.machines import TOKENS, EstimateOptions, MethodSpeed, Overhead, assemble
from raypd.estimation.records import Estimate
from raypd.run import layout, records
from raypd.run.left_out import describe
from raypd.run.manifest import RunRecord
from raypd.run.usage import UsageKey
from raypd.text import counted


def estimate_from(config: RunConfig, options: EstimateOptions) -> Estimate:
    """The corpus at the speed of `options.run`.

    Raises ConfigError: no run, no committed units, several GPU types.
    """
    assert options.run is not None
    run = storage.absolute(options.run)
    try:
        earlier_config = records.read(RunRecord, storage.join(run, layout.RUN)).config
    except FileNotFoundError:
        raise ConfigError(f"--from {run}: no run of raypd (it has no run.json)") from None
    except (OSError, records.RecordError) as error:
        raise ConfigError(f"--from {run}: its run.json cannot be read: {error}") from None
    units = writer.summaries(run)
    bills = book.bills(run)
    if not units:
        raise ConfigError(f"--from {run}: no unit is committed there yet")
    documents = [float(unit.documents) for unit in units]
    rng = np.random.default_rng(sampling.SEED)
    gpu, machine = _machine(run, bills)
    speed = MethodSpeed(
        str(earlier_config.get("decoding", {}).get("method", "")),
        bootstrap.ratio([unit.busy_seconds for unit in units], documents, rng),
        f"{counted(len(units), 'unit')} of {run}, {counted(int(sum(documents)), 'document')}",
        gpu,
        machine,
        {
            name: bootstrap.ratio([unit.counts.get(name, 0) for unit in units], documents, rng)
            for name in TOKENS
        },
    )
    notes = [f"it is taken that documents are as those of {run}"]
    current = config.model_dump(mode="json", include={"task", "model", "decoding", "engine"})
    changed = [
        f"{section}.{key}"
        for section, keys in current.items()
        for key, value in keys.items()
        if earlier_config.get(section, {}).get(key, value) != value
    ]
    if changed:
        notes.append(
            f"that run had other values of {', '.join(changed[:6])}: its speed may not be yours"
        )
    if options.documents:
        total = bootstrap.exact(options.documents)
    else:
        corpus = sampling.scan(config)
        total = corpus.documents
        if corpus.left_out:
            notes.append(describe(corpus.left_out))
    result = assemble(config, options, total, [speed], [], _overhead(bills), notes)
    usages = [unit.categories for unit in units]
    if config.cascade.model is None:
        # The counts of a unit include those of retries.
        usages = [{UsageKey(""): {**dict.fromkeys(TOKENS, 0), **unit.counts}} for unit in units]
    models = book.models_of(config)
    micro = sum(book.usage_usd(usage, models) for usage in usages)
    if micro:
        add_server(result, micro / MICRO / sum(documents))
    return result


def add_server(result: Estimate, usd: float) -> None:
    """Notes what a document's tokens cost, at a server behind an endpoint: it is not in the bills
    of machines.
    """
    result.sample = {**(result.sample or {}), "server_usd": usd}
    result.notes.append(
        f"the server's tokens cost {1000 * usd:.3g} USD per 1,000 documents on top: not in the "
        "figures"
    )


def _machine(run: str, bills: list[Bill]) -> tuple[str | None, str]:
    """(the GPU of its workers' nodes as instance types have it, the machine in words)."""
    types = {node.instance_type for bill in bills for node in bill.nodes if node.instance_type}
    gpus = {INSTANCES[name].gpu for name in types if name in INSTANCES and INSTANCES[name].gpus}
    if len(gpus) > 1:
        raise ConfigError(
            f"--from {run}: it ran on several kinds of GPU ({', '.join(sorted(gpus))}): no one "
            "speed"
        )
    return (gpus.pop(), ", ".join(sorted(types))) if gpus else (None, "that run's machine")


def _overhead(bills: list[Bill]) -> Overhead | None:
    """Means over workers, from when a node was billed, or came up for it, until it decoded; unpaid:
    before any node.
    """
    startup = []
    unpaid = []
    for bill in bills:
        nodes = {node.node: node.began for node in bill.nodes}
        unpaid.append(max(0.0, min(nodes.values(), default=bill.began) - bill.began))
        for worker in bill.workers:
            busy = [began for began, _, kind, _ in worker.spans if kind == "busy"]
            if busy:
                startup.append(max(0.0, min(busy) - nodes.get(worker.node, bill.began)))
    return Overhead(sum(startup) / len(startup), sum(unpaid) / len(unpaid)) if startup else None
