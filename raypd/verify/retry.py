"""--retry-errors: a second chance for the failed documents of a run, whose new rows take the place of the old ones.

A retry is a small run of its own in <run>/retries/<number>/: its units are the failed documents of the run's units, and
workers answer and commit them as ever, so it survives what a run survives. Then every object that had failures is
replaced, whole and by a conditional write, with one in which the new rows stand where the error rows stood. A reader
sees the one or the other, so every document exactly once at each instant; an object that was done says so in its
summary, so that a retry that was cut off goes on where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raypd import storage
from raypd.cluster import driver
from raypd.config import OutputConfig, RunConfig
from raypd.dataset import plan as plans
from raypd.dataset import planner as units
from raypd.dataset import writer as commit
from raypd.dataset.plan import Plan, Writer
from raypd.errors import ConfigError, RunError
from raypd.run import layout, manifest
from raypd.run.lease import RunLease, held
from raypd.run.text import counted
from raypd.run.unit import Unit
from raypd.storage.threads import in_threads
from raypd.verify import dead_letters

if TYPE_CHECKING:
    from raypd.cluster.components import Build

_THREADS = 8
_ATTEMPTS = 10  # at replacing an object that others change, too


@dataclass
class Retried:
    """What a retry brought. Counts are documents.

    left_out: failures of the input itself, which were not tried. waiting: units of the run that were never committed;
    a plain run does them.
    """

    number: int
    tried: int = 0
    ok: int = 0
    failed: int = 0
    left_out: int = 0
    waiting: int = 0

    def describe(self) -> str:
        """In words, for the user."""
        lines = [f"retried {counted(self.tried, 'failed document')}: {self.ok:,} ok now, {self.failed:,} failed again"]
        if not self.tried:
            lines = ["nothing to retry" if self.left_out else "nothing to retry: no document has failed"]
        if self.left_out:
            lines.append(
                f"{self.left_out:,} left as they are: they cannot be read as they stand in the input (`raypd errors` "
                "lists them; --all-errors tries them too)"
            )
        if self.waiting:
            units = "1 unit is" if self.waiting == 1 else f"{self.waiting:,} units are"
            lines.append(f"{units} not done yet; the command without --retry-errors does what is left")
        return "\n".join(lines)


def retry_errors(
    config: RunConfig,
    *,
    everything: bool = False,
    verbose: bool = False,
    build: Build | None = None,
) -> Retried:
    """Tries the failed documents of a run again. everything: also those that the input itself makes fail.

    Raises what `driver.run_extract` raises, and RunError when another session retries. The same call goes on where
    one that was cut off ended.
    """
    storage.configure(config.storage)
    output = driver.output_folder(config)
    if not storage.exists(storage.join(output, layout.RUN)):
        raise ConfigError(f"output.path {output}: no run here, so nothing to retry; run it without --retry-errors")
    manifest.check(config, output)
    with held(storage.join(output, layout.RETRIES), driver.say) as own:
        result = _retry(config, output, own, everything, verbose, build)
    if result.tried:
        driver.finish(config, output, units.plan(config, output))
    return result


def _retry(
    config: RunConfig,
    output: str,
    own: RunLease,
    everything: bool,
    verbose: bool,
    build: Build | None,
) -> Retried:
    number, began = _number(output)
    folder = _folder(output, number)
    if began:
        result = Retried(**json.loads(storage.read(storage.join(folder, "retry.json"))))
    else:
        result = _plan(config, output, folder, number, everything)
        if not result.tried:
            return result
    plan = plans.stored(folder)
    if plan is None:
        raise RunError(f"{folder}: its plan is gone; delete this folder and run the same command again")
    inner = config.model_copy(update={"output": OutputConfig(path=folder)})
    driver.run_extract(inner, verbose=verbose, build=build, planned=plan)
    if own.lost is not None:
        raise RunError(f"{own.lost}; the same command goes on")
    result = _merge_all(output, folder, plan, result)
    _adopt(output, folder)
    storage.put(storage.join(folder, "done.json"), json.dumps(asdict(result)).encode())
    return result


def _folder(output: str, number: int) -> str:
    return storage.join(output, layout.RETRIES, f"{number:04d}")


def _number(output: str) -> tuple[int, bool]:
    """(number, whether it was begun): the retry that was cut off, or the next one."""
    numbers = [int(name) for name in storage.folders(storage.join(output, layout.RETRIES)) if name.isdigit()]
    last = max(numbers, default=0)
    if last and not storage.exists(storage.join(_folder(output, last), "done.json")):
        return last, storage.exists(storage.join(_folder(output, last), "retry.json"))
    return last + 1, False


# ----------------------------------------------------------------------------------------------------------------- plan


def _plan(config: RunConfig, output: str, folder: str, number: int, everything: bool) -> Retried:
    """Stores the plan of a new retry, if there is something to try; retry.json is its last word."""
    result = Retried(number)
    committed = dict(commit.objects(output))

    def look(unit: Unit) -> tuple[Unit | None, int, int] | None:
        path = committed.get(unit.id)
        if path is None:
            return None
        if not commit.read_summary(output, unit.id, path).failed:
            return None, 0, 0
        _, table = commit.read_table(output, unit.id, ["source", "row", "status", "error"], path)
        rows, left_out = _failed_rows(table, everything)
        return (unit.subset(rows) if rows else None), len(rows), left_out

    writer = Writer()
    for found in in_threads(look, units.plan(config, output), _THREADS):
        if found is None:
            result.waiting += 1
            continue
        unit, tried, left_out = found
        result.tried += tried
        result.left_out += left_out
        if unit is not None:
            writer.add(unit)
    if result.tried:
        writer.finish(0, "", 0, {}).keep(folder)
        storage.put(storage.join(folder, "retry.json"), json.dumps(asdict(result)).encode())
    return result


def _failed_rows(table: pa.Table, everything: bool) -> tuple[list[int], int]:
    """(rows of the unit to try, documents left out). A unit's documents stand in its object in their order."""
    rows: list[int] = []
    left_out = 0
    for row, (source, _, indices) in enumerate(_documents(table)):
        errors = [table["error"][i].as_py() for i in indices if table["status"][i].as_py() != "ok"]
        if errors and not everything and all(dead_letters.of_input(source, error) for error in errors):
            left_out += 1
        elif errors:
            rows.append(row)
    return rows, left_out


def _documents(table: pa.Table) -> list[tuple[str, int, list[int]]]:
    """(source, row, indices of its rows) of every document, in order."""
    found: dict[tuple[str, int], list[int]] = {}
    for i, place in enumerate(zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True)):
        found.setdefault(place, []).append(i)
    return [(source, row, indices) for (source, row), indices in found.items()]


# ---------------------------------------------------------------------------------------------------------------- merge


def _merge_all(output: str, folder: str, plan: Plan, before: Retried) -> Retried:
    """Puts the retry's rows into the run's objects, and counts."""
    result = replace(before, tried=0, ok=0, failed=0)
    paths = dict(commit.objects(output))

    def merge(unit: Unit) -> tuple[int, int]:
        if unit.whole not in paths:
            raise RunError(
                f"{output}: unit {unit.whole} is gone since its retry began; run without --retry-errors first"
            )
        return _merge(paths[unit.whole], folder, unit, before.number)

    for ok, failed in in_threads(merge, plan, _THREADS):
        result.tried += ok + failed
        result.ok += ok
        result.failed += failed
    return result


def _merge(path: str, folder: str, unit: Unit, number: int) -> tuple[int, int]:
    """Replaces one object; (documents that are ok now, that failed again)."""
    done, fresh = commit.read_table(folder, unit.id)
    for _ in range(_ATTEMPTS):
        version = storage.version(path)  # first: what is read after it is this version or a younger one
        summary, old = commit.read_table("", unit.whole, path=path)
        if summary.retries >= number:
            break
        table = merged(old, fresh)
        ok, failed = commit.count_documents(table)
        counts = {name: summary.counts.get(name, 0) + count for name, count in done.counts.items()}
        new = replace(summary, ok=ok, failed=failed, retries=number, counts={**summary.counts, **counts})
        new.seconds = round(summary.seconds + done.seconds, 3)
        if commit.replace_rows(path, table, new, version):
            break
        time.sleep(0.1)
    else:
        raise RunError(f"{path}: is changed by somebody else all the time; the same command goes on")
    return done.ok, done.failed


def merged(old: pa.Table, fresh: pa.Table) -> pa.Table:
    """The old rows with the fresh ones in place of those of the same documents, unless these have more errors.

    attempts: of such a document, those of old and fresh together.
    """
    schema = old.schema.remove_metadata()
    both = pa.concat_tables([old.cast(schema), fresh.select(schema.names).cast(schema)])
    new = {(source, row): indices for source, row, indices in _documents(fresh)}
    status, attempts = both["status"].to_pylist(), both["attempts"].to_pylist()
    taken: list[int] = []
    counted: list[int] = []
    for source, row, indices in _documents(old):
        ours = [i + len(old) for i in new.get((source, row), [])]
        best = ours if ours and _errors(status, ours) <= _errors(status, indices) else indices
        taken += best
        counted += [max(attempts[i] for i in indices) + max((attempts[i] for i in ours), default=0)] * len(best)
    table = both.take(pa.array(taken, pa.int64()))
    at = schema.get_field_index("attempts")
    return table.set_column(at, schema.field(at), pa.array(counted, schema.field(at).type))


def _errors(status: Sequence[Any], indices: Sequence[int]) -> int:
    return sum(status[i] != "ok" for i in indices)


def _adopt(output: str, folder: str) -> None:
    """What the retry took in time and money is the run's: its sessions and bills become those of the run."""
    for part in (layout.SESSIONS, layout.LEDGER):
        for name in storage.names(storage.join(folder, part)):
            storage.put_new(storage.join(output, part, name), storage.read(storage.join(folder, part, name)))
