"""The index of the last successful night: every document, and every unit of the plan.

The documents are in shards, each of which covers a range of ids. All documents with the same id are
in one shard, and documents that are ordered by id in the input are in few shards. A night loads the
shards that may change and writes those that did. What changes for many documents together (the
object with their answers, the last night in which the input had them) is therefore not in the
shards, but in the table of units.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.dataset import DigestSet
from raypd.nights.state import NightState, Shard
from raypd.verify import Scratch, read_object, write_object

# A document in a shard.
_DOCUMENTS = pa.schema(
    {
        "id": "string",
        "hash": "uint64",
        # The unit's `unit_key`.
        "unit": "string",
        # The document's index in the unit.
        "position": "int64",
        # The document's object of the input; its row in the table has the same source.
        "source": "string",
        # The document's row in `source`.
        "row": "int64",
        # Only for a document that the table does not show: the object with its answer, below the
        # nightly root; null if there is no answer. Other answers are in the object of their unit.
        "file": "string",
        "category": "string",
        "ok": "bool",
        # Whether this document is the one with its id that the table shows.
        "winner": "bool",
    }
)
_UNITS = pa.schema(
    {
        "unit": "string",
        # The object with the unit's documents that the table shows, below the nightly root; null
        # if the table shows none.
        "file": "string",
        # The number of these documents.
        "documents": "int64",
        # Whether the input has the unit. Other units were in the input before (nightly.removed is
        # keep, or their object cannot be read).
        "live": "bool",
        # The last night in which the input had the unit; null if it has it now.
        "night": "string",
        # The smallest and the largest id of all of its documents.
        "first_id": "string",
        "last_id": "string",
    }
)
# A document in an index of the first versions of raypd, which was a single list.
_WHOLE = pa.schema(
    [
        *(_DOCUMENTS.field(name) for name in _DOCUMENTS.names),
        pa.field("live", pa.bool_()),
        pa.field("night", pa.string()),
    ]
)
# Documents of a shard. Loading one takes tens of megabytes.
SHARD_ROWS = 100_000
_UNITS_PER_FILE = 1_000_000
_BATCH_ROWS = 50_000


class Index:
    """The index of the last successful night, from which tonight's index is made.

    Creates the tables `known_units` (all units), `loaded` and `old` (documents of the shards that
    have been loaded; `old` has the columns of their units as well) and `spans` (shards).

    Args:
        scratch: Gets the tables.
        root: The nightly root.
        state: The last successful night; None if there is none, or if it is not used.
    """

    def __init__(self, scratch: Scratch, root: str, state: NightState | None) -> None:
        self._scratch = scratch
        self._root = root
        self._night = ""
        self._loaded: set[int] = set()
        self.shards: list[Shard] = []
        self.unit_files: list[str] = []
        scratch.create("known_units", _UNITS)
        scratch.create("loaded", _DOCUMENTS.append(pa.field("shard", pa.int64())))
        if state is not None:
            self._night = state.night
            self.shards = list(state.shards)
            for file in state.units:
                scratch.add("known_units", read_object(storage.join(root, file)))
        if not self.shards:
            # This shard covers all ids.
            self.shards = [Shard("", "")]
            self._loaded = {0}
            if state is not None:
                self._convert(state.index)
        spans = pa.schema({"shard": "int64", "first": "string", "next": "string"})
        scratch.create("spans", spans)
        firsts: list[str | None] = [shard.first for shard in self.shards]
        numbers = list(range(len(firsts)))
        columns = [numbers, firsts, [*firsts[1:], None]]
        scratch.add("spans", pa.table(columns, schema=spans))
        self._join_units()

    def _convert(self, files: Iterable[str]) -> None:
        """Load an index of the first versions, as one shard."""
        self._scratch.create("whole", _WHOLE)
        for file in files:
            rows = read_object(storage.join(self._root, file))
            self._scratch.add("whole", rows.select(_WHOLE.names).cast(_WHOLE))
        self._scratch.run("""
            INSERT INTO known_units
            SELECT unit, any_value(file) FILTER (winner), count(*) FILTER (winner), bool_or(live),
                CASE WHEN NOT bool_or(live) THEN max(night) END, min(id), max(id)
            FROM whole GROUP BY unit
            """)
        self._scratch.run("""
            INSERT INTO loaded
            SELECT * EXCLUDE (live, night) REPLACE (CASE WHEN NOT winner THEN file END AS file), 0
            FROM whole
            """)
        self._scratch.run("DROP TABLE whole")

    def _join_units(self) -> None:
        """Make the table `old` from the documents that have been loaded."""
        self._scratch.run(f"""
            CREATE OR REPLACE TABLE old AS
            SELECT d.* EXCLUDE (shard) REPLACE (
                    CASE WHEN d.winner THEN u.file ELSE d.file END AS file),
                NULL::BIGINT AS ordinal, u.live, coalesce(u.night, '{self._night}') AS night
            FROM loaded d JOIN known_units u USING (unit)
            """)

    def live_units(self) -> DigestSet:
        """Return the keys of the input's units in the last successful night, as numbers."""
        rows = self._scratch.rows("SELECT unit FROM known_units WHERE live")
        return DigestSet(int(row["unit"], 16) for row in rows)

    def load_affected(self, all_dead: bool, failed: bool, everything: bool) -> None:
        """Load the shards that may have a document that tonight's input changes.

        Args:
            all_dead: Whether documents that the input no longer had may leave the table.
            failed: Whether failed documents are extracted again.
            everything: Whether all documents are extracted again.
        """
        affected = f"""
            SELECT k.unit FROM known_units k LEFT JOIN planned p USING (unit)
            WHERE k.live != (p.unit IS NOT NULL) OR NOT k.live AND {all_dead}
            """
        numbers = self._shards_of_units(affected)
        numbers |= self._numbers("""
            SELECT DISTINCT s.shard FROM read r ASOF JOIN spans s ON r.id >= s.first
            """)
        for number, shard in enumerate(self.shards):
            if everything or (failed and shard.failed):
                numbers.add(number)
        self._load(numbers)

    def load_units(self, query: str) -> bool:
        """Load all shards that may have documents of some units.

        Args:
            query: SQL with the column `unit`.

        Returns:
            Whether there were shards to load.
        """
        return self._load(self._shards_of_units(query))

    def _shards_of_units(self, query: str) -> set[int]:
        return self._numbers(f"""
            SELECT DISTINCT s.shard
            FROM spans s JOIN known_units k
                ON k.last_id >= s.first AND (s.next IS NULL OR k.first_id < s.next)
            WHERE k.unit IN ({query})
            """)

    def _numbers(self, query: str) -> set[int]:
        return {row["shard"] for row in self._scratch.rows(query)}

    def _load(self, numbers: set[int]) -> bool:
        """Load the shards with these numbers; return whether one was not loaded yet."""
        numbers = numbers - self._loaded
        for number in sorted(numbers):
            rows = read_object(storage.join(self._root, self.shards[number].file))
            shard = pa.repeat(pa.scalar(number, pa.int64()), len(rows))
            self._scratch.add("loaded", rows.append_column("shard", shard))
        if numbers:
            self._loaded |= numbers
            self._join_units()
        return bool(numbers)

    def not_loaded(self) -> list[Shard]:
        """Return the shards whose documents do not change."""
        return [shard for number, shard in enumerate(self.shards) if number not in self._loaded]

    def write(self, folder: str, documents: str, units: str) -> None:
        """Write the shards that have changed, and the table of units.

        Afterwards, `shards` and `unit_files` are those of tonight.

        Args:
            folder: The folder for them, below the root.
            documents: SQL for the documents of all loaded shards.
            units: SQL for all units.
        """
        columns = ", ".join(_DOCUMENTS.names)
        self._scratch.run(f"""
            CREATE TABLE indexed AS
            SELECT d.*, s.shard FROM ({documents}) d ASOF JOIN spans s ON d.id >= s.first
            """)
        digests = f"SELECT shard, count(*) AS documents, sum(hash({columns})) AS digest"
        changed = self._numbers(f"""
            SELECT shard
            FROM ({digests} FROM indexed GROUP BY shard) a
                FULL JOIN ({digests} FROM loaded GROUP BY shard) b USING (shard)
            WHERE a.documents IS DISTINCT FROM b.documents OR a.digest IS DISTINCT FROM b.digest
            """)
        # A shard without a file belongs to the first night, or to a converted index.
        changed |= {number for number, shard in enumerate(self.shards) if not shard.file}
        written = self._write_shards(folder, sorted(changed))
        shards = []
        for number, shard in enumerate(self.shards):
            if number in changed:
                shards += written.get(number, [])
            else:
                shards.append(shard)
        if shards:
            shards[0] = replace(shards[0], first="")
        self.shards = shards
        self.unit_files = []
        for batch in self._scratch.batches(units, _UNITS_PER_FILE):
            file = f"{folder}/units-{len(self.unit_files):06d}.parquet"
            table = pa.Table.from_batches([batch]).select(_UNITS.names).cast(_UNITS)
            write_object(storage.join(self._root, file), table)
            self.unit_files.append(file)

    def _write_shards(self, folder: str, changed: list[int]) -> dict[int, list[Shard]]:
        """Write the documents of shards; consecutive shards are joined and divided again.

        Args:
            folder: The folder for them, below the root.
            changed: The numbers of the shards, in order.

        Returns:
            The number of the first of some consecutive shards -> their new shards.
        """
        # The number of a shard -> the number of the first of the consecutive shards that it is in.
        run_of: dict[int, int] = {}
        for number in changed:
            run_of[number] = run_of.get(number - 1, number)
        rows_of_run = dict.fromkeys(run_of.values(), 0)
        counts = self._scratch.rows(
            "SELECT shard, count(*) AS documents FROM indexed GROUP BY shard"
        )
        for count in counts:
            if count["shard"] in run_of:
                rows_of_run[run_of[count["shard"]]] += count["documents"]
        written: dict[int, list[Shard]] = {run: [] for run in rows_of_run}
        number_of_file = 0
        for run, rows in self._runs(run_of):
            shards = written[run]
            pieces = max(1, round(rows_of_run[run] / SHARD_ROWS))
            for table in _pieces(rows, -(-rows_of_run[run] // pieces)):
                first = self.shards[run].first
                if shards:
                    first = table["id"][0].as_py()
                file = f"{folder}/shard-{number_of_file:06d}.parquet"
                number_of_file += 1
                write_object(storage.join(self._root, file), table)
                shards.append(_shard(file, first, table))
        return written

    def _runs(self, run_of: dict[int, int]) -> Iterator[tuple[int, Iterator[pa.Table]]]:
        """Yield the documents of consecutive shards, ordered by id, in tables.

        Args:
            run_of: The number of a shard -> the number of the first of the consecutive shards that
                it is in.
        """
        if not run_of:
            return
        numbers = ", ".join(map(str, run_of))
        query = f"""
            SELECT * FROM indexed WHERE shard IN ({numbers}) ORDER BY id, unit, position
            """
        run_numbers = np.full(len(self.shards), -1)
        for number, run in run_of.items():
            run_numbers[number] = run

        def slices() -> Iterator[tuple[int, pa.Table]]:
            for batch in self._scratch.batches(query, _BATCH_ROWS):
                runs = run_numbers[batch["shard"].to_numpy()]
                table = pa.Table.from_batches([batch]).select(_DOCUMENTS.names).cast(_DOCUMENTS)
                starts = [0, *(np.flatnonzero(np.diff(runs)) + 1).tolist(), len(runs)]
                for start, end in itertools.pairwise(starts):
                    yield int(runs[start]), table.slice(start, end - start)

        for run, group in itertools.groupby(slices(), itemgetter(0)):
            yield run, (table for _, table in group)


def _pieces(tables: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Cut rows that are ordered by id into tables of a given size, without separating equal ids."""
    pending = _DOCUMENTS.empty_table()
    for table in tables:
        pending = pa.concat_tables([pending, table])
        while len(pending) > rows:
            last_id = pending["id"][rows - 1]
            # The ids are in order, so the documents up to the last one with this id come first.
            cut = pc.sum(pc.less_equal(pending["id"], last_id)).as_py()
            if cut == len(pending):
                break
            yield pending.slice(0, cut)
            pending = pending.slice(cut)
    if len(pending):
        yield pending


def _shard(file: str, first: str, table: pa.Table) -> Shard:
    """Describe a file of documents."""
    winners = table.filter(table["winner"])
    failed = pc.sum(pc.invert(winners["ok"])).as_py() or 0
    return Shard(file, first, len(table), len(winners), failed)
