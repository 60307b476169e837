"""What becomes of a unit whose worker process dies: bisected, until the document that kills is found.

The first attempt decodes a unit as a whole. After a death it goes on alone in its worker and in groups, and a marker
of the group in hand is left on storage before each; whatever was in hand at the next death is the suspect part, which
is divided again. A document that was in hand alone when its process died is quarantined: it becomes an error row, and
the rest of the unit is done. So a unit of 256 documents costs three deaths a culprit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from raypd import storage
from raypd.run import layout
from raypd.run.unit import Unit

_PARTS = 16  # groups that the suspect rows are divided into
_LEAST_DEATHS = 3  # before a document is blamed: a process may be killed from outside once or twice
_MOST_DEATHS = 30  # of one unit: then it is given up as a whole
_MOST_BLIND = 5  # deaths before any row was in hand: there is nothing to divide
_MOST_ERRORS = 3  # attempts at a unit that fails with an error of storage


@dataclass(frozen=True)
class Attempt:
    """One go at a unit.

    number: of the attempts that counted, from 1. deaths: worker processes that died of it. blind: of these, those
    that left no mark though they should. suspects: rows that were in hand at the last death; None: not known.
    quarantined: row -> how many of the deaths it explains.
    """

    unit: Unit
    number: int = 1
    deaths: int = 0
    blind: int = 0
    suspects: tuple[int, ...] | None = None
    quarantined: dict[int, int] = field(default_factory=dict)

    @property
    def bisecting(self) -> bool:
        """Whether to decode in marked groups, and nothing else beside it."""
        return self.deaths > 0

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        """The rows in the order and in the groups in which they are decoded: suspects first, then all others."""
        left = [row for row in rows if row not in self.quarantined]
        if not self.bisecting:
            return [left]
        known = set(self.suspects or ())
        suspects = [row for row in left if row in known] or left
        size = -(-len(suspects) // _PARTS) or 1
        groups = [suspects[at : at + size] for at in range(0, len(suspects), size)]
        rest = [row for row in left if row not in known] if len(suspects) < len(left) else []
        return [*groups, rest] if rest else groups

    def after_death(self, in_hand: Sequence[int] | None) -> Attempt | None:
        """The next attempt once the worker process died; None when the unit is given up.

        in_hand: the rows that the marker names, where this attempt left one.
        """
        deaths = self.deaths + 1
        blind = self.blind + 1 if self.bisecting and not in_hand else self.blind
        if deaths >= _MOST_DEATHS or blind >= _MOST_BLIND:
            return None
        suspects = tuple(in_hand) if in_hand and self.bisecting else None
        quarantined = self.quarantined
        unexplained = deaths - sum(quarantined.values())
        if suspects is not None and len(suspects) == 1 and unexplained >= _LEAST_DEATHS:
            quarantined, suspects = {**quarantined, suspects[0]: unexplained}, None
        return replace(
            self, number=self.number + 1, deaths=deaths, blind=blind, suspects=suspects, quarantined=quarantined
        )

    def after_error(self) -> Attempt | None:
        """The next attempt once storage failed; None when that was the last."""
        return replace(self, number=self.number + 1) if self.number < _MOST_ERRORS else None

    def reason(self, row: int, failure_reason: str | None) -> str:
        """Why a quarantined row has no answer."""
        count = self.quarantined[row]
        word = f": {failure_reason.strip().splitlines()[-1]}" if failure_reason and failure_reason.strip() else ""
        return f"killed its worker process {count} times{word}"


# -------------------------------------------------------------------------------------------------- marks on storage


def _marker(output: str, unit: str) -> str:
    return storage.join(output, layout.FAILURES, f"{unit}.hand.json")


def failure_path(output: str, unit: str) -> str:
    """Where a worker that ends itself with a unit leaves the reason."""
    return storage.join(output, layout.FAILURES, f"{unit}.txt")


def checkpoint(output: str, unit: str, rows: Sequence[int]) -> None:
    """Leaves word of the rows that are about to be decoded. Raises OSError."""
    storage.put(_marker(output, unit), json.dumps({"rows": list(rows)}).encode())


def checkpointed(output: str, unit: str) -> list[int] | None:
    """The rows of the last mark of a unit, or None."""
    try:
        return [int(row) for row in json.loads(storage.read(_marker(output, unit)))["rows"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def failure_reason(output: str, unit: str) -> str | None:
    """What the last worker that ended itself with the unit said."""
    try:
        return storage.read(failure_path(output, unit)).decode(errors="replace")
    except OSError:
        return None
