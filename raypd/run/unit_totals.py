"""Totals over the committed units of a run, by session.

They are what a manifest and a bill need to know about the units, in memory that does not grow with
their number.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from raypd.run.failure_reasons import OTHER, FailureReason
from raypd.run.unit import UnitSummary
from raypd.run.usage import Usage

# Further kinds of reasons are counted together.
_MAX_REASONS = 10_000


@dataclass
class SessionUnits:
    """The units that one session committed.

    Each field that is an int is the sum of the field with this name in all summaries.
    """

    units: int = 0
    documents: int = 0
    ok: int = 0
    failed: int = 0
    truncated: int = 0
    retriable: int = 0  # failed documents that a retry may help, as far as that was counted
    last_commit: float = 0.0  # unix seconds
    counts: dict[str, int] = field(default_factory=dict)  # tokens by kind, and steps
    usage: Usage = field(default_factory=dict)

    def add(self, other: "SessionUnits") -> None:
        """Add the units of another part of the session."""
        for name in ("units", *SUMMED):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_commit = max(self.last_commit, other.last_commit)
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
        for key, counts in other.usage.items():
            totals = self.usage.setdefault(key, {})
            for kind, value in counts.items():
                totals[kind] = totals.get(kind, 0) + value


# The fields of a summary that are added up.
SUMMED = tuple(
    item.name for item in fields(SessionUnits) if item.type is int and item.name != "units"
)


class UnitTotals:
    """The committed units of a run, added up.

    Attributes:
        sessions: The units of each session, by its id.
        fingerprints: The fingerprints of all units, each with one of its units.
        reasons: Failed documents by kind of reason.
    """

    def __init__(self, summaries: Iterable[UnitSummary] = ()) -> None:
        self.sessions: defaultdict[str, SessionUnits] = defaultdict(SessionUnits)
        self.fingerprints: dict[str, str] = {}
        self.reasons: Counter[str] = Counter()
        for summary in summaries:
            self.add_summary(summary)

    def add_summary(self, summary: UnitSummary) -> None:
        """Add one unit."""
        self.fingerprints.setdefault(summary.fingerprint, summary.unit)
        self.add_reasons(summary.reasons or [])
        unit = SessionUnits(
            units=1,
            last_commit=summary.committed_at,
            counts=summary.counts,
            usage=summary.categories,
        )
        for name in SUMMED:
            setattr(unit, name, getattr(summary, name))
        self.sessions[summary.session].add(unit)

    def add_reasons(self, reasons: Iterable[FailureReason]) -> None:
        """Add the failed documents of a unit by kind of reason."""
        for reason in reasons:
            kind = reason.reason
            if kind not in self.reasons and len(self.reasons) >= _MAX_REASONS:
                kind = OTHER
            self.reasons[kind] += reason.documents

    def total(self, name: str) -> int:
        """Return the total of a field of `SessionUnits`, such as units, documents or failed."""
        return int(sum(getattr(session, name) for session in self.sessions.values()))

    def tokens(self, kind: str) -> int:
        """Return the total of one kind of tokens."""
        return int(sum(session.counts.get(kind, 0) for session in self.sessions.values()))

    def all(self) -> SessionUnits:
        """Return the units of all sessions together."""
        together = SessionUnits()
        for session in self.sessions.values():
            together.add(session)
        return together

    def __repr__(self) -> str:
        shown: dict[str, Any] = {name: unit.units for name, unit in self.sessions.items()}
        return f"UnitTotals({shown})"
