"""--retry-errors: a small run in <run>/retries/<number>/ over the failed documents, which survives
what a run survives. Then every object that had failures is replaced, whole and by a conditional
write, with one that has the new rows: a reader sees every document exactly once. Its summary says
so, so that a retry that was cut off goes on where it was.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from raypd import storage
from raypd.answering.components import Build
from raypd.billing import book
from raypd.billing.budget import BudgetReached
from raypd.billing.meter import added
from raypd.cluster import driver
from raypd.config import RunConfig
from raypd.dataset import PlanWriter, planner, stored, writer
from raypd.errors import ConfigError, RunError
from raypd.run import console, layout, manifest, records
from raypd.run.lease import held
from raypd.run.read import by_document
from raypd.run.unit import Unit, UnitSummary
from raypd.text import counted, usd
from raypd.verify import dead_letters

_THREADS = 8
_ATTEMPTS = 10  # at replacing an object that others change, too


@dataclass
class Retried:
    """What a retry brought. Counts are documents."""

    number: int
    tried: int = 0
    ok: int = 0
    failed: int = 0
    left_out: int = 0  # failures of the input itself: not tried
    waiting: int = 0  # units that were never committed; a plain run does them

    def describe(self) -> str:
        lines = [
            (
                f"retried {counted(self.tried, 'failed document')}: {self.ok:,} ok now, "
                f"{self.failed:,} failed again"
            )
        ]
        if not self.tried:
            lines = [
                "nothing to retry" if self.left_out else "nothing to retry: no document has failed"
            ]
        if self.left_out:
            lines.append(
                f"{self.left_out:,} left as they are: they cannot be read as they stand in "
                "the input (`raypd errors` "
                "lists them; --all-errors tries them too)"
            )
        if self.waiting:
            units = "1 unit is" if self.waiting == 1 else f"{self.waiting:,} units are"
            lines.append(
                f"{units} not done yet; the command without --retry-errors does what is left"
            )
        return "\n".join(lines)


def retry_errors(
    config: RunConfig,
    *,
    everything: bool = False,
    verbose: bool = False,
    build: Build | None = None,
) -> Retried:
    """Tries failed documents again; the same call goes on where one was cut off. everything: also
    the input's own. verbose, build: as in `driver.run_extract`, and its errors are raised;
    ConfigError: no run, or a damaged record of a retry; RunError: another session retries, or a
    unit of the run is gone.
    """
    storage.configure(config.storage)
    output = layout.output_folder(config)
    if not storage.exists(storage.join(output, layout.RUN)):
        raise ConfigError(
            f"output.path {output}: no run here, so nothing to retry; run it without --retry-errors"
        )
    manifest.check(config, output)
    retries = storage.join(output, layout.RETRIES)
    with held(retries, console.say) as lease:
        number = max((int(name) for name in storage.folders(retries) if name.isdigit()), default=0)
        if not number or storage.exists(storage.join(_folder(output, number), layout.RETRIED)):
            number += 1  # else the one before was cut off
        folder = _folder(output, number)
        try:
            result = records.read(Retried, storage.join(folder, layout.RETRY))
        except FileNotFoundError:
            result = _plan(config, output, number, everything)
            folder = _folder(output, result.number)
        except records.RecordError as error:
            raise ConfigError(
                f"{error}; delete this file, and the same command plans its retry again"
            ) from None
        if not result.tried:
            return result
        plan = stored(folder)
        if plan is None:
            raise RunError(
                f"{folder}: its plan is gone; delete this folder and run the same command again"
            )
        cost = config.cost
        spent = sum(bill.usd for bill in book.bills(output))
        if cost.budget_usd is not None:  # which has paid the run
            cost = cost.model_copy(update={"budget_usd": max(0.0, cost.budget_usd - spent)})
        inner_output = config.output.model_copy(update={"path": folder, "partition": {}})
        inner = config.model_copy(update={"output": inner_output, "cost": cost})
        try:
            driver.run_extract(inner, verbose=verbose, build=build, planned=plan)
        except BudgetReached as reached:
            raise BudgetReached(
                f"{reached}; to all budgets here add {usd(spent)}, which the run has cost"
            ) from None
        if lease.lost is not None:
            raise RunError(f"{lease.lost}; the same command goes on")
        paths = dict(writer.objects(output))
        number = result.number
        result.tried = 0
        there = writer.committed(folder)  # without those whose input is gone
        units = (unit for unit in plan if unit.id in there)
        for done in storage.in_threads(
            lambda u: _merge(output, paths.get(u.whole), folder, u, number), units, _THREADS
        ):
            result.tried += done.documents
            result.ok += done.ok
            result.failed += done.failed
        # What the retry took in time and money is the run's: its sessions and bills become those of
        # the run.
        for part in (layout.SESSIONS, layout.LEDGER):
            for name in storage.names(storage.join(folder, part)):
                storage.put_new(
                    storage.join(output, part, name), storage.read(storage.join(folder, part, name))
                )
        records.write(storage.join(folder, layout.RETRIED), result)
    driver.finish(config, output, planner.plan(config, output))
    return result


def _folder(output: str, number: int) -> str:
    return storage.join(output, layout.RETRIES, f"{number:04d}")


def _plan(config: RunConfig, output: str, number: int, everything: bool) -> Retried:
    """Stores a new retry's plan, if there is something to try, and then retry.json, which makes it
    count. Its number is above that of every retry whose rows are in the run's objects, even of one
    without a record.
    """
    result = Retried(number)
    committed = dict(writer.objects(output))

    def look(unit: Unit) -> tuple[Unit, list[int] | None, int, int]:
        """The unit, its documents to try (None: it is not committed), how many are not, and its
        last retry's number.
        """
        path = committed.get(unit.id)
        if path is None:
            return unit, None, 0, 0
        summary = writer.read_summary(output, unit.id, path)
        if not summary.failed:
            return unit, [], 0, summary.retries
        _, table = writer.read_table(output, unit.id, ["source", "row", "status", "error"], path)
        documents = by_document(table.to_pylist())  # in the unit's order
        rows = []
        left_out = 0
        for number, answers in enumerate(documents.values()):
            errors = [row["error"] for row in answers if row["status"] != "ok"]
            if (
                errors
                and not everything
                and all(dead_letters.of_input(answers[0]["source"], e) for e in errors)
            ):
                left_out += 1
            elif errors:
                rows.append(number)
        return unit, rows, left_out, summary.retries

    planned = PlanWriter()
    for unit, rows, left_out, retries in storage.in_threads(
        look, planner.plan(config, output), _THREADS
    ):
        result.left_out += left_out
        result.number = max(result.number, retries + 1)
        if rows is None:
            result.waiting += 1
        elif rows:
            result.tried += len(rows)
            planned.add(unit.subset(rows))
    if result.tried:
        folder = _folder(output, result.number)
        planned.finish(0, "", 0, {}).keep(folder)
        records.write(storage.join(folder, layout.RETRY), result)
    return result


def _merge(output: str, path: str | None, folder: str, unit: Unit, number: int) -> UnitSummary:
    """Replaces one object of the run, at `path`; what the retry's own says."""
    if path is None:
        raise RunError(
            f"{output}: unit {unit.whole} is gone since its retry began; run without "
            "--retry-errors first"
        )
    done, fresh = writer.read_table(folder, unit.id)
    for _ in range(_ATTEMPTS):
        # First: what is read after it is this version or a younger one.
        version = storage.version(path)
        summary, old = writer.read_table("", unit.whole, path=path)
        if summary.retries >= number:
            return done
        table = merged(old, fresh)
        ok, failed = writer.count_documents(table)
        counts = {name: summary.counts.get(name, 0) + count for name, count in done.counts.items()}
        new = replace(
            summary, ok=ok, failed=failed, retries=number, counts={**summary.counts, **counts}
        )
        new.truncated = writer.count_truncated(table)
        new.seconds = round(summary.seconds + done.seconds, 3)
        new.busy_seconds = round(summary.busy_seconds + done.busy_seconds, 3)
        new.categories = added([*summary.categories.items(), *done.categories.items()])
        if writer.replace_rows(path, table, new, version):
            return done
        time.sleep(0.1)
    raise RunError(f"{path}: is changed by somebody else all the time; the same command goes on")


def merged(old: pa.Table, fresh: pa.Table) -> pa.Table:
    """A unit's old rows, a document's fresh ones in place of its old unless more are errors;
    attempts are added up.
    """
    again = by_document(fresh.to_pylist())
    rows: list[dict[str, Any]] = []
    for place, was in by_document(old.to_pylist()).items():
        now = again.get(place, [])
        attempts = max(row["attempts"] for row in was) + max(
            (row["attempts"] for row in now), default=0
        )
        errors, before = (sum(row["status"] != "ok" for row in answers) for answers in (now, was))
        rows += [
            {**row, "attempts": attempts} for row in (now if now and errors <= before else was)
        ]
    return pa.Table.from_pylist(rows, old.schema.remove_metadata())
