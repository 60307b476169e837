"""Reads a document's labels: an object in one column, or a column per attribute, as in a
spreadsheet.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from raypd.config import Category
from raypd.errors import closest
from raypd.schema import TYPES, Attribute
from raypd.tasks.documents import unpacked

_SHOWN_NAMES = 8


def about_missing(attributes: Collection[str], columns: Collection[str]) -> str:
    """Return a note that names the attributes without any label; "" if there are none.

    Args:
        attributes: The names of the attributes.
        columns: The columns of the labels that fit no attribute.
    """
    if not attributes:
        return ""
    note = f"no labels of {_shown(attributes)}: the labels have nothing with this name"
    if columns:
        note += f". These columns of the labels match no attribute: {_shown(columns)}"
    for name in attributes:
        column = closest(name, columns)
        if column is not None:
            return f"{note}. If {column!r} is {name!r}, rename it"
    return note


def _shown(names: Collection[str]) -> str:
    """Return names in quotes, and only the first ones if there are many."""
    shown = ", ".join(map(repr, list(names)[:_SHOWN_NAMES]))
    further = len(names) - _SHOWN_NAMES
    return f"{shown} and {further} more" if further > 0 else shown


def label_columns(categories: Mapping[str, Category]) -> list[str]:
    """Return the names of the columns that are named after attributes, without duplicates."""
    columns: dict[str, None] = {}
    for category in categories.values():
        for attribute in category.attributes:
            columns[".".join(attribute.key_path)] = None
            # A table may also have the whole object in one column.
            columns[attribute.key_path[0]] = None
    return list(columns)


def labels_of(
    fields: Mapping[str, Any],
    column: str,
    attributes: Iterable[Attribute],
    text_columns: Collection[str],
) -> Any:
    """Return the labels in `column`; if it is absent, build them from columns named after
    attributes.

    Args:
        fields: The row of the document, by column.
        column: The column that contains all labels as one object.
        attributes: The attributes of the document's category.
        text_columns: The columns with the text of the document, which contain no labels.

    Returns:
        The labels by attribute, or None if there are none.

    Raises:
        ValueError: If a text is not a value of its attribute.
    """
    if column in fields:
        return unpacked(fields[column])
    labels: dict[str, Any] = {}
    for attribute in attributes:
        name = ".".join(attribute.key_path)
        head = attribute.key_path[0]
        if name in fields and name not in text_columns:
            value = fields[name]
            if isinstance(value, str):
                value = typed(attribute, value)
            labels[name] = value
        elif head in fields and head not in text_columns:
            labels[name] = _inside(fields[head], attribute)
    return labels or None


def _inside(cell: Any, attribute: Attribute) -> Any:
    """Return an attribute's value in a column with its whole object, which may be JSON text.

    Raises:
        ValueError: The column does not contain an object.
    """
    value = unpacked(cell)
    if isinstance(value, str) and not value.strip():
        return None
    for depth, key in enumerate(attribute.key_path[1:], 1):
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{'.'.join(attribute.key_path[:depth])!r} is not a JSON object: {cell!r}"
            )
        value = value.get(key)
    return value


def typed(attribute: Attribute, text: str) -> Any:
    """Read a text as a value of its attribute.

    Returns:
        The value, or None if the text is blank.

    Raises:
        ValueError: If the text is not a value of the attribute.
    """
    if not text.strip():
        return None
    checked = attribute.value_type.check_cell(text)
    if checked.status not in ("ok", "null"):
        raise ValueError(
            f"{text!r} is not a value of {attribute.name!r}, which is {_kind(attribute)}"
        )
    return checked.value


def _kind(attribute: Attribute) -> str:
    """Return the kind of an attribute's values and their notation."""
    if attribute.values:
        return f"one of {', '.join(attribute.values)}"
    article = "an" if attribute.type == "integer" else "a"
    kind = f"{article} {attribute.type}"
    if attribute.minimum is not None:
        kind += f" of at least {attribute.minimum:g}"
    if attribute.maximum is not None:
        kind += " of" if attribute.minimum is None else " and"
        kind += f" at most {attribute.maximum:g}"
    example = TYPES[attribute.type].example
    if example:
        kind += f": write it as {example}"
    return kind
