"""What is new or changed in tonight's input, document by document, against the index of the last good night.

The index has a row for every document of the input: its id, a hash of what is read of it, its unit and place, and the
object that holds its answer. A unit that was there last night is not read again; the documents of all others are, and
one whose id and hash the index knows keeps its answer. All of it is SQL on disk, so memory does not grow with the
corpus.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset.plan import Plan
from raypd.dataset.reader import read_unit
from raypd.errors import InputError
from raypd.run.manifest import Unreadable
from raypd.run.unit import Unit, make_unit
from raypd.storage.threads import in_threads
from raypd.tasks.base import Document
from raypd.verify.scratch import Scratch

# unit: `unit_key`. ordinal: how many parts the plan has before the unit. position: of the document in the unit.
# source, row: where the document stands in the input, and in `file` too. file: the object with its answer, below the
# nightly root; null where there is none. winner: whether it is the one of its id that the table shows. live: whether
# the input has it, or has had it (nightly.removed keep, or it stands in an object that cannot be read); then night is
# the last one when it did.
INDEX = pa.schema(
    [
        ("id", pa.string()),
        ("hash", pa.uint64()),
        ("unit", pa.string()),
        ("ordinal", pa.int64()),
        ("position", pa.int64()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("file", pa.string()),
        ("category", pa.string()),
        ("ok", pa.bool_()),
        ("winner", pa.bool_()),
        ("live", pa.bool_()),
        ("night", pa.string()),
    ]
)
_READ = pa.schema([INDEX.field(name) for name in ("id", "hash", "unit", "position", "source", "row")])
_PLANNED = pa.schema([INDEX.field("unit"), INDEX.field("ordinal")])
_DAMAGED = pa.schema([INDEX.field("source")])
_ROWS_A_FILE = 1_000_000


def unit_key(unit: Unit) -> str:
    """What a unit reads, as 16 hex digits: as its id, but for the configuration."""
    keys = ["\0".join([p.name, p.version, str(p.start), str(p.end)]) for p in unit.parts]
    return hashlib.sha256("\0\0".join(keys).encode()).hexdigest()[:16]


def content_hash(document: Document, config: RunConfig) -> int:
    """64 bits over what decides a document's answer: nightly.hash_column, else all columns that are read but the id."""
    if document.error is not None:
        text = document.error
    elif config.nightly.hash_column is not None:
        text = json.dumps(document.fields.get(config.nightly.hash_column), default=str)
    else:
        read = {*config.wanted_columns().values(), config.input.category_column or ""}
        names = sorted(read - {config.input.id_column, ""})
        text = json.dumps([[name, document.fields.get(name)] for name in names], default=str, sort_keys=True)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


# ---------------------------------------------------------------------------------------------------------------- input


def load_index(scratch: Scratch, root: str, files: Iterable[str]) -> None:
    """Makes the index of the last good night known to SQL as `old`; empty where there was none."""
    local = []
    for number, file in enumerate(files):
        path = scratch.folder / f"old-{number:06d}.parquet"
        path.write_bytes(storage.read(storage.join(root, *file.split("/"))))
        local.append(str(path))
    if not local:
        path = scratch.folder / "old.parquet"
        pq.write_table(INDEX.empty_table(), path)
        local.append(str(path))
    scratch.view("old", local)


@dataclass
class Input:
    """What tonight's input is. units: that can be read. digest: of all, the same for the same input.

    apart: ids of units of several objects, of which one cannot be read: each object is a unit of its own. damaged: what
    cannot be read; hidden: digest of the names of that.
    """

    units: int = 0
    digest: str = ""
    apart: set[str] = field(default_factory=set)
    damaged: Unreadable = field(default_factory=Unreadable)
    hidden: str = ""


def placed(plan: Iterable[Unit], config: RunConfig, apart: Container[str]) -> Iterator[tuple[int, Unit]]:
    """(ordinal, unit) of the plan's units that can be read, in its order, those in `apart` by their objects."""
    ordinal = 0
    for unit in plan:
        singles = [make_unit([part], config.fingerprint()) for part in unit.parts] if unit.id in apart else [unit]
        yield from enumerate(singles, ordinal)
        ordinal += len(unit.parts)


def read_input(scratch: Scratch, plan: Plan, config: RunConfig, threads: int = 8) -> Input:
    """Fills `planned` with the units, `read` with the documents of those that last night did not have, and `damaged`
    with the names of the objects that cannot be read."""
    known = {row["unit"] for row in scratch.rows("SELECT DISTINCT unit FROM old WHERE live")}
    extra = [config.nightly.hash_column] if config.nightly.hash_column is not None else []
    scratch.create("planned", _PLANNED)
    scratch.create("read", _READ)
    scratch.create("damaged", _DAMAGED)
    found, digest, hidden = Input(), hashlib.sha256(), hashlib.sha256()

    def look(item: tuple[int, Unit]) -> list[tuple[Unit, str]]:
        """Takes up a unit; what of it cannot be read, and why."""
        ordinal, unit = item
        key = unit_key(unit)
        if key in known:
            scratch.add("planned", pa.table([[key], [ordinal]], schema=_PLANNED))
            return []
        try:
            documents = read_unit(unit, config, extra)
        except InputError as error:
            if len(unit.parts) == 1:
                return [(unit, str(error))]
            found.apart.add(unit.id)
            singles = placed([unit], config, {unit.id})
            return [bad for number, single in singles for bad in look((ordinal + number, single))]
        scratch.add("planned", pa.table([[key], [ordinal]], schema=_PLANNED))
        columns: list[list[Any]] = [
            [document.id for document in documents],
            [content_hash(document, config) for document in documents],
            [key] * len(documents),
            [document.row for document in documents],
            [document.source for document in documents],
            [document.place for document in documents],
        ]
        scratch.add("read", pa.table(columns, schema=_READ))
        return []

    def leave_out(unit: Unit, reason: str) -> None:
        found.damaged.add(unit, reason)
        hidden.update(f"{unit.name}\0".encode())
        scratch.add("damaged", pa.table([[unit.name]], schema=_DAMAGED))

    for unit in plan.damaged():
        leave_out(unit, str(unit.damaged))
    for bad in in_threads(look, _digested(placed(plan, config, ()), digest), threads):
        for unit, reason in bad:
            leave_out(unit, reason)
    for name in ("planned", "read", "damaged"):
        scratch.close(name)
    (found.units,) = map(int, scratch.one("SELECT count(*) FROM planned"))
    found.digest, found.hidden = digest.hexdigest()[:16], hidden.hexdigest()[:16] if found.damaged.units else ""
    return found


def _digested(units: Iterable[tuple[int, Unit]], digest: Any) -> Iterator[tuple[int, Unit]]:
    for ordinal, unit in units:
        digest.update(unit_key(unit).encode())
        yield ordinal, unit


def units_are_the_same(scratch: Scratch) -> bool:
    """Whether tonight's units are those of last night."""
    (different,) = scratch.one(
        "SELECT count(*) FROM (SELECT DISTINCT unit FROM old WHERE live) o FULL JOIN planned p USING (unit) "
        "WHERE o.unit IS NULL OR p.unit IS NULL"
    )
    return int(different) == 0


# ------------------------------------------------------------------------------------------------------------- decision


def decide(scratch: Scratch, night: str, usable: str, keep: bool) -> None:
    """Makes `placed`: every document of tonight, whether it is the winner of its id, and where its answer is.

    Of several documents with one id the last of the input wins, by the names of objects and then by place (units do
    not come in this order: small objects share one). usable: SQL
    over `o`, which says of an old document whether its answer can stand. keep: documents that the input does not have
    anymore stay; every document of the input wins over them. Those of an object that cannot be read tonight stay in
    any case: a damaged upload does not empty the table.
    """
    columns = "id, hash, unit, ordinal, position, source, row"
    old = "o.id, o.hash, o.unit, p.ordinal, o.position, o.source, o.row"
    kept = (
        "UNION ALL SELECT o.id, o.hash, o.unit, o.ordinal, o.position, o.source, o.row, o.file, o.category, o.ok, "
        "FALSE, o.night FROM old o WHERE o.winner AND o.file IS NOT NULL AND o.unit NOT IN (SELECT unit FROM planned) "
        f"AND ({keep} OR o.source IN (SELECT source FROM damaged))"
    )
    scratch.run(f"""
        CREATE TABLE entries AS
        SELECT {columns}, NULL::VARCHAR AS file, NULL::VARCHAR AS category, NULL::BOOLEAN AS ok, TRUE AS live,
            '{night}' AS night
        FROM read JOIN planned USING (unit)
        UNION ALL
        SELECT {old}, CASE WHEN {usable} THEN o.file END, o.category, o.ok, TRUE, '{night}'
        FROM old o JOIN planned p USING (unit) WHERE o.live
        {kept}""")
    scratch.run(f"""
        CREATE TABLE known AS
        SELECT id, hash, any_value(struct_pack(file := file, source := source, "row" := "row", category := category,
            ok := ok)) AS there
        FROM old o WHERE file IS NOT NULL AND {usable} GROUP BY id, hash""")
    scratch.run("""
        CREATE TABLE placed AS
        SELECT e.id, e.hash, e.unit, e.ordinal, e.position, e.source, e.row, e.live, e.night,
            row_number() OVER (PARTITION BY e.id
                ORDER BY e.live DESC, e.night DESC, e.source DESC, e.row DESC) = 1 AS winner,
            coalesce(e.file, k.there.file) AS file,
            CASE WHEN e.file IS NULL THEN k.there.source ELSE e.source END AS from_source,
            CASE WHEN e.file IS NULL THEN k.there.row ELSE e.row END AS from_row,
            CASE WHEN e.file IS NULL THEN k.there.category ELSE e.category END AS category,
            CASE WHEN e.file IS NULL THEN k.there.ok ELSE e.ok END AS ok
        FROM entries e LEFT JOIN known k ON e.file IS NULL AND k.id = e.id AND k.hash = e.hash""")
    scratch.run("DROP TABLE entries; DROP TABLE known")


def counts(scratch: Scratch) -> dict[str, int]:
    """Documents of the table: all, new, changed, removed, unchanged; shadowed: hidden by a later one of their id.

    stale: those that stay though their object cannot be read tonight.
    """
    names = ("documents", "new", "changed", "shadowed", "stale")
    found = scratch.one("""
        SELECT count(*) FILTER (winner),
            count(*) FILTER (winner AND file IS NULL AND w.id IS NULL),
            count(*) FILTER (winner AND file IS NULL AND w.id IS NOT NULL),
            count(*) FILTER (NOT winner AND live),
            count(*) FILTER (winner AND NOT live AND source IN (SELECT source FROM damaged))
        FROM placed p LEFT JOIN (SELECT DISTINCT id FROM old WHERE winner) w ON w.id = p.id""")
    made = dict(zip(names, map(int, found), strict=True))
    (removed,) = scratch.one(
        "SELECT count(*) FROM old o "
        "WHERE o.winner AND NOT EXISTS (SELECT 1 FROM placed p WHERE p.winner AND p.id = o.id)"
    )
    return {**made, "removed": int(removed), "unchanged": made["documents"] - made["new"] - made["changed"]}


def to_extract(scratch: Scratch, condition: str = "file IS NULL") -> Iterator[tuple[int, list[int]]]:
    """(ordinal of a unit, positions of its documents) of what is to be extracted, in the order of the plan.

    condition: SQL over `placed`.
    """
    found = scratch.rows(
        f"SELECT ordinal, position FROM placed WHERE winner AND live AND {condition} ORDER BY ordinal, position"
    )
    ordinal = -1
    positions: list[int] = []
    for row in found:
        if row["ordinal"] != ordinal:
            if positions:
                yield ordinal, positions
            ordinal, positions = int(row["ordinal"]), []
        positions.append(int(row["position"]))
    if positions:
        yield ordinal, positions


# ---------------------------------------------------------------------------------------------------------------- index


def write_index(scratch: Scratch, query: str, root: str, folder: str) -> list[str]:
    """Stores the rows of a query over the columns of INDEX below the nightly root; the names of the files."""
    files: list[str] = []
    held: list[pa.RecordBatch] = []

    def flush() -> None:
        files.append(f"{folder}/{len(files):06d}.parquet")
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_batches(held).cast(INDEX), sink, compression="zstd", write_page_checksum=True)
        storage.put(storage.join(root, *files[-1].split("/")), sink.getvalue().to_pybytes())
        held.clear()

    for batch in scratch.batches(query, 100_000):
        held.append(batch)
        if sum(map(len, held)) >= _ROWS_A_FILE:
            flush()
    if held:
        flush()
    return files
