"""One worker of the cluster to measure on: the place, cores and GPU that a decode worker of the run would have.

A head node often has no GPU and never the speed of a worker: what is measured is measured where the run will decode.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from raypd.cluster import ray_session
from raypd.config import RunConfig
from raypd.errors import RunError, UserError
from raypd.estimate.measuring import Bench, Facts, Measured

if TYPE_CHECKING:
    from raypd.cluster import worker
    from raypd.tasks.base import Document

_LINE_SECONDS = 10.0
_WAIT_SECONDS = 1800.0  # for a worker on a cluster that may have to start a node first


class Workbench:
    """A `Bench` as a Ray actor. Use as a context: it connects to Ray and disconnects.

    startup_seconds: from the connection until the process stood ready to load a model. workers: of one node here.
    """

    def __init__(
        self,
        config: RunConfig,
        verbose: bool = False,
        build: Callable[[RunConfig, int | None], worker.Parts] | None = None,
    ) -> None:
        self.config, self.verbose, self._build = config, verbose, build
        self.startup_seconds = 0.0
        self._actor: Any = None

    def __enter__(self) -> Workbench:
        self._own = ray_session.connect(self.config.cluster, self.verbose)
        began = time.monotonic()  # a bill begins with its nodes, and Ray on a machine of its own makes that one first
        try:
            self.share = ray_session.share(self.config)
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.startup_seconds = time.monotonic() - began
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        import ray

        with contextlib.suppress(Exception):
            if self._actor is not None:
                ray.kill(self._actor)
            if self._own:
                ray.shutdown()

    def _start(self) -> None:
        import ray

        make: Any = ray.remote(Bench)
        self._actor = make.options(
            num_cpus=self.share.cpus, num_gpus=self.share.gpus, max_concurrency=2, max_restarts=0
        ).remote(self.share.threads, self._build, self._build is None and not self.config.model.is_fake)
        try:
            ray.get(self._actor.ready.remote(), timeout=_WAIT_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise RunError(f"no worker of the cluster has started within {_WAIT_SECONDS / 60:.0f} minutes") from None
        except ray.exceptions.RayError as error:
            raise RunError(f"the worker to measure on does not start: {error}") from None

    def facts(self, config: RunConfig) -> Facts:
        """What its machine is. Raises what `Bench.facts` raises."""
        import ray

        try:
            return ray.get(self._actor.facts.remote(config))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise RunError(f"the worker to measure on: {error.cause}") from None

    def measure(
        self, config: RunConfig, documents: Sequence[Document], limit: float | None = None, label: str = "measure"
    ) -> Measured:
        """Measures one configuration, and shows how far it is.

        Raises what `Bench.measure` raises; RunError where the worker fails or dies (another is then started by the
        next call).
        """
        import ray

        if self._actor is None:
            self._start()
        answer = self._actor.measure.remote(config, list(documents), limit)
        with _Show(label) as show:
            while True:
                try:
                    found, _ = ray.wait([answer], timeout=0.5)
                    if found:
                        return ray.get(answer)
                    show.at(*ray.get(self._actor.progress.remote(), timeout=30))
                except ray.exceptions.GetTimeoutError:
                    continue  # it is busy
                except ray.exceptions.RayTaskError as error:
                    cause = error.cause
                    if isinstance(cause, UserError):
                        raise cause from None
                    raise RunError(f"{label}: it failed: {cause}") from None
                except ray.exceptions.RayError as error:
                    self._actor = None
                    raise RunError(f"{label}: the worker died (out of memory?): {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
