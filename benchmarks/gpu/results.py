"""Rows that are measured once: they are kept in a file, within a budget of time."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

Figures = dict[str, Any]
# At most so many names of rows are printed that are left.
_NAMED = 8
# Seconds that are kept for the table.
_TABLE_SECONDS = 2.0


class OutOfTime(BaseException):
    """The budget is spent. No handler of errors takes it for one."""


class Results:
    """The rows of a script on one machine.

    Attributes:
        rows: Figures by row, of this run and of earlier ones.
        left: The rows for which there was no time.
    """

    def __init__(self, file: Path, script: str, machine: str, seconds: float, retry: bool) -> None:
        """
        Args:
            file: The file of JSON lines, to which rows are added.
            script: The name of the script, of which other scripts' rows are told apart.
            machine: The machine in words. Rows of another one are left alone and not printed.
            seconds: The time that the script may take from now on.
            retry: Whether rows that failed are measured again.
        """
        self.file = file
        self.script = script
        self.machine = machine
        self.deadline = time.monotonic() + seconds - _TABLE_SECONDS
        self.rows: dict[str, Figures] = {}
        self.left: list[str] = []
        if not file.exists():
            return
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["script"] != script or row["machine"] != machine:
                continue
            self.rows[row["row"]] = row["figures"]
        if retry:
            self.rows = {name: row for name, row in self.rows.items() if "failed" not in row}

    @property
    def failed(self) -> list[str]:
        """The rows that failed."""
        return [name for name, figures in self.rows.items() if "failed" in figures]

    @property
    def remaining(self) -> float:
        """Seconds that are left."""
        return self.deadline - time.monotonic()

    def wants(self, name: str, expected: float) -> bool:
        """Tell whether a row is to be measured now.

        Args:
            name: The row.
            expected: The seconds that it takes. If there is less time, the row is left.
        """
        if name in self.rows:
            return False
        if self.remaining < expected:
            self.left.append(name)
            return False
        return True

    def keep(self, name: str, figures: Figures) -> None:
        """Write a row to the file."""
        self.rows[name] = figures
        row = {
            "script": self.script,
            "machine": self.machine,
            "row": name,
            "figures": figures,
        }
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print("...", name, figures.get("failed", "done"), flush=True)

    def measure(self, name: str, expected: float, run: Callable[[], Figures]) -> None:
        """Measure a row unless it is there already, and keep it. One that fails says why.

        Args:
            name: The row.
            expected: The seconds that it takes.
            run: Measures it. It is interrupted at the end of the budget.
        """
        if not self.wants(name, expected):
            return
        try:
            with self.limited():
                figures = run()
        except OutOfTime:
            self.left.append(name)
            return
        except Exception as error:  # The other rows are still worth their time.
            figures = failure(error)
        self.keep(name, figures)

    def measure_in_processes(
        self,
        names: Sequence[str],
        expected: float,
        run: Callable[[str], tuple[str, Figures]],
        workers: int,
    ) -> None:
        """Measure rows side by side, as `measure` does one after the other.

        Args:
            names: The rows.
            expected: The seconds that a row takes.
            run: Measures a row by its name; a function of a module, which processes import.
            workers: The number of processes.
        """
        wanted = [name for name in names if self.wants(name, expected)]
        if not wanted:
            return
        # CUDA cannot be used in a forked process.
        context = multiprocessing.get_context("spawn")
        with context.Pool(min(workers, len(wanted))) as pool:
            finished = pool.imap_unordered(run, wanted)
            for _ in wanted:
                try:
                    name, figures = finished.next(timeout=max(0.0, self.remaining))
                except multiprocessing.TimeoutError:
                    break
                self.keep(name, figures)
        self.left += [name for name in wanted if name not in self.rows]

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Raise OutOfTime in the block when the budget is spent."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise OutOfTime

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self.remaining))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def describe_left(self) -> str:
        """Say which rows are left; empty if none is."""
        if not self.left:
            return ""
        named = "; ".join(self.left[:_NAMED])
        if len(self.left) > _NAMED:
            named += "; ..."
        return (
            f"left for want of time: {len(self.left)} rows ({named}). Run the same command again: "
            f"it measures these, and keeps what is in {self.file}."
        )


def failure(error: Exception) -> Figures:
    """Return the figures of a row that failed."""
    return {"failed": f"{type(error).__name__}: {error}"[:300]}


def table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    rows = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for line in lines:
        cells = [str(cell).replace("\n", " ").replace("|", "/") for cell in line]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure with so many digits; a dash if there is none."""
    if value is None:
        return "-"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def add_options(parser: argparse.ArgumentParser, seconds: float = 230) -> None:
    """Add the options that all scripts have."""
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny models and little work, on any device"
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="the time that the script may take"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("gpu-results.jsonl"), help="where rows are kept"
    )
    parser.add_argument("--only", default="", help="a pattern: the rows to measure")
    parser.add_argument("--retry", action="store_true", help="measure rows that failed again")
