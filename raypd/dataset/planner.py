"""Planning: the input's objects become units, as a stream, before anything is loaded or started.

Of a stored plan the units of unchanged objects are kept, all else is planned; the listing lies then
in a small database on this machine's disk, so that memory does not grow with the number of objects.
"""

import contextlib
import hashlib
import itertools
import os
import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from raypd import storage
from raypd.config import InputConfig, RunConfig
from raypd.dataset import delimited, tables
from raypd.dataset.jsonl import line_limit, lines_of_range, open_lines
from raypd.dataset.listing import InputObject, objects
from raypd.dataset.plan import Plan, PlanWriter, stored
from raypd.dataset.plan import alone as stored_alone
from raypd.dataset.split import Columns, Inspected, inspect
from raypd.errors import InputError, RunError, UserError
from raypd.run.left_out import EMPTY, LeftOut
from raypd.run.temporary import temporary_space
from raypd.run.unit import Part, Unit, make_unit

_THREADS = 32  # that look into objects at once: mostly they wait for storage
_EXAMPLES = 5  # of objects that are gone or others, in a message
_COLUMNS = ", ".join(InputObject._fields)
_HOPELESS = 100  # objects, of which not one can be read: the fault is not in the objects
# At the end of a plan units are smaller, so that the workers of a run end at about the same time.
_TAIL = 8  # the last eighth of the units that are planned
_TAIL_UNITS, _TAIL_PARTS = 1024, 20_000  # of which no more than this is held in memory
# Each is cut into so many units where it has at least so many documents.
_TAIL_PIECES, _TAIL_DOCUMENTS = 4, 64


def plan(config: RunConfig, output: str | None = None) -> Plan:
    """All units of a run; `Plan.keep` stores them for later sessions.

    Of a plan stored in `output`, the run's folder, units of unchanged objects are kept and not read
    again; what is new becomes units of its own, the last of them smaller. Without `output` units
    have their full size, and are the same when objects are added. Raises InputError for a pointless
    run (single unreadable objects are in the plan), RunError where storage failed: nothing is known
    of what was not looked into.
    """
    left_out = LeftOut()
    try:
        result = _plan(config, output, left_out)
        if result.totals.empty is not None:
            left_out.add_all(result.totals.empty)
        result.left_out = left_out.files()
        return result
    except OSError as error:
        outage = storage.outage(error, error.filename or str(config.input.path))
        if outage is None:  # a folder that may not be listed
            raise error if isinstance(error, UserError) else InputError(str(error)) from None
        resumes = "" if "the same command resumes" in str(outage) else "; the same command resumes"
        raise RunError(
            f"{outage}; planning ended there, and no document is given up for it{resumes}"
        ) from error


def _plan(config: RunConfig, output: str | None, left_out: LeftOut) -> Plan:
    cut = {"unit_documents": config.cluster.unit_documents, "unit_bytes": config.cluster.unit_bytes}
    before = stored(output) if output is not None else None
    if before is not None and before.totals.fingerprint not in ("", config.fingerprint()):
        before = None  # that run has committed nothing, or this one would not be here
    alone = stored_alone(output) if output is not None else set()
    source = tables.pinned(config.input, before.totals.version if before is not None else None)
    planning = _Planning(config, source, alone, _TAIL_UNITS if output is not None else 0)
    if before is None or before.totals.cut != cut:
        digest = hashlib.sha256()
        planning.add(digested(objects(source, left_out), digest))
        return planning.finish(planning.objects, digest.hexdigest(), cut)
    with contextlib.closing(Listing(objects(source, left_out))) as now:
        same = before.totals.listing == now.digest and before.totals.alone == len(alone)
        if same and not before.totals.damaged:
            return before
        for unit in kept(before, now, alone):
            planning.keep(unit)
        planning.add(now.left())
        result = planning.finish(now.objects, now.digest, cut)
        result.changes = now.changes()
        return result


class _Planning:
    def __init__(
        self, config: RunConfig, source: InputConfig, alone: set[str], tail_units: int
    ) -> None:
        self.config, self.alone, self.fingerprint = config, alone, config.fingerprint()
        self._tail_units = tail_units
        self.writer, self.columns = (
            PlanWriter(),
            Columns(config, tables.optional_columns(source, config)),
        )
        self.objects = 0  # that were looked into
        self.version = source.version  # of a table
        self._paths = {
            *map(storage.absolute, [source.path] if isinstance(source.path, str) else source.path)
        }
        self._kind_of = lru_cache(4096)(tables.kind_of)
        self._kept = self._readable = 0
        self._damage: str | None = None  # of the first object that cannot be read
        self._empty = LeftOut()  # objects without a document

    def keep(self, unit: Unit) -> None:
        self._kept += 1
        self.writer.add(unit)

    def add(self, items: Iterable[InputObject]) -> None:
        """Looks into objects and cuts them into units, the last of them into smaller ones."""
        inspected = storage.in_threads(self._inspected, items, _THREADS)
        tail: deque[Unit] = deque()
        parts = 0
        for count, unit in enumerate(self._units(self._looked_into(inspected)), 1):
            tail.append(unit)
            parts += len(unit.parts)
            while len(tail) > min(count // _TAIL, self._tail_units) or parts > _TAIL_PARTS:
                parts -= len(tail[0].parts)
                self.writer.add(tail.popleft())
        for unit in itertools.chain.from_iterable(storage.in_threads(self._pieces, tail, _THREADS)):
            self.writer.add(unit)

    def _inspected(self, item: InputObject) -> Inspected:
        """Raises InputError for a file of a table, beside which those of earlier versions lie."""
        folder = item.path
        if (
            item.format == "parquet"
            and self.config.input.format == "auto"
            and folder not in self._paths
        ):
            for _ in item.name.split("/"):  # up to the folder that was given
                folder = folder.rpartition("/")[0]
                if "=" not in os.path.basename(folder) and (kind := self._kind_of(folder)):
                    advice = "or to parquet to read files of earlier versions, too"
                    raise InputError(
                        f"{folder}: with this folder as input.path set input.format to {kind}; "
                        f"{advice}"
                    )
        return inspect(item, self.config, self.columns)

    def _looked_into(self, inspected: Iterable[Inspected]) -> Iterator[Inspected]:
        for item in inspected:
            self.objects += 1
            if item.damaged is None:
                self._readable += 1
                if item.object.format in ("jsonl", "json") and item.columns is not None:
                    self.columns.note(item.object.path, item.columns)
            else:
                self._damage = self._damage or item.damaged
                if not self._kept and not self._readable and self.objects >= _HOPELESS:
                    raise InputError(
                        f"{self._damage}\nand so it is with the first {self.objects} objects"
                    )
            yield item

    def _units(self, inspected: Iterable[Inspected]) -> Iterator[Unit]:
        """Small objects that follow on each other become a unit together, all others units of their
        own.
        """
        max_documents, max_bytes = (
            self.config.cluster.unit_documents,
            self.config.cluster.unit_bytes,
        )
        group: list[Part] = []
        expected = size = 0  # of the group
        for item in inspected:
            head = list(itertools.islice(item.parts, 2))
            if not head:
                self._empty.add(EMPTY, item.object.name)
            if (
                item.damaged is None
                and len(head) == 1
                and head[0].exact
                and item.object.name not in self.alone
            ):
                part = head[0]
                if group and (
                    expected + part.expected > max_documents or size + part.bytes > max_bytes
                ):
                    yield make_unit(group, self.fingerprint)
                    group, expected, size = [], 0, 0
                group.append(part)
                expected, size = expected + part.expected, size + part.bytes
                continue
            for part in itertools.chain(head, item.parts):
                yield make_unit([part], self.fingerprint, item.damaged)
        if group:
            yield make_unit(group, self.fingerprint)

    def _pieces(self, unit: Unit) -> list[Unit]:
        """A unit as smaller ones: between its objects, or by rows or bytes of the only one."""
        # May be committed as it is.
        alone = not self.alone.isdisjoint(part.name for part in unit.parts)
        if unit.damaged is not None or alone or unit.expected < _TAIL_DOCUMENTS:
            return [unit]
        pieces: list[list[Part]] = [[] for _ in range(_TAIL_PIECES)]
        if len(unit.parts) > 1:
            documents = 0
            for part in unit.parts:
                pieces[documents * _TAIL_PIECES // unit.expected].append(part)
                documents += part.expected
        else:
            try:
                pieces = [[part] for part in _cut(unit.parts[0], self.config.input)]
            except (storage.Changed, FileNotFoundError):
                return [unit]  # reading it tells what is wrong
        return [make_unit(piece, self.fingerprint) for piece in pieces if piece]

    def finish(self, count: int, listing: str, cut: dict[str, int]) -> Plan:
        """The plan.

        Raises InputError where it holds nothing, or the configuration names what is nowhere.
        """
        if self.objects and not self._readable and not self._kept:
            suffix = (
                f"\nand none of the {self.objects} objects can be read" if self.objects > 1 else ""
            )
            raise InputError(f"{self._damage}{suffix}")
        if not self._kept and (nowhere := self.columns.nowhere()):
            raise InputError(nowhere)
        result = self.writer.finish(count, listing, len(self.alone), cut)
        result.totals.version = self.version
        result.totals.fingerprint = self.fingerprint
        result.totals.empty = self._empty.group(EMPTY)
        if not result.units:
            shown = self.config.input.path
            raise InputError(
                f"{shown if isinstance(shown, str) else ', '.join(shown)}: no documents in it"
            )
        return result


def documents_of_last_unit(documents: float, unit_documents: int) -> float:
    """How many a unit at the end of a plan has."""
    smaller = unit_documents >= _TAIL_DOCUMENTS and documents >= _TAIL * unit_documents
    return unit_documents / _TAIL_PIECES if smaller else unit_documents


def _cut(part: Part, source: InputConfig) -> list[Part]:
    """Pieces of a range, of which every document is in one, with the same totals."""
    starts, documents, size = (
        [first + count * i // _TAIL_PIECES for i in range(_TAIL_PIECES + 1)]
        for first, count in (
            (part.start, part.end - part.start),
            (0, part.expected),
            (0, part.bytes),
        )
    )
    if part.format == "jsonl" and part.compression is None:
        if part.exact:  # it stays exact where a piece begins with a line
            limit = line_limit(source.max_document_bytes)
            with open_lines(part.path, None, max(0, part.start - 1), part.version) as file:
                begins = [line.offset for line in lines_of_range(file, limit, part.start, part.end)]
            starts[1:-1] = [begins[number] for number in documents[1:-1]]
        size = starts
    lines = [part.line] * len(starts)
    if part.format in delimited.DELIMITERS:
        if not delimited.can_seek(part, source):
            return [part]  # each piece would have to read the file from its beginning
        _, records = delimited.ranged(part, source)
        places = [(record.offset, record.line) for record in records]
        starts[1:-1], lines[1:-1] = zip(
            *(places[number] for number in documents[1:-1]), strict=True
        )
    ends = itertools.pairwise(zip(starts, documents, size, lines, strict=True))
    return [
        replace(part, start=start, end=end, expected=till - since, bytes=upto - begin, line=line)
        for (start, since, begin, line), (end, till, upto, _) in ends
    ]


class Listing:
    """The input's objects of now, by name."""

    def __init__(self, objects: Iterable[InputObject]) -> None:
        self._base = sqlite3.connect("")  # a file that SQLite removes itself
        self._base.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -32768;"
            "CREATE TABLE now (number INTEGER PRIMARY KEY, kept INTEGER NOT NULL DEFAULT "
            f"0, {_COLUMNS});"
        )
        digest = hashlib.sha256()
        with temporary_space(sqlite3.OperationalError):
            self._base.executemany(
                f"INSERT INTO now ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
                digested(objects, digest),
            )
            self._base.execute("CREATE UNIQUE INDEX by_name ON now (name)")
        # Of all that is known of each: with the same one nothing has changed.
        self.digest = digest.hexdigest()
        self.objects: int = self._base.execute("SELECT count(*) FROM now").fetchone()[0]
        self._last: tuple[str, InputObject | None] | None = None
        self._changed, self._examples = 0, list[str]()

    def close(self) -> None:
        self._base.close()

    def find(self, part: Part) -> InputObject | None:
        """The object of a part as it is now, or None where it is gone or another."""
        # An object's parts follow on each other.
        if self._last is None or self._last[0] != part.name:
            row = self._base.execute(
                f"SELECT {_COLUMNS} FROM now WHERE name = ?", (part.name,)
            ).fetchone()
            item = InputObject(*row) if row is not None else None
            same = item is not None and _same(part, item)
            if not same:
                self._changed += 1
                if self._changed <= _EXAMPLES:
                    self._examples.append(
                        f"{part.name} {'is gone' if item is None else 'was replaced'}"
                    )
            self._last = part.name, item if same else None
        return self._last[1]

    def changes(self) -> str:
        """The objects that were looked for and are gone or others: the first of them, and how many
        more.
        """
        remainder = f", and {self._changed - _EXAMPLES} more" if self._changed > _EXAMPLES else ""
        return ", ".join(self._examples) + remainder

    def keep(self, name: str) -> None:
        with temporary_space(sqlite3.OperationalError):
            self._base.execute("UPDATE now SET kept = 1 WHERE name = ?", (name,))

    def left(self) -> Iterator[InputObject]:
        """The objects that are not marked, in the order of the input."""
        for row in self._base.execute(f"SELECT {_COLUMNS} FROM now WHERE kept = 0 ORDER BY number"):
            yield InputObject(*row)


def _same(part: Part, item: InputObject) -> bool:
    if part.size != item.size:
        return False
    if part.stamp == item.stamp or storage.is_remote(item.path):
        return part.stamp == item.stamp
    try:  # a copied or touched local file has another stamp, and may be the same all the same
        return part.version == storage.version(item.path)
    except OSError as error:
        if outage := storage.outage(error, item.path):
            raise outage from None
        return False  # looking into it tells why


def digested(objects: Iterable[InputObject], digest: "hashlib._Hash") -> Iterator[InputObject]:
    """The objects, each added to the digest."""
    for item in objects:
        digest.update("\0".join(map(str, item)).encode() + b"\n")
        yield item


def kept(before: Plan, now: Listing, alone: set[str]) -> Iterator[Unit]:
    """The units whose objects are all as they were, which it marks; no damaged ones, nor shared
    ones of `alone`.
    """
    keep = lru_cache(1)(now.keep)  # once an object, whose parts follow on each other
    for unit in before.all():
        pairs = [(part, now.find(part)) for part in unit.parts]
        shared = len(unit.parts) > 1 and not alone.isdisjoint(part.name for part in unit.parts)
        if unit.damaged is not None or shared or any(item is None for _, item in pairs):
            continue
        for part in unit.parts:
            keep(part.name)
        # The folder of the input may have another place than in the last session.
        yield Unit(
            unit.id,
            tuple(replace(part, path=item.path, stamp=item.stamp) for part, item in pairs if item),
        )
