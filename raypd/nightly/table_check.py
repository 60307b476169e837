"""`raypd verify` of a nightly folder: the table against the input of now, document by document."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset import planner
from raypd.dataset.reader import read_unit
from raypd.errors import Damaged
from raypd.nightly import changes
from raypd.run import layout
from raypd.run.unit import Unit
from raypd.storage.threads import in_threads
from raypd.verify.scratch import Scratch
from raypd.verify.table_object import read_object
from raypd.verify.verification import DOCUMENT, Verification

_OUTPUT = pa.schema([*DOCUMENT, pa.field("ok", pa.bool_()), pa.field("object", pa.string())])


def verify_table(root: str, config: RunConfig, threads: int = 8) -> Verification:
    """Compares the table of the last good night with the input: each id once, from the last document that has it.

    Ids of the table that the input does not have are foreign, unless nightly.removed is keep or they are of an object
    that cannot be read now. Changes nothing.

    Args:
        root: the nightly folder.
        config: of the nights; its `input` says where the input lies now.
        threads: objects that are read at the same time.
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
    scratch.create("input", DOCUMENT)
    scratch.create("damaged", changes.DAMAGED)

    def take(ordinal: int, unit: Unit) -> None:
        documents = read_unit(unit, config)
        columns = [[d.id for d in documents], [d.source for d in documents], [d.place for d in documents]]
        scratch.add("input", columns)

    plan = planner.plan(config)
    result.units = plan.units
    for unit, reason in changes.unreadable(plan, config, take, set(), threads):
        result.damaged_input.add(0, 1, [reason])
        scratch.add("damaged", [[unit.name]])
    scratch.finish("input")
    scratch.finish("damaged")


def _read_table(result: Verification, scratch: Scratch, files: list[str], threads: int) -> None:
    scratch.create("output", _OUTPUT)

    def read(path: str) -> str | None:
        try:
            rows = read_object(path)
        except Damaged as error:
            return str(error)
        ok = pc.equal(rows["status"], "ok")
        scratch.add("output", [*(rows[name] for name in DOCUMENT.names), ok, [path] * len(rows)])
        return None

    for error in in_threads(read, files, threads):
        if error is not None:
            result.damaged.add(0, 1, [error])
    scratch.finish("output")


def _compare(result: Verification, scratch: Scratch, config: RunConfig) -> None:
    scratch.run("""
        CREATE TABLE wanted AS SELECT id, source, row FROM input
        QUALIFY row_number() OVER (PARTITION BY id ORDER BY source DESC, row DESC) = 1""")
    scratch.run("""
        CREATE TABLE found AS SELECT id, source, row, bool_and(ok) AS ok, any_value(object) AS object,
            count(DISTINCT object) AS objects FROM output GROUP BY id, source, row""")
    result.documents = scratch.number("SELECT count(*) FROM wanted")
    result.found = scratch.number("SELECT count(*) FROM found")
    result.ok = scratch.number("SELECT count(*) FROM found WHERE ok")
    result.failed = result.found - result.ok
    result.missing.add_query(scratch, "SELECT *, NULL AS object FROM wanted ANTI JOIN found USING (id, source, row)")
    old = "" if config.nightly.removed == "keep" else " OR source NOT IN (SELECT source FROM damaged)"
    result.foreign.add_query(
        scratch,
        "SELECT * FROM (SELECT * FROM found ANTI JOIN wanted USING (id, source, row)) "
        f"WHERE id IN (SELECT id FROM input){old}",
    )
    result.doubled.add_query(
        scratch,
        "SELECT id, min(source) AS source, min(row) AS row, string_agg(object, ' and ') AS object "
        "FROM found GROUP BY id HAVING count(*) > 1 OR max(objects) > 1",
    )
