"""The command `raypd init`: write a configuration for a user's data from its first rows."""

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.cli.init_model import ModelChoice, toy
from raypd.config import Category, DecodingConfig, dump, is_file, make_config, task_of
from raypd.dataset import Look, look
from raypd.errors import ConfigError
from raypd.schema import Attribute, pattern_widths
from raypd.tasks import label_columns

# Names of columns that may hold a category.
_CATEGORY_NAMES = ("category", "kind", "type")
# Tokens that a list needs, so that it is seldom cut.
_LIST_TOKENS = 100
# Tokens of numbers, dates and short texts.
_SCALAR_TOKENS = 12
# A pattern whose values can be longer has no end.
_ENDLESS = 2000


def run(
    data: str,
    schema: str | None,
    output: str | None,
    choice: ModelChoice | None = None,
    force: bool = False,
) -> str:
    """Write a configuration.

    Args:
        data: The data: a file, a folder or a glob.
        schema: What to extract; None if it is not known yet.
        output: The YAML to write; None for NAME.yaml in the current folder.
        choice: The model; None for the embedded toy.
        force: Whether to overwrite a file.

    Returns:
        What the configuration reads, and what to do next, in words.

    Raises:
        ConfigError: If the file exists already, or the schema cannot be read.
        InputError: If there is no such data.
    """
    name = _name(data)
    target = Path(output or f"{name}.yaml")
    choice = choice or toy()
    labels: list[str] = []
    value_tokens = 0
    if schema is not None:
        config = make_config(
            {"input": {"path": data}, "output": {"path": "-"}, "task": task_of(schema)}
        )
        labels = label_columns(config.extraction.categories)
        value_tokens = _value_tokens(config.extraction.categories)
    # What is wrong with the arguments comes first, since another file would not help there.
    if target.exists() and not force:
        raise ConfigError(
            f"{target} already exists. To change one choice, such as the model (model.name), edit "
            "the file; --output writes another file, and --force overwrites this one"
        )
    columns = look.look(data, labels=labels)
    html = [column for column in columns.texts if column in columns.html]
    input_section: dict[str, Any] = {
        "path": _relative(data, target),
        "id_column": columns.id_column,
        "text_columns": columns.texts,
        "category_column": None,
    }
    if columns.form:
        input_section["format"] = columns.form
    if html:
        input_section["html_columns"] = html
    categories_file = f"{name}.categories.yaml"
    task: dict[str, Any] = {"categories_file": categories_file}
    if schema is None:
        input_section["category"] = name
    else:
        task = {key: _relative_file(value, target) for key, value in task_of(schema).items()}
    sections = {"input": input_section, "output": {"path": f"runs/{name}"}, "task": task}
    if choice.section:
        sections["model"] = choice.section
    if value_tokens:
        sections["decoding"] = {"max_value_tokens": value_tokens}
    comments = _comments(columns) + "".join(f"# {line}\n" for line in choice.comments)
    target.write_text(comments + dump(sections), encoding="utf-8")
    next_step = f"`raypd extract {shlex.quote(str(target))}`"
    if schema is None:
        suggest = _suggest_command(data, name, str(target.parent / categories_file), columns, html)
        next_step = f"`{suggest}`, then {next_step}"
    if choice.first_step:
        command = _toy_command(data, schema, output)
        next_step = f"{choice.first_step.format(target=target, toy=command)}, then {next_step}"
    description = look.describe(
        columns.texts,
        columns.id_column,
        columns.columns,
        html,
        files=columns.files,
        label_texts=columns.label_texts,
    )
    lines = [f"{target}: {description}"]
    if columns.left_out:
        lines.append(columns.left_out)
    lines.append(f"model: {choice.summary}")
    if choice.hint:
        lines.append(f"warning: {choice.hint}")
    lines.append(f"Next: {next_step}")
    return "\n".join(lines)


def _toy_command(data: str, schema: str | None, output: str | None) -> str:
    """Return the command that writes the same configuration with the embedded model."""
    words = ["raypd", "init", data]
    if schema is not None:
        words += ["--schema", schema]
    if output is not None:
        words += ["--output", output]
    return shlex.join([*words, "--for", "toy", "--force"])


def _value_tokens(categories: Mapping[str, Category]) -> int:
    """Return `decoding.max_value_tokens` for attributes; 0 if the default is enough.

    The longest value of an attribute must fit. No tokenizer is loaded here, so that its tokens are
    counted from its bytes, rather too many than too few.
    """
    longest = 0
    for category in categories.values():
        for attribute in category.attributes:
            tokens = _longest_value(attribute)
            if attribute.many:
                tokens = max((attribute.min_items or 1) * (tokens + 2), _LIST_TOKENS)
            longest = max(longest, tokens)
    if longest <= DecodingConfig().max_value_tokens:
        return 0
    return -(-longest // 10) * 10


def _longest_value(attribute: Attribute) -> int:
    """Return about how many tokens the longest value of an attribute has, but for lists."""
    if attribute.columns:
        cells = [_longest_value(column) for column in attribute.columns]
        names = sum(len(column.name) for column in attribute.columns)
        return sum(cells) + names + 6 * len(cells)
    if attribute.type == "enum":
        longest = max(len(json.dumps(value).encode()) for value in attribute.values)
        return longest // 2 + 8
    if attribute.type == "pattern" and attribute.pattern:
        shortest, longest = pattern_widths(attribute.pattern)
        # A pattern without an end has no longest value; its shortest one must fit.
        return (longest if longest < _ENDLESS else shortest) + 4
    return _SCALAR_TOKENS


def _name(data: str) -> str:
    """Derive a name from the last part of a path that is no pattern."""
    parts = [part for part in Path(data).parts if not set(part) & set("*?[")]
    name = ""
    if parts:
        name = re.sub(r"\W+", "-", parts[-1].split(".")[0]).strip("-")
    return name or "documents"


def _comments(columns: Look) -> str:
    """Return the comments at the beginning of the configuration."""
    lines = ["# Written by raypd init. `raypd config show` prints every key with its meaning."]
    read = {*columns.texts, columns.id_column}
    unread = [column for column in columns.columns if column not in read]
    if unread:
        lines.append(f"# Columns that are not read: {', '.join(unread)}")
    if columns.label_texts:
        lines.append(
            "# Columns with an attribute's name are assumed to hold its labels: "
            f"{', '.join(columns.label_texts)}. If it is text, add it to text_columns."
        )
    by_lower_case = {column.casefold(): column for column in columns.columns}
    for name in _CATEGORY_NAMES:
        if name in by_lower_case:
            lines.append(
                f"# Attributes can differ by {by_lower_case[name]!r}: input.category_column, and "
                "task.categories by its values"
            )
            break
    return "\n".join(lines) + "\n"


def _suggest_command(
    data: str, name: str, categories_file: str, columns: Look, html: list[str]
) -> str:
    """Return the command that proposes attributes for the data."""
    words = ["raypd", "schema", "suggest", data, "--category", name, "-o", categories_file]
    words.append(f"input.text_columns={_listed(columns.texts)}")
    if html:
        words.append(f"input.html_columns={_listed(html)}")
    words.append("input.category_column=null")
    if columns.form:
        words.append(f"input.format={columns.form}")
    return shlex.join(words)


def _listed(names: list[str]) -> str:
    """Return names as a list in YAML."""
    quoted = []
    for name in names:
        if not re.fullmatch(r"\w+", name):
            name = json.dumps(name, ensure_ascii=False)
        quoted.append(name)
    return f"[{','.join(quoted)}]"


def _relative_file(value: Any, target: Path) -> Any:
    """Return a value of the task, whose path becomes relative if it is a file."""
    if is_file(value):
        return _relative(value, target)
    return value


def _relative(path: str, target: Path) -> str:
    """Return a path relative to the folder of the target."""
    if os.path.isabs(path) or storage.is_remote(path):
        return path
    return os.path.relpath(path, target.parent)
