"""What a run shows while it goes: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from raypd.run.text import duration, number

_LINE_SECONDS = 10.0


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
        """The first unit is in flight: documents/s count from here on."""
        if not self._begun:
            self._begun, self._started = True, time.monotonic()

    def rate(self) -> float:
        """Documents a second since the first unit was begun."""
        return (self._done - self._before) / max(time.monotonic() - self._started, 1e-6)

    def update(self, done: int, failed: int) -> None:
        """Shows how many documents are answered and failed, those of units in flight among them."""
        self._done, self._failed = max(done, self._before), failed
        if self._bar is not None:
            self._bar.update(self._row, completed=self._done, failed=failed)
        elif time.monotonic() - self._printed >= _LINE_SECONDS:
            self._printed = time.monotonic()
            if not self._begun:
                self.say(f"{self._done}/{self.total} documents, workers are starting")
                return
            left = (self.total - self._done) / self.rate() if self.rate() > 0 else None
            ends = f", {duration(left)} left" if left is not None else ""
            self.say(f"{self._done}/{self.total} documents, {number(self.rate())}/s{ends}, {failed} failed")

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
        return Text(f"{number(self._display.rate())}/s")
