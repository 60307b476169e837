"""What a committed unit contains, as a row of a table."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pyarrow as pa

from raypd import storage
from raypd.run import Commit, UnitSummary, from_json, layout, tree

COUNTS = ("prefill_tokens", "shared_tokens", "decode_tokens", "steps")
USAGE = {
    "category": pa.string(),
    "model": pa.string(),
    "documents": pa.int64(),
    "prefill_tokens": pa.int64(),
    "shared_tokens": pa.int64(),
    "decode_tokens": pa.int64(),
    "seconds": pa.float64(),
}
_REASON = {"reason": pa.string(), "documents": pa.int64(), "can_change": pa.bool_()}
_NESTED = {
    "counts": pa.struct(dict.fromkeys(COUNTS, pa.int64())),
    "categories": pa.list_(pa.struct(USAGE)),
    "reasons": pa.list_(pa.struct(_REASON)),
}
# The columns of all other fields of a summary, by the types of the fields.
_PLAIN: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    str | None: pa.string(),
}


def _columns() -> Iterator[tuple[str, pa.DataType]]:
    """Yield the name and type of the column of each field of a summary."""
    for item in fields(UnitSummary):
        if item.name in _NESTED:
            yield item.name, _NESTED[item.name]
        else:
            yield item.name, _PLAIN[item.type]


# The object's name relative to the units folder, its stamp in a listing, and its summary.
SCHEMA = pa.schema([("name", pa.string()), ("stamp", pa.string()), *_columns()])


def row_of(commit: Commit) -> dict[str, Any]:
    """Return a commit as a row of SCHEMA."""
    row = {"name": commit.name, "stamp": commit.stamp, **tree(commit.summary)}
    # Usage without any category is an empty object.
    row["categories"] = row["categories"] or []
    return row


def summary_of(row: dict[str, Any]) -> UnitSummary:
    """Return the summary in a row of SCHEMA."""
    # Null is the default of a field, or of a column that the file does not have.
    values = {name: value for name, value in row.items() if value is not None}
    values["counts"] = {kind: count or 0 for kind, count in (row["counts"] or {}).items()}
    return from_json(UnitSummary, values, row["name"])


def with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the columns of a schema.

    A column is null if the file of the table is from an earlier version, which did not have it.
    """
    columns = []
    for column in schema:
        if column.name in table.column_names:
            columns.append(table[column.name].cast(column.type))
        else:
            columns.append(pa.nulls(len(table), column.type))
    return pa.table(columns, schema=schema)


def path_of(output: str, name: str) -> str:
    """Return the path of the object that a row names."""
    return storage.join(output, layout.UNITS, *name.split("/"))
