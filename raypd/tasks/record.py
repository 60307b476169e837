"""The record of an extraction: the attributes' values in the nested objects of the schema."""

from collections.abc import Mapping, Sequence
from typing import Any

from raypd.config import Category
from raypd.schema import Attribute

Row = dict[str, Any]


def put_value(tree: Row, path: Sequence[str], value: Any) -> None:
    """Set the value at a path of keys, and add missing objects."""
    *parents, last = path
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value


def value_at(tree: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys, or None."""
    for name in path:
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(name)
    return tree


def value_in(record: Any, attribute: Attribute) -> Any:
    """Return an attribute's value in a record or in labels, or None.

    Args:
        record: The record, with the value in a nested object or under the attribute's name.
        attribute: The attribute.
    """
    nested = value_at(record, attribute.key_path)
    return nested if nested is not None else record.get(attribute.name)


def lacks(labels: Mapping[str, Any], attribute: Attribute, category: Category) -> bool:
    """Return whether labels lack an attribute, without even a null.

    Args:
        labels: The labels of a document.
        attribute: The attribute.
        category: The document's category.

    Raises:
        ValueError: A label that must be an object is a plain value.
    """
    if attribute.name in labels:
        return False
    tree: Any = labels
    path = attribute.key_path
    for depth, name in enumerate(path):
        if tree is None:
            return False
        if not isinstance(tree, Mapping):
            raise ValueError(
                f"attribute {attribute.name!r}: a label of {path[depth - 1]!r} is not an object"
            )
        if name not in tree:
            # A record omits optional attributes and objects if they are null.
            is_optional = path[: depth + 1] in category.optional_objects
            return not attribute.omit_null and not is_optional
        tree = tree[name]
    return False


def record_of(category: Category, values: Mapping[str, Any]) -> Row:
    """Return the record of some values, assembled into nested objects.

    Args:
        category: The document's category.
        values: Values by the names of their attributes.
    """
    record: Row = {}
    for attribute in category.attributes:
        value = values.get(attribute.name)
        if value is not None:
            value = attribute.value_type.in_record(value)
        if value is not None or not attribute.omit_null:
            put_value(record, attribute.key_path, value)
    # The innermost objects come first, because an outer one may be empty without them.
    for *parents, last in sorted(category.optional_objects, key=len, reverse=True):
        holder = value_at(record, parents)
        if holder is not None and not _has_value(holder.get(last)):
            holder.pop(last, None)
    return record


def _has_value(tree: Any) -> bool:
    """Return whether a value, or any value in an object, is not null."""
    if isinstance(tree, dict):
        return any(_has_value(value) for value in tree.values())
    return tree is not None
