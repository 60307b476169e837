"""The files in a run's folder as types: fields are the JSON's keys, also of other versions.

Unix seconds, USD.
"""

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from raypd import storage
from raypd.errors import raised_as
from raypd.run.text import iso

_R = TypeVar("_R")
# (began, ended, startup | busy | idle | lost, first unit in it)
Spans = list[tuple[float, float, str, str | None]]
# Documents, prefill_tokens, shared_tokens, decode_tokens, seconds; on a bill also usd.
Counts = dict[str, int | float]
_adapter = cache(TypeAdapter)


class RecordError(ValueError):
    """A tree or file that is not the record it should be; the message names file and key."""


def from_json(kind: type[_R], tree: Any, file: str) -> _R:
    """The record of parsed JSON.

    Raises RecordError at a wrong type or missing key; `file` is for its message.
    """
    try:
        return _adapter(kind).validate_python(tree)  # type: ignore[arg-type]  # a type is hashable
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise RecordError(
            f"{file}: cannot be read: {key + ': ' if key else ''}{first['msg']}"
        ) from None


def read(kind: type[_R], path: str) -> _R:
    """The record in a file.

    Raises RecordError where it holds no such record, OSError where it cannot be read.
    """
    with raised_as(RecordError, f"{path}: cannot be read", ValueError):
        tree = json.loads(storage.read(path))
    return from_json(kind, tree, path)


def write(path: str, record: Any, indent: int | None = 2) -> None:
    """In one piece. Raises OSError."""
    storage.put(path, encoded(record, indent))


def encoded(record: Any, indent: int | None = 2) -> bytes:
    """The file of a record (a dataclass).

    Raises ValueError at NaN or an infinite number, which JSON does not have.
    """
    text = json.dumps(
        asdict(record), indent=indent, ensure_ascii=False, allow_nan=False, default=str
    )
    return (text + "\n").encode()


@dataclass
class RunRecord:
    """run.json: what a run is. It is written once; an output folder belongs to one fingerprint."""

    fingerprint: str
    config: dict[str, Any]
    created: str | None = None  # ISO 8601
    versions: dict[str, str] = field(default_factory=dict)  # of what an answer may depend on


@dataclass
class LeftOutFiles:
    """Files of the input that are not read, all for one reason."""

    reason: str  # completes the sentence "3 files ..."
    files: int
    examples: list[str] = field(default_factory=list)  # the first names


@dataclass
class PlanTotals:
    """plan/plan.json."""

    id: str
    units: int = 0
    # Of the units that can be read; counted where `exact`, else partly estimated.
    documents: int = 0
    bytes: int = 0  # as stored
    exact: bool = True
    objects: int = 0
    damaged: int = 0  # units that cannot be read, one object each
    chunks: int = 0
    listing: str = ""  # digest of the objects' names, sizes and versions
    alone: int = 0  # objects that share no unit, because one of their unit could not be read
    # Keys of the configuration that decide how objects are cut.
    cut: dict[str, Any] = field(default_factory=dict)
    version: int | None = None  # of a Delta or Iceberg table
    fingerprint: str = ""  # of the run; "": of a night or a retry
    empty: LeftOutFiles | None = None  # objects without a document, which are in no unit


@dataclass
class Lease:
    """lease.json: the session that holds a run, or held it last, and its process."""

    session: str = ""
    since: str = ""  # ISO 8601
    beat: int = 0  # grows while it is alive
    ended: bool = False
    host: str = ""
    pid: int = 0
    started: str | None = None  # the process, in ticks since boot
    machine: str | None = None  # its boot and process space


@dataclass
class Session:
    """sessions/<id>.json: when a session began, was last alive and ended, and how (complete,
    interrupted, ...).
    """

    began: float
    id: str = ""
    heartbeat: float | None = None
    ended: float | None = None
    seconds: float | None = None  # by a clock that nobody sets
    how: str | None = None


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
    categories: dict[str, Counts] = field(default_factory=dict)
    retries: int = 0  # number of the last retry whose rows are among its rows; 0: none
    truncated: int = 0  # documents that were cut to fit the model's context


@dataclass(frozen=True)
class UnitResult:
    """What a worker reports to the driver of a unit."""

    ok: int = 0  # documents
    failed: int = 0  # documents
    error: str | None = None  # why it was not done
    retry: bool = False  # it may be at another time
    fatal: bool = False  # no worker can do it
    handed_back: bool = False  # because the scheduler asked for it
    unreadable: bool = False  # it is the input's fault alone

    @property
    def done(self) -> bool:
        return self.error is None and not self.handed_back


@dataclass
class Seconds:
    """A worker's time, in seconds; prefill and decode together are its busy time."""

    startup: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    idle: float = 0.0
    lost: float = 0.0

    @property
    def busy(self) -> float:
        return self.prefill + self.decode

    def total(self) -> float:
        return self.startup + self.prefill + self.decode + self.idle + self.lost

    def lose(self, prefill: float, decode: float) -> None:
        """Moves busy seconds of an attempt that failed to `lost`, no more than there are."""
        prefill = min(prefill, self.prefill)
        decode = min(decode, self.decode)
        self.prefill -= prefill
        self.decode -= decode
        self.lost += prefill + decode


@dataclass
class NodeTime:
    node: str
    began: float  # on a bill: when the session began to pay for it
    head: bool = False
    instance_type: str | None = None
    market: str = "local"
    region: str | None = None
    usd_per_hour: float = 0.0
    price_source: str = ""
    ended: float | None = None  # None: it still is there
    gpus: float = 0.0
    slots: int = 0  # workers that fit on it
    seconds: float = 0.0  # paid
    usd: float = 0.0  # paid
    came: float | None = None  # on a bill: when it was there


@dataclass
class CardUse:
    """How GPUs were used, by NVML: means over samples, but for the memory, the most of any."""

    samples: int = 0
    busy: float = 0.0  # share of the time in which a kernel ran
    memory_gib: float = 0.0
    mhz: float = 0.0  # of the multiprocessors
    most_mhz: float = 0.0  # that they could have

    def __str__(self) -> str:
        if self.most_mhz:
            clock = f"{self.mhz:,.0f} of {self.most_mhz:,.0f} MHz"
        else:
            clock = f"{self.mhz:,.0f} MHz"
        return f"GPUs {self.busy:.0%} busy, {self.memory_gib:.3g} GiB at most, {clock}"

    def plus(self, other: "CardUse") -> "CardUse":
        count = max(self.samples + other.samples, 1)
        busy, *clocks = (
            (getattr(self, name) * self.samples + getattr(other, name) * other.samples) / count
            for name in ("busy", "mhz", "most_mhz")
        )
        return CardUse(
            self.samples + other.samples, busy, max(self.memory_gib, other.memory_gib), *clocks
        )


@dataclass
class WorkerTime:
    """All that a worker process did since it began, as reported to the ledger and as on the
    bill.
    """

    worker: str
    node: str
    began: float
    heard: float = 0.0  # when it last reported
    ended: float | None = None  # on a bill, as far as is known; None while it works
    pid: int = 0
    sequence: int = -1  # number of the last report
    seconds: Seconds = field(default_factory=Seconds)
    # Unit not committed: busy (prefill, decode) s.
    open: dict[str, tuple[float, float]] = field(default_factory=dict)
    spans: Spans = field(default_factory=list)
    categories: dict[str, Counts] = field(default_factory=dict)  # of committed units
    open_categories: dict[str, Counts] = field(default_factory=dict)  # of `open`
    lost_categories: dict[str, Counts] = field(default_factory=dict)  # of attempts that failed
    method: str = ""
    ok: int = 0  # documents
    failed: int = 0
    gpus: float = 0.0
    joules: float | None = None
    cards: CardUse | None = None  # None: no GPU, or NVML does not answer

    @property
    def state(self) -> str:
        """startup, busy, idle, lost or ended."""
        if self.ended is not None:
            return "ended"
        if self.spans:
            return self.spans[-1][2]
        return "startup"

    def lived(self, until: float = 0.0) -> float:
        """Seconds to its end, or to `until` where it works."""
        return max((until if self.ended is None else self.ended) - self.began, 1e-9)

    def spent(self, kind: str) -> float:
        """Seconds of a kind of span."""
        return sum(ended - began for began, ended, state, _ in self.spans if state == kind)


@dataclass
class Bill:
    """ledger/<session>.json: the bill of a session as it stands at `until`."""

    session: str
    began: float
    usd: float
    until: float = 0.0
    final: bool = False  # it has ended
    currency: str = "USD"
    budget_usd: float | None = None
    deadline: str | None = None
    nodes: list[NodeTime] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)  # USD by `billing.bill.PARTS`
    seconds: dict[str, float] = field(default_factory=dict)  # slot-seconds by the same
    # The bill, in proportion to busy seconds.
    categories: dict[str, Counts] = field(default_factory=dict)
    methods: dict[str, Counts] = field(default_factory=dict)  # the same
    workers: list[WorkerTime] = field(default_factory=list)
    # Time, usd, documents, failed, decode tokens.
    series: list[list[float]] = field(default_factory=list)
    kwh: float | None = None  # of the GPUs; None where one was not measured
    totals: dict[str, int] = field(default_factory=dict)  # documents, ok, failed, tokens by kind
    # (from when on, runs on the cluster)
    shares: list[tuple[float, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.until = self.until or self.began


@dataclass
class RunCost:
    """The bills of all sessions of a run together, as its manifest holds them."""

    usd: float
    usd_per_1000_documents: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    sessions: int = 1
    documents: int = 0
    kwh: float | None = None
    cards: CardUse | None = None
    prices: list[str] = field(default_factory=list)  # where they are from
    notes: list[str] = field(default_factory=list)


@dataclass
class SessionTotals:
    """A session in the manifest: its times in ISO 8601, and what it committed."""

    id: str
    started: str
    ended: str
    how: str
    seconds: float
    units: int
    documents: int


@dataclass
class UnreadableUnit:
    """A file of the input of which units cannot be read."""

    source: str
    bytes: int  # of these units
    error: str  # why the first cannot
    units: int = 1


@dataclass
class Manifest:
    """manifest.json: a run's totals."""

    fingerprint: str = ""
    fake: bool = False  # `model: fake` made the answers up
    documents: int = 0
    ok: int = 0
    failed: int = 0
    truncated: int = 0  # documents that were cut to fit the model's context
    units: int = 0
    units_planned: int = 0
    units_unreadable: int = 0  # because of the input
    prefill_tokens: int = 0
    shared_tokens: int = 0
    decode_tokens: int = 0
    seconds: float = 0.0
    documents_per_second: float = 0.0  # over the time of all sessions
    started: str | None = None
    ended: str | None = None
    sessions: list[SessionTotals] = field(default_factory=list)
    unreadable: list[UnreadableUnit] = field(default_factory=list)  # the first hundred
    left_out: list[LeftOutFiles] = field(default_factory=list)  # files that were not read at all
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    cost: RunCost | None = None  # None where no ledger ran


@dataclass
class NightState:
    """state.json: the last good night."""

    night: str
    fingerprint: str
    base: str  # the fingerprint without the categories
    documents: int  # of the table
    failed: int  # of the table
    objects: int  # of the table
    index: list[str]  # its files, below the nightly root
    config: dict[str, Any]
    hash_column: str | None = None
    hidden: str = ""  # digest of the objects that could not be read; "" where all could
    ended: str | None = None  # ISO 8601
    versions: dict[str, str] = field(default_factory=dict)


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

    def times(self, factor: float, plus: float = 0.0) -> "Figure":
        """The quantity in another unit, and more."""
        low, high = (None if end is None else end * factor + plus for end in (self.low, self.high))
        return Figure(self.value * factor + plus, low, high)


@dataclass(kw_only=True)
class SpeedEstimate:
    """A decoding method on one worker."""

    method: str
    gpu: str | None = None  # that it holds for; None for a CPU
    source: str  # in words
    documents_per_second: Figure
    tokens_per_document: dict[str, Figure] = field(default_factory=dict)
    times_autoregressive: Figure | None = None  # on the same GPU; None: not measured

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
    saved_usd: Figure | None = None  # against autoregressive decoding, over the corpus
    bills: list[BillEstimate]

    @property
    def title(self) -> str:
        return self.name + (" spot" if self.market == "spot" else "")


@dataclass
class HostedPrice:
    """What a service asks for a million tokens of its batch API, in USD, at its list price of a
    date.
    """

    model: str
    input: float
    output: float
    date: str
    source: str  # an address, or a key of `cost`


@dataclass(kw_only=True)
class HostedEstimate(HostedPrice):
    """What it would ask for the tokens of the corpus."""

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
        datetime.fromisoformat(self.created)  # a file with another text in its place is damaged

    @property
    def created_at(self) -> float:  # unix seconds
        return datetime.fromisoformat(self.created).timestamp()
