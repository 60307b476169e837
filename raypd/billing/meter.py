"""Measure, in the worker, what it does with its time, and report that to the ledger.

A report's times cover everything since the worker began. Its usage by category, of which there may
be hundreds, covers only what the ledger has not counted yet. Reports have sequence numbers, so
lost, repeated and late ones do no harm.
"""

import contextlib
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from raypd.run import FIRST, Counts, OptionalGpuUse, Usage, UsageKey

# (began, ended, startup | busy | idle | lost, first unit in it)
Span = tuple[float, float, str, str | None]
Spans = list[Span]

_JOIN_SECONDS = 0.05  # a shorter pause between two steps belongs to the steps
_MAX_SPANS = 120  # per worker
COUNTS = ("documents", "prefill_tokens", "shared_tokens", "decode_tokens")
TOKEN_COUNTS = COUNTS[1:]
# Changes of the usage that are kept in case the ledger restarts from its file. If it has lost
# more than these, the bill is corrected from the committed units at the end of the run.
_MAX_KEPT_CHANGES = 100


_Name = TypeVar("_Name", str, UsageKey)


@dataclass
class Seconds:
    """A worker's time in seconds. It is busy during prefill and decode."""

    startup: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    idle: float = 0.0
    lost: float = 0.0

    @property
    def busy(self) -> float:
        """Seconds of prefill and decode."""
        return self.prefill + self.decode

    def total(self) -> float:
        """Return all seconds."""
        return self.startup + self.prefill + self.decode + self.idle + self.lost

    def lose(self, prefill: float, decode: float) -> None:
        """Move the busy seconds of a failed attempt to `lost`, up to the busy seconds so far."""
        prefill = min(prefill, self.prefill)
        decode = min(decode, self.decode)
        self.prefill -= prefill
        self.decode -= decode
        self.lost += prefill + decode


@dataclass(frozen=True)
class UsageChange:
    """The growth of a worker's usage between two of its reports."""

    sequence: int  # of the later report
    usage: Usage


@dataclass(frozen=True)
class Receipt:
    """The ledger's answer to a report: up to which report it has the worker's usage.

    Attributes:
        counted: The sequence of the last change that is counted.
        stored: The sequence of the last change that is counted in the bill's file.
    """

    counted: int
    stored: int


@dataclass
class WorkerTime:
    """Everything that a worker process has done so far: its report and its entry on the bill."""

    worker: str
    node: str
    began: float
    heard: float = 0.0  # when it last reported
    ended: float | None = None  # on a bill, if known; None while it works
    pid: int = 0
    sequence: int = -1  # number of the last report
    seconds: Seconds = field(default_factory=Seconds)
    # Units in flight: busy seconds (prefill, decode) by unit.
    open: dict[str, tuple[float, float]] = field(default_factory=dict)
    spans: Spans = field(default_factory=list)
    # By model, of all categories together.
    open_usage: Usage = field(default_factory=dict)  # of units in flight
    lost_usage: Usage = field(default_factory=dict)  # of failed attempts
    # In a report: the growth of the usage of committed units since the report `since`.
    changes: list[UsageChange] = field(default_factory=list)
    since: int = -1
    counted: int = -1  # on a bill: the sequence of the last change that is counted
    method: str = ""
    ok: int = 0  # documents
    failed: int = 0  # documents
    gpus: float = 0.0
    # Of the idle seconds, those in which the engine waited for input.
    input_seconds: float = 0.0
    joules: float | None = None
    gpu_use: OptionalGpuUse = None  # None without a GPU, or if NVML does not respond

    @property
    def state(self) -> str:
        """startup, busy, idle, lost or ended."""
        if self.ended is not None:
            return "ended"
        if self.spans:
            return self.spans[-1][2]
        return "startup"

    def lived(self, until: float = 0.0) -> float:
        """Return the seconds until the worker's end, or to `until` while it works."""
        end = until if self.ended is None else self.ended
        return max(end - self.began, 1e-9)

    def spent(self, kind: str) -> float:
        """Return the seconds of one kind of span."""
        return sum(ended - began for began, ended, state, _ in self.spans if state == kind)


def zero() -> Counts:
    """Return counts of 0."""
    return {**dict.fromkeys(COUNTS, 0), "seconds": 0.0}


@dataclass
class UnitUsage:
    """The busy seconds of one attempt at a unit, and its counts by category and model."""

    prefill: float = 0.0
    decode: float = 0.0
    categories: Usage = field(default_factory=dict)

    def share(self) -> None:
        """Divide the seconds over the categories: prefill and decode each by their tokens."""
        self._share(self.prefill, "prefill_tokens")
        self._share(self.decode, "decode_tokens")

    def _share(self, seconds: float, token_kind: str) -> None:
        weights = {key: counts[token_kind] for key, counts in self.categories.items()}
        if not sum(weights.values()):
            weights = {key: counts["documents"] for key, counts in self.categories.items()}
        weight_sum = sum(weights.values()) or 1
        for key, counts in self.categories.items():
            counts["seconds"] += seconds * weights[key] / weight_sum


class Meter:
    """The clock of a worker. It divides all of its time into startup, busy, idle and lost.

    The methods are thread-safe.

    Args:
        node: The id of the worker's node.
        method: The decoding method.
        gpus: GPUs of the worker.
        clock: Returns the time in unix seconds.
        power: Returns the joules that the GPUs have used so far, or None if they are not measured.
        gpu_use: Samples how the GPUs are used.
    """

    def __init__(
        self,
        node: str = "",
        method: str = "",
        gpus: float = 0.0,
        clock: Callable[[], float] = time.time,
        power: Callable[[], float | None] = lambda: None,
        gpu_use: Callable[[], OptionalGpuUse] = lambda: None,
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self._clock = clock
        self._power = power
        self._gpu_use = gpu_use
        self._lock = threading.Lock()
        self._booked_until = clock()
        self._totals = WorkerTime(
            self.id, node, self._booked_until, pid=os.getpid(), method=method, gpus=gpus
        )
        self._state = "startup"
        self._units: defaultdict[str, UnitUsage] = defaultdict(UnitUsage)
        # The usage of committed units: since the last report, and in earlier reports, which the
        # ledger may request again.
        self._new_usage: Usage = {}
        self._changes: list[UsageChange] = []
        self._receipt = Receipt(-1, -1)
        # (prefill tokens, decode tokens) of all programs that have ended.
        self._ended_tokens = (0, 0)
        # The same of all programs, ended or running, after the last step.
        self._seen_tokens = (0, 0)
        # The tokens that went through the model.
        self._model_tokens = (0, 0)
        self._prefill_share = 1.0  # share of prefill in the last step that fed any token
        self._programs: dict[str, int] = {}  # programs in the current or last step, by unit
        self._units_reading = 0
        # Idle seconds in which a unit was being read by this worker.
        self.reading_seconds = 0.0

    def ready(self) -> None:
        """Note that the model is loaded: the worker is idle or busy from now on."""
        with self._lock:
            self._book_time(self._clock(), None)
            self._state = "idle"

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Note that a unit is being read: the engine waits for input while it is idle."""
        self._change_reading(1)
        try:
            yield
        finally:
            self._change_reading(-1)

    def _change_reading(self, change: int) -> None:
        with self._lock:
            if self._state == "idle":
                self._book_time(self._clock(), None)
            self._units_reading += change

    def starved(self, seconds: float) -> None:
        """Note how long this worker had no unit because none had been read."""
        with self._lock:
            self._totals.input_seconds += seconds

    def begin(self, unit: str) -> None:
        """Begin an attempt at a unit."""
        with self._lock:
            self._units[unit] = UnitUsage()

    def documents(self, unit: str, categories: Iterable[str]) -> None:
        """Count the documents of a unit, given the category of each."""
        with self._lock:
            usage = self._units[unit].categories
            for category in categories:
                usage.setdefault(UsageKey(category), zero())["documents"] += 1

    def tokens(
        self, unit: str, categories: Sequence[str], counts: Any, model: str = FIRST
    ) -> list[Counts]:
        """Divide the tokens of a program over its documents, in whole tokens.

        Args:
            unit: The unit that the program belongs to.
            categories: The category of each document that the program answers.
            counts: The `TokenCounts` of the program.
            model: The model that answered, FIRST or SECOND.

        Returns:
            The tokens of each document.
        """
        shares = token_shares(counts, len(categories))
        with self._lock:
            usage = self._units[unit].categories
            for category, share in zip(categories, shares, strict=True):
                totals = usage.setdefault(UsageKey(category, model), zero())
                for kind, tokens in share.items():
                    totals[kind] += tokens
        return shares

    def end(self, unit: str) -> UnitUsage:
        """Return the usage of an attempt so far, with seconds divided by category.

        The attempt stays open until `commit` or `lose`.
        """
        with self._lock:
            usage = deepcopy(self._units[unit])
        usage.share()
        return usage

    def commit(self, unit: str, usage: UnitUsage, ok: int, failed: int) -> None:
        """Note that an attempt has committed its unit.

        Args:
            unit: The unit.
            usage: What `end` returned.
            ok: Documents that were answered.
            failed: Documents that failed.
        """
        with self._lock:
            self._units.pop(unit, None)
            self._totals.ok += ok
            self._totals.failed += failed
            add_to(self._new_usage, usage.categories)

    def lose(self, unit: str) -> None:
        """Note that an attempt has failed. Do nothing if it has already ended."""
        with self._lock:
            usage = self._units.pop(unit, None)
            if usage is None:
                return
            self._totals.seconds.lose(usage.prefill, usage.decode)
            # A new mapping, because earlier reports refer to the old one.
            self._totals.lost_usage = added(
                [*self._totals.lost_usage.items(), *_by_model(usage.categories)]
            )

    def step(self, engine: Any, programs: Mapping[str, int]) -> list[Any]:
        """Run one step of the engine and book its time.

        Args:
            engine: The engine.
            programs: The number of programs in the engine, by unit.

        Returns:
            The results of the programs that have ended.
        """
        with self._lock:
            now = self._clock()
            if now - self._booked_until > _JOIN_SECONDS:
                self._book_time(now, None)
            self._state = "busy"
            self._programs = dict(programs)
        results: list[Any] = engine.step()
        with self._lock:
            self._count_tokens(results, engine.sequences)
            seconds = self._book_time(self._clock(), next(iter(programs), None))
            self._state = "idle"
            for unit, (prefill, decode) in self._by_unit(seconds).items():
                self._units[unit].prefill += prefill
                self._units[unit].decode += decode
        return results

    def totals(self) -> tuple[float, float, int, int]:
        """Return (prefill seconds, decode seconds, prefill tokens, decode tokens) up to the end of
        the last step.
        """
        with self._lock:
            prefill_tokens, decode_tokens = self._model_tokens
            seconds = self._totals.seconds
            return seconds.prefill, seconds.decode, prefill_tokens, decode_tokens

    def _by_unit(self, seconds: float) -> dict[str, tuple[float, float]]:
        """Divide the seconds of a step over its units, in proportion to their programs.

        Returns:
            (prefill seconds, decode seconds) by unit.
        """
        programs = sum(self._programs.values()) or 1
        shares = {}
        for unit, count in self._programs.items():
            if unit in self._units:
                share = seconds * count / programs
                shares[unit] = (share * self._prefill_share, share * (1 - self._prefill_share))
        return shares

    def _count_tokens(self, results: Sequence[Any], sequences: Sequence[Any]) -> None:
        """Count the tokens of a step, by which its time is divided into prefill and decode."""
        self._ended_tokens = _plus(self._ended_tokens, results)
        now = _plus(self._ended_tokens, sequences)
        prefill = max(0, now[0] - self._seen_tokens[0])
        decode = max(0, now[1] - self._seen_tokens[1])
        self._seen_tokens = now
        self._model_tokens = (self._model_tokens[0] + prefill, self._model_tokens[1] + decode)
        if prefill + decode:
            self._prefill_share = prefill / (prefill + decode)

    def _book_time(self, now: float, unit: str | None, report: WorkerTime | None = None) -> float:
        """Book the time since the last booking to the current state.

        Args:
            now: The time, in unix seconds.
            unit: The first unit of the step, for the span.
            report: Gets the time instead of the meter, which books it later.

        Returns:
            The seconds that were booked.
        """
        spent = max(0.0, now - self._booked_until)
        record = report or self._totals
        if self._state == "busy":
            record.seconds.prefill += spent * self._prefill_share
            record.seconds.decode += spent * (1 - self._prefill_share)
        else:
            vars(record.seconds)[self._state] += spent
        if self._state == "idle" and self._units_reading:
            record.input_seconds += spent
            self.reading_seconds += spent
        if spent > 0:
            record.spans = joined(record.spans, (self._booked_until, now, self._state, unit))
        if report is None:
            self._booked_until = max(self._booked_until, now)
        return spent

    def received(self, receipt: Receipt) -> None:
        """Note which changes of the usage the ledger has."""
        with self._lock:
            self._receipt = receipt
            self._changes = [change for change in self._changes if change.sequence > receipt.stored]

    def report(self) -> WorkerTime:
        """Return the time so far and the usage that is not counted yet, with the next number."""
        with self._lock:
            now = self._clock()
            # A long load or wait is on the bill before it ends.
            if self._state != "busy" and now - self._booked_until > 1.0:
                self._book_time(now, None)
            self._totals.sequence += 1
            if self._new_usage:
                self._keep_change(UsageChange(self._totals.sequence, self._new_usage))
                self._new_usage = {}
            report = replace(self._totals, heard=now, seconds=replace(self._totals.seconds))
            report.joules = self._power()
            report.gpu_use = self._gpu_use()
            report.open = {name: (unit.prefill, unit.decode) for name, unit in self._units.items()}
            report.open_usage = added(
                each for unit in self._units.values() for each in _by_model(unit.categories)
            )
            report.since = self._receipt.counted
            report.changes = [change for change in self._changes if change.sequence > report.since]
            if self._state == "busy":
                self._add_running_step(report, now)
            return report

    def _keep_change(self, change: UsageChange) -> None:
        """Keep a change until it is in the bill's file; of many, drop or join the oldest."""
        self._changes.append(change)
        if len(self._changes) <= _MAX_KEPT_CHANGES:
            return
        oldest = self._changes.pop(0)
        if oldest.sequence > self._receipt.counted:
            following = self._changes[0]
            usage = added([*oldest.usage.items(), *following.usage.items()])
            self._changes[0] = UsageChange(following.sequence, usage)

    def _add_running_step(self, report: WorkerTime, now: float) -> None:
        """Add the part of the current step that has passed; the meter books it when it ends."""
        seconds = self._book_time(now, next(iter(self._programs), None), report)
        for unit, (prefill, decode) in self._by_unit(seconds).items():
            open_prefill, open_decode = report.open[unit]
            report.open[unit] = (open_prefill + prefill, open_decode + decode)


def token_shares(counts: Any, documents: int) -> list[Counts]:
    """Divide the tokens of a program evenly over its documents, in whole tokens.

    Args:
        counts: The `TokenCounts` of the program.
        documents: The number of documents.

    Returns:
        The tokens by kind, of each document.
    """
    shares: list[Counts] = []
    for i in range(documents):
        share: Counts = {}
        for kind in TOKEN_COUNTS:
            total = getattr(counts, kind, 0)
            share[kind] = (i + 1) * total // documents - i * total // documents
        shares.append(share)
    return shares


def added(counts: Iterable[tuple[_Name, Mapping[str, float]]]) -> dict[_Name, Counts]:
    """Add up the counts of equal keys, and sort the result by key."""
    totals: dict[_Name, Counts] = {}
    for name, count in counts:
        total = totals.setdefault(name, zero())
        for kind, value in count.items():
            total[kind] = total.get(kind, 0) + value
    return dict(sorted(totals.items()))


def add_to(totals: dict[_Name, Counts], counts: Mapping[_Name, Mapping[str, float]]) -> None:
    """Add counts to totals, in place."""
    for name, count in counts.items():
        total = totals.setdefault(name, zero())
        for kind, value in count.items():
            total[kind] = total.get(kind, 0) + value


def _by_model(usage: Usage) -> list[tuple[UsageKey, Counts]]:
    """Return usage without its categories."""
    return [(UsageKey("", key.model), counts) for key, counts in usage.items()]


def _plus(tokens: tuple[int, int], programs: Sequence[Any]) -> tuple[int, int]:
    """Add the (prefill, decode) tokens of some programs."""
    prefill, decode = tokens
    for program in programs:
        prefill += program.counts.prefill_tokens
        decode += program.counts.decode_tokens
    return prefill, decode


def joined(spans: Spans, span: Span) -> Spans:
    """Append a span, or extend the last one with it; halve the spans if there are many.

    Returns:
        A new list.
    """
    if spans:
        began, ended, *kind_and_unit = spans[-1]
        if kind_and_unit == list(span[2:]) and span[0] - ended < _JOIN_SECONDS:
            return [*spans[:-1], (began, span[1], span[2], span[3])]
    spans = [*spans, span]
    return spans if len(spans) <= _MAX_SPANS else coarser(spans)


def coarser(spans: Spans) -> Spans:
    """Halve the number of spans: each pair becomes one span with the name of the longer one."""
    halved = []
    for i in range(0, len(spans), 2):
        pair = spans[i : i + 2]
        _, _, kind, unit = max(pair, key=lambda span: span[1] - span[0])
        halved.append((pair[0][0], pair[-1][1], kind, unit))
    return halved
