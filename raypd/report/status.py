"""How a run stands, from its folder alone and so from any machine.

Cheap: it reads some footers, and none twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from raypd import storage
from raypd.billing.bill import Bill
from raypd.dataset.plan import PlanTotals
from raypd.report.data import RunFiles, is_fake
from raypd.report.sample import failed_documents
from raypd.report.units import CommittedUnit, Units, read_unit
from raypd.run.load import load_record
from raypd.run.read import spread
from raypd.text import clean, counted
from raypd.verify import dead_letters

_FOOTERS = 512  # read in one look
_THREADS = 32
_ERROR_UNITS = 8  # read for their errors in one look
_ERRORS = 5
_RATE_SECONDS = 600.0  # the speed of now is that of the last ten minutes


@dataclass
class WorkerState:
    worker: str
    node: str
    state: str  # now: startup, busy, idle, ended
    busy: float  # share of its time


@dataclass
class Status:
    """One look at a run.

    Times are unix seconds, `eta_seconds` from now; None is what nothing on storage tells.
    """

    run: str
    state: str
    fake: bool
    at: float
    units: int
    units_planned: int | None
    documents: int
    documents_planned: int | None
    exact: bool  # whether `documents` and `failed` were counted, not scaled up from some units
    planned_exact: bool  # whether `documents_planned` was
    failed: int
    sessions: int
    running_seconds: float
    # Documents of all nights, where `documents` are those of a nightly table.
    extracted: int | None = None
    unreadable: int = 0  # units of the input that cannot be read
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


class Watch:
    """Looks at a run again and again, and keeps what a committed unit holds until its object is
    replaced.
    """

    def __init__(self, root: str, overrides: Sequence[str] = ()) -> None:
        self.root, self._fake = root, is_fake(load_record(root, overrides).config)
        self._summaries: dict[storage.Object, CommittedUnit | None] = {}  # that were read
        self._errors: dict[str, list[str]] = {}

    def look(self) -> Status:
        """Raises OSError when storage does not answer."""
        files = RunFiles(self.root)
        objects = files.objects
        plan = files.plan
        table = files.table
        bill = files.bill
        # The newest units are not known by name: of those that were not read, an even choice is.
        chosen = spread([o for o in objects if o not in self._summaries], _FOOTERS)
        for item, unit in zip(chosen, storage.in_threads(read_unit, chosen, _THREADS), strict=True):
            self._summaries[item] = unit
            self._errors.pop(item.path, None)
        units = Units(
            [unit for unit in map(self._summaries.get, objects) if unit is not None], len(objects)
        )
        sessions = files.sessions_of(units)
        manifest = files.manifest
        documents = units.total("documents")
        failed = units.total("failed")
        exact = units.all_read
        if not exact and manifest is not None and manifest.units == len(objects):
            documents = manifest.documents
            failed = manifest.failed
            exact = True
        planned, planned_exact = _planned(plan, len(objects), documents, exact)
        status = Status(
            run=self.root,
            state=files.state_of(sessions),
            fake=self._fake,
            at=files.now,
            units=len(objects),
            units_planned=max(plan.units, len(objects)) if plan else None,
            documents=table.documents if table else documents,
            extracted=documents if table else None,
            failed=table.failed if table else failed,
            exact=exact or table is not None,
            documents_planned=planned,
            planned_exact=planned_exact,
            sessions=len(sessions),
            running_seconds=sum(s.seconds for s in sessions),
            heard=max((s.ended for s in sessions), default=None),
            unreadable=files.unreadable,
            errors=self._last_errors(units.read),
        )
        if status.unreadable:
            unreadable = counted(status.unreadable, "unit")
            status.notes.append(
                f"{unreadable} of the input cannot be read: their documents are not in these "
                "figures"
            )
        if files.left_out:
            status.notes.append(files.left_out)
        if table:
            extracted = counted(documents, "document")
            status.notes.append(
                f"the table is that of the night {table.night}; {extracted} extracted in all nights"
            )
        status.notes += bill.cost.notes if bill else ["no bill is kept for this run"]
        if bill:
            status.usd = bill.usd
            status.budget_usd = bill.newest.budget_usd
            status.deadline = bill.newest.deadline
            status.workers = _workers(bill.newest)
        _forecast(status, bill.newest if bill else None)
        return status

    def _last_errors(self, units: Sequence[CommittedUnit]) -> list[str]:
        failed = sorted((u for u in units if u.failed), key=lambda u: -u.committed_at)[
            :_ERROR_UNITS
        ]
        for unit in failed:
            if unit.path not in self._errors:
                rows = failed_documents(unit) or []
                self._errors[unit.path] = [
                    dead_letters.normalize(row["source"], row["error"]) for row in rows
                ]
        reasons = dict.fromkeys(error for unit in failed for error in self._errors[unit.path])
        return [clean(error, 160) for error in list(reasons)[:_ERRORS]]


def _planned(
    plan: PlanTotals | None, units: int, documents: int, exact: bool
) -> tuple[int | None, bool]:
    """(documents of the run, whether counted).

    Units cut by bytes are taken to hold about as many documents each.
    """
    if plan is None or not plan.documents:
        return None, False
    if plan.exact or not units:
        return plan.documents, plan.exact
    return round(documents * max(plan.units, units) / units), units >= plan.units and exact


def _forecast(status: Status, bill: Bill | None) -> None:
    """Speed of the last minutes, and from it the end and the bill at the end. bill: of the newest
    session.
    """
    running = status.state == "running"
    rate = None
    if running and bill:
        rate = _recent(bill)
        there = (n for n in bill.nodes if n.ended is None or n.ended >= bill.until - 1)
        status.usd_per_hour = sum(n.usd_per_hour for n in there)
    done = status.documents if status.extracted is None else status.extracted
    if not rate and done and status.running_seconds > 0:
        rate = done / status.running_seconds
    status.documents_per_second = rate
    if running and rate and status.documents_planned is not None:
        remaining = max(0, status.documents_planned - status.documents)
        status.eta_seconds = remaining / rate
        if bill and status.usd is not None and status.usd_per_hour is not None:
            # For a document's tokens.
            server = bill.parts.get("endpoint", 0.0) / (bill.totals.get("documents") or 1)
            status.usd_at_end = (
                status.usd + status.usd_per_hour * status.eta_seconds / 3600 + server * remaining
            )


def _recent(bill: Bill) -> float | None:
    points = [
        (moment, documents) for moment, _, documents, *_ in bill.series if moment >= bill.began
    ]
    if not points:
        return None
    end, done = points[-1]
    if end - bill.began < _RATE_SECONDS:  # it has only begun: the start of its workers is no pace
        points = [p for p in points if p[1] > points[0][1]] or points
    moment, before = next(p for p in points if p[0] >= end - _RATE_SECONDS)
    return (done - before) / (end - moment) if end > moment and done > before else None


def _workers(bill: Bill) -> list[WorkerState]:
    states = []
    for worker in bill.workers:
        state = "ended" if bill.final else worker.state
        busy = round(worker.spent("busy") / worker.lived(bill.until), 4)
        states.append(WorkerState(clean(worker.worker, 40), clean(worker.node, 40), state, busy))
    return sorted(states, key=lambda w: (w.state == "ended", w.worker))
