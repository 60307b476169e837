"""The proof that a finished run has lost and doubled nothing: its input is read again and compared with its output.

Unit by unit, so that memory does not grow with the corpus: a unit's documents, read by the rules of the run, against
the rows of its object. What no unit of the input accounts for is looked at afterwards.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

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
_INPUT = pa.schema([("id", pa.string()), ("source", pa.string()), ("row", pa.int64())])
_OUTPUT = pa.schema([*_INPUT, pa.field("object", pa.string()), pa.field("planned", pa.bool_())])
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


@dataclass
class Verification:
    """What was found.

    missing: documents of the input without a row. doubled: documents with rows from two objects, or with more rows in
    one than the task writes. foreign: rows whose document is not in the input (anymore). damaged: objects of the
    output that cannot be read whole. unreadable: input that cannot be read now and so cannot be compared.
    repeated_ids: ids that several documents of the input share (each of these documents is told apart by its source
    and row, so this is no doubling). damaged_input: objects that the plan lists as unreadable, which the configuration
    may allow (input.on_damaged skip). temporary: files that dead writers left; the next run removes them.
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

    def to_json(self) -> str:
        return json.dumps({"well": self.well, **asdict(self)}, indent=2, ensure_ascii=False)


def verify(output: str, config: RunConfig, threads: int = 8) -> Verification:
    """Compares a run's output with its input, which is read again. Changes nothing.

    Raises InputError where the input cannot be planned at all, RunError where storage is out of reach: what cannot be
    looked at now is not called damaged or missing.
    """
    result = Verification(output, config.fingerprint(), damaged_allowed=config.input.on_damaged == "skip")
    folder = writer.units_folder(output)
    committed: dict[str, str] = {}  # unit -> path
    for unit_id, path in writer.objects(output):
        result.objects += 1
        if unit_id in committed:  # in two partitions
            result.doubled.add(0, 1, [f"unit {unit_id}: {committed[unit_id]} and {path}"])
        committed[unit_id] = path
    result.temporary = storage.temporary(folder)
    strays = [name for name in storage.names(folder) if not name.endswith(".parquet") and name[0] not in "._"]
    result.foreign.add(
        0, len(strays), [f"file {name}: no unit of raypd's, and readers of the folder see it" for name in strays]
    )
    seen: set[str] = set()
    with Scratch() as scratch:
        scratch.create("input", _INPUT)

        def check(unit: Unit) -> _Checked:
            return _check(unit, config, committed.get(unit.id), scratch)

        plan = units.plan(config, output)
        schemas: dict[str, list[str]] = {}
        for checked in in_threads(check, _noted(plan, seen), threads):
            _add(result, checked)
            if checked.columns:
                schemas.setdefault(checked.columns, []).append(committed[checked.unit])
        _add_odd_columns(result, schemas)
        for unit in plan.damaged():
            result.damaged_input.add(0, 1, [str(unit.damaged)])
        _repeated_ids(result, scratch)
        if foreign := sorted(set(committed) - seen):
            _add_foreign(result, committed, foreign, sorted(seen & set(committed)), scratch, threads)
    return result


def _noted(planned: Iterable[Unit], seen: set[str]) -> Iterator[Unit]:
    for unit in planned:
        seen.add(unit.id)
        yield unit


# ------------------------------------------------------------------------------------------------------------- one unit


@dataclass
class _Checked:
    """What one unit adds to the result. Texts are examples."""

    unit: str
    documents: int = 0
    found: int = 0
    ok: int = 0
    failed: int = 0
    missing: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    absent: bool = False
    columns: str = ""  # names and types
    damaged: str | None = None
    unreadable: str | None = None


def _check(unit: Unit, config: RunConfig, path: str | None, scratch: Scratch) -> _Checked:
    """path: of the unit's object; None: it is not committed."""
    checked = _Checked(unit.id, absent=path is None)
    expected: dict[Place, str] = {}
    try:
        expected = _documents(unit, config)
    except InputError as error:
        checked.unreadable = str(error)
        return checked
    places = list(expected)
    columns = [list(expected.values()), [source for source, _ in places], [row for _, row in places]]
    scratch.add("input", pa.table(columns, schema=_INPUT))
    checked.documents = len(expected)
    if path is None:
        checked.missing = [_word(place, id) for place, id in expected.items()]
        return checked
    try:
        summary, table = writer.read_table("", unit.id, path=path)
        _check_summary(summary, table, unit.id, config.fingerprint())
        checked.columns = str(table.schema.remove_metadata())
        _compare(checked, expected, table, config)
    except Damaged as error:
        checked.damaged = str(error)
        checked.missing = [_word(place, id) for place, id in expected.items()]
    return checked


def _documents(unit: Unit, config: RunConfig) -> dict[Place, str]:
    """Every document of a unit of the input: where it stands, and its id."""
    return {(document.source, document.place): document.id for document in read_unit(unit, config)}


def _word(place: Place, id: str) -> str:
    return f"{id} ({place[0]}, at {place[1]})"


def _check_summary(summary: writer.UnitSummary, table: pa.Table, unit: str, fingerprint: str) -> None:
    """Raises Damaged when an object's summary is not of its rows, its name and the run."""
    said = (summary.unit, summary.fingerprint, summary.ok, summary.failed)
    holds = (unit, fingerprint, *writer.count_documents(table))
    if said != holds:
        raise Damaged(
            f"unit {unit}: its summary says (unit, fingerprint, ok, failed) = {said}, and it is {holds}; delete the "
            "object and the same command redoes it"
        )


def _compare(checked: _Checked, expected: dict[Place, str], table: pa.Table, config: RunConfig) -> None:
    rows: Counter[Place] = Counter()
    foreign: dict[Place, str] = {}
    bad: set[Place] = set()
    for id, source, row, status in _identities(table):
        if expected.get((source, row)) == id:
            rows[source, row] += 1
            if status != "ok":
                bad.add((source, row))
        else:
            foreign[source, row] = id
    checked.found, checked.failed = len(rows), len(bad)
    checked.ok = checked.found - checked.failed
    checked.missing = [_word(place, id) for place, id in expected.items() if place not in rows]
    checked.foreign = [_word(place, id) for place, id in foreign.items()]
    checked.doubled = [_word(place, expected[place]) for place in _too_often(rows, table, config)]


def _identities(table: pa.Table) -> Iterable[tuple[str, str, int, str]]:
    return zip(*(table[name].to_pylist() for name in _IDENTITY), strict=True)


def _too_often(rows: Counter[Place], table: pa.Table, config: RunConfig) -> list[Place]:
    """Documents with more rows in their object than their task writes.

    A question answering document has a row a question, and questions may be asked twice: there nothing can be said.
    """
    if isinstance(config.task, ExtractionConfig):
        return [place for place, count in rows.items() if count > 1]
    if isinstance(config.task, GenerationConfig):
        names = ("source", "row", "sample", "turn")
        answers = Counter(zip(*(table[name].to_pylist() for name in names), strict=True))
        return [(source, row) for (source, row, _, _), count in answers.items() if count > 1]
    return []


def _add(result: Verification, checked: _Checked) -> None:
    result.units += 1
    result.documents += checked.documents
    result.found += checked.found
    result.ok += checked.ok
    result.failed += checked.failed
    if checked.unreadable is not None:
        result.unreadable.add(0, 1, [checked.unreadable])
        return
    if checked.damaged is not None:
        result.damaged.add(checked.documents, 1, [checked.damaged])
    if checked.absent:
        result.missing.add(checked.documents, 1, [f"unit {checked.unit}: {checked.documents} documents"])
    else:
        result.missing.add(len(checked.missing), 0, checked.missing)
    result.doubled.add(len(checked.doubled), 0, checked.doubled)
    result.foreign.add(len(checked.foreign), 0, checked.foreign)


# ------------------------------------------------------------------------------------------------------- across units


def _add_odd_columns(result: Verification, schemas: dict[str, list[str]]) -> None:
    """All objects have the same columns; one that has others has a damaged footer (no checksum is over that)."""
    for paths in sorted(schemas.values(), key=len)[:-1]:
        result.damaged.add(0, len(paths), [f"{path}: has other columns than most; delete it" for path in paths])


def _repeated_ids(result: Verification, scratch: Scratch) -> None:
    """Ids that several documents of the input share: worth knowing before a join by id, and no doing of raypd."""
    scratch.close("input")
    repeated = "SELECT id, count(*) AS times, min(source) AS source FROM input GROUP BY id HAVING count(*) > 1"
    ids, documents = scratch.one(f"SELECT count(*), coalesce(sum(times), 0) FROM ({repeated})")
    shown = scratch.rows(f"{repeated} ORDER BY times DESC, id LIMIT {EXAMPLES}")
    result.repeated_ids.add(
        int(documents), int(ids), [f"{r['id']}: {r['times']} documents, one in {r['source']}" for r in shown]
    )


def _add_foreign(
    result: Verification,
    committed: dict[str, str],
    foreign: list[str],
    planned: list[str],
    scratch: Scratch,
    threads: int,
) -> None:
    """Objects that no unit of the input has: what is in them, and which documents stand in another object too."""
    scratch.create("output", _OUTPUT)

    def read(unit_id: str, is_planned: bool) -> str | None:
        try:
            _, table = writer.read_table("", unit_id, _IDENTITY, committed[unit_id])
        except Damaged as error:
            return str(error)
        rows = table.select(["id", "source", "row"])
        rows = rows.append_column("object", pa.array([unit_id] * len(rows), pa.string()))
        scratch.add("output", rows.append_column("planned", pa.array([is_planned] * len(rows))).cast(_OUTPUT))
        return None

    for unit_id, damage in zip(foreign, in_threads(lambda u: read(u, False), foreign, threads), strict=True):
        result.foreign.add(0, 1, [f"object {unit_id}: not a unit of this input"])
        if damage is not None:
            result.damaged.add(0, 1, [damage])
    deque(in_threads(lambda u: read(u, True), planned, threads), maxlen=0)  # what is damaged in them is known by now
    scratch.close("output")
    known = "SELECT 1 FROM input i WHERE i.id = o.id AND i.source = o.source AND i.row = o.row"
    queries = {
        "doubled": "SELECT any_value(id) AS id, source, row, string_agg(DISTINCT object, ' and ') AS object "
        "FROM output GROUP BY source, row HAVING count(DISTINCT object) > 1",
        "foreign": f"SELECT DISTINCT id, source, row, object FROM output o WHERE NOT planned AND NOT EXISTS ({known})",
    }
    for name, query in queries.items():
        (count,) = scratch.one(f"SELECT count(*) FROM ({query})")
        shown = scratch.rows(f"{query} ORDER BY source, row LIMIT {EXAMPLES}")
        finding: Finding = getattr(result, name)
        finding.add(int(count), 0, [f"{_word((r['source'], r['row']), r['id'])} in {r['object']}" for r in shown])
