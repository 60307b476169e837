"""What a run shows while it goes: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from raypd.text import duration, number, said

_LINE_SECONDS = 10.0
_RATE_SECONDS = 1.0  # before which there is no rate
_LOADING = "loading the model"


class ProgressLines:
    """Progress on stderr where there is no terminal: a line every ten seconds, and none twice in a
    row.
    """

    def __init__(self) -> None:
        self._printed = time.monotonic()
        self._last = ""

    def show(self, line: str, at_once: bool = False) -> None:
        if line != self._last and (at_once or time.monotonic() - self._printed >= _LINE_SECONDS):
            self._printed = time.monotonic()
            self._last = line
            print(line, file=sys.stderr, flush=True)


class _Bar(Progress):
    """A bar with a line below it."""

    line = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.line:
            yield Text(self.line, style="dim")


class RunDisplay:
    """A bar on a terminal, lines elsewhere. total: documents, counted if `exact`; done: committed
    before it began.
    """

    def __init__(self, total: int, done: int, exact: bool = True) -> None:
        self.total = total
        self.exact = exact
        self._before = done
        self._done = done
        self._started, self._lines, self._begun = time.monotonic(), ProgressLines(), False
        console = Console(file=sys.stderr)
        self._bar = _Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.fields[planned]} documents"),
            TextColumn("{task.fields[rate]}/s"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[failed]} failed"),
            console=console,
            disable=not console.is_terminal,
        )
        self._row = self._bar.add_task(
            _LOADING, total=total, completed=done, failed=0, rate="0", planned=self._planned
        )

    def __enter__(self) -> None:
        self._bar.start()
        if self._bar.disable:
            self._lines.show(f"{self._done}/{self._planned} documents, {_LOADING}", at_once=True)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def _planned(self) -> str:
        return f"{self.total}" if self.exact else f"about {self.total}"

    def begin(self) -> None:
        """The first worker is ready: documents/s are counted from here on."""
        if not self._begun:
            self._begun, self._started = True, time.monotonic()
            self._bar.update(self._row, description="extract")

    def update(self, done: int, failed: int, stream: str = "") -> None:
        """Show how many documents are answered and failed, those of units in flight among them.

        Args:
            done: Documents answered.
            failed: Of these, with an error.
            stream: How far the stream of documents is; "" if nothing is read ahead.
        """
        self._bar.line = stream
        self._done = max(done, self._before)
        self.total = max(self.total, self._done)
        seconds = time.monotonic() - self._started
        # None as long as that is too short to tell.
        if self._begun and seconds >= _RATE_SECONDS:
            measured = (self._done - self._before) / seconds
        else:
            measured = None
        rate = "-" if measured is None else number(measured)
        shown = self._planned
        self._bar.update(
            self._row,
            total=self.total,
            completed=self._done,
            planned=shown,
            failed=failed,
            rate=rate,
        )
        if self._bar.disable and self._begun:
            speed = f", {rate}/s" if measured is not None else ""
            left = f", {duration((self.total - self._done) / measured)} left" if measured else ""
            line = f"{self._done}/{self._planned} documents{speed}{left}, {failed} failed"
            if stream:
                line += f"; input: {stream}"
            self._lines.show(line)

    def say(self, line: str) -> None:
        """A line of its own, above the bar."""
        line = said(line)
        if self._bar.disable:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(line, markup=False, highlight=False)
