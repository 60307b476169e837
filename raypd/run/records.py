"""What stands in the files of a run, as types: who writes a record and who reads it use the same one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter


@dataclass
class PlanTotals:
    """What plan.json tells.

    documents: of the units that can be read, counted where `exact`, else partly estimated. bytes: stored ones.
    damaged: units that cannot be read (each is one object), and their bytes. listing: digest of the objects' names,
    sizes and versions. alone: how many objects share no unit because one of their unit could not be read. cut: the
    keys of the configuration that decide how objects are cut.
    """

    id: str
    units: int = 0
    documents: int = 0
    bytes: int = 0
    exact: bool = True
    objects: int = 0
    damaged: int = 0
    damaged_bytes: int = 0
    chunks: int = 0
    listing: str = ""
    alone: int = 0
    cut: dict[str, Any] = field(default_factory=dict)


@dataclass
class UnitSummary:
    """What a committed unit holds and cost; it stands in the metadata of its object."""

    unit: str
    fingerprint: str
    session: str
    source: str
    start: int
    documents: int
    ok: int
    failed: int
    seconds: float
    committed_at: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    worker: str = ""  # who did it, as the ledger names it
    began: float = 0.0
    busy_seconds: float = 0.0  # of the engine, for this unit
    categories: dict[str, dict[str, float]] = field(default_factory=dict)  # documents, tokens and seconds of each
    retries: int = 0  # number of the last retry whose rows are among its rows; 0: none


@dataclass(frozen=True)
class UnitResult:
    """What a worker tells the driver of a unit, or of a part of one that it answered for another worker.

    ok, failed: documents. error: why it was not done, and then retry: whether it may be at another time. fatal: no
    worker can. handed_back: at the scheduler's own wish. unreadable: it is the input's fault alone.
    """

    ok: int = 0
    failed: int = 0
    error: str | None = None
    retry: bool = False
    fatal: bool = False
    handed_back: bool = False
    unreadable: bool = False

    @property
    def done(self) -> bool:
        return self.error is None and not self.handed_back


# ------------------------------------------------------------------------------------------------------------ estimates


@dataclass(frozen=True)
class Figure:
    """An estimated quantity with the ends of its 95% interval; None where they cannot be known."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def counted(self) -> bool:
        """Whether it was counted or given, not estimated."""
        return self.low == self.value == self.high

    def holds(self, value: float) -> bool | None:
        """Whether a value lies in the interval; None without one."""
        return None if self.low is None or self.high is None else self.low <= value <= self.high

    def times(self, factor: float) -> Figure:
        """The quantity in another unit."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Figure(self.value * factor, low, high)


@dataclass(kw_only=True)
class SpeedEstimate:
    """A decoding method on one worker. gpu: that it holds for, None for a CPU. source: where it is from, in words.

    times_autoregressive: against autoregressive decoding on the same GPU; None where that was not measured.
    """

    method: str
    gpu: str | None = None
    source: str
    documents_per_second: Figure
    seconds_per_document: Figure | None = None
    tokens_per_document: dict[str, Figure] = field(default_factory=dict)
    times_autoregressive: Figure | None = None

    @property
    def name(self) -> str:
        return self.method + (f" on {self.gpu}" if self.gpu else "")


@dataclass
class BillEstimate:
    """The whole corpus on `nodes` nodes. gpu_hours: of all workers while they decode; parts: USD, together usd."""

    nodes: int
    hours: Figure
    gpu_hours: Figure
    usd: Figure
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class MachineEstimate:
    """One kind of node. usd_per_1000: of decoding; saved_usd: against autoregressive decoding, over the corpus."""

    name: str
    instance_type: str | None = None
    gpu: str | None = None
    workers: int
    market: str
    usd_per_hour: float
    price_source: str
    usd_per_1000: Figure
    baseline_usd_per_1000: Figure | None = None
    saved_usd: Figure | None = None
    bills: list[BillEstimate]

    @property
    def title(self) -> str:
        return self.name + (" spot" if self.market == "spot" else "")


@dataclass(kw_only=True)
class Estimate:
    """What estimate.json tells: the speed of one worker, and what the corpus takes on each kind of machine.

    fingerprint, model, task: of the configuration. not_measured: GPU -> instance types. sample: how it was measured.
    """

    documents: Figure
    speeds: list[SpeedEstimate]
    baseline: list[SpeedEstimate]
    machines: list[MachineEstimate]
    not_measured: dict[str, list[str]]
    notes: list[str]
    startup_seconds: float | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    fingerprint: str | None = None
    model: str | None = None
    task: str | None = None
    sample: dict[str, Any] | None = None

    @property
    def created_at(self) -> float:
        """Unix seconds."""
        return datetime.fromisoformat(self.created).timestamp()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Any) -> Estimate:
        """Raises ValueError when it is no estimate."""
        found = TypeAdapter(cls).validate_python(tree)
        datetime.fromisoformat(found.created)
        return found
