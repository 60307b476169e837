"""Run an extraction: plan, skip committed units, run the others on workers, write the manifest.

A large run is compacted when it ends.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import raypd.cluster.ray_session as ray_session
from raypd import storage
from raypd.answering import check_model, components, progress
from raypd.billing import BudgetReached, book
from raypd.config import RunConfig
from raypd.dataset import (
    CommittedUnits,
    Plan,
    compaction,
    planner,
    summaries,
    take_apart,
    writer,
)
from raypd.errors import ConfigError, RunError
from raypd.run import (
    Interrupted,
    Manifest,
    RunLease,
    RunRecord,
    Unit,
    UnitResult,
    UnitTotals,
    Unreadable,
    held,
    layout,
    left_out,
    manifest,
    records,
    say,
    signals,
)
from raypd.tasks import calibration_of, check_template, columns_of
from raypd.text import counted, share

if TYPE_CHECKING:  # importing Ray takes a second, which a run without open units does not need
    from raypd.cluster.accounts import Accounts
    from raypd.cluster.worker_pool import Tick, WorkerPool

_INPUT_CHANGED = (
    "a file of the input, input.path, cluster.unit_documents or cluster.unit_bytes has changed"
)
# If more units fail, the cause is not a single document.
_MAX_FAILED_UNITS = 10
# cluster.max_failed_share applies once a session has answered this many documents.
_MIN_JUDGED_DOCUMENTS = 100


def run_extract(
    config: RunConfig,
    *,
    verbose: bool = False,
    build: components.Build | None = None,
    planned: Plan | None = None,
) -> Manifest:
    """Run or resume an extraction until every unit is committed, and write the manifest.

    Then its units are compacted into table files if they are large enough in total.

    Args:
        config: The configuration of the run.
        verbose: Show what Ray prints.
        build: Makes the engine and the task of a worker; None uses those of the configuration.
        planned: The plan; None to plan the whole input.

    Raises:
        ConfigError: If the run cannot begin with this configuration.
        InputError: If the input cannot be planned.
        ModelError: If the model cannot be used.
        RunError: If the run cannot continue.
        Interrupted: At SIGINT or SIGTERM. Committed units are complete, and the same call resumes.
    """
    storage.configure(config.storage)
    check_template(config.task, config.input, config.model)
    output = layout.output_folder(config)
    if output != storage.absolute(config.output.path):
        say(
            "output.path is relative and this job runs in a temporary copy of its folder; writing "
            f"to {output}"
        )
    manifest.check(config, output)
    writer.output_schema(columns_of(config), config.output.partition)
    planned = planned or planner.plan(config, output)
    if planned.left_out:
        say(left_out.describe(planned.left_out))
    for note in planned.unsplit:
        say(note)
    done = writer.committed(output)
    documents_done(planned, done, output)
    if len(done) == planned.units:
        say(
            f"{output}: already complete, so nothing was done; all figures are those of the "
            "earlier run"
        )
        result = finish(config, output, planned, committed=done)
        compaction.after_run(config, output, planned, done)
        return result
    if build is None:
        build = components.build
        check_model(config, machine=ray_session.runs_here(config.cluster))
    calibration = calibration_of(config.model, config.decoding.method)
    calibrated_on = 0 if calibration is None else calibration.values
    manifest.claim(config, output, calibrated_on=calibrated_on)
    with signals(), held(output, say) as lease:
        if manifest.claim(config, output, held=True, calibrated_on=calibrated_on):
            say(
                f"{output} held a run with another configuration that had committed nothing; "
                "replaced it"
            )
        # Another session may have committed units before this one got the lease.
        done = writer.committed(output)
        done_documents = documents_done(planned, done, output)
        storage.clean_temporary(writer.units_folder(output))
        session = DriverSession(
            config, output, planned, done, done_documents, lease, verbose, build
        )
        try:
            planned.keep(output)
            if len(done) < planned.units:
                session.stream()
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted: {session.kept()}") from None
        finally:
            session.summaries.flush()
    done = writer.committed(output)
    result = finish(config, output, planned, session.unreadable, done)
    compaction.after_run(config, output, planned, done)
    return result


def finish(
    config: RunConfig,
    output: str,
    planned: Plan,
    unreadable: Unreadable | None = None,
    committed: CommittedUnits | None = None,
) -> Manifest:
    """Write the manifest of a run.

    Args:
        config: The configuration of the run.
        output: The folder of the run.
        planned: The plan.
        unreadable: Units that the session could not read, besides those that the plan lists.
        committed: The committed units, if they were listed just now.

    Raises:
        RunError: If a unit is damaged or belongs to another configuration, if units could not be
            read and input.on_damaged is fail, or if nothing at all could be read, which suggests a
            missing permission or an empty mount rather than damaged files.
    """
    unreadable = unreadable or Unreadable()
    for unit in planned.damaged():
        unreadable.add(unit, unit.damaged or "")
    if committed is None:
        committed = writer.committed(output)
    units = UnitTotals()
    begun: set[str] = set()
    for table in summaries.read(committed, keep=True):
        summaries.add(units, table)
        if unreadable.files:
            begun.update(unreadable.files.keys() & set(table["source"].to_pylist()))
    _check_fingerprints(config.fingerprint(), units, output)
    cost = book.of_run(output, units, book.models_of(config.model, config.cascade))
    result = manifest.make(config, output, planned.units, units, unreadable, cost, planned.left_out)
    path = storage.join(output, layout.MANIFEST)
    records.write(path, result)
    if unreadable.units and not result.documents:
        raise RunError(
            f"none of the {unreadable.units} units of the input can be read:\n"
            f"{unreadable.shown()}{path} lists them. Such a run fails even with "
            "input.on_damaged=skip. Run the same command again to retry them"
        )
    if unreadable.units and config.input.on_damaged == "fail":
        advice = unreadable.advice(begun)
        raise RunError(
            f"{unreadable.units} units of the input cannot be read; all others are done:\n"
            f"{unreadable.shown()}{path} lists them. {advice}"
        )
    return result


def _check_fingerprints(fingerprint: str, units: UnitTotals, output: str) -> None:
    """Raise RunError if a committed unit belongs to another configuration."""
    for unit_fingerprint, unit in units.fingerprints.items():
        if unit_fingerprint != fingerprint:
            raise RunError(
                f"{output}: unit {unit} belongs to another configuration, {unit_fingerprint}"
            )


def documents_done(planned: Plan, done: CommittedUnits, output: str) -> int:
    """Return the expected documents of the committed units.

    Args:
        planned: The plan of the input as it is now.
        done: The committed units.
        output: The output folder.

    Raises:
        ConfigError: If a committed unit is not in the plan. Its documents are also in units of the
            plan and would appear in the output twice.
    """
    if not done:
        return 0
    known_units = 0
    documents = 0
    for unit in planned:
        if unit.id in done:
            known_units += 1
            documents += unit.expected
    if known_units < len(done):
        unknown = sorted(set(done).difference(unit.id for unit in planned))
        found = f"{counted(len(unknown), 'unit')} not in the plan of this run"
        cut = _earlier_cut(planned, output)
        if cut:
            now = ", ".join(f"cluster.{key} is {planned.totals.cut[key]}" for key in cut)
            resume = " ".join(f"cluster.{key}={value}" for key, value in cut.items())
            raise ConfigError(
                f"output.path {output}: {now} now, but the run began with {resume}; it has "
                f"{found} (for instance {unknown[0]}). Their documents would appear in the output "
                f"twice. To resume, set {resume}, or choose another output.path"
            )
        raise ConfigError(
            f"output.path {output}: has {found} "
            f"(for instance {unknown[0]}): {planned.changes or _INPUT_CHANGED}. Their "
            "documents would appear in the output twice. Choose another output.path, or restore "
            "the input; for files that change, there is `raypd nightly`"
        )
    return documents


def _earlier_cut(planned: Plan, output: str) -> dict[str, int]:
    """Return the keys that cut the input into units and had another value when the run began.

    Args:
        planned: The plan of the input as it is now.
        output: The output folder.

    Returns:
        The earlier values; nothing if they are not known.
    """
    try:
        earlier = records.read(RunRecord, storage.join(output, layout.RUN)).config
    except (OSError, records.RecordError):
        return {}
    cluster = earlier.get("cluster", {})
    return {
        key: cluster[key]
        for key, value in planned.totals.cut.items()
        if cluster.get(key, value) != value
    }


@dataclass
class DriverSession:
    """A session of a run in the driver: it runs the units that are not committed yet."""

    config: RunConfig
    output: str
    planned: Plan
    done: CommittedUnits  # before the session began
    done_documents: int  # documents of these units, and of those that the session commits
    lease: RunLease
    verbose: bool
    build: components.Build
    answered_documents: int = 0  # by this session, failed ones included
    failed_documents: int = 0  # by this session
    unit_errors: dict[str, str] = field(default_factory=dict)
    unreadable: Unreadable = field(default_factory=Unreadable)

    def __post_init__(self) -> None:
        self.units = self.planned.units
        self.done_units = len(self.done)
        self.summaries = summaries.SummaryWriter(self.output)
        # Units with several objects, one of which cannot be read.
        self._units_to_split: list[Unit] = []
        self._display = progress.RunDisplay(
            self.planned.documents, self.done_documents, self.planned.exact
        )
        self._pool: WorkerPool | None = None
        self._accounts: Accounts | None = None

    def state(self) -> str:
        """Describe how many units are committed."""
        return f"{self.done_units} of {counted(self.units, 'unit')} committed"

    def kept(self) -> str:
        """Describe how many units are committed, and what the same command does with them."""
        if self.done_units:
            return f"{self.state()}; run the same command again to resume"
        most = counted(self.config.cluster.unit_documents, "document")
        return (
            f"{self.state()}, so nothing is saved yet, and the same command starts from the "
            f"beginning. A unit has up to {most}; with a smaller cluster.unit_documents the first "
            "answers are saved sooner"
        )

    def stream(self) -> None:
        """Run units until none is left.

        Raises:
            RunError: If some units failed, or if too much goes wrong.
        """
        with ray_session.connected(self.config.cluster, self.verbose) as owns_ray:
            try:
                with self._display:
                    self._stream()
            except BudgetReached:
                raise
            except RunError as error:
                raise self._error(str(error)) from None
            finally:
                if self._pool is not None:
                    self._record_reading(self._pool)
                if self._accounts is not None:
                    self._accounts.close()
                # If this session started Ray, the workers end with it.
                if not owns_ray and self._pool is not None:
                    self._pool.close()
        if self.unit_errors:
            unit, reason = next(iter(self.unit_errors.items()))
            raise self._error(
                f"{counted(len(self.unit_errors), 'unit')} failed. The reason for {unit}: "
                f"{reason.strip()}"
            )

    def _stream(self) -> None:
        from raypd.cluster.accounts import Accounts
        from raypd.cluster.worker import WorkerSpec
        from raypd.cluster.worker_pool import WorkerPool

        config = self.config
        say = self._display.say
        ray_session.silence_ray_logs(say, self.verbose)
        resources = ray_session.worker_resources(config)
        accounts = Accounts(
            config, self.output, self.lease, resources, self.planned, self.done_documents, say
        )
        self._accounts = accounts
        spec = WorkerSpec(
            config=config,
            output=self.output,
            session=self.lease.id,
            threads=resources.threads,
            build=self.build,
            ledger=accounts.ledger,
            gpus=resources.gpus,
        )
        pool = WorkerPool(spec, resources, config.cluster, say)
        self._pool = pool
        pool.admit = accounts.admit
        if accounts.deadline is not None:
            # How many workers the deadline requires is known only after the first unit.
            pool.wanted = max(1, config.cluster.min_workers)
        self._run(pool, accounts, self.planned, self.units - self.done_units)
        if self._units_to_split and not accounts.held:
            singles = take_apart(
                self.output, self.planned, self._units_to_split, config.fingerprint()
            )
            self.units = self.planned.units
            self._run(pool, accounts, singles, len(singles))
        self._update_display()
        self._show_read_by_workers(pool.read_by_workers)
        if accounts.held:
            raise accounts.reached()

    def _record_reading(self, pool: "WorkerPool") -> None:
        """Store what was read ahead, or had to be read by workers; the report shows it."""
        reading = pool.reading
        if not reading.units and not pool.read_by_workers:
            return
        reading.session = self.lease.id
        reading.read_by_workers = dict(pool.read_by_workers)
        # The run must not fail because of this record.
        with contextlib.suppress(OSError):
            name = f"{self.lease.id}.json"
            records.write(storage.join(self.output, layout.READING, name), reading)

    def _show_read_by_workers(self, units: Counter[str]) -> None:
        """Show how many units should have been read ahead but were read by workers, and why."""
        if units:
            reasons = [f"{count} because {why}" for why, count in units.most_common()]
            total = counted(units.total(), "unit")
            self._display.say(
                f"{total} of the input had to be read by workers: {'; '.join(reasons)}"
            )

    def _run(
        self, pool: "WorkerPool", accounts: "Accounts", units: Iterable[Unit], count: int
    ) -> None:
        """Run units and follow the events of the pool."""
        from raypd.cluster.worker_pool import Tick

        ended = 0
        with contextlib.closing(pool.run(units, self.done, count)) as events:
            for event in events:
                if self.lease.lost is not None:
                    raise RunError(self.lease.lost)
                if isinstance(event, Tick):
                    # Once all units have ended, there is nothing more to pay.
                    if ended < count:
                        pool.wanted = accounts.look(event.workers) or pool.wanted
                        pool.closing = accounts.held
                    if event.workers:
                        self._display.begin()
                    self._update_display(event)
                    continue
                ended += 1
                documents = None
                if event.result.done:
                    documents = event.result.ok + event.result.failed
                accounts.ended(event.unit, documents)
                self._take(event.unit, event.result)
        if ended < count and not accounts.held:
            raise self._error(
                "internal error: units remain but no worker is running. Please report this"
            )

    def _update_display(self, tick: "Tick | None" = None) -> None:
        """Show the progress, including documents of units in flight."""
        answered = 0
        failed = 0
        stream = ""
        if tick is not None:
            answered = tick.answered
            failed = tick.failed
            if tick.stream is not None and tick.stream.read:
                stream = f"{tick.stream}, {tick.units} decoding"
        # If units are cut by bytes, the total is estimated from the documents of finished units.
        if not self.planned.exact and self.done_units:
            self._display.total = round(self.done_documents * self.units / self.done_units)
            self._display.exact = self.done_units == self.units
        self._display.update(self.done_documents + answered, self.failed_documents + failed, stream)

    def _error(self, reason: str) -> RunError:
        return RunError(f"{reason}\n{self.state()}; run the same command again to resume")

    def _check_failed(self, unit: Unit) -> None:
        """Raise RunError if so many documents have failed that the run is not worth its price."""
        failed = self.failed_documents
        documents = self.answered_documents
        limit = self.config.cluster.max_failed_share
        if documents < _MIN_JUDGED_DOCUMENTS or failed <= min(limit * documents, documents - 1):
            return
        _, rows = writer.read_table(self.output, unit.id, ["error"])
        first_error = rows["error"].drop_null()[0]
        raise RunError(
            f"{failed:,} of {documents:,} documents have failed ({share(failed, documents)}; "
            f"cluster.max_failed_share is {limit:g}), for example because: {first_error}\n"
            f"They are committed as failed. `raypd errors {self.output}` lists them. Remove the "
            "cause, then retry them with --retry-errors"
        )

    def _take(self, unit: Unit, result: UnitResult) -> None:
        """Count a unit that has ended, and show why it failed, if it did."""
        if result.error is None:
            documents = result.ok + result.failed
            self.done_units += 1
            if result.commit is not None:
                self.summaries.add(result.commit)
            self.done_documents += documents
            self.answered_documents += documents
            self.failed_documents += result.failed
            if result.failed:
                self._check_failed(unit)
            return
        reason = result.error.strip().rpartition("\n")[2]
        if result.unreadable and len(unit.parts) > 1 and unit.only is None:
            self._units_to_split.append(unit)
        elif result.unreadable:
            is_new_file = self.unreadable.add(unit, result.error)
            if is_new_file:
                self._display.say(f"left out: {reason}")
        else:
            self.unit_errors[unit.id] = result.error
            self._display.say(f"unit {unit.id} failed: {reason}")
            if len(self.unit_errors) > _MAX_FAILED_UNITS:
                raise RunError(
                    f"more than {_MAX_FAILED_UNITS} units failed; the last: {result.error}"
                )
