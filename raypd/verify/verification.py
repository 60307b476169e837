"""The proof that a run lost and doubled nothing: input and output become tables on disk, which SQL
compares.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset import planner, read_unit, writer
from raypd.errors import Damaged, InputError
from raypd.run.left_out import LeftOutFiles
from raypd.run.unit import Unit
from raypd.storage import SINCE_PLANNED
from raypd.tasks.base import Document
from raypd.tasks.columns import parts_of
from raypd.verify.scratch import Scratch

_EXAMPLES = 20
# object: a document's unit, or the path of an object. part: what tells the rows of one document
# apart.
_ROW = {"id": "string", "source": "string", "row": "int64", "object": "string"}
INPUT = pa.schema({**_ROW, "committed": "bool"})
OUTPUT = pa.schema({**_ROW, "ok": "bool", "part": "string"})
_OBJECTS = pa.schema({"path": "string", "columns": "string"})
_Fault = tuple[str, int, str]  # a finding with all of a unit: its name, documents, words


@dataclass
class Finding:
    """What is wrong in one way: how many documents, how many units or objects, and the first of
    them in words.
    """

    documents: int = 0
    units: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, documents: int, units: int, examples: Iterable[str]) -> None:
        self.documents += documents
        self.units += units
        self.examples = list(dict.fromkeys([*self.examples, *examples]))[:_EXAMPLES]

    def add_query(self, scratch: Scratch, query: str) -> None:
        """Adds the documents that SQL finds: its columns are id, source, row and object (or
        NULL).
        """
        shown = scratch.rows(f"SELECT * FROM ({query}) ORDER BY source, row LIMIT {_EXAMPLES}")
        words = (
            f"{r['id']} ({r['source']}, at {r['row']}) in {r['object']}".removesuffix(" in None")
            for r in shown
        )
        self.add(scratch.number(f"SELECT count(*) FROM ({query})"), 0, list(words))


@dataclass
class Verification:
    """What was found of a run, or of a nightly table."""

    run: str
    fingerprint: str
    objects: int = 0
    units: int = 0
    documents: int = 0
    found: int = 0
    ok: int = 0
    failed: int = 0
    missing: Finding = field(default_factory=Finding)  # documents of the input without a row
    # Documents with rows from two objects, or too many in one.
    doubled: Finding = field(default_factory=Finding)
    # Rows whose document is not in the input (anymore)
    foreign: Finding = field(default_factory=Finding)
    # Objects of the output that cannot be read whole.
    damaged: Finding = field(default_factory=Finding)
    # Input that cannot be read now, so not compared.
    unreadable: Finding = field(default_factory=Finding)
    # Shared by documents of the input; none is doubled.
    repeated_ids: Finding = field(default_factory=Finding)
    damaged_input: Finding = field(default_factory=Finding)  # unreadable, and without an object
    damaged_allowed: bool = False  # by input.on_damaged: skip
    # Files of the input that raypd does not read.
    left_out: list[LeftOutFiles] = field(default_factory=list)
    delta: str = ""  # how the Delta table differs from the list of objects

    @property
    def passed(self) -> bool:
        """Whether every document of the input stands in the output exactly once, and nothing else
        does.
        """
        wrong = [self.missing, self.doubled, self.foreign, self.damaged, self.unreadable]
        wrong += [] if self.damaged_allowed else [self.damaged_input]
        return not self.delta and not any(finding.documents or finding.units for finding in wrong)

    def add_counts(self, scratch: Scratch, expected: str, present: str) -> None:
        """Counts the documents of two tables: those that should be there, and those that are (with
        a column ok).
        """
        self.documents = scratch.number(f"SELECT count(*) FROM {expected}")
        self.ok = scratch.number(f"SELECT count(*) FROM {present} WHERE ok")
        self.found = scratch.number(f"SELECT count(*) FROM {present}")
        self.failed = self.found - self.ok


def verify(output: str, config: RunConfig, threads: int = 8) -> Verification:
    """Compares a run's output with its input.

    Changes nothing. config: its section `input` says where that lies now. Raises InputError: the
    input cannot be planned; RunError: storage is out of reach, so nothing is called missing.
    """
    result = Verification(
        output, config.fingerprint(), damaged_allowed=config.input.on_damaged == "skip"
    )
    committed: dict[str, str] = {}  # unit -> path
    for unit_id, path in writer.objects(output):
        result.objects += 1
        if unit_id in committed:  # in two partitions
            result.doubled.add(0, 1, [f"unit {unit_id}: {committed[unit_id]} and {path}"])
        committed[unit_id] = path
    folder = writer.units_folder(output)
    for name in storage.names(folder):
        if not name.endswith(".parquet") and name[0] not in "._":
            result.foreign.add(
                0, 1, [f"file {name}: no unit of raypd's, and readers of the folder see it"]
            )
    with Scratch(input=INPUT, output=OUTPUT, objects=_OBJECTS) as scratch:

        def add(unit: Unit) -> tuple[str, _Fault | None]:
            """Adds a unit's documents and the rows of its object; its id, and what is wrong with
            all of it.
            """
            path = committed.get(unit.id)
            try:
                documents = read_unit(unit, config)
            except InputError as error:
                # By the run.
                left_out = path is None and len(unit.parts) == 1 and SINCE_PLANNED not in str(error)
                return unit.id, ("damaged_input" if left_out else "unreadable", 0, str(error))
            add_documents(scratch, documents, unit.id, path is not None)
            if path is None:
                return unit.id, (
                    "missing",
                    len(documents),
                    f"unit {unit.id}: {len(documents)} documents",
                )
            return unit.id, _add_object(scratch, unit.id, path, config, len(documents))

        plan = planner.plan(config, output)
        result.left_out = plan.left_out
        faults = dict(storage.in_threads(add, plan, threads))
        result.units = len(faults)
        for unit in plan.damaged():
            result.damaged_input.add(0, 1, [str(unit.damaged)])
        foreign = sorted(committed.keys() - faults.keys())
        result.foreign.add(
            0, len(foreign), [f"object {unit_id}: not a unit of this input" for unit_id in foreign]
        )
        of_foreign = storage.in_threads(
            lambda u: _add_object(scratch, u, committed[u], None, 0), foreign, threads
        )
        for name, documents, words in filter(None, [*faults.values(), *of_foreign]):
            getattr(result, name).add(documents, 1, [words])
        _compare(result, scratch)
    return result


def add_documents(
    scratch: Scratch, documents: Sequence[Document], unit: str, committed: bool
) -> None:
    """Adds documents of the input to the table `input`. committed: whether their unit has an
    object.
    """
    rows = [{"id": d.id, "source": d.source, "row": d.place, "object": unit} for d in documents]
    scratch.add("input", [{**row, "committed": committed} for row in rows])


def add_rows(scratch: Scratch, table: pa.Table, object: str) -> None:
    """Adds an object's rows to the table `output`. object: what a finding calls it: its unit, or
    its path.
    """
    columns = [table[name] for name in ("id", "source", "row")]
    ok = pc.equal(table["status"], "ok")
    scratch.add(
        "output", pa.table([*columns, [object] * len(table), ok, parts_of(table)], schema=OUTPUT)
    )


def _add_object(
    scratch: Scratch, unit: str, path: str, config: RunConfig | None, documents: int
) -> _Fault | None:
    """Adds an object's rows; of a planned unit after a check of its summary. config None: the
    object is foreign.
    """
    try:
        summary, table = writer.read_table("", unit, path=path)
        if config is not None:
            stated = (summary.unit, summary.fingerprint, summary.ok, summary.failed)
            holds = (unit, config.fingerprint(), *writer.count_documents(table))
            if stated != holds:
                advice = f"and it is {holds}; delete the object and the same command redoes it"
                raise Damaged(
                    f"unit {unit}: its summary says (unit, fingerprint, ok, failed) = "
                    f"{stated}, {advice}"
                )
            scratch.add("objects", [{"path": path, "columns": str(table.schema.remove_metadata())}])
        add_rows(scratch, table, unit)
        return None
    except Damaged as error:
        return "damaged", documents, str(error)


def _compare(result: Verification, scratch: Scratch) -> None:
    # All objects have the same columns; one that has others has a damaged footer (no checksum is
    # over that).
    for row in scratch.rows(
        "FROM objects WHERE columns <> (SELECT mode(columns) FROM objects) ORDER BY path"
    ):
        result.damaged.add(0, 1, [f"{row['path']}: has other columns than most; delete it"])
    scratch.run("""
        CREATE TABLE found AS SELECT bool_and(ok) AS ok
        FROM output SEMI JOIN input USING (id, source, row, object) GROUP BY source, row""")
    result.add_counts(scratch, "input", "found")
    result.missing.add_query(
        scratch,
        """
        SELECT id, source, row, NULL AS object FROM input ANTI JOIN output USING (id, source, row, object)
        WHERE committed""",  # noqa: E501
    )
    result.foreign.add_query(
        scratch,
        """
        SELECT DISTINCT id, source, row, CASE WHEN object NOT IN (SELECT DISTINCT object FROM input) THEN object END
        AS object FROM output ANTI JOIN input USING (id, source, row)""",  # noqa: E501
    )
    result.doubled.add_query(
        scratch,
        """
        SELECT any_value(id) AS id, source, row, CASE WHEN count(DISTINCT object) > 1
        THEN string_agg(DISTINCT object, ' and ') END AS object FROM output SEMI JOIN input USING (id, source, row)
        GROUP BY source, row HAVING count(DISTINCT object) > 1 OR count(*) > count(DISTINCT part)""",  # noqa: E501
    )
    # Ids that several documents share: worth knowing before a join by id, and no doing of raypd.
    repeated = (
        "SELECT id, count(*) AS times, min(source) AS source FROM input GROUP BY id HAVING "
        "count(*) > 1"
    )
    counts = scratch.row(
        f"SELECT coalesce(sum(times), 0)::BIGINT AS documents, count(*) AS units FROM ({repeated})"
    )
    shown = scratch.rows(f"{repeated} ORDER BY times DESC, id LIMIT {_EXAMPLES}")
    words = [f"{r['id']}: {r['times']} documents, one in {r['source']}" for r in shown]
    result.repeated_ids.add(**counts, examples=words)
