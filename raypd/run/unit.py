"""A unit of work, committed as one and once: its id is a pure function of what is read and of the
fingerprint.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_SUBSET_DIGITS = 12


@dataclass(frozen=True)
class Part:
    """A range of one object."""

    path: str
    name: str  # as the user knows `path`
    version: str
    stamp: str  # what the listing has of the object; a later session compares it
    size: int
    format: str
    compression: str | None
    # Bytes in uncompressed JSONL (lines that begin there) and in a CSV's text, else rows.
    start: int = 0
    end: int = 0
    # Documents: counted where `exact`, else estimated from the object's first lines.
    expected: int = 0
    exact: bool = True
    bytes: int = 0  # that the range takes of the object as stored
    line: int = 1  # of CSV: on which the range begins, from 1
    encoding: str | None = None  # of CSV: as planning has detected it; None: as configured

    @property
    def rows(self) -> int | None:
        """Documents in it; None where only reading it can tell."""
        return self.expected if self.exact else None


@dataclass(frozen=True)
class Unit:
    """One part, or several that are small objects each."""

    id: str
    parts: tuple[Part, ...]
    # Why the object cannot be read: the plan lists such a unit, nobody works on it.
    damaged: str | None = None
    # Numbers of the wanted documents in it (from 0, in order); None: all.
    only: tuple[int, ...] | None = None

    @property
    def rows(self) -> int | None:
        """Documents in it; None where only reading it can tell."""
        if self.only is not None or all(part.exact for part in self.parts):
            return self.expected
        return None

    @property
    def expected(self) -> int:
        """Documents in it, counted or estimated."""
        if self.only is not None:
            return len(self.only)
        return sum(part.expected for part in self.parts)

    @property
    def bytes(self) -> int:
        """Stored bytes of the input that it takes."""
        return sum(part.bytes for part in self.parts)

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def start(self) -> int:
        return self.parts[0].start

    def subset(self, rows: Sequence[int]) -> "Unit":
        """Some of its documents as a unit of their own."""
        digest = hashlib.sha256(",".join(map(str, rows)).encode()).hexdigest()[:_SUBSET_DIGITS]
        return replace(self, id=f"{self.id}.{digest}", only=tuple(rows))

    @property
    def whole(self) -> str:
        """The id of the unit that it is a subset of; its own where it is whole."""
        return self.id if self.only is None else self.id[: -_SUBSET_DIGITS - 1]


def make_unit(parts: Sequence[Part], fingerprint: str, damaged: str | None = None) -> Unit:
    """The unit of some parts, in the order of the input. damaged: why its object cannot be read."""
    first = parts[0]
    keys = [fingerprint] + ["\0".join([p.name, p.version, str(p.start), str(p.end)]) for p in parts]
    digest = hashlib.sha256("\0\0".join(keys).encode()).hexdigest()[:16]
    prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", first.name)[-48:]
    # The unit's object is named after its id, and readers of tables skip names that begin with _
    # or a dot.
    prefix = prefix.lstrip("-._").rstrip("-.")
    return Unit(f"{prefix}-{first.start:012d}-{digest}", tuple(parts), damaged)
