"""`raypd verify` of a nightly folder: the table against the input of now, document by document."""

from __future__ import annotations

import pyarrow as pa

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset import planner
from raypd.dataset.reader import read_unit
from raypd.errors import Damaged, InputError
from raypd.nightly import changes
from raypd.run import layout
from raypd.run.unit import Unit
from raypd.storage.threads import in_threads
from raypd.verify.scratch import Scratch
from raypd.verify.table_object import read_object
from raypd.verify.verification import EXAMPLES, Finding, Verification

_INPUT = pa.schema([("id", pa.string()), ("source", pa.string()), ("row", pa.int64())])
_DAMAGED = pa.schema([("source", pa.string())])
_OUTPUT = pa.schema(
    [("id", pa.string()), ("source", pa.string()), ("row", pa.int64()), ("ok", pa.bool_()), ("object", pa.string())]
)


def verify_table(root: str, config: RunConfig, threads: int = 8) -> Verification:
    """Compares the table of the last good night with the input: each id once, from the last document that has it.

    Ids of the table that the input does not have are foreign, unless nightly.removed is keep or they are of an object
    that cannot be read now. Changes nothing.
    """
    result = Verification(root, config.fingerprint(), damaged_allowed=config.input.on_damaged == "skip")
    files = storage.read(storage.join(root, layout.CURRENT, "files.txt")).decode().splitlines()
    result.objects = len(files)
    with Scratch() as scratch:
        _read_input(result, scratch, config, threads)
        _read_table(result, scratch, files, threads)
        _compare(result, scratch, config)
    return result


def _read_input(result: Verification, scratch: Scratch, config: RunConfig, threads: int) -> None:
    scratch.create("input", _INPUT)
    scratch.create("damaged", _DAMAGED)

    def read(unit: Unit) -> list[tuple[Unit, str]]:
        """Takes up a unit; what of it cannot be read, and why."""
        try:
            documents = read_unit(unit, config)
        except InputError as error:
            if len(unit.parts) == 1:
                return [(unit, str(error))]
            return [bad for _, single in changes.placed([unit], config, {unit.id}) for bad in read(single)]
        columns = [
            [document.id for document in documents],
            [document.source for document in documents],
            [document.place for document in documents],
        ]
        scratch.add("input", pa.table(columns, schema=_INPUT))
        return []

    def leave_out(unit: Unit, reason: str) -> None:
        result.damaged_input.add(0, 1, [reason])
        scratch.add("damaged", pa.table([[unit.name]], schema=_DAMAGED))

    plan = planner.plan(config)
    for unreadable in in_threads(read, plan, threads):
        result.units += 1
        for unit, reason in unreadable:
            leave_out(unit, reason)
    for unit in plan.damaged():
        leave_out(unit, str(unit.damaged))
    scratch.close("input")
    scratch.close("damaged")


def _read_table(result: Verification, scratch: Scratch, files: list[str], threads: int) -> None:
    scratch.create("output", _OUTPUT)

    def read(path: str) -> str | None:
        try:
            rows = read_object(path)
        except Damaged as error:
            return str(error)
        ok = [status == "ok" for status in rows["status"].to_pylist()]
        columns = [*(rows[name] for name in ("id", "source", "row")), pa.array(ok), pa.array([path] * len(rows))]
        scratch.add("output", pa.table(columns, names=_OUTPUT.names).cast(_OUTPUT))
        return None

    for error in in_threads(read, files, threads):
        if error is not None:
            result.damaged.add(0, 1, [error])
    scratch.close("output")


def _compare(result: Verification, scratch: Scratch, config: RunConfig) -> None:
    scratch.run("""
        CREATE TABLE wanted AS SELECT id, source, row FROM (SELECT *, row_number()
            OVER (PARTITION BY id ORDER BY source DESC, row DESC) AS place FROM input) WHERE place = 1""")
    scratch.run("""
        CREATE TABLE found AS SELECT id, source, row, bool_and(ok) AS ok, any_value(object) AS object,
            count(DISTINCT object) AS objects FROM output GROUP BY id, source, row""")
    (result.documents,) = map(int, scratch.one("SELECT count(*) FROM wanted"))
    result.found, result.ok = map(int, scratch.one("SELECT count(*), count(*) FILTER (ok) FROM found"))
    result.failed = result.found - result.ok
    old = "" if config.nightly.removed == "keep" else " OR source NOT IN (SELECT source FROM damaged)"
    queries = {
        "missing": "SELECT id, source, row, NULL AS object FROM wanted ANTI JOIN found USING (id, source, row)",
        "foreign": f"SELECT * FROM (SELECT * FROM found ANTI JOIN wanted USING (id, source, row)) "
        f"WHERE id IN (SELECT id FROM input){old}",
        "doubled": "SELECT id, min(source) AS source, min(row) AS row, string_agg(object, ' and ') AS object "
        "FROM found GROUP BY id HAVING count(*) > 1 OR max(objects) > 1",
    }
    for name, query in queries.items():
        (count,) = scratch.one(f"SELECT count(*) FROM ({query})")
        shown = scratch.rows(f"SELECT * FROM ({query}) ORDER BY source, row LIMIT {EXAMPLES}")
        finding: Finding = getattr(result, name)
        words = [
            f"{r['id']} ({r['source']}, at {r['row']})" + (f" in {r['object']}" if r["object"] else "") for r in shown
        ]
        finding.add(int(count), 0, words)
