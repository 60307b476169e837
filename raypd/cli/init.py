"""The command `raypd init`: a configuration over data of one's own, from a look at its first rows."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from raypd import storage
from raypd.config.data import TEXT_FILES
from raypd.config.load import load_config
from raypd.config.schema import is_file, task_of
from raypd.config.yaml_file import dump
from raypd.dataset.delimited import DELIMITERS
from raypd.errors import ConfigError, InputError

_ROWS = 500  # that are looked at
_TEXT_CHARACTERS = 20.0  # a column of texts has more on average, and is no name, code or date
_IDS = ("id", "_id", "uuid", "key", "sku", "asin", "url")
_CATEGORIES = ("category", "kind", "type")


def run(data: str, schema: str | None, output: str | None) -> str:
    """Writes the YAML, and says in words what stands in it and what to do next.

    Raises ConfigError: the file is there already, or the schema is none; InputError: no such data."""
    if storage.is_remote(data):
        raise InputError(f"{data}: init looks into local files; copy one of them here, and change input.path then")
    parts = [part for part in Path(data).parts if not set(part) & set("*?[")]
    name = (re.sub(r"\W+", "-", parts[-1].split(".")[0]) if parts else "").strip("-") or "documents"
    target = Path(output or f"{name}.yaml")
    if target.exists():
        raise ConfigError(f"{target}: is there already; --output gives another name")
    first = next(iter(storage.find(storage.absolute(data)))).path
    files = os.path.splitext(first.lower())[1] in TEXT_FILES
    columns = {"id": None, "text": _TEXT_CHARACTERS} if files else _columns(first)
    lower = {column.casefold(): column for column in columns}
    id_column = next((lower[word] for word in _IDS if word in lower), None)
    means = {column: mean for column, mean in columns.items() if mean is not None and column != id_column}
    texts = [column for column, mean in means.items() if mean >= _TEXT_CHARACTERS] or list(means)
    if not texts:
        raise InputError(f"{data}: no column of text; it has {', '.join(columns)}")
    categories = f"{name}.categories.yaml"
    columns_read = {"id_column": id_column, "text_columns": texts, "category_column": None}
    read: dict[str, Any] = {"path": _beside(data, target), **columns_read, **({"format": "files"} if files else {})}
    if schema is not None:
        task = {key: _beside(value, target) if is_file(value) else value for key, value in task_of(schema).items()}
    else:
        read["category"] = name
        task = {"categories_file": categories}
    sections = {"input": read, "output": {"path": f"runs/{name}"}, "task": task}
    others = [column for column in columns if column not in (*texts, id_column)]
    about = "# Written by raypd init. `raypd config show` prints every key with its default and meaning.\n"
    about += f"# Columns that are not read: {', '.join(others)}\n" if others else ""
    if category := next((lower[word] for word in _CATEGORIES if word in lower), None):
        about += f"# Attributes can differ by {category!r}: input.category_column, and task.categories by its values\n"
    target.write_text(about + dump(sections), encoding="utf-8")
    try:
        if schema is not None:
            load_config(target)
    except ConfigError:
        target.unlink()
        raise
    reads = f"{target}: reads {', '.join(texts)}" + (f", id {id_column}" if id_column else ", documents are numbered")
    words = ["raypd", "schema", "suggest", data, "--category", name, "-o", str(target.parent / categories)]
    suggest = shlex.join([*words, f"input.text_columns=[{','.join(texts)}]"])
    return f"{reads}\nnext: " + (f"`{suggest}`, then " if schema is None else "") + f"`raypd extract {target}`"


def _beside(path: str, target: Path) -> str:
    """A path as a configuration in the target's folder has it."""
    return path if os.path.isabs(path) else os.path.relpath(path, target.parent)


def _columns(path: str) -> dict[str, float | None]:
    """Column -> mean characters of its first texts; None of columns that hold something else."""
    file = path.replace("'", "''")
    form = next((form for form in DELIMITERS if f".{form}" in os.path.basename(path).lower()), None)
    source = f"read_csv('{file}', delim='{DELIMITERS[form]}')" if form else f"'{file}'"
    try:
        table = duckdb.connect().sql(f"SELECT * FROM {source} LIMIT {_ROWS}").to_arrow_reader(_ROWS).read_all()
    except duckdb.Error as error:
        raise InputError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    if form and len(table.schema) == 1 and re.search("[;\t|,]", table.schema.names[0]):
        raise InputError(f"{path}: one column, {table.schema.names[0]!r}: csv is read with commas, tsv with tabs")
    lengths = {c.name: pc.utf8_length(table[c.name]) if pa.types.is_string(c.type) else None for c in table.schema}
    return {name: None if length is None else pc.mean(length).as_py() for name, length in lengths.items()}
