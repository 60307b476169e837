"""The decode worker: one model and engine in an actor, several units in flight, a thread each, so
it never drains.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from raypd import storage
from raypd.answering import request_queue
from raypd.answering.components import Build, build
from raypd.answering.request_queue import (
    Cancelled,
    EngineBroken,
    Progress,
    RequestQueue,
    UnitState,
    end_process,
)
from raypd.billing import energy
from raypd.billing.meter import Meter
from raypd.cluster import nodes
from raypd.cluster.card import CardLog
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.dataset.reader import read_unit
from raypd.errors import InputError, UserError
from raypd.run import layout, retry_policy
from raypd.run.records import UnitResult, UnitSummary
from raypd.run.retry_policy import Attempt, UnitLog
from raypd.run.unit import Unit
from raypd.tasks.base import Document, Record
from raypd.tasks.columns import columns_of, rows_of
from raypd.tasks.documents import billed_as

_MOST_ERRORS = 3  # attempts at a unit that fails with an error of storage
_RETRY_SECONDS = 2.0
_REPORT_SECONDS = 2.0  # between two reports to the ledger
# For it to have one: a ledger that is away is no harm, as the next report says all.
_LEDGER_SECONDS = 5.0


@dataclass
class WorkerSpec:
    config: RunConfig
    output: str
    session: str
    threads: int | None = None  # CPU threads of one worker
    build: Build = build
    ledger: Any = None  # handle of the actor that keeps the bill
    gpus: float = 0.0  # of one worker


class EngineActor:
    """An engine in an actor, the queue before it, and the reports of what both do: of a run or of a
    pipeline.
    """

    request_queue: RequestQueue  # once the model is loaded
    loaded = False

    def __init__(self, config: RunConfig, gpus: float, ledger: Any) -> None:
        """gpus: of this actor; ledger: handle of the actor that keeps the bill, None: there is
        none.
        """
        self.config, self.node, self.gpus = config, nodes.node_id(), gpus
        self.watch = energy.CardWatch(gpus)
        self.meter = Meter(
            self.node, config.decoding.method, gpus, power=self.watch.joules, cards=self.watch
        )
        self._ledger = ledger
        if ledger is not None:
            threading.Thread(target=self._report_on, name="ledger", daemon=True).start()

    def load(self, build: Build, threads: int | None) -> None:
        """Raises ModelError, ConfigError."""
        if self.gpus and self.config.model.has_weights and self.config.model.device == "auto":
            from raypd.models.load import check_gpu

            check_gpu()
        if self.gpus and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            # Or gaps between passes fill the memory.
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        self.parts = build(self.config, threads)
        self.schema = columns_of(self.config)
        self.meter.ready()
        gc.collect()
        # Else every collection goes through the model's modules again: 3 ms of a pass of 1,024
        # tokens.
        gc.freeze()
        self.request_queue = RequestQueue(self.parts, self.meter)
        self.loaded = True

    def progress(self) -> dict[str, Progress]:
        return self.request_queue.progress() if self.loaded else {}

    def _report_on(self) -> None:
        while True:
            self.report()
            time.sleep(_REPORT_SECONDS)

    def report(self) -> None:
        """Tells the ledger all so far, and waits until it has it, so that no bill is closed before;
        5 s at most.
        """
        if self._ledger is None:
            return
        import ray

        try:
            units = self.progress().values()
            in_flight = sum(unit.answered for unit in units), sum(unit.failed for unit in units)
            ray.wait(
                [self._ledger.report.remote(self.meter.report(), in_flight)],
                timeout=_LEDGER_SECONDS,
            )
        except Exception as error:  # answers are worth more than their bill
            print(
                f"raypd: no report to the ledger: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )


class DecodeWorker(EngineActor):
    """Answers units: `run` for the executors, `run_unit` for everyone else."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec.config, spec.gpus, spec.ledger)
        self.spec = spec
        self._fingerprint = spec.config.fingerprint()
        self._unfit: str | None = None  # why this worker cannot work at all
        self._left_out: str | None = None  # why its card is
        self._attempts: dict[str, Attempt] = {}  # at the units in flight
        self._card = CardLog(spec.output, self.node, self.meter.id, self.watch.is_lost)
        self.log = UnitLog(spec.output, spec.session, self.node, self.meter.id, nodes.is_alive)
        self._entry, self._places = (
            threading.Lock(),
            threading.Semaphore(self.config.cluster.units_in_flight),
        )
        try:
            storage.configure(spec.config.storage)
            if not storage.exists(storage.join(spec.output, layout.RUN)):
                advice = "give output.path on storage that all nodes of the cluster share"
                raise UserError(f"{spec.output}: a worker does not see the output folder; {advice}")
            self._left_out = self._unfit = self._card.left_out() if self.gpus else None
            if self._left_out is None:
                self.load(spec.build, spec.threads)
        except Exception as error:
            why = traceback.format_exc()
            if self.gpus and self._card.blames(why, loading=True):
                self._die(EngineBroken(why), [retry_policy.START])
            # Raised here, every replacement would raise it again; reported with the first unit, it
            # ends the run once.
            known = isinstance(error, UserError | storage.StorageError)
            self._unfit = str(error) if known else f"the worker could not start:\n{why}"

    def hello(self) -> tuple[str, str | None]:
        """(this worker's node, why its card is left out); the first answer means that the model is
        loaded.
        """
        return self.node, self._left_out

    def cancel(self, unit: str, only_waiting: bool) -> None:
        """Stops a unit as `RequestQueue.cancel`; its `run` then returns."""
        if self.loaded:
            self.request_queue.cancel(unit, only_waiting)

    def run(self, unit: Unit, admit: Callable[[bool], bool] = lambda died: True) -> UnitResult:
        """Works on a unit until it is committed, handed back or given up. admit(died): whether an
        attempt may begin.
        """
        if self._unfit is not None:
            return UnitResult(error=self._unfit, fatal=True)
        for errors in range(_MOST_ERRORS):
            result = self._try(unit, errors > 0, admit)
            if not result.retry or errors == _MOST_ERRORS - 1:
                break
            time.sleep(_RETRY_SECONDS * (errors + 1))
        return result

    def _try(self, unit: Unit, again: bool, admit: Callable[[bool], bool]) -> UnitResult:
        """An attempt at a unit. again: storage failed at the one before."""
        try:
            if writer.is_committed(self.spec.output, unit.id, self.config.output.partition):
                summary = writer.read_summary(self.spec.output, unit.id)
                return UnitResult(ok=summary.ok, failed=summary.failed)
            attempt, died = self.log.next(unit.id)
            if not admit(died):
                return UnitResult(handed_back=True)
            if attempt is None:
                self.log.end(unit.id)
                why = (
                    retry_policy.failure_reason(self.spec.output, unit.id)
                    or "none of them left a reason"
                )
                return UnitResult(error=f"its worker processes died each time: {why}")
            attempt = replace(attempt, number=attempt.number + again)
            with self._place(alone=attempt.bisecting):
                return self._run_logged(unit, attempt)
        except Cancelled:
            return UnitResult(handed_back=True)
        except UserError as error:
            # Errors of S3 are errors of both kinds.
            passes = _may_pass(error) or _may_pass(error.__cause__)
            return UnitResult(
                error=str(error),
                retry=passes,
                unreadable=isinstance(error, InputError) and not passes,
            )
        except OSError as error:
            return UnitResult(error=request_queue.reason(error), retry=_may_pass(error))
        except Exception:
            return UnitResult(error=traceback.format_exc())

    @contextlib.contextmanager
    def _place(self, alone: bool) -> Iterator[None]:
        """One of the places for units in flight; all of them for a unit that is to be alone, and
        later ones wait.
        """
        places = self.config.cluster.units_in_flight if alone else 1
        with self._entry:
            for _ in range(places):
                self._places.acquire()
        try:
            yield
        finally:
            self._places.release(places)

    def _run_logged(self, unit: Unit, attempt: Attempt) -> UnitResult:
        self.log.begin(unit.id, attempt)
        following: Attempt | None = attempt
        self._attempts[unit.id] = attempt
        try:
            summary = self.run_unit(unit, attempt)
            following = None
        except EngineBroken as error:
            self._die(error, [unit.id])
        finally:
            del self._attempts[unit.id]
            self.log.end(unit.id, following)
            self.report()
        return UnitResult(ok=summary.ok, failed=summary.failed)

    def _die(self, error: EngineBroken, names: list[str]) -> NoReturn:
        """Ends this process.

        A death that is the card's is written down as such, and counts for no unit in flight.
        """

        def keep(why: str) -> None:
            for name in names:
                storage.put(retry_policy.failure_path(self.spec.output, name), why.encode())
            if self.gpus and self._card.blames(why, loading=not self.loaded):
                self._card.died(why)
                for unit, attempt in list(self._attempts.items()):
                    self.log.end(unit, attempt)

        end_process(error, keep)

    def run_unit(self, unit: Unit, attempt: Attempt | None = None) -> UnitSummary:
        """Reads, decodes and commits one unit, if it is not committed already; what it holds.

        Raises InputError when it cannot be read, OSError when it cannot be written, EngineBroken,
        Cancelled.
        """
        attempt = attempt or Attempt()
        output = self.spec.output
        partition = self.config.output.partition
        began = time.time()
        started = time.monotonic()
        if writer.is_committed(output, unit.id, partition):
            return writer.read_summary(output, unit.id)
        with self.request_queue.unit(unit.id) as state:
            documents = read_unit(unit, self.config)
            self.request_queue.count(
                state, {row.index: billed_as(row, self.config) for row in documents}
            )
            self._answer(state, documents, unit.id, attempt)
            spent = self.meter.end(unit.id)
            table = writer.make_table(
                documents, rows_of(state.records, self.config), self.schema, attempt.number
            )
            ok, failed = writer.count_documents(table)
            summary = UnitSummary(
                unit=unit.id,
                fingerprint=self._fingerprint,
                session=self.spec.session,
                source=unit.name,
                start=unit.start,
                documents=len(documents),
                ok=ok,
                failed=failed,
                began=began,
                counts=state.counts,
                seconds=round(time.monotonic() - started, 3),
                worker=self.meter.id,
                categories=spent.categories,
                busy_seconds=round(spent.prefill + spent.decode, 6),
                truncated=writer.count_truncated(table),
            )
            if not writer.commit(output, table, summary, partition):
                return writer.read_summary(output, unit.id)  # another attempt was first
            self.meter.commit(unit.id, spent, ok, failed)
            return summary

    def _answer(
        self, state: UnitState, documents: list[Document], unit: str, attempt: Attempt
    ) -> None:
        """Answers documents at once, or where a worker died of them in groups that are written down
        before each.
        """
        by_row = {document.index: document for document in documents}
        why = retry_policy.failure_reason(self.spec.output, unit) if attempt.quarantined else None
        state.records += [
            Record(row, error=attempt.reason(row, why)) for row in attempt.quarantined
        ]
        for group in attempt.groups(list(by_row)):
            if attempt.bisecting:
                self.log.begin(unit, attempt, group)
            self.request_queue.answer(state, [by_row[row] for row in group])

    def close(self) -> None:
        if self.loaded:
            self.request_queue.close()


def _may_pass(error: BaseException | None) -> bool:
    """Whether it may work at another time: storage that was out of reach, slow or full, not a file
    that is gone.
    """
    lasting = (FileNotFoundError, PermissionError, storage.Changed, gzip.BadGzipFile)
    # What Arrow says of damaged data is an OSError too, of no errno.
    damage = type(error) is OSError and error.errno is None
    return isinstance(error, OSError) and not isinstance(error, lasting) and not damage
