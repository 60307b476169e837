"""Planning: the files of the input become units, as a stream, before any model is loaded.

If an earlier session has stored a plan, the units of unchanged files are kept and only the other
files are planned.
"""

import contextlib
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache

import raypd.dataset.tables as tables
from raypd import storage
from raypd.config import InputConfig, RunConfig
from raypd.dataset.earlier_plan import Listing, add_to_digest, unchanged_units
from raypd.dataset.formats import FORMATS, Parquet
from raypd.dataset.formats.recognition import check_installed
from raypd.dataset.inspection import Inspected, inspect
from raypd.dataset.listing import InputObject, objects
from raypd.dataset.plan import Plan, PlanWriter, alone as stored_alone, stored
from raypd.dataset.wanted_columns import WantedColumns
from raypd.errors import InputError, RunError, UserError
from raypd.run import LeftOut, Part, Unit, left_out as run_left_out, make_unit

_THREADS = 32  # that inspect files at the same time; mostly they wait for storage
# If none of this many files can be read, the files are not the cause.
_MAX_UNREADABLE = 100
# At the end of a plan units are smaller, so that the workers of a run end at about the same time.
_TAIL = 8  # the last eighth of the units that are planned
# The tail is kept in memory and is never larger than this.
_TAIL_UNITS = 1024
_TAIL_PARTS = 20_000
# Each unit of the tail is cut into this many pieces if it has at least this many documents.
_TAIL_PIECES = 4
_TAIL_DOCUMENTS = 64


def plan(config: RunConfig, output: str | None = None, same_run: bool = True) -> Plan:
    """Plan all units of a run; `Plan.keep` stores them for later sessions.

    Args:
        config: The run's configuration.
        output: The run's folder. Units of a plan stored there are kept if their files have not
            changed, and new files become units of their own. Without it units stay the same when
            files are added.
        same_run: Whether the stored plan belongs to the same run. If so, a table keeps its version,
            and the last of the new units are smaller, so that workers end at about the same time.

    Raises:
        InputError: The run would be pointless. Single unreadable files are in the plan instead.
        RunError: Storage failed, so nothing is known about the files that were not inspected.
    """
    check_installed(config.input)
    left_out = LeftOut()
    with _named_errors(config):
        result = _plan(config, output, left_out, same_run)
    if result.totals.empty is not None:
        left_out.add_all(result.totals.empty)
    result.left_out = left_out.files()
    return result


def listing(config: RunConfig) -> str:
    """Return a digest of the input's files, their sizes and versions: the `listing` of a plan.

    It costs only a listing; no file is opened. Raises as `plan` does.
    """
    digest = hashlib.sha256()
    with _named_errors(config):
        source = tables.pinned(config.input, None)
        for _ in add_to_digest(objects(source, LeftOut()), digest):
            pass
    return digest.hexdigest()


@contextlib.contextmanager
def _named_errors(config: RunConfig) -> Iterator[None]:
    """Raise errors of storage as RunError and InputError."""
    try:
        yield
    except OSError as error:
        outage = storage.outage(error, error.filename or str(config.input.path))
        if outage is not None:
            raise RunError(_interrupted(outage)) from error
        if isinstance(error, UserError):
            raise error from None
        # Such as a folder that may not be listed.
        raise InputError(str(error)) from None


def _interrupted(outage: Exception) -> str:
    message = f"{outage}; planning stopped there, and no document counts as failed"
    if "run the same command again to resume" not in str(outage):
        message += "; run the same command again to resume"
    return message


def _plan(config: RunConfig, output: str | None, left_out: LeftOut, same_run: bool) -> Plan:
    cut = {"unit_documents": config.cluster.unit_documents, "unit_bytes": config.cluster.unit_bytes}
    earlier: Plan | None = None
    alone: set[str] = set()
    tail_units = 0
    if output is not None:
        earlier = stored(output)
        alone = stored_alone(output)
        if same_run:
            tail_units = _TAIL_UNITS
    if earlier is not None and earlier.totals.fingerprint not in ("", config.fingerprint()):
        # That run has committed nothing, or this one would already have been refused.
        earlier = None
    version = None
    if earlier is not None and same_run:
        version = earlier.totals.version
    source = tables.pinned(config.input, version)
    planning = _Planning(config, source, alone, tail_units)
    if earlier is None or earlier.totals.cut != cut:
        digest = hashlib.sha256()
        planning.add(add_to_digest(objects(source, left_out), digest))
        return planning.finish(planning.objects, digest.hexdigest(), cut)
    with contextlib.closing(Listing(objects(source, left_out))) as listing:
        is_unchanged = earlier.totals.listing == listing.digest and earlier.totals.alone == len(
            alone
        )
        if is_unchanged and not earlier.totals.damaged:
            return earlier
        for unit in unchanged_units(earlier, listing, alone):
            planning.keep(unit)
        planning.add(listing.remaining())
        result = planning.finish(listing.objects, listing.digest, cut)
        result.changes = listing.changes()
        return result


class _Planning:
    """Makes one plan.

    Args:
        config: The run's configuration.
        source: Section `input`; a table has its version.
        alone: Names of files that must not share a unit.
        tail_units: How many units at the end may be cut into smaller ones.
    """

    def __init__(
        self, config: RunConfig, source: InputConfig, alone: set[str], tail_units: int
    ) -> None:
        self.config = config
        self.alone = alone
        self.fingerprint = config.fingerprint()
        self.writer = PlanWriter()
        wanted = config.wanted_columns()
        optional = tables.optional_columns(source, wanted.values())
        self.columns = WantedColumns(wanted, config.input, optional)
        self.objects = 0  # files that were inspected
        self.version = source.version  # of a table
        self._tail_units = tail_units
        paths = [source.path] if isinstance(source.path, str) else source.path
        self._paths = set(map(storage.absolute, paths))
        self._kind_of_table = lru_cache(4096)(tables.kind_of)
        self._kept_units = 0
        self._readable_files = 0
        self._first_damage: str | None = None
        self._empty_files = LeftOut()

    def keep(self, unit: Unit) -> None:
        """Add a unit of an earlier plan."""
        self._kept_units += 1
        self.writer.add(unit)

    def add(self, files: Iterable[InputObject]) -> None:
        """Inspect files and cut them into units, the last of them into smaller ones."""
        inspected = storage.in_threads(self._inspect, files, _THREADS)
        tail: deque[Unit] = deque()
        tail_parts = 0
        for number, unit in enumerate(self._units(self._checked(inspected)), 1):
            tail.append(unit)
            tail_parts += len(unit.parts)
            tail_limit = min(number // _TAIL, self._tail_units)
            while len(tail) > tail_limit or tail_parts > _TAIL_PARTS:
                first = tail.popleft()
                tail_parts -= len(first.parts)
                self.writer.add(first)
        for pieces in storage.in_threads(self._pieces, tail, _THREADS):
            for piece in pieces:
                self.writer.add(piece)

    def _inspect(self, item: InputObject) -> Inspected:
        """Inspect a file.

        Raises:
            InputError: It belongs to a table, whose folder also contains files of earlier versions.
        """
        if item.format == Parquet.name and self.config.input.format == "auto":
            self._check_no_table(item)
        return inspect(item, self.config.input, self.config.cluster, self.columns)

    def _check_no_table(self, item: InputObject) -> None:
        folder = item.path
        if folder in self._paths:
            return
        # The folders of the file, up to the one in `input.path`.
        for _ in item.name.split("/"):
            folder = folder.rpartition("/")[0]
            if "=" in os.path.basename(folder):
                continue
            kind = self._kind_of_table(folder)
            if kind is not None:
                raise InputError(
                    f"{folder}: set input.path to this folder and input.format to {kind}, or to "
                    "parquet to read files of earlier versions as well"
                )

    def _checked(self, inspected: Iterable[Inspected]) -> Iterator[Inspected]:
        """Yield the files after counting them.

        Raises:
            InputError: None of the first files can be read.
        """
        for item in inspected:
            self.objects += 1
            if item.damaged is None:
                self._readable_files += 1
                if item.columns is not None and not FORMATS[item.object.format].has_schema:
                    self.columns.note(item.object.path, item.columns)
            elif self._first_damage is None:
                self._first_damage = item.damaged
            has_readable = self._kept_units or self._readable_files
            if not has_readable and self.objects >= _MAX_UNREADABLE:
                raise InputError(
                    f"{self._first_damage}\nNone of the first {self.objects} objects can be read"
                )
            yield item

    def _units(self, inspected: Iterable[Inspected]) -> Iterator[Unit]:
        """Yield units: consecutive small files share one."""
        cluster = self.config.cluster
        group: list[Part] = []
        group_documents = 0
        group_bytes = 0
        for item in inspected:
            first_parts = list(itertools.islice(item.parts, 2))
            if not first_parts:
                self._empty_files.add(run_left_out.EMPTY, item.object.name)
            if not self._may_share_unit(item, first_parts):
                for part in itertools.chain(first_parts, item.parts):
                    yield make_unit([part], self.fingerprint, item.damaged)
                continue
            part = first_parts[0]
            is_full = (
                group_documents + part.expected > cluster.unit_documents
                or group_bytes + part.bytes > cluster.unit_bytes
            )
            if group and is_full:
                yield make_unit(group, self.fingerprint)
                group = []
                group_documents = 0
                group_bytes = 0
            group.append(part)
            group_documents += part.expected
            group_bytes += part.bytes
        if group:
            yield make_unit(group, self.fingerprint)

    def _may_share_unit(self, item: Inspected, first_parts: list[Part]) -> bool:
        """Return whether a file is small: a single part, whose documents are counted."""
        return (
            item.damaged is None
            and len(first_parts) == 1
            and first_parts[0].exact
            and item.object.name not in self.alone
        )

    def _pieces(self, unit: Unit) -> list[Unit]:
        """Cut a unit into smaller ones: between its files, or within the only one."""
        # A unit of such files may have been committed as it is.
        has_alone = any(part.name in self.alone for part in unit.parts)
        if unit.damaged is not None or has_alone or unit.expected < _TAIL_DOCUMENTS:
            return [unit]
        pieces: list[list[Part]] = [[] for _ in range(_TAIL_PIECES)]
        if len(unit.parts) > 1:
            documents = 0
            for part in unit.parts:
                pieces[documents * _TAIL_PIECES // unit.expected].append(part)
                documents += part.expected
        else:
            part = unit.parts[0]
            try:
                parts = FORMATS[part.format].cut(part, self.config.input, _TAIL_PIECES)
            except (storage.Changed, FileNotFoundError):
                # Reading the unit will show what is wrong.
                return [unit]
            pieces = [[piece] for piece in parts]
        return [make_unit(piece, self.fingerprint) for piece in pieces if piece]

    def finish(self, file_count: int, listing: str, cut: dict[str, int]) -> Plan:
        """Return the plan.

        Args:
            file_count: Files of the input.
            listing: Digest of the files.
            cut: The keys of the configuration that cut files into parts.

        Raises:
            InputError: The plan is empty, or the configuration names a column that no file has.
        """
        if self.objects and not self._readable_files and not self._kept_units:
            reason = str(self._first_damage)
            if self.objects > 1:
                reason += f"\nand none of the {self.objects} objects can be read"
            raise InputError(reason)
        if not self._kept_units:
            missing = self.columns.missing_everywhere()
            if missing is not None:
                raise InputError(missing)
        result = self.writer.finish(file_count, listing, len(self.alone), cut)
        result.totals.version = self.version
        result.totals.fingerprint = self.fingerprint
        result.totals.empty = self._empty_files.group(run_left_out.EMPTY)
        if not result.units:
            paths = self.config.input.path
            shown = paths if isinstance(paths, str) else ", ".join(paths)
            raise InputError(f"{shown}: no documents in it")
        return result


def documents_of_last_unit(documents: float, unit_documents: int) -> float:
    """Return how many documents a unit at the end of a plan has.

    Args:
        documents: Documents of the run.
        unit_documents: `cluster.unit_documents`.
    """
    has_tail = unit_documents >= _TAIL_DOCUMENTS and documents >= _TAIL * unit_documents
    if has_tail:
        return unit_documents / _TAIL_PIECES
    return unit_documents
