"""The files in the folder of a run as types, the same for writing and for showing them.

The fields of a record are the keys of its JSON. Files of other versions of raypd are read too: keys that a record does
not have are passed over, and where a key is missing its default stands. Times are unix seconds, money is USD.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from raypd import storage

_R = TypeVar("_R")
Spans = list[tuple[float, float, str, str | None]]  # (began, ended, startup | busy | idle | lost, first unit in it)
Counts = dict[str, int | float]  # documents, prefill_tokens, shared_tokens, decode_tokens, seconds; on a bill also usd
_adapter = cache(TypeAdapter)


class RecordError(ValueError):
    """A tree or file that is not the record it should be; the message names file and key."""


def to_json(record: Any) -> dict[str, Any]:
    """A record, and those within it, as a tree for `json.dumps`."""
    return asdict(record)


def from_json(kind: type[_R], tree: Any, file: str) -> _R:
    """The record that parsed JSON was made from; `file`: where that is from, for the message.

    Raises:
        RecordError: a value has another type, or a key without a default is missing.
    """
    try:
        record: _R = _adapter(kind).validate_python(tree)  # type: ignore[arg-type]  # a type is hashable
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise RecordError(f"{file}: cannot be read: {key + ': ' if key else ''}{first['msg']}") from None
    return record


def read(kind: type[_R], path: str) -> _R:
    """The record in a file.

    Raises:
        RecordError: the file holds no such record; OSError: it cannot be read.
    """
    try:
        tree = json.loads(storage.read(path))
    except ValueError as error:
        raise RecordError(f"{path}: cannot be read: {error}") from None
    return from_json(kind, tree, path)


def write(path: str, record: Any, indent: int | None = 2) -> None:
    """Writes the file of a record, as `encoded` makes it, in one piece. Raises OSError."""
    storage.put(path, encoded(record, indent))


def encoded(record: Any, indent: int | None = 2) -> bytes:
    """The file of a record, a dataclass. Raises ValueError at a number that JSON does not have (NaN, infinite)."""
    text = json.dumps(to_json(record), indent=indent, ensure_ascii=False, allow_nan=False, default=str)
    return (text + "\n").encode()


@dataclass
class RunRecord:
    """run.json: what a run is. It is written once; an output folder belongs to one fingerprint."""

    fingerprint: str
    config: dict[str, Any]
    created: str | None = None  # ISO 8601
    versions: dict[str, str] = field(default_factory=dict)  # of what an answer may depend on


@dataclass
class PlanTotals:
    """plan/plan.json.

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
class Lease:
    """lease.json: the session that holds a run, or held it last, and its process.

    since: ISO 8601. beat: grows while it is alive. started: ticks since boot. machine: its boot and process space.
    """

    session: str = ""
    since: str = ""
    beat: int = 0
    ended: bool = False
    host: str = ""
    pid: int = 0
    started: str | None = None
    machine: str | None = None


@dataclass
class Session:
    """sessions/<id>.json: when a session began, was last alive and ended, and how (complete, interrupted, ...)."""

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
    """What a worker reports to the driver of a unit.

    ok, failed: documents. error: why it was not done, and then retry: whether it may be at another time. fatal: no
    worker can. handed_back: because the scheduler asked for it. unreadable: it is the input's fault alone.
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


@dataclass
class Seconds:
    """What a worker did with its time, in seconds; prefill and decode together are its busy time."""

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
        prefill, decode = min(prefill, self.prefill), min(decode, self.decode)
        self.prefill -= prefill
        self.decode -= decode
        self.lost += prefill + decode


@dataclass
class NodeTime:
    """One machine in a session.

    began, ended: when it was there; on a bill, began is when the session began to pay for it, and `came` when it was
    there. ended None: it still is. slots: workers that fit on it. seconds, usd: on a bill, what is paid.
    """

    node: str
    began: float
    head: bool = False
    instance_type: str | None = None
    market: str = "local"
    region: str | None = None
    usd_per_hour: float = 0.0
    price_source: str = ""
    ended: float | None = None
    gpus: float = 0.0
    slots: int = 0
    seconds: float = 0.0
    usd: float = 0.0
    came: float | None = None


@dataclass
class WorkerTime:
    """All that a worker process did since it began, as it reports it to the ledger and as it stands on the bill.

    heard: when it last reported. sequence: the number of that report. open: busy (prefill, decode) seconds of units
    that are not committed. ended: on a bill, when it ended as far as is known; None while it works.
    """

    worker: str
    node: str
    began: float
    heard: float = 0.0
    ended: float | None = None
    pid: int = 0
    sequence: int = -1
    seconds: Seconds = field(default_factory=Seconds)
    open: dict[str, tuple[float, float]] = field(default_factory=dict)
    spans: Spans = field(default_factory=list)
    categories: dict[str, Counts] = field(default_factory=dict)  # of committed units
    method: str = ""
    ok: int = 0  # documents
    failed: int = 0
    gpus: float = 0.0
    joules: float | None = None

    @property
    def state(self) -> str:
        """What it does: startup, busy, idle, lost or ended."""
        if self.ended is not None:
            return "ended"
        return self.spans[-1][2] if self.spans else "startup"

    def lived(self, until: float = 0.0) -> float:
        """Seconds from its begin to its end, or `until` where it works."""
        return max((until if self.ended is None else self.ended) - self.began, 1e-9)

    def spent(self, kind: str) -> float:
        """Seconds of a kind of span."""
        return sum(ended - began for began, ended, state, _ in self.spans if state == kind)


@dataclass
class Energy:
    """Of the GPUs; None where one was neither measured nor given watts."""

    kwh: float | None = None
    co2e_kg: float | None = None
    source: str | None = None


@dataclass
class Bill:
    """ledger/<session>.json: the bill of a session as it stands at `until`.

    parts, seconds: money and slot-seconds by what they went to (`billing.bill.PARTS`). categories, methods: the whole
    bill in proportion to the busy seconds behind them. series: [time, usd, documents, failed, decode tokens]. shares:
    from when on how many runs were on the cluster. final: it has ended.
    """

    session: str
    began: float
    usd: float
    until: float = 0.0
    final: bool = False
    currency: str = "USD"
    budget_usd: float | None = None
    deadline: str | None = None
    nodes: list[NodeTime] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    categories: dict[str, Counts] = field(default_factory=dict)
    methods: dict[str, Counts] = field(default_factory=dict)
    workers: list[WorkerTime] = field(default_factory=list)
    series: list[list[float]] = field(default_factory=list)
    energy: Energy = field(default_factory=Energy)
    totals: dict[str, int] = field(default_factory=dict)  # documents, ok, failed, tokens by kind
    shares: list[tuple[float, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.until = self.until or self.began


@dataclass
class RunCost:
    """The bills of all sessions of a run together, as its manifest holds them. prices: where they are from."""

    usd: float
    usd_per_1000_documents: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    sessions: int = 1
    documents: int = 0
    kwh: float | None = None
    co2e_kg: float | None = None
    prices: list[str] = field(default_factory=list)
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
    """A file of the input of which units cannot be read: their bytes, why the first cannot, and how many they are."""

    source: str
    bytes: int
    error: str
    units: int = 1


@dataclass
class Manifest:
    """manifest.json: a run's totals.

    fake: `model: fake` made the answers up. truncated: documents that were cut to fit the model's context.
    units_unreadable: because of the input; `unreadable` has the first hundred. documents_per_second: over the time of
    all sessions. cost: None where no ledger ran.
    """

    fingerprint: str = ""
    fake: bool = False
    documents: int = 0
    ok: int = 0
    failed: int = 0
    truncated: int = 0
    units: int = 0
    units_planned: int = 0
    units_unreadable: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0
    decode_tokens: int = 0
    seconds: float = 0.0
    documents_per_second: float = 0.0
    started: str | None = None
    ended: str | None = None
    sessions: list[SessionTotals] = field(default_factory=list)
    unreadable: list[UnreadableUnit] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    cost: RunCost | None = None


@dataclass(frozen=True)
class NightStart:
    """night.json: what a night began with; a start that finds the same goes on with it.

    digest: of the input. after: the last good night.
    """

    digest: str
    after: str | None
    fingerprint: str
    full: bool
    retry_errors: bool


@dataclass
class NightState:
    """state.json: the last good night.

    documents, failed: of the table; objects: how many it has. base: the fingerprint without the categories. hidden:
    digest of the objects that could not be read, "" where all could. index: its files, below the nightly root.
    """

    night: str
    fingerprint: str
    base: str
    documents: int
    failed: int
    objects: int
    index: list[str]
    config: dict[str, Any]
    hash_column: str | None = None
    hidden: str = ""
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
class HostedEstimate:
    """What a hosted batch service would ask for the same tokens, at its list price of a date.

    input, output: USD per million tokens. source: of the price. usd: of the whole corpus.
    """

    model: str
    input: float
    output: float
    date: str
    source: str
    usd_per_1000: Figure
    usd: Figure


@dataclass(kw_only=True)
class Estimate:
    """What estimate.json holds: the speed of one worker, and what the corpus takes on each kind of machine.

    fingerprint, model, task: of the configuration. not_measured: GPU -> instance types. sample: how it was measured.
    hosted_tokens: input and output of a document, as `hosted` takes them.
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
    hosted: list[HostedEstimate] = field(default_factory=list)
    hosted_tokens: dict[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        datetime.fromisoformat(self.created)  # a file with another text in its place is damaged

    @property
    def created_at(self) -> float:
        """Unix seconds."""
        return datetime.fromisoformat(self.created).timestamp()
