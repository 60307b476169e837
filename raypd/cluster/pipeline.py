"""The main job: plan, skip what is committed, stream the rest through decode workers, add up what is there."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypd.cluster import commit, manifest, progress, session, storage, units
from raypd.cluster.manifest import Manifest
from raypd.cluster.units import Unit
from raypd.config import RunConfig
from raypd.errors import ConfigError, RunError

if TYPE_CHECKING:  # the worker brings torch, whose seconds of import are for runs that have something to do
    from raypd.cluster import worker

# A unit whose process dies is tried three times; a session then goes over what is left up to twice more, because
# units that were in hand together die together (where the caller brought its own connection to Ray: once).
_TASK_RETRIES = 2
_ROUNDS = 3
_MOST_LOST_UNITS = 10  # more of these in a round, and something is wrong with more than a document
_WORKER_RESTARTS = 100
_STARTS_WITHOUT_SUCCESS = 4  # a worker that dies so often while it loads its model will not come up


class Interrupted(RunError):
    """The user or the system asked the run to stop."""

    exit_code = 130


def output_folder(config: RunConfig) -> str:
    """The run's folder, absolute. A relative path in a job's copy of its working folder would vanish with the copy."""
    path = config.output.path
    if "://" not in path and not Path(path).expanduser().is_absolute() and in_working_copy(os.getcwd()):
        path = str(Path.home() / "raypd" / path)
    return storage.absolute(path)


def in_working_copy(folder: str) -> bool:
    """Whether a folder is the copy that `ray job submit --working-dir` makes."""
    return "runtime_resources/working_dir_files" in folder or "_ray_pkg_" in folder


def run_extract(
    config: RunConfig,
    *,
    verbose: bool = False,
    build: Callable[[RunConfig, int | None], worker.Parts] | None = None,
) -> Manifest:
    """Runs or resumes an extraction until every unit is committed; writes the manifest and returns it.

    verbose: let Ray print what it has to say. build: what a worker is made of; None: model and task.
    Raises ConfigError, InputError and ModelError before anything runs; RunError when it cannot go on; Interrupted at
    SIGINT or SIGTERM. What is committed by then is whole, and the same call resumes.
    """
    storage.configure(config.storage)
    output = output_folder(config)
    if output != storage.absolute(config.output.path):
        _say(f"output.path is relative and this job runs in a copy of its folder: writing to {output}")
    manifest.check(config, output)
    planned = units.plan(config)
    done = commit.committed(output)
    _check_known(planned, done, output)
    left = [unit for unit in planned if unit.id not in done]
    if not left:
        return _finish(config, output, len(planned))
    if build is None:
        from raypd.cluster import worker

        build = worker.build
        if not config.model.is_fake:
            from raypd.models.load import check_model_config

            check_model_config(config.model)
    manifest.claim(config, output)
    storage.clean_temporary(commit.units_folder(output))
    own = manifest.Session(output)
    run = _Run(config, output, planned, done, own, verbose, build)
    how = "failed"
    try:
        with _signals():
            run.all_rounds(left)
        how = "complete"
    except KeyboardInterrupt:
        how = "interrupted"
        raise Interrupted(f"interrupted: {run.state()}; the same command resumes") from None
    finally:
        with contextlib.suppress(OSError):  # a full disk must not hide why the run ended
            own.end(how)
    return _finish(config, output, len(planned))


def _finish(config: RunConfig, output: str, planned: int) -> Manifest:
    result = manifest.make(config, output, planned)
    manifest.write(result)
    return result


def _check_known(planned: list[Unit], done: set[str], output: str) -> None:
    """A committed unit that this plan does not have would leave its documents in the output twice."""
    foreign = sorted(done - {unit.id for unit in planned})
    if foreign:
        raise ConfigError(
            f"output.path {output}: holds {len(foreign)} units that this run would not make (for instance "
            f"{foreign[0]}): a file of the input, input.path or cluster.unit_documents has changed. Give a new "
            "output.path"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        for number in before:  # a second Ctrl-C must not tear the way out
            signal.signal(number, signal.SIG_IGN)
        raise
    finally:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Run:
    """One session on a cluster."""

    def __init__(
        self,
        config: RunConfig,
        output: str,
        planned: list[Unit],
        done: set[str],
        own: manifest.Session,
        verbose: bool,
        build: Callable[[RunConfig, int | None], worker.Parts],
    ) -> None:
        self.config, self.output, self.planned = config, output, planned
        self.own, self.verbose, self.build = own, verbose, build
        self.rows = {unit.id: unit.rows for unit in planned}
        self.done_documents = sum(self.rows[unit] for unit in done)
        self.failed_documents = 0
        self.unit_errors: dict[str, str] = {}

    def state(self) -> str:
        committed = commit.committed(self.output)
        return f"{sum(u.id in committed for u in self.planned)} of {len(self.planned)} units committed"

    def all_rounds(self, left: list[Unit]) -> None:
        """Streams until nothing is left. Raises RunError when a round has brought nothing, or too much went wrong."""
        total = sum(self.rows.values())
        connected = session.connect(self.config.cluster, self.verbose)
        try:
            with progress.Display(total, self.done_documents, 0) as display:
                self.display = display
                session.hush_ray_data(display.say, self.verbose)
                self._round(left, self.config.cluster.units_in_flight)
                for _ in range(_ROUNDS - 1):
                    before = len(left)
                    committed = commit.committed(self.output)
                    left = [u for u in left if u.id not in committed and u.id not in self.unit_errors]
                    # A single one had its attempts, and whoever was in hand with it got through.
                    if len(left) <= 1 or len(left) == before or not connected:
                        break
                    # Workers that were just being restarted can outlive their pool and keep its place for minutes:
                    # they end with the connection.
                    _disconnect()
                    session.connect(self.config.cluster, self.verbose)
                    session.hush_ray_data(display.say, self.verbose)
                    self._round(left, 1)  # alone, so that a unit that kills its worker takes no other with it
            committed = commit.committed(self.output)
            missing = [unit for unit in self.planned if unit.id not in committed]
            if missing:
                raise self._error(f"{len(missing)} units could not be finished, {self._why(missing)}")
        finally:
            if connected:
                _disconnect()

    def _error(self, what: str) -> RunError:
        return RunError(f"{what}\n{self.state()}; the same command resumes")

    def _why(self, missing: list[Unit]) -> str:
        for unit in missing:
            reason = self.unit_errors.get(unit.id)
            if reason is None:
                with contextlib.suppress(OSError):
                    reason = storage.read(commit.failure_path(self.output, unit.id)).decode(errors="replace")
            if reason is not None:
                return f"{unit.id} because: {reason.strip()}"
        return f"their worker processes died each time (out of memory?), the first is {missing[0].id}"

    # ------------------------------------------------------------------------------------------------------ one round

    def _round(self, left: list[Unit], together: int) -> None:
        """Streams units through a pool whose workers have `together` of them in hand."""
        import ray

        from raypd.cluster import worker

        share = session.share(self.config)
        board = ray.remote(num_cpus=0)(progress.Board).options(scheduling_strategy=_here()).remote()
        order = worker.Order(self.config, self.output, self.own.id, share.threads, self.build)
        ends: queue.Queue[tuple[str, Any]] = queue.Queue()
        stream = threading.Thread(target=self._stream, args=(left, together, order, board, share, ends), daemon=True)
        stream.start()
        ended: list[str] = []
        looked = 0.0
        working: dict[str, tuple[int, int]] = {}
        while True:
            try:
                kind, value = ends.get(timeout=0.25)
            except queue.Empty:
                kind, value = "wait", None
            if kind == "end":
                break
            if kind == "error":
                raise self._error(f"Ray gave up: {_last_line(value)}{self._known_reason(left)}")
            if kind == "row":
                self.display.begin()
                self._take(value)
                ended.append(value["unit"])
                working.pop(value["unit"], None)
            if time.monotonic() - looked > 1.0 and (found := progress.poll(board, ended)) is not None:
                working, starts = found
                ended.clear()
                if working:
                    self.display.begin()
                if starts > _STARTS_WITHOUT_SUCCESS * self.config.cluster.max_workers:
                    raise self._error("worker processes die while they load the model (out of memory?)")
            if time.monotonic() - looked > 1.0 or kind == "row":
                looked = time.monotonic()
                answered = self.done_documents + sum(a for a, _ in working.values())
                self.display.update(answered, self.failed_documents + sum(f for _, f in working.values()))
        ray.kill(board)

    def _take(self, row: dict[str, Any]) -> None:
        """A worker's word on a unit."""
        if row["fatal"]:
            raise self._error(str(row["error"]))
        if row["error"] is None:
            self.done_documents += self.rows[row["unit"]]
            self.failed_documents += row["failed"]
            return
        self.unit_errors[row["unit"]] = row["error"]
        self.display.say(f"unit {row['unit']} failed: {_last_line(row['error'])}")
        if len(self.unit_errors) > _MOST_LOST_UNITS:
            raise self._error(f"more than {_MOST_LOST_UNITS} units failed, the last one because: {row['error']}")

    def _known_reason(self, left: list[Unit]) -> str:
        for unit in left:
            with contextlib.suppress(OSError):
                note = storage.read(commit.failure_path(self.output, unit.id)).decode(errors="replace")
                return f"\nthe last word of a worker ({unit.id}): {note.strip()}"
        return ""

    def _stream(
        self,
        left: list[Unit],
        together: int,
        order: worker.Order,
        board: Any,
        share: session.Share,
        ends: queue.Queue[tuple[str, Any]],
    ) -> None:
        """Runs the dataset in a thread of its own, so that the main thread hears signals at once."""
        try:
            import ray.data

            from raypd.cluster.worker import DecodeWorker

            context = ray.data.DataContext.get_current()
            context.max_errored_blocks = _MOST_LOST_UNITS
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray 2.60 has no other way to bound restarts and retries
                rows = ray.data.from_items([{"unit": u.to_json()} for u in left], override_num_blocks=len(left))
                rows = rows.map_batches(
                    DecodeWorker,
                    fn_constructor_args=(order, board),
                    batch_size=None,
                    compute=_pool(self.config, len(left), together),
                    num_cpus=share.cpus,
                    num_gpus=share.gpus or None,
                    max_restarts=_WORKER_RESTARTS,
                    max_task_retries=_TASK_RETRIES,
                )
                for batch in rows.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                    for row in batch.to_pylist():
                        ends.put(("row", row))
            ends.put(("end", None))
        except BaseException as error:
            ends.put(("error", error))


def _pool(config: RunConfig, count: int, together: int) -> Any:
    """The autoscaling pool. One block is one unit is one call of a worker."""
    from ray.data import ActorPoolStrategy

    most = max(1, min(config.cluster.max_workers, math.ceil(count / together)))
    least = max(1, min(config.cluster.min_workers, most))
    return ActorPoolStrategy(
        min_size=least,
        max_size=most,
        max_concurrent_calls_per_actor=together,
        # A pool scales up when tasks wait at its actors (1.75 times their concurrency); one that cannot grow is
        # better off without a queue, whose units would wait while another worker has run dry.
        max_tasks_in_flight_per_actor=2 * together if least < most else together,
        enable_true_multi_threading=True,
    )


def _here() -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)


def _last_line(error: Any) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _disconnect() -> None:
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()
