"""estimate.json: the speeds, machines and bills of an estimate."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from raypd.billing import HostedPrice
from raypd.text import iso


@dataclass(frozen=True)
class Figure:
    """An estimated quantity with the ends of its 95% interval; None if they cannot be known."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def counted(self) -> bool:
        """Whether it was counted or given, not estimated."""
        return self.low == self.value == self.high

    def holds(self, value: float) -> bool | None:
        """Return whether a value is in the interval; None if there is no interval."""
        return None if self.low is None or self.high is None else self.low <= value <= self.high

    def times(self, factor: float, plus: float = 0.0) -> "Figure":
        """Return the quantity multiplied by a factor, plus a constant."""
        low, high = (None if end is None else end * factor + plus for end in (self.low, self.high))
        return Figure(self.value * factor + plus, low, high)


@dataclass(kw_only=True)
class SpeedEstimate:
    """A decoding method on one worker."""

    method: str
    gpu: str | None = None  # that it applies to; None for a CPU
    source: str  # in words
    documents_per_second: Figure
    tokens_per_document: dict[str, Figure] = field(default_factory=dict)
    times_autoregressive: Figure | None = None  # on the same GPU; None if not measured

    @property
    def name(self) -> str:
        return self.method + (f" on {self.gpu}" if self.gpu else "")


@dataclass
class BillEstimate:
    """The whole corpus on `nodes` nodes."""

    nodes: int
    hours: Figure
    gpu_hours: Figure  # of all workers while they decode
    usd: Figure
    parts: dict[str, float] = field(default_factory=dict)  # USD; they add up to `usd`


@dataclass(kw_only=True)
class MachineEstimate:
    name: str
    instance_type: str | None = None
    gpu: str | None = None
    workers: int
    market: str
    usd_per_hour: float
    price_source: str
    usd_per_1000: Figure  # of decoding
    baseline_usd_per_1000: Figure | None = None
    saved_usd: Figure | None = None  # compared with autoregressive decoding, over the corpus
    bills: list[BillEstimate]

    @property
    def title(self) -> str:
        return self.name + (" spot" if self.market == "spot" else "")


@dataclass(kw_only=True)
class HostedEstimate(HostedPrice):
    """What the service would charge for the tokens of the corpus."""

    usd_per_1000: Figure
    usd: Figure  # of the whole corpus


@dataclass(kw_only=True)
class Estimate:
    """estimate.json: the speed of one worker, and what the corpus takes on each kind of machine."""

    documents: Figure
    speeds: list[SpeedEstimate]
    baseline: list[SpeedEstimate]
    machines: list[MachineEstimate]
    notes: list[str]
    startup_seconds: float | None = None
    created: str = field(default_factory=iso)
    fingerprint: str | None = None  # of the configuration
    model: str | None = None
    task: str | None = None
    sample: dict[str, Any] | None = None  # how it was measured
    hosted: list[HostedEstimate] = field(default_factory=list)
    hosted_tokens: dict[str, Figure] = field(default_factory=dict)  # input and output of a document

    def __post_init__(self) -> None:
        datetime.fromisoformat(self.created)  # if this is not a time, the file is damaged

    @property
    def created_at(self) -> float:  # unix seconds
        return datetime.fromisoformat(self.created).timestamp()
