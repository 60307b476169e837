"""Reads a document's category, text and conversation, before any tokenizer is involved."""

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from raypd.config import (
    ExtractionConfig,
    GenerationConfig,
    InputConfig,
    QuestionAnsweringConfig,
    TaskSection,
)
from raypd.tasks.base import Document
from raypd.tasks.missing import parse_json

_ROLES = ("system", "user", "assistant")


def category_of(document: Document, source: InputConfig, categories: Collection[str]) -> str:
    """Return the document's category.

    Args:
        document: The document.
        source: The section `input`, which names the category or the column that contains it.
        categories: The names of all categories. If there is only one, it is the default.

    Raises:
        ValueError: If the document has no category, or one without a schema.
    """
    column = source.category_column
    name = None
    if column:
        name = document.fields.get(column)
    if name is None:
        name = source.category
    if name is None and len(categories) == 1:
        name = next(iter(categories))
    if name is None:
        raise ValueError(f"column {column!r} is empty and input.category is not set: no category")
    if str(name) not in categories:
        raise ValueError(f"category {name!r} has no schema in task.categories")
    return str(name)


def billed_as(document: Document, task: TaskSection, source: InputConfig) -> str:
    """Return the category that a document is billed under, or the task's kind without
    categories.
    """
    if not isinstance(task, ExtractionConfig):
        return task.kind
    try:
        return category_of(document, source, task.categories)
    except ValueError:
        return "(none)"


def text_of(document: Document, columns: list[str]) -> str:
    """Return the document's text.

    Args:
        document: The document.
        columns: The columns that contain its text. If there are several, each value is on a line of
            its own after the name of its column.

    Raises:
        ValueError: If all of them are empty.
    """
    lines = []
    for column in columns:
        value = document.fields.get(column)
        text = "" if value is None else str(value).strip()
        if not text:
            continue
        if len(columns) == 1:
            return text
        lines.append(f"{column}: {text}")
    if not lines:
        raise ValueError(f"empty: nothing in {', '.join(columns)}")
    return "\n".join(lines)


def with_nested(fields: Mapping[str, Any], names: Iterable[str | None]) -> dict[str, Any]:
    """Return the fields of a row together with fields of the objects in it.

    Args:
        fields: The row, by column.
        names: The columns that are needed. If a name such as `message.body` is not a column, the
            result has the value of the key `body` of the object in `message`, or a list of these
            values if `message` is a list of objects.
    """
    complete = dict(fields)
    for name in names:
        if name is None or "." not in name or name in fields:
            continue
        value = _nested_value(fields, name)
        if value is not None:
            complete[name] = value
    return complete


def _nested_value(value: Any, name: str) -> Any:
    """Return the value of a key, or of a nested key; None if there is none."""
    if isinstance(value, list):
        values = [_nested_value(item, name) for item in value]
        present = [item for item in values if item is not None]
        return present or None
    if not isinstance(value, Mapping):
        return None
    if name in value:
        return value[name]
    head, _, rest = name.partition(".")
    return _nested_value(value.get(head), rest) if rest else None


def words_of(text: str) -> str:
    """Return the words of a text without case and punctuation, to find texts with equal content."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def input_fields(
    document: Document,
    task: TaskSection,
    source: InputConfig,
    further_columns: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a document's values in the columns that a configuration reads.

    Args:
        document: The document.
        task: Section `task`.
        source: Section `input`.
        further_columns: Additional columns.

    Returns:
        The values by column. Columns that the document lacks are left out, except that a missing
        text is null.
    """
    columns = [*task.wanted_columns(source).values()]
    for name in (source.id_column, source.category_column):
        if name:
            columns.append(name)
    if isinstance(task, QuestionAnsweringConfig):
        columns += task.asked_columns
    columns += further_columns
    fields: dict[str, Any] = dict.fromkeys(task.text_columns(source))
    for column in columns:
        if document.fields.get(column) is not None:
            fields[column] = document.fields[column]
    return fields


def questions_of(fields: Mapping[str, Any], task: QuestionAnsweringConfig) -> list[Any]:
    """Return the questions of a row: the task's, those of a list, or the one of its column.

    Args:
        fields: The row, by column.
        task: The task.

    Raises:
        ValueError: If the row has no questions.
    """
    if task.questions:
        return task.questions
    column = task.questions_column
    questions = unpacked(fields.get(column))
    if isinstance(questions, str) and questions.strip():
        question: dict[str, Any] = {"question": questions}
        if not is_blank(fields.get("question_id")):
            question["id"] = fields["question_id"]
        if not is_blank(fields.get("choices")):
            question["choices"] = _listed_choices(fields["choices"])
        if not is_blank(fields.get("multi_select")):
            question["multi_select"] = str(fields["multi_select"]).strip().casefold() in _TRUE
        return [question]
    if not isinstance(questions, list):
        raise ValueError(f"column {column!r} holds neither a list of questions nor the text of one")
    if not questions:
        raise ValueError(f"empty: no questions in {column}")
    return questions


_TRUE = ("true", "1", "yes", "x")


def is_blank(value: Any) -> bool:
    """Return whether a cell is empty."""
    return value is None or (isinstance(value, str) and not value.strip())


def _listed_choices(cell: Any) -> Any:
    """Return the choices in a cell: a list, its JSON text, or `a; b` (`a | b`, or a line each)."""
    choices = unpacked(cell)
    if not isinstance(choices, str):
        return choices
    for separator in ("\n", "|", ";"):
        if separator in choices:
            return [part.strip() for part in choices.split(separator) if part.strip()]
    return [choices]


def conversation(prompt: Any, task: GenerationConfig) -> tuple[list[dict[str, str]], list[str]]:
    """Read a value of the prompt column as a conversation.

    Args:
        prompt: A text, a list of the user's turns, or a list of turns with `role` and `content`.
        task: The task, which may have a system turn.

    Returns:
        The turns so far (`role`, `content`), and the user's turns to answer.

    Raises:
        ValueError: If the value is not a conversation.
    """
    column = task.prompt_column
    system = []
    if task.system:
        system.append({"role": "system", "content": task.system})
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
        role = None
        content = None
        if isinstance(turn, dict):
            role = turn.get("role")
            content = turn.get("content")
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError(
                f"{column}: a turn needs `role` ({', '.join(_ROLES)}) and `content` as text"
            )
        turns.append({"role": str(role), "content": content})
    if turns[-1]["role"] != "user":
        raise ValueError(f"{column}: the last turn must be the user's")
    if turns[0]["role"] == "system":
        # The conversation's own system turn replaces that of the configuration.
        system = []
    return [*system, *turns[:-1]], [turns[-1]["content"]]


def unpacked(value: Any) -> Any:
    """Return a column's value, parsed if it is JSON text.

    Parquet has no maps and no lists of mixed values, so such values are stored as text.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return parse_json(value)
    return value


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value, for a message: "a list", "a number", "null"."""
    if value is None:
        return "null"
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), f"a {type(value).__name__}")
