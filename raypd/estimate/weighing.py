"""From a measured sample to the speed over the corpus: strata by their weights, and how far the figures hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from raypd.config import RunConfig
from raypd.errors import RunError
from raypd.estimate import estimation
from raypd.estimate.clock import Cost
from raypd.estimate.estimation import Group, Mean, Speed
from raypd.estimate.machines import instance_gpu
from raypd.estimate.measuring import Measured
from raypd.estimate.sampling import Sample

_TOKENS = ("prefill_tokens", "shared_tokens", "decode_tokens")


def check_sample(measured: Measured, documents: Sequence[Any]) -> None:
    """Raises RunError where the sample gave nothing to go by."""
    done = [cost for cost in measured.costs if cost is not None]
    failed = [cost for cost in done if cost.error is not None]
    if not done or measured.seconds <= 0:
        raise RunError(
            f"not one of {len(documents)} documents was done in the time given: raise --minutes or lower "
            "engine.max_num_seqs"
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


def notes_of(config: RunConfig, sample: Sample, measured: Measured) -> list[str]:
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
