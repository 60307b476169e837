"""Nightly runs: answer only what is new or changed in the input.

state.json is replaced last, and only if it is still the version that was read.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import raypd.nights.changes as changes
import raypd.nights.delta as delta
import raypd.nights.published as published
import raypd.nights.schema_change as schema_change
import raypd.nights.table as table
from raypd import storage
from raypd.answering import Build
from raypd.cluster import driver
from raypd.config import RunConfig
from raypd.dataset import Plan, PlanWriter, planner
from raypd.errors import ConfigError, RunError, raised_as
from raypd.nights.changes import Input
from raypd.nights.index import Index
from raypd.nights.state import NightState
from raypd.run import (
    RunLease,
    Unit,
    Unreadable,
    console,
    held,
    layout,
    left_out,
    manifest,
    read,
    records,
)
from raypd.text import counted, iso
from raypd.verify import Scratch, scratch as verify_scratch


@dataclass
class Night:
    """The result of a night. Counts are documents."""

    name: str
    root: str
    documents: int = 0
    new: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    shadowed: int = 0  # hidden by a later document with the same id
    failed: int = 0  # of the whole table
    extracted: int = 0
    added_attributes: str = ""
    stale: int = 0  # in damaged objects, kept from an earlier night
    # Objects of the input that cannot be read.
    damaged: Unreadable = field(default_factory=Unreadable)
    nothing_new: bool = False

    def describe(self) -> str:
        """Describe the night in lines."""
        table_list = storage.join(self.root, layout.CURRENT)
        documents = counted(self.documents, "document")
        lines = []
        if self.damaged.units:
            objects = counted(self.damaged.units, "object")
            lines.append(f"{objects} of the input cannot be read; everything else was processed:")
            lines.append(self.damaged.shown().rstrip("\n"))
        if self.nothing_new:
            lines.append(f"nothing new since the night {self.name}: {documents} in {table_list}")
            return "\n".join(lines)
        lines.append(
            f"night {self.name}: {self.new:,} new, {self.changed:,} changed, {self.removed:,} "
            f"removed, {self.unchanged:,} unchanged; {self.extracted:,} extracted"
        )
        if self.added_attributes:
            lines.append(f"added attributes: {self.added_attributes}")
        if self.shadowed:
            lines.append(
                f"{counted(self.shadowed, 'document')} share an id with a later document: the "
                "table has the later one"
            )
        if self.stale:
            lines.append(
                f"{counted(self.stale, 'document')} of objects that cannot be read keep their rows "
                "of an earlier night"
            )
        failed = ""
        if self.failed:
            failed = f", {self.failed:,} of them failed (raypd errors {self.root})"
        lines.append(f"table: {documents}{failed}; its objects: {table_list}")
        return "\n".join(lines)


def run_night(
    config: RunConfig,
    full: bool = False,
    retry_errors: bool = False,
    verbose: bool = False,
    build: Build | None = None,
) -> Night:
    """Bring the table below output.path up to date with tonight's input.

    The same call resumes an interrupted night.

    Args:
        config: The configuration.
        full: Whether to extract every document again.
        retry_errors: Whether to extract failed documents again.
        verbose: See `driver.run_extract`.
        build: See `driver.run_extract`.

    Raises:
        ConfigError: If the folder has an ordinary run, or the configuration has changed so that old
            answers do not fit.
        RunError: If another session is working on it, and at the end if objects of the input are
            damaged and input.on_damaged is fail. Also all errors of `driver.run_extract`.
    """
    storage.configure(config.storage)
    if config.nightly.delta:
        delta.check_installed()
    root = layout.output_folder(config)
    if storage.exists(storage.join(root, layout.RUN)):
        raise ConfigError(
            f"output.path {root}: holds an ordinary run; give nightly runs their own folder"
        )
    with held(root, console.say) as lease, Scratch() as scratch:
        night_run = NightRun(
            config=config,
            root=root,
            lease=lease,
            scratch=scratch,
            full=full,
            retry_errors=retry_errors,
            verbose=verbose,
            build=build,
        )
        night = night_run.run()
    if night.damaged.units and config.input.on_damaged == "fail":
        raise RunError(
            f"{night.describe()}\nEvery night retries these objects. Repair or remove them; "
            "with input.on_damaged=skip they are left out without an error"
        )
    return night


@dataclass
class NightRun:
    """A night that is being processed; `run_night` describes the fields."""

    config: RunConfig
    root: str
    lease: RunLease
    scratch: Scratch
    full: bool
    retry_errors: bool
    verbose: bool
    build: Build | None

    def run(self) -> Night:
        """Process the night, from reading the input to the table. Raises as `run_night` does."""
        self.state, self.version = self._read_state()
        self.change = self._schema_change()
        self._repair_list()
        if self.state is not None and self._listing_is_the_same(self.state):
            return Night(self.state.night, self.root, self.state.documents, nothing_new=True)
        # Files that have not changed since the last plan are not inspected.
        folder = storage.join(self.root, layout.INPUT)
        plan = planner.plan(self.config, folder, same_run=False)
        plan.keep(folder)
        if plan.left_out:
            console.say(left_out.describe(plan.left_out))
        usable_state = None if self.full else self.state
        self.index = Index(self.scratch, self.root, usable_state)
        tonight = self._read_input(plan)
        listing = "" if tonight.damaged.units else plan.totals.listing
        if self.state is not None and self._nothing_new(self.state, tonight):
            if listing and listing != self.state.listing:
                # The next night with this listing needs no plan.
                self._replace_state(replace(self.state, listing=listing))
            return Night(
                self.state.night,
                self.root,
                self.state.documents,
                damaged=tonight.damaged,
                nothing_new=True,
            )
        name = self._name(f"{tonight.digest} {tonight.hidden}".strip())
        self._decide(name, tonight)
        night = self._count(name, tonight)
        self._extract(plan, tonight, night)
        self._publish(night, tonight, listing)
        return night

    def _decide(self, name: str, tonight: Input) -> None:
        """Load the parts of the index that may change, and decide what happens to each document."""
        keep_removed = self.config.nightly.removed == "keep"
        schema_changed = self.change is not None
        self.index.load_affected(
            all_dead=not keep_removed or bool(tonight.damaged.units),
            failed=self.retry_errors,
            everything=schema_changed,
        )
        usable = self._usable_answers()
        has_grown = True
        while has_grown:
            changes.decide(self.scratch, name, usable, keep_removed)
            changes.touched(self.scratch, all_units=schema_changed)
            # The object of a unit is written as a whole, so all of its documents are needed.
            has_grown = self.index.load_units("SELECT unit FROM touched")

    def _count(self, name: str, tonight: Input) -> Night:
        """Count the documents of the night."""
        night = Night(name, self.root, damaged=tonight.damaged, **changes.counts(self.scratch))
        for shard in self.index.not_loaded():
            night.documents += shard.documents
            night.unchanged += shard.documents
            night.shadowed += shard.rows - shard.documents
        return night

    def _read_input(self, plan: Plan) -> Input:
        """Read the input that the last successful night did not know into tables."""
        indexed_units = self.index.live_units()
        tonight = changes.read_input(self.scratch, plan, self.config, indexed_units)
        if not tonight.units:
            objects = counted(tonight.damaged.units, "object")
            raise RunError(
                f"nothing of the input could be read, {objects}:\n{tonight.damaged.shown()}The "
                "table stays as it is, even with input.on_damaged=skip. Run the same command "
                "again to retry"
            )
        return tonight

    def _listing_is_the_same(self, state: NightState) -> bool:
        """Return whether a listing alone shows that the table is already up to date."""
        return (
            bool(state.listing)
            and self._keeps_answers(state)
            and state.listing == planner.listing(self.config)
        )

    def _keeps_answers(self, state: NightState) -> bool:
        """Return whether the table does not change if the input has not changed."""
        if self.full or self.change is not None or (self.retry_errors and state.failed):
            return False
        return bool(state.config["nightly"]["removed"] == self.config.nightly.removed)

    def _nothing_new(self, state: NightState, tonight: Input) -> bool:
        """Return whether the table of the last successful night is already up to date."""
        return (
            self._keeps_answers(state)
            and state.hidden == tonight.hidden
            and changes.units_are_the_same(self.scratch)
        )

    def _usable_answers(self) -> str:
        """Return SQL over `o`, a row of the last index: whether its answer can be kept."""
        conditions = ["TRUE"]
        if self.retry_errors or self.change is not None:
            conditions.append("o.ok")
        if self.change is not None and self.change.anew:
            conditions.append(
                f"o.category NOT IN ({verify_scratch.quoted(sorted(self.change.anew))})"
            )
        return f"({' AND '.join(conditions)})"

    def _read_state(self) -> tuple[NightState | None, str | None]:
        """Return the last successful night, and the version of its record to be replaced."""
        path = storage.join(self.root, layout.STATE)
        with raised_as(RunError, f"{path}: cannot be read"), contextlib.suppress(FileNotFoundError):
            version = storage.version(path)
            return read.record(NightState, path), version
        return None, None

    def _replace_state(self, state: NightState) -> None:
        """Write state.json, unless another process has written it since it was read.

        Raises:
            RunError: If another process has written it.
        """
        path = storage.join(self.root, layout.STATE)
        data = records.encoded(state)
        if self.version:
            written = storage.put_if(path, data, self.version)
        else:
            written = storage.put_new(path, data)
        if not written:
            raise RunError(
                f"{path}: another process has completed a night in the meantime; run the same "
                "command again"
            )
        self.state = state

    def _schema_change(self) -> schema_change.Change | None:
        """Return how the categories changed since the last successful night; None if they did not.

        Raises:
            ConfigError: If something else has changed.
        """
        state = self.state
        config = self.config
        if self.full or state is None:
            return None
        same = state.fingerprint == config.fingerprint()
        if not same and state.base != schema_change.answers_base(config):
            differences = manifest.differences(state.config, config)
            keys = [key for key in differences if not key.startswith("task.categories")]
            raise ConfigError(
                f"since the night {state.night} more has changed than attributes "
                f"({', '.join(keys[:6]) or manifest.NO_KEY}), so old and new answers cannot be in "
                "one table. Extract everything again with --full, or restore that configuration"
            )
        if state.hash_column != config.nightly.hash_column:
            raise ConfigError(
                f"nightly.hash_column was {state.hash_column} in the night {state.night}, so no "
                "document could be recognized. Restore it, or extract everything again with --full"
            )
        if same:
            return None
        if config.output.columns == "typed":
            raise ConfigError(
                f"since the night {state.night} the attributes have changed, and with "
                "output.columns=typed the table's columns as well. Extract everything again with "
                "--full, or use output.columns=record, which extracts only what is new"
            )
        return schema_change.compare(
            state.config["task"]["categories"], config.extraction.categories
        )

    def _name(self, digest: str) -> str:
        """Return tonight's name.

        It is the name of an interrupted night that started in the same way, or otherwise the date,
        with a number if the date is taken.

        Args:
            digest: Identifies tonight's input.
        """
        last_night = None
        if self.state is not None:
            last_night = self.state.night
        start = {
            "digest": digest,
            "after": last_night,
            "full": self.full,
            "retry_errors": self.retry_errors,
            "fingerprint": self.config.fingerprint(),
        }
        record = json.dumps(start, indent=2).encode()
        nights = storage.folders(storage.join(self.root, layout.NIGHTS))
        for name in sorted(nights, reverse=True)[:10]:
            with contextlib.suppress(FileNotFoundError):
                if name != last_night and storage.read(self._path(name, layout.NIGHT)) == record:
                    console.say(f"resuming the night {name}, which was interrupted")
                    return name
        today = iso()[:10]
        name = today
        for number in itertools.count(2):
            if name not in nights and storage.put_new(self._path(name, layout.NIGHT), record):
                break
            name = f"{today}-{number}"
        return name

    def _path(self, night: str, *parts: str) -> str:
        return storage.join(self.root, layout.NIGHTS, night, *parts)

    def _check_lease(self) -> None:
        if self.lease.lost is not None:
            raise RunError(f"{self.lease.lost}; run the same command again to resume")

    def _extract(self, plan: Plan, tonight: Input, night: Night) -> None:
        """Extract new documents, and added attributes of the others."""
        folder = f"{layout.NIGHTS}/{night.name}"
        night.extracted = self._run_over(
            "file IS NULL", plan, tonight, "answered", folder, self.config
        )
        condition = "FALSE"
        config = self.config
        if self.change is not None:
            night.added_attributes = self.change.describe()
            categories = verify_scratch.quoted(self.change.added) or "NULL"
            condition = f"file IS NOT NULL AND category IN ({categories})"
            config = schema_change.only_added(self.config, self.change)
        night.extracted += self._run_over(
            condition, plan, tonight, "added", f"{folder}/{layout.ADDED}", config
        )

    def _run_over(
        self, condition: str, plan: Plan, tonight: Input, name: str, folder: str, config: RunConfig
    ) -> int:
        """Run over the documents that meet a condition.

        Args:
            condition: SQL over the table `placed`.
            plan: Tonight's plan.
            tonight: Tonight's input.
            name: The table that gets the answers.
            folder: The folder of the run, below the root.
            config: The configuration of the run.

        Returns:
            The number of documents.
        """
        writer = PlanWriter()
        documents = 0
        subsets = self._subsets(condition, plan, tonight)
        for unit in changes.merged_units(subsets, config):
            writer.add(unit)
            documents += unit.expected
        planned = writer.finish(0, "", 0, {})
        if documents:
            path = storage.join(self.root, folder)
            # The objects of the table are units, which later nights keep or replace one by one.
            keys: dict[str, Any] = {"path": path, "partition": {}, "target_file_mb": None}
            output = config.output.model_copy(update=keys)
            driver.run_extract(
                config.model_copy(update={"output": output}),
                verbose=self.verbose,
                build=self.build,
                planned=planned,
            )
            self._check_lease()
        files = (f"{folder}/{layout.UNITS}/{unit.id}.parquet" for unit in planned)
        table.add_answers(self.scratch, name, self.root, files)
        return documents

    def _subsets(
        self, condition: str, plan: Plan, tonight: Input
    ) -> Iterator[tuple[Unit, changes.PendingDocuments]]:
        """Yield the units that have documents that meet a condition, and these documents."""
        units = changes.placed(plan, self.config, tonight.apart)
        for pending in changes.to_extract(self.scratch, condition):
            # Both iterators are in the order of the plan.
            unit = next(unit for ordinal, unit in units if ordinal == pending.ordinal)
            yield unit, pending

    def _publish(self, night: Night, tonight: Input, listing: str) -> None:
        """Write the table's new objects, the index and the list; state.json makes them valid."""
        folder = f"{layout.NIGHTS}/{night.name}"
        schema_changed = self.change is not None
        table.settle(self.scratch, f"{folder}/{layout.TABLE}", schema_changed)
        table.compose(self.scratch, self.root, self.config, self.change)
        table.list_units(self.scratch)
        self.index.write(
            f"{folder}/{layout.INDEX}",
            documents=table.indexed_documents(schema_changed),
            units="SELECT * FROM units",
        )
        night.failed = sum(shard.failed for shard in self.index.shards)
        # The objects are listed in the order of the input.
        homes = self.scratch.rows("""
            SELECT file FROM units WHERE file IS NOT NULL ORDER BY live DESC, ordinal, unit
            """)
        files = [storage.join(self.root, row["file"]) for row in homes]
        file_list = "".join(f"{file}\n" for file in files)
        storage.put(self._path(night.name, layout.FILES), file_list.encode())
        self._check_lease()
        state = NightState(
            night=night.name,
            fingerprint=self.config.fingerprint(),
            base=schema_change.answers_base(self.config),
            documents=night.documents,
            failed=night.failed,
            objects=len(files),
            shards=self.index.shards,
            units=self.index.unit_files,
            config=manifest.recorded(self.config),
            hash_column=self.config.nightly.hash_column,
            listing=listing,
            hidden=tonight.hidden,
            ended=iso(),
            versions=manifest.versions(),
        )
        self._replace_state(state)
        self._repair_list()

    def _repair_list(self) -> None:
        """Bring the readers' list, and the Delta table, up to the last successful night.

        They may be those of an earlier night if a session was interrupted.
        """
        if self.state is None:
            return
        path = storage.join(self.root, layout.CURRENT)
        night = self.state.night
        files = published.publish(self.root, night, self.config.output.target_file_mb)
        listing = "".join(f"{file}\n" for file in files).encode()
        self._check_lease()
        if not storage.exists(path) or storage.read(path) != listing:
            storage.put(path, listing)
        if self.config.nightly.delta:
            self._check_lease()
            delta.register(self.root, night, files)
