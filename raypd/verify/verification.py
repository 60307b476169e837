"""The proof that a finished run has lost and doubled nothing: its input is read again and compared with its output.

Unit by unit, so that memory does not grow with the corpus: a unit's documents, read by the rules of the run, against
the rows of its object. What no unit of the input accounts for is looked at afterwards.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pyarrow as pa

from raypd import storage
from raypd.config import ExtractionConfig, GenerationConfig, RunConfig
from raypd.dataset import planner as units
from raypd.dataset import writer
from raypd.dataset.reader import read_unit
from raypd.errors import Damaged, InputError
from raypd.run.unit import Unit
from raypd.storage.threads import in_threads
from raypd.verify.scratch import Scratch

EXAMPLES = 20
DOCUMENT = pa.schema({"id": "string", "source": "string", "row": "int64"})
_OUTPUT = pa.schema([*DOCUMENT, pa.field("object", pa.string()), pa.field("planned", pa.bool_())])
_IDENTITY = ["id", "source", "row", "status"]

Place = tuple[str, int]  # (source, row): what tells a document from all others, whatever its id is


@dataclass
class Finding:
    """What is wrong in one way: how many documents, how many units or objects, and the first of them in words."""

    documents: int = 0
    units: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, documents: int, units: int, examples: Iterable[str]) -> None:
        self.documents += documents
        self.units += units
        self.examples += list(examples)[: EXAMPLES - len(self.examples)]

    def add_documents(self, documents: Iterable[tuple[Place, str]]) -> None:
        words = [f"{id} ({source}, at {row})" for (source, row), id in documents]
        self.add(len(words), 0, words)

    def add_query(self, scratch: Scratch, query: str) -> None:
        """Adds the documents that SQL finds: its columns are id, source, row and object (or NULL)."""
        shown = scratch.rows(f"SELECT * FROM ({query}) ORDER BY source, row LIMIT {EXAMPLES}")
        words = (f"{r['id']} ({r['source']}, at {r['row']}) in {r['object']}".removesuffix(" in None") for r in shown)
        self.add(scratch.number(f"SELECT count(*) FROM ({query})"), 0, list(words))


@dataclass
class Verification:
    """What was found, of a run or of one unit.

    missing: documents of the input without a row. doubled: documents with rows from two objects, or with more rows in
    one than the task writes. foreign: rows whose document is not in the input (anymore). damaged: objects of the
    output that cannot be read whole. unreadable: input that cannot be read now and so cannot be compared.
    repeated_ids: ids that several documents of the input share (their source and row differ: none is doubled).
    damaged_input: objects that the plan lists as unreadable, which the configuration may allow (input.on_damaged skip).
    temporary: files that dead writers left; the next run removes them.
    """

    run: str
    fingerprint: str
    objects: int = 0
    units: int = 0
    documents: int = 0
    found: int = 0
    ok: int = 0
    failed: int = 0
    missing: Finding = field(default_factory=Finding)
    doubled: Finding = field(default_factory=Finding)
    foreign: Finding = field(default_factory=Finding)
    damaged: Finding = field(default_factory=Finding)
    unreadable: Finding = field(default_factory=Finding)
    repeated_ids: Finding = field(default_factory=Finding)
    damaged_input: Finding = field(default_factory=Finding)
    damaged_allowed: bool = False
    temporary: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether every document of the input stands in the output exactly once, and nothing else does."""
        wrong = [self.missing, self.doubled, self.foreign, self.damaged, self.unreadable]
        wrong += [] if self.damaged_allowed else [self.damaged_input]
        return not any(finding.documents or finding.units for finding in wrong)

    def merge(self, part: Verification) -> None:
        """Adds the counts and findings of a part of the run."""
        for name in (f.name for f in fields(self)):
            mine, theirs = getattr(self, name), getattr(part, name)
            if isinstance(mine, Finding):
                mine.add(theirs.documents, theirs.units, theirs.examples)
            elif type(mine) is int:
                setattr(self, name, mine + theirs)

    def to_json(self) -> str:
        return json.dumps({"well": self.well, **asdict(self)}, indent=2, ensure_ascii=False)


def verify(output: str, config: RunConfig, threads: int = 8) -> Verification:
    """Compares a run's output with its input, which is read again. Changes nothing.

    Args:
        output: the run's folder.
        config: of the run; its `input` says where the input lies now.
        threads: units that are compared at the same time.

    Raises:
        InputError: the input cannot be planned at all.
        RunError: storage is out of reach; what cannot be looked at now is not called damaged or missing.
    """
    result = Verification(output, config.fingerprint(), damaged_allowed=config.input.on_damaged == "skip")
    committed: dict[str, str] = {}  # unit -> path
    for unit_id, path in writer.objects(output):
        result.objects += 1
        if unit_id in committed:  # in two partitions
            result.doubled.add(0, 1, [f"unit {unit_id}: {committed[unit_id]} and {path}"])
        committed[unit_id] = path
    folder = writer.units_folder(output)
    result.temporary = storage.temporary(folder)
    strays = [name for name in storage.names(folder) if not name.endswith(".parquet") and name[0] not in "._"]
    words = [f"file {name}: no unit of raypd's, and readers of the folder see it" for name in strays]
    result.foreign.add(0, len(strays), words)
    planned: set[str] = set()
    schemas: dict[str, list[str]] = {}  # columns -> paths
    with Scratch() as scratch:
        scratch.create("input", DOCUMENT)

        def check(unit: Unit) -> tuple[str, Verification, str | None]:
            return unit.id, *_check(unit, config, committed.get(unit.id), scratch)

        plan = units.plan(config, output)
        for unit_id, found, columns in in_threads(check, plan, threads):
            planned.add(unit_id)
            result.merge(found)
            if columns is not None:
                schemas.setdefault(columns, []).append(committed[unit_id])
        # All objects have the same columns; one that has others has a damaged footer (no checksum is over that).
        for paths in sorted(schemas.values(), key=len)[:-1]:
            result.damaged.add(0, len(paths), [f"{path}: has other columns than most; delete it" for path in paths])
        for unit in plan.damaged():
            result.damaged_input.add(0, 1, [str(unit.damaged)])
        scratch.finish("input")
        _add_repeated_ids(result, scratch)
        if not committed.keys() <= planned:
            _add_foreign(result, committed, planned, scratch, threads)
    return result


# ------------------------------------------------------------------------------------------------------------- one unit


def _check(unit: Unit, config: RunConfig, path: str | None, scratch: Scratch) -> tuple[Verification, str | None]:
    """What was found of a unit, and the columns of its object. path: of the object; None: it is not committed."""
    found = Verification(unit.id, config.fingerprint(), units=1)
    try:
        expected = {(document.source, document.place): document.id for document in read_unit(unit, config)}
    except InputError as error:
        found.unreadable.add(0, 1, [str(error)])
        return found, None
    scratch.add("input", [list(expected.values()), [source for source, _ in expected], [row for _, row in expected]])
    found.documents = len(expected)
    if path is None:
        found.missing.add(len(expected), 1, [f"unit {unit.id}: {len(expected)} documents"])
        return found, None
    try:
        summary, table = writer.read_table("", unit.id, path=path)
        _check_summary(summary, table, unit.id, config.fingerprint())
    except Damaged as error:
        found.damaged.add(len(expected), 1, [str(error)])
        found.missing.add_documents(expected.items())
        return found, None
    _compare(found, expected, table, config)
    return found, str(table.schema.remove_metadata())


def _check_summary(summary: writer.UnitSummary, table: pa.Table, unit: str, fingerprint: str) -> None:
    """Raises Damaged when an object's summary is not of its rows, its name and the run."""
    stated = (summary.unit, summary.fingerprint, summary.ok, summary.failed)
    holds = (unit, fingerprint, *writer.count_documents(table))
    if stated != holds:
        raise Damaged(
            f"unit {unit}: its summary says (unit, fingerprint, ok, failed) = {stated}, and it is {holds}; delete the "
            "object and the same command redoes it"
        )


def _compare(found: Verification, expected: dict[Place, str], table: pa.Table, config: RunConfig) -> None:
    rows: Counter[Place] = Counter()
    foreign: dict[Place, str] = {}
    failed: set[Place] = set()
    for id, source, row, status in _columns(table, *_IDENTITY):
        if expected.get((source, row)) == id:
            rows[source, row] += 1
            if status != "ok":
                failed.add((source, row))
        else:
            foreign[source, row] = id
    found.found, found.ok, found.failed = len(rows), len(rows) - len(failed), len(failed)
    found.missing.add_documents((place, id) for place, id in expected.items() if place not in rows)
    found.foreign.add_documents(foreign.items())
    # A question answering document has a row a question, and a question may stand there twice.
    doubled: Iterable[Place] = ()
    if isinstance(config.task, ExtractionConfig):
        doubled = [place for place, count in rows.items() if count > 1]
    elif isinstance(config.task, GenerationConfig):
        answers = Counter(_columns(table, "source", "row", "sample", "turn"))
        doubled = [(source, row) for (source, row, _, _), n in answers.items() if n > 1 and (source, row) in rows]
    found.doubled.add_documents((place, expected[place]) for place in doubled)


def _columns(table: pa.Table, *names: str) -> Iterable[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in names), strict=True)


# ------------------------------------------------------------------------------------------------------- across units


def _add_repeated_ids(result: Verification, scratch: Scratch) -> None:
    """Ids that several documents of the input share: worth knowing before a join by id, and no doing of raypd."""
    repeated = "SELECT id, count(*) AS times, min(source) AS source FROM input GROUP BY id HAVING count(*) > 1"
    counts = scratch.row(f"SELECT coalesce(sum(times), 0)::BIGINT AS documents, count(*) AS units FROM ({repeated})")
    shown = scratch.rows(f"{repeated} ORDER BY times DESC, id LIMIT {EXAMPLES}")
    result.repeated_ids.add(
        **counts, examples=[f"{r['id']}: {r['times']} documents, one in {r['source']}" for r in shown]
    )


def _add_foreign(
    result: Verification, committed: dict[str, str], planned: set[str], scratch: Scratch, threads: int
) -> None:
    """Objects that no unit of the input has: what is in them, and which documents stand in another object too."""
    scratch.create("output", _OUTPUT)

    def read(unit_id: str) -> str | None:
        try:
            _, table = writer.read_table("", unit_id, _IDENTITY, committed[unit_id])
        except Damaged as error:
            return str(error)
        more = [[unit_id] * len(table), [unit_id in planned] * len(table)]
        scratch.add("output", [*(table[name] for name in DOCUMENT.names), *more])
        return None

    foreign = sorted(committed.keys() - planned)
    for unit_id, damage in zip(foreign, in_threads(read, foreign, threads), strict=True):
        result.foreign.add(0, 1, [f"object {unit_id}: not a unit of this input"])
        if damage is not None:
            result.damaged.add(0, 1, [damage])
    # What is damaged in these is known by now.
    deque(in_threads(read, sorted(committed.keys() & planned), threads), maxlen=0)
    scratch.finish("output")
    result.doubled.add_query(
        scratch,
        "SELECT any_value(id) AS id, source, row, string_agg(DISTINCT object, ' and ') AS object FROM output "
        "GROUP BY source, row HAVING count(DISTINCT object) > 1",
    )
    result.foreign.add_query(
        scratch,
        "SELECT DISTINCT id, source, row, object FROM output ANTI JOIN input USING (id, source, row) WHERE NOT planned",
    )
