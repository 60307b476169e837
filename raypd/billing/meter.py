"""What a worker does with its time: measured in the worker, reported to the ledger.

A report holds all since the worker began, under a growing number, so that a lost, double or late
one does no harm.
"""

import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from raypd.run.records import CardUse, Counts, Spans, WorkerTime

_JOIN_SECONDS = 0.05  # a pause between two steps that is shorter belongs to them
_MOST_SPANS = 120  # of one worker
COUNTS = ("documents", "prefill_tokens", "shared_tokens", "decode_tokens")


def zero() -> Counts:
    return {**dict.fromkeys(COUNTS, 0), "seconds": 0.0}


@dataclass
class UnitUsage:
    """The busy seconds of an attempt at a unit, and what it counted by category."""

    prefill: float = 0.0
    decode: float = 0.0
    categories: dict[str, Counts] = field(default_factory=dict)

    def share(self) -> None:
        """Gives every category its share of the seconds: of prefill and decode each by the
        tokens.
        """
        for spent, count in ((self.prefill, "prefill_tokens"), (self.decode, "decode_tokens")):
            weights = {name: counts[count] for name, counts in self.categories.items()}
            if not sum(weights.values()):
                weights = {name: counts["documents"] for name, counts in self.categories.items()}
            weight_sum = sum(weights.values()) or 1
            for name, counts in self.categories.items():
                counts["seconds"] += spent * weights[name] / weight_sum


class Meter:
    """A worker's spans without gaps: startup, busy, idle, lost.

    Safe in threads. clock: unix seconds. power: joules.
    """

    def __init__(
        self,
        node: str = "",
        method: str = "",
        gpus: float = 0.0,
        clock: Callable[[], float] = time.time,
        power: Callable[[], float | None] = lambda: None,
        cards: Callable[[], CardUse | None] = lambda: None,
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self._clock, self._power, self._cards, self._lock = clock, power, cards, threading.Lock()
        self._at = clock()  # up to which the spans reach
        self._totals = WorkerTime(
            self.id, node, self._at, pid=os.getpid(), method=method, gpus=gpus
        )
        self._state = "startup"
        self._units: defaultdict[str, UnitUsage] = defaultdict(UnitUsage)
        self._fed = (0, 0)  # tokens of ended programs
        self._last = (0, 0)  # the same and those of running ones, after the last step
        self._tokens = (0, 0)  # that went through the model, of prompts and of answers
        self._ratio = 1.0  # share of prefill in the last step that fed anything
        self._programs: dict[str, int] = {}  # programs by unit in the step that runs or ran last

    def ready(self) -> None:
        """The model is loaded: from here on the worker is idle or busy."""
        with self._lock:
            self._go_on(self._clock(), None)
            self._state = "idle"

    def begin(self, unit: str) -> None:
        with self._lock:
            self._units[unit] = UnitUsage()

    def documents(self, unit: str, categories: Iterable[str]) -> None:
        with self._lock:
            for name in categories:
                self._units[unit].categories.setdefault(name, zero())["documents"] += 1

    def tokens(self, unit: str, categories: Sequence[str], counts: Any) -> None:
        """Shares a program's cost over its documents, by their categories, in whole tokens. counts:
        `TokenCounts`.
        """
        with self._lock:
            for i, category in enumerate(categories):
                totals = self._units[unit].categories.setdefault(category, zero())
                for name in COUNTS[1:]:
                    total = getattr(counts, name, 0)
                    totals[name] += (i + 1) * total // len(categories) - i * total // len(
                        categories
                    )

    def end(self, unit: str) -> UnitUsage:
        """An attempt's seconds and counts, shared by category; it stays open until `commit` or
        `lose`.
        """
        with self._lock:
            done = deepcopy(self._units[unit])
        done.share()
        return done

    def commit(self, unit: str, done: UnitUsage, ok: int, failed: int) -> None:
        """The unit is in the output by this attempt. done: what `end` returned; ok, failed: its
        documents.
        """
        with self._lock:
            self._units.pop(unit, None)
            self._totals.ok += ok
            self._totals.failed += failed
            both = [*self._totals.categories.items(), *done.categories.items()]
            self._totals.categories = added(both)  # a new one: reports hold the old

    def lose(self, unit: str) -> None:
        """An attempt that failed; no-op for one that has ended."""
        with self._lock:
            usage = self._units.pop(unit, None)
            if usage is not None:
                self._totals.seconds.lose(usage.prefill, usage.decode)
                lost = [*self._totals.lost_categories.items(), *usage.categories.items()]
                self._totals.lost_categories = added(lost)

    def step(self, engine: Any, programs: Mapping[str, int]) -> list[Any]:
        """Runs one step of the engine and books its time. programs: how many are in it, by the id
        of their unit.
        """
        with self._lock:
            now = self._clock()
            if now - self._at > _JOIN_SECONDS:
                self._go_on(now, None)
            self._state, self._programs = "busy", dict(programs)
        finished: list[Any] = engine.step()
        with self._lock:
            self._count(finished, engine.sequences)
            spent = self._go_on(self._clock(), next(iter(programs), None))
            self._state = "idle"
            for unit, (prefill, decode) in self._shares(spent).items():
                self._units[unit].prefill += prefill
                self._units[unit].decode += decode
        return finished

    def totals(self) -> tuple[float, float, int, int]:
        """Seconds of prefill and of decode, and tokens of each, up to the end of the last step."""
        with self._lock:
            return self._totals.seconds.prefill, self._totals.seconds.decode, *self._tokens

    def _shares(self, spent: float) -> dict[str, tuple[float, float]]:
        """Seconds of a step, (prefill, decode), by unit: as many as each had programs in it."""
        programs = sum(self._programs.values()) or 1
        shares = {
            unit: spent * n / programs for unit, n in self._programs.items() if unit in self._units
        }
        return {
            unit: (share * self._ratio, share * (1 - self._ratio)) for unit, share in shares.items()
        }

    def _count(self, finished: Sequence[Any], sequences: Sequence[Any]) -> None:
        """Splits the step's time by the tokens that it put in: those of prompts and those of
        answers.
        """
        self._fed = _plus(self._fed, finished)
        now = _plus(self._fed, sequences)
        prefill, decode = (max(0, a - b) for a, b in zip(now, self._last, strict=True))
        self._last = now
        self._tokens = (self._tokens[0] + prefill, self._tokens[1] + decode)
        if prefill + decode:
            self._ratio = prefill / (prefill + decode)

    def _go_on(self, now: float, unit: str | None, report: WorkerTime | None = None) -> float:
        """Books the time since the last booking to the state, or only in a report; how much it
        was.
        """
        spent = max(0.0, now - self._at)
        record = report or self._totals
        if self._state == "busy":
            record.seconds.prefill += spent * self._ratio
            record.seconds.decode += spent * (1 - self._ratio)
        else:
            vars(record.seconds)[self._state] += spent
        if spent > 0:
            record.spans = joined(record.spans, (self._at, now, self._state, unit))
        self._at = max(self._at, now) if report is None else self._at
        return spent

    def report(self) -> WorkerTime:
        """All so far, under the next number."""
        with self._lock:
            now = self._clock()
            # A long load or wait goes on the bill as it goes.
            if self._state != "busy" and now - self._at > 1.0:
                self._go_on(now, None)
            self._totals.sequence += 1
            report = replace(self._totals, heard=now, seconds=replace(self._totals.seconds))
            report.joules, report.cards = self._power(), self._cards()
            report.open = {name: (unit.prefill, unit.decode) for name, unit in self._units.items()}
            report.open_categories = added(
                each for unit in self._units.values() for each in unit.categories.items()
            )
            # A step that runs is reported as far as it is, and counted when it has ended.
            if self._state == "busy":
                running = self._go_on(now, next(iter(self._programs), None), report)
                for name, (prefill, decode) in self._shares(running).items():
                    report.open[name] = (
                        report.open[name][0] + prefill,
                        report.open[name][1] + decode,
                    )
            return report


def added(counts: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, Counts]:
    """Counts by name, those of one name together, as a bill has them."""
    totals: dict[str, Counts] = {}
    for name, count in counts:
        total = totals.setdefault(name, zero())
        for key, value in count.items():
            total[key] = total.get(key, 0) + value
    return dict(sorted(totals.items()))


def _plus(fed: tuple[int, int], programs: Sequence[Any]) -> tuple[int, int]:
    prefill = sum(program.counts.prefill_tokens for program in programs)
    return fed[0] + prefill, fed[1] + sum(program.counts.decode_tokens for program in programs)


def joined(spans: Spans, span: tuple[float, float, str, str | None]) -> Spans:
    """Spans with one more at the end: joined to the last where that goes on, coarser when there are
    many.
    """
    if spans and spans[-1][2:] == span[2:] and span[0] - spans[-1][1] < _JOIN_SECONDS:
        return [*spans[:-1], (spans[-1][0], span[1], span[2], span[3])]
    spans = [*spans, span]
    return spans if len(spans) <= _MOST_SPANS else coarser(spans)


def coarser(spans: Spans) -> Spans:
    """Half as many spans: two neighbours become one with the name of the longer."""
    pairs = [spans[i : i + 2] for i in range(0, len(spans), 2)]
    longer = [max(pair, key=lambda span: span[1] - span[0]) for pair in pairs]
    return [(pair[0][0], pair[-1][1], *span[2:]) for pair, span in zip(pairs, longer, strict=True)]
