"""Names of keys inside objects in columns: `message.body` is the key `body` of the objects in the
column `message`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

# Levels of nested objects that are searched.
_DEEPEST = 4
# Items of a list of objects that are searched.
_ITEMS = 3


def names_in_row(row: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the columns of a row, each followed by the keys inside it."""
    for name, value in row.items():
        if isinstance(name, str):
            yield name
            yield from _names_in_value(name, value, 1)


def _names_in_value(prefix: str, value: Any, depth: int) -> Iterator[str]:
    if depth >= _DEEPEST:
        return
    items = value[:_ITEMS] if isinstance(value, list) else [value]
    for item in items:
        if not isinstance(item, Mapping):
            continue
        for key, inner in item.items():
            name = f"{prefix}.{key}"
            yield name
            yield from _names_in_value(name, inner, depth + 1)


def names_in_schema(schema: pa.Schema) -> list[str]:
    """Return the columns of a schema, each followed by the keys inside it."""
    names: list[str] = []
    for field in schema:
        names.append(field.name)
        names += _names_in_type(field.name, field.type, 1)
    return names


def _names_in_type(prefix: str, type: pa.DataType, depth: int) -> Iterator[str]:
    if pa.types.is_list(type) or pa.types.is_large_list(type):
        type = type.value_type
    if depth >= _DEEPEST or not pa.types.is_struct(type):
        return
    for field in type:
        name = f"{prefix}.{field.name}"
        yield name
        yield from _names_in_type(name, field.type, depth + 1)


def with_outer(names: Iterable[str | None]) -> set[str | None]:
    """Return columns together with the columns whose objects may have them as keys."""
    columns: set[str | None] = set(names)
    for name in list(columns):
        if name is not None and "." in name:
            columns.add(name.partition(".")[0])
    return columns
