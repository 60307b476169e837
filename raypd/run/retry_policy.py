"""What happens to a unit whose worker process dies: bisect it until the fatal document is known.

After a death, the unit runs alone in its worker. Its rows are decoded in groups, and each group is
written to storage as a checkpoint before it starts. The group of the last checkpoint has the
suspects of the next death and is divided again. A document that was alone when its process died
becomes an error row, so a unit of 256 documents costs three deaths per fatal document. Deaths are
counted on storage, where they outlive the driver.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import raypd.run.layout as layout
import raypd.run.records as records
from raypd import storage

_GROUPS = 16  # number of groups that the suspects are divided into
# Deaths before a document is quarantined: a process may also be killed from outside, now and then.
_MIN_DEATHS = 3
_MAX_DEATHS = 30  # deaths after which a unit is given up as a whole
_ATTEMPTS = ".attempts.json"
START = "start"  # in place of a unit id, for a worker that died while it loaded its model
_MAX_BLIND_DEATHS = 5  # deaths without a checkpoint, which leave nothing to divide


@dataclass(frozen=True)
class Attempt:
    """An attempt at a unit, and what earlier deaths have shown."""

    number: int = 1
    deaths: int = 0  # worker processes that died with this unit
    blind: int = 0  # deaths that left no checkpoint although one was due
    # Rows of the last checkpoint before the latest death; None if there was none.
    suspects: tuple[int, ...] | None = None
    # Rows that are no longer decoded, with the number of deaths that each explains.
    quarantined: dict[int, int] = field(default_factory=dict)

    @property
    def bisecting(self) -> bool:
        """Whether to decode the unit in groups with checkpoints, alone in its worker."""
        return self.deaths > 0

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        """Divide the rows into the groups to decode, in order: suspects first, then the others."""
        remaining = [row for row in rows if row not in self.quarantined]
        if not self.bisecting:
            return [remaining]
        suspected = set(self.suspects or ())
        suspects = [row for row in remaining if row in suspected] or remaining
        size = max(1, -(-len(suspects) // _GROUPS))
        groups = [suspects[start : start + size] for start in range(0, len(suspects), size)]
        if len(suspects) < len(remaining):
            groups.append([row for row in remaining if row not in suspected])
        return groups

    def after_death(self, checkpoint: Sequence[int]) -> "Attempt | None":
        """Return the attempt to make after the worker died.

        Args:
            checkpoint: The rows of the last checkpoint; empty if there was none.

        Returns:
            None if the unit is given up.
        """
        rows = tuple(checkpoint) if self.bisecting else ()
        deaths = self.deaths + 1
        blind = self.blind
        if self.bisecting and not rows:
            blind += 1
        if deaths >= _MAX_DEATHS or blind >= _MAX_BLIND_DEATHS:
            return None
        following = replace(
            self, number=self.number + 1, deaths=deaths, blind=blind, suspects=rows or None
        )
        unexplained = deaths - sum(self.quarantined.values())
        if len(rows) == 1 and unexplained >= _MIN_DEATHS:
            quarantined = {**self.quarantined, rows[0]: unexplained}
            return replace(following, quarantined=quarantined, suspects=None)
        return following

    def reason(self, row: int, failure_reason: str | None) -> str:
        """Return why a quarantined row has no answer.

        Args:
            row: The quarantined row.
            failure_reason: What the last worker of the unit wrote before it died, if anything.
        """
        message = f"killed its worker process {self.quarantined[row]} times"
        lines = (failure_reason or "").strip().splitlines()
        return f"{message}: {lines[-1]}" if lines else message


@dataclass
class AttemptRecord:
    """failures/<unit>.attempts.json: the latest attempt, and the process that makes it."""

    attempt: Attempt
    session: str
    node: str
    process: str  # "" if no process is working on the unit
    group: tuple[int, ...] = ()  # the rows that are being decoded, if the unit is bisected


class UnitLog:
    """The attempts at the units of a run on storage, as one worker process reads and writes them.

    Args:
        output: The folder of the run.
        session: The id of the session.
        node: The id of the node that the process runs on.
        process: The id of the process.
        is_alive: Returns whether a node is alive.
    """

    def __init__(
        self, output: str, session: str, node: str, process: str, is_alive: Callable[[str], bool]
    ) -> None:
        self.output = output
        self.session = session
        self.node = node
        self.process = process
        self._is_alive = is_alive

    def next(self, unit: str) -> Attempt | None:
        """Return the next attempt at a unit, or None if the unit is given up.

        If the process of the last attempt died, the death is counted. A process that ended together
        with its node or its session did not die of the unit.

        Raises:
            OSError: If the record cannot be read.
        """
        path = attempts_path(self.output, unit)
        # Most units have no record. This request has no body, so a broken connection cannot
        # truncate it.
        if not storage.exists(path):
            return Attempt()
        try:
            last = records.read(AttemptRecord, path)
        except (FileNotFoundError, records.RecordError):
            return Attempt()
        if last.session != self.session or last.process in ("", self.process):
            return last.attempt
        if last.node != self.node and not self._is_alive(last.node):
            return last.attempt
        following = last.attempt.after_death(last.group)
        if following is not None:
            # Record the death, so that it is counted once.
            self.end(unit, following)
        return following

    def begin(self, unit: str, attempt: Attempt, group: Sequence[int] = ()) -> None:
        """Record that this process begins an attempt, or a group of its rows.

        Raises:
            OSError: If the record cannot be written.
        """
        record = AttemptRecord(attempt, self.session, self.node, self.process, tuple(group))
        records.write(attempts_path(self.output, unit), record, indent=None)

    def died(self, unit: str) -> None:
        """Record for a process that it died in the first attempt at a unit.

        Only later attempts are recorded when they begin, so that most units need no record. A
        record that exists says more.

        Raises:
            OSError: If the record cannot be written.
        """
        record = AttemptRecord(Attempt(), self.session, self.node, self.process)
        path = attempts_path(self.output, unit)
        storage.put_new(path, records.encoded(record, indent=None))

    def end(self, unit: str, attempt: Attempt | None = None) -> None:
        """Record that no process is working on a unit anymore.

        Args:
            unit: The id of the unit.
            attempt: The attempt to resume with; None if the unit is committed or given up.
        """
        path = attempts_path(self.output, unit)
        # If this fails, the attempt counts as a death at worst.
        with contextlib.suppress(OSError):
            if attempt is None:
                storage.delete(path)
            else:
                records.write(path, AttemptRecord(attempt, "", "", ""), indent=None)


def attempted(output: str) -> set[str]:
    """Return the units of a run that have a record of attempts."""
    names = storage.names(storage.join(output, layout.FAILURES))
    return {name.removesuffix(_ATTEMPTS) for name in names if name.endswith(_ATTEMPTS)}


def attempts_path(output: str, unit: str) -> str:
    """Return the path of the record of a unit's attempts."""
    return storage.join(output, layout.FAILURES, f"{unit}{_ATTEMPTS}")


def failure_path(output: str, unit: str) -> str:
    """Return the path of the file in which a worker that ends itself because of a unit says why."""
    return storage.join(output, layout.FAILURES, f"{unit}.txt")


def failure_reason(output: str, unit: str) -> str | None:
    """Return why the last worker ended itself because of a unit, or None if it wrote nothing."""
    try:
        return storage.read(failure_path(output, unit)).decode(errors="replace")
    except OSError:
        return None
