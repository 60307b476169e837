"""Planning: the input's objects become units, as a stream, before anything is loaded or started."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset.columns import Columns
from raypd.dataset.listing import InputObject, objects
from raypd.dataset.plan import Plan, PlanWriter, stored
from raypd.dataset.plan import alone as stored_alone
from raypd.dataset.refresh import Changes, Listing, digested, kept
from raypd.dataset.split import Inspected, inspect, line_limit
from raypd.errors import InputError, RunError, UserError
from raypd.run.unit import Part, Unit, make_unit
from raypd.storage.threads import in_threads

__all__ = ["Part", "Plan", "Unit", "line_limit", "plan"]

_THREADS = 32  # that look into objects at once: mostly they wait for storage
_HOPELESS = 100  # objects, of which not one can be read: what is wrong is not an object


def plan(config: RunConfig, output: str | None = None) -> Plan:
    """All units of a run; `Plan.keep` stores them for later sessions.

    output: the run's folder. Of the plan that is stored there every unit is kept whose objects are as they were: a
    later session lists the input and reads nothing of it again, and what is new becomes units of its own.
    Raises InputError for what makes a run pointless: no such input, nothing in it, a format that is not known, a
    column that is missing everywhere, no object that can be read. Single objects that cannot be read are in the plan.
    Raises RunError where storage gives way meanwhile: nothing is known then of what was not looked into.
    """
    try:
        return _plan(config, output)
    except OSError as error:
        outage = storage.outage(error, error.filename or str(config.input.path))
        if outage is None:  # a folder that may not be listed
            raise error if isinstance(error, UserError) else InputError(str(error)) from None
        resumes = "" if "the same command resumes" in str(outage) else "; the same command resumes"
        raise RunError(f"{outage}; planning ended there, and no document is given up for it{resumes}") from error


def _plan(config: RunConfig, output: str | None) -> Plan:
    cut = {"unit_documents": config.cluster.unit_documents, "unit_bytes": config.cluster.unit_bytes}
    before = stored(output) if output is not None else None
    alone = stored_alone(output) if output is not None else set()
    planning = _Planning(config, alone)
    if before is None or before.totals.cut != cut:
        digest = hashlib.sha256()
        planning.add(digested(objects(config.input), digest))
        return planning.finish(planning.objects, digest.hexdigest(), cut)
    with Listing(objects(config.input)) as now:
        same = before.totals.listing == now.digest and before.totals.alone == len(alone)
        if same and not before.totals.damaged:
            return before
        changes = Changes()
        for unit in kept(before, now, alone, changes):
            planning.keep(unit)
        planning.add(now.left())
        made = planning.finish(now.objects, now.digest, cut)
        made.changes = str(changes)
        return made


class _Planning:
    """A plan in the making: units that are kept, then objects that are looked into."""

    def __init__(self, config: RunConfig, alone: set[str]) -> None:
        self.config, self.alone, self.fingerprint = config, alone, config.fingerprint()
        self.writer, self.columns = PlanWriter(), Columns(config)
        self.objects = 0  # that were looked into
        self._kept = self._readable = 0
        self._damage: str | None = None  # of the first object that cannot be read

    def keep(self, unit: Unit) -> None:
        """Takes a unit of an earlier plan as it is."""
        self._kept += 1
        self.writer.add(unit)

    def add(self, found: Iterable[InputObject]) -> None:
        """Looks into objects and cuts them into units."""
        inspected = in_threads(lambda item: inspect(item, self.config, self.columns), found, _THREADS)
        for unit in self._units(self._looked_into(inspected)):
            self.writer.add(unit)

    def _looked_into(self, inspected: Iterable[Inspected]) -> Iterator[Inspected]:
        for item in inspected:
            self.objects += 1
            if item.damaged is None:
                self._readable += 1
                if item.found.format == "jsonl" and item.seen is not None:
                    self.columns.note(item.found.path, item.seen)
            else:
                self._damage = self._damage or item.damaged
                if not self._kept and not self._readable and self.objects >= _HOPELESS:
                    raise InputError(f"{self._damage}\nand so it is with the first {self.objects} objects")
            yield item

    def _units(self, inspected: Iterable[Inspected]) -> Iterator[Unit]:
        """Small objects that follow on each other become a unit together, all others units of their own."""
        most, most_bytes = self.config.cluster.unit_documents, self.config.cluster.unit_bytes
        group: list[Part] = []
        expected = size = 0  # of the group
        for item in inspected:
            parts = item.parts()
            head = list(itertools.islice(parts, 2))
            if item.damaged is None and len(head) == 1 and head[0].exact and item.found.name not in self.alone:
                part = head[0]
                if group and (expected + part.expected > most or size + part.bytes > most_bytes):
                    yield make_unit(group, self.fingerprint)
                    group, expected, size = [], 0, 0
                group.append(part)
                expected, size = expected + part.expected, size + part.bytes
                continue
            for part in itertools.chain(head, parts):
                yield make_unit([part], self.fingerprint, item.damaged)
        if group:
            yield make_unit(group, self.fingerprint)

    def finish(self, count: int, listing: str, cut: dict[str, int]) -> Plan:
        """The plan. Raises InputError where it holds nothing, or the configuration names what is nowhere."""
        if self.objects and not self._readable and not self._kept:
            more = f"\nand none of the {self.objects} objects can be read" if self.objects > 1 else ""
            raise InputError(f"{self._damage}{more}")
        nowhere = self.columns.nowhere() if not self._kept else None
        if nowhere is not None:
            raise InputError(nowhere)
        made = self.writer.finish(count, listing, len(self.alone), cut)
        if not made.units:
            shown = self.config.input.path
            raise InputError(f"{shown if isinstance(shown, str) else ', '.join(shown)}: no documents in it")
        return made
