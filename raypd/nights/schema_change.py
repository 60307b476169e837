"""What a changed schema means for answers that exist: which attributes are to be extracted, and how
rows are joined.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypd.config import Attribute, Category, ExtractionConfig, RunConfig
from raypd.tasks.columns import record_of, value_in


@dataclass
class Change:
    """From an old mapping of categories to a new one."""

    # To extract for documents that have the others.
    added: dict[str, list[Attribute]] = field(default_factory=dict)
    anew: set[str] = field(default_factory=set)  # categories to extract whole, as nothing is of use

    def describe(self) -> str:
        parts = [
            f"{name}: {', '.join(a.name for a in attributes)}"
            for name, attributes in self.added.items()
        ]
        parts += [f"{name}: everything" for name in sorted(self.anew)]
        return "; ".join(parts) or "attributes were removed, and there is nothing to extract"


def _with_categories(config: RunConfig, categories: dict[str, Category]) -> RunConfig:
    return config.model_copy(
        update={"task": config.task.model_copy(update={"categories": categories})}
    )


def answers_base(config: RunConfig) -> str:
    """The configuration's fingerprint without its categories: while it stays, old answers and new
    ones go together.
    """
    return (
        _with_categories(config, {}) if isinstance(config.task, ExtractionConfig) else config
    ).fingerprint()


def compare(old: Mapping[str, Any], new: Mapping[str, Category]) -> Change:
    """old: the categories of the last good night, as JSON.

    Another description, type or values make another attribute, another description of a category
    all of its attributes, as every prompt carries it; order does not matter.
    """
    before = {name: Category.model_validate(tree) for name, tree in old.items()}
    change = Change(anew=set(before) - set(new))
    for name, category in new.items():
        was = before.get(name)
        if was is None:
            # Its documents had no schema and so no answer: they failed, and what failed is
            # extracted whole.
            continue
        usable = was.attributes if was.description == category.description else []
        kept = [a for a in category.attributes if a in usable]
        if not kept:
            change.anew.add(name)
        elif added := [a for a in category.attributes if a not in kept]:
            change.added[name] = added
    return change


def only_added(config: RunConfig, change: Change) -> RunConfig:
    """The configuration that extracts the added attributes and nothing else."""
    categories = {
        name: config.extraction.categories[name].model_copy(update={"attributes": attributes})
        for name, attributes in change.added.items()
    }
    if config.input.category not in categories:  # of none of the documents that are asked
        config = config.model_copy(
            update={"input": config.input.model_copy(update={"category": None})}
        )
    return _with_categories(config, categories)


def join(
    old: dict[str, Any], added: dict[str, Any] | None, config: RunConfig, change: Change
) -> dict[str, Any]:
    """A row of old and added values, in the schema's order and with nothing else; of unknown
    categories as it is. Where the added attributes failed, it keeps its old values and says so: it
    is an error row, and not empty. What an attribute of an added one's name had before is no value
    of it.
    """
    category = config.extraction.categories.get(old["category"])
    if category is None:
        return old
    again = {attribute.name for attribute in change.added.get(old["category"], ())}
    parts = (old, added or {})
    row = dict(old)
    records = [json.loads(part.get("record") or "{}") for part in parts]
    found = {a.name: value_in(records[a.name in again], a) for a in category.attributes}
    present = {name: value for name, value in found.items() if value is not None}
    values = [{v["name"]: v for v in part.get("values") or []} for part in parts]
    row["record"] = json.dumps(record_of(category, present), ensure_ascii=False)
    row["values"] = [of[name] for name in found if name in (of := values[name in again])]
    if added is not None:
        row["truncated"] = bool(old["truncated"]) or bool(added["truncated"])
        row["attempts"] = max(old["attempts"], added["attempts"])
        if added["status"] != "ok":
            row["status"] = "error"
            row["error"] = f"added attributes: {added['error']}"
    return row
