"""The table of a night: objects that contain every document of tonight exactly once.

Readers use the list of these objects. An object stays as long as all of its documents stay in the
table. Otherwise a new object is written from existing rows.
"""

from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import raypd.nights.schema_change as schema_change
from raypd import storage
from raypd.config import RunConfig
from raypd.errors import RunError
from raypd.nights.changes import statement
from raypd.text import counted
from raypd.verify import Scratch, read_object, write_object

_ROWS = pa.schema(
    {
        "file": "string",
        "source": "string",
        "row": "int64",
        "ok": "bool",
        "category": "string",
    }
)
_ANSWER_COLUMNS = ["source", "row", "status", "category"]
# Objects with tonight's answers that are kept decoded; each has at most the documents of a unit.
_FRESH_OBJECTS = 8


def add_answers(scratch: Scratch, name: str, root: str, files: Iterable[str]) -> None:
    """Fill a table with the documents of tonight's objects.

    Args:
        scratch: Gets the table.
        name: The name of the table.
        root: The nightly root.
        files: The objects, below the root.
    """
    scratch.create(f"{name}_rows", _ROWS)

    def add_object(file: str) -> None:
        rows = read_object(storage.join(root, file), _ANSWER_COLUMNS)
        category = pa.nulls(len(rows), pa.string())
        if "category" in rows.column_names:
            category = rows["category"]
        columns = [
            [file] * len(rows),
            rows["source"],
            rows["row"],
            pc.equal(rows["status"], "ok"),
            category,
        ]
        scratch.add(f"{name}_rows", pa.table(columns, schema=_ROWS))

    for _ in storage.in_threads(add_object, files, storage.decoding_threads(root)):
        pass
    scratch.run(f"""
        CREATE TABLE {name} AS
        SELECT file, source, row, bool_and(ok) AS ok, any_value(category) AS category
        FROM {name}_rows GROUP BY ALL
        """)


def settle(scratch: Scratch, folder: str, everything_again: bool) -> None:
    """Decide where each document's row comes from, and which object each touched unit gets.

    Args:
        scratch: Has the tables `placed`, `touched`, `known_units`, `answered` and `added`; gets
            the tables `final` (documents) and `homes` (objects of touched units).
        folder: The folder of tonight's objects, below the root.
        everything_again: Whether no old object can stay, because the schema has changed.

    Raises:
        RunError: If a document of the input has no row.
    """
    scratch.run(statement("final"))
    without_row = scratch.number("SELECT count(*) FROM final WHERE winner AND file IS NULL")
    if without_row:
        documents = counted(without_row, "document")
        raise RunError(
            f"{documents} of the input have no row although tonight's run ended; run the "
            "command again"
        )
    # An object of an earlier night that has more documents than the table shows cannot stay.
    stays = f"""
        count(DISTINCT f.file) = 1
        AND bool_and(f.from_source = f.source AND f.from_row = f.row)
        AND coalesce(any_value(h.documents), -1) = count(*)
        AND {not everything_again}
        """
    scratch.run(f"""
        CREATE TABLE homes AS
        WITH held AS (
            SELECT file, documents FROM known_units WHERE file IS NOT NULL
            UNION ALL
            SELECT file, count(*) FROM answered GROUP BY file
        )
        SELECT f.unit, count(*) AS documents, {stays} AS stays,
            CASE WHEN {stays} THEN min(f.file) ELSE '{folder}/' || f.unit || '.parquet' END AS file
        FROM final f LEFT JOIN held h USING (file)
        WHERE f.winner AND f.unit IN (SELECT unit FROM touched) GROUP BY f.unit
        """)


def indexed_documents(everything_again: bool) -> str:
    """Return SQL for the documents of the loaded shards, as they are in tonight's index.

    A document that a later one hides keeps its answer if its object stays.

    Args:
        everything_again: Whether no old object can stay, because the schema has changed.
    """
    hidden = "CASE WHEN NOT winner AND from_source = source AND from_row = row THEN file END"
    if everything_again:
        hidden = "NULL::VARCHAR"
    return f"""
        SELECT id, hash, unit, position, source, row, {hidden} AS file, category, ok, winner
        FROM final WHERE live OR winner
        """


def list_units(scratch: Scratch) -> None:
    """Create the table `units`: all units of tonight's table and input, with their objects.

    Args:
        scratch: Has the tables of `settle`, `planned` and `known_units`.
    """
    scratch.run(statement("units"))


def compose(
    scratch: Scratch, root: str, config: RunConfig, change: schema_change.Change | None
) -> None:
    """Write the objects of `homes` that cannot stay as they are.

    Args:
        scratch: Has the tables of `settle`.
        root: The nightly root.
        config: The configuration.
        change: The change of the categories; None if they have not changed.
    """
    documents = scratch.rows("""
        SELECT f.unit, h.file AS home, f.source, f.row, f.file, f.from_source, f.from_row,
            f.category, f.added_file, f.file IN (SELECT file FROM answered) AS fresh
        FROM final f JOIN homes h USING (unit)
        WHERE f.winner AND NOT h.stays
        ORDER BY f.ordinal, f.unit, f.position, f.source, f.row
        """)
    units = (list(rows) for _, rows in groupby(documents, itemgetter("unit")))
    answers = _Answers(root)

    def write_unit(rows: list[dict[str, Any]]) -> None:
        if change is None:
            unit_rows = answers.rows_of(rows)
        else:
            unit_rows = _joined(rows, answers, config, change)
        write_object(storage.join(root, rows[0]["home"]), unit_rows)

    for _ in storage.in_threads(write_unit, units, storage.decoding_threads(root)):
        pass


class _ObjectRows:
    """The rows of an object, by document.

    Args:
        root: The nightly root.
        file: The object, below the root.
    """

    def __init__(self, root: str, file: str) -> None:
        self._file = file
        self.table = read_object(storage.join(root, file)).replace_schema_metadata(None)
        # (source, row) of a document -> its rows in `table`.
        self._rows: dict[tuple[str, int], list[int]] = {}
        sources = self.table["source"].to_pylist()
        keys = zip(sources, self.table["row"].to_pylist(), strict=True)
        for index, key in enumerate(keys):
            self._rows.setdefault(key, []).append(index)

    def indices(self, source: str, row: int) -> list[int]:
        """Return the rows of a document, as indices of `table`.

        Raises:
            RunError: If the object does not have the document.
        """
        indices = self._rows.get((source, row))
        if indices is None:
            raise RunError(
                f"{self._file}: has no row for {source}, at {row}, although the index lists it; "
                "run with --full"
            )
        return indices

    @cached_property
    def dicts(self) -> list[dict[str, Any]]:
        """Return the rows of `table`."""
        return list(self.table.to_pylist())


class _Answers:
    """The rows of the objects that have the documents' answers.

    Args:
        root: The nightly root.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        # Consecutive units take their new answers from the same objects.
        self._fresh = lru_cache(_FRESH_OBJECTS)(self._read)

    def _read(self, file: str) -> _ObjectRows:
        return _ObjectRows(self._root, file)

    def of(self, documents: list[dict[str, Any]]) -> dict[str, _ObjectRows]:
        """Return the objects that documents of a unit take their rows from, by name.

        Args:
            documents: The unit's rows of the query in `compose`.
        """
        objects: dict[str, _ObjectRows] = {}
        for document in documents:
            file = document["file"]
            if file not in objects:
                read = self._read
                if document["fresh"]:
                    read = self._fresh
                objects[file] = read(file)
            added_file = document["added_file"]
            if added_file and added_file not in objects:
                objects[added_file] = self._fresh(added_file)
        return objects

    def rows_of(self, documents: list[dict[str, Any]]) -> pa.Table:
        """Return the rows of documents of a unit, with each document's source and row tonight."""
        objects = self.of(documents)
        first_rows: dict[str, int] = {}
        tables = []
        rows_before = 0
        for file, rows in objects.items():
            first_rows[file] = rows_before
            tables.append(rows.table)
            rows_before += len(rows.table)
        # A field that a later version of raypd added to `values` is null in rows of an earlier one.
        table = pa.concat_tables(tables, promote_options="permissive")
        indices: list[int] = []
        new_sources: list[str] = []
        new_rows: list[int] = []
        for document in documents:
            file = document["file"]
            for index in objects[file].indices(document["from_source"], document["from_row"]):
                indices.append(first_rows[file] + index)
                new_sources.append(document["source"])
                new_rows.append(document["row"])
        result = table.take(pa.array(indices, pa.int64()))
        for name, values in (("source", new_sources), ("row", new_rows)):
            number = result.schema.get_field_index(name)
            column = result.schema.field(number)
            result = result.set_column(number, column, pa.array(values, column.type))
        return result


def _joined(
    documents: list[dict[str, Any]],
    answers: _Answers,
    config: RunConfig,
    change: schema_change.Change,
) -> pa.Table:
    """Return the rows of documents whose old values are joined with added ones.

    Args:
        documents: The unit's rows of the query in `compose`.
        answers: The objects that have their rows.
        config: The configuration.
        change: The change of the categories.
    """
    objects = answers.of(documents)
    joined: list[dict[str, Any]] = []
    for document in documents:
        source = document["source"]
        row = document["row"]
        answered = objects[document["file"]]
        indices = answered.indices(document["from_source"], document["from_row"])
        document_rows = [answered.dicts[index] for index in indices]
        if not document["fresh"]:
            added = None
            if document["added_file"]:
                added_rows = objects[document["added_file"]]
                (index, *_) = added_rows.indices(source, row)
                added = added_rows.dicts[index]
            document_rows = [schema_change.join(document_rows[0], added, config, change)]
        for document_row in document_rows:
            joined.append({**document_row, "source": source, "row": row})
    return pa.Table.from_pylist(joined, _one_schema(objects.values()))


def _one_schema(objects: Iterable[_ObjectRows]) -> pa.Schema:
    """Return the schema of rows of several objects.

    A field that a later version of raypd added to `values` is null in rows of an earlier one.
    """
    schemas = [rows.table.schema for rows in objects]
    return pa.unify_schemas(schemas, promote_options="permissive")
