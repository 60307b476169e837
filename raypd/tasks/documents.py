"""What a document says to a task before any tokenizer: its category, its text, its conversation."""

import contextlib
import re
from collections.abc import Collection, Sequence
from typing import Any

from raypd.config import ExtractionConfig, GenerationConfig, InputConfig, RunConfig
from raypd.tasks.base import Document
from raypd.tasks.missing import parse_json

_ROLES = ("system", "user", "assistant")


def category_of(document: Document, source: InputConfig, categories: Collection[str]) -> str:
    """The document's category, or the only one there is.

    Raises ValueError where it names none, or an unknown one.
    """
    column = source.category_column
    name = document.fields.get(column) if column else None
    name = name if name is not None else source.category
    if name is None and len(categories) == 1:
        name = next(iter(categories))
    if name is None:
        raise ValueError(f"column {column!r} is empty and input.category is not set: no category")
    if str(name) not in categories:
        raise ValueError(f"category {name!r} has no schema in task.categories")
    return str(name)


def billed_as(document: Document, config: RunConfig) -> str:
    """The category under which a document's cost stands: the task's kind where it has none."""
    if not isinstance(config.task, ExtractionConfig):
        return config.task.kind
    try:
        return category_of(document, config.input, config.task.categories)
    except ValueError:
        return "(none)"


def text_of(document: Document, columns: list[str]) -> str:
    """The document's text, with names before the values of several columns.

    Raises ValueError where it is empty.
    """
    parts = [(column, document.fields.get(column)) for column in columns]
    lines = [
        (column, str(text).strip())
        for column, text in parts
        if text is not None and str(text).strip()
    ]
    if not lines:
        raise ValueError(f"empty: nothing in {', '.join(columns)}")
    return (
        lines[0][1]
        if len(columns) == 1
        else "\n".join(f"{column}: {line}" for column, line in lines)
    )


def words_of(text: str) -> str:
    """A text without case, punctuation and white space: the same of documents that say the same."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def input_fields(document: Document, config: RunConfig, more: Sequence[str] = ()) -> dict[str, Any]:
    """What a document has in the columns that a configuration reads (a text that it lacks is null),
    and in more.
    """
    names = [*config.wanted_columns().values(), config.input.category_column or "", *more]
    there = {name: document.fields[name] for name in names if document.fields.get(name) is not None}
    return dict.fromkeys(config.text_columns()) | there


def conversation(prompt: Any, task: GenerationConfig) -> tuple[list[dict[str, str]], list[str]]:
    """A prompt as turns up to now (`role`, `content`), and the user's to be answered.

    Raises ValueError for none.
    """
    column = task.prompt_column
    system = [{"role": "system", "content": task.system}] if task.system else []
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(
            f"{column}: expected text, a list of the user's turns, or a list of role/content "
            "records"
        )
    if all(isinstance(turn, str) for turn in prompt):
        if any(not turn.strip() for turn in prompt):
            raise ValueError(f"empty: {column} has a turn without text")
        return system, prompt
    turns = []
    for turn in prompt:
        role, content = (
            (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        )
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError(
                f"{column}: a turn needs `role` ({', '.join(_ROLES)}) and `content` as text"
            )
        turns.append({"role": str(role), "content": content})
    if turns[-1]["role"] != "user":
        raise ValueError(f"{column}: the last turn must be the user's")
    return [*([] if turns[0]["role"] == "system" else system), *turns[:-1]], [turns[-1]["content"]]


def unpacked(value: Any) -> Any:
    """A column's value, also out of its JSON text: Parquet has no maps and lists of mixed
    values.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return parse_json(value)
    return value


def kind_of(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
