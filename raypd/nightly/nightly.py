"""Every night the same command: answers for what is new or changed in the input, and a table of all of it.

<root>/state.json: the last good night. Written last, on condition that it is still the one that was read.
<root>/nights/<night>/: an ordinary run over what is new or changed; added/ beside it after a change of the schema.
<root>/nights/<night>/table/, index/, files.txt: objects of the table that were written anew; what is known of every
document; the list of all objects of the table.
<root>/current/files.txt: the list that readers follow.
<root>/lease.json, sessions/: which session holds the folder, and which ones have.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from raypd import storage
from raypd.cluster import driver
from raypd.config import ExtractionConfig, OutputConfig, RunConfig
from raypd.dataset import planner
from raypd.dataset.plan import Plan, PlanWriter
from raypd.errors import ConfigError, RunError
from raypd.nightly import changes, schema_change, table
from raypd.nightly.changes import Input
from raypd.nightly.schema_change import Change
from raypd.run import layout, manifest
from raypd.run.lease import RunLease, held
from raypd.run.manifest import Unreadable
from raypd.run.text import counted
from raypd.verify.scratch import Scratch, quoted
from raypd.verify.table_object import path_of

if TYPE_CHECKING:
    from raypd.cluster.components import Build


@dataclass
class Night:
    """What a night brought. Counts are documents; failed: of the table, with tonight's among them.

    damaged: objects of the input that cannot be read; stale: documents that the table has of these from before.
    """

    name: str
    root: str
    documents: int = 0
    new: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    shadowed: int = 0
    failed: int = 0
    extracted: int = 0
    added_attributes: str = ""
    stale: int = 0
    damaged: Unreadable = field(default_factory=Unreadable)
    nothing_new: bool = False

    def describe(self) -> str:
        """In words, for the user."""
        where = storage.join(self.root, layout.CURRENT, "files.txt")
        left_out = ""
        if self.damaged.units:
            objects = counted(self.damaged.units, "object")
            left_out = f"{objects} of the input cannot be read; all that can is done:\n{self.damaged.shown()}"
        if self.nothing_new:
            return f"{left_out}nothing new since the night {self.name}: {self.documents:,} documents in {where}"
        lines = [
            f"night {self.name}: {self.new:,} new, {self.changed:,} changed, {self.removed:,} removed, "
            f"{self.unchanged:,} as they were; {self.extracted:,} extracted"
        ]
        if self.added_attributes:
            lines.append(f"added attributes: {self.added_attributes}")
        if self.shadowed:
            lines.append(
                f"{self.shadowed:,} documents have an id that a later one has too: the later one is in the table"
            )
        if self.stale:
            lines.append(f"{self.stale:,} documents of objects that cannot be read stay as an earlier night had them")
        failed = f", {self.failed:,} of them failed (raypd errors {self.root})" if self.failed else ""
        lines.append(f"table: {self.documents:,} documents{failed}; its objects: {where}")
        return left_out + "\n".join(lines)


def run_night(
    config: RunConfig,
    *,
    full: bool = False,
    retry_errors: bool = False,
    verbose: bool = False,
    build: Build | None = None,
) -> Night:
    """Brings the table under output.path up to tonight's input; the same call goes on where one was cut off.

    Args:
        config: of the nights; its output.path is the folder of all of them.
        full: extracts everything anew.
        retry_errors: extracts also what failed before.
        verbose: prints what Ray prints.
        build: makes what the workers decode with; None: the model of the configuration.

    Raises:
        RunError: another session that is alive is at it; or, after all that can be done is done, objects cannot be read
            and input.on_damaged is fail.
        UserError: what `driver.run_extract` raises.
    """
    storage.configure(config.storage)
    root = driver.output_folder(config)
    if storage.exists(storage.join(root, layout.RUN)):
        raise ConfigError(f"output.path {root}: holds an ordinary run; give nightly runs a folder of their own")
    with held(root, driver.say) as lease, Scratch() as scratch:
        night = NightRun(config, root, lease, scratch, full, retry_errors, verbose, build).run()
    if night.damaged.units and config.input.on_damaged == "fail":
        raise RunError(
            f"{night.describe()}\nEvery night tries the objects again, until they are put right or removed; with "
            "input.on_damaged=skip it leaves them out and ends well"
        )
    return night


class NightlyState:
    """The last good night, as state.json has it; `version` is what a new one replaces."""

    def __init__(self, root: str) -> None:
        self.path = storage.join(root, layout.STATE)
        self.version: str | None = None
        self.record: dict[str, Any] = {}
        try:
            self.version = storage.version(self.path)
            self.record = json.loads(storage.read(self.path))
        except FileNotFoundError:
            pass
        except (ValueError, OSError) as error:
            raise RunError(f"{self.path}: cannot be read: {error}") from None
        self.night: str | None = self.record.get("night")

    def replace(self, record: dict[str, Any]) -> None:
        """Raises RunError when somebody else was first."""
        data = json.dumps(record, indent=2, ensure_ascii=False).encode()
        done = storage.put_if(self.path, data, self.version) if self.version else storage.put_new(self.path, data)
        if not done:
            raise RunError(f"{self.path}: another process has ended a night meanwhile; the same command looks again")
        self.night = record["night"]


@dataclass
class NightRun:
    """One call of the command."""

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
        self.state = NightlyState(self.root)
        self.change = self._schema_change()
        self._repair_list()
        record, scratch = self.state.record, self.scratch
        changes.load_index(scratch, self.root, [] if self.full else record.get("index", []))
        plan = planner.plan(self.config)
        tonight = changes.read_input(scratch, plan, self.config)
        if not tonight.units:
            objects = counted(tonight.damaged.units, "object")
            raise RunError(
                f"nothing could be read of the input, {objects}:\n{tonight.damaged.shown()}"
                "The table stays as it is, whatever input.on_damaged says; the same command tries them again"
            )
        same = changes.units_are_the_same(scratch) and record.get("hidden", "") == tonight.hidden
        same = same and self.change is None and not self.full
        if same and not (self.retry_errors and record["failed"]):
            return Night(record["night"], self.root, record["documents"], damaged=tonight.damaged, nothing_new=True)
        name = self._name(tonight.digest)
        changes.decide(scratch, name, self._usable(), self.config.nightly.removed == "keep")
        night = Night(name, self.root, damaged=tonight.damaged, **changes.counts(scratch))
        self._extract(plan, tonight, night)
        self._publish(night, tonight)
        return night

    def _schema_change(self) -> Change | None:
        """What changed in the categories since the last good night. ConfigError: something else has changed."""
        record, before = self.state.record, self.state.night
        if self.full or not record:
            return None
        same = record["fingerprint"] == self.config.fingerprint()
        if not same and record["base"] != schema_change.answers_base(self.config):
            changed = manifest.differences(record["config"], self.config)
            keys = [key for key in changed if not key.startswith("task.categories")]
            raise ConfigError(
                f"since the night {before} more has changed than attributes "
                f"({', '.join(keys[:6]) or manifest.NO_KEY}): old and new answers would not go "
                "together. --full extracts everything anew; or go back to that configuration"
            )
        if record["hash_column"] != self.config.nightly.hash_column:
            raise ConfigError(
                f"nightly.hash_column was {record['hash_column']} in the night {before}: no document could "
                "be recognised. Go back to it, or extract everything anew with --full"
            )
        if same:
            return None
        assert isinstance(self.config.task, ExtractionConfig)
        return schema_change.compare(record["config"]["task"]["categories"], self.config.task.categories)

    def _usable(self) -> str:
        """SQL over `o`: whether an old answer can stand."""
        conditions = ["o.ok"] if self.retry_errors or self.change is not None else []
        if self.change is not None and self.change.anew:
            conditions.append(f"o.category NOT IN ({quoted(sorted(self.change.anew))})")
        return "(" + (" AND ".join(conditions) or "TRUE") + ")"

    def _name(self, digest: str) -> str:
        """Tonight's name: of the night that began the same and was cut off, else the date, with a number if need be."""
        mine: dict[str, Any] = {"digest": digest, "after": self.state.night, "fingerprint": self.config.fingerprint()}
        mine |= {"full": self.full, "retry_errors": self.retry_errors}
        nights = storage.folders(storage.join(self.root, layout.NIGHTS))
        for name in sorted(nights, reverse=True)[:10]:
            if name != self.state.night and self._note(name) == mine:
                driver.say(f"going on with the night {name}, which was cut off")
                return name
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        number, name = 1, today
        while name in nights or not storage.put_new(self._at(name, "night.json"), json.dumps(mine).encode()):
            number += 1
            name = f"{today}-{number}"
        return name

    def _note(self, night: str) -> Any:
        try:
            return json.loads(storage.read(self._at(night, "night.json")))
        except (FileNotFoundError, ValueError):
            return None

    def _at(self, night: str, *parts: str) -> str:
        return storage.join(self.root, layout.NIGHTS, night, *parts)

    def _check_lease(self) -> None:
        if self.lease.lost is not None:
            raise RunError(f"{self.lease.lost}; the same command goes on")

    def _extract(self, plan: Plan, tonight: Input, night: Night) -> None:
        """Runs what is to be extracted, and makes `answered` and `added` of it."""
        folder = f"nights/{night.name}"
        night.extracted = self._run_over("file IS NULL", plan, tonight, "answered", folder, self.config)
        condition, config = "FALSE", self.config
        if self.change is not None:
            night.added_attributes = self.change.describe()
            if self.change.added:
                condition = f"file IS NOT NULL AND category IN ({quoted(self.change.added)})"
                config = schema_change.only_added(self.config, self.change)
        night.extracted += self._run_over(condition, plan, tonight, "added", f"{folder}/added", config)

    def _run_over(self, condition: str, plan: Plan, tonight: Input, name: str, folder: str, config: RunConfig) -> int:
        """One run over the documents of a condition, whose answers become the table `name`; how many they are."""
        writer = PlanWriter()
        keys: dict[str, str] = {}
        documents = 0
        planned = changes.placed(plan, self.config, tonight.apart)
        for ordinal, positions in changes.to_extract(self.scratch, condition):
            unit = next(unit for at, unit in planned if at == ordinal)  # both come in the order of the plan
            subset = unit.subset(positions)
            writer.add(subset)
            keys[subset.id] = changes.unit_key(unit)
            documents += len(positions)
        if keys:
            own = config.model_copy(update={"output": OutputConfig(path=path_of(self.root, folder))})
            driver.run_extract(own, verbose=self.verbose, build=self.build, planned=writer.finish(0, "", 0, {}))
            self._check_lease()
        objects = ((key, f"{folder}/{layout.UNITS}/{unit}.parquet") for unit, key in keys.items())
        table.add_answers(self.scratch, name, self.root, objects)
        return documents

    def _publish(self, night: Night, tonight: Input) -> None:
        """Writes the table's new objects, the index and the list; state.json makes them count."""
        scratch, folder = self.scratch, f"nights/{night.name}"
        again = self.change is not None
        table.settle(scratch, folder, again)
        table.compose(scratch, self.root, self.config, self.change)
        index = changes.write_index(scratch, table.index_query(again), self.root, f"{folder}/index")
        files = [path_of(self.root, file) for file in table.files_of(scratch)]
        night.failed = scratch.number("SELECT count(*) FROM final WHERE winner AND NOT ok")
        storage.put(self._at(night.name, "files.txt"), "".join(f"{file}\n" for file in files).encode())
        self._check_lease()
        self.state.replace(
            {
                "night": night.name,
                "ended": datetime.now(UTC).isoformat(timespec="seconds"),
                "documents": night.documents,
                "failed": night.failed,
                "objects": len(files),
                "fingerprint": self.config.fingerprint(),
                "base": schema_change.answers_base(self.config),
                "hash_column": self.config.nightly.hash_column,
                "hidden": tonight.hidden,
                "index": index,
                "versions": manifest.versions(),
                "config": manifest.recorded(self.config),
            }
        )
        self._repair_list()

    def _repair_list(self) -> None:
        """Makes the readers' list that of the last good night, also where a night was cut off in between."""
        if self.state.night is None:
            return
        path = storage.join(self.root, layout.CURRENT, "files.txt")
        wanted = storage.read(self._at(self.state.night, "files.txt"))
        if not storage.exists(path) or storage.read(path) != wanted:
            storage.put(path, wanted)
