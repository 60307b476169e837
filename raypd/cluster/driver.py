"""A run: plan, skip what is committed, stream the rest through decode workers, add up what is
there.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raypd import storage
from raypd.answering import components, progress
from raypd.answering.check import check_model
from raypd.billing import book
from raypd.billing.budget import BudgetReached
from raypd.cluster import ray_session
from raypd.config import RunConfig
from raypd.dataset import planner, writer
from raypd.dataset.plan import Plan, take_apart
from raypd.errors import ConfigError, RunError
from raypd.run import layout, manifest, records
from raypd.run.console import Interrupted, say, signals
from raypd.run.lease import RunLease, held
from raypd.run.left_out import describe
from raypd.run.text import counted, share
from raypd.run.unit import Unit
from raypd.run.unreadable import Unreadable
from raypd.tasks.columns import columns_of
from raypd.tasks.prompting import check_template

if TYPE_CHECKING:  # they bring Ray, whose second of import is for runs that have something to do
    from raypd.cluster.accounts import Accounts
    from raypd.cluster.pool_executor import PoolExecutor
    from raypd.cluster.ray_data_executor import RayDataExecutor

    Executor = PoolExecutor | RayDataExecutor

_CHANGED = (
    "a file of the input, input.path, cluster.unit_documents or cluster.unit_bytes has changed"
)
_MOST_LOST_UNITS = 10  # more of these, and something is wrong with more than a document
_JUDGED_AFTER = 100  # documents of a session, after which cluster.max_failed_share is looked at


def run_extract(
    config: RunConfig,
    *,
    verbose: bool = False,
    build: components.Build | None = None,
    planned: Plan | None = None,
) -> records.Manifest:
    """Runs or resumes until every unit is committed, and writes the manifest.

    verbose: let Ray print. build: makes a worker's engine and task; None: by the configuration.
    planned: None: all. Raises ConfigError, InputError, ModelError before anything runs, RunError
    when it cannot go on, Interrupted at SIGINT or SIGTERM: then what is committed is whole, and the
    same call resumes.
    """
    storage.configure(config.storage)
    check_template(config)
    output = layout.output_folder(config)
    if output != storage.absolute(config.output.path):
        say(
            "output.path is relative and this job runs in a copy of its folder: writing to "
            f"{output}"
        )
    manifest.check(config, output)
    writer.output_schema(columns_of(config), config.output.partition)
    planned = planned or planner.plan(config, output)
    if planned.left_out:
        say(describe(planned.left_out))
    done = writer.committed(output)
    _check_known(planned, done, output)
    if len(done) == planned.units:
        return finish(config, output, planned)
    if build is None:
        build = components.build
        check_model(config, machine=ray_session.runs_here(config.cluster))
    manifest.claim(config, output)
    with signals(), held(output, say) as lease:
        if manifest.claim(config, output, held=True):
            say(
                f"{output} was of another configuration, which has committed nothing: it is "
                "this run's now"
            )
        done = writer.committed(output)  # another session may have gone on while this one looked
        _check_known(planned, done, output)
        storage.clean_temporary(writer.units_folder(output))
        run = DriverSession(config, output, planned, done, lease, verbose, build)
        try:
            planned.keep(output)
            if len(done) < planned.units:
                run.stream()
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted: {run.state()}; the same command resumes") from None
    return finish(config, output, planned, run.unreadable)


def finish(
    config: RunConfig, output: str, planned: Plan, unreadable: Unreadable | None = None
) -> records.Manifest:
    """Writes the manifest. unreadable: units that the session could not read, beside those that the
    plan knows of. Raises RunError: an object is damaged or of another configuration; units could
    not be read and input.on_damaged is fail; or nothing at all could be read, which is more than
    damage (a right taken away, an empty mount).
    """
    unreadable = unreadable or Unreadable()
    for unit in planned.damaged():
        unreadable.add(unit, unit.damaged or "")
    units = writer.summaries(output)
    for done in units:
        if done.fingerprint != config.fingerprint():
            raise RunError(
                f"{output}: unit {done.unit} is of another configuration, {done.fingerprint}"
            )
    result = manifest.make(
        config,
        output,
        planned.units,
        units,
        unreadable,
        book.of_run(output, units),
        planned.left_out,
    )
    path = storage.join(output, layout.MANIFEST)
    records.write(path, result)
    if unreadable.units and not result.documents:
        raise RunError(
            f"nothing could be read of the input, {unreadable.units} units of "
            f"it:\n{unreadable.shown()}"
            f"{path} lists them. Such a run does not end well, whatever input.on_damaged "
            "says; the same command tries "
            "them again"
        )
    if unreadable.units and config.input.on_damaged == "fail":
        shown = (
            f"{unreadable.shown()}{path} lists them. "
            f"{unreadable.advice({unit.source for unit in units})}"
        )
        raise RunError(
            f"{unreadable.units} units of the input cannot be read; all that can is done:\n{shown}"
        )
    return result


def _check_known(planned: Plan, done: set[str], output: str) -> None:
    """A committed unit that this plan does not have would leave its documents in the output
    twice.
    """
    foreign = sorted(done.difference(unit.id for unit in planned))
    if foreign:
        raise ConfigError(
            f"output.path {output}: holds {len(foreign)} units that this run would not "
            "make (for instance "
            f"{foreign[0]}): {planned.changes or _CHANGED}. Documents would stand in the "
            "output twice; give a new "
            "output.path, or go back to the input as it was"
        )


@dataclass
class DriverSession:
    config: RunConfig
    output: str
    planned: Plan
    done: set[str]  # ids of the units that were committed before
    lease: RunLease
    verbose: bool
    build: components.Build
    answered_documents: int = 0  # of this session
    failed_documents: int = 0  # of these
    unit_errors: dict[str, str] = field(default_factory=dict)
    unreadable: Unreadable = field(default_factory=Unreadable)

    def __post_init__(self) -> None:
        self.units, self.done_units = self.planned.units, len(self.done)
        self.done_documents = sum(unit.expected for unit in self.planned if unit.id in self.done)
        self._apart: list[Unit] = []  # of several objects, one of which cannot be read
        self._display = progress.RunDisplay(
            self.planned.documents, self.done_documents, self.planned.exact
        )
        self._executor: Executor | None = None
        self._accounts: Accounts | None = None

    def state(self) -> str:
        return f"{self.done_units} of {counted(self.units, 'unit')} committed"

    def stream(self) -> None:
        """Runs units until none is left.

        Raises RunError when some could not be done, or too much goes wrong.
        """
        with ray_session.connected(self.config.cluster, self.verbose) as mine:
            try:
                with self._display:
                    self._stream()
            except BudgetReached:
                raise
            except RunError as error:
                raise self._error(str(error)) from None
            finally:
                if self._accounts is not None:
                    self._accounts.close()
                if not mine and self._executor is not None:
                    self._executor.close()
        if self.unit_errors:
            unit, reason = next(iter(self.unit_errors.items()))
            raise self._error(
                f"{len(self.unit_errors)} units could not be finished, {unit} because: "
                f"{reason.strip()}"
            )

    def _stream(self) -> None:
        from raypd.cluster.accounts import Accounts
        from raypd.cluster.worker import WorkerSpec

        config = self.config
        planned = self.planned
        lease = self.lease
        say = self._display.say
        ray_session.silence_ray_logs(say, self.verbose)
        worker = ray_session.worker_resources(config)
        accounts = Accounts(config, self.output, lease, worker, planned, self.done_documents, say)
        self._accounts = accounts
        spec = WorkerSpec(
            config, self.output, lease.id, worker.threads, self.build, accounts.ledger, worker.gpus
        )
        executor: Executor
        if config.cluster.executor == "ray_data":
            from raypd.cluster.ray_data_executor import RayDataExecutor

            executor = RayDataExecutor(spec, worker, config.cluster, say)
        else:
            from raypd.cluster.pool_executor import PoolExecutor

            executor = PoolExecutor(spec, worker, config.cluster, say)
        self._executor = executor
        executor.admit = accounts.admit
        if accounts.deadline is not None:  # how many it takes is known after the first unit
            executor.wanted = max(1, config.cluster.min_workers)
        self._run(executor, accounts, planned, self.units - self.done_units)
        if self._apart and not accounts.held:
            singles = take_apart(self.output, planned, self._apart, config.fingerprint())
            self.units = planned.units
            self._run(executor, accounts, singles, len(singles))
        self._update()
        if accounts.held:
            raise accounts.reached()

    def _run(
        self, executor: "Executor", accounts: "Accounts", units: Iterable[Unit], count: int
    ) -> None:
        from raypd.cluster.in_flight import Tick

        ended = 0
        with contextlib.closing(executor.run(units, self.done, count)) as events:
            for event in events:
                if self.lease.lost is not None:
                    raise RunError(self.lease.lost)
                if isinstance(event, Tick):
                    if ended < count:  # else nothing more is to be paid
                        executor.wanted = accounts.look(event.workers) or executor.wanted
                        executor.closing = accounts.held
                    if event.workers:
                        self._display.begin()
                    self._update(event.answered, event.failed)
                else:
                    ended += 1
                    accounts.ended(
                        event.unit,
                        event.result.ok + event.result.failed if event.result.done else None,
                    )
                    self._take(event.unit, event.result)
        if ended < count and not accounts.held:
            raise self._error(
                "not all units have ended, and none is at work; this is a fault of raypd"
            )

    def _update(self, answered: int = 0, failed: int = 0) -> None:
        # Lines cut by bytes: units are of about as many.
        if not self.planned.exact and self.done_units:
            self._display.total = round(self.done_documents * self.units / self.done_units)
            self._display.exact = self.done_units == self.units
        self._display.update(self.done_documents + answered, self.failed_documents + failed)

    def _error(self, reason: str) -> RunError:
        return RunError(f"{reason}\n{self.state()}; the same command resumes")

    def _check_failed(self, unit: Unit) -> None:
        """Raises RunError when too many documents have failed for the run to be worth its money."""
        failed = self.failed_documents
        documents = self.answered_documents
        limit = self.config.cluster.max_failed_share
        if documents < _JUDGED_AFTER or failed <= min(limit * documents, documents - 1):
            return
        errors = writer.read_table(self.output, unit.id, ["error"])[1]["error"].drop_null()
        raise RunError(
            f"{failed:,} of {documents:,} documents have failed "
            f"({share(failed, documents)}; cluster.max_failed_share "
            f"is {limit:g}), one because: {errors[0]}\nThey are committed as failed: "
            f"`raypd errors {self.output}` lists"
            " them, and once the cause is gone --retry-errors tries them again"
        )

    def _take(self, unit: Unit, result: records.UnitResult) -> None:
        if result.error is None:
            self.done_units += 1
            self.done_documents += result.ok + result.failed
            self.answered_documents += result.ok + result.failed
            self.failed_documents += result.failed
            if result.failed:
                self._check_failed(unit)
            return
        reason = result.error.strip().rpartition("\n")[2]
        if result.unreadable and len(unit.parts) > 1 and unit.only is None:
            self._apart.append(unit)
        elif result.unreadable:
            if self.unreadable.add(unit, result.error):  # once a file
                self._display.say(f"left out: {reason}")
        else:
            self.unit_errors[unit.id] = result.error
            self._display.say(f"unit {unit.id} failed: {reason}")
            if len(self.unit_errors) > _MOST_LOST_UNITS:
                raise RunError(
                    f"more than {_MOST_LOST_UNITS} units failed; the last: {result.error}"
                )
