"""What becomes of a unit whose worker process dies: it is bisected until the document that kills is found.

The first attempt decodes a unit as a whole. After a death it is alone in its worker and goes in groups, with a
checkpoint on storage before each: the rows of the group. Those of the last checkpoint are the suspects of the next
death, and are divided again. A document that was decoded alone when its process died is quarantined: it becomes an
error row, and the rest of the unit is done. So a unit of 256 documents costs three deaths a culprit.
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
_MOST_BLIND = 5  # deaths before the first checkpoint: there is nothing to divide
_MOST_ERRORS = 3  # attempts at a unit that fails with an error of storage


@dataclass(frozen=True)
class Attempt:
    """An attempt at a unit.

    number: of the attempts that counted, from 1. deaths: worker processes that died of it. blind: of these, those
    that left no checkpoint though they should. suspects: rows of the checkpoint at the last death; None: not known.
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
        """Whether to decode in groups with checkpoints, and nothing else beside it."""
        return self.deaths > 0

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        """The rows in the order and in the groups in which they are decoded: suspects first, then all others."""
        remaining = [row for row in rows if row not in self.quarantined]
        if not self.bisecting:
            return [remaining]
        suspected = set(self.suspects or ())
        suspects = [row for row in remaining if row in suspected] or remaining
        size = -(-len(suspects) // _PARTS) or 1
        groups = [suspects[start : start + size] for start in range(0, len(suspects), size)]
        unsuspected = [row for row in remaining if row not in suspected] if len(suspects) < len(remaining) else []
        return [*groups, unsuspected] if unsuspected else groups

    def after_death(self, checkpoint: Sequence[int] | None) -> Attempt | None:
        """The next attempt once the worker process died; None when the unit is given up.

        Args:
            checkpoint: the rows of the last one, where this attempt left one.
        """
        rows = tuple(checkpoint or ()) if self.bisecting else ()
        deaths = self.deaths + 1
        blind = self.blind + (self.bisecting and not rows)
        if deaths >= _MOST_DEATHS or blind >= _MOST_BLIND:
            return None
        after = replace(self, number=self.number + 1, deaths=deaths, blind=blind, suspects=rows or None)
        unexplained = deaths - sum(self.quarantined.values())
        if len(rows) == 1 and unexplained >= _LEAST_DEATHS:
            return replace(after, quarantined={**self.quarantined, rows[0]: unexplained}, suspects=None)
        return after

    def after_error(self) -> Attempt | None:
        """The next attempt once storage failed; None when that was the last."""
        return replace(self, number=self.number + 1) if self.number < _MOST_ERRORS else None

    def reason(self, row: int, failure_reason: str | None) -> str:
        """Why a quarantined row has no answer; `failure_reason`: what the unit's last worker wrote, if anything."""
        lines = (failure_reason or "").strip().splitlines()
        return f"killed its worker process {self.quarantined[row]} times{f': {lines[-1]}' if lines else ''}"


def _checkpoint_path(output: str, unit: str) -> str:
    return storage.join(output, layout.FAILURES, f"{unit}.hand.json")


def failure_path(output: str, unit: str) -> str:
    """Where a worker that ends itself with a unit writes the reason."""
    return storage.join(output, layout.FAILURES, f"{unit}.txt")


def checkpoint(output: str, unit: str, rows: Sequence[int]) -> None:
    """Writes down which rows of a unit are about to be decoded. Raises OSError."""
    storage.put(_checkpoint_path(output, unit), json.dumps({"rows": list(rows)}).encode())


def checkpointed(output: str, unit: str) -> list[int] | None:
    """The rows of the last checkpoint of a unit, or None."""
    try:
        return [int(row) for row in json.loads(storage.read(_checkpoint_path(output, unit)))["rows"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def failure_reason(output: str, unit: str) -> str | None:
    """Why the last worker that ended itself with a unit did so; None where it wrote nothing."""
    try:
        return storage.read(failure_path(output, unit)).decode(errors="replace")
    except OSError:
        return None
