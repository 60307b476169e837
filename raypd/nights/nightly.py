"""Answers for what is new or changed in the input, night by night. state.json is written last, if
it is as was read.
"""

import contextlib
import itertools
import json
from dataclasses import dataclass, field

from raypd import storage
from raypd.answering.components import Build
from raypd.cluster import driver
from raypd.config import RunConfig
from raypd.dataset import Plan, PlanWriter, planner
from raypd.errors import ConfigError, RunError, raised_as
from raypd.nights import changes, delta, schema_change, table
from raypd.nights.changes import Input
from raypd.nights.state import NightState
from raypd.run import console, layout, manifest, read, records
from raypd.run.lease import RunLease, held
from raypd.run.left_out import describe
from raypd.run.unreadable import Unreadable
from raypd.text import counted, iso
from raypd.verify.scratch import Scratch, quoted


@dataclass
class Night:
    """What a night brought. Counts are documents."""

    name: str
    root: str
    documents: int = 0
    new: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    shadowed: int = 0
    failed: int = 0  # of the table, tonight's among them
    extracted: int = 0
    added_attributes: str = ""
    stale: int = 0  # of damaged objects, kept from before
    # Objects of the input that cannot be read.
    damaged: Unreadable = field(default_factory=Unreadable)
    nothing_new: bool = False

    def describe(self) -> str:
        where = storage.join(self.root, layout.CURRENT)
        lines = []
        documents = counted(self.documents, "document")
        if self.damaged.units:
            lines.append(
                f"{counted(self.damaged.units, 'object')} of the input cannot be read; all "
                "that can is done:"
            )
            lines.append(self.damaged.shown().rstrip("\n"))
        if self.nothing_new:
            return "\n".join(
                [*lines, f"nothing new since the night {self.name}: {documents} in {where}"]
            )
        lines.append(
            f"night {self.name}: {self.new:,} new, {self.changed:,} changed, "
            f"{self.removed:,} removed, "
            f"{self.unchanged:,} as they were; {self.extracted:,} extracted"
        )
        if self.added_attributes:
            lines.append(f"added attributes: {self.added_attributes}")
        if self.shadowed:
            words = "with an id that a later one has too: the later one is in the table"
            lines.append(f"{counted(self.shadowed, 'document')} {words}")
        if self.stale:
            words = "of objects that cannot be read: as an earlier night had them"
            lines.append(f"{counted(self.stale, 'document')} {words}")
        if self.failed:
            failed = f", {self.failed:,} of them failed (raypd errors {self.root})"
        else:
            failed = ""
        return "\n".join([*lines, f"table: {documents}{failed}; its objects: {where}"])


def run_night(
    config: RunConfig,
    full: bool = False,
    retry_errors: bool = False,
    verbose: bool = False,
    build: Build | None = None,
) -> Night:
    """Brings the table under output.path up to tonight's input; the same call goes on where one was
    cut off.

    full: extracts all anew. retry_errors: also what failed. verbose, build: as in
    `driver.run_extract`, and its errors are raised. RunError also while a session is at it, and at
    the end for damaged objects (input.on_damaged: fail).
    """
    storage.configure(config.storage)
    if config.nightly.delta:
        delta.check_installed()
    root = layout.output_folder(config)
    if storage.exists(storage.join(root, layout.RUN)):
        raise ConfigError(
            f"output.path {root}: holds an ordinary run; give nightly runs a folder of their own"
        )
    with held(root, console.say) as lease, Scratch() as scratch:
        night = NightRun(config, root, lease, scratch, full, retry_errors, verbose, build).run()
    if night.damaged.units and config.input.on_damaged == "fail":
        advice = (
            "until they are put right or removed; with input.on_damaged=skip it leaves them "
            "out and ends well"
        )
        raise RunError(f"{night.describe()}\nEvery night tries the objects again, {advice}")
    return night


@dataclass
class NightRun:
    config: RunConfig
    root: str
    lease: RunLease
    scratch: Scratch
    full: bool
    retry_errors: bool
    verbose: bool
    build: Build | None

    def run(self) -> Night:
        """The night, from the look at the input to the table. Raises as `run_night` does."""
        self.state, self.version = self._read_state()
        self.change = self._schema_change()
        self._repair_list()
        state = self.state
        scratch = self.scratch
        plan = planner.plan(self.config)
        if plan.left_out:
            console.say(describe(plan.left_out))
        if self.full or state is None:
            index = []
        else:
            index = [storage.join(self.root, file) for file in state.index]
        tonight = changes.read_input(scratch, plan, self.config, index)
        if not tonight.units:
            objects = counted(tonight.damaged.units, "object")
            advice = (
                "The table stays as it is, whatever input.on_damaged says; the same command "
                "tries them again"
            )
            raise RunError(
                f"nothing could be read of the input, {objects}:\n{tonight.damaged.shown()}{advice}"
            )
        forced = (
            self.full
            or self.change is not None
            or (self.retry_errors and state is not None and state.failed)
        )
        same = (
            state is not None and state.config["nightly"]["removed"] == self.config.nightly.removed
        )
        same = (
            same
            and state is not None
            and state.hidden == tonight.hidden
            and changes.units_are_the_same(scratch)
        )
        if state is not None and same and not forced:
            return Night(
                state.night, self.root, state.documents, damaged=tonight.damaged, nothing_new=True
            )
        name = self._name(f"{tonight.digest} {tonight.hidden}".strip())
        conditions = ["TRUE", *(["o.ok"] if self.retry_errors or self.change is not None else [])]
        if self.change is not None and self.change.anew:
            conditions.append(f"o.category NOT IN ({quoted(sorted(self.change.anew))})")
        changes.decide(
            scratch, name, f"({' AND '.join(conditions)})", self.config.nightly.removed == "keep"
        )
        night = Night(name, self.root, damaged=tonight.damaged, **changes.counts(scratch))
        self._extract(plan, tonight, night)
        self._publish(night, tonight)
        return night

    def _read_state(self) -> tuple[NightState | None, str | None]:
        """The last good night, and the version of its record, which tonight's replaces."""
        path = storage.join(self.root, layout.STATE)
        with raised_as(RunError, f"{path}: cannot be read"), contextlib.suppress(FileNotFoundError):
            version = storage.version(path)
            return read.record(NightState, path), version
        return None, None

    def _replace_state(self, state: NightState) -> None:
        """Raises RunError when somebody else was first."""
        path = storage.join(self.root, layout.STATE)
        data = records.encoded(state)
        if not (
            storage.put_if(path, data, self.version)
            if self.version
            else storage.put_new(path, data)
        ):
            raise RunError(
                f"{path}: another process has ended a night meanwhile; the same command looks again"
            )
        self.state = state

    def _schema_change(self) -> schema_change.Change | None:
        """What changed in the categories since the last good night.

        ConfigError: something else has changed.
        """
        state = self.state
        config = self.config
        if self.full or state is None:
            return None
        same = state.fingerprint == config.fingerprint()
        if not same and state.base != schema_change.answers_base(config):
            changed = manifest.differences(state.config, config)
            keys = [key for key in changed if not key.startswith("task.categories")]
            raise ConfigError(
                f"since the night {state.night} more has changed than attributes "
                f"({', '.join(keys[:6]) or manifest.NO_KEY}): old and new answers would not go "
                "together. --full extracts everything anew; or go back to that configuration"
            )
        if state.hash_column != config.nightly.hash_column:
            advice = (
                "no document could be recognised. Go back to it, or extract everything anew "
                "with --full"
            )
            raise ConfigError(
                f"nightly.hash_column was {state.hash_column} in the night {state.night}: {advice}"
            )
        if same:
            return None
        if config.output.columns == "typed":
            raise ConfigError(
                f"since the night {state.night} the attributes have changed, and with "
                "output.columns typed so have the "
                "table's columns: --full extracts everything anew; output.columns record "
                "can do with what is new"
            )
        return schema_change.compare(
            state.config["task"]["categories"], config.extraction.categories
        )

    def _name(self, digest: str) -> str:
        """Tonight's name: of the night that began the same and was cut off, else the date, with a
        number if need be.
        """
        before = self.state.night if self.state is not None else None
        began = {
            "digest": digest,
            "after": before,
            "full": self.full,
            "retry_errors": self.retry_errors,
        }
        start = json.dumps({**began, "fingerprint": self.config.fingerprint()}, indent=2).encode()
        nights = storage.folders(storage.join(self.root, layout.NIGHTS))
        for name in sorted(nights, reverse=True)[:10]:
            with contextlib.suppress(FileNotFoundError):
                if name != before and storage.read(self._at(name, layout.NIGHT)) == start:
                    console.say(f"going on with the night {name}, which was cut off")
                    return name
        today = iso()[:10]
        names = itertools.chain([today], (f"{today}-{number}" for number in itertools.count(2)))
        unused = (name for name in names if name not in nights)
        return next(name for name in unused if storage.put_new(self._at(name, layout.NIGHT), start))

    def _at(self, night: str, *parts: str) -> str:
        return storage.join(self.root, layout.NIGHTS, night, *parts)

    def _check_lease(self) -> None:
        if self.lease.lost is not None:
            raise RunError(f"{self.lease.lost}; the same command goes on")

    def _extract(self, plan: Plan, tonight: Input, night: Night) -> None:
        folder = f"{layout.NIGHTS}/{night.name}"
        night.extracted = self._run_over(
            "file IS NULL", plan, tonight, "answered", folder, self.config
        )
        condition = "FALSE"
        config = self.config
        if self.change is not None:
            night.added_attributes = self.change.describe()
            condition = f"file IS NOT NULL AND category IN ({quoted(self.change.added) or 'NULL'})"
            config = schema_change.only_added(self.config, self.change)
        night.extracted += self._run_over(
            condition, plan, tonight, "added", f"{folder}/{layout.ADDED}", config
        )

    def _run_over(
        self, condition: str, plan: Plan, tonight: Input, name: str, folder: str, config: RunConfig
    ) -> int:
        """One run over the documents of a condition, whose answers become the table `name`; how
        many they are.
        """
        writer = PlanWriter()
        keys: dict[str, str] = {}
        documents = 0
        planned = changes.placed(plan, self.config, tonight.apart)
        for ordinal, positions in changes.to_extract(self.scratch, condition):
            # Both come in the order of the plan.
            unit = next(unit for start, unit in planned if start == ordinal)
            subset = unit.subset(positions)
            writer.add(subset)
            keys[subset.id] = changes.unit_key(unit)
            documents += len(positions)
        if keys:
            output = config.output.model_copy(
                update={"path": storage.join(self.root, folder), "partition": {}}
            )
            config = config.model_copy(update={"output": output})
            driver.run_extract(
                config, verbose=self.verbose, build=self.build, planned=writer.finish(0, "", 0, {})
            )
            self._check_lease()
        objects = ((key, f"{folder}/{layout.UNITS}/{unit}.parquet") for unit, key in keys.items())
        table.add_answers(self.scratch, name, self.root, objects)
        return documents

    def _publish(self, night: Night, tonight: Input) -> None:
        """Writes the table's new objects, the index and the list; state.json makes them count."""
        scratch = self.scratch
        folder = f"{layout.NIGHTS}/{night.name}"
        again = self.change is not None
        table.settle(scratch, f"{folder}/{layout.TABLE}", again)
        table.compose(scratch, self.root, self.config, self.change)
        index = changes.write_index(
            scratch, table.index_query(again), self.root, f"{folder}/{layout.INDEX}"
        )
        # In the order of the input.
        homes = scratch.rows("SELECT file FROM homes ORDER BY live DESC, ordinal, unit")
        files = [storage.join(self.root, row["file"]) for row in homes]
        night.failed = scratch.number("SELECT count(*) FROM final WHERE winner AND NOT ok")
        storage.put(
            self._at(night.name, layout.FILES), "".join(f"{file}\n" for file in files).encode()
        )
        self._check_lease()
        state = NightState(
            night=night.name,
            fingerprint=self.config.fingerprint(),
            base=schema_change.answers_base(self.config),
            documents=night.documents,
            failed=night.failed,
            objects=len(files),
            index=index,
            config=manifest.recorded(self.config),
            hash_column=self.config.nightly.hash_column,
            hidden=tonight.hidden,
            ended=iso(),
            versions=manifest.versions(),
        )
        self._replace_state(state)
        self._repair_list()

    def _repair_list(self) -> None:
        """Makes the readers' list, and the Delta table, those of the last good night, also where it
        was cut off.
        """
        if self.state is None:
            return
        path = storage.join(self.root, layout.CURRENT)
        listing = storage.read(self._at(self.state.night, layout.FILES))
        if not storage.exists(path) or storage.read(path) != listing:
            storage.put(path, listing)
        if self.config.nightly.delta:
            self._check_lease()
            delta.register(self.root, self.state.night, listing.decode().splitlines())
