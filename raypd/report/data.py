"""A run's folder as plain dataclasses: what was asked, what is committed, how its sessions went, what it cost.

What is missing is None or empty, and the page says so: nothing here makes figures up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.errors import RunError
from raypd.report.ledger import Bill, read_bill
from raypd.report.sample import Sample, read_sample
from raypd.report.secrets import redact
from raypd.report.text import clean
from raypd.run import layout
from raypd.run.load import NoRun, load_record
from raypd.run.records import Estimate

READ_UNITS = 20_000  # more units than this are read in part, evenly spread, and their figures scaled up
ALIVE_SECONDS = 120.0  # a session without a heartbeat for longer is taken for dead
_THREADS = 32
_FAILURES = 20


@dataclass
class Unit:
    """A committed unit as its summary has it; times are unix seconds. `worker` is None where it was not kept."""

    id: str
    path: str
    session: str
    documents: int
    ok: int
    failed: int
    began: float
    committed: float
    worker: str | None
    counts: dict[str, int]


@dataclass
class Units:
    """All committed units, or with `scale` above 1 an even choice that stands for that many times as many."""

    read: list[Unit] = field(default_factory=list)
    committed: int = 0
    damaged: list[str] = field(default_factory=list)

    @property
    def scale(self) -> float:
        return (self.committed - len(self.damaged)) / len(self.read) if self.read else 1.0

    @property
    def whole(self) -> bool:
        """Whether every unit was read, so that sums are exact."""
        return len(self.read) + len(self.damaged) == self.committed

    def total(self, name: str) -> int:
        """Documents, ok or failed of all units."""
        return round(sum(getattr(u, name) for u in self.read) * self.scale)

    def tokens(self, kind: str) -> int:
        return round(sum(u.counts.get(kind, 0) for u in self.read) * self.scale)


@dataclass
class Session:
    """One run of the command. `ended` is the last that is known of it; how: also running and killed."""

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
class Failure:
    """The last word of a worker that died."""

    unit: str
    text: str


@dataclass
class Run:
    """Everything a report shows.

    state: complete, running, interrupted, failed, killed, empty, or estimated: only the estimate of a run is there.
    forecast: None where no estimate was made, or where it is damaged, which is told in `torn`.
    """

    root: str
    fingerprint: str
    created: float | None
    config: dict[str, Any]
    versions: dict[str, str]
    fake: bool
    state: str
    units_planned: int | None
    sessions: list[Session]
    units: Units
    bill: Bill | None
    sample: Sample
    failures: list[Failure]
    read_at: float
    forecast: Estimate | None = None
    torn: list[str] = field(default_factory=list)  # files beside the bill that cannot be read

    @property
    def name(self) -> str:
        return self.root.rstrip("/").rsplit("/", 1)[-1] or self.root

    @property
    def seconds(self) -> float:
        """Time of all sessions, without what lies between them."""
        return sum(s.seconds for s in self.sessions)


def load(root: str, overrides: Sequence[str] = ()) -> Run:
    """Reads the run at `root`, a local folder or s3://bucket/prefix.

    overrides: `storage.KEY=VALUE` says how S3 is reached. Raises ConfigError when there is neither a run nor an
    estimate there, or its run.json cannot be read; RunError when another file of it is torn or storage does not answer.
    """
    try:
        try:
            return _load(root, load_record(root, overrides))
        except NoRun:
            estimated = _only_estimated(root)
            if estimated is None:
                raise
            return estimated
    except OSError as error:
        raise RunError(f"{root}: cannot be read: {error}") from None


def _load(root: str, claim: dict[str, Any]) -> Run:
    config = claim["config"]
    units = read_units(root)
    bill = read_bill(root)
    now = time.time()
    sessions = read_sessions(root, units, bill, now)
    plan = read_plan(root)
    planned = plan.units if plan else None
    forecast, torn = read_forecast(root)
    return Run(
        root=root,
        fingerprint=str(claim.get("fingerprint", "")),
        created=_unix(claim.get("created")),
        config=redact(config),
        versions={str(k): str(v) for k, v in (claim.get("versions") or {}).items()},
        fake=is_fake(config),
        state=state_of(sessions, units.committed, planned),
        units_planned=planned,
        sessions=sessions,
        units=units,
        bill=bill,
        sample=read_sample(units.read, str(claim.get("fingerprint", ""))),
        failures=_failures(root),
        read_at=now,
        forecast=forecast,
        torn=torn,
    )


def _only_estimated(root: str) -> Run | None:
    """A folder in which an estimate stands and no run yet; None where none does. Raises RunError when it is damaged."""
    forecast, torn = read_forecast(root)
    if torn:
        raise RunError(f"{torn[0]}: cannot be read, and no run has begun here: `raypd estimate` makes it anew")
    if forecast is None:
        return None
    config = {"model": {"name": forecast.model}, "task": {"kind": forecast.task}}
    return Run(
        root=root,
        fingerprint=forecast.fingerprint or "",
        created=forecast.created_at,
        config={**config, "decoding": {"method": next((speed.method for speed in forecast.speeds), None)}},
        versions={},
        fake=forecast.model == "fake",
        state="estimated",
        units_planned=None,
        sessions=[],
        units=Units(),
        bill=None,
        sample=Sample(),
        failures=[],
        read_at=time.time(),
        forecast=forecast,
    )


def read_forecast(root: str) -> tuple[Estimate | None, list[str]]:
    """(the estimate in a run's folder or None, its path if it is there and cannot be read)."""
    path = storage.join(root, layout.ESTIMATE)
    try:
        return Estimate.from_json(json.loads(storage.read(path))), []
    except (FileNotFoundError, NotADirectoryError):
        return None, []
    except ValueError:
        return None, [path]


def is_fake(config: dict[str, Any]) -> bool:
    """Whether the answers were made up by `model: fake`."""
    model = config.get("model")
    return (model.get("name") if isinstance(model, dict) else model) == "fake"


def read_json(root: str, name: str) -> dict[str, Any] | None:
    """A JSON object of the run, None where there is none. Raises RunError when it is torn."""
    path = storage.join(root, name)
    try:
        tree = json.loads(storage.read(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise RunError(f"{path}: cannot be read ({error})") from None
    if not isinstance(tree, dict):
        raise RunError(f"{path}: holds no JSON object")
    return tree


def _unix(iso: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(iso)).timestamp()
    except ValueError:
        return None


def state_of(sessions: list[Session], committed: int, planned: int | None) -> str:
    """One word for a run: complete when every planned unit is there, else how its newest session went."""
    if planned is not None and committed >= planned:
        return "complete"
    if not sessions:
        return "empty"
    # Without a count of the plan a session that says complete is believed.
    return sessions[-1].how


# --------------------------------------------------------------------------------------------------------------- units


def unit_objects(root: str) -> list[storage.Object]:
    """The objects of the committed units, in the order of their names."""
    return [o for o in storage.walk(storage.join(root, layout.UNITS)) if o.name.endswith(".parquet")]


def read_units(root: str) -> Units:
    """The summaries of the committed units, of very many an even choice. Damaged ones are named, and not counted."""
    objects = unit_objects(root)
    units = Units(committed=len(objects))
    chosen = spread(objects, READ_UNITS)
    with ThreadPoolExecutor(_THREADS) as pool:
        for found, item in zip(pool.map(read_unit, chosen), chosen, strict=True):
            if found is None:
                units.damaged.append(item.path)
            else:
                units.read.append(found)
    units.read.sort(key=lambda u: u.committed)
    return units


def spread(items: list[Any], most: int) -> list[Any]:
    """At most that many of them, evenly spaced."""
    if len(items) <= most:
        return items
    return [items[i * len(items) // most] for i in range(most)]


def read_unit(item: storage.Object) -> Unit | None:
    try:
        with storage.open_file(item.path) as file:
            summary = json.loads((pq.read_metadata(file).metadata or {})[b"raypd"])
        return unit_of(summary, item.path)
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
        return None


def unit_of(summary: dict[str, Any], path: str) -> Unit:
    """Raises KeyError, TypeError, ValueError when it is no summary."""
    committed, seconds = float(summary["committed_at"]), float(summary["seconds"])
    began = summary.get("began")
    return Unit(
        id=str(summary["unit"]),
        path=path,
        session=str(summary["session"]),
        documents=int(summary["documents"]),
        ok=int(summary["ok"]),
        failed=int(summary["failed"]),
        began=float(began) if began else committed - seconds,
        committed=committed,
        worker=str(summary["worker"]) if summary.get("worker") else None,
        counts={str(k): int(v) for k, v in (summary.get("counts") or {}).items()},
    )


# ------------------------------------------------------------------------------------------------------------ sessions


def session_trees(root: str) -> list[dict[str, Any]]:
    """The files of the sessions, oldest first; a torn one is left out."""
    folder = storage.join(root, layout.SESSIONS)
    trees = []
    for name in storage.names(folder):
        try:
            tree = json.loads(storage.read(storage.join(folder, name)))
            if isinstance(tree, dict) and "began" in tree:
                trees.append(tree)
        except (ValueError, OSError):
            continue
    return sorted(trees, key=lambda t: float(t["began"]))


def session_of(tree: dict[str, Any], now: float, last: float = 0.0) -> Session:
    """A session's file; last: the newest sign of life elsewhere (a commit, its bill), unix seconds."""
    began = float(tree["began"])
    heard = max(began, last, float(tree.get("heartbeat") or 0.0))
    if tree.get("how"):
        return Session(str(tree.get("id", "")), began, float(tree.get("ended") or heard), str(tree["how"]))
    return Session(str(tree.get("id", "")), began, heard, "running" if now - heard < ALIVE_SECONDS else "killed")


def read_sessions(root: str, units: Units, bill: Bill | None, now: float) -> list[Session]:
    """All sessions with what each committed and cost."""
    last: dict[str, float] = dict(bill.heard) if bill else {}
    held: dict[str, tuple[int, int]] = {}
    for unit in units.read:
        last[unit.session] = max(last.get(unit.session, 0.0), unit.committed)
        n, documents = held.get(unit.session, (0, 0))
        held[unit.session] = (n + 1, documents + unit.documents)
    sessions = []
    for tree in session_trees(root):
        session = session_of(tree, now, last.get(str(tree.get("id")), 0.0))
        n, documents = held.get(session.id, (0, 0))
        session.units, session.documents = round(n * units.scale), round(documents * units.scale)
        session.usd = bill.sessions.get(session.id) if bill else None
        sessions.append(session)
    return sessions


@dataclass
class Plan:
    """What a run means to do. `exact`: whether `documents` is a count; else it is an estimate from samples."""

    units: int
    documents: int | None
    exact: bool = True


def read_plan(root: str) -> Plan | None:
    """The totals of a run's plan, None where none is kept: plan/plan.json, or of a finished run its manifest."""
    tree = read_json(root, "plan/plan.json")
    if tree is not None and "units" in tree:
        documents = tree.get("documents")
        return Plan(
            int(tree["units"]), int(documents) if documents is not None else None, bool(tree.get("exact", True))
        )
    manifest = read_json(root, layout.MANIFEST)
    if manifest is None or manifest.get("units_planned") is None:
        return None
    done = manifest.get("units") == manifest["units_planned"]
    return Plan(int(manifest["units_planned"]), int(manifest.get("documents") or 0) if done else None)


def _failures(root: str) -> list[Failure]:
    folder = storage.join(root, layout.FAILURES)
    found = []
    for name in storage.names(folder)[:_FAILURES]:
        try:
            text = storage.read(storage.join(folder, name)).decode(errors="replace")
        except OSError:
            continue
        lines = [line for line in text.splitlines() if line.strip()]
        found.append(Failure(name.removesuffix(".txt"), clean(lines[-1].strip() if lines else "no reason left", 400)))
    return found
