"""What is new or changed in tonight's input, against the index of the last good night: each
document's id, hash of what is read of it, unit, place, and object of its answer. Units of last
night are not read again; of all others, a document whose id and hash it knows keeps its answer. All
is SQL on disk, so memory does not grow with the corpus.
"""

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset import Plan, read_unit
from raypd.errors import InputError
from raypd.run.unit import Unit, make_unit
from raypd.run.unreadable import Unreadable
from raypd.tasks.base import Document
from raypd.verify.scratch import Scratch
from raypd.verify.table_object import read_object, write_object

_INDEX = pa.schema(
    {
        "id": "string",
        "hash": "uint64",
        "unit": "string",  # its unit_key
        "ordinal": "int64",  # how many parts the plan has before the unit
        "position": "int64",  # of the document in the unit
        "source": "string",  # the object of the input, and of `file` too
        "row": "int64",  # in `source`
        "file": "string",  # the object with its answer, below the nightly root; null: there is none
        "category": "string",
        "ok": "bool",
        "winner": "bool",  # whether the table shows it, of all documents with its id
        # Whether the input has it. If not: it had it (nightly.removed keep, or an object that
        # cannot be read).
        "live": "bool",
        "night": "string",  # the last one in which the input had it
    }
)
_READ = pa.schema(
    [_INDEX.field(name) for name in ("id", "hash", "unit", "position", "source", "row")]
)
_PLANNED = pa.schema([_INDEX.field(name) for name in ("unit", "ordinal")])
DAMAGED = pa.schema([_INDEX.field("source")])
_ROWS_A_FILE = 1_000_000
_THREADS = 8


def unit_key(unit: Unit) -> str:
    """What a unit reads, as 16 hex digits: as its id, but for the configuration."""
    return make_unit(unit.parts, "").id[-16:]


def _content_hash(document: Document, config: RunConfig) -> int:
    """64 bits over what decides a document's answer: nightly.hash_column where it has one, else all
    but the id.
    """
    columns = {*config.wanted_columns().values(), config.input.category_column} - {
        config.input.id_column
    }
    if document.fields.get(config.nightly.hash_column or "") is not None:
        columns = {config.nightly.hash_column}
    fields = [
        [name, document.fields.get(name)] for name in sorted(name for name in columns if name)
    ]
    text = document.error or json.dumps(fields, default=str, sort_keys=True)
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


@dataclass
class Input:
    digest: str  # of all of it
    units: int = 0  # that can be read
    # Ids of units of which one object is unreadable: a unit an object.
    apart: set[str] = field(default_factory=set)
    damaged: Unreadable = field(default_factory=Unreadable)
    hidden: str = ""  # digest of the names of what is damaged


def placed(
    plan: Iterable[Unit], config: RunConfig, apart: Container[str]
) -> Iterator[tuple[int, Unit]]:
    """(ordinal, unit) of the plan's units that can be read, in its order, those in `apart` by their
    objects.
    """
    ordinal = 0
    for unit in plan:
        if unit.id in apart:
            singles = [make_unit([part], config.fingerprint()) for part in unit.parts]
        else:
            singles = [unit]
        yield from enumerate(singles, ordinal)
        ordinal += len(unit.parts)


def unreadable(
    plan: Plan, config: RunConfig, take: Callable[[int, Unit], None], apart: set[str], threads: int
) -> Iterator[tuple[Unit, str]]:
    """Reads all units of a plan, by object where one of several cannot be read; yields what, and
    why. take: reads a unit, by ordinal, in a thread; raises InputError. apart: gets the ids of
    units read by object.
    """

    def attempt(item: tuple[int, Unit]) -> list[tuple[Unit, str]]:
        ordinal, unit = item
        try:
            take(ordinal, unit)
            return []
        except InputError as error:
            if len(unit.parts) == 1:
                return [(unit, str(error))]
        apart.add(unit.id)
        return [
            bad
            for offset, single in placed([unit], config, apart)
            for bad in attempt((ordinal + offset, single))
        ]

    yield from ((unit, str(unit.damaged)) for unit in plan.damaged())
    for bad in storage.in_threads(attempt, placed(plan, config, ()), threads):
        yield from bad


def read_input(scratch: Scratch, plan: Plan, config: RunConfig, index: Iterable[str]) -> Input:
    """Fills `planned` (units), `read` (documents not of last night), `damaged` (objects), `old`
    (last night's).
    """
    for name, schema in {
        "old": _INDEX,
        "planned": _PLANNED,
        "read": _READ,
        "damaged": DAMAGED,
    }.items():
        scratch.create(name, schema)
    for file in index:
        scratch.add("old", read_object(file))
    old_units = {row["unit"] for row in scratch.rows("SELECT DISTINCT unit FROM old WHERE live")}
    extra = [config.nightly.hash_column] if config.nightly.hash_column is not None else []
    digest = hashlib.sha256()
    for unit in plan:  # a plan may have millions
        digest.update(unit_key(unit).encode())
    tonight = Input(digest.hexdigest()[:16])

    def take(ordinal: int, unit: Unit) -> None:
        key = unit_key(unit)
        if key not in old_units:
            documents = read_unit(unit, config, extra)
            rows = (
                (d.id, _content_hash(d, config), key, d.index, d.source, d.place) for d in documents
            )
            scratch.add("read", [dict(zip(_READ.names, row, strict=True)) for row in rows])
        scratch.add("planned", [{"unit": key, "ordinal": ordinal}])

    for unit, reason in unreadable(plan, config, take, tonight.apart, _THREADS):
        tonight.damaged.add(unit, reason)
        scratch.add("damaged", [{"source": unit.name}])
    tonight.units, tonight.hidden = scratch.row("""
        SELECT (SELECT count(*) FROM planned) AS units,
            coalesce(left(sha256(string_agg(source, '/' ORDER BY source)), 16), '') AS hidden FROM damaged""").values()  # noqa: E501
    return tonight


def units_are_the_same(scratch: Scratch) -> bool:
    return not scratch.number(
        "SELECT count(*) FROM (SELECT DISTINCT unit FROM old WHERE live) o FULL JOIN "
        "planned p USING (unit) "
        "WHERE o.unit IS NULL OR p.unit IS NULL"
    )


def statement(name: str) -> str:
    """One of the files of SQL beside this one."""
    return (Path(__file__).parent / f"{name}.sql").read_text(encoding="utf-8")


def decide(scratch: Scratch, night: str, usable: str, keep: bool) -> None:
    """Makes `placed`: every document of tonight, whether it is the winner of its id, and where its
    answer is.

    Of several documents with one id the last of the input wins, by the names of objects, then by
    place (small objects share units, so these are in another order), and all win over what the
    input does not have anymore. Documents of an object that cannot be read tonight stay: a damaged
    upload does not empty the table.

    Needs `old`, `planned`, `read`, `damaged`. usable: SQL over `o` of `old`: its answer stands.
    keep: what left too.
    """
    scratch.run(statement("placed").format(night=night, usable=usable, keep=keep))


def counts(scratch: Scratch) -> dict[str, Any]:
    """Documents: all, new, changed, removed, unchanged; shadowed: hidden by a later one; stale:
    object unreadable.
    """
    return scratch.row(statement("counts"))


def to_extract(scratch: Scratch, condition: str) -> Iterator[tuple[int, list[int]]]:
    """(ordinal of a unit, positions) of what is to be extracted, in the plan's order. condition:
    SQL over `placed`.
    """
    pending = scratch.rows(
        f"SELECT ordinal, position FROM placed WHERE winner AND live AND {condition} ORDER "
        "BY ordinal, position"
    )
    for ordinal, rows in groupby(pending, itemgetter("ordinal")):
        yield ordinal, [row["position"] for row in rows]


def write_index(scratch: Scratch, query: str, root: str, folder: str) -> list[str]:
    """Stores the rows of a query over the columns of _INDEX below the nightly root; the names of
    the files.
    """
    files: list[str] = []
    for batch in scratch.batches(query, _ROWS_A_FILE):
        files.append(f"{folder}/{len(files):06d}.parquet")
        write_object(
            storage.join(root, files[-1]),
            pa.Table.from_batches([batch]).select(_INDEX.names).cast(_INDEX),
        )
    return files
