"""A small file of labels: JSON lines, a CSV or a workbook, with the documents or by their ids alone."""

import json
from collections.abc import Collection, Iterator
from typing import Any

from raypd import storage
from raypd.config.data import EXCEL
from raypd.dataset import delimited
from raypd.dataset.whole_files import sheet_rows
from raypd.errors import InputError, raised_as

ENDINGS = (".jsonl", ".csv", ".tsv", *EXCEL)


def label_rows(path: str, id_column: str | None) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line, id, columns): the id stands in `id_column` or `id`, or is made of the row's place. Raises InputError."""
    for number, place, row in _rows(path):
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: expected an object of labels")
        yield number, str(row[id_column] if id_column in row else row.get("id", place)), row


def without_documents(path: str, texts: Collection[str], id_column: str | None) -> bool:
    """Whether it is a file of labels whose first row has an id and none of the columns of text."""
    if not path.lower().endswith(ENDINGS) or not storage.exists(storage.absolute(path)):
        return False
    row = next((row for _, _, row in label_rows(path, id_column)), {})
    return bool(row.keys() & {id_column, "id"}) and not row.keys() & {*texts}


def _rows(path: str) -> Iterator[tuple[int, str, Any]]:
    next(storage.find(path))  # says which name is near where there is none
    root, begin = storage.absolute(path), 0
    name = root.rpartition("/")[2]
    if path.lower().endswith((".csv", ".tsv")):
        for record, cells in delimited.table(root):
            yield record.line, f"{name}:{record.offset}", cells
        return
    with raised_as(InputError, f"{path}: cannot be read"):
        data = storage.read(root)
    if path.lower().endswith(EXCEL):
        for number, fields in enumerate(sheet_rows(data)):
            yield number + 2, f"{name}:{number}", fields
        return
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        with raised_as(InputError, f"{path}:{number}: not JSON", ValueError, RecursionError):
            row = json.loads(line.decode("utf-8-sig")) if line.strip() else None
        if row is not None:
            yield number, f"{name}:{begin}", row
        begin += len(line) + 1
