"""Write the answers of a run (`raypd export`) or its failed documents (`raypd errors --output`).

Both go to one local file: CSV, JSON lines or Parquet.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from raypd import storage
from raypd.config import with_changes
from raypd.dataset import unit_rows, writer
from raypd.errors import ConfigError
from raypd.run import is_nightly, load_run
from raypd.storage import local
from raypd.tasks import columns, columns_of
from raypd.text import clean, is_formula
from raypd.verify.scratch import Scratch
from raypd.verify.table_object import objects, tables

# Suffix -> options of DuckDB's COPY.
_FORMATS = {".csv": "csv, HEADER", ".jsonl": "json", ".parquet": "parquet, COMPRESSION zstd"}
# Rows that are converted at a time. The fewer there are, the more each of them costs.
_BATCH_ROWS = 2000
# Follows the name of a file that is being written.
_PART = ".part-"
# Details of answers that the exported table leaves out.
_DETAILS = ("span", "window", "model")
# Below this, a 64-bit float can represent every integer.
_EXACT_INTEGERS = 2**53


def export(run: str, path: str, overrides: Iterable[str] = ()) -> int:
    """Write a run, or a table of nightly runs, with one column per attribute.

    Args:
        run: The folder of the run.
        path: A local file; its suffix determines the format.
        overrides: Keys of the configuration, as key=value.

    Returns:
        The number of documents.

    Raises:
        ConfigError: If the file cannot be written.
    """
    config = with_changes(load_run(run, list(overrides)), {"output.columns": "typed"})
    schema = writer.output_schema(columns_of(config))
    fields = [field for field in schema if not columns.is_detail(field.name, *_DETAILS)]
    typed = (writer.typed_table(table, config) for table in _batches(_tables(run)))
    return write_file(path, pa.schema(fields), typed)


def _tables(run: str) -> Iterator[pa.Table]:
    """Yield the rows of each object of a run, or of a table of nightly runs."""
    if is_nightly(run):
        for _, table in tables(objects(run)):
            for first_row in range(0, len(table), _BATCH_ROWS):
                yield table.slice(first_row, _BATCH_ROWS)
    else:
        yield from unit_rows.tables(run)


def _batches(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join consecutive tables into tables of about _BATCH_ROWS rows."""
    batch: list[pa.Table] = []
    rows = 0
    for table in tables:
        if batch and table.schema != batch[0].schema:
            # A later version of raypd, or a night, may have added a field.
            yield pa.concat_tables(batch)
            batch = []
            rows = 0
        batch.append(table)
        rows += len(table)
        if rows >= _BATCH_ROWS:
            yield pa.concat_tables(batch)
            batch = []
            rows = 0
    if batch:
        yield pa.concat_tables(batch)


def write_file(path: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> int:
    """Write columns of tables to a local file, which appears only when it is complete.

    Args:
        path: A local file; its suffix determines the format.
        schema: The columns to write.
        tables: Tables that have these columns.

    Returns:
        The number of documents.

    Raises:
        ConfigError: If the file cannot be written, or has no known suffix.
    """
    options = _FORMATS.get(Path(path).suffix.lower())
    if options is None or storage.is_remote(path):
        raise ConfigError(f"{path}: give a local file that ends in {', '.join(_FORMATS)}")
    is_csv = options.startswith("csv")
    target = local.local_path(path)
    local.clean_beside(target, _PART)
    part = f"{target}{_PART}{local.writer_name()}"
    if is_csv:
        schema = _csv_schema(schema)
    try:
        with Scratch(rows=schema) as scratch:
            for table in tables:
                rows = table.select(schema.names)
                if is_csv:
                    rows = _harmless_table(rows, schema)
                scratch.add("rows", rows)
            query = f"""
                SELECT {_selected_columns(schema, is_csv)} FROM rows
                ORDER BY rows.source, rows.row, rows.rowid
                """
            scratch.copy(query, part, f"FORMAT {options}")
            count = scratch.number("SELECT count(*) FROM (SELECT DISTINCT source, row FROM rows)")
        os.replace(part, target)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    finally:
        Path(part).unlink(missing_ok=True)
    return count


def _selected_columns(schema: pa.Schema, is_csv: bool) -> str:
    """Return the columns for a SELECT; a spreadsheet must not evaluate the headings of a CSV."""
    columns = []
    for name in schema.names:
        heading = name
        if is_csv:
            heading = _harmless_text(name)
        columns.append(f"{_identifier(name)} AS {_identifier(heading)}")
    return ", ".join(columns)


def _identifier(name: str) -> str:
    """Quote a name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _csv_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a CSV, in which lists and objects are JSON, and numbers are texts.

    DuckDB would write 36 as 36.0.
    """
    fields = []
    for column in schema:
        if pa.types.is_nested(column.type) or pa.types.is_float64(column.type):
            column = column.with_type(pa.string())
        fields.append(column)
    return pa.schema(fields)


def _harmless_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table for a CSV: lists and objects as JSON, and no cell that is a formula."""
    numbers = {field.name for field in table.schema if pa.types.is_float64(field.type)}
    rows = []
    for row in table.to_pylist():
        cells = {}
        for name, value in row.items():
            cell = _cell(value)
            if name in numbers and cell is not None:
                cell = str(_without_fraction(cell))
            cells[name] = cell
        rows.append(cells)
    return pa.Table.from_pylist(rows, schema)


def _cell(value: object) -> object:
    if isinstance(value, (list, dict)):
        return clean(json.dumps(_without_fraction(value), ensure_ascii=False, default=str))
    if isinstance(value, str):
        return _harmless_text(value)
    return value


def _without_fraction(value: object) -> object:
    """Return a value in which whole numbers are integers: 36 for 36.0."""
    if isinstance(value, list):
        return [_without_fraction(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_fraction(item) for name, item in value.items()}
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_INTEGERS:
        return int(value)
    return value


def _harmless_text(text: str) -> str:
    """Return a text as a cell that a spreadsheet does not evaluate as a formula."""
    if is_formula(text):
        return "'" + clean(text)
    return clean(text)
