"""Rows in one local file: a run's answers (`raypd export`), its failed documents (`raypd errors
--output`).
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import duckdb
import pyarrow as pa

from raypd import storage
from raypd.config.load import with_changes
from raypd.dataset import writer
from raypd.errors import ConfigError
from raypd.run.load import is_nightly, load_run
from raypd.run.text import clean
from raypd.tasks.columns import columns_of
from raypd.verify.scratch import Scratch, quoted
from raypd.verify.table_object import objects, read_object

# Suffix -> DuckDB's COPY.
_FORMATS = {".csv": "csv, HEADER", ".jsonl": "json", ".parquet": "parquet, COMPRESSION zstd"}
# Of a cell; a number may have a sign.
_FORMULA = re.compile(r"[=@\uff1d\uff20]|[+\uff0b\uff0d-](?![0-9.]+$)")


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
    written = _FORMATS.get(Path(path).suffix.lower())
    if written is None or storage.is_remote(path):
        raise ConfigError(f"{path}: give a local file that ends in {', '.join(_FORMATS)}")
    part = f"{path}.part-{os.getpid()}"
    try:
        with Scratch(rows=schema) as scratch:
            for table in (table.select(schema.names) for table in tables):
                if written.startswith("csv"):
                    cells = [
                        {name: _cell(value) for name, value in row.items()}
                        for row in table.to_pylist()
                    ]
                    table = pa.Table.from_pylist(cells, schema)
                scratch.add("rows", table)
            scratch.run(
                f"COPY (FROM rows ORDER BY source, row, rowid) TO {quoted([part])} (FORMAT "
                f"{written})"
            )
            count = scratch.number("SELECT count(*) FROM (SELECT DISTINCT source, row FROM rows)")
        os.replace(part, path)
    except (OSError, duckdb.Error) as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    finally:
        Path(part).unlink(missing_ok=True)
    return count


def _cell(value: object) -> object:
    if isinstance(value, str):
        return ("'" if _FORMULA.match(value) else "") + clean(value)
    return value
