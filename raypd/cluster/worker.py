"""The decode worker: an actor with one model and one engine.

Several units are in flight at a time, each in its own thread, so that the engine never drains.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import raypd.cluster.nodes as nodes
from raypd import storage
from raypd.answering import (
    Build,
    Cancelled,
    EngineBroken,
    RequestQueue,
    UnitProgress,
    UnitState,
    build,
    end_process,
    request_queue,
)
from raypd.billing import Meter, energy
from raypd.cluster.faulty_gpus import FaultLog
from raypd.cluster.unit_block import UnitBlock, fetch_documents
from raypd.config import RunConfig
from raypd.dataset import read_unit, writer
from raypd.errors import InputError, UserError
from raypd.run import (
    Attempt,
    Commit,
    Unit,
    UnitLog,
    UnitResult,
    UnitSummary,
    layout,
    retry_policy,
)
from raypd.tasks import Document, Record, billed_as, columns_of, rows_of

_MAX_TRIES = 3  # tries of a unit that fails with an error of storage
_RETRY_SECONDS = 2.0
_REPORT_SECONDS = 2.0  # between two reports to the ledger
# How long a worker waits for the ledger to take a report. If the ledger is unavailable, nothing
# is lost, because the next report covers everything.
_LEDGER_SECONDS = 5.0


@dataclass
class WorkerSpec:
    """What a decode worker needs to start."""

    config: RunConfig
    output: str
    session: str
    threads: int | None = None  # CPU threads of a worker
    build: Build = build
    ledger: Any = None  # handle of the ledger; None if there is none
    gpus: float = 0.0  # GPUs of a worker


class EngineActor:
    """An engine in an actor, the queue in front of it, and the reports to the ledger.

    It serves a run (`DecodeWorker`) or a pipeline (`raypd.data.AnswerStage`).

    Args:
        config: The configuration of the run.
        gpus: GPUs of this actor.
        ledger: Handle of the ledger; None if there is none.
    """

    request_queue: RequestQueue  # set once the model is loaded
    loaded = False

    def __init__(self, config: RunConfig, gpus: float, ledger: Any) -> None:
        self.config = config
        self.node = nodes.node_id()
        self.gpus = gpus
        self.watch = energy.GpuWatch(gpus)
        self.meter = Meter(
            self.node, config.decoding.method, gpus, power=self.watch.joules, gpu_use=self.watch
        )
        self._ledger = ledger
        if ledger is not None:
            threading.Thread(target=self._report_regularly, name="ledger", daemon=True).start()

    def load(self, build: Build, threads: int | None) -> None:
        """Load the model and start the engine.

        Raises:
            ModelError: If the model cannot be loaded.
            ConfigError: If the configuration does not fit the machine.
        """
        if self.gpus and self.config.model.has_weights and self.config.model.device == "auto":
            from raypd.models import check_gpu

            check_gpu()
        allocator_variables = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
        if self.gpus and not allocator_variables & os.environ.keys():
            # Without expandable segments, the memory becomes fragmented between passes.
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        self.parts = build(self.config, threads)
        self.schema = columns_of(self.config)
        self.meter.ready()
        gc.collect()
        # Unless the model is frozen, every collection visits its modules: 3 ms of a pass of 1,024
        # tokens.
        gc.freeze()
        self.request_queue = RequestQueue(self.parts, self.meter)
        self.loaded = True

    def progress(self) -> dict[str, UnitProgress]:
        """Return the progress of each unit in flight."""
        return self.request_queue.progress() if self.loaded else {}

    def _report_regularly(self) -> None:
        while True:
            self.report()
            time.sleep(_REPORT_SECONDS)

    def report(self) -> None:
        """Report to the ledger, and wait up to 5 s for the receipt."""
        if self._ledger is None:
            return
        import ray

        # Answers are more important than their bill, so no error of the ledger ends the worker.
        try:
            reference = self._ledger.report.remote(self.meter.report())
            if ray.wait([reference], timeout=_LEDGER_SECONDS)[0]:
                self.meter.received(ray.get(reference))
        except Exception as error:
            print(
                f"raypd: the ledger did not get a report: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )


class DecodeWorker(EngineActor):
    """Processes units, of which several may be in flight at a time."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec.config, spec.gpus, spec.ledger)
        self.spec = spec
        self._fingerprint = spec.config.fingerprint()
        self._unfit: str | None = None  # why this worker cannot process any unit
        self._faulty_gpu: str | None = None  # why its GPU must not be used
        self._attempts: dict[str, Attempt] = {}  # at the units in flight
        self._blocks: dict[str, UnitBlock] = {}  # of units in flight that were read ahead
        self._why_read: dict[str, str] = {}  # why units in flight were read by this worker
        self._faults = FaultLog(spec.output, self.node, self.meter.id, self.watch.is_lost)
        self.log = UnitLog(spec.output, spec.session, self.node, self.meter.id, nodes.is_alive)
        # One slot for each unit in flight. The entry lock lets a unit that needs all slots collect
        # them without being overtaken.
        self._entry = threading.Lock()
        self._slots = threading.Semaphore(self.config.cluster.max_units_in_flight)
        try:
            self._prepare()
        except Exception as error:
            trace = traceback.format_exc()
            if self.gpus and self._faults.blames(trace, loading=True):
                self._die(EngineBroken(trace), [retry_policy.START])
            # If the error were raised here, every replacement would raise it again. It is reported
            # as the result of the first unit instead, and ends the run once.
            if isinstance(error, UserError | storage.StorageError):
                self._unfit = str(error)
            else:
                self._unfit = f"the worker could not start:\n{trace}"

    def _prepare(self) -> None:
        """Check the output folder and the GPU, and load the model."""
        storage.configure(self.spec.config.storage)
        if not storage.exists(storage.join(self.spec.output, layout.RUN)):
            raise UserError(
                f"{self.spec.output}: a worker cannot see the output folder. Set output.path to "
                "storage that all nodes of the cluster share"
            )
        if self.gpus:
            self._faulty_gpu = self._faults.why_faulty()
            self._unfit = self._faulty_gpu
        if self._faulty_gpu is None:
            self.load(self.spec.build, self.spec.threads)

    def hello(self) -> tuple[str, str | None]:
        """Return the id of the node, and why the GPU is faulty, if it is.

        The first answer means that the model is loaded.
        """
        return self.node, self._faulty_gpu

    def cancel(self, unit: str, only_waiting: bool) -> None:
        """Stop a unit as `RequestQueue.cancel` does; its `run` then hands it back."""
        if self.loaded:
            self.request_queue.cancel(unit, only_waiting)

    def run(
        self,
        unit: Unit,
        block: UnitBlock | None = None,
        starved: float = 0.0,
        again: bool = True,
    ) -> UnitResult:
        """Process a unit until it is committed, handed back or given up.

        Args:
            unit: The unit.
            block: Its documents, if they were read ahead.
            starved: Seconds for which this worker has had nothing to do because no unit was read.
            again: Whether a worker may have begun the unit before, so that its record of attempts
                has to be read, and its commit may exist already. For other units, the commit is the
                only request besides those for the input.
        """
        if self._unfit is not None:
            return UnitResult(error=self._unfit, fatal=True)
        self.meter.starved(starved)
        if block is not None:
            self._blocks[unit.id] = block
        for earlier_tries in range(_MAX_TRIES):
            result = self._try(unit, earlier_tries > 0, again or earlier_tries > 0)
            if not result.retry or earlier_tries == _MAX_TRIES - 1:
                break
            time.sleep(_RETRY_SECONDS * (earlier_tries + 1))
        self._blocks.pop(unit.id, None)
        return replace(
            result,
            why_read=self._why_read.pop(unit.id, ""),
            reading_seconds=self.meter.reading_seconds,
        )

    def _try(self, unit: Unit, is_retry: bool, again: bool) -> UnitResult:
        """Try to process a unit, and turn every error into a result."""
        try:
            if again:
                return self._try_once(unit, is_retry)
            with self._slot(alone=False):
                return self._run_attempt(unit, Attempt())
        except Cancelled:
            return UnitResult(handed_back=True)
        except UserError as error:
            # An error of S3 may be wrapped in an error for the user.
            transient = _is_transient(error) or _is_transient(error.__cause__)
            return UnitResult(
                error=str(error),
                retry=transient,
                unreadable=isinstance(error, InputError) and not transient,
            )
        except OSError as error:
            return UnitResult(error=request_queue.reason(error), retry=_is_transient(error))
        except Exception:
            return UnitResult(error=traceback.format_exc())

    def _try_once(self, unit: Unit, is_retry: bool) -> UnitResult:
        if writer.is_committed(self.spec.output, unit.id, self.config.output.partition):
            summary = writer.read_summary(self.spec.output, unit.id)
            return UnitResult(ok=summary.ok, failed=summary.failed)
        attempt = self.log.next(unit.id)
        if attempt is None:
            self.log.end(unit.id)
            reason = retry_policy.failure_reason(self.spec.output, unit.id)
            return UnitResult(
                error="its worker processes died each time: "
                f"{reason or 'none of them left a reason'}"
            )
        if is_retry:
            attempt = replace(attempt, number=attempt.number + 1)
        with self._slot(alone=attempt.bisecting):
            return self._run_logged(unit, attempt)

    @contextlib.contextmanager
    def _slot(self, alone: bool) -> Iterator[None]:
        """Hold a slot for a unit in flight, or all slots for a unit that must be alone.

        A unit that must be alone blocks the units that arrive after it.
        """
        slots = self.config.cluster.max_units_in_flight if alone else 1
        with self._entry:
            for _ in range(slots):
                self._slots.acquire()
        try:
            yield
        finally:
            self._slots.release(slots)

    def _run_logged(self, unit: Unit, attempt: Attempt) -> UnitResult:
        """Run an attempt and record its beginning and its end on storage."""
        self.log.begin(unit.id, attempt)
        following: Attempt | None = attempt
        try:
            result = self._run_attempt(unit, attempt)
            following = None
        finally:
            self.log.end(unit.id, following)
        return result

    def _run_attempt(self, unit: Unit, attempt: Attempt) -> UnitResult:
        """Run an attempt; if the process dies, whoever gave it the unit records that."""
        self._attempts[unit.id] = attempt
        try:
            summary, commit = self.process(unit, attempt)
        except EngineBroken as error:
            self._die(error, [unit.id])
        finally:
            del self._attempts[unit.id]
            # The driver may close the bill once it has the result of the last unit. Ray does not
            # order calls of different processes, so the ledger has to have the report before.
            # Other units are reported in time.
            if not self._attempts:
                self.report()
        return UnitResult(ok=summary.ok, failed=summary.failed, commit=commit)

    def _die(self, error: EngineBroken, names: list[str]) -> NoReturn:
        """End this process.

        If the GPU is to blame, the death is recorded for the GPU and not for the units in flight.

        Args:
            error: Why the engine is broken.
            names: The units for which the reason is stored.
        """

        def store_reason(reason: str) -> None:
            for name in names:
                path = retry_policy.failure_path(self.spec.output, name)
                storage.put(path, reason.encode())
            if self.gpus and self._faults.blames(reason, loading=not self.loaded):
                self._faults.died(reason)
                for unit, attempt in list(self._attempts.items()):
                    self.log.end(unit, attempt)

        end_process(error, store_reason)

    def process(self, unit: Unit, attempt: Attempt) -> tuple[UnitSummary, Commit | None]:
        """Read, decode and commit a unit.

        Args:
            unit: The unit.
            attempt: The attempt at it.

        Returns:
            The summary of the unit, and the commit; None if another attempt has made it.

        Raises:
            InputError: If the unit cannot be read.
            OSError: If it cannot be written.
            EngineBroken: If the engine failed.
            Cancelled: If the unit was cancelled.
        """
        output = self.spec.output
        partition = self.config.output.partition
        began = time.time()
        started = time.monotonic()
        with self.request_queue.unit(unit.id) as state:
            documents = self._read(unit)
            categories = {
                document.index: billed_as(document, self.config.task, self.config.input)
                for document in documents
            }
            self.request_queue.count(state, categories)
            self._answer(state, documents, unit.id, attempt)
            usage = self.meter.end(unit.id)
            table = writer.make_table(
                documents, rows_of(state.records, self.config), self.schema, attempt.number
            )
            summary = UnitSummary(
                unit=unit.id,
                fingerprint=self._fingerprint,
                session=self.spec.session,
                source=unit.name,
                start=unit.start,
                documents=len(documents),
                ok=0,
                failed=0,
                began=began,
                counts=state.counts,
                seconds=round(time.monotonic() - started, 3),
                worker=self.meter.id,
                categories=usage.categories,
                busy_seconds=round(usage.prefill + usage.decode, 6),
            )
            summary = writer.with_counts(summary, table)
            commit = writer.commit(output, table, summary, partition)
            if commit is None:
                # Another attempt had already committed the unit.
                return writer.read_summary(output, unit.id), None
            self.meter.commit(unit.id, usage, summary.ok, summary.failed)
            return summary, commit

    def _read(self, unit: Unit) -> list[Document]:
        """Return the documents of a unit, from its block if there is a usable one."""
        block = self._blocks.pop(unit.id, None)
        with self.meter.reading():
            if block is not None:
                documents, self._why_read[unit.id] = fetch_documents(unit, block)
                if documents is not None:
                    return documents
            return read_unit(unit, self.config)

    def _answer(
        self, state: UnitState, documents: list[Document], unit: str, attempt: Attempt
    ) -> None:
        """Answer documents: all at once, or in groups with checkpoints after a worker death."""
        by_row = {document.index: document for document in documents}
        if attempt.quarantined:
            reason = retry_policy.failure_reason(self.spec.output, unit)
            for row in attempt.quarantined:
                state.records.append(Record(row, error=attempt.reason(row, reason)))
        for group in attempt.groups(list(by_row)):
            if attempt.bisecting:
                self.log.begin(unit, attempt, group)
            self.request_queue.answer(state, [by_row[row] for row in group])

    def close(self) -> None:
        """End the engine."""
        if self.loaded:
            self.request_queue.close()


def _is_transient(error: BaseException | None) -> bool:
    """Return whether a later try may succeed.

    It may if storage was out of reach, slow or full, but not if a file is gone or damaged.
    """
    if not isinstance(error, OSError):
        return False
    if isinstance(error, FileNotFoundError | PermissionError | storage.Changed | gzip.BadGzipFile):
        return False
    # Arrow reports damaged data as an OSError without errno.
    return type(error) is not OSError or error.errno is not None
