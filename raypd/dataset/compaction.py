"""Compact a run: copy the rows of its units into few large table files, and delete the units.

The units' objects remain the committed data until compaction.json is written, in one request.
Whatever happens before that, they are unchanged; after that, they are no longer read. An
interrupted compaction resumes after the last table file that it stored.
"""

import contextlib
import itertools
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

import raypd.dataset.compacted as compacted
import raypd.dataset.planner as planner
import raypd.dataset.writer as writer
from raypd import storage
from raypd.config import RunConfig
from raypd.dataset.committed import CommittedUnits, leftover_objects, loose_objects
from raypd.dataset.compacted import CompactedTable, Compaction, TableFile
from raypd.dataset.digests import DigestSet, digest, unit_id_of
from raypd.dataset.plan import Plan, alone, stored
from raypd.dataset.summary_rows import path_of, row_of
from raypd.dataset.table_writer import TableWriter
from raypd.errors import ConfigError, Damaged, RunError
from raypd.run import (
    Commit,
    Interrupted,
    RunLease,
    TemporaryFolder,
    Unit,
    UnitSummary,
    held,
    layout,
    records,
    say,
    signals,
)
from raypd.text import counted

_MEBIBYTE = 1 << 20
DEFAULT_TARGET_MB = 128
# Units that are read at the same time: as many as fit into this memory, decoded.
_READ_BYTES = 128 << 20
_DECODED_PER_BYTE = 10  # decoded bytes per stored byte
_MAX_THREADS = 16
_LOOSE = np.dtype([("id", "u8"), ("version", "u8"), ("partition", "i4")])


@dataclass(frozen=True)
class NewRows:
    """New rows for some units, from a retry.

    Attributes:
        units: Digests of the units' ids.
        apply: Gets a unit's id, its summary and rows, and returns the new summary and rows.
    """

    units: DigestSet
    apply: Callable[[str, UnitSummary, pa.Table], tuple[UnitSummary, pa.Table]]


@dataclass(frozen=True)
class _UnitSource:
    """Where the rows of a unit are now."""

    unit_id: str
    digest: int
    version: int  # digest of its name and stamp
    partition: str
    location: Any = None  # in the table files; None if it has its own object

    @property
    def name(self) -> str:
        """The name of the unit's object, relative to the units folder."""
        prefix = f"{self.partition}/" if self.partition else ""
        return f"{prefix}{self.unit_id}.parquet"


class _UnitSources:
    """All committed units of a run, in the order of its plan: 24 bytes of memory for each."""

    def __init__(self, output: str, table: CompactedTable | None) -> None:
        self.table = table
        self.bytes = 0
        numbers: dict[str, int] = {}

        def loose() -> Iterator[tuple[int, int, int]]:
            for item in loose_objects(output, table):
                self.bytes += item.size
                partition = item.name.rpartition("/")[0]
                number = numbers.setdefault(partition, len(numbers))
                yield digest(unit_id_of(item.name)), digest(item.name, item.stamp), number

        self._loose = np.sort(np.fromiter(loose(), dtype=_LOOSE), order="id")
        self.units = len(self._loose)
        self._loose_partitions = list(numbers)
        self._file_partitions: list[str] = []
        if table is not None:
            self.units += len(table)
            for file in table.compaction.files:
                self._file_partitions.append(file.name.rpartition("/")[0])
        self.partitions = sorted({*self._loose_partitions, *self._file_partitions})

    @property
    def loose(self) -> int:
        """The number of units that have objects of their own."""
        return len(self._loose)

    def _find(self, unit: Unit) -> _UnitSource | None:
        """Return where the rows of a unit are; None if it is not committed."""
        value = digest(unit.id)
        if self.table is not None:
            location = self.table.locate(value)
            if location is not None:
                partition = self._file_partitions[location["file"]]
                version = self.table.version_of(value) or 0
                return _UnitSource(unit.id, value, version, partition, location)
        position = int(np.searchsorted(self._loose["id"], np.uint64(value)))
        if position == len(self._loose) or int(self._loose["id"][position]) != value:
            return None
        row = self._loose[position]
        partition = self._loose_partitions[row["partition"]]
        return _UnitSource(unit.id, value, int(row["version"]), partition)

    def in_order(self, plan: Iterable[Unit]) -> Iterator[_UnitSource]:
        """Yield the units of each partition, in the order of the plan."""
        for partition in self.partitions:
            for unit in plan:
                source = self._find(unit)
                if source is not None and source.partition == partition:
                    yield source


@dataclass(frozen=True)
class _UnitJob:
    """A unit whose rows are to be written."""

    source: _UnitSource


@dataclass(frozen=True)
class _AdoptJob:
    """A table file that an interrupted session has stored."""

    file: TableFile


@dataclass(frozen=True)
class _CopyJob:
    """A table file of an earlier compaction that is copied unchanged."""

    number: int
    partition: str


@dataclass(frozen=True)
class _ReadUnit:
    """A unit that was read."""

    partition: str
    unit_row: dict[str, Any]
    rows: pa.Table


_Job = _UnitJob | _AdoptJob | _CopyJob


@dataclass
class Compacted:
    """The result of a compaction."""

    output: str
    compaction: Compaction
    units: int  # units that were not in table files before
    kept_units: str = ""  # why the units' objects could not be deleted

    def describe(self) -> str:
        """Describe the result in lines."""
        files = counted(len(self.compaction.files), "table file")
        size = self.compaction.bytes / _MEBIBYTE
        units = counted(self.compaction.units, "unit")
        lines = [f"compacted: {units} in {files}, {size:,.1f} MB: {table_folder(self.output)}"]
        if not self.units:
            lines = [f"already {lines[0]}"]
        if self.kept_units:
            lines.append(
                f"the objects of the units could not be deleted ({self.kept_units}). They are no "
                f"longer read; delete {storage.join(self.output, layout.UNITS)} yourself"
            )
        return "\n".join(lines)


def table_folder(output: str) -> str:
    """Return the folder where other programs find a run's rows: table files or units."""
    table = compacted.table_of(output)
    if table is None:
        return writer.units_folder(output)
    return table.folder()


def after_run(config: RunConfig, output: str, plan: Plan, committed: CommittedUnits) -> None:
    """Compact a run that has ended, if its units together are as large as a table file.

    A run that was compacted before is compacted again as soon as it has further units, because
    other programs read its table files. An interrupted compaction is completed.

    Args:
        config: The configuration of the run.
        output: The folder of the run.
        plan: The plan of the run.
        committed: Its committed units.

    Raises:
        RunError: The run is complete, but could not be compacted.
        Interrupted: At SIGINT or SIGTERM. The same command resumes.
    """
    if not _is_due(config, committed):
        return
    target_mb = config.output.target_file_mb or DEFAULT_TARGET_MB
    try:
        with signals():
            result = compact(output, _current_plan(config, output, plan), target_mb)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted: the run is complete, and was not compacted yet; run the same command "
            "again to resume"
        ) from None
    except (RunError, OSError) as error:
        raise RunError(
            f"the run is complete, but could not be compacted (output.target_file_mb): {error}"
        ) from None
    say(result.describe())


def _is_due(config: RunConfig, committed: CommittedUnits) -> bool:
    """Return whether a run should be compacted when it ends."""
    target_mb = config.output.target_file_mb
    table = committed.table
    if table is not None:
        has_units = committed.loose > 0 and target_mb is not None
        return has_units or not _is_settled(committed, table)
    if target_mb is None:
        return False
    # Compaction is not worthwhile if there would be at least half as many table files as units.
    target_bytes = target_mb * _MEBIBYTE
    units_per_file = committed.loose * target_bytes / max(1, committed.loose_bytes)
    if committed.loose_bytes >= target_bytes and units_per_file > 2:
        return True
    # A compaction by command was interrupted.
    return bool(_other_compactions(committed.output, None))


def _current_plan(config: RunConfig, output: str, plan: Plan | None) -> Plan:
    """Return a run's plan, made again if units of several files were split since."""
    if plan is not None and plan.totals.alone == len(alone(output)):
        return plan
    return planner.plan(config, output)


def compact_run(config: RunConfig, output: str) -> Compacted:
    """Compact a run, whatever its size.

    Args:
        config: The configuration of the run.
        output: The folder of the run.

    Raises:
        ConfigError: The folder belongs to nightly runs or to a retry, or no unit is committed.
        RunError: Another session is working on the run, or it could not be compacted.
        Interrupted: At SIGINT or SIGTERM. The same command resumes.
    """
    if layout.is_nightly(output) or storage.exists(storage.join(output, layout.NIGHT)):
        raise ConfigError(f"{output}: holds nightly runs, whose objects `raypd nightly` manages")
    if storage.exists(storage.join(output, layout.RETRY)):
        raise ConfigError(f"{output}: is a retry; give the folder of its run")
    if not writer.committed(output):
        raise ConfigError(f"{output}: no unit is committed, so there is nothing to compact")
    target_mb = config.output.target_file_mb or DEFAULT_TARGET_MB
    try:
        with signals():
            return compact(output, _current_plan(config, output, stored(output)), target_mb)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; run the same command again to resume") from None


def compact(output: str, plan: Iterable[Unit], target_mb: int) -> Compacted:
    """Compact the committed units of a run while holding the lease on it.

    Args:
        output: The folder of the run.
        plan: The units of the run, in the order of the input; can be iterated repeatedly.
        target_mb: The size of a table file, in MiB.

    Raises:
        RunError: Another session is working on the run, or it could not be compacted. The units
            stay as they are.
    """
    with held(output, say, records_session=False) as lease:
        for part in (layout.TABLE, layout.TABLE_UNITS):
            storage.clean_temporary(storage.join(output, part))
        table = compacted.table_of(output)
        sources = _UnitSources(output, table)
        loose = sources.loose
        if loose or table is None or len(table.present) < len(table.compaction.files):
            table = _replace_table(output, plan, sources, target_mb, None, lease)
        return Compacted(output, table.compaction, loose, settle(table))


def rewrite(
    config: RunConfig, output: str, plan: Plan, replacement: NewRows, lease: RunLease
) -> None:
    """Replace the rows of some units of a run that was compacted.

    Args:
        config: The configuration of the run.
        output: The folder of the run.
        plan: The plan of the run.
        replacement: The new rows.
        lease: The lease on the run, which the caller holds.
    """
    target_mb = config.output.target_file_mb or DEFAULT_TARGET_MB
    sources = _UnitSources(output, compacted.table_of(output))
    settle(_replace_table(output, plan, sources, target_mb, replacement, lease))


def _replace_table(
    output: str,
    plan: Iterable[Unit],
    sources: _UnitSources,
    target_mb: int,
    replacement: NewRows | None,
    lease: RunLease,
) -> CompactedTable:
    """Write the table files of all committed units, and make them the committed data."""
    say(
        f"compacting {counted(sources.units, 'unit')} into table files of {target_mb} MB "
        "(output.target_file_mb)"
    )
    old_table = sources.table
    path = compacted.compaction_path(output)
    version = storage.version(path) if old_table is not None else None
    unfinished = None
    if replacement is None:
        unfinished = _unfinished(output, old_table)
    compaction_id = unfinished or _new_id()
    writing = _Writing(output, sources, compaction_id, target_mb * _MEBIBYTE, replacement)
    files = writing.run(plan, unfinished is not None)
    if writing.units != sources.units:
        raise RunError(
            f"{output}: {sources.units - writing.units} committed units are not in the plan of "
            "this run, or are in two partitions; `raypd verify` lists them"
        )
    if lease.lost is not None:
        raise RunError(lease.lost)
    data = records.encoded(Compaction(compaction_id, files))
    if version is None:
        is_written = storage.put_new(path, data)
    else:
        is_written = storage.put_if(path, data, version)
    if is_written is None:
        raise RunError(f"{path}: another process has compacted this run; run the command again")
    table = compacted.table_of(output)
    if table is None:
        raise RunError(f"{path}: was deleted while the run was compacted")
    # The summary files are no longer needed: the rows about the units of table files contain the
    # same data.
    with contextlib.suppress(OSError):
        folder = storage.join(output, layout.SUMMARIES)
        storage.delete_all(storage.join(folder, name) for name in storage.names(folder))
    return table


def _new_id() -> str:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    return f"{stamp}-{uuid.uuid4().hex[:6]}"


def _unfinished(output: str, table: CompactedTable | None) -> str | None:
    """Return the newest compaction that was started but not completed."""
    current = table.compaction.id if table is not None else None
    begun = storage.folders(storage.join(output, layout.TABLE_UNITS))
    return max((name for name in begun if name != current), default=None)


class _Writing:
    """Writes the table files of a compaction.

    Attributes:
        units: The units that were written.
    """

    def __init__(
        self,
        output: str,
        sources: _UnitSources,
        compaction_id: str,
        target_bytes: int,
        replacement: NewRows | None,
    ) -> None:
        self.units = 0
        self._output = output
        self._sources = sources
        self._table = sources.table
        self._id = compaction_id
        self._target_bytes = target_bytes
        self._replacement = replacement

    def run(self, plan: Iterable[Unit], resumes: bool) -> list[TableFile]:
        """Write all units, and return the table files."""
        average = self._sources.bytes // max(1, self._sources.loose)
        threads = _READ_BYTES // (2 * _DECODED_PER_BYTE * max(1, average))
        threads = max(2, min(_MAX_THREADS, threads))
        jobs = self._jobs(_Lookahead(self._sources.in_order(plan)), resumes)
        with TemporaryFolder("compaction") as folder:
            table_writer = TableWriter(self._output, self._id, self._target_bytes, folder)
            for result in storage.in_threads(self._read, jobs, threads):
                if isinstance(result, _ReadUnit):
                    self.units += 1
                    table_writer.add(result.partition, result.unit_row, result.rows)
                elif isinstance(result, _AdoptJob):
                    self.units += result.file.units
                    table_writer.adopt(result.file)
                else:
                    assert self._table is not None
                    unit_rows = self._table.unit_rows_of(result.number)
                    self.units += len(unit_rows)
                    path = self._table.path(result.number)
                    table_writer.copy(result.partition, path, unit_rows)
            table_writer.end_file()
        return table_writer.files

    def _jobs(self, sources: "_Lookahead", resumes: bool) -> Iterator[_Job]:
        if resumes:
            number = 0
            file = self._stored(sources, number)
            while file is not None:
                yield _AdoptJob(file)
                number += 1
                file = self._stored(sources, number)
        next_units = sources.take(1)
        while next_units:
            (source,) = next_units
            sources.put_back(next_units)
            copied = self._unchanged(sources, source)
            if copied is not None:
                yield copied
            else:
                sources.take(1)
                yield _UnitJob(source)
            next_units = sources.take(1)

    def _stored(self, sources: "_Lookahead", number: int) -> TableFile | None:
        """Take the next units if an interrupted session has stored them as a table file.

        Args:
            sources: The next units.
            number: The number of the table file.

        Returns:
            The table file; None if it does not have exactly the next units in their current
            versions.
        """
        path = compacted.unit_rows_path(self._output, self._id, number)
        try:
            unit_rows = compacted.read_unit_rows(path)
        except (compacted.TableReplaced, Damaged):
            return None
        next_units = sources.take(len(unit_rows))
        ids = [source.digest for source in next_units]
        versions = [source.version for source in next_units]
        partitions = {source.partition for source in next_units}
        is_same = ids == unit_rows["id_digest"].to_pylist()
        is_same = is_same and versions == unit_rows["source_digest"].to_pylist()
        if is_same and len(partitions) == 1:
            folders = [part for part in partitions.pop().split("/") if part]
            folder = storage.join(self._output, layout.TABLE, self._id, *folders)
            file_name = f"{number:06d}.parquet"
            for item in storage.walk(folder):
                if item.name == file_name:
                    rows = sum(unit_rows["rows"].to_pylist())
                    name = "/".join([*folders, file_name])
                    return TableFile(name, len(unit_rows), rows, item.size)
        sources.put_back(next_units)
        return None

    def _unchanged(self, sources: "_Lookahead", first: _UnitSource) -> _CopyJob | None:
        """Take the next units if they are all units of a table file, which can be copied.

        Args:
            sources: The next units.
            first: The first of them.

        Returns:
            The copy; None if the first unit has to be read.
        """
        table = self._table
        if table is None or first.location is None or first.location["number"]:
            return None
        number = int(first.location["file"])
        file = table.compaction.files[number]
        if file.bytes < self._target_bytes // 2:
            return None
        next_units = sources.take(file.units)
        ids = np.array([source.digest for source in next_units], np.uint64)
        unit_rows = table.unit_rows_of(number)
        is_same = np.array_equal(ids, unit_rows["id_digest"].to_numpy())
        if self._replacement is not None:
            is_same = is_same and not (self._replacement.units.positions(ids) >= 0).any()
        if not is_same:
            sources.put_back(next_units)
            return None
        return _CopyJob(number, first.partition)

    def _read(self, job: _Job) -> _ReadUnit | _AdoptJob | _CopyJob:
        """Read a unit; other jobs are returned as they are."""
        if not isinstance(job, _UnitJob):
            return job
        source = job.source
        if source.location is None:
            path = path_of(self._output, source.name)
            summary, rows = writer.read_table("", source.unit_id, path=path)
        else:
            assert self._table is not None
            summary = self._table.summary(source.location)
            rows = self._table.rows(source.location)
        stamp = self._id
        is_replaced = self._replacement is not None and source.digest in self._replacement.units
        if self._replacement is not None and is_replaced:
            summary, rows = self._replacement.apply(source.unit_id, summary, rows)
        unit_row = row_of(Commit(summary, source.name, stamp))
        unit_row["id_digest"] = source.digest
        unit_row["version_digest"] = digest(source.name, stamp)
        # With new rows of a retry, a file differs from the one that an ordinary compaction writes.
        unit_row["source_digest"] = 0 if is_replaced else source.version
        return _ReadUnit(source.partition, unit_row, rows.replace_schema_metadata(None))


class _Lookahead:
    """An iterator over units that can be put back."""

    def __init__(self, sources: Iterator[_UnitSource]) -> None:
        self._sources = sources
        self._put_back: deque[_UnitSource] = deque()

    def take(self, count: int) -> list[_UnitSource]:
        """Return the next units, fewer at the end."""
        batch: list[_UnitSource] = []
        while self._put_back and len(batch) < count:
            batch.append(self._put_back.popleft())
        batch += itertools.islice(self._sources, count - len(batch))
        return batch

    def put_back(self, sources: list[_UnitSource]) -> None:
        """Put units back, so that they are the next ones again."""
        self._put_back.extendleft(reversed(sources))


# ------------------------------------------------------------------------
# After the commit


def settle(table: CompactedTable) -> str:
    """Make a run's folder match its compaction. The caller holds the lease on the run.

    Args:
        table: The table files of the run.

    Returns:
        Why the objects of units, or files of other compactions, could not be deleted; "" if they
        are gone.
    """
    path = storage.join(table.output, layout.CURRENT)
    if _current_list(table.output) != _list_of(table):
        storage.put(path, _list_of(table))
    try:
        storage.delete_all(item.path for item in leftover_objects(table.output, table))
        for folder in _other_compactions(table.output, table):
            storage.delete_folder(folder)
        storage.delete_all(_foreign_files(table))
    except storage.Unavailable:
        raise
    except OSError as error:
        return str(error)
    return ""


def _is_settled(committed: CommittedUnits, table: CompactedTable) -> bool:
    """Return whether nothing is left to do after a compaction."""
    if committed.leftovers or _current_list(table.output) != _list_of(table):
        return False
    return not _other_compactions(table.output, table)


def _list_of(table: CompactedTable) -> bytes:
    """Return the list of table files for other programs, one path per line."""
    return "".join(f"{path}\n" for path in table.paths()).encode()


def _current_list(output: str) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return storage.read(storage.join(output, layout.CURRENT))
    return None


def _other_compactions(output: str, table: CompactedTable | None) -> list[str]:
    """Return the folders of earlier and of unfinished compactions."""
    current = table.compaction.id if table is not None else None
    folders = []
    for part in (layout.TABLE, layout.TABLE_UNITS):
        parent = storage.join(output, part)
        for name in storage.folders(parent):
            folder = storage.join(parent, name)
            # Some object stores list a folder for a while after its last object was deleted.
            if name != current and storage.is_folder(folder):
                folders.append(folder)
    return folders


def _foreign_files(table: CompactedTable) -> list[str]:
    """Return the files of an interrupted session that the resumed compaction did not need."""
    names = {file.name for file in table.compaction.files}
    numbers = {name.rpartition("/")[2] for name in names}
    paths = []
    for item in storage.walk(table.folder()):
        if item.name not in names:
            paths.append(item.path)
    unit_rows = storage.join(table.output, layout.TABLE_UNITS, table.compaction.id)
    for item in storage.walk(unit_rows):
        if item.name not in numbers:
            paths.append(item.path)
    return paths
