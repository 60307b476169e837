"""A look at the first rows of data: which columns contain the id and the texts, and the format."""

import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean

import pyarrow as pa

import raypd.dataset.tables as tables
from raypd import storage
from raypd.config import COMMAND_LINE, InputConfig, make_config
from raypd.dataset.formats import FORMATS, Detector, settings_by_ending
from raypd.dataset.formats.arrow_columns import text_rows as batch_rows
from raypd.dataset.formats.nested_names import names_in_row
from raypd.dataset.jsonl import UNREADABLE
from raypd.dataset.listing import InputObject, objects, partition_keys
from raypd.errors import InputError
from raypd.run import LeftOut, left_out
from raypd.tasks import Row, label_columns, with_nested
from raypd.text import Say, counted

__all__ = [
    "MOST_ROWS",
    "Look",
    "batch_rows",
    "describe",
    "look",
    "look_at_rows",
    "look_for_columns",
]

# The most rows that are looked at.
MOST_ROWS = 500
_MOST_FILES = 1000  # of a folder, whose sizes tell which format is meant
# The most keys of the objects in one column that become columns.
_MOST_KEYS = 50
_MAX_SHOWN = 8  # columns in a message
_MOST_LISTED = 10_000  # files that are listed to say which are read and which are left out
# A column is one of HTML if at least this share of its texts has tags.
_HTML_SHARE = 0.5
# A column whose texts are shorter on average contains names, codes or dates.
_TEXT_CHARACTERS = 20.0
# Names of columns that may contain the id, the best first: `id`, names of well-known identifiers,
# names that end in "id" or "number", and last the address of a document.
_ID_NAMES = (
    re.compile(r"_?id|uuid|guid", re.IGNORECASE),
    re.compile(
        r"(.*[ _-])?(sku|asin|pmid|pmcid|doi|isbn|issn|ean|gtin|upc|nct_?(id|number)?|key|uuid)",
        re.IGNORECASE,
    ),
    re.compile(r".+[ _-]id|.+[a-z]I[dD]", re.NOFLAG),
    re.compile(r".+[ _-](no|nr|number|num|code|ref)|(number|nr|no|ref|code)", re.IGNORECASE),
    re.compile(r"url|uri|link|path|file_?name", re.IGNORECASE),
)
# Texts that tables use for missing values.
_MISSING = frozenset({"", "-", "--", "?", "na", "n/a", "n.a.", "nan", "none", "null", "nil"})
# A column in which at least this share of the texts are addresses, hashes or codes is not text.
_CODE_SHARE = 0.8
# A code with a letter and a digit, such as T0001, but neither an address nor a date.
_ID_CODE = re.compile(r"(?!\d{4}-\d\d-)(?=.*[A-Za-z])(?=.*\d)[\w.#/-]+", re.ASCII)
# Unique codes may identify documents, whatever their column is called, if there are at least this
# many.
_CODES_NEEDED = 10
# Columns of these names are read, however short their texts are.
_TITLE = re.compile(r"((product|item|document)[ _]?)?(title|name|subject|headline)", re.IGNORECASE)
_TAG = re.compile(r"</\w+>|<(br|p|li|img|hr)\b[^>]*>", re.IGNORECASE)  # of HTML
# Numbers, dates, true and false.
_NO_TEXT = re.compile(r"[-+\d\s.,:/%TZ]*|true|false", re.IGNORECASE)
# Addresses, hashes, file names and codes: a word with a digit or of many characters, in ASCII,
# because some languages are written without spaces.
_CODE = re.compile(r"\w+://\S+|www\.\S+|\S+@\S+|[!-~]*\d[!-~]*|[!-~]{25,}", re.ASCII)


@dataclass
class _ColumnTexts:
    """The first texts of a column."""

    characters: float  # on average
    html_share: float  # the share of the texts that has tags
    code_share: float = 0.0  # the share of the texts that are addresses, hashes or codes


@dataclass
class _Column:
    """The first values of a column."""

    texts: _ColumnTexts | None  # None if the column has no text
    is_unique: bool = False  # no value is missing or repeated
    has_codes: bool = False  # all values are codes such as T0001, in enough rows


_Columns = dict[str, _Column]
_DOCUMENT_COLUMNS: _Columns = {
    "id": _Column(None, is_unique=True),
    "text": _Column(_ColumnTexts(_TEXT_CHARACTERS, 0.0)),
}


@dataclass(frozen=True)
class Look:
    """What the first rows of data show."""

    form: str | None  # the value that `input.format` needs; None for auto
    columns: list[str]
    id_column: str | None
    texts: list[str]  # columns of text
    html: list[str]  # columns that contain HTML
    left_out: str = ""  # the files that are not read, in words
    files: str = ""  # the files that are read, in words, if each is a document
    # Columns of text that are not read because they are named like an attribute.
    label_texts: list[str] = field(default_factory=list)


def describe(
    texts: list[str],
    id_column: str | None,
    columns: list[str],
    html: Container[str] = (),
    files: str = "",
    label_texts: Container[str] = (),
) -> str:
    """Return a description of what is read and of the columns that are not.

    Args:
        texts: The columns that make up a document.
        id_column: The column of the id; None numbers the documents.
        columns: All columns of the data.
        html: The columns that contain HTML.
        files: The files in words, if each is a document.
        label_texts: Columns of text that are named like an attribute.
    """
    if files:
        return f"reads {files}, one document each; id: path of the file"
    shown = []
    for name in texts:
        shown.append(f"{name} (the visible text of its HTML)" if name in html else name)
    description = f"reads {', '.join(shown)}, "
    if id_column:
        description += f"id {id_column}"
    else:
        description += "documents are numbered (labels need a column of ids: set input.id_column)"
    unread = []
    labels = []
    for name in columns:
        if name == id_column or name in texts:
            continue
        if name in label_texts:
            labels.append(name)
        else:
            unread.append(name)
    if unread:
        description += f"; not read (input.text_columns): {', '.join(unread[:_MAX_SHOWN])}"
    if len(unread) > _MAX_SHOWN:
        description += f" and {len(unread) - _MAX_SHOWN} more"
    if labels:
        names = ", ".join(labels[:_MAX_SHOWN])
        if len(labels) > _MAX_SHOWN:
            names += f" and {len(labels) - _MAX_SHOWN} more"
        description += (
            "; not read, because columns with an attribute's name are assumed to hold its labels: "
            f"{names} (if it is text, add it to input.text_columns)"
        )
    return description


def look(data: str, source: InputConfig | None = None, labels: Container[str] = ()) -> Look:
    """Look at the first rows of data.

    Args:
        data: A file, a folder or a glob.
        source: Section `input`, for how the data is read; None for the defaults.
        labels: Columns that contain what is to be extracted. They are not read if there are others.

    Raises:
        InputError: There is no such data, or no text in it.
    """
    root = storage.absolute(data)
    if source is None:
        source = InputConfig(path=root)
    source = source.model_copy(update={"path": root})
    table_kind = tables.kind_of(root) if storage.is_folder(root) else None
    if table_kind is not None:
        item = _first_of_table(data, root, table_kind)
        return _choose(data, table_kind, _columns(item, source), labels)
    item = _first_file(source)
    format = FORMATS[item.format]
    setting = format.setting if format.setting in settings_by_ending() else None
    columns = _DOCUMENT_COLUMNS if format.is_document else _columns(item, source)
    files, left_out = _files(source.model_copy(update={"format": setting or source.format}))
    chosen = replace(_choose(data, setting, columns, labels), left_out=left_out)
    if format.is_document:
        return replace(chosen, files=files)
    return chosen


def _files(source: InputConfig) -> tuple[str, str]:
    """Return descriptions of the files of a folder that are read, and of those that are not.

    The second is "" if all are read.
    """
    unread = LeftOut()
    endings: Counter[str] = Counter()
    with contextlib.suppress(InputError):
        for item in itertools.islice(objects(source, unread), _MOST_LISTED):
            name = item.name.rpartition("/")[2]
            if item.compression is not None:
                name = name.removesuffix(f".{item.compression}")
            endings[os.path.splitext(name)[1].lower() or "without an ending"] += 1
    total = endings.total()
    read = counted(total, "file")
    if total >= _MOST_LISTED:
        read = f"{total:,} files or more"
    if endings:
        kinds = [f"{ending} {number:,}" for ending, number in endings.most_common(_MAX_SHOWN)]
        if len(endings) > _MAX_SHOWN:
            kinds.append("...")
        read += f" ({', '.join(kinds)})"
    return read, left_out.describe(unread.files())


def look_at_rows(data: str, rows: Iterable[Row], labels: Container[str]) -> Look:
    """Look at the rows of a table in memory.

    Args:
        data: What the table is called in messages.
        rows: Its first rows.
        labels: As for `look`.

    Raises:
        InputError: There is no text in it.
    """
    return _choose(data, None, _columns_of_rows(rows), labels)


def _choose(data: str, setting: str | None, columns: _Columns, labels: Container[str]) -> Look:
    """Choose the columns of the id and of the texts."""
    id_column = _id_column(columns, labels)
    lengths: dict[str, float] = {}
    codes = []
    html_columns = []
    for name, column in columns.items():
        texts = column.texts
        if texts is None:
            continue
        if name != id_column:
            lengths[name] = texts.characters
        if texts.code_share >= _CODE_SHARE:
            codes.append(name)
        if texts.html_share >= _HTML_SHARE:
            html_columns.append(name)
    # Codes are read only if there is nothing else.
    if lengths.keys() - {*codes}:
        for name in codes:
            lengths.pop(name, None)
    all_are_short = max(lengths.values(), default=0) < _TEXT_CHARACTERS
    text_columns = []
    for name, length in lengths.items():
        if all_are_short or length >= _TEXT_CHARACTERS or _TITLE.fullmatch(name.rpartition(".")[2]):
            text_columns.append(name)
    without_labels = [name for name in text_columns if name not in labels]
    label_texts = []
    if without_labels:
        label_texts = [name for name in text_columns if name in labels]
        text_columns = without_labels
    if not text_columns:
        raise InputError(f"{data}: no column of text; it has {', '.join(columns) or 'no rows'}")
    return Look(
        setting, list(columns), id_column, text_columns, html_columns, label_texts=label_texts
    )


def _id_column(columns: _Columns, labels: Container[str]) -> str | None:
    """Return the column that identifies each document, or None."""
    for pattern in _ID_NAMES:
        for name, column in columns.items():
            if pattern.fullmatch(name) and column.is_unique:
                return name
    for name, column in columns.items():
        if column.is_unique and column.has_codes and name not in labels:
            return name
    return None


def look_for_columns(
    path: str,
    tree: Row,
    overrides: list[str],
    say: Say,
    rows: Iterable[Row] | None = None,
    origin: str = COMMAND_LINE,
) -> None:
    """Set the columns and the format of data in the configuration of an extraction.

    Only keys that the configuration and the overrides leave unset are changed, and only if the data
    lacks the default columns. The user is told what was chosen.

    Args:
        path: The data.
        tree: The configuration as a tree, which is changed.
        overrides: Settings such as "input.id_column=null".
        say: Is called with lines for the user.
        rows: The first rows of a table in memory; None looks at the files of `path`.
        origin: Where the overrides were given, for messages.

    Raises:
        ConfigError: The configuration is not valid.
        StorageError: The storage cannot be reached.
        InputError: The table in memory has no text. For files, the run says what is wrong.
    """
    # It is not known yet which columns contain text, and the HTML columns must be among them.
    without_html = [*overrides, "input.html_columns=[]"]
    config = make_config({**tree, "input": {**tree["input"], "path": path}}, without_html, origin)
    storage.configure(config.storage)
    labels = {*label_columns(config.extraction.categories), str(config.input.category_column)}
    if rows is not None:
        found = look_at_rows(path, rows, labels)
    else:
        try:
            found = look(path, config.input, labels)
        except InputError:
            return
    section = tree["input"]
    if found.form is not None:
        section["format"] = found.form
    columns = {config.input.id_column, *config.input.text_columns}
    missing = columns - {None, *found.columns}
    if missing:
        chosen = {"id_column": found.id_column, "text_columns": found.texts}
        section = tree["input"] = {**chosen, **section}
    texts = make_config(tree, overrides, origin).input.text_columns
    html = [name for name in texts if name in found.html]
    tree["input"] = {"html_columns": html, **section}
    source = make_config(tree, overrides, origin).input
    # A table in memory with a single column leaves no choice.
    has_choice = rows is None or len(found.columns) > 1
    if source.html_columns or (missing and has_choice):
        label_texts = [name for name in found.label_texts if name != source.category_column]
        description = describe(
            texts,
            source.id_column,
            found.columns,
            source.html_columns,
            files=found.files,
            label_texts=label_texts,
        )
        say(f"{path}: {description}")


def _first_of_table(data: str, root: str, table_kind: str) -> InputObject:
    """Return the first file of a table's newest version."""
    source = tables.pinned(InputConfig(path=root, format=table_kind), None)
    for item in objects(source):
        return item
    raise InputError(f"{data}: the table is empty")


def _first_file(source: InputConfig) -> InputObject:
    """Return the first file that is read: one of rows, or of the format that most of the data has.

    Raises:
        InputError: There is no such file.
    """
    settings = ["auto"]
    if source.format == "auto" and isinstance(source.path, str):
        settings = _settings_by_size(source.path, source.ocr != "none")
    first_error: InputError | None = None
    for setting in settings:
        update = {"format": setting} if source.format == "auto" else {}
        try:
            return next(objects(source.model_copy(update=update)))
        except InputError as error:
            first_error = first_error or error
        except StopIteration:
            pass
    raise first_error or InputError(f"{source.path}: no documents in it")


def _settings_by_size(root: str, ocr: bool) -> list[str]:
    """Return the values of `input.format` that may read some data, the most likely one first.

    A folder of documents may contain a small table, and a folder of tables a file that explains
    them. The sizes of the first files show which of the two it is.
    """
    sizes = dict.fromkeys(["auto", *settings_by_ending()], 0)
    detectors = {setting: Detector(setting, ocr) for setting in sizes}
    for item in itertools.islice(storage.find(root), _MOST_FILES):
        for setting, detector in detectors.items():
            format, _ = detector.detect(item.name)
            if format is not None:
                sizes[setting] += item.size
    return sorted(sizes, key=lambda setting: -sizes[setting])


def _columns(item: InputObject, source: InputConfig) -> _Columns:
    """Return the columns of a file, from its folders and its first rows.

    Raises:
        InputError: The file cannot be read.
    """
    rows: list[Row] = [dict.fromkeys(partition_keys(item.name))]
    try:
        part = item.as_part(storage.version(item.path))
        rows += itertools.islice(FORMATS[item.format].sample(part, source), MOST_ROWS)
    except (InputError, pa.ArrowException, ValueError, *UNREADABLE) as error:
        raise InputError(f"{item.path}: cannot be read: {error}") from None
    return _columns_of_rows(rows)


def _columns_of_rows(rows: Iterable[Row]) -> _Columns:
    """Return the columns of rows, in the order in which they appear."""
    texts_by_column: dict[str, list[str]] = {}
    values_by_column: dict[str, list[str]] = {}
    row_count = 0
    for row in rows:
        row_count += any(value is not None for value in row.values())
        for name, value in _flat(row):
            texts = texts_by_column.setdefault(name.strip(), [])
            values = values_by_column.setdefault(name.strip(), [])
            if _is_missing(value):
                continue
            if isinstance(value, (str, int)):
                values.append(str(value))
            if isinstance(value, str) and not _NO_TEXT.fullmatch(value):
                texts.append(value)
    columns: _Columns = {}
    for name, texts in texts_by_column.items():
        column = _Column(None)
        if texts:
            column.texts = _ColumnTexts(
                fmean(len(text) for text in texts),
                fmean(bool(_TAG.search(text)) for text in texts),
                fmean(bool(_CODE.fullmatch(text.strip())) for text in texts),
            )
        values = values_by_column[name]
        column.is_unique = len(values) == len(set(values)) >= row_count
        are_codes = all(_ID_CODE.fullmatch(value) for value in values)
        column.has_codes = are_codes and len(values) >= _CODES_NEEDED
        columns[name] = column
    for name in list(columns):
        # Parquet names all columns first, including those that contain objects.
        has_keys = any(other.startswith(f"{name}.") for other in columns)
        if has_keys and columns[name].texts is None:
            del columns[name]
    return columns


def _flat(row: Row) -> Iterator[tuple[str, object]]:
    """Yield the columns of a row, and instead of a column with an object the keys inside it.

    An object with very many keys is a mapping rather than a record, and is yielded unchanged.
    """
    for name, value in row.items():
        inner = list(names_in_row({name: value}))[1:]
        if not isinstance(value, dict) or not 0 < len(inner) <= _MOST_KEYS:
            yield name, value
            continue
        values = with_nested({name: value}, inner)
        for key in inner:
            if not isinstance(values.get(key), dict):
                yield key, values.get(key)


def _is_missing(value: object) -> bool:
    """Return whether a cell is empty, or has a text for a missing value ("NA", "-")."""
    return value is None or (isinstance(value, str) and value.strip().casefold() in _MISSING)
