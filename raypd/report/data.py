"""A run's folder as a report shows it.

What is missing is None or empty, and the page says so: no figure is made up.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from raypd import storage
from raypd.config.secrets import redact
from raypd.dataset.plan import PlanTotals
from raypd.errors import RunError, raised_as
from raypd.estimation.records import Estimate
from raypd.nights.state import NightState
from raypd.report.ledger import read_bill
from raypd.report.sample import read_sample
from raypd.report.units import CommittedUnit, Units, read_units, unit_objects
from raypd.run import layout, lease, read
from raypd.run.left_out import describe
from raypd.run.load import NoRun, load_record
from raypd.run.manifest import Manifest
from raypd.run.training import TrainingRecord

_ALIVE_SECONDS = 120.0  # a session without a heartbeat for longer is taken for dead
_FAILURES = 20


@dataclass
class ReportSession:
    id: str
    began: float
    ended: float  # the last that is known of it
    how: str  # also running and killed
    units: int = 0
    documents: int = 0
    usd: float | None = None

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.began)


class RunFiles:
    """What the page and `raypd status` both read, of a run or of nights.

    Raises RunError: a file is torn; OSError.
    """

    def __init__(self, root: str) -> None:
        self.root, self.now = root, time.time()
        self.table = read.record(NightState, root, layout.STATE)
        self.runs = read.runs(root)
        self.manifest = done = read.record(Manifest, root, layout.MANIFEST)
        self.plan = read.record(PlanTotals, root, layout.PLAN_TOTALS)
        if self.plan is None and done and done.units_planned:  # 0 documents: unknown
            self.plan = PlanTotals(
                "", done.units_planned, done.documents * (done.units == done.units_planned)
            )
        self.bill = read_bill(self.runs)
        self.objects = unit_objects(self.runs)
        # Units of the input: the plan knows those found at once, the manifest those found later.
        self.unreadable = max(
            self.plan.damaged if self.plan else 0, done.units_unreadable if done else 0
        )
        self.left_out = "" if done is None else describe(done.left_out)

    def sessions_of(self, units: Units, runs: Sequence[str] | None = None) -> list[ReportSession]:
        """Oldest first, each with its units, as far as known, and its cost. runs: None: all."""
        bills = {bill.session: bill for bill in self.bill.all} if self.bill else {}
        by_session: defaultdict[str, list[CommittedUnit]] = defaultdict(list)
        for unit in units.read:
            by_session[unit.session].append(unit)
        sessions = []
        killed = set(map(lease.killed, self.runs))
        for session in read.sessions(self.runs if runs is None else runs):
            committed = by_session[session.id]
            bill = bills.get(session.id)
            signs = [
                session.heartbeat or 0.0,
                bill.until if bill else 0.0,
                *(u.committed_at for u in committed),
            ]
            heard = max(session.began, *signs)
            alive = self.now - heard < _ALIVE_SECONDS and session.id not in killed
            how = session.how or ("running" if alive else "killed")
            ended = session.ended or heard if session.how else heard
            totals = (
                round(len(committed) * units.scale),
                round(sum(u.documents for u in committed) * units.scale),
            )
            sessions.append(
                ReportSession(
                    session.id, session.began, ended, how, *totals, bill.usd if bill else None
                )
            )
        return sessions

    def state_of(self, sessions: Sequence[ReportSession]) -> str:
        """One word: complete when every planned unit is there, else how the newest session went."""
        if self.plan is not None and len(self.objects) >= self.plan.units:
            return "complete"
        # It is the night that ends well or not; a run of it may have been cut off.
        if self.table is not None:
            sessions = self.sessions_of(Units(), [self.root])
        # Without a count of the plan a session that says complete is believed.
        return sessions[-1].how if sessions else "empty"


class RunReport(RunFiles):
    """Everything a report shows; of nights, units, sessions and bill are those of all nights."""

    def __init__(
        self, root: str, fingerprint: str, config: dict[str, Any], versions: dict[str, str]
    ) -> None:
        super().__init__(root)
        self.fingerprint, self.config, self.versions = fingerprint, redact(config), versions
        self.name = root.rstrip("/").rsplit("/", 1)[-1] or root
        self.units = read_units(self.objects)
        self.sessions = self.sessions_of(self.units)
        # Without what lies between them.
        self.seconds = sum(session.seconds for session in self.sessions)
        # Complete, running, interrupted, ...; estimated or trained: no run.
        self.state = self.state_of(self.sessions)
        self.sample = read_sample(self.units.read)
        # (unit, last line of why its worker died)
        self.failures = list(
            islice((failure for run in self.runs for failure in read.failures(run)), _FAILURES)
        )
        self.training: TrainingRecord | None = None
        self.torn: list[str] = []  # files beside the bill that cannot be read
        self.forecast: Estimate | None = None  # None: none was made, or it is torn
        try:
            self.forecast = read.record(Estimate, root, layout.ESTIMATE)
        except RunError:
            self.torn = [storage.join(root, layout.ESTIMATE)]

    @property
    def fake(self) -> bool:
        return is_fake(self.config)


def is_fake(config: dict[str, Any]) -> bool:
    return (config.get("model") or {}).get("name") == "fake"


def load(root: str, overrides: Sequence[str] = ()) -> RunReport:
    """Reads the run at `root`. overrides: `storage.KEY=VALUE` says how S3 is reached. Raises
    ConfigError: neither a run nor an estimate, or no readable run.json; RunError: a torn file, or
    storage is away.
    """
    with raised_as(RunError, f"{root}: cannot be read"):
        try:
            record = load_record(root, overrides)
        except NoRun:
            if (report := _without_run(root)) is None:
                raise
            return report
        return RunReport(root, record.fingerprint, record.config, record.versions)


def _without_run(root: str) -> RunReport | None:
    """Of a folder with a training, or else an estimate; None where there is neither."""
    if training := read.record(TrainingRecord, root, layout.TRAINING):
        report = RunReport(root, "", training.config, training.versions)
        report.training = training
        report.state = "trained"
        return report
    report = RunReport(root, "", {}, {})
    if report.torn:
        raise RunError(
            f"{report.torn[0]}: cannot be read, and no run has begun here: `raypd estimate` "
            "makes it anew"
        )
    if (forecast := report.forecast) is None:
        return None
    report.fingerprint = forecast.fingerprint or ""
    report.state = "estimated"
    method = next((speed.method for speed in forecast.speeds), None)
    report.config = {
        "model": {"name": forecast.model},
        "task": {"kind": forecast.task},
        "decoding": {"method": method},
    }
    return report
