"""The table of a night: objects that have every document of tonight exactly once.

Readers follow the list of these objects. An object stays as long as all of its documents do.
Otherwise a new object is written from existing rows.
"""

from collections.abc import Iterator
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
from raypd.run import by_document
from raypd.text import counted
from raypd.verify import Scratch, read_object, write_object

_ROWS = pa.schema(
    {
        "unit": "string",
        "file": "string",
        "source": "string",
        "row": "int64",
        "ok": "bool",
        "category": "string",
    }
)
_THREADS = 8


def add_answers(scratch: Scratch, name: str, root: str, objects: Iterator[tuple[str, str]]) -> None:
    """Fill a table with the documents of tonight's objects.

    Args:
        scratch: Gets the table.
        name: The name of the table.
        root: The nightly root.
        objects: (unit, path below the root) of the objects.
    """
    scratch.create(f"{name}_rows", _ROWS)

    def add_object(item: tuple[str, str]) -> None:
        unit, file = item
        rows = read_object(storage.join(root, file))
        category = pa.nulls(len(rows), pa.string())
        if "category" in rows.column_names:
            category = rows["category"]
        columns = [
            [unit] * len(rows),
            [file] * len(rows),
            rows["source"],
            rows["row"],
            pc.equal(rows["status"], "ok"),
            category,
        ]
        scratch.add(f"{name}_rows", pa.table(columns, schema=_ROWS))

    for _ in storage.in_threads(add_object, objects, _THREADS):
        pass
    scratch.run(f"""
        CREATE TABLE {name} AS
        SELECT unit, file, source, row, bool_and(ok) AS ok, any_value(category) AS category
        FROM {name}_rows GROUP BY ALL
        """)


def settle(scratch: Scratch, folder: str, everything_again: bool) -> None:
    """Decide where each document's row comes from, and which object each unit gets.

    Args:
        scratch: Has the tables `placed`, `old`, `answered` and `added`; gets the tables `final`
            (rows) and `homes` (objects).
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
            f"{documents} of the input without a row though tonight's run ended; run the "
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
            SELECT file, count(*) AS documents
            FROM (SELECT file FROM old WHERE winner UNION ALL SELECT file FROM answered)
            GROUP BY file
        )
        SELECT f.unit, bool_or(f.live) AS live, min(f.ordinal) AS ordinal,
            count(*) AS documents, {stays} AS stays,
            CASE WHEN {stays} THEN min(f.file) ELSE '{folder}/' || f.unit || '.parquet' END AS file
        FROM final f LEFT JOIN held h USING (file)
        WHERE f.winner GROUP BY f.unit
        """)


def index_query(everything_again: bool) -> str:
    """Return SQL for tonight's index.

    A document that a later one hides keeps its answer if its object stays.

    Args:
        everything_again: Whether no old object can stay, because the schema has changed.
    """
    hidden = "CASE WHEN f.from_source = f.source AND f.from_row = f.row THEN f.file END"
    if everything_again:
        hidden = "NULL"
    return f"""
        SELECT f.* REPLACE (CASE WHEN f.winner THEN h.file ELSE {hidden} END AS file)
        FROM final f LEFT JOIN homes h USING (unit)
        WHERE f.live OR f.winner
        """


def compose(
    scratch: Scratch, root: str, config: RunConfig, change: schema_change.Change | None
) -> None:
    """Write the objects of `homes` that cannot stay as they are.

    Args:
        scratch: Has the tables of `settle`.
        root: The nightly root.
        config: The configuration.
        change: The change of the categories; None if they are as before.
    """
    documents = scratch.rows("""
        SELECT f.unit, h.file AS home, f.source, f.row, f.file, f.from_source, f.from_row,
            f.category, f.added_file, f.file IN (SELECT file FROM answered) AS fresh
        FROM final f JOIN homes h USING (unit)
        WHERE f.winner AND NOT h.stays
        ORDER BY h.live DESC, h.ordinal, f.unit, f.position, f.source, f.row
        """)
    units = (list(rows) for _, rows in groupby(documents, itemgetter("unit")))

    def write_unit(rows: list[dict[str, Any]]) -> None:
        _write(root, rows, config, change)

    for _ in storage.in_threads(write_unit, units, _THREADS):
        pass


def _write(
    root: str,
    documents: list[dict[str, Any]],
    config: RunConfig,
    change: schema_change.Change | None,
) -> None:
    """Write the object of a unit from rows of other objects.

    Args:
        root: The nightly root.
        documents: The unit's rows of the query in `compose`.
        config: The configuration.
        change: The change of the categories; None if they are as before.
    """
    files = {document["file"] for document in documents}
    files |= {document["added_file"] for document in documents if document["added_file"]}
    tables = {}
    answers = {}
    for file in sorted(files):
        tables[file] = read_object(storage.join(root, file)).replace_schema_metadata(None)
        answers[file] = by_document(tables[file].to_pylist())

    def answer_rows(file: str, source: str, row: int) -> list[dict[str, Any]]:
        """Return the rows of a document in an object."""
        if (source, row) not in answers[file]:
            raise RunError(
                f"{file}: has no row for {source}, at {row}, although the index lists it; run "
                "with --full"
            )
        return answers[file][source, row]

    rows: list[dict[str, Any]] = []
    for document in documents:
        source = document["source"]
        row = document["row"]
        document_rows = answer_rows(document["file"], document["from_source"], document["from_row"])
        if change is not None and not document["fresh"]:
            added = None
            if document["added_file"]:
                added = answer_rows(document["added_file"], source, row)[0]
            document_rows = [schema_change.join(document_rows[0], added, config, change)]
        for document_row in document_rows:
            rows.append({**document_row, "source": source, "row": row})
    # A field that a later version of raypd added to `values` is null in rows of an earlier one.
    schema = pa.unify_schemas(
        [table.schema for table in tables.values()], promote_options="permissive"
    )
    write_object(storage.join(root, documents[0]["home"]), pa.Table.from_pylist(rows, schema))
