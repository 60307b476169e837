"""Rows in one local file: a run's answers (`raypd export`), its failed documents (`raypd errors
--output`).
"""

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from raypd import storage
from raypd.config.load import with_changes
from raypd.dataset import writer
from raypd.errors import ConfigError
from raypd.run.layout import is_nightly
from raypd.run.load import load_run
from raypd.storage import local
from raypd.tasks.columns import columns_of
from raypd.text import clean, is_formula
from raypd.verify.scratch import Scratch
from raypd.verify.table_object import objects, read_object

# Suffix -> options of DuckDB's COPY.
_FORMATS = {".csv": "csv, HEADER", ".jsonl": "json", ".parquet": "parquet, COMPRESSION zstd"}
_PART = ".part-"  # of the name of a file that is being written


def export(run: str, path: str, overrides: Iterable[str] = ()) -> int:
    """Writes a run, or a table of nights, a column for each attribute; of how many documents.

    Raises ConfigError.
    """
    config = with_changes(load_run(run, list(overrides)), {"output.columns": "typed"})
    schema = writer.output_schema(columns_of(config))
    nightly = is_nightly(run)
    paths = objects(run) if nightly else [path for _, path in sorted(writer.objects(run))]
    columns = pa.schema(
        [f for f in schema if not f.name.endswith(("__status", "__span", "__window", "__model"))]
    )
    tables = (
        read_object(path) if nightly else writer.read_table("", "", path=path)[1] for path in paths
    )
    return write_file(path, columns, (writer.typed_table(table, config) for table in tables))


def write_file(path: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> int:
    """Writes a schema's columns of tables to a local file, whole or not; of how many documents.

    Raises ConfigError.
    """
    options = _FORMATS.get(Path(path).suffix.lower())
    if options is None or storage.is_remote(path):
        raise ConfigError(f"{path}: give a local file that ends in {', '.join(_FORMATS)}")
    is_csv = options.startswith("csv")
    target = local.local_path(path)
    local.clean_beside(target, _PART)
    part = f"{target}{_PART}{local.writer_name()}"
    try:
        with Scratch(rows=schema) as scratch:
            for table in tables:
                rows = table.select(schema.names)
                if is_csv:
                    rows = _harmless_table(rows, schema)
                scratch.add("rows", rows)
            columns = ", ".join(
                f"{_identifier(name)} AS {_identifier(_header(name) if is_csv else name)}"
                for name in schema.names
            )
            query = f"SELECT {columns} FROM rows ORDER BY rows.source, rows.row, rows.rowid"
            scratch.copy(query, part, f"FORMAT {options}")
            count = scratch.number("SELECT count(*) FROM (SELECT DISTINCT source, row FROM rows)")
        os.replace(part, target)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    finally:
        Path(part).unlink(missing_ok=True)
    return count


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _harmless_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    rows = [{name: _cell(value) for name, value in row.items()} for row in table.to_pylist()]
    return pa.Table.from_pylist(rows, schema)


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    return _header(value)


def _header(text: str) -> str:
    """Return a text as a cell that a spreadsheet does not run."""
    return ("'" if is_formula(text) else "") + clean(text)
