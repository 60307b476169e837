"""What a run tells while it goes: a board that workers report to, and the bar or lines that are made of it."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

_LINE_SECONDS = 10.0


class Board:
    """A small actor: which units are in work, how far they are, and how often each was begun.

    Nothing but the display and the `attempts` column depends on it; a run goes on without it.
    """

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        self._now: dict[str, tuple[int, int]] = {}
        self._starts = 0

    def starting(self) -> None:
        """A worker process begins to load its model."""
        self._starts += 1

    def ready(self) -> None:
        """A worker has loaded its model."""
        self._starts = 0

    def starts(self) -> int:
        """How often a worker began to load since one was ready: it grows where they die of loading."""
        return self._starts

    def begin(self, unit: str) -> int:
        """A worker starts on a unit; the number of the attempt, from 1."""
        self._begun[unit] = self._begun.get(unit, 0) + 1
        self._now[unit] = (0, 0)
        return self._begun[unit]

    def report(self, unit: str, answered: int, failed: int) -> None:
        """Documents of a unit that are answered so far, and how many of them with an error."""
        self._now[unit] = (answered, failed)

    def snapshot(self, ended: list[str]) -> dict[str, tuple[int, int]]:
        """The units in work: {unit: (answered, failed)}; `ended` are forgotten."""
        for unit in ended:
            self._now.pop(unit, None)
            self._begun.pop(unit, None)
        return dict(self._now)


class Display:
    """Progress on stderr: a bar on a terminal, a line every ten seconds elsewhere.

    total: documents of the run; done, failed: those that were committed before it began.
    """

    def __init__(self, total: int, done: int, failed: int, stream: TextIO | None = None) -> None:
        self.total, self._before = total, done
        self._done, self._failed = done, failed
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream)
        self._started = self._printed = time.monotonic()
        self._begun = False
        self._bar: Progress | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} documents"),
                _Speed(self),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[failed]} failed"),
                console=self._console,
                transient=False,
            )
            self._row = self._bar.add_task("extract", total=self.total, completed=self._done, failed=self._failed)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self) -> None:
        """The first unit is in work: from here on the clock of documents/s runs."""
        if not self._begun:
            self._begun, self._started = True, time.monotonic()

    def rate(self) -> float:
        """Documents a second since the first unit was begun."""
        return (self._done - self._before) / max(time.monotonic() - self._started, 1e-6)

    def update(self, done: int, failed: int) -> None:
        """Shows how many documents are answered and failed, those of units in work among them."""
        self._done, self._failed = max(done, self._before), failed
        if self._bar is not None:
            self._bar.update(self._row, completed=self._done, failed=failed)
        elif time.monotonic() - self._printed >= _LINE_SECONDS:
            self._printed = time.monotonic()
            if not self._begun:
                self.say(f"{self._done}/{self.total} documents, workers are starting")
                return
            left = (self.total - self._done) / self.rate() if self.rate() > 0 else None
            ends = f", {_clock(left)} left" if left is not None else ""
            self.say(f"{self._done}/{self.total} documents, {self.rate():.2f}/s{ends}, {failed} failed")

    def say(self, line: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._stream, flush=True)


class _Speed(ProgressColumn):
    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        return Text(f"{self._display.rate():.2f}/s")


def _clock(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def poll(board: Any, ended: list[str]) -> tuple[dict[str, tuple[int, int]], int] | None:
    """The board's (snapshot, starts), or None when it does not answer."""
    import ray

    try:
        snapshot, starts = ray.get([board.snapshot.remote(ended), board.starts.remote()], timeout=5)
        return snapshot, starts
    except ray.exceptions.RayError:
        return None
