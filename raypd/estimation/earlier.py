"""Estimate from the committed units of an earlier run, which serve as the sample."""

from typing import Any

import numpy as np

import raypd.estimation.bootstrap as bootstrap
import raypd.estimation.sampling as sampling
from raypd import storage
from raypd.billing import INSTANCES, MICRO, Bill, book
from raypd.config import RunConfig
from raypd.dataset import summaries
from raypd.errors import ConfigError
from raypd.estimation.machines import (
    EARLIER_MACHINE,
    TOKENS,
    EstimateOptions,
    MethodSpeed,
    Overhead,
    assemble,
)
from raypd.estimation.records import Estimate
from raypd.run import RunRecord, UnitSummary, UsageKey, layout, left_out, records
from raypd.text import counted

# Units that the speed is computed from, evenly spaced.
_UNITS = 20_000


def estimate_from(config: RunConfig, options: EstimateOptions) -> Estimate:
    """Estimate the corpus at the speed of the earlier run `options.run`.

    Raises:
        ConfigError: If there is no such run, if it has no committed units, or if it used several
            types of GPU.
    """
    assert options.run is not None
    run = storage.absolute(options.run)
    earlier_config = _earlier_config(run)
    units = summaries.some(run, _UNITS)
    bills = book.bills(run)
    if not units:
        raise ConfigError(f"--from {run}: no unit is committed there yet")
    speed = _speed(run, str(earlier_config.get("decoding", {}).get("method", "")), units, bills)
    notes = [f"it is assumed that documents are like those of {run}"]
    changed_keys = _changed_keys(config, earlier_config)
    if changed_keys:
        notes.append(
            f"that run had other values of {', '.join(changed_keys[:6])}, so your speed may differ"
        )
    if options.documents:
        documents = bootstrap.exact(options.documents)
    else:
        corpus = sampling.scan(config)
        documents = corpus.documents
        if corpus.left_out:
            notes.append(left_out.describe(corpus.left_out))
        notes += corpus.unsplit
    result = assemble(config, options, documents, [speed], [], _overhead(bills), notes)
    micro_usd = _server_micro_usd(config, units)
    if micro_usd:
        add_server(result, micro_usd / MICRO / sum(float(unit.documents) for unit in units))
    return result


def _earlier_config(run: str) -> dict[str, Any]:
    """Read the configuration of the earlier run."""
    try:
        return records.read(RunRecord, storage.join(run, layout.RUN)).config
    except FileNotFoundError:
        raise ConfigError(f"--from {run}: not a run of raypd (it has no run.json)") from None
    except (OSError, records.RecordError) as error:
        raise ConfigError(f"--from {run}: its run.json cannot be read: {error}") from None


def _speed(run: str, method: str, units: list[UnitSummary], bills: list[Bill]) -> MethodSpeed:
    """Compute the speed of the earlier run, with the variation between its units."""
    rng = np.random.default_rng(sampling.SEED)
    documents = [float(unit.documents) for unit in units]
    gpu, machine = _machine(run, bills)
    seconds = bootstrap.ratio([unit.busy_seconds for unit in units], documents, rng)
    tokens = {
        name: bootstrap.ratio([unit.counts.get(name, 0) for unit in units], documents, rng)
        for name in TOKENS
    }
    unit_count = counted(len(units), "unit")
    document_count = counted(int(sum(documents)), "document")
    return MethodSpeed(
        method=method,
        seconds=seconds,
        source=f"{unit_count} of {run}, {document_count}, without start-up and idle time",
        gpu=gpu,
        machine=machine,
        tokens=tokens,
    )


def _changed_keys(config: RunConfig, earlier_config: dict[str, Any]) -> list[str]:
    """List the keys that affect speed and have another value than in the earlier run."""
    current = config.model_dump(mode="json", include={"task", "model", "decoding", "engine"})
    changed = []
    for section, keys in current.items():
        earlier_section = earlier_config.get(section, {})
        for key, value in keys.items():
            if earlier_section.get(key, value) != value:
                changed.append(f"{section}.{key}")
    return changed


def _server_micro_usd(config: RunConfig, units: list[UnitSummary]) -> float:
    """Return the price of all tokens at the server of an endpoint, in millionths of a USD."""
    usages = [unit.categories for unit in units]
    if config.cascade.model is None:
        # The counts of a unit include the tokens of retries.
        usages = [{UsageKey(""): {**dict.fromkeys(TOKENS, 0), **unit.counts}} for unit in units]
    models = book.models_of(config.model, config.cascade)
    return sum(book.usage_usd(usage, models) for usage in usages)


def add_server(result: Estimate, usd: float) -> None:
    """Note the price of a document's tokens at the server of an endpoint.

    The bills of machines do not contain it.

    Args:
        result: Gets the price and a note.
        usd: USD per document.
    """
    result.sample = {**(result.sample or {}), "server_usd": usd}
    result.notes.append(
        f"the server's tokens cost another {1000 * usd:.3g} USD per 1,000 documents, which the "
        "figures do not include"
    )


def _machine(run: str, bills: list[Bill]) -> tuple[str | None, str]:
    """Return the GPU of the workers' nodes as instance types name it, and the machine in words."""
    types = {node.instance_type for bill in bills for node in bill.nodes if node.instance_type}
    gpus = {INSTANCES[name].gpu for name in types if name in INSTANCES and INSTANCES[name].gpus}
    if not gpus:
        return None, EARLIER_MACHINE
    if len(gpus) > 1:
        raise ConfigError(
            f"--from {run}: it ran on several types of GPU ({', '.join(sorted(gpus))}), so it "
            "has no single speed; name a run on one type"
        )
    return gpus.pop(), ", ".join(sorted(types))


def _overhead(bills: list[Bill]) -> Overhead | None:
    """Average the seconds besides decoding over workers and runs; None if no worker decoded.

    The start-up lasts from when a worker's node was first billed until the worker decoded. The
    unpaid time is the time of the run before any node was billed.
    """
    startup_seconds = []
    unpaid_seconds = []
    for bill in bills:
        node_starts = {node.node: node.began for node in bill.nodes}
        first_start = min(node_starts.values(), default=bill.began)
        unpaid_seconds.append(max(0.0, first_start - bill.began))
        for worker in bill.workers:
            busy_starts = [began for began, _, kind, _ in worker.spans if kind == "busy"]
            if busy_starts:
                node_start = node_starts.get(worker.node, bill.began)
                startup_seconds.append(max(0.0, min(busy_starts) - node_start))
    if not startup_seconds:
        return None
    return Overhead(
        startup=sum(startup_seconds) / len(startup_seconds),
        unpaid=sum(unpaid_seconds) / len(unpaid_seconds),
    )
