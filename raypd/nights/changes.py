"""Find out what is new or changed in tonight's input.

The input is compared with the index of the last successful night, which has each document's id, the
hash of its contents, its unit and position, and the object with its answer. Units that the index
knows are not read again. In all other units, a document whose id and hash are in the index keeps
its answer. Everything is SQL on disk, so memory does not grow with the corpus.
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
from raypd.dataset import DigestSet, Plan, read_unit
from raypd.errors import InputError
from raypd.run import Part, Unit, Unreadable, make_unit
from raypd.tasks import Document
from raypd.verify import Scratch

_READ = pa.schema(
    {
        "id": "string",
        # Of the document's contents.
        "hash": "uint64",
        # The unit's `unit_key`.
        "unit": "string",
        # The document's index in the unit.
        "position": "int64",
        # The document's object of the input.
        "source": "string",
        # The document's row in `source`.
        "row": "int64",
    }
)
_PLANNED = pa.schema(
    {
        "unit": "string",
        # The number of parts that the plan has before the unit.
        "ordinal": "int64",
    }
)
DAMAGED = pa.schema({"source": "string"})


def unit_key(unit: Unit) -> str:
    """Return 16 hex digits that identify what a unit reads, whatever the configuration."""
    return make_unit(unit.parts, "").id[-16:]


class _ContentHash:
    """Hashes everything that decides a document's answer.

    This is nightly.hash_column if the document has it, and otherwise all columns except the id.
    """

    def __init__(self, config: RunConfig) -> None:
        self._hash_column = config.nightly.hash_column
        columns = {*config.wanted_columns().values(), config.input.category_column}
        columns.discard(config.input.id_column)
        self._columns = sorted(name for name in columns if name)

    def of(self, document: Document) -> int:
        """Return a 64-bit hash."""
        names = self._columns
        hash_column = self._hash_column
        if hash_column and document.fields.get(hash_column) is not None:
            names = [hash_column]
        fields = [[name, document.fields.get(name)] for name in names]
        text = document.error or json.dumps(fields, default=str, sort_keys=True)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big")


@dataclass
class Input:
    """Tonight's input."""

    digest: str  # of the whole input
    units: int = 0  # units that can be read
    # The ids of units that are read object by object, because one of their objects is unreadable.
    apart: set[str] = field(default_factory=set)
    damaged: Unreadable = field(default_factory=Unreadable)
    hidden: str = ""  # a digest of the names of damaged objects


def placed(
    plan: Iterable[Unit], config: RunConfig, apart: Container[str]
) -> Iterator[tuple[int, Unit]]:
    """Yield the plan's units that can be read, in the order of the plan.

    Args:
        plan: The units.
        config: The configuration.
        apart: The ids of units that are read object by object.

    Yields:
        (ordinal, unit).
    """
    ordinal = 0
    for unit in plan:
        singles = [unit]
        if unit.id in apart:
            singles = [make_unit([part], config.fingerprint()) for part in unit.parts]
        yield from enumerate(singles, ordinal)
        ordinal += len(unit.parts)


def unreadable(
    plan: Plan, config: RunConfig, take: Callable[[int, Unit], None], apart: set[str], threads: int
) -> Iterator[tuple[Unit, str]]:
    """Read all units of a plan, and a unit object by object if one of its objects cannot be read.

    Args:
        plan: The plan.
        config: The configuration.
        take: Reads a unit, given its ordinal; is called in threads and raises InputError.
        apart: Gets the ids of units that are read object by object.
        threads: Units that are read at the same time.

    Yields:
        A unit that cannot be read, and the reason.
    """

    def attempt(item: tuple[int, Unit]) -> list[tuple[Unit, str]]:
        """Read a unit; return its parts that cannot be read."""
        ordinal, unit = item
        try:
            take(ordinal, unit)
            return []
        except InputError as error:
            if len(unit.parts) == 1:
                return [(unit, str(error))]
        apart.add(unit.id)
        failures = []
        for offset, single in placed([unit], config, apart):
            failures += attempt((ordinal + offset, single))
        return failures

    for unit in plan.damaged():
        yield unit, str(unit.damaged)
    for failures in storage.in_threads(attempt, placed(plan, config, ()), threads):
        yield from failures


def read_input(scratch: Scratch, plan: Plan, config: RunConfig, indexed_units: DigestSet) -> Input:
    """Read tonight's input into tables.

    Args:
        scratch: Gets the tables `planned` (units), `read` (documents of units that are not known)
            and `damaged` (objects).
        plan: Tonight's plan.
        config: The configuration.
        indexed_units: The keys of units whose documents are in last night's index, as numbers.
    """
    scratch.create("planned", _PLANNED)
    scratch.create("read", _READ)
    scratch.create("damaged", DAMAGED)
    extra_columns = []
    if config.nightly.hash_column is not None:
        extra_columns.append(config.nightly.hash_column)
    content_hash = _ContentHash(config)
    # A plan may have millions of units, so they are not collected.
    digest = hashlib.sha256()
    threads = 1
    for unit in plan:
        digest.update(unit_key(unit).encode())
        threads = max(threads, storage.decoding_threads(unit.parts[0].path))
    tonight = Input(digest.hexdigest()[:16])

    def take(ordinal: int, unit: Unit) -> None:
        key = unit_key(unit)
        if int(key, 16) not in indexed_units:
            documents = read_unit(unit, config, extra_columns)
            scratch.add("read", _read_rows(documents, key, content_hash))
        scratch.add("planned", [{"unit": key, "ordinal": ordinal}])

    for unit, reason in unreadable(plan, config, take, tonight.apart, threads):
        tonight.damaged.add(unit, reason)
        scratch.add("damaged", [{"source": unit.name}])
    tonight.units = scratch.number("SELECT count(*) FROM planned")
    hidden = scratch.row("""
        SELECT coalesce(left(sha256(string_agg(source, '/' ORDER BY source)), 16), '') AS digest
        FROM damaged
        """)
    tonight.hidden = hidden["digest"]
    return tonight


def _read_rows(documents: list[Document], key: str, content_hash: _ContentHash) -> pa.Table:
    """Return the rows of a unit's documents in the table `read`."""
    columns = {
        "id": [document.id for document in documents],
        "hash": [content_hash.of(document) for document in documents],
        "unit": [key] * len(documents),
        "position": [document.index for document in documents],
        "source": [document.source for document in documents],
        "row": [document.row for document in documents],
    }
    return pa.table(columns, schema=_READ)


def units_are_the_same(scratch: Scratch) -> bool:
    """Return whether tonight's plan has the same units as last night's."""
    different = scratch.number("""
        SELECT count(*)
        FROM (SELECT unit FROM known_units WHERE live) k FULL JOIN planned p USING (unit)
        WHERE k.unit IS NULL OR p.unit IS NULL
        """)
    return different == 0


def statement(name: str) -> str:
    """Return the contents of an SQL file of this folder."""
    return (Path(__file__).parent / f"{name}.sql").read_text(encoding="utf-8")


def decide(scratch: Scratch, night: str, usable: str, keep: bool) -> None:
    """Create the table `placed`.

    It has every document of the loaded shards and of the units that were read, whether the table
    shows it, and where its answer is. If several documents share an id, the last document of the
    input wins, ordered by object name and then by position. (Small objects share units, so units
    are ordered differently.) Any document of the input wins over documents that the input no longer
    has. Documents of an object that cannot be read tonight stay, so that a damaged upload does not
    empty the table.

    Args:
        scratch: Has the tables `old`, `planned`, `read` and `damaged`.
        night: The name of the night.
        usable: SQL over `o`, a row of `old`: whether its answer can be kept.
        keep: Whether documents that the input no longer has stay.
    """
    scratch.run(statement("placed").format(night=night, usable=usable, keep=keep))


def touched(scratch: Scratch, all_units: bool) -> None:
    """Create the table `touched`: the units whose objects may change.

    Those are new units, units that have disappeared, and units of documents that the table no
    longer shows, newly shows, or shows with another answer.

    Args:
        scratch: Has the tables `placed`, `old` and `known_units`.
        all_units: Whether all units count, because no object can stay.
    """
    scratch.run(statement("touched").format(all_units=all_units))


def counts(scratch: Scratch) -> dict[str, Any]:
    """Count documents of `placed`: all, new, changed, removed, unchanged, shadowed and stale ones.

    A shadowed document is hidden by a later one with its id. A stale one is in an object that
    cannot be read.
    """
    return scratch.row(statement("counts"))


@dataclass
class PendingDocuments:
    """The documents of a unit that are to be extracted."""

    # The unit's position in the plan.
    ordinal: int
    # The number of documents that the unit has.
    documents: int
    # The numbers of the documents to extract, from 0.
    positions: list[int]


def to_extract(scratch: Scratch, condition: str) -> Iterator[PendingDocuments]:
    """Yield the documents to extract, unit by unit in the order of the plan.

    Args:
        scratch: Has the table `placed`.
        condition: SQL over `placed`.
    """
    pending = scratch.rows(f"""
        WITH sizes AS (
            SELECT ordinal, max(position) + 1 AS documents FROM placed WHERE live GROUP BY ordinal
        )
        SELECT ordinal, documents, position
        FROM placed JOIN sizes USING (ordinal)
        WHERE winner AND live AND {condition}
        ORDER BY ordinal, position
        """)
    for (ordinal, documents), rows in groupby(pending, itemgetter("ordinal", "documents")):
        yield PendingDocuments(ordinal, documents, [row["position"] for row in rows])


def merged_units(
    subsets: Iterable[tuple[Unit, PendingDocuments]], config: RunConfig
) -> Iterator[Unit]:
    """Make units of the documents to extract.

    A night often changes few documents of each unit. Such documents share a unit, so that a night
    answers and commits full units. A unit all of whose documents are to be extracted is not
    merged, because its object can then be an object of the table.

    Args:
        subsets: The units that have such documents, in the order of the plan.
        config: The run's configuration, which limits the documents and bytes of a unit.

    Yields:
        Units in the order of the plan, except that a unit that is not merged may come earlier.
    """
    fingerprint = config.fingerprint()
    limits = config.cluster
    parts: list[Part] = []
    positions: list[int] = []
    first_number = 0
    size = 0.0  # bytes of the documents, if all documents of a unit have the same size
    for unit, pending in subsets:
        count = len(pending.positions)
        if count == pending.documents:
            yield unit.subset(pending.positions)
            continue
        unit_size = unit.bytes * count / pending.documents
        is_full = (
            len(positions) + count > limits.unit_documents
            or len(parts) + len(unit.parts) > limits.unit_documents
            or size + unit_size > limits.unit_bytes
        )
        if parts and is_full:
            yield make_unit(parts, fingerprint).subset(positions)
            parts = []
            positions = []
            first_number = 0
            size = 0.0
        size += unit_size
        parts += unit.parts
        positions += [first_number + position for position in pending.positions]
        first_number += pending.documents
    if parts:
        yield make_unit(parts, fingerprint).subset(positions)
