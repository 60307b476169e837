"""Handle a changed schema: which attributes are extracted, and how rows are joined."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypd.config import Category, ExtractionConfig, RunConfig
from raypd.schema import Attribute
from raypd.tasks import record_of, value_in


@dataclass
class Change:
    """The change from old categories to new ones."""

    # By category: attributes to extract for documents that already have the others.
    added: dict[str, list[Attribute]] = field(default_factory=dict)
    # Categories to extract again completely, because no old answer can be used.
    anew: set[str] = field(default_factory=set)

    def describe(self) -> str:
        """Describe what must be extracted."""
        parts = []
        for category, attributes in self.added.items():
            names = ", ".join(attribute.name for attribute in attributes)
            parts.append(f"{category}: {names}")
        for category in sorted(self.anew):
            parts.append(f"{category}: everything")
        if not parts:
            return "attributes were removed, and there is nothing to extract"
        return "; ".join(parts)


def _with_categories(config: RunConfig, categories: dict[str, Category]) -> RunConfig:
    task = config.task.model_copy(update={"categories": categories})
    return config.model_copy(update={"task": task})


def answers_base(config: RunConfig) -> str:
    """Return the fingerprint of the configuration without its categories.

    As long as it is the same, old and new answers can be in one table.
    """
    if isinstance(config.task, ExtractionConfig):
        config = _with_categories(config, {})
    return config.fingerprint()


def compare(old: Mapping[str, Any], new: Mapping[str, Category]) -> Change:
    """Compare old categories with new ones.

    An attribute whose description, type or values have changed is a new attribute. If the
    description of a category has changed, all of its attributes are new, because every prompt
    contains it. The order does not matter.

    Args:
        old: The categories of the last successful night, as JSON.
        new: The categories of the configuration.
    """
    old_categories = {name: Category.model_validate(tree) for name, tree in old.items()}
    change = Change(anew=set(old_categories) - set(new))
    for name, category in new.items():
        old_category = old_categories.get(name)
        if old_category is None:
            # Documents of this category had no schema, so they failed. Failed documents are
            # extracted again completely.
            continue
        old_attributes: Sequence[Attribute] = []
        if old_category.description == category.description:
            old_attributes = old_category.attributes
        added = [attribute for attribute in category.attributes if attribute not in old_attributes]
        if len(added) == len(category.attributes):
            change.anew.add(name)
        elif added:
            change.added[name] = added
    return change


def only_added(config: RunConfig, change: Change) -> RunConfig:
    """Return the configuration that extracts only the added attributes."""
    categories = {}
    for name, attributes in change.added.items():
        category = config.extraction.categories[name]
        categories[name] = category.model_copy(update={"attributes": attributes})
    if config.input.category not in categories:
        # None of the documents to extract has the default category.
        source = config.input.model_copy(update={"category": None})
        config = config.model_copy(update={"input": source})
    return _with_categories(config, categories)


def join(
    old: dict[str, Any], added: dict[str, Any] | None, config: RunConfig, change: Change
) -> dict[str, Any]:
    """Join a row of old values with a row of added values.

    The result has exactly the attributes of the schema, in its order. A row of an unknown category
    is not changed. If the added attributes failed, the row keeps its old values and becomes an
    error row. An old value is dropped if an added attribute has the same name.

    Args:
        old: The row of an earlier night.
        added: The row with the added attributes; None if there is none.
        config: The configuration.
        change: The change of the categories.
    """
    category = config.extraction.categories.get(old["category"])
    if category is None:
        return old
    added_names = {attribute.name for attribute in change.added.get(old["category"], ())}
    old_record = json.loads(old.get("record") or "{}")
    old_values = {value["name"]: value for value in old.get("values") or []}
    added_row = added or {}
    added_record = json.loads(added_row.get("record") or "{}")
    added_values = {value["name"]: value for value in added_row.get("values") or []}
    record: dict[str, Any] = {}
    values: list[dict[str, Any]] = []
    for attribute in category.attributes:
        name = attribute.name
        is_added = name in added_names
        value = value_in(added_record if is_added else old_record, attribute)
        if value is not None:
            record[name] = value
        row_values = added_values if is_added else old_values
        if name in row_values:
            values.append(row_values[name])
    row = dict(old)
    row["record"] = json.dumps(record_of(category, record), ensure_ascii=False)
    row["values"] = values
    if added is not None:
        row["truncated"] = bool(old["truncated"]) or bool(added["truncated"])
        row["attempts"] = max(old["attempts"], added["attempts"])
        if added["status"] != "ok":
            row["status"] = "error"
            row["error"] = f"added attributes: {added['error']}"
    return row
