"""A document's labels: an object in one column, or a column for each attribute, as spreadsheets
have them.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from raypd.config import Attribute, Category
from raypd.tasks.documents import unpacked


def label_columns(categories: Mapping[str, Category]) -> list[str]:
    """The columns called as attributes are."""
    return [
        *{".".join(a.place): None for category in categories.values() for a in category.attributes}
    ]


def labels_of(
    fields: Mapping[str, Any], column: str, asked: Iterable[Attribute], texts: Collection[str]
) -> Any:
    """What stands in `column`; where there is none, the object of the columns called as attributes
    are, which are none of the document's `texts`; None: neither. Raises ValueError: a text that is
    no value of its attribute.
    """
    if column in fields:
        return unpacked(fields[column])
    named = {".".join(attribute.place): attribute for attribute in asked}
    cells = {
        name: (a, fields[name]) for name, a in named.items() if name in fields and name not in texts
    }
    return {
        name: typed(a, v) if isinstance(v, str) else v for name, (a, v) in cells.items()
    } or None


def typed(attribute: Attribute, text: str) -> Any:
    """A text as a value of its attribute, or None where it is blank.

    Raises ValueError where it is no value of the attribute.
    """
    if not text.strip():
        return None
    checked = attribute.value_type.check_cell(text)
    if checked.status not in ("ok", "null"):
        kind = f"a {attribute.type}"
        if attribute.values:
            kind = f"one of {', '.join(attribute.values)}"
        raise ValueError(f"{text!r} is no value of {attribute.name!r}, which is {kind}")
    return checked.value
