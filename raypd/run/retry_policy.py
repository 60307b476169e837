"""What becomes of a unit whose worker process dies: it is bisected until the document that kills is
found. After a death it is alone in its worker and goes in groups, with a checkpoint on storage (the
group's rows) before each: those are the suspects of the next death, and are divided again. A
document that was alone when its process died becomes an error row, so 256 documents cost three
deaths a culprit. Deaths are counted on storage: they outlive the driver.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from raypd import storage
from raypd.run import layout, records

_PARTS = 16  # groups that the suspect rows are divided into
_LEAST_DEATHS = 3  # before a document is blamed: a process may be killed from outside once or twice
_MOST_DEATHS = 30  # of one unit: then it is given up as a whole
START = "start"  # in the place of a unit: of a worker that died while it loaded its model
_MOST_BLIND = 5  # deaths before the first checkpoint: there is nothing to divide


@dataclass(frozen=True)
class Attempt:
    number: int = 1  # of the attempts that counted
    deaths: int = 0  # worker processes that died of it
    blind: int = 0  # of these, those that left no checkpoint though they should
    # Rows of the checkpoint at the last death; None: not known.
    suspects: tuple[int, ...] | None = None
    # Row -> how many of the deaths it explains.
    quarantined: dict[int, int] = field(default_factory=dict)

    @property
    def bisecting(self) -> bool:
        """Whether to decode in groups with checkpoints, and nothing else beside it."""
        return self.deaths > 0

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        """The rows in the order and in the groups in which they are decoded: suspects first, then
        all others.
        """
        remaining = [row for row in rows if row not in self.quarantined]
        if not self.bisecting:
            return [remaining]
        suspected = set(self.suspects or ())
        suspects = [row for row in remaining if row in suspected] or remaining
        size = -(-len(suspects) // _PARTS) or 1
        groups = [suspects[start : start + size] for start in range(0, len(suspects), size)]
        if len(suspects) < len(remaining):
            unsuspected = [row for row in remaining if row not in suspected]
        else:
            unsuspected = []
        return [*groups, unsuspected] if unsuspected else groups

    def after_death(self, checkpoint: Sequence[int]) -> "Attempt | None":
        """The next attempt; None: the unit is given up. checkpoint: the rows of the last one, none
        without one.
        """
        rows = tuple(checkpoint) if self.bisecting else ()
        deaths = self.deaths + 1
        blind = self.blind + (self.bisecting and not rows)
        if deaths >= _MOST_DEATHS or blind >= _MOST_BLIND:
            return None
        after = replace(
            self, number=self.number + 1, deaths=deaths, blind=blind, suspects=rows or None
        )
        unexplained = deaths - sum(self.quarantined.values())
        if len(rows) == 1 and unexplained >= _LEAST_DEATHS:
            return replace(
                after, quarantined={**self.quarantined, rows[0]: unexplained}, suspects=None
            )
        return after

    def reason(self, row: int, failure_reason: str | None) -> str:
        """Why a quarantined row has no answer; `failure_reason`: what the unit's last worker wrote,
        if anything.
        """
        lines = (failure_reason or "").strip().splitlines()
        return (
            f"killed its worker process {self.quarantined[row]} "
            f"times{f': {lines[-1]}' if lines else ''}"
        )


@dataclass
class AttemptRecord:
    """failures/<unit>.attempts.json: the latest attempt, and the process that is at it."""

    attempt: Attempt
    session: str
    node: str
    process: str  # "": none is
    group: tuple[int, ...] = ()  # rows that it decodes, where it bisects


class UnitLog:
    """The attempts at the units of a run, on storage, as a worker process reads and writes them."""

    def __init__(
        self, output: str, session: str, node: str, process: str, is_alive: Callable[[str], bool]
    ) -> None:
        self.output = output
        self.session = session
        self.node = node
        self.process = process
        self._is_alive = is_alive

    def next(self, unit: str) -> tuple[Attempt | None, bool]:
        """The next attempt (None: the unit is given up), and whether the last one's process died.

        Raises OSError. A process that ended with its node or with its session blames no document.
        """
        path = attempts_path(self.output, unit)
        # As for nearly every unit: an answer without a body, which nothing can cut.
        if not storage.exists(path):
            return Attempt(), False
        try:
            last = records.read(AttemptRecord, path)
        except (FileNotFoundError, records.RecordError):
            return Attempt(), False
        if last.session != self.session or last.process in ("", self.process):
            return last.attempt, False
        if last.node != self.node and not self._is_alive(last.node):
            return last.attempt, False
        following = last.attempt.after_death(last.group)
        if following is not None:
            self.end(unit, following)  # a death counts once
        return following, True

    def begin(self, unit: str, attempt: Attempt, group: Sequence[int] = ()) -> None:
        """Writes down that this process makes an attempt, or goes on with a group of its rows.

        Raises OSError.
        """
        record = AttemptRecord(attempt, self.session, self.node, self.process, tuple(group))
        records.write(attempts_path(self.output, unit), record, indent=None)

    def end(self, unit: str, attempt: Attempt | None = None) -> None:
        """No process is at the unit any more. attempt: the one to go on with; None: the unit is
        done.
        """
        # The worst that comes of it is an attempt that counts as a death.
        with contextlib.suppress(OSError):
            if attempt is None:
                storage.delete(attempts_path(self.output, unit))
            else:
                records.write(
                    attempts_path(self.output, unit),
                    AttemptRecord(attempt, "", "", ""),
                    indent=None,
                )


def attempts_path(output: str, unit: str) -> str:
    return storage.join(output, layout.FAILURES, f"{unit}.attempts.json")


def failure_path(output: str, unit: str) -> str:
    """Where a worker that ends itself with a unit writes the reason."""
    return storage.join(output, layout.FAILURES, f"{unit}.txt")


def failure_reason(output: str, unit: str) -> str | None:
    """Why the last worker that ended itself with a unit did so; None where it wrote nothing."""
    try:
        return storage.read(failure_path(output, unit)).decode(errors="replace")
    except OSError:
        return None
