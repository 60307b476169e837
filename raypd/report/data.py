"""Reads a run's folder for a report.

Missing data is None or empty, and the page says so. No figure is made up.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from raypd import storage
from raypd.billing import Bill
from raypd.config import redact
from raypd.dataset import CommittedUnits, PlanTotals
from raypd.errors import RunError, raised_as
from raypd.estimation import Estimate
from raypd.nights import NightState
from raypd.report.answer_check import AnswerCheck, RunProgress, check
from raypd.report.ledger import read_bill
from raypd.report.sample import read_sample
from raypd.report.units import UnitReader, Units
from raypd.run import (
    Manifest,
    NoRun,
    RunRecord,
    SessionUnits,
    TrainingRecord,
    layout,
    lease,
    left_out,
    load_record,
    read,
)

# A session is considered dead after this time without a heartbeat.
_ALIVE_SECONDS = 120.0
# The number of failed units that are shown.
_FAILURES = 20


@dataclass
class ReportSession:
    """A session of a run: from the start of the command to its end."""

    id: str
    began: float
    # The last known time of the session.
    ended: float
    # How it ended, or running or killed.
    how: str
    units: int = 0
    documents: int = 0
    usd: float | None = None

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.began)


class RunFiles:
    """The files of a run, or of nightly runs, that the page and `raypd status` both read.

    Raises:
        RunError: A file is damaged.
        OSError: The storage does not respond.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.now = time.time()
        self.table = read.record(NightState, root, layout.STATE)
        self.runs = read.runs(root)
        self.manifest = read.record(Manifest, root, layout.MANIFEST)
        self.plan = read.record(PlanTotals, root, layout.PLAN_TOTALS)
        if self.plan is None and self.manifest is not None:
            self.plan = _plan_of_manifest(self.manifest)
        self.bill = read_bill(self.runs)
        self.committed = [CommittedUnits(run) for run in self.runs]
        self.unit_count = sum(run.objects for run in self.committed)
        # The plan counts units that it found to be unreadable, the manifest also those found later.
        self.unreadable = 0
        self.left_out = ""
        if self.plan is not None:
            self.unreadable = self.plan.damaged
        if self.manifest is not None:
            self.unreadable = max(self.unreadable, self.manifest.units_unreadable)
            self.left_out = left_out.describe(self.manifest.left_out)

    def sessions_of(self, units: Units, runs: Sequence[str] | None = None) -> list[ReportSession]:
        """Return sessions, oldest first, with their units and cost if known.

        Args:
            units: The committed units.
            runs: The runs; None for all.
        """
        bills: dict[str, Bill] = {}
        if self.bill is not None:
            bills = {bill.session: bill for bill in self.bill.all}
        killed = set(map(lease.killed, self.runs))
        sessions = []
        for session in read.sessions(self.runs if runs is None else runs):
            committed = units.totals.sessions.get(session.id, SessionUnits())
            bill = bills.get(session.id)
            last_sign = max(session.began, session.heartbeat or 0.0, committed.last_commit)
            if bill is not None:
                last_sign = max(last_sign, bill.until)
            alive = self.now - last_sign < _ALIVE_SECONDS and session.id not in killed
            how = session.how
            ended = last_sign
            if how:
                ended = session.ended or last_sign
            elif alive:
                how = "running"
            else:
                how = "killed"
            report_session = ReportSession(
                session.id,
                session.began,
                ended,
                how,
                units=round(committed.units * units.counted_scale),
                documents=round(committed.documents * units.counted_scale),
                usd=bill.usd if bill is not None else None,
            )
            sessions.append(report_session)
        return sessions

    def state_of(self, sessions: Sequence[ReportSession]) -> str:
        """Return complete if every planned unit is there, and otherwise how the last session
        ended.
        """
        if self.plan is not None and self.unit_count >= self.plan.units:
            return "complete"
        if self.table is not None:
            # The state is that of the night; a run within it may have been interrupted.
            sessions = self.sessions_of(Units(), [self.root])
        if not sessions:
            return "empty"
        # Without the totals of a plan, the session's own state counts, even if it is "complete".
        return sessions[-1].how


def _plan_of_manifest(manifest: Manifest) -> PlanTotals | None:
    """Return the totals of the plan, to the extent that the manifest has them.

    The number of documents is 0, which means unknown, if units are missing.
    """
    if not manifest.units_planned:
        return None
    documents = 0
    if manifest.units == manifest.units_planned:
        documents = manifest.documents
    return PlanTotals("", manifest.units_planned, documents)


class RunReport(RunFiles):
    """Everything that a report shows.

    For nightly runs, units, sessions and bill are those of all nights.

    Attributes:
        seconds: The seconds of all sessions, without the time between them.
        state: complete, running, interrupted, ...; estimated or trained if there is no run.
        failures: Failed units, each with the last line that its worker wrote.
        torn: Files of the bill that cannot be read.
        check: What the answers show without labels; None if there are no answers.
        forecast: The estimate; None if there is none, or it cannot be read.
    """

    def __init__(
        self,
        root: str,
        fingerprint: str,
        config: dict[str, Any],
        versions: dict[str, str],
        model_card: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(root)
        self.fingerprint = fingerprint
        self.config = redact(config)
        self.versions = versions
        self.name = root.rstrip("/").rsplit("/", 1)[-1] or root
        self.units = UnitReader().read(self.committed)
        self.sessions = self.sessions_of(self.units)
        self.reading = read.readings(self.runs, [session.id for session in self.sessions])
        self.seconds = sum(session.seconds for session in self.sessions)
        self.state = self.state_of(self.sessions)
        self.sample = read_sample(self.units.read)
        self.check: AnswerCheck | None = None
        if self.unit_count:
            self.check = self._check(config, model_card)
        failures = (failure for run in self.runs for failure in read.failures(run))
        self.failures = list(islice(failures, _FAILURES))
        self.training: TrainingRecord | None = None
        self.torn: list[str] = []
        self.forecast: Estimate | None = None
        try:
            self.forecast = read.record(Estimate, root, layout.ESTIMATE)
        except RunError:
            self.torn = [storage.join(root, layout.ESTIMATE)]

    def _check(self, config: dict[str, Any], model_card: dict[str, Any] | None) -> AnswerCheck:
        """Return what the answers show without labels."""
        progress = RunProgress(
            state=self.state,
            documents=self.units.total("documents"),
            failed=self.units.total("failed"),
            seconds=self.seconds,
            on_gpu=self.bill is not None and self.bill.cost.gpu_use is not None,
        )
        record = RunRecord(self.fingerprint, config, model_card=model_card or {})
        return check(self.root, record, self.sample, progress)

    @property
    def fake(self) -> bool:
        return is_fake(self.config)


def is_fake(config: dict[str, Any]) -> bool:
    """Return whether answers are made up, because the configuration names the fake model."""
    return (config.get("model") or {}).get("name") == "fake"


def load(root: str, overrides: Sequence[str] = ()) -> RunReport:
    """Read a run.

    Args:
        root: The folder of the run.
        overrides: `storage.KEY=VALUE` texts, which say how to reach S3.

    Raises:
        ConfigError: There is neither a run nor an estimate, or run.json cannot be read.
        RunError: A file is damaged, or the storage does not respond.
    """
    with raised_as(RunError, f"{root}: cannot be read"):
        try:
            record = load_record(root, overrides)
        except NoRun:
            report = _without_run(root)
            if report is None:
                raise
            return report
        return RunReport(
            root, record.fingerprint, record.config, record.versions, record.model_card
        )


def _without_run(root: str) -> RunReport | None:
    """Return the report of a training, or of an estimate; None if the folder has neither."""
    training = read.record(TrainingRecord, root, layout.TRAINING)
    if training is not None:
        report = RunReport(root, "", training.config, training.versions)
        report.training = training
        report.state = "trained"
        return report
    report = RunReport(root, "", {}, {})
    if report.torn:
        raise RunError(
            f"{report.torn[0]}: cannot be read, and there is no run here; repeat `raypd estimate`"
        )
    forecast = report.forecast
    if forecast is None:
        return None
    report.fingerprint = forecast.fingerprint or ""
    report.state = "estimated"
    method = None
    if forecast.speeds:
        method = forecast.speeds[0].method
    report.config = {
        "model": {"name": forecast.model},
        "task": {"kind": forecast.task},
        "decoding": {"method": method},
    }
    return report
