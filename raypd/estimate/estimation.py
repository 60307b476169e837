"""The arithmetic of an estimate: means with their errors, and what a corpus costs on a number of machines.

Nothing here reads, decodes or asks a clock, so that every figure of `raypd estimate` can be worked out by hand.

Times are seconds of one worker (one GPU, or one worker's cores), prices USD an hour. Intervals are at 95%: Student's t
on the logarithm, since times and rates are positive and compared by their ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

# Student's t, 97.5%, for 1, 2, 3, ... degrees of freedom; above: 1.96 + 2.4 / degrees, which is right to 0.002
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


def student(degrees: float) -> float:
    """The 97.5% point of Student's t."""
    if degrees >= len(_T):
        return 1.96 + 2.4 / degrees
    if degrees < 1:
        return _T[0]
    low = int(degrees)
    return _T[low - 1] + (degrees - low) * ((_T[low] if low < len(_T) else 2.110) - _T[low - 1])


@dataclass(frozen=True)
class Mean:
    """An estimated quantity: its value, standard error, and the degrees of freedom that the error rests on.

    error 0 is a quantity that was counted or given; nan one whose error the data do not tell.
    """

    value: float
    error: float = 0.0
    degrees: float = math.inf

    @property
    def relative(self) -> float:
        return self.error / abs(self.value) if self.value else 0.0

    def interval(self) -> tuple[float, float] | None:
        """95%; None where the data do not tell."""
        if math.isnan(self.error):
            return None
        by = math.exp(min(100.0, student(self.degrees) * self.relative))
        return self.value / by, self.value * by

    def times(self, factor: float) -> Mean:
        return Mean(self.value * factor, self.error * abs(factor), self.degrees)

    def inverse(self) -> Mean:
        if not self.value:
            return Mean(math.inf, math.nan)
        return Mean(1 / self.value, self.relative / self.value, self.degrees)

    def tree(self) -> dict[str, float | None]:
        """As JSON: value, low, high."""
        ends = self.interval()
        low, high = ends if ends is not None else (None, None)
        return {"value": self.value, "low": low, "high": high}


def product(*factors: Mean) -> Mean:
    """Of independent quantities: relative variances add, degrees of freedom by Satterthwaite."""
    value = math.prod(f.value for f in factors)
    parts = [(f.relative**2, f.degrees) for f in factors]
    return Mean(value, abs(value) * math.sqrt(sum(v for v, _ in parts)), _satterthwaite(parts))


def difference(a: Mean, b: Mean) -> Mean:
    """a - b of quantities taken as independent."""
    parts = [(a.error**2, a.degrees), (b.error**2, b.degrees)]
    return Mean(a.value - b.value, math.hypot(a.error, b.error), _satterthwaite(parts))


def _satterthwaite(parts: Sequence[tuple[float, float]]) -> float:
    total = sum(variance for variance, _ in parts)
    spread = sum(variance**2 / degrees for variance, degrees in parts if variance > 0)
    return total**2 / spread if spread > 0 else math.inf


def ratio(numerators: Sequence[float], denominators: Sequence[float], population: float = math.inf) -> Mean:
    """sum / sum over drawn clusters (units of work, stretches of time), by the ratio estimator.

    population: how many clusters there are in all, for the share of them that was not drawn.
    """
    count, base = len(numerators), sum(denominators)
    if base <= 0:
        return Mean(0.0, math.nan)
    value = sum(numerators) / base
    if count >= population:
        return Mean(value)
    if count < 2:
        return Mean(value, math.nan)
    squares = sum((a - value * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    error = math.sqrt((1 - count / population) * squares / (count * (count - 1))) / (base / count)
    return Mean(value, error, count - 1)


@dataclass(frozen=True)
class Group:
    """The drawn values of one stratum. weight: its share of the corpus; population: how many it has there.

    lengths: of the documents drawn; mean_length: of all in the stratum.
    """

    weight: float
    population: float
    values: Sequence[float]
    lengths: Sequence[float] = ()
    mean_length: float = 0.0


def stratified(groups: Sequence[Group]) -> Mean:
    """The mean over a corpus of which every stratum was sampled.

    What a document takes grows with its length, and the mean length of a stratum is known better than what its few
    drawn documents happen to have: values are moved to it along a common slope (the regression estimator), and what is
    left is the scatter. A stratum of which one was drawn gets the relative scatter of the others; nan where there are
    none.
    """
    groups = _at_mean_length(groups)
    mean, parts = 0.0, []
    scatter = _common_scatter(groups)
    for group in groups:
        count, middle = len(group.values), fmean(group.values)
        mean += group.weight * middle
        left = max(0.0, 1 - count / group.population)
        variance = _variance(group.values) if count > 1 else (scatter * middle) ** 2
        parts.append((group.weight**2 * left * variance / count if left else 0.0, max(1, count - 1)))
    return Mean(mean, math.sqrt(sum(variance for variance, _ in parts)), _satterthwaite(parts))


def _at_mean_length(groups: Sequence[Group]) -> list[Group]:
    """The groups with values as if all documents had their stratum's mean length."""
    products = squares = 0.0
    for g in groups:
        if len(g.lengths) > 1:
            x, y = fmean(g.lengths), fmean(g.values)
            products += sum((a - x) * (b - y) for a, b in zip(g.lengths, g.values, strict=True))
            squares += sum((a - x) ** 2 for a in g.lengths)
    if squares <= 0 or sum(len(g.values) - 1 for g in groups) < 8:  # too few to tell a slope
        return list(groups)
    slope = products / squares
    return [
        replace(g, values=[v - slope * (x - g.mean_length) for v, x in zip(g.values, g.lengths, strict=True)])
        for g in groups
    ]


def _variance(values: Sequence[float]) -> float:
    middle = fmean(values)
    return sum((v - middle) ** 2 for v in values) / (len(values) - 1)


def _common_scatter(groups: Sequence[Group]) -> float:
    """Standard deviation over mean, within strata."""
    known = [g for g in groups if len(g.values) > 1 and fmean(g.values) > 0]
    if not known:
        return math.nan
    freedom = sum(len(g.values) - 1 for g in known)
    return math.sqrt(sum((len(g.values) - 1) * _variance(g.values) / fmean(g.values) ** 2 for g in known) / freedom)


# ------------------------------------------------------------------------------------------------------------- the bill


@dataclass(frozen=True)
class Speed:
    """What a document takes on one worker. seconds: of the worker, 0 where unknown; tokens of one document.

    gpu: the GPU that it holds for, as instance types have it; None for others and for a CPU. machine: that measured it;
    None where it was given. source: where it is from, in words.
    """

    method: str
    seconds: Mean
    source: str
    gpu: str | None = None
    machine: str | None = None
    prefill_tokens: Mean | None = None
    shared_tokens: Mean | None = None
    decode_tokens: Mean | None = None

    @property
    def per_second(self) -> Mean:
        """Documents a second of one worker."""
        return self.seconds.inverse()

    def tree(self) -> dict[str, Any]:
        means = {name: getattr(self, name) for name in ("prefill_tokens", "shared_tokens", "decode_tokens")}
        return {
            "method": self.method,
            "gpu": self.gpu,
            "source": self.source,
            "documents_per_second": self.per_second.tree(),
            "seconds_per_document": self.seconds.tree(),
            "tokens_per_document": {name: mean.tree() for name, mean in means.items() if mean is not None},
        }


@dataclass(frozen=True)
class Machines:
    """One kind of node. workers: of one node. head_usd_per_hour: of a node beside them on which no worker runs.

    instance_type: None for a machine that is not known to be of one.
    """

    name: str
    workers: int
    usd_per_hour: float
    source: str
    market: str = "on-demand"
    head_usd_per_hour: float = 0.0
    instance_type: str | None = None


@dataclass(frozen=True)
class Surroundings:
    """What a run takes beside decoding. startup_seconds: until a worker decodes; None: not known, and left out."""

    startup_seconds: float | None
    unit_documents: int


@dataclass(frozen=True)
class Bill:
    """A corpus on `nodes` nodes. gpu_hours: of all workers while they decode; the usd of its parts add up to usd."""

    nodes: int
    hours: Mean
    gpu_hours: Mean
    usd: Mean
    parts: dict[str, float] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        tree = asdict(self)
        return tree | {key: getattr(self, key).tree() for key in ("hours", "gpu_hours", "usd")}


def usd_per_1000(speed: Speed, machines: Machines) -> Mean:
    """Price of the seconds that 1,000 documents are decoded, as the paper counts: without start-up, tail and head."""
    return speed.seconds.times(1000 * machines.usd_per_hour / machines.workers / 3600)


def bill(documents: Mean, speed: Speed, machines: Machines, nodes: int, around: Surroundings) -> Bill:
    """What the whole corpus costs on `nodes` nodes, from the first node's start to the last worker's end.

    The tail: workers that end at chance times within one unit of work leave the others idle for half a unit on average.
    That is on the safe side: workers that are done take over what can be cut of the rest (work_stealing.py).
    """
    workers = nodes * machines.workers
    work = product(documents, speed.seconds)
    share = work.value / workers  # of each worker, if they all ended together
    unit = min(documents.value, around.unit_documents) * speed.seconds.value
    busy = max(share + 0.5 * unit * (1 - 1 / workers), unit)
    startup = around.startup_seconds or 0.0
    rate, head = nodes * machines.usd_per_hour / 3600, machines.head_usd_per_hour / 3600
    parts = {"decoding": share * rate, "startup": startup * rate, "idle": (busy - share) * rate}
    parts["head"] = (startup + busy) * head
    usd = sum(parts.values())
    # Start-up does not scale with the documents, all else does.
    moving = usd - startup * (rate + head)
    return Bill(
        nodes=nodes,
        hours=Mean((startup + busy) / 3600, busy / 3600 * work.relative, work.degrees),
        gpu_hours=work.times(1 / 3600),
        usd=Mean(usd, moving * work.relative, work.degrees),
        parts=parts,
    )


def saved(documents: Mean, ours: Speed, theirs: Speed, machines: Machines) -> Mean:
    """USD that `ours` saves against `theirs` over the corpus, in decoding."""
    each = difference(usd_per_1000(theirs, machines), usd_per_1000(ours, machines))
    return product(documents.times(1 / 1000), each)
