"""A small file of labels: JSON Lines (.gz, .zst), JSON, a CSV, a workbook or Parquet.

It contains the documents' columns, too, or only their ids.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
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
from raypd.text import id_text, is_formula

# File extensions that distinguish a file of labels from a run's folder.
LABEL_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", *EXCEL)
_UNREADABLE = (*jsonl.UNREADABLE, InputError, pa.ArrowException)
_BATCH_ROWS = 1024
_SHOWN_COLUMNS = 12
# Columns of a file of `raypd review`, which has a line for each value.
REVIEW_COLUMNS = {"source", "row", "id", "category", "attribute", "value", "correct"}
# Why `raypd review` chose a document: a column of its file, and of the labels made from it.
CHOSEN = "chosen_by_review"
LEAST_SURE = "least sure"
AT_RANDOM = "at random"
# Statuses of an answer that is neither a value nor null.
UNREAD = ("ambiguous", "invalid", "truncated", "unsure")
# Columns that a file of `raypd export` has besides the attributes.
_EXPORT_COLUMNS = {"source", "row", "status", "error"}


class _LabelRow(NamedTuple):
    line: int  # line of the file or, in a format without lines, number of the row
    default_id: str
    row: Any


def label_rows(
    path: str, id_column: str | None, only_objects: bool = True
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the rows of a file of labels as (line, id, columns).

    Args:
        path: The file.
        id_column: The column of the id. If it is None, the id is in the column `id`; without that
        column it is the name of the file and the row's position, as in a run's default ids.
        only_objects: Whether a row that is not an object is an error.

    Raises:
        InputError: The file cannot be read, or a row is not an object.
    """
    for line, default_id, row in _reviewed(_rows(path)):
        if not isinstance(row, dict):
            if not only_objects:
                yield line, default_id, row
                continue
            raise InputError(f"{path}:{line}: expected an object of labels")
        if row.keys() >= _EXPORT_COLUMNS and row["status"] == "error":
            # A document without an answer, in a file of `raypd export`.
            continue
        id_value = row.get(id_column)
        if id_value is None:
            id_value = row.get("id")
        if id_value is None:
            id_value = default_id
        yield line, id_text(id_value), row


def columns_of(path: str) -> list[str]:
    """Return the columns of the first row of a file of labels; none if it has no rows.

    Raises:
        InputError: The file cannot be read.
    """
    for _, _, row in label_rows(path, None, only_objects=False):
        return list(row) if isinstance(row, dict) else []
    return []


def unused_columns(path: str, used: Collection[str | None]) -> list[str]:
    """Return the columns of a file of labels that contain neither labels nor anything else known.

    Args:
        path: The file.
        used: The columns of ids, categories, texts and labels.

    Raises:
        InputError: The file cannot be read.
    """
    known = {"id", "category", "scored", "accepted", "reviewed", CHOSEN, *_EXPORT_COLUMNS, *used}
    return [name for name in columns_of(path) if name not in known and "__" not in name]


def about_ids(path: str, id_column: str | None) -> str:
    """Return what is wrong if the rows of a file of labels have no id; "" if they have one.

    Args:
        path: The file.
        id_column: The column of the id.

    Raises:
        InputError: The file cannot be read.
    """
    columns = columns_of(path)
    if not columns or {id_column, "id"} & {*columns}:
        return ""
    wanted = " or ".join(repr(name) for name in dict.fromkeys([id_column, "id"]) if name)
    shown = ", ".join(map(repr, columns[:_SHOWN_COLUMNS]))
    return f"it has no column {wanted}, by which labels find their document; its columns: {shown}"


def _reviewed(rows: Iterator["_LabelRow"]) -> Iterator["_LabelRow"]:
    """Yield rows; in a file of `raypd review`, the rows of a document's values become one row.

    Documents that nobody reviewed are left out (`was_reviewed`), and so are values that a review
    left open (`was_left_open`).
    """
    first = next(rows, None)
    if first is None:
        return
    rows = chain([first], rows)
    if not isinstance(first.row, dict) or not first.row.keys() >= REVIEW_COLUMNS:
        yield from rows
        return
    documents: dict[tuple[str, str], _LabelRow] = {}
    reviewed: set[tuple[str, str]] = set()
    left_open: list[tuple[tuple[str, str], str]] = []
    for line in rows:
        key = (str(line.row["source"]), str(line.row["row"]))
        labels = documents.setdefault(key, line._replace(row={"id": line.row["id"]}))
        if line.row["category"]:
            labels.row["category"] = line.row["category"]
        if line.row.get(CHOSEN):
            labels.row[CHOSEN] = line.row[CHOSEN]
        name = line.row["attribute"]
        value = line.row["correct"]
        if labels.row.setdefault(name, value) != value:
            raise InputError(
                f"line {line.line}: {name!r} of {key[0]}, row {key[1]}, has another value on an "
                "earlier line; delete one of these lines"
            )
        if was_reviewed(line.row):
            reviewed.add(key)
        if was_left_open(line.row):
            left_open.append((key, name))
    for key, name in left_open:
        documents[key].row.pop(name, None)
    for key, labels in documents.items():
        if key in reviewed:
            yield labels


def was_reviewed(cells: Mapping[str, Any]) -> bool:
    """Return whether a line of a file of `raypd review` shows that a person looked at it.

    It was marked in the column `reviewed`, or its value was changed. A file without that column was
    saved by the page of an earlier version and contains only reviewed documents.

    Args:
        cells: The cells of the line, by column.
    """
    if "reviewed" not in cells:
        return True
    return bool(str(cells["reviewed"] or "").strip()) or cells["correct"] != cells["value"]


def was_left_open(cells: Mapping[str, Any]) -> bool:
    """Return whether a line of a file of `raypd review` gives no label, not even null.

    The answer could not be read as a value or was cut, and nobody replaced it with a value or
    `null`. A cut text is the answer of files of `raypd export` and of earlier versions.

    Args:
        cells: The cells of the line, by column. A file without the column `status` is from an
            earlier version, in which empty values are null.
    """
    if cells.get("status") not in UNREAD:
        return False
    if cells["status"] == "truncated" and cells["correct"] == cells["value"]:
        return True
    return not any(str(cells[name] or "").strip() for name in ("value", "correct"))


def without_documents(path: str, texts: Collection[str], id_column: str | None) -> bool:
    """Return whether a file of labels has ids but no texts, judging by its first row.

    Args:
        path: The file; False is returned for anything that is not a file of labels.
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
    # If there is no such file, the error suggests one with a similar name.
    next(storage.find(path))
    root = storage.absolute(path)
    name = root.rpartition("/")[2]
    ending = "." + path.lower().rpartition(".")[2]
    if ending in (".csv", ".tsv"):
        for record, cells in delimited.table(root):
            plain_cells = {column: _without_quote(cell) for column, cell in cells.items()}
            yield _LabelRow(record.line, f"{name}:{record.offset}", plain_cells)
    elif ending in (".parquet", ".json", *EXCEL):
        yield from _numbered_rows(path, root, name, ending)
    else:
        yield from _json_lines(path, root, name, ending)


def _without_quote(cell: str) -> str:
    """Return a cell without the quote that keeps a spreadsheet from evaluating it as a formula."""
    if cell.startswith("'") and (is_formula(cell[1:]) or cell[1:2] in ("+", "-", "'")):
        return cell[1:]
    return cell


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
