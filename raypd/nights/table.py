"""The table of a night: objects that have every document of tonight exactly once, and the list of
them, which readers follow. An object stays while all of its documents do; else another is written
of the rows there are.
"""

from collections import deque
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.config import RunConfig
from raypd.errors import RunError
from raypd.nights import schema_change
from raypd.nights.changes import statement
from raypd.run.read import by_document
from raypd.text import counted
from raypd.verify.scratch import Scratch
from raypd.verify.table_object import read_object, write_object

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
    """Fills table `name` with the documents of objects (unit, file) of tonight: which there are,
    and which are ok.
    """
    scratch.create(f"{name}_rows", _ROWS)

    def read(item: tuple[str, str]) -> None:
        unit, file = item
        rows = read_object(storage.join(root, file))
        if "category" in rows.column_names:
            category = rows["category"]
        else:
            category = pa.nulls(len(rows), pa.string())
        columns = [rows["source"], rows["row"], pc.equal(rows["status"], "ok"), category]
        scratch.add(
            f"{name}_rows",
            pa.table([[unit] * len(rows), [file] * len(rows), *columns], schema=_ROWS),
        )

    deque(storage.in_threads(read, objects, _THREADS), maxlen=0)
    scratch.run(f"""
        CREATE TABLE {name} AS SELECT unit, file, source, row, bool_and(ok) AS ok, any_value(category) AS category
        FROM {name}_rows GROUP BY ALL""")  # noqa: E501


def settle(scratch: Scratch, folder: str, everything_again: bool) -> None:
    """Makes `final` (where each document's row is to come from) and `homes` (what object each unit
    has in the table). Needs `placed`, `old`, `answered`, `added`. folder: of tonight's objects,
    below the root. everything_again: no old object can stay (another schema). Raises RunError when
    a document of the input has no row.
    """
    scratch.run(statement("final"))
    if without := scratch.number("SELECT count(*) FROM final WHERE winner AND file IS NULL"):
        documents = counted(without, "document")
        raise RunError(
            f"{documents} of the input without a row though tonight's run ended; run the "
            "command again"
        )
    stays = (
        "count(DISTINCT f.file) = 1 AND bool_and(f.from_source = f.source AND f.from_row = f.row) "
        # Not held: of a night before, and what else is in it the table does not show.
        f"AND coalesce(any_value(h.documents), -1) = count(*) AND {not everything_again}"
    )
    scratch.run(f"""
        CREATE TABLE homes AS
        WITH held AS (
            SELECT file, count(*) AS documents
            FROM (SELECT file FROM old WHERE winner UNION ALL SELECT file FROM answered) GROUP BY file
        )
        SELECT f.unit, bool_or(f.live) AS live, min(f.ordinal) AS ordinal, count(*) AS documents, {stays} AS stays,
            CASE WHEN {stays} THEN min(f.file) ELSE '{folder}/' || f.unit || '.parquet' END AS file
        FROM final f LEFT JOIN held h USING (file) WHERE f.winner GROUP BY f.unit""")  # noqa: E501


def index_query(everything_again: bool) -> str:
    """SQL for tonight's index.

    A document that a later one hides keeps its answer where that stays readable.
    """
    if everything_again:
        hidden = "NULL"
    else:
        hidden = "CASE WHEN f.from_source = f.source AND f.from_row = f.row THEN f.file END"
    return (
        f"SELECT f.* REPLACE (CASE WHEN f.winner THEN h.file ELSE {hidden} END AS file) "
        "FROM final f LEFT JOIN homes h USING (unit) WHERE f.live OR f.winner"
    )


def compose(
    scratch: Scratch, root: str, config: RunConfig, change: schema_change.Change | None
) -> None:
    """Writes the objects of `homes` that cannot stay as they were."""
    documents = scratch.rows("""
        SELECT f.unit, h.file AS home, f.source, f.row, f.file, f.from_source, f.from_row, f.category, f.added_file,
            f.file IN (SELECT file FROM answered) AS fresh
        FROM final f JOIN homes h USING (unit) WHERE f.winner AND NOT h.stays
        ORDER BY h.live DESC, h.ordinal, f.unit, f.position, f.source, f.row""")  # noqa: E501
    units = (list(rows) for _, rows in groupby(documents, itemgetter("unit")))
    deque(
        storage.in_threads(lambda rows: _write(root, rows, config, change), units, _THREADS),
        maxlen=0,
    )


def _write(
    root: str,
    documents: list[dict[str, Any]],
    config: RunConfig,
    change: schema_change.Change | None,
) -> None:
    files = sorted(
        {document[key] for document in documents for key in ("file", "added_file") if document[key]}
    )
    tables = {
        file: read_object(storage.join(root, file)).replace_schema_metadata(None) for file in files
    }
    answers_of = {file: by_document(table.to_pylist()) for file, table in tables.items()}

    def find(file: str, source: str, row: int) -> list[dict[str, Any]]:
        if (source, row) not in answers_of[file]:
            raise RunError(
                f"{file}: has no row for {source}, at {row}, that the index says it has; run "
                "with --full"
            )
        return answers_of[file][source, row]

    rows: list[dict[str, Any]] = []
    for document in documents:
        place = {"source": document["source"], "row": document["row"]}
        answers = find(document["file"], document["from_source"], document["from_row"])
        if change is not None and not document["fresh"]:
            added = find(document["added_file"], **place)[0] if document["added_file"] else None
            answers = [schema_change.join(answers[0], added, config, change)]
        rows += [{**row, **place} for row in answers]
    # Permissive: a field that `values` has since a later raypd is null in what is of an earlier
    # one.
    schema = pa.unify_schemas(
        [table.schema for table in tables.values()], promote_options="permissive"
    )
    write_object(storage.join(root, documents[0]["home"]), pa.Table.from_pylist(rows, schema))
