"""The nightly table: objects that hold every document of tonight exactly once, and the list of them.

An object of an earlier night stays as it is while all of its documents do. Where a document changed, moved, went or got
attributes, the object of its unit is written again from the rows that are there. Objects are never overwritten; what
readers follow is the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.config import ExtractionConfig, RunConfig
from raypd.errors import RunError
from raypd.nightly import schema_change
from raypd.nightly.schema_change import Change
from raypd.storage.threads import in_threads
from raypd.verify.scratch import Scratch
from raypd.verify.table_object import path_of, read_object

ANSWERED = pa.schema(
    [
        ("unit", pa.string()),
        ("file", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("ok", pa.bool_()),
        ("category", pa.string()),
    ]
)
_THREADS = 8


def add_answers(scratch: Scratch, name: str, root: str, objects: Iterator[tuple[str, str]]) -> None:
    """Fills table `name` with the documents of objects (unit, file) of tonight: which there are, and which are ok."""
    scratch.create(name, ANSWERED)

    def read(item: tuple[str, str]) -> None:
        unit, file = item
        path = path_of(root, file)
        found = read_object(path)
        categories = found["category"].to_pylist() if "category" in found.column_names else [None] * len(found)
        documents: dict[tuple[str, int], tuple[bool, Any]] = {}
        places = zip(found["source"].to_pylist(), found["row"].to_pylist(), strict=True)
        for place, status, category in zip(places, found["status"].to_pylist(), categories, strict=True):
            before = documents.get(place, (True, None))
            documents[place] = (before[0] and status == "ok", category if category is not None else before[1])
        columns = [
            [unit] * len(documents),
            [file] * len(documents),
            [source for source, _ in documents],
            [row for _, row in documents],
            [ok for ok, _ in documents.values()],
            [category for _, category in documents.values()],
        ]
        scratch.add(name, pa.table(columns, schema=ANSWERED))

    for _ in in_threads(read, objects, _THREADS):
        pass
    scratch.close(name)


def settle(scratch: Scratch, folder: str, everything_again: bool) -> None:
    """Makes `final` (where every document's row is to come from) and `homes` (what object each unit has in the table).

    folder: of tonight, below the root. everything_again: no old object can stay (the schema is another).
    Raises RunError when a document of the input has no row.
    """
    scratch.run("""
        CREATE TABLE final AS
        SELECT p.id, p.hash, p.unit, p.ordinal, p.position, p.source, p.row, p.live, p.night, p.winner,
            coalesce(p.file, a.file) AS file,
            CASE WHEN p.file IS NULL THEN p.source ELSE p.from_source END AS from_source,
            CASE WHEN p.file IS NULL THEN p.row ELSE p.from_row END AS from_row,
            coalesce(a.category, p.category) AS category,
            coalesce(a.ok, p.ok) AND coalesce(d.ok, TRUE) AS ok,
            d.file AS added_file
        FROM placed p
        LEFT JOIN answered a ON p.winner AND p.file IS NULL AND a.unit = p.unit AND a.source = p.source
            AND a.row = p.row
        LEFT JOIN added d ON p.winner AND p.file IS NOT NULL AND d.unit = p.unit AND d.source = p.source
            AND d.row = p.row""")
    (without,) = scratch.one("SELECT count(*) FROM final WHERE winner AND file IS NULL")
    if without:
        raise RunError(
            f"{without} documents of the input have no row though tonight's run ended; run the command again"
        )
    scratch.run("""
        CREATE TABLE held AS
        SELECT file, count(*) AS documents
        FROM (SELECT file FROM old WHERE winner UNION ALL SELECT file FROM answered) GROUP BY file""")
    stays = (
        "count(DISTINCT f.file) = 1 AND bool_and(f.from_source = f.source AND f.from_row = f.row) "
        # Not held: of a night before, and what else is in it the table does not show.
        f"AND coalesce(any_value(h.documents), -1) = count(*) AND {not everything_again}"
    )
    scratch.run(f"""
        CREATE TABLE homes AS
        SELECT f.unit, bool_or(f.live) AS live, min(f.ordinal) AS ordinal, count(*) AS documents, {stays} AS stays,
            CASE WHEN {stays} THEN min(f.file) ELSE '{folder}/table/' || f.unit || '.parquet' END AS file
        FROM final f LEFT JOIN held h USING (file) WHERE f.winner GROUP BY f.unit""")


def index_query(everything_again: bool) -> str:
    """SQL for tonight's index. A document that a later one hides keeps its answer where that stays readable."""
    hidden = "CASE WHEN f.from_source = f.source AND f.from_row = f.row THEN f.file END"
    return (
        "SELECT f.id, f.hash, f.unit, f.ordinal, f.position, f.source, f.row, "
        f"CASE WHEN f.winner THEN h.file ELSE {'NULL' if everything_again else hidden} END AS file, "
        "f.category, f.ok, f.winner, f.live, f.night FROM final f LEFT JOIN homes h USING (unit) "
        "WHERE f.live OR f.winner"
    )


def files_of(scratch: Scratch) -> Iterator[str]:
    """Tonight's objects, in the order of the input."""
    return (row["file"] for row in scratch.rows("SELECT file FROM homes ORDER BY live DESC, ordinal, unit"))


# ---------------------------------------------------------------------------------------------------------- composition


def compose(scratch: Scratch, root: str, config: RunConfig, change: Change | None) -> int:
    """Writes the objects of `homes` that cannot stay as they were; how many."""
    query = """
        SELECT f.unit, h.file AS home, f.source, f.row, f.file, f.from_source, f.from_row, f.category, f.added_file
        FROM final f JOIN homes h USING (unit) WHERE f.winner AND NOT h.stays
        ORDER BY h.live DESC, h.ordinal, f.unit, f.position, f.source, f.row"""
    count = 0
    for _ in in_threads(lambda rows: _write(root, rows, config, change), _grouped(scratch.rows(query)), _THREADS):
        count += 1
    return count


def _grouped(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    for row in rows:
        if group and row["unit"] != group[0]["unit"]:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


class _Rows:
    """The rows of the objects that one new object is made of."""

    def __init__(self, root: str, files: set[str]) -> None:
        self.at: dict[tuple[str, str, int], list[int]] = {}
        tables: list[pa.Table] = []
        offset = 0
        for file in sorted(files):
            table = read_object(path_of(root, file))
            tables.append(table.replace_schema_metadata(None))
            places = zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True)
            for i, (source, row) in enumerate(places):
                self.at.setdefault((file, source, row), []).append(offset + i)
            offset += len(table)
        self.table = pa.concat_tables(tables, promote_options="default")

    def of(self, file: str, source: str, row: int) -> list[int]:
        found = self.at.get((file, source, row))
        if found is None:
            raise RunError(f"{file}: has no row for {source}, row {row}, that the index says it has; run with --full")
        return found


def _write(root: str, rows: list[dict[str, Any]], config: RunConfig, change: Change | None) -> None:
    there = _Rows(root, {row["file"] for row in rows} | {row["added_file"] for row in rows if row["added_file"]})
    taken: list[int] = []
    places: list[tuple[str, int]] = []
    joined: list[dict[str, Any]] = []
    for row in rows:
        indices = there.of(row["file"], row["from_source"], row["from_row"])
        taken += indices
        places += [(row["source"], row["row"])] * len(indices)
        if change is not None:
            added = there.of(row["added_file"], row["source"], row["row"]) if row["added_file"] else []
            joined.append(_joined(there.table, indices, added, config))
    table = pa.Table.from_pylist(joined, there.table.schema) if change is not None else there.table.take(taken)
    for name, values in (("source", [s for s, _ in places]), ("row", [r for _, r in places])):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    # The same rows whoever writes it: a night that was cut off writes it again.
    storage.put(path_of(root, rows[0]["home"]), sink.getvalue().to_pybytes())


def _joined(table: pa.Table, indices: list[int], added: list[int], config: RunConfig) -> dict[str, Any]:
    assert isinstance(config.task, ExtractionConfig)
    (old,) = table.take(indices).to_pylist()
    new = table.take(added).to_pylist()[0] if added else None
    category = config.task.categories.get(old["category"]) if old["category"] is not None else None
    return old if category is None else schema_change.join(old, new, category.attributes)
