"""`raypd verify` of a nightly folder: compare the table with the input, document by document."""

import raypd.nights.changes as changes
import raypd.nights.delta as delta
from raypd import storage
from raypd.config import RunConfig
from raypd.dataset import planner, read_unit
from raypd.errors import Damaged
from raypd.run import Unit
from raypd.verify import (
    Scratch,
    Verification,
    add_documents,
    add_rows,
    table_object,
    verification,
)

_TABLE_FILE_THREADS = 2


def verify_table(root: str, config: RunConfig, threads: int = 8) -> Verification:
    """Compare the table of the last successful night with the input. Nothing is changed.

    Each id must be in the table once, from the last document that has it. Documents that
    are not in the input are foreign, unless nightly.removed is keep or they are in an object that
    cannot be read.

    Args:
        root: The nightly root.
        config: The configuration of the last night; its section `input` names where the input is
            now.
        threads: Units that are read at the same time.
    """
    result = Verification(
        root, config.fingerprint(), damaged_allowed=config.input.on_damaged == "skip"
    )
    files = table_object.objects(root)
    result.objects = len(files)
    result.delta = delta.difference(root, files)
    plan = planner.plan(config)
    result.units = plan.units
    result.left_out = plan.left_out
    with Scratch(
        input=verification.INPUT, damaged=changes.DAMAGED, output=verification.OUTPUT
    ) as scratch:

        def read_input(ordinal: int, unit: Unit) -> None:
            add_documents(scratch, read_unit(unit, config), unit.id, committed=True)

        def read_table(path: str) -> str | None:
            try:
                for _, rows in table_object.tables([path], threads=1):
                    add_rows(scratch, rows, path)
                return None
            except Damaged as error:
                return str(error)

        for unit, reason in changes.unreadable(plan, config, read_input, set(), threads):
            result.damaged_input.add(0, 1, [reason])
            scratch.add("damaged", [{"source": unit.name}])
        # With table files, each thread has three decoded row groups in memory.
        if table_object.has_table_files(files):
            threads = min(threads, _TABLE_FILE_THREADS)
        for error in storage.in_threads(read_table, files, threads):
            if error is not None:
                result.damaged.add(0, 1, [error])
        _compare(result, scratch, keep=config.nightly.removed == "keep")
    return result


def _compare(result: Verification, scratch: Scratch, keep: bool) -> None:
    """Compare the tables of input and output.

    Args:
        result: Gets the findings.
        scratch: Has the tables `input`, `output` and `damaged`.
        keep: Whether the table keeps documents that the input no longer has.
    """
    scratch.run("""
        CREATE TABLE wanted AS
        SELECT id, source, row FROM input
        QUALIFY row_number() OVER (PARTITION BY id ORDER BY source DESC, row DESC) = 1
        """)
    scratch.run("""
        CREATE TABLE found AS
        SELECT id, source, row, bool_and(ok) AS ok, any_value(object) AS object,
            count(DISTINCT object) AS objects
        FROM output GROUP BY id, source, row
        """)
    result.add_counts(scratch, "wanted", "found")
    missing = "SELECT *, NULL AS object FROM wanted ANTI JOIN found USING (id, source, row)"
    result.missing.add_query(scratch, missing)
    foreign = """
        SELECT * FROM (SELECT * FROM found ANTI JOIN wanted USING (id, source, row))
        WHERE id IN (SELECT id FROM input)
        """
    if not keep:
        foreign += " OR source NOT IN (SELECT source FROM damaged)"
    result.foreign.add_query(scratch, foreign)
    doubled = """
        SELECT id, min(source) AS source, min(row) AS row, string_agg(object, ' and ') AS object
        FROM found GROUP BY id HAVING count(*) > 1 OR max(objects) > 1
        """
    result.doubled.add_query(scratch, doubled)
