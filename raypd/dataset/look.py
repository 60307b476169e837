"""A look at the first rows of data: which columns hold the id and texts, and what format its files
have.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Container, Iterable, Iterator
from functools import partial
from statistics import fmean
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.config.data import ENDINGS, WHOLE, InputConfig
from raypd.config.load import make_config
from raypd.dataset import delimited, tables
from raypd.dataset.jsonl import BOM, UNREADABLE, line_limit, lines, open_lines, packed_lines
from raypd.dataset.listing import InputObject, objects, partition_keys
from raypd.dataset.reader import arrow_batches
from raypd.dataset.whole_files import whole_rows
from raypd.errors import InputError
from raypd.run.unit import Part
from raypd.tasks.columns import Row
from raypd.tasks.labels import label_columns
from raypd.text import Say

MOST_ROWS = 500  # that are looked at
_SHOWN = 8  # columns in a message
_MOST_HTML = 0.5  # of the texts of a column have tags where it is one of HTML
_TEXT_CHARACTERS = 20.0  # a column of texts has more on average, and is no name, code or date
_IDS = ("id", "_id", "uuid", "key", "sku", "asin", "url")
# However short.
_TITLE = re.compile(r"((product|item|document)[ _]?)?(title|name|subject|headline)", re.IGNORECASE)
_TAG = re.compile(r"</\w+>|<(br|p|li|img|hr)\b[^>]*>", re.IGNORECASE)  # of HTML
# Numbers, dates, UUIDs.
_NO_TEXT = re.compile(r"[-+\d\s.,:/%TZ]*|[\da-f-]{32,36}|true|false", re.IGNORECASE)
# Name -> mean characters of a column's first texts, and the share that has tags; None: it holds no
# text.
_Columns = dict[str, tuple[float, float] | None]


class Look(NamedTuple):
    """What the first rows of data tell."""

    form: str | None  # input.format, where it must be said
    columns: list[str]
    id_column: str | None
    texts: list[str]  # columns of text
    html: list[str]  # columns whose texts have tags


def describe(
    texts: list[str], id_column: str | None, columns: list[str], html: Container[str] = ()
) -> str:
    """What is read, and which of the columns are not."""
    others = [column for column in columns if column not in (*texts, id_column)]
    texts = [f"{name} (the visible text of its HTML)" if name in html else name for name in texts]
    names = ", ".join(others[:_SHOWN]) + (
        f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    )
    unread = f"; not read (input.text_columns): {names}" if others else ""
    return (
        f"reads {', '.join(texts)}, "
        f"{f'id {id_column}' if id_column else 'documents are numbered'}{unread}"
    )


def look(data: str, source: InputConfig | None = None, labels: Container[str] = ()) -> Look:
    """source: how it is read; None: by default. labels: columns that hold what is to be found, not
    read where there is another. Raises InputError: no such data, or no text in it.
    """
    root = storage.absolute(data)
    source = (source or InputConfig(path=root)).model_copy(update={"path": root})
    if (form := tables.kind_of(root) if storage.is_folder(root) else None) is not None:
        first = next(objects(tables.pinned(InputConfig(path=root, format=form), None)), None)
        if first is None:
            raise InputError(f"{data}: the table is empty")
    else:
        first = _first(source)
        form = next((form for form, ends in ENDINGS.items() if first.format in ends.values()), None)
    columns: _Columns = (
        {"id": None, "text": (_TEXT_CHARACTERS, 0.0)}
        if form == "files"
        else _columns(first, source)
    )
    return _choose(data, form, columns, labels)


def _choose(data: str, form: str | None, columns: _Columns, labels: Container[str]) -> Look:
    lower = {column.casefold(): column for column in columns}
    id_column = next((lower[word] for word in _IDS if word in lower), None)
    means = {name: column[0] for name, column in columns.items() if column and name != id_column}
    short = max(means.values(), default=0) < _TEXT_CHARACTERS  # all of them
    texts = [
        name
        for name, mean in means.items()
        if short or mean >= _TEXT_CHARACTERS or _TITLE.fullmatch(name)
    ]
    texts = [name for name in texts if name not in labels] or texts
    if not texts:
        raise InputError(f"{data}: no column of text; it has {', '.join(columns) or 'no rows'}")
    html = [name for name, column in columns.items() if column and column[1] >= _MOST_HTML]
    return Look(form, list(columns), id_column, texts, html)


def look_for_columns(
    path: str, tree: Row, overrides: list[str], say: Say, rows: Iterable[Row] | None = None
) -> None:
    """Puts the columns of data, and its format, into a configuration of extraction over it, where
    its own are not there and not set, and says so. rows: of a table in memory. Raises ConfigError,
    StorageError, InputError: no text.
    """
    # The columns of text, of which they are some, are not known yet.
    no_html = [*overrides, "input.html_columns=[]"]
    config = make_config({**tree, "input": {**tree["input"], "path": path}}, no_html)
    storage.configure(config.storage)
    # The run says what is wrong with it.
    with contextlib.suppress(*([InputError] if rows is None else [])):
        labels = {*label_columns(config.extraction.categories), str(config.input.category_column)}
        found = (
            look(path, config.input, labels)
            if rows is None
            else _choose(path, None, _means(rows), labels)
        )
        tree["input"] |= {"format": found.form} if found.form else {}
        if missing := {config.input.id_column, *config.input.text_columns} - {None, *found.columns}:
            tree["input"] = {
                "id_column": found.id_column,
                "text_columns": found.texts,
                **tree["input"],
            }
        texts = make_config(tree, overrides).input.text_columns
        tree["input"] = {
            "html_columns": [name for name in texts if name in found.html],
            **tree["input"],
        }
        source = make_config(tree, overrides).input
        if source.html_columns or (missing and (rows is None or len(found.columns) > 1)):
            say(f"{path}: {describe(texts, source.id_column, found.columns, source.html_columns)}")


def _first(source: InputConfig) -> InputObject:
    """The first file of rows; where there is none, the first that another format reads.

    Raises InputError.
    """
    try:
        return next(objects(source))
    except InputError:
        for form in ENDINGS:
            with contextlib.suppress(InputError, StopIteration):
                return next(objects(source.model_copy(update={"format": form})))
        raise


def _columns(item: InputObject, source: InputConfig) -> _Columns:
    try:
        return _means(
            [
                dict.fromkeys(partition_keys(item.name)),
                *itertools.islice(_rows(item, source), MOST_ROWS),
            ]
        )
    except (InputError, pa.ArrowException, ValueError, *UNREADABLE) as error:
        raise InputError(f"{item.path}: cannot be read: {error}") from None


def _means(rows: Iterable[Row]) -> _Columns:
    texts: dict[str, list[tuple[int, bool]]] = {}  # characters, and whether there are tags
    for row in rows:
        for name, value in row.items():
            text = isinstance(value, str) and not _NO_TEXT.fullmatch(value)
            texts.setdefault(name.strip(), []).extend(
                [(len(value), bool(_TAG.search(value)))] if text else []
            )
    return {
        name: (fmean(n for n, _ in c), fmean(t for _, t in c)) if c else None
        for name, c in texts.items()
    }


def _rows(item: InputObject, source: InputConfig) -> Iterator[Row]:
    """A file's rows as a run reads them, and some that name its columns alone.

    Raises as the readers do.
    """
    if item.format == "jsonl":
        with open_lines(item.path, item.compression) as file:
            lines_of = lines if item.compression is None else packed_lines
            for line in lines_of(file, line_limit(source.max_document_bytes)):
                with contextlib.suppress(ValueError, RecursionError):
                    row = json.loads((line.data or b"").removeprefix(BOM))
                    yield row if isinstance(row, dict) else {}
    elif item.format in delimited.DELIMITERS:
        names, records = delimited.whole(
            Part(**item._asdict(), version=storage.version(item.path)), source
        )
        yield dict.fromkeys(names)
        yield from (dict(zip(names, record.fields, strict=False)) for record in records)
    elif item.format in WHOLE:
        part = Part(**item._asdict(), version=storage.version(item.path))
        yield from (row if isinstance(row, dict) else {} for row in whole_rows(part))
    else:
        with storage.open_file(item.path) as file:
            # It reads no whole row group then.
            parquet = partial(pq.ParquetFile, buffer_size=1 << 20, pre_buffer=False)
            for batch in (
                arrow_batches(file)
                if item.format == "arrow"
                else parquet(file).iter_batches(MOST_ROWS)
            ):
                yield from batch_rows(batch)


def batch_rows(batch: pa.RecordBatch | pa.Table) -> Iterator[Row]:
    """Its rows, of columns of text alone, after one that names all columns."""
    yield dict.fromkeys(batch.schema.names)
    yield from batch.select(
        [field.name for field in batch.schema if "string" in str(field.type)]
    ).to_pylist()
