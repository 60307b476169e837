"""The status of a run, which is read only from its folder and therefore on any machine.

This is cheap: it reads the footers of some units, and none of them twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from raypd.billing import Bill
from raypd.dataset import PlanTotals
from raypd.report.answer_check import RunProgress, check, read_answers
from raypd.report.data import RunFiles, is_fake
from raypd.report.sample import AnswerSample, failed_documents
from raypd.report.units import CommittedUnit, UnitReader, Units
from raypd.run import failure_reasons, load_record
from raypd.text import clean, counted

# The maximum number of footers that are read at a time.
_FOOTERS = 512
# The maximum number of errors that are shown.
_ERRORS = 5
# The current speed is measured over the last ten minutes.
_RATE_SECONDS = 600.0


@dataclass
class WorkerState:
    """A worker of the newest session."""

    worker: str
    node: str
    # startup, busy, idle or ended.
    state: str
    # The share of its time in which it was busy.
    busy: float


@dataclass
class Status:
    """The status of a run at a moment.

    Times are Unix seconds. A field is None if nothing in the storage says what it is.

    Attributes:
        at: The time of this status.
        units: Committed units.
        documents: Documents in committed units, or in the table of nightly runs.
        exact: Whether `documents` and `failed` were counted rather than scaled up from some units.
        planned_exact: Whether `documents_planned` was counted.
        running_seconds: The seconds of all sessions.
        extracted: The documents of all nights, if `documents` are those of a nightly table.
        unreadable: The units of the input that cannot be read.
        eta_seconds: The seconds from now to the expected end.
        usd_at_end: The expected bill at the end.
        heard: The time of the last sign of life.
    """

    run: str
    state: str
    fake: bool
    at: float
    units: int
    units_planned: int | None
    documents: int
    documents_planned: int | None
    exact: bool
    planned_exact: bool
    failed: int
    sessions: int
    running_seconds: float
    extracted: int | None = None
    unreadable: int = 0
    on_gpu: bool = False
    documents_per_second: float | None = None
    eta_seconds: float | None = None
    usd: float | None = None
    usd_per_hour: float | None = None
    usd_at_end: float | None = None
    budget_usd: float | None = None
    deadline: str | None = None
    heard: float | None = None
    workers: list[WorkerState] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # The model that answers.
    model: str = ""
    # What kind of confidences the answers have.
    confidence: str = ""
    # Warnings about answers that say nothing.
    warnings: list[str] = field(default_factory=list)
    next_step: str = ""

    @property
    def answered(self) -> int:
        """The number of answered documents; in nightly runs, of all nights."""
        if self.extracted is not None:
            return self.extracted
        return self.documents


class Watch:
    """Reads the status of a run repeatedly.

    It keeps the summary of a committed unit until the unit's object is replaced.

    Args:
        root: The folder of the run.
        overrides: `storage.KEY=VALUE` texts, which say how to reach S3.
    """

    def __init__(self, root: str, overrides: Sequence[str] = ()) -> None:
        self.root = root
        self._record = load_record(root, overrides)
        self._fake = is_fake(self._record.config)
        self._answers = AnswerSample()
        # The number of committed units when the answers were read.
        self._answered_units = 0
        self._reader = UnitReader(_FOOTERS)
        # (path, commit time) of a unit of an earlier version -> the reasons for its failures.
        self._errors: dict[tuple[str, float], list[str]] = {}

    def look(self) -> Status:
        """Read the status.

        Raises:
            OSError: The storage does not respond.
        """
        files = RunFiles(self.root)
        units = self._reader.read(files.committed)
        sessions = files.sessions_of(units)
        unit_count = files.unit_count
        documents = units.total("documents")
        failed = units.total("failed")
        exact = units.all_read
        manifest = files.manifest
        if not exact and manifest is not None and manifest.units == unit_count:
            documents = manifest.documents
            failed = manifest.failed
            exact = True
        planned, planned_exact = _planned(files.plan, unit_count, documents, exact)
        state = files.state_of(sessions)
        status = Status(
            run=self.root,
            state=state,
            fake=self._fake,
            at=files.now,
            units=unit_count,
            units_planned=None,
            documents=documents,
            failed=failed,
            exact=exact,
            documents_planned=planned,
            planned_exact=planned_exact,
            sessions=len(sessions),
            running_seconds=sum(session.seconds for session in sessions),
            heard=max((session.ended for session in sessions), default=None),
            unreadable=files.unreadable,
            errors=self._last_errors(units),
            notes=_notes(files, state, documents),
        )
        if files.plan is not None:
            status.units_planned = max(files.plan.units, unit_count)
        if files.table is not None:
            status.documents = files.table.documents
            status.failed = files.table.failed
            status.exact = True
            status.extracted = documents
        newest_bill = None
        if files.bill is not None:
            newest_bill = files.bill.newest
            status.usd = files.bill.usd
            status.budget_usd = newest_bill.budget_usd
            status.deadline = newest_bill.deadline
            status.on_gpu = files.bill.cost.gpu_use is not None
            status.workers = _workers(newest_bill)
        _forecast(status, newest_bill)
        self._check_answers(status)
        return status

    def _check_answers(self, status: Status) -> None:
        """Fill in what the answers show. They are read again when twice as many units are
        committed.
        """
        if status.units >= 2 * self._answered_units or status.state != "running":
            self._answers = read_answers(self.root)
            self._answered_units = status.units
        progress = RunProgress(
            state=status.state,
            documents=status.documents,
            failed=status.failed,
            seconds=status.running_seconds,
            on_gpu=status.on_gpu,
        )
        answer_check = check(self.root, self._record, self._answers, progress)
        status.model = answer_check.model
        status.confidence = answer_check.confidence
        status.warnings = answer_check.warnings
        status.next_step = answer_check.next_step

    def _last_errors(self, units: Units) -> list[str]:
        """Return distinct reasons for the last failures."""
        reasons: dict[str, None] = {}
        for unit in units.last_failures:
            reasons |= dict.fromkeys(self._reasons_of(unit))
        return [clean(reason, 160) for reason in list(reasons)[:_ERRORS]]

    def _reasons_of(self, unit: CommittedUnit) -> list[str]:
        if unit.reasons is not None:
            return [reason.reason for reason in unit.reasons]
        # The unit is from an earlier version, whose summaries have no reasons.
        key = (unit.path, unit.committed_at)
        if key not in self._errors:
            self._errors[key] = [
                failure_reasons.normalize(row["source"], row["error"])
                for row in failed_documents(unit) or []
            ]
        return self._errors[key]


def _notes(files: RunFiles, state: str, documents: int) -> list[str]:
    """Return what readers of the status should know.

    Args:
        files: The files of the run.
        state: The state of the run: `Status.state`.
        documents: Documents in committed units.
    """
    notes = []
    if files.unreadable:
        units = counted(files.unreadable, "unit")
        notes.append(
            f"{units} of the input cannot be read: their documents are not in these figures"
        )
    if files.left_out:
        notes.append(files.left_out)
    if files.table is not None:
        extracted = counted(documents, "document")
        notes.append(
            f"the table is that of the night {files.table.night}; {extracted} extracted in all "
            "nights"
        )
    if files.bill is not None:
        notes += files.bill.cost.notes
        if files.bill.cost.input_bound_note:
            notes.append(files.bill.cost.input_bound_note)
    elif documents or state != "running":
        # The bill of a starting run appears with the first documents.
        notes.append("no bill is kept for this run")
    return notes


def _planned(
    plan: PlanTotals | None, units: int, documents: int, exact: bool
) -> tuple[int | None, bool]:
    """Return the number of documents of the whole run, and whether they were counted.

    Units that are cut by bytes are assumed to have about the same number of documents each.

    Args:
        plan: The totals of the plan; None if they are not known.
        units: Committed units.
        documents: Documents in committed units.
        exact: Whether `documents` was counted.
    """
    if plan is None or not plan.documents:
        return None, False
    if plan.exact or not units:
        return plan.documents, plan.exact
    all_documents = round(documents * max(plan.units, units) / units)
    return all_documents, units >= plan.units and exact


def _forecast(status: Status, bill: Bill | None) -> None:
    """Fill in the speed of the last minutes, and the expected time and bill at the end.

    Args:
        status: The status to complete.
        bill: The bill of the newest session; None if there is none.
    """
    running = status.state == "running"
    speed = None
    if running and bill is not None:
        speed = _recent_speed(bill)
        status.usd_per_hour = 0
        for node in bill.nodes:
            if node.ended is None or node.ended >= bill.until - 1:
                status.usd_per_hour += node.usd_per_hour
    if not speed and status.answered and status.running_seconds > 0:
        speed = status.answered / status.running_seconds
    status.documents_per_second = speed
    if not running or not speed or status.documents_planned is None:
        return
    remaining = max(0, status.documents_planned - status.documents)
    status.eta_seconds = remaining / speed
    if bill is not None and status.usd is not None and status.usd_per_hour is not None:
        machines_usd = status.usd_per_hour * status.eta_seconds / 3600
        # The price of a document's tokens on a server.
        server_usd = bill.parts.get("endpoint", 0.0) / (bill.totals.get("documents") or 1)
        status.usd_at_end = status.usd + machines_usd + server_usd * remaining


def _recent_speed(bill: Bill) -> float | None:
    """Return the documents per second of the last minutes; None if nothing was answered."""
    points = [
        (moment, documents) for moment, _, documents, *_ in bill.series if moment >= bill.began
    ]
    if not points:
        return None
    end, end_documents = points[-1]
    if end - bill.began < _RATE_SECONDS:
        # The session has just begun, and the startup of its workers says nothing about its speed.
        first_documents = points[0][1]
        points = [point for point in points if point[1] > first_documents] or points
    begin, begin_documents = next(point for point in points if point[0] >= end - _RATE_SECONDS)
    if end <= begin or end_documents <= begin_documents:
        return None
    return (end_documents - begin_documents) / (end - begin)


def _workers(bill: Bill) -> list[WorkerState]:
    """Return the workers of a session; those that have ended come last."""
    states = []
    for worker in bill.workers:
        state = worker.state
        if bill.final:
            state = "ended"
        busy = round(worker.spent("busy") / worker.lived(bill.until), 4)
        states.append(WorkerState(clean(worker.worker, 40), clean(worker.node, 40), state, busy))
    return sorted(states, key=lambda worker: (worker.state == "ended", worker.worker))
