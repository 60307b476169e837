"""--retry-errors: process the failed documents of a run again.

The retry is a small run in <run>/retries/<number>/ over the failed documents, and is as robust as
any other run. Then every object that had failures is replaced by a conditional write with an object
that has the new rows, so that a reader sees every document exactly once. The summary of an object
contains the number of its last retry, so that an interrupted retry resumes. For a compacted run,
new table files are written instead, and they replace the old ones all together.
"""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.answering import Build
from raypd.billing import BudgetReached, added, book
from raypd.cluster import driver
from raypd.config import RunConfig
from raypd.dataset import (
    DigestSet,
    Plan,
    PlanWriter,
    compacted,
    compaction,
    digest,
    planner,
    stored,
    summaries,
    writer,
)
from raypd.errors import ConfigError, RunError
from raypd.run import (
    Commit,
    RunLease,
    Unit,
    UnitSummary,
    by_document,
    console,
    failure_reasons,
    held,
    layout,
    manifest,
    records,
)
from raypd.text import counted, usd

_THREADS = 16
# Attempts to replace an object that another process is also changing.
_ATTEMPTS = 10


@dataclass
class Retried:
    """The result of a retry. Counts are documents, unless they say units."""

    number: int
    tried: int = 0
    ok: int = 0
    failed: int = 0
    left_out: int = 0  # failures that the input caused, which are not retried
    waiting: int = 0  # units that were never committed; a plain run processes them

    def describe(self) -> str:
        """Describe the result in lines."""
        if self.tried:
            documents = counted(self.tried, "failed document")
            line = f"retried {documents}: {self.ok:,} ok now, {self.failed:,} failed again"
        elif self.left_out:
            line = "nothing to retry"
        else:
            line = "nothing to retry: no document has failed"
        lines = [line]
        if self.left_out:
            lines.append(
                f"{self.left_out:,} not retried: the input itself cannot be read "
                "(--all-errors retries them too)"
            )
        if self.waiting:
            units = "1 unit is" if self.waiting == 1 else f"{self.waiting:,} units are"
            lines.append(f"{units} not done yet")
        return "\n".join(lines)


@dataclass
class _UnitErrors:
    """What a retry does with a unit that has failed documents."""

    unit: Unit
    rows: list[int] = field(default_factory=list)  # the documents to retry
    left_out: int = 0  # failed documents that are not retried


def retry_errors(
    config: RunConfig,
    *,
    everything: bool = False,
    verbose: bool = False,
    build: Build | None = None,
) -> Retried:
    """Process failed documents again. The same call resumes an interrupted retry.

    Args:
        config: The configuration of the run.
        everything: Whether to retry also documents whose failure the input caused.
        verbose: See `driver.run_extract`.
        build: See `driver.run_extract`.

    Raises:
        ConfigError: If there is no run, or the record of a retry is damaged.
        RunError: If another session retries, or a unit of the run no longer exists. Also all
            errors of `driver.run_extract`.
    """
    storage.configure(config.storage)
    output = layout.output_folder(config)
    if not storage.exists(storage.join(output, layout.RUN)):
        raise ConfigError(
            f"output.path {output}: no run here, so nothing to retry; run it without --retry-errors"
        )
    manifest.check(config, output)
    with held(storage.join(output, layout.RETRIES), console.say) as lease:
        result = _resumed_or_planned(config, output, everything)
        if not result.tried:
            return result
        folder = _folder(output, result.number)
        plan = stored(folder)
        if plan is None:
            raise RunError(
                f"{folder}: its plan is missing; delete this folder and run the same command again"
            )
        _run_plan(config, output, folder, plan, verbose, build)
        if lease.lost is not None:
            raise RunError(f"{lease.lost}; run the same command again to resume")
        run_plan = planner.plan(config, output)
        with held(output, console.say, records_session=False) as run_lease:
            if compacted.table_of(output) is None:
                _replace_objects(result, output, folder, plan)
            else:
                _rewrite_table(result, config, folder, plan, run_plan, run_lease)
        _keep_bills(output, folder)
        records.write(storage.join(folder, layout.RETRIED), result)
    driver.finish(config, output, run_plan)
    return result


def _resumed_or_planned(config: RunConfig, output: str, everything: bool) -> Retried:
    """Return the record of an interrupted retry, or plan a new retry."""
    retries = storage.join(output, layout.RETRIES)
    numbers = [int(name) for name in storage.folders(retries) if name.isdigit()]
    number = max(numbers, default=0)
    if not number or storage.exists(storage.join(_folder(output, number), layout.RETRIED)):
        # The last retry was completed.
        number += 1
    try:
        return records.read(Retried, storage.join(_folder(output, number), layout.RETRY))
    except FileNotFoundError:
        return _plan(config, output, number, everything)
    except records.RecordError as error:
        raise ConfigError(
            f"{error}; delete this file, and the same command plans its retry again"
        ) from None


def _run_plan(
    config: RunConfig, output: str, folder: str, plan: Plan, verbose: bool, build: Build | None
) -> None:
    """Run the units of a retry into its folder, within what is left of the budget."""
    cost = config.cost
    spent = sum(bill.usd for bill in book.bills(output))
    if cost.budget_usd is not None:
        cost = cost.model_copy(update={"budget_usd": max(0.0, cost.budget_usd - spent)})
    changes: dict[str, Any] = {"path": folder, "partition": {}, "target_file_mb": None}
    retry_output = config.output.model_copy(update=changes)
    retry_config = config.model_copy(update={"output": retry_output, "cost": cost})
    try:
        driver.run_extract(retry_config, verbose=verbose, build=build, planned=plan)
    except BudgetReached as error:
        raise BudgetReached(
            f"{error}; all budgets here exclude {usd(spent)}, which the run has cost before"
        ) from None


def _replace_objects(result: Retried, output: str, folder: str, plan: Plan) -> None:
    """Put the new rows into the run's objects, and count them in the result."""
    # A unit whose input no longer exists was not committed.
    committed = writer.committed(folder)
    retried_ids = {unit.whole for unit in plan if unit.id in committed}
    paths = {unit: path for unit, path in writer.objects(output) if unit in retried_ids}

    def replace_object(unit: Unit) -> tuple[UnitSummary, Commit | None]:
        return _merge(output, paths.get(unit.whole), folder, unit, result.number)

    units = (unit for unit in plan if unit.id in committed)
    result.tried = 0
    summary_writer = summaries.SummaryWriter(output)
    for summary, commit in storage.in_threads(replace_object, units, _THREADS):
        result.tried += summary.documents
        result.ok += summary.ok
        result.failed += summary.failed
        if commit is not None:
            summary_writer.add(commit)
    summary_writer.flush()


def _rewrite_table(
    result: Retried,
    config: RunConfig,
    folder: str,
    plan: Plan,
    run_plan: Plan,
    lease: RunLease,
) -> None:
    """Put the new rows into new table files of a compacted run, and count them in the result."""
    output = lease.output
    committed = writer.committed(folder)
    # A unit of the run -> the unit that retried its failed documents.
    retried_units = {unit.whole: unit.id for unit in plan if unit.id in committed}

    def read_summary(unit_id: str) -> UnitSummary:
        return writer.read_summary(folder, unit_id)

    result.tried = 0
    for summary in storage.in_threads(read_summary, retried_units.values(), _THREADS):
        result.tried += summary.documents
        result.ok += summary.ok
        result.failed += summary.failed

    def is_pending(unit_id: str) -> bool:
        return writer.read_summary(output, unit_id).retries < result.number

    def new_rows(
        unit_id: str, summary: UnitSummary, rows: pa.Table
    ) -> tuple[UnitSummary, pa.Table]:
        retried, retried_rows = writer.read_table(folder, retried_units[unit_id])
        table = merged(rows, retried_rows)
        return _merged_summary(summary, retried, table, result.number), table

    pending = [unit_id for unit_id in retried_units if is_pending(unit_id)]
    if pending:
        replacement = compaction.NewRows(DigestSet(map(digest, pending)), new_rows)
        compaction.rewrite(config, output, run_plan, replacement, lease)
        return
    # An earlier session was interrupted after its table files became the committed data.
    table = compacted.table_of(output)
    if table is not None:
        compaction.settle(table)


def _keep_bills(output: str, folder: str) -> None:
    """Copy the sessions and bills of the retry into the run, which pays for them."""
    for part in (layout.SESSIONS, layout.LEDGER):
        for name in storage.names(storage.join(folder, part)):
            content = storage.read(storage.join(folder, part, name))
            storage.put_new(storage.join(output, part, name), content)


def _folder(output: str, number: int) -> str:
    return storage.join(output, layout.RETRIES, f"{number:04d}")


def _plan(config: RunConfig, output: str, number: int, everything: bool) -> Retried:
    """Plan a new retry.

    If there is something to retry, the plan is stored first and then retry.json, which makes the
    plan valid. The number is higher than that of any retry whose rows are in the run's objects,
    including retries without a record.
    """
    result = Retried(number)
    committed = writer.committed(output)
    failed: dict[str, str] = {}  # units with documents to retry -> paths
    for table in summaries.read(committed):
        result.number = max(result.number, pc.max(table["retries"]).as_py() + 1)
        columns = table.filter(pc.greater(table["failed"], 0)).select(
            ["unit", "name", "failed", "reasons", "retriable"]
        )
        for row in columns.to_pylist():
            if row["reasons"] is not None and not row["retriable"] and not everything:
                result.left_out += row["failed"]
            else:
                failed[row["unit"]] = summaries.path_of(output, row["name"])

    def unit_errors(unit: Unit) -> _UnitErrors:
        return _unit_errors(output, unit, failed[unit.id], everything)

    planned = PlanWriter()
    plan = planner.plan(config, output)
    # A file that was replaced is a different input, and its units are not those that failed.
    driver.documents_done(plan, committed, output)
    result.waiting = sum(unit.id not in committed for unit in plan)
    units = (unit for unit in plan if unit.id in failed)
    for errors in storage.in_threads(unit_errors, units, _THREADS):
        result.left_out += errors.left_out
        if errors.rows:
            result.tried += len(errors.rows)
            planned.add(errors.unit.subset(errors.rows))
    if result.tried:
        folder = _folder(output, result.number)
        planned.finish(0, "", 0, {}).keep(folder)
        records.write(storage.join(folder, layout.RETRY), result)
    return result


def _unit_errors(output: str, unit: Unit, path: str, everything: bool) -> _UnitErrors:
    """Find the failed documents of a unit."""
    unit_errors = _UnitErrors(unit)
    _, table = writer.read_table(output, unit.id, ["source", "row", "status", "error"], path)
    # Documents are numbered in the order of the unit.
    for index, rows in enumerate(by_document(table.to_pylist()).values()):
        errors = [row["error"] for row in rows if row["status"] != "ok"]
        if not errors:
            continue
        source = rows[0]["source"]
        hopeless = all(failure_reasons.of_input(source, error) for error in errors)
        if hopeless and not everything:
            unit_errors.left_out += 1
        else:
            unit_errors.rows.append(index)
    return unit_errors


def _merge(
    output: str, path: str | None, folder: str, unit: Unit, number: int
) -> tuple[UnitSummary, Commit | None]:
    """Put the rows of a retried unit into the object of the run.

    Args:
        output: The run.
        path: The object of the run; None if it does not exist.
        folder: The folder of the retry.
        unit: The retried unit, a part of a unit of the run.
        number: The number of the retry.

    Returns:
        The summary of the retried unit, and the commit; None if the rows were already there.
    """
    if path is None:
        raise RunError(
            f"{output}: unit {unit.whole} has disappeared since its retry began; run without "
            "--retry-errors first"
        )
    retried, new_rows = writer.read_table(folder, unit.id)
    for _ in range(_ATTEMPTS):
        # The version comes first: what is read after it is this version or a later one.
        version = storage.version(path)
        summary, old_rows = writer.read_table("", unit.whole, path=path)
        if summary.retries >= number:
            return retried, None
        table = merged(old_rows, new_rows)
        new_summary = _merged_summary(summary, retried, table, number)
        commit = writer.replace_rows(output, path, table, new_summary, version)
        if commit is not None:
            return retried, commit
        time.sleep(0.1)
    raise RunError(
        f"{path}: another process keeps changing this object; stop it and run the same command "
        "again to resume"
    )


def _merged_summary(
    summary: UnitSummary, retried: UnitSummary, table: pa.Table, number: int
) -> UnitSummary:
    """Add what a retry used to the summary of an object."""
    counts = dict(summary.counts)
    for name, count in retried.counts.items():
        counts[name] = counts.get(name, 0) + count
    return replace(
        writer.with_counts(summary, table),
        retries=number,
        counts=counts,
        seconds=round(summary.seconds + retried.seconds, 3),
        busy_seconds=round(summary.busy_seconds + retried.busy_seconds, 6),
        categories=added([*summary.categories.items(), *retried.categories.items()]),
    )


def merged(old: pa.Table, fresh: pa.Table) -> pa.Table:
    """Merge a unit's rows with those of a retry.

    The new rows of a document replace the old ones, unless more of them are errors. The attempts
    are added up.
    """
    retried_rows = by_document(fresh.to_pylist())
    rows: list[dict[str, Any]] = []
    for key, old_rows in by_document(old.to_pylist()).items():
        new_rows = retried_rows.get(key, [])
        attempts = max(row["attempts"] for row in old_rows)
        attempts += max((row["attempts"] for row in new_rows), default=0)
        chosen = old_rows
        if new_rows and _errors(new_rows) <= _errors(old_rows):
            chosen = new_rows
        rows += [{**row, "attempts": attempts} for row in chosen]
    return pa.Table.from_pylist(rows, old.schema.remove_metadata())


def _errors(rows: list[dict[str, Any]]) -> int:
    return sum(row["status"] != "ok" for row in rows)
