"""One worker of the cluster to measure on, and the progress of a measurement."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from raypd.cluster.one_worker import OneWorker
from raypd.config import RunConfig
from raypd.estimate.measuring import Bench, Facts, Measured

if TYPE_CHECKING:
    from raypd.cluster.components import WorkerComponents
    from raypd.tasks.base import Document

_LINE_SECONDS = 10.0


class Workbench(OneWorker):
    """A `Bench` in the place of a decode worker."""

    def __init__(
        self,
        config: RunConfig,
        verbose: bool = False,
        build: Callable[[RunConfig, int | None], WorkerComponents] | None = None,
    ) -> None:
        weights = build is None and not config.model.is_fake
        super().__init__(config, verbose, lambda share: (Bench, (share.threads, build, weights)))

    def facts(self, config: RunConfig) -> Facts:
        """What its machine is. Raises what `Bench.facts` raises, RunError."""
        found: Facts = self.call("the worker to measure on", "facts", config, progress=lambda _: None)
        return found

    def measure(
        self, config: RunConfig, documents: Sequence[Document], limit: float | None = None, label: str = "measure"
    ) -> Measured:
        """Measures one configuration, and shows how far it is. Raises what `Bench.measure` raises, RunError."""
        with _Show(label) as show:
            arguments: Any = (config, list(documents), limit)
            found: Measured = self.call(label, "measure", *arguments, progress=lambda at: show.at(*at))
            return found


class _Show:
    """Progress of one measurement on stderr: a bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, label: str) -> None:
        self._label, self._printed = label, time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}")]
            self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._row = self._bar.add_task(label, total=None, done="loading")

    def __enter__(self) -> _Show:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, done: int, total: int) -> None:
        text = f"{done / total:.0%} done" if total else "loading, warming up"
        if self._bar is not None:
            self._bar.update(self._row, total=total or None, completed=done, done=text)
        elif time.monotonic() - self._printed >= _LINE_SECONDS:
            self._printed = time.monotonic()
            print(f"{self._label}: {text}", file=sys.stderr, flush=True)
