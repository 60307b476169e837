"""A document's labels: an object in one column, or a column for each attribute, as spreadsheets have them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from raypd.config import Attribute, Category
from raypd.tasks.documents import unpacked


def label_columns(column: str, categories: Mapping[str, Category]) -> list[str]:
    """What may hold the labels of documents, for readers that read no more than they are told."""
    return [column, *{".".join(a.place): None for category in categories.values() for a in category.attributes}]


def labels_of(fields: Mapping[str, Any], column: str, attributes: Iterable[Attribute]) -> Any:
    """What stands in `column`; where there is none, the object of the columns that are called as attributes are, None
    if there is none. Raises ValueError: a text that is no value of its attribute."""
    if column in fields:
        return unpacked(fields[column])
    cells = {name: (a, fields[name]) for a in attributes if (name := ".".join(a.place)) in fields}
    return {name: typed(a, v) if isinstance(v, str) else v for name, (a, v) in cells.items()} or None


def typed(attribute: Attribute, text: str) -> Any:
    """A text as a value of its attribute, None where it is blank. Raises ValueError where it is none."""
    from raypd.tasks.values import check  # here, since it brings numpy and more, and every command has this module

    if not text.strip():
        return None
    checked = check(attribute, text if attribute.many else json.dumps(text, ensure_ascii=False))
    if checked.status not in ("ok", "null"):
        kind = f"one of {', '.join(attribute.values)}" if attribute.values else f"a {attribute.type}"
        raise ValueError(f"{text!r} is no value of {attribute.name!r}, which is {kind}")
    return checked.value
