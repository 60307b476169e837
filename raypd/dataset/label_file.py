"""A small file of labels: JSON lines (.gz, .zst), a CSV, a workbook or Parquet, with the documents
or by ids alone.
"""

from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.config.data import EXCEL
from raypd.dataset import delimited, jsonl
from raypd.dataset.whole_files import json_values, sheet_rows
from raypd.errors import InputError, raised_as
from raypd.tasks.missing import parse_json, plain_value

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", *EXCEL)


def label_rows(path: str, id_column: str | None) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line, id, columns): the id stands in `id_column` or `id`, or is made of the row's place.

    Raises InputError.
    """
    for number, place, row in _rows(path):
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: expected an object of labels")
        id_value = row.get(id_column)
        if id_value is None:
            id_value = row.get("id")
        if id_value is None:
            id_value = place
        yield number, str(id_value), row


def without_documents(path: str, texts: Collection[str], id_column: str | None) -> bool:
    """Whether it is a file of labels whose first row has an id and none of the columns of text."""
    if not path.lower().endswith(ENDINGS) or not storage.exists(storage.absolute(path)):
        return False
    row = next((row for _, _, row in label_rows(path, id_column)), {})
    return bool(row.keys() & {id_column, "id"}) and not row.keys() & {*texts}


def _rows(path: str) -> Iterator[tuple[int, str, Any]]:
    next(storage.find(path))  # says which name is near where there is none
    root, begin = storage.absolute(path), 0
    name, kind = root.rpartition("/")[2], path.lower().rpartition(".")[2]
    if kind in ("csv", "tsv"):
        yield from (
            (line.line, f"{name}:{line.offset}", cells) for line, cells in delimited.table(root)
        )
        return
    with (
        raised_as(InputError, f"{path}: cannot be read", *_UNREADABLE),
        storage.open_file(root) as file,
    ):
        if rows_of := _ROWS.get(f".{kind}"):
            head = 2 if f".{kind}" in EXCEL else 1
            yield from (
                (number + head, f"{name}:{number}", row) for number, row in enumerate(rows_of(file))
            )
            return
        with jsonl.open_lines(root, kind) as lines:
            data = lines.read()
    for number, line in enumerate(data.split(b"\n"), 1):
        with raised_as(InputError, f"{path}:{number}: not JSON", ValueError, RecursionError):
            row = parse_json(line.decode("utf-8-sig")) if line.strip() else None
        if row is not None:
            yield number, f"{name}:{begin}", row
        begin += len(line) + 1


def _parquet(file: Any) -> Iterator[dict[str, Any]]:
    for batch in pq.ParquetFile(file).iter_batches(1024):
        for row in batch.to_pylist():
            yield plain_value(row)


_UNREADABLE = (*jsonl.UNREADABLE, InputError, pa.ArrowException)
_ROWS = {".parquet": _parquet, ".json": lambda file: json_values(file.read())}
_ROWS |= dict.fromkeys(EXCEL, lambda file: sheet_rows(file.read()))
