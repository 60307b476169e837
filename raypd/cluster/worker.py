"""The decode worker: one model and one engine in an actor, several units in hand so that the engine never drains.

The scheduler calls the worker once a unit, each call in a thread of its own. The thread reads its unit, has it
answered (request_queue.py) and commits it. At the end of a run the worker lends a part of its unit to others, or
borrows one of theirs (work_stealing.py): a share is read and answered as a unit is, and its records go to the lender,
which commits all together.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from raypd import storage
from raypd.billing import energy
from raypd.billing.meter import Meter, UnitUsage
from raypd.cluster import shares
from raypd.cluster.components import WorkerComponents, build
from raypd.cluster.request_queue import EngineBroken, HandedBack, RequestQueue, UnitState, reason
from raypd.cluster.shares import Answer, Groups, Progress
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.dataset.reader import read_unit
from raypd.errors import InputError, UserError
from raypd.run import layout, retry_policy
from raypd.run.records import UnitResult, UnitSummary
from raypd.run.retry_policy import Attempt
from raypd.run.unit import Unit
from raypd.tasks.base import Document, Record
from raypd.tasks.documents import billed_as

if TYPE_CHECKING:
    from raypd.cluster.reporter import Reporter

__all__ = ["DecodeWorker", "EngineBroken", "HandedBack", "WorkerComponents", "WorkerSpec", "build"]

Done = TypeVar("Done")


@dataclass
class WorkerSpec:
    """What all workers of a run are told.

    threads: CPU threads of one worker; gpus: that it has. ledger: handle of the actor that keeps the bill, or None.
    """

    config: RunConfig
    output: str
    session: str
    threads: int | None = None
    build: Callable[[RunConfig, int | None], WorkerComponents] = build
    ledger: Any = None
    gpus: float = 0.0


class DecodeWorker:
    """Answers units: `run` for the scheduler, `run_unit` for everyone else."""

    def __init__(self, order: WorkerSpec) -> None:
        self.order, self.config = order, order.config
        self._fingerprint = order.config.fingerprint()
        self._unfit: str | None = None  # why this worker cannot work at all
        self.meter = Meter(_node(), order.config.decoding.method, order.gpus, power=energy.meter(order.gpus))
        self._reporter: Reporter | None = None
        if order.ledger is not None:
            from raypd.cluster.reporter import Reporter

            self._reporter = Reporter(self.meter, order.ledger)
        try:
            storage.configure(order.config.storage)
            if not storage.exists(storage.join(order.output, layout.RUN)):
                raise UserError(
                    f"{order.output}: a worker does not see the output folder; give output.path on storage that all "
                    "nodes of the cluster share"
                )
            self.parts = order.build(order.config, order.threads)
            self._schema = self.parts.task.columns()
            writer.output_schema(self._schema, order.config.output.partition)
        except (UserError, storage.StorageError) as error:
            self._unfit = str(error)
        except Exception:
            # Raised here, every replacement would raise it again; told with the first unit, it ends the run once.
            self._unfit = "the worker could not start:\n" + traceback.format_exc()
        else:
            self.meter.ready()
            self.request_queue = RequestQueue(self.parts, self.config.engine.max_num_seqs, self.meter)

    # ----------------------------------------------------------------------------------------- what the scheduler asks

    def hello(self) -> str:
        """The id of this worker's node; the first answer means that the model is loaded."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def progress(self) -> dict[str, Progress]:
        """How far every unit and every share in hand is."""
        return self.request_queue.progress() if self._unfit is None else {}

    def hand_back(self, key: str, only_waiting: bool) -> None:
        """Stops work on a unit or a share, whose `run` or `borrow` then says so. only_waiting: unless it was begun."""
        if self._unfit is None:
            self.request_queue.hand_back(key, only_waiting)

    def run(self, attempt: Attempt) -> UnitResult:
        """Answers and commits a unit."""
        summary, result = self._guarded(attempt.unit, lambda: self.run_unit(attempt.unit, attempt))
        return result if summary is None else UnitResult(ok=summary.ok, failed=summary.failed)

    def lend(self, key: str, names: list[str]) -> dict[str, Groups]:
        """Gives a part of a unit or a share in hand away, as rows by the names of the shares; see RequestQueue.lend.

        Until `returned` or `take_back` is called for each, the unit does not end.
        """
        return self.request_queue.lend(key, names)

    def borrow(self, unit: Unit, name: str, groups: Groups) -> tuple[UnitResult, Answer | None]:
        """Answers a share of a unit that another worker lends: what `run` says, and the answer."""
        answer, result = self._guarded(unit, lambda: self._answer_share(unit, name, groups))
        return result, answer

    def returned(self, key: str, name: str, answer: Answer) -> None:
        """The answer to a share that was lent."""
        self.request_queue.returned(key, name, answer)

    def take_back(self, key: str, name: str) -> None:
        """A share that was lent will not come back: it is done here."""
        self.request_queue.take_back(key, name)

    def _guarded(self, unit: Unit, work: Callable[[], Done]) -> tuple[Done | None, UnitResult]:
        """Does something with a unit; what came of it, and what `run` says."""
        if self._unfit is not None:
            return None, UnitResult(error=self._unfit, fatal=True)
        try:
            return work(), UnitResult()
        except HandedBack:
            return None, UnitResult(handed_back=True)
        except EngineBroken as error:
            # A broken engine (a lost device, a bug) taints its process: end it, and the pool tries the units that it
            # held in a new one, a finite number of times.
            print(f"raypd: the engine failed, this worker ends: {error}", file=sys.stderr, flush=True)
            self._note(unit, str(error))
            os._exit(1)
        except InputError as error:
            passes = _may_pass(error.__cause__)
            return None, UnitResult(error=str(error), retry=passes, unreadable=not passes)
        except UserError as error:
            passes = _may_pass(error) or _may_pass(error.__cause__)  # errors of S3 are errors of both kinds
            return None, UnitResult(error=str(error), retry=passes)
        except OSError as error:
            return None, UnitResult(error=reason(error), retry=_may_pass(error))
        except Exception:
            return None, UnitResult(error=traceback.format_exc())

    # ------------------------------------------------------------------------------------------------------ one unit

    def run_unit(self, unit: Unit, attempt: Attempt | None = None) -> UnitSummary:
        """Reads, decodes and commits one unit; what it holds when it is committed already.

        Raises InputError when the unit cannot be read, OSError when it cannot be written, EngineBroken, HandedBack.
        """
        attempt = attempt or Attempt(unit)
        with self._job(unit.id, lendable=not attempt.bisecting) as job:
            return self._run_job(unit, attempt, job)

    @contextlib.contextmanager
    def _job(self, key: str, lendable: bool) -> Iterator[UnitState]:
        """A unit of the request queue, whose time is measured, and told to the ledger when it ends."""
        job = self.request_queue.open(key, lendable)
        self.meter.begin(key)
        try:
            yield job
        finally:
            self.request_queue.shut(job)
            self.meter.lose(key)  # what was not committed or handed over came to nothing
            if self._reporter is not None:
                self._reporter.now()

    def _run_job(self, unit: Unit, attempt: Attempt, job: UnitState) -> UnitSummary:
        began, partition = time.time(), self.config.output.partition
        if writer.is_committed(self.order.output, unit.id, partition):
            return writer.read_summary(self.order.output, unit.id)
        started = time.monotonic()
        if attempt.bisecting:  # what the attempt before this one left is no word on this one
            retry_policy.checkpoint(self.order.output, unit.id, [])
        documents = self._read(unit, job)
        self._answer_all(job, documents, attempt)
        self.request_queue.shut(job)
        spent = self.meter.end(unit.id)
        whole = _together(job, spent)
        table = writer.make_table(documents, whole.records, self._schema, attempt.number)
        ok, failed = writer.count_documents(table)
        summary = UnitSummary(
            unit=unit.id,
            fingerprint=self._fingerprint,
            session=self.order.session,
            source=unit.name,
            start=unit.start,
            documents=len(documents),
            ok=ok,
            failed=failed,
            seconds=round(time.monotonic() - started, 3),
            counts=whole.counts,
            worker=self.meter.id,
            began=began,
            busy_seconds=round(whole.busy, 6),
            categories=whole.categories,
        )
        if not writer.commit(self.order.output, table, summary, partition):
            return writer.read_summary(self.order.output, unit.id)  # another attempt was first
        self.meter.commit(unit.id, spent, ok, failed)
        return summary

    def _answer_share(self, unit: Unit, name: str, groups: Groups) -> Answer:
        """Reads and answers a share. Raises as `run_unit` does."""
        rows = sorted(row for group in groups for row in group)
        with self._job(name, lendable=True) as job:
            by_row = {document.row: document for document in self._read(replace(unit, only=tuple(rows)), job)}
            plans = (self.request_queue.plan([by_row[row] for row in group]) for group in groups)
            self.request_queue.answer(job, itertools.chain.from_iterable(plans))
            self.request_queue.shut(job)
            return _together(job, self.meter.hand_over(name))

    def _read(self, unit: Unit, job: UnitState) -> list[Document]:
        documents = read_unit(unit, self.config, self.parts.task.input_columns())
        job.documents = len(documents)
        job.categories = {document.row: billed_as(document, self.config) for document in documents}
        self.meter.documents(job.key, job.categories.values())
        return documents

    def close(self) -> None:
        """Ends the engine's thread, which else holds the model as long as the process lives."""
        if self._unfit is None:
            self.request_queue.close()

    def _answer_all(self, job: UnitState, documents: list[Document], attempt: Attempt) -> None:
        """Answers the documents: all at once, or group by group with a mark before each where a worker died of them."""
        by_row = {document.row: document for document in documents}
        word = retry_policy.failure_reason(self.order.output, attempt.unit.id) if attempt.quarantined else None
        job.keep([Record(row, error=attempt.reason(row, word)) for row in attempt.quarantined])
        for group in attempt.groups(list(by_row)):
            if attempt.bisecting:
                retry_policy.checkpoint(self.order.output, attempt.unit.id, group)
            self.request_queue.answer(job, self.request_queue.plan([by_row[row] for row in group]))

    def _note(self, unit: Unit, reason: str) -> None:
        """Leaves word of why the process died with a unit: what Ray says of it does not name the cause."""
        try:
            storage.put(retry_policy.failure_path(self.order.output, unit.id), reason.encode())
        except OSError:
            traceback.print_exc()


def _together(job: UnitState, spent: UnitUsage) -> Answer:
    """What a job has come to, with what others have answered of it."""
    own = Answer(job.records, job.counts, spent.prefill + spent.decode, spent.categories)
    return shares.together(own, job.answers)


def _may_pass(error: BaseException | None) -> bool:
    """Whether it may work at another time: storage that was out of reach, slow or full, not a file that is gone."""
    lasting = (FileNotFoundError, PermissionError, storage.Changed, gzip.BadGzipFile)
    # What Arrow says of damaged data is an OSError too, of no errno.
    damage = type(error) is OSError and error.errno is None
    return isinstance(error, OSError) and not isinstance(error, lasting) and not damage


def _node() -> str:
    """The id of this process's node; "" outside Ray."""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
