"""A small file of labels: JSON Lines (.gz, .zst), JSON, a CSV, a workbook or Parquet.

It has the documents' columns too, or ids alone.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

import raypd.dataset.delimited as delimited
import raypd.dataset.jsonl as jsonl
from raypd import storage
from raypd.config import EXCEL
from raypd.dataset.formats.json_files import json_values
from raypd.dataset.formats.workbook import sheet_rows
from raypd.errors import InputError, raised_as
from raypd.tasks import parse_json, plain_value

# Ends of names that tell a file of labels from a run's folder.
LABEL_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", *EXCEL)
_UNREADABLE = (*jsonl.UNREADABLE, InputError, pa.ArrowException)
_BATCH_ROWS = 1024


class _LabelRow(NamedTuple):
    line: int  # line of the file or, in a format without lines, number of the row
    default_id: str
    row: Any


def label_rows(path: str, id_column: str | None) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the rows of a file of labels as (line, id, columns).

    Args:
        path: The file.
        id_column: The column of the id. Without it the column `id` counts, and without this the
            name of the file and the row's position, as a run numbers documents.

    Raises:
        InputError: The file cannot be read, or a row is no object.
    """
    for line, default_id, row in _rows(path):
        if not isinstance(row, dict):
            raise InputError(f"{path}:{line}: expected an object of labels")
        id_value = row.get(id_column)
        if id_value is None:
            id_value = row.get("id")
        if id_value is None:
            id_value = default_id
        yield line, str(id_value), row


def without_documents(path: str, texts: Collection[str], id_column: str | None) -> bool:
    """Return whether a file has labels by ids alone, as its first row shows.

    Args:
        path: The file; anything else is no file of labels.
        texts: The columns of text of a document.
        id_column: The column of the id.
    """
    if not path.lower().endswith(LABEL_ENDINGS) or not storage.exists(storage.absolute(path)):
        return False
    for _, _, row in label_rows(path, id_column):
        has_id = bool(row.keys() & {id_column, "id"})
        has_text = bool(row.keys() & set(texts))
        return has_id and not has_text
    return False


def _rows(path: str) -> Iterator[_LabelRow]:
    # If there is no such file, the error names one that is nearly called so.
    next(storage.find(path))
    root = storage.absolute(path)
    name = root.rpartition("/")[2]
    ending = "." + path.lower().rpartition(".")[2]
    if ending in (".csv", ".tsv"):
        for record, cells in delimited.table(root):
            yield _LabelRow(record.line, f"{name}:{record.offset}", cells)
    elif ending in (".parquet", ".json", *EXCEL):
        yield from _numbered_rows(path, root, name, ending)
    else:
        yield from _json_lines(path, root, name, ending)


def _numbered_rows(path: str, root: str, name: str, ending: str) -> Iterator[_LabelRow]:
    """Yield the rows of a format without lines."""
    # A sheet's first row has the names of the columns.
    first_line = 2 if ending in EXCEL else 1
    with (
        raised_as(InputError, f"{path}: cannot be read", *_UNREADABLE),
        storage.open_file(root) as file,
    ):
        rows: Iterator[Any]
        if ending == ".parquet":
            rows = _parquet_rows(file)
        elif ending == ".json":
            rows = json_values(file.read())
        else:
            rows = sheet_rows(file.read())
        for number, row in enumerate(rows):
            yield _LabelRow(number + first_line, f"{name}:{number}", row)


def _json_lines(path: str, root: str, name: str, ending: str) -> Iterator[_LabelRow]:
    compression = {".gz": "gz", ".zst": "zst"}.get(ending)
    with (
        raised_as(InputError, f"{path}: cannot be read", *_UNREADABLE),
        jsonl.open_lines(root, compression) as file,
    ):
        data = file.read()
    offset = 0
    for number, line in enumerate(data.split(b"\n"), 1):
        row = None
        with raised_as(InputError, f"{path}:{number}: not JSON", ValueError, RecursionError):
            if line.strip():
                row = parse_json(line.decode("utf-8-sig"))
        if row is not None:
            yield _LabelRow(number, f"{name}:{offset}", row)
        offset += len(line) + 1


def _parquet_rows(file: Any) -> Iterator[dict[str, Any]]:
    for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS):
        for row in batch.to_pylist():
            yield plain_value(row)
