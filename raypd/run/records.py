"""What stands in the files of a run, as types: who writes a record and who reads it use the same one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class PlanTotals:
    """What plan.json tells.

    documents: of the units that can be read, counted where `exact`, else partly estimated. bytes: stored ones.
    damaged: units that cannot be read (each is one object), and their bytes. listing: digest of the objects' names,
    sizes and versions. alone: how many objects share no unit because one of their unit could not be read. cut: the
    keys of the configuration that decide how objects are cut.
    """

    id: str
    units: int = 0
    documents: int = 0
    bytes: int = 0
    exact: bool = True
    objects: int = 0
    damaged: int = 0
    damaged_bytes: int = 0
    chunks: int = 0
    listing: str = ""
    alone: int = 0
    cut: dict[str, Any] = field(default_factory=dict)


@dataclass
class UnitSummary:
    """What a committed unit holds and cost; it stands in the metadata of its object."""

    unit: str
    fingerprint: str
    session: str
    source: str
    start: int
    documents: int
    ok: int
    failed: int
    seconds: float
    committed_at: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    worker: str = ""  # who did it, as the ledger names it
    began: float = 0.0
    busy_seconds: float = 0.0  # of the engine, for this unit
    categories: dict[str, dict[str, float]] = field(default_factory=dict)  # documents, tokens and seconds of each
    retries: int = 0  # number of the last retry whose rows are among its rows; 0: none


@dataclass(frozen=True)
class UnitResult:
    """What a worker tells the driver of a unit, or of a part of one that it answered for another worker.

    ok, failed: documents. error: why it was not done, and then retry: whether it may be at another time. fatal: no
    worker can. handed_back: at the scheduler's own wish. unreadable: it is the input's fault alone.
    """

    ok: int = 0
    failed: int = 0
    error: str | None = None
    retry: bool = False
    fatal: bool = False
    handed_back: bool = False
    unreadable: bool = False

    @property
    def done(self) -> bool:
        return self.error is None and not self.handed_back
