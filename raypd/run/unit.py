"""Units of work. A unit is committed as a whole and exactly once.

The id of a unit depends only on the input that it covers and on the fingerprint of the run.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from raypd.run.failure_reasons import FailureReason
from raypd.run.usage import Usage

_SUBSET_DIGITS = 12


@dataclass(frozen=True)
class Part:
    """A range of one object."""

    path: str
    name: str  # the path as the user knows it
    version: str
    stamp: str  # how the listing identified the object; a later session compares it
    size: int
    format: str
    compression: str | None
    # The range. In uncompressed JSONL and in CSV these are byte offsets, and the range includes the
    # lines that begin in it. In other formats they are row numbers.
    start: int = 0
    end: int = 0
    # Documents in the range: counted if `exact`, else estimated from the first lines of the object.
    expected: int = 0
    exact: bool = True
    bytes: int = 0  # stored bytes of the range
    line: int = 1  # CSV: the line on which the range begins, from 1
    encoding: str | None = None  # CSV: as planning detected it; None: as configured
    # Parquet: the first row of the row group in which the range begins, if the group is large.
    group: int | None = None

    @property
    def rows(self) -> int | None:
        """The number of documents, or None if it is unknown before the part is read."""
        return self.expected if self.exact else None


@dataclass(frozen=True)
class Unit:
    """One part, or several parts each of which is a small object."""

    id: str
    parts: tuple[Part, ...]
    # Why the object cannot be read. The plan lists such a unit, but no worker processes it.
    damaged: str | None = None
    # The numbers of the documents to process, in order and from 0; None means all.
    only: tuple[int, ...] | None = None

    @property
    def rows(self) -> int | None:
        """The number of documents, or None if it is unknown before the unit is read."""
        if self.only is not None or all(part.exact for part in self.parts):
            return self.expected
        return None

    @property
    def expected(self) -> int:
        """The number of documents, counted or estimated."""
        if self.only is not None:
            return len(self.only)
        return sum(part.expected for part in self.parts)

    @property
    def bytes(self) -> int:
        """The stored bytes of the input that the unit covers."""
        return sum(part.bytes for part in self.parts)

    @property
    def name(self) -> str:
        """The name of the first object."""
        return self.parts[0].name

    @property
    def start(self) -> int:
        """Where the unit begins in its first object."""
        return self.parts[0].start

    def subset(self, rows: Sequence[int]) -> "Unit":
        """Make a unit of some of its documents."""
        digest = hashlib.sha256(",".join(map(str, rows)).encode()).hexdigest()[:_SUBSET_DIGITS]
        return replace(self, id=f"{self.id}.{digest}", only=tuple(rows))

    @property
    def whole(self) -> str:
        """The id of the unit that this is a subset of, or its own id if it is not a subset."""
        if self.only is None:
            return self.id
        return self.id[: -_SUBSET_DIGITS - 1]


def make_unit(parts: Sequence[Part], fingerprint: str, damaged: str | None = None) -> Unit:
    """Make a unit of some parts.

    Args:
        parts: The parts in the order of the input.
        fingerprint: The fingerprint of the run.
        damaged: Why the object cannot be read, if so.
    """
    first = parts[0]
    keys = [fingerprint]
    for part in parts:
        keys.append("\0".join([part.name, part.version, str(part.start), str(part.end)]))
    digest = hashlib.sha256("\0\0".join(keys).encode()).hexdigest()[:16]
    prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", first.name)[-48:]
    # The unit's object is named after its id, and readers of tables skip names that begin with _
    # or a dot.
    prefix = prefix.lstrip("-._").rstrip("-.")
    return Unit(f"{prefix}-{first.start:012d}-{digest}", tuple(parts), damaged)


@dataclass
class UnitSummary:
    """What a committed unit contains and used, stored in the metadata of its object."""

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
    worker: str = ""  # the worker's id in the ledger
    began: float = 0.0
    busy_seconds: float = 0.0  # engine seconds spent on this unit
    categories: Usage = field(default_factory=dict)
    retries: int = 0  # number of the last retry whose rows were merged in; 0 if none
    truncated: int = 0  # documents that were cut to fit the model's context
    # The failed documents by kind of reason; None in units of earlier versions.
    reasons: list[FailureReason] | None = None
    retriable: int = 0  # failed documents that a retry may help
    # The smallest and the largest id of its documents; None if they are not known.
    first_id: str | None = None
    last_id: str | None = None


@dataclass(frozen=True)
class Commit:
    """A commit: the object of a unit, and what it contains."""

    summary: UnitSummary
    name: str  # the path of the object below the folder of the units
    stamp: str  # as a listing shows it


@dataclass(frozen=True)
class UnitResult:
    """What a worker reports to the driver about a unit."""

    ok: int = 0  # documents
    failed: int = 0  # documents
    error: str | None = None  # why the unit was not committed
    retry: bool = False  # whether a later attempt may succeed
    fatal: bool = False  # whether no worker can process any unit
    handed_back: bool = False  # whether the scheduler took the unit back
    unreadable: bool = False  # whether only the input is at fault
    # Why the worker had to read a unit that readers should have read ahead; "" if it had not.
    why_read: str = ""
    # Seconds that the worker's engine has waited for units that the worker was reading, so far.
    reading_seconds: float = 0.0
    commit: Commit | None = None  # None if an earlier attempt had committed the unit

    @property
    def done(self) -> bool:
        """Whether the unit is committed."""
        return self.error is None and not self.handed_back
