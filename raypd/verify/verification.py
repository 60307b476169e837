"""Prove that a run lost and duplicated nothing.

The documents of the input and the rows of the output are put into tables on disk, which are
compared with SQL.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset import planner, read_unit, writer
from raypd.errors import Damaged, InputError
from raypd.run import LeftOutFiles, Unit, UnitSummary
from raypd.storage import SINCE_PLANNED
from raypd.tasks import Document, parts_of
from raypd.verify.scratch import Scratch

_EXAMPLES = 20
# `object` is the unit of a document, or the path of an object; `part` distinguishes the rows of one
# document.
_ROW = {"id": "string", "source": "string", "row": "int64", "object": "string"}
INPUT = pa.schema({**_ROW, "committed": "bool"})
OUTPUT = pa.schema({**_ROW, "ok": "bool", "part": "string"})
_OBJECTS = pa.schema({"path": "string", "columns": "string"})


class _UnitFault(NamedTuple):
    """A finding about a whole unit."""

    finding: str  # the field of Verification
    documents: int
    message: str


@dataclass
class Finding:
    """One kind of error: the numbers of documents, units or objects, and examples in words."""

    documents: int = 0
    units: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, documents: int, units: int, examples: Iterable[str]) -> None:
        """Add counts and examples; further examples are dropped."""
        self.documents += documents
        self.units += units
        self.examples = list(dict.fromkeys([*self.examples, *examples]))[:_EXAMPLES]

    def add_query(self, scratch: Scratch, query: str, counted: str | None = None) -> None:
        """Add the documents that a query returns.

        Args:
            scratch: The tables.
            query: SQL with the columns id, source, row and object (or NULL).
            counted: SQL for all documents, if `query` has only examples.
        """
        examples = []
        limited = f"SELECT * FROM ({query}) ORDER BY source, row LIMIT {_EXAMPLES}"
        for row in scratch.rows(limited):
            example = f"{row['id']} ({row['source']}, at {row['row']})"
            if row["object"] is not None:
                example += f" in {row['object']}"
            examples.append(example)
        self.add(scratch.number(f"SELECT count(*) FROM ({counted or query})"), 0, examples)


@dataclass
class Verification:
    """The result of comparing a run, or a table of nightly runs, with its input."""

    run: str
    fingerprint: str
    objects: int = 0
    units: int = 0
    documents: int = 0  # of the input
    found: int = 0  # of the output
    ok: int = 0
    failed: int = 0
    # Documents of the input without a row.
    missing: Finding = field(default_factory=Finding)
    # Documents with rows in two objects, or with too many rows in one.
    doubled: Finding = field(default_factory=Finding)
    # Rows whose document is not, or no longer, in the input.
    foreign: Finding = field(default_factory=Finding)
    # Objects of the output that cannot be read completely.
    damaged: Finding = field(default_factory=Finding)
    # Input that cannot be read now and is therefore not compared.
    unreadable: Finding = field(default_factory=Finding)
    # Ids that several documents of the input share; this is not an error.
    repeated_ids: Finding = field(default_factory=Finding)
    # Input that cannot be read and has no object.
    damaged_input: Finding = field(default_factory=Finding)
    # Whether input.on_damaged=skip allows it.
    damaged_allowed: bool = False
    # Files of the input that raypd does not read.
    left_out: list[LeftOutFiles] = field(default_factory=list)
    # How the Delta table differs from the list of objects.
    delta: str = ""

    @property
    def passed(self) -> bool:
        """Whether the output has every document of the input exactly once, and nothing else."""
        findings = [self.missing, self.doubled, self.foreign, self.damaged, self.unreadable]
        if not self.damaged_allowed:
            findings.append(self.damaged_input)
        return not self.delta and not any(
            finding.documents or finding.units for finding in findings
        )

    def add_fault(self, fault: _UnitFault | None) -> None:
        """Add a finding about a whole unit, if there is one."""
        if fault is not None:
            finding: Finding = getattr(self, fault.finding)
            finding.add(fault.documents, 1, [fault.message])

    def add_counts(self, scratch: Scratch, expected: str, present: str) -> None:
        """Count documents.

        Args:
            scratch: The tables.
            expected: The table of documents that should be there.
            present: The table of documents that are there, with a column `ok`.
        """
        self.documents = scratch.number(f"SELECT count(*) FROM {expected}")
        self.ok = scratch.number(f"SELECT count(*) FROM {present} WHERE ok")
        self.found = scratch.number(f"SELECT count(*) FROM {present}")
        self.failed = self.found - self.ok


def verify(output: str, config: RunConfig, threads: int = 32) -> Verification:
    """Compare a run's output with its input. Nothing is changed.

    Args:
        output: The folder of the run.
        config: The configuration; its section `input` names where the input is now.
        threads: Units that are read at the same time.

    Raises:
        InputError: If the input cannot be planned.
        RunError: If storage is out of reach; then nothing is reported as missing.
    """
    result = Verification(
        output, config.fingerprint(), damaged_allowed=config.input.on_damaged == "skip"
    )
    paths = _committed_paths(result, output)
    _find_foreign_files(result, output)
    with Scratch(input=INPUT, output=OUTPUT, objects=_OBJECTS) as scratch:

        def add_unit(item: tuple[Unit, str | None]) -> _UnitFault | None:
            unit, path = item
            return _add_unit(scratch, unit, path, config, result.fingerprint)

        def add_foreign(unit_id: str) -> _UnitFault | None:
            return _add_object(scratch, unit_id, paths[unit_id], None, 0)

        plan = planner.plan(config, output)
        result.left_out = plan.left_out
        # The paths that are left belong to no unit.
        units = ((unit, paths.pop(unit.id, None)) for unit in plan)
        for fault in storage.in_threads(add_unit, units, threads):
            result.units += 1
            result.add_fault(fault)
        for unit in plan.damaged():
            result.damaged_input.add(0, 1, [str(unit.damaged)])
        foreign_ids = sorted(paths)
        examples = [f"object {unit_id}: not a unit of this input" for unit_id in foreign_ids]
        result.foreign.add(0, len(foreign_ids), examples)
        for fault in storage.in_threads(add_foreign, foreign_ids, threads):
            result.add_fault(fault)
        _compare(result, scratch)
    return result


def _committed_paths(result: Verification, output: str) -> dict[str, str]:
    """Return the path of each committed unit; report units with objects in two partitions."""
    paths: dict[str, str] = {}
    for unit_id, path in writer.objects(output):
        result.objects += 1
        if unit_id in paths:
            result.doubled.add(0, 1, [f"unit {unit_id}: {paths[unit_id]} and {path}"])
        paths[unit_id] = path
    return paths


def _find_foreign_files(result: Verification, output: str) -> None:
    """Report files that raypd did not write but that readers of the folder would see."""
    for name in storage.names(writer.units_folder(output)):
        if not name.endswith(".parquet") and name[0] not in "._":
            message = f"file {name}: not written by raypd, but readers of the folder see it"
            result.foreign.add(0, 1, [message])


def _add_unit(
    scratch: Scratch, unit: Unit, path: str | None, config: RunConfig, fingerprint: str
) -> _UnitFault | None:
    """Add a unit's documents and the rows of its object.

    Args:
        scratch: The tables.
        unit: A unit of the input.
        path: Its object; None if it is not committed.
        config: The configuration.
        fingerprint: Its fingerprint.

    Returns:
        A fault of the whole unit; None if there is none.
    """
    try:
        documents = read_unit(unit, config)
    except InputError as error:
        # A damaged object that the run left out is a unit with a single part and no output object.
        left_out = path is None and len(unit.parts) == 1 and SINCE_PLANNED not in str(error)
        finding = "unreadable"
        if left_out:
            finding = "damaged_input"
        return _UnitFault(finding, 0, str(error))
    add_documents(scratch, documents, unit.id, path is not None)
    if path is None:
        message = f"unit {unit.id}: {len(documents)} documents"
        return _UnitFault("missing", len(documents), message)
    return _add_object(scratch, unit.id, path, fingerprint, len(documents))


def add_documents(
    scratch: Scratch, documents: Sequence[Document], unit: str, committed: bool
) -> None:
    """Add documents of the input to the table `input`.

    Args:
        scratch: The tables.
        documents: The documents of a unit.
        unit: The id of the unit.
        committed: Whether the unit has an object.
    """
    rows = []
    for document in documents:
        row = {
            "id": document.id,
            "source": document.source,
            "row": document.row,
            "object": unit,
            "committed": committed,
        }
        rows.append(row)
    scratch.add("input", rows)


def add_rows(scratch: Scratch, table: pa.Table, object: str) -> None:
    """Add an object's rows to the table `output`.

    Args:
        scratch: The tables.
        table: The rows.
        object: How findings name the object: by its unit or its path.
    """
    columns = [
        table["id"],
        table["source"],
        table["row"],
        [object] * len(table),
        pc.equal(table["status"], "ok"),
        parts_of(table),
    ]
    scratch.add("output", pa.table(columns, schema=OUTPUT))


def _add_object(
    scratch: Scratch, unit: str, path: str, fingerprint: str | None, documents: int
) -> _UnitFault | None:
    """Add an object's rows.

    Args:
        scratch: The tables.
        unit: The id of the object's unit.
        path: The object.
        fingerprint: The fingerprint of the configuration, against which the object's summary is
            checked; None if the object belongs to no unit of the input.
        documents: The documents of the unit.
    """
    try:
        summary, table = writer.read_table("", unit, path=path)
        if fingerprint is not None:
            _check_summary(summary, unit, fingerprint, table)
            # The schema as text takes kilobytes, and there is one per unit.
            columns = str(table.schema.remove_metadata()).encode()
            digest = hashlib.blake2b(columns, digest_size=8).hexdigest()
            scratch.add("objects", [{"path": path, "columns": digest}])
        add_rows(scratch, table, unit)
    except Damaged as error:
        return _UnitFault("damaged", documents, str(error))
    return None


def _check_summary(summary: UnitSummary, unit: str, fingerprint: str, table: pa.Table) -> None:
    """Check that an object's summary describes its rows.

    Raises:
        Damaged: If it does not.
    """
    stated = (summary.unit, summary.fingerprint, summary.ok, summary.failed)
    actual = (unit, fingerprint, *writer.count_documents(table))
    if stated != actual:
        raise Damaged(
            f"unit {unit}: its summary says (unit, fingerprint, ok, failed) = {stated}, but it is "
            f"{actual}; delete the object, and the same command processes the unit again"
        )


def _compare(result: Verification, scratch: Scratch) -> None:
    """Compare the tables of input and output."""
    # All objects have the same columns. An object with other columns has a damaged footer, which is
    # not covered by a checksum.
    other_columns = scratch.rows("""
        SELECT path FROM objects
        WHERE columns <> (SELECT mode(columns) FROM objects)
        ORDER BY path
        """)
    for row in other_columns:
        message = f"{row['path']}: its columns differ from those of most objects; delete it"
        result.damaged.add(0, 1, [message])
    # One join or grouping at a time, because several in one statement would share the memory.
    scratch.run("""
        CREATE TABLE present AS
        SELECT source, row, ok FROM output SEMI JOIN input USING (id, source, row, object)
        """)
    scratch.run("CREATE TABLE found AS SELECT bool_and(ok) AS ok FROM present GROUP BY source, row")
    scratch.run("DROP TABLE present")
    result.add_counts(scratch, "input", "found")
    missing = """
        SELECT id, source, row, NULL AS object
        FROM input ANTI JOIN output USING (id, source, row, object)
        WHERE committed
        """
    result.missing.add_query(scratch, missing)
    foreign = """
        SELECT DISTINCT id, source, row,
            CASE WHEN object NOT IN (SELECT DISTINCT object FROM input) THEN object END AS object
        FROM output ANTI JOIN input USING (id, source, row)
        """
    result.foreign.add_query(scratch, foreign)
    _find_doubled(result, scratch)
    _find_repeated_ids(result, scratch)


def _find_doubled(result: Verification, scratch: Scratch) -> None:
    """Report documents that are in several objects, or more than once in one."""
    # Numbers take little memory, so names are looked up only for the examples.
    scratch.run("""
        CREATE TABLE places AS
        SELECT source, row, hash(object) AS object, hash(part) AS part
        FROM output SEMI JOIN input USING (id, source, row)
        """)
    scratch.run("""
        CREATE TABLE times AS
        SELECT source, row, object, count(*) AS times FROM places
        GROUP BY source, row, object, part
        """)
    scratch.run("""
        CREATE TABLE doubled AS
        SELECT source, row FROM times
        GROUP BY source, row
        HAVING max(times) > 1 OR min(object) <> max(object)
        """)
    scratch.run("DROP TABLE places")
    scratch.run("DROP TABLE times")
    examples = f"""
        SELECT any_value(id) AS id, source, row,
            CASE WHEN count(DISTINCT object) > 1 THEN string_agg(DISTINCT object, ' and ') END
                AS object
        FROM output SEMI JOIN (FROM doubled ORDER BY source, row LIMIT {_EXAMPLES})
            USING (source, row)
        GROUP BY source, row
        """
    result.doubled.add_query(scratch, examples, "FROM doubled")


def _find_repeated_ids(result: Verification, scratch: Scratch) -> None:
    """Report ids that several documents share, which matter to someone who joins by id."""
    scratch.run("""
        CREATE TABLE repeated AS
        SELECT id, count(*) AS times FROM input GROUP BY id HAVING count(*) > 1
        """)
    counts = scratch.row("""
        SELECT coalesce(sum(times), 0)::BIGINT AS documents, count(*) AS units FROM repeated
        """)
    examples = []
    shown = scratch.rows(f"""
        SELECT id, any_value(times) AS times, min(source) AS source
        FROM input JOIN (FROM repeated ORDER BY times DESC, id LIMIT {_EXAMPLES}) USING (id)
        GROUP BY id ORDER BY times DESC, id
        """)
    for row in shown:
        examples.append(f"{row['id']}: {row['times']} documents, one in {row['source']}")
    result.repeated_ids.add(counts["documents"], counts["units"], examples)
