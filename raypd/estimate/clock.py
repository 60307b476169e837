"""The clock of a measurement: stands between a worker and its engine and task, and sees each pass and each document.

Tokens are told to documents pass by pass, from the counts of the rows in the engine, and a pass's time with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypd.cluster.components import Engine, WorkerComponents
from raypd.tasks.base import Document, Record, Request, Task

RING = "raypd ring"  # the field of a document's copy that holds its number in the ring
_STRETCHES = 8  # parts of the window whose speeds are compared


@dataclass
class Cost:
    """What one document took. seconds: of one worker. rows: the columns of its output rows; error: why it has none."""

    seconds: float
    prefill_tokens: float
    shared_tokens: float
    decode_tokens: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


@dataclass(eq=False)
class _Lap:
    """One time that a document comes round."""

    number: int
    seconds: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)
    open: int = 0  # works that have not ended
    planned: bool = False  # no more works come of it
    ended: float | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


class _Work(Request):
    """A work that tells the meter when it fails (`finish` is wrapped)."""

    failed: Callable[[str], None]

    def fail(self, reason: str) -> list[Record]:
        self.failed(reason)
        return super().fail(reason)


class Meter:
    """Stands between a worker and its engine and task, and keeps the clock.

    lead: completed documents before the clock starts. count: documents that the clock runs for.
    """

    def __init__(
        self,
        parts: WorkerComponents,
        lead: int,
        count: int,
        limit: float | None = None,
        tell: Callable[[int, int], None] | None = None,
    ) -> None:
        self.parts = WorkerComponents(_Engine(parts.engine, self), _Task(parts.task, self), parts.sampling)
        self.lead, self.count, self._tell = lead, count, tell
        self._deadline = None if limit is None else time.perf_counter() + limit
        self._lock = threading.Lock()
        self.laps: list[_Lap] = []
        self.completed = 0
        self._missing: set[int] = set()  # documents of the ring that were not completed once
        self.whose: dict[int, Sequence[_Lap]] = {}  # id of a program -> the documents it answers
        self.fed: list[tuple[Sequence[_Lap], float]] = []  # what went into the pass in hand: whose, how many tokens
        self._unshared = 0.0  # seconds of passes that are in no document's count yet
        self.steps: list[tuple[float, float]] = []  # (tokens, seconds) while the clock runs
        self._last: float | None = None
        self._start: tuple[float, int] | None = None
        self._end: tuple[float, int] | None = None
        self.closed = self.cut_short = False

    # ------------------------------------------------------------------------------------- told by the task's thread

    def come(self, laps: Sequence[_Lap]) -> None:
        with self._lock:
            self.laps += laps
            self._missing |= {lap.number for lap in laps}

    def opened(self, laps: Sequence[_Lap]) -> None:
        with self._lock:
            for lap in laps:
                lap.open += 1

    def ended(self, laps: Sequence[_Lap]) -> None:
        with self._lock:
            for lap in laps:
                lap.open -= 1
                self._check(lap)

    def planned(self, laps: Sequence[_Lap]) -> None:
        with self._lock:
            for lap in laps:
                lap.planned = True
                self._check(lap)

    def _check(self, lap: _Lap) -> None:
        if lap.planned and lap.open == 0 and lap.ended is None and not self.closed:
            lap.ended = time.perf_counter()
            self.completed += 1
            self._missing.discard(lap.number)

    # ----------------------------------------------------------------------------------- told by the engine's thread

    def stepped(self, began: float) -> None:
        """After each pass: shares its time out, and starts or stops the clock."""
        now = time.perf_counter()
        # Time between two passes belongs to the work, too, unless the engine had nothing to do.
        seconds = now - (self._last if self._last is not None else began)
        self._last = now
        tokens = sum(n for _, n in self.fed)
        self._unshared += seconds
        for laps, n in self.fed:
            for lap in laps:
                lap.seconds += self._unshared * n / tokens / len(laps)
        if self.fed:
            self._unshared = 0.0
        self.fed.clear()
        if self._start is not None and self._end is None:
            self.steps.append((tokens, seconds))
        with self._lock:
            completed = self.completed
            late = self._deadline is not None and now > self._deadline
            if self._start is None:
                if completed >= self.lead:
                    self._start = (now, completed)
            elif self._end is None and (late or completed - self._start[1] >= self.count):
                self._end = (now, completed)
            # Behind the clock, the slowest documents of the first round are still waited for: without them the figures
            # would be those of the quick ones.
            if late or (self._end is not None and not self._missing):
                self.closed = True
                self.cut_short = self._end is None or self._end[1] - (self._start or (0, 0))[1] < self.count
        if self._tell is not None:
            self._tell(min(completed, self.lead + self.count), self.lead + self.count)

    def idle(self) -> None:
        """The engine ran empty."""
        self._last = None

    # -------------------------------------------------------------------------------------------------------- results

    def result(self, documents: int) -> tuple[list[Cost | None], int, float, list[tuple[float, float]]]:
        """(costs, documents while the clock ran, seconds that it ran, stretches)."""
        ended = [lap for lap in self.laps if lap.ended is not None]
        if self._start is None:
            return [None] * documents, 0, 0.0, []
        end = self._end or (self._last or self._start[0], self.completed)
        began, seconds = self._start[0], end[0] - self._start[0]
        timed = [lap for lap in ended if began < (lap.ended or 0.0) <= end[0]]
        shared_out = sum(lap.seconds for lap in timed)
        scale = seconds / shared_out if shared_out > 0 else 0.0
        by_number: dict[int, list[_Lap]] = {}
        for lap in ended:
            by_number.setdefault(lap.number, []).append(lap)
        inside = {id(lap) for lap in timed}
        costs: list[Cost | None] = []
        for number in range(documents):
            laps = by_number.get(number, [])
            laps = [lap for lap in laps if id(lap) in inside] or laps[:1]
            costs.append(_cost(laps, scale) if laps else None)
        return costs, len(timed), seconds, _stretches(self.steps)

    def forget(self) -> None:
        """Lets go of engine and task."""
        self.parts = WorkerComponents(None, None, None)  # type: ignore[arg-type]
        self.laps = []


def _cost(laps: Sequence[_Lap], scale: float) -> Cost:
    def mean(name: str) -> float:
        return sum(lap.counts.get(name, 0.0) for lap in laps) / len(laps)

    first = laps[0]
    seconds = scale * sum(lap.seconds for lap in laps) / len(laps)
    tokens = mean("prefill_tokens"), mean("shared_tokens"), mean("decode_tokens")
    return Cost(seconds, *tokens, rows=first.rows, error=first.error)


def _stretches(steps: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The steps in parts of about as many tokens each."""
    total = sum(tokens for tokens, _ in steps)
    parts = min(_STRETCHES, len(steps) // 2)
    if parts < 2 or total <= 0:
        return []
    found: list[tuple[float, float]] = []
    done = tokens = seconds = 0.0
    for n, dt in steps:
        tokens, seconds, done = tokens + n, seconds + dt, done + n
        if done >= total * (len(found) + 1) / parts:
            found.append((tokens, seconds))
            tokens = seconds = 0.0
    return found


class _Engine:
    """The engine with a clock. After the window it hands everything back undone."""

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine, self._meter = engine, meter
        self._held: dict[int, tuple[Any, Sequence[_Lap]]] = {}  # id of a tag -> the tag, and whose program it is
        self._before: dict[int, int] = {}  # id of a tag -> tokens that had gone in at the last pass

    @property
    def pending(self) -> int:
        return len(self._held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, program: Any, *, tag: Any, sampling: Any, seed: int) -> None:
        laps = self._meter.whose.pop(id(program), ())
        if not self._meter.closed:
            self._engine.submit(program, tag=tag, sampling=sampling, seed=seed)
        self._held[id(tag)] = (tag, laps)

    def step(self) -> list[Any]:
        meter = self._meter
        if meter.closed:
            held, self._held = self._held, {}
            return [_Undone(tag) for tag, _ in held.values()]
        began = time.perf_counter()
        results = self._engine.step()
        for row in getattr(self._engine, "sequences", ()):  # what is in decoding
            self._note(row)
        for result in results:
            self._note(result)
            _, laps = self._held.pop(id(result.tag))
            self._before.pop(id(result.tag), None)
            for lap in laps:
                for name in ("prefill_tokens", "shared_tokens", "decode_tokens"):
                    lap.counts[name] = lap.counts.get(name, 0.0) + getattr(result.counts, name, 0) / len(laps)
        meter.stepped(began)
        if not self._held:
            meter.idle()
        return results

    def _note(self, row: Any) -> None:
        """How many tokens a row has put through the model since the last pass."""
        if id(row.tag) in self._held:
            tokens = row.counts.prefill_tokens + row.counts.decode_tokens
            more = tokens - self._before.get(id(row.tag), 0)
            self._before[id(row.tag)] = tokens
            if more > 0:
                self._meter.fed.append((self._held[id(row.tag)][1], more))


@dataclass
class _Undone:
    """A program that was still running when the clock stopped."""

    tag: Any
    answer: Any = None
    error: Exception = field(default_factory=lambda: RuntimeError("not wanted any more"))
    counts: Any = None


class _Task:
    """The task, whose works are watched."""

    def __init__(self, task: Task, meter: Meter) -> None:
        self._task, self._meter = task, meter

    def input_columns(self) -> list[str]:
        return self._task.input_columns()

    def columns(self) -> Any:
        return self._task.columns()

    def plan(self, documents: Sequence[Document]) -> Iterator[Request | Record]:
        laps = {document.row: _Lap(int(document.fields[RING])) for document in documents}
        self._meter.come(list(laps.values()))
        before: list[_Lap] = []
        for item in self._task.plan(documents):
            if self._meter.closed:
                return
            rows = item.rows if isinstance(item, Request) else [item.row]
            own = [laps[row] for row in rows]
            if before and before != own:
                self._meter.planned(before)
            before = own
            if isinstance(item, Request):
                self._meter.opened(own)
                yield self._watched(item, own)
            else:
                _keep(own[0], item)
                yield item
        self._meter.planned(before)

    def _watched(self, work: Request, laps: list[_Lap]) -> Request:
        def finish(answer: Any) -> Sequence[Record | Request]:
            by_row = dict(zip(work.rows, laps, strict=True))
            items: list[Record | Request] = []
            for item in work.finish(answer):
                if isinstance(item, Request):
                    own = [by_row[row] for row in item.rows]
                    self._meter.opened(own)
                    items.append(self._watched(item, own))
                else:
                    _keep(by_row[item.row], item)
                    items.append(item)
            self._meter.ended(laps)
            return items

        def failed(reason: str) -> None:
            for lap in laps:
                lap.error = reason
            self._meter.ended(laps)

        self._meter.whose[id(work.program)] = laps
        watched = _Work(work.rows, work.program, finish, work.seed)
        watched.failed = failed
        return watched


def _keep(lap: _Lap, record: Record) -> None:
    if record.error is not None:
        lap.error = record.error
    else:
        lap.rows.append(record.columns)
