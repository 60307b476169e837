"""The command `raypd init`: a configuration over data of one's own, from a look at its first
rows.
"""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.config.load import make_config
from raypd.config.schema import is_file, task_of
from raypd.config.yaml_file import dump
from raypd.dataset.look import describe, look
from raypd.errors import ConfigError
from raypd.tasks.labels import label_columns

_CATEGORIES = ("category", "kind", "type")


def run(data: str, schema: str | None, output: str | None) -> str:
    """Writes the YAML, and says in words what stands in it and what to do next.

    Raises ConfigError: the file is there already, or the schema is none; InputError: no such data.
    """
    parts = [part for part in Path(data).parts if not set(part) & set("*?[")]
    name = (re.sub(r"\W+", "-", parts[-1].split(".")[0]) if parts else "").strip("-") or "documents"
    target = Path(output or f"{name}.yaml")
    if target.exists():
        raise ConfigError(f"{target}: is there already; --output gives another name")
    labels: list[str] = []
    if schema is not None:
        paths = {"input": {"path": data}, "output": {"path": "-"}}
        labels = label_columns(
            make_config({**paths, "task": task_of(schema)}).extraction.categories
        )
    found = look(data, labels=labels)
    form = found.form
    texts = found.texts
    html = [name for name in found.texts if name in found.html]
    categories = f"{name}.categories.yaml"
    columns_read = {"id_column": found.id_column, "text_columns": texts, "category_column": None}
    read: dict[str, Any] = {
        "path": _beside(data, target),
        **columns_read,
        **({"format": form} if form else {}),
    }
    read |= {"html_columns": html} if html else {}
    if schema is not None:
        task = {
            key: _beside(value, target) if is_file(value) else value
            for key, value in task_of(schema).items()
        }
    else:
        read["category"] = name
        task = {"categories_file": categories}
    sections = {"input": read, "output": {"path": f"runs/{name}"}, "task": task}
    others = [column for column in found.columns if column not in (*texts, found.id_column)]
    about = (
        "# Written by raypd init. `raypd config show` prints every key with its default and "
        "meaning.\n"
    )
    about += f"# Columns that are not read: {', '.join(others)}\n" if others else ""
    lower = {column.casefold(): column for column in found.columns}
    if category := next((lower[word] for word in _CATEGORIES if word in lower), None):
        about += (
            f"# Attributes can differ by {category!r}: input.category_column, and "
            "task.categories by its values\n"
        )
    target.write_text(about + dump(sections), encoding="utf-8")
    words = [
        "raypd",
        "schema",
        "suggest",
        data,
        "--category",
        name,
        "-o",
        str(target.parent / categories),
    ]
    keys = [
        f"input.text_columns={_listed(texts)}",
        *([f"input.html_columns={_listed(html)}"] if html else []),
    ]
    suggest = shlex.join(
        [*words, *keys, "input.category_column=null", *([f"input.format={form}"] if form else [])]
    )
    first = f"`{suggest}`, then " if schema is None else ""
    return (
        f"{target}: {describe(texts, found.id_column, found.columns, html)}\nnext: "
        f"{first}`raypd extract {target}`"
    )


def _listed(names: list[str]) -> str:
    quoted = (
        name if re.fullmatch(r"\w+", name) else json.dumps(name, ensure_ascii=False)
        for name in names
    )
    return f"[{','.join(quoted)}]"


def _beside(path: str, target: Path) -> str:
    """A path as a configuration in the target's folder has it."""
    if os.path.isabs(path) or storage.is_remote(path):
        return path
    return os.path.relpath(path, target.parent)
