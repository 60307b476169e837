"""A run's folder as a report shows it: what was asked, what is committed, how its sessions went, what it cost.

What is missing is None or empty, and the page says so: nothing here makes figures up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raypd import storage
from raypd.config.secrets import redact
from raypd.errors import RunError
from raypd.report.ledger import RunBill, read_bill
from raypd.report.sample import AnswerSample, read_sample
from raypd.report.units import CommittedUnit, Units, read_units
from raypd.run import layout, records
from raypd.run.load import NoRun, is_nightly, load_record
from raypd.run.records import Estimate, Manifest, NightState, PlanTotals, RecordError, Session
from raypd.run.text import clean
from raypd.run.training import TrainingRecord

_R = TypeVar("_R")
_ALIVE_SECONDS = 120.0  # a session without a heartbeat for longer is taken for dead
_FAILURES = 20


@dataclass
class ReportSession:
    """A session, what it committed and cost. ended: the last that is known of it. how: also running and killed."""

    id: str
    began: float
    ended: float
    how: str
    units: int = 0
    documents: int = 0
    usd: float | None = None

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.began)


@dataclass
class RunReport:
    """Everything a report shows.

    state: complete, running, interrupted, failed, killed, empty; estimated: only the estimate of a run is there;
    trained: it is no run but a training. table: of a nightly folder, whose units, sessions and bill are those of all
    its nights. unreadable: units of the input that cannot be read. forecast: None where no estimate was made, or where
    it is damaged: then its file is in `torn`. failures: (unit, the last line of why its worker died).
    """

    root: str
    fingerprint: str
    config: dict[str, Any]
    state: str
    versions: dict[str, str] = field(default_factory=dict)
    units_planned: int | None = None
    sessions: list[ReportSession] = field(default_factory=list)
    units: Units = field(default_factory=Units)
    bill: RunBill | None = None
    sample: AnswerSample = field(default_factory=AnswerSample)
    failures: list[tuple[str, str]] = field(default_factory=list)
    read_at: float = field(default_factory=time.time)
    forecast: Estimate | None = None
    training: TrainingRecord | None = None
    torn: list[str] = field(default_factory=list)  # files beside the bill that cannot be read
    table: NightState | None = None
    unreadable: int = 0

    @property
    def fake(self) -> bool:
        return is_fake(self.config)

    @property
    def name(self) -> str:
        return self.root.rstrip("/").rsplit("/", 1)[-1] or self.root

    @property
    def seconds(self) -> float:
        """Time of all sessions, without what lies between them."""
        return sum(s.seconds for s in self.sessions)


def load(root: str, overrides: Sequence[str] = ()) -> RunReport:
    """Reads the run at `root`. overrides: `storage.KEY=VALUE` says how S3 is reached.

    Raises:
        ConfigError: there is neither a run nor an estimate, or its run.json cannot be read.
        RunError: another file of it is torn, or storage does not answer.
    """
    try:
        try:
            record = load_record(root, overrides)
        except NoRun:
            if report := _only_trained(root) or _only_estimated(root):
                return report
            raise
        table, runs, now = read_table(root), runs_of(root), time.time()
        units, bill, plan = read_units(runs), read_bill(runs), read_plan(root)
        sessions = read_sessions(runs, units.read, bill, now, units.scale)
        planned = plan.units if plan else None
        forecast, torn = _read_forecast(root)
        return RunReport(
            root=root,
            fingerprint=record.fingerprint,
            config=redact(record.config),
            versions=record.versions,
            state=state_of(sessions, units.committed, planned),
            units_planned=planned,
            sessions=sessions,
            units=units,
            bill=bill,
            sample=read_sample(units.read, record.fingerprint),
            failures=_failures(runs),
            read_at=now,
            forecast=forecast,
            torn=torn,
            table=table,
            unreadable=unreadable(plan, read_manifest(root)),
        )
    except OSError as error:
        raise RunError(f"{root}: cannot be read: {error}") from None


def _only_trained(root: str) -> RunReport | None:
    """The folder of a training; None where it is none. Raises RunError when its record is damaged."""
    try:
        record = records.read(TrainingRecord, storage.join(root, layout.TRAINING))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RecordError as error:
        raise RunError(str(error)) from None
    return RunReport(
        root, "", redact(record.config), "trained", record.versions, bill=read_bill([root]), training=record
    )


def _only_estimated(root: str) -> RunReport | None:
    """A folder in which an estimate stands and no run yet; None where none does. Raises RunError when it is damaged."""
    forecast, torn = _read_forecast(root)
    if torn:
        raise RunError(f"{torn[0]}: cannot be read, and no run has begun here: `raypd estimate` makes it anew")
    if forecast is None:
        return None
    method = next((speed.method for speed in forecast.speeds), None)
    config = {"model": {"name": forecast.model}, "task": {"kind": forecast.task}, "decoding": {"method": method}}
    return RunReport(root, forecast.fingerprint or "", config, "estimated", forecast=forecast)


def _read_forecast(root: str) -> tuple[Estimate | None, list[str]]:
    """(the estimate in a run's folder or None, its path if it is there and cannot be read)."""
    path = storage.join(root, layout.ESTIMATE)
    try:
        return records.read(Estimate, path), []
    except (FileNotFoundError, NotADirectoryError):
        return None, []
    except RecordError:
        return None, [path]


def is_fake(config: dict[str, Any]) -> bool:
    """Whether the answers were made up by `model: fake`."""
    model = config.get("model")
    return (model.get("name") if isinstance(model, dict) else model) == "fake"


def read_plan(root: str) -> PlanTotals | None:
    """The totals of a run's plan, or what its manifest tells of them; None where neither is kept.

    documents: 0 where nobody knows. Raises RunError when the file is torn.
    """
    plan = _read(PlanTotals, storage.join(root, layout.PLAN_TOTALS))
    if plan is not None:
        return plan
    manifest = read_manifest(root)
    if manifest is None or not manifest.units_planned:
        return None
    done = manifest.units == manifest.units_planned
    return PlanTotals("", manifest.units_planned, manifest.documents if done else 0)


def read_manifest(root: str) -> Manifest | None:
    """What a run came to when it last ended; None where it never has. Raises RunError when the file is torn."""
    return _read(Manifest, storage.join(root, layout.MANIFEST))


def unreadable(plan: PlanTotals | None, manifest: Manifest | None) -> int:
    """Units of the input that cannot be read: the plan knows those found at once, the manifest those found later."""
    return max(plan.damaged if plan else 0, manifest.units_unreadable if manifest else 0)


def read_table(root: str) -> NightState | None:
    """The last good night of a nightly folder; None where it is none. Raises RunError when its record is torn."""
    return _read(NightState, storage.join(root, layout.STATE))


def runs_of(root: str) -> list[str]:
    """The folders of a run: its own, or of a nightly folder those of all nights, the oldest first."""
    if not is_nightly(root):
        return [root]
    folder = storage.join(root, layout.NIGHTS)
    nights = [storage.join(folder, name) for name in sorted(storage.folders(folder))]
    return [run for night in nights for run in (night, storage.join(night, layout.ADDED))]


def _read(kind: type[_R], path: str) -> _R | None:
    try:
        return records.read(kind, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RecordError as error:
        raise RunError(str(error)) from None


def _failures(runs: Sequence[str]) -> list[tuple[str, str]]:
    folders = (storage.join(run, layout.FAILURES) for run in runs)
    files = [(folder, name) for folder in folders for name in storage.names(folder) if name.endswith(".txt")]
    failures = []
    for folder, name in files[:_FAILURES]:
        try:
            text = storage.read(storage.join(folder, name)).decode(errors="replace").strip()
        except OSError:
            continue
        failures.append((name.removesuffix(".txt"), clean(text.splitlines()[-1], 400) if text else "no reason left"))
    return failures


def read_sessions(
    runs: Sequence[str], units: Sequence[CommittedUnit], bill: RunBill | None, now: float, scale: float = 1.0
) -> list[ReportSession]:
    """The sessions of some runs, oldest first, with what each committed and cost; a torn file is left out.

    units: as far as they are known, each for `scale` of them. now: unix seconds.
    """
    stored = []
    for folder in (storage.join(run, layout.SESSIONS) for run in runs):
        for name in storage.names(folder):
            with contextlib.suppress(RecordError, OSError):
                stored.append(records.read(Session, storage.join(folder, name)))
    bills = {entry.session: entry for entry in (*bill.sessions, *bill.retries)} if bill else {}
    by_session: dict[str, list[CommittedUnit]] = {}
    for unit in units:
        by_session.setdefault(unit.session, []).append(unit)
    sessions = []
    for session in sorted(stored, key=lambda session: session.began):
        committed, billed = by_session.get(session.id, []), bills.get(session.id)
        signs = [session.began, session.heartbeat or 0.0, *(unit.committed_at for unit in committed)]
        heard = max([*signs, billed.until] if billed else signs)
        ended, how = heard, "running" if now - heard < _ALIVE_SECONDS else "killed"
        if session.how:
            ended, how = session.ended or heard, session.how
        documents = round(sum(unit.documents for unit in committed) * scale)
        usd = billed.usd if billed else None
        sessions.append(
            ReportSession(session.id, session.began, ended, how, round(len(committed) * scale), documents, usd)
        )
    return sessions


def state_of(sessions: Sequence[ReportSession], committed: int, planned: int | None) -> str:
    """One word for a run: complete when every planned unit is there, else how its newest session went."""
    if planned is not None and committed >= planned:
        return "complete"
    # Without a count of the plan a session that says complete is believed.
    return sessions[-1].how if sessions else "empty"
