"""Shows the progress of a run: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from raypd.text import duration, number, said

# Seconds between two lines of progress if there is no terminal.
_LINE_SECONDS = 10.0
# Seconds before a rate is shown; an earlier rate would not mean much.
_RATE_SECONDS = 1.0
# The time left is not known before this many documents are answered, or before one is answered and
# some time has passed, because the engine is still filling up during the first documents.
_LEFT_DOCUMENTS = 10
_LEFT_SECONDS = 60.0
# A run has more documents in flight at its beginning, which end at about the same time. So it waits
# for 5% of its documents, but for no more than 100.
_RUN_SHARE = 0.05
_MOST_RUN_DOCUMENTS = 100
_RUN_SECONDS = 600.0
_LOADING = "loading the model"


class ProgressLines:
    """Prints progress to stderr if there is no terminal.

    It prints a line every ten seconds, and never the same line twice in a row.
    """

    def __init__(self) -> None:
        self._printed = time.monotonic()
        self._last = ""

    def show(self, line: str, at_once: bool = False) -> None:
        """Print a line if one is due.

        Args:
            line: The line.
            at_once: Whether to print it even if the last line is less than ten seconds old.
        """
        is_time = at_once or time.monotonic() - self._printed >= _LINE_SECONDS
        if line != self._last and is_time:
            self._printed = time.monotonic()
            self._last = line
            print(line, file=sys.stderr, flush=True)


def time_left(
    answered: int,
    remaining: int,
    seconds: float,
    enough: float = _LEFT_DOCUMENTS,
    known_after: float = _LEFT_SECONDS,
) -> float | None:
    """Return the seconds that the remaining documents take; None until they can be known.

    Args:
        answered: Documents that were answered.
        remaining: Documents that were not.
        seconds: The time in which documents were answered.
        enough: The number of answered documents from which the time is known.
        known_after: Seconds after which one answered document is enough.
    """
    too_early = answered < enough and seconds < known_after
    if not answered or seconds < _RATE_SECONDS or too_early:
        return None
    return remaining * seconds / answered


class TimeLeft:
    """The time left in a measurement with a time limit."""

    def __init__(self, limit: float) -> None:
        """Make a clock, which starts at the first update.

        Args:
            limit: Seconds after which the measurement ends in any case.
        """
        self._limit = limit
        self._started = 0.0
        self._answered: int | None = None

    def update(self, answered: int, wanted: int) -> str:
        """Return the time left in words; "" until it can be known.

        Args:
            answered: Documents that were answered. If the number falls, another pass over the
                sample has begun.
            wanted: Documents that the pass answers.
        """
        now = time.monotonic()
        if self._answered is None or answered < self._answered:
            self._started = now
        self._answered = answered
        seconds = now - self._started
        left = time_left(answered, wanted - answered, seconds)
        if left is None:
            return ""
        until_limit = self._limit - seconds
        if min(left, until_limit) < 1:
            return ""
        if until_limit < left:
            return f"at most {duration(until_limit)} left"
        return f"{duration(left)} left"


class _Bar(Progress):
    """A bar with a line below it."""

    line = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.line:
            yield Text(self.line, style="dim")


class RunDisplay:
    """Shows the progress of a run: a bar on a terminal, lines elsewhere.

    Attributes:
        total: The number of documents.
        exact: Whether they were counted; otherwise it is an estimate.
    """

    def __init__(self, total: int, done: int, exact: bool = True) -> None:
        """Make a display, which is shown when it is entered as a context.

        Args:
            total: The number of documents.
            done: Documents that were committed before the run began.
            exact: Whether `total` was counted.
        """
        self.total = total
        self.exact = exact
        self._done_before = done
        self._done = done
        self._started = time.monotonic()
        self._has_begun = False
        self._lines = ProgressLines()
        console = Console(file=sys.stderr)
        self._bar = _Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.fields[planned]} documents"),
            TextColumn("{task.fields[rate]}/s"),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[failed]} failed"),
            console=console,
            disable=not console.is_terminal,
        )
        self._row = self._bar.add_task(
            _LOADING,
            total=total,
            completed=done,
            failed=0,
            rate="-",
            left="",
            planned=self._planned,
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
        """Note that the first worker is ready, from which time on the rate is counted."""
        if self._has_begun:
            return
        self._has_begun = True
        self._started = time.monotonic()
        self._bar.update(self._row, description="extract")

    def update(self, done: int, failed: int, stream: str = "") -> None:
        """Show the progress.

        Args:
            done: Documents that are answered, including those of units in flight.
            failed: Documents that failed, counted in the same way.
            stream: How far the stream of documents is; "" if nothing is read ahead.
        """
        self._bar.line = stream
        self._done = max(done, self._done_before)
        self.total = max(self.total, self._done)
        rate = self._rate()
        self._bar.update(
            self._row,
            total=self.total,
            completed=self._done,
            planned=self._planned,
            failed=failed,
            rate="-" if rate is None else number(rate),
            left=self._left(rate),
        )
        if self._bar.disable and self._has_begun:
            line = self._line(rate, failed)
            if stream:
                line += f"; input: {stream}"
            self._lines.show(line)

    def _rate(self) -> float | None:
        """Return the documents per second since the first worker is ready; None if it is too early
        to tell.
        """
        seconds = time.monotonic() - self._started
        if not self._has_begun or seconds < _RATE_SECONDS:
            return None
        return (self._done - self._done_before) / seconds

    def _left(self, rate: float | None) -> str:
        """Return the time left in words; "" until it can be known.

        Args:
            rate: Documents per second; None if it is too early to tell.
        """
        if not rate:
            return ""
        seconds = time.monotonic() - self._started
        documents = self.total - self._done_before
        enough = max(_LEFT_DOCUMENTS, min(_RUN_SHARE * documents, _MOST_RUN_DOCUMENTS))
        answered = self._done - self._done_before
        left = time_left(answered, documents - answered, seconds, enough, _RUN_SECONDS)
        return "" if left is None else f"{duration(left)} left"

    def _line(self, rate: float | None, failed: int) -> str:
        parts = [f"{self._done}/{self._planned} documents"]
        if rate is not None:
            parts.append(f"{number(rate)}/s")
        left = self._left(rate)
        if left:
            parts.append(left)
        parts.append(f"{failed} failed")
        return ", ".join(parts)

    def say(self, line: str) -> None:
        """Print a separate line, above the bar."""
        line = said(line)
        if self._bar.disable:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(line, markup=False, highlight=False)
