"""More examples from few labels: documents in which values are replaced by those of other documents of the category."""

import copy
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from raypd.config import Attribute, ExtractionConfig, RunConfig
from raypd.tasks.base import Document
from raypd.tasks.columns import value_in
from raypd.tasks.documents import category_of

_SHARE = 0.5  # of a copy's values that are replaced
_SHORTEST = 2  # characters of a value: a shorter one stands in the middle of words


def swapped(documents: Sequence[Document], config: RunConfig) -> list[Document]:
    """`training.swap_copies` copies of each document with labels that stand in its text, with other values there."""
    task, column = config.task, config.training.labels_column
    assert isinstance(task, ExtractionConfig)
    draw = random.Random(config.training.seed)
    values: dict[tuple[str, str], list[str]] = defaultdict(list)  # by category and attribute, as often as they occur
    labelled: list[tuple[Document, str, list[tuple[Attribute, str]]]] = []
    for document in documents:
        labels = document.fields.get(column)
        try:
            category = category_of(document, config.input, task.categories)
        except ValueError:
            continue
        if not isinstance(labels, dict):
            continue
        texts = [str(document.fields.get(name) or "") for name in config.text_columns()]
        standing = []
        for attribute in task.categories[category].attributes:
            value = value_in(labels, attribute)
            plain = attribute.type == "text" and not attribute.many and isinstance(value, str)
            if plain and len(value) >= _SHORTEST and any(value in text for text in texts):
                values[category, attribute.name].append(value)
                standing.append((attribute, value))
        labelled.append((document, category, standing))
    copies: list[Document] = []
    for _ in range(config.training.swap_copies):
        for document, category, standing in labelled:
            made = Document(len(copies), document.id, copy.deepcopy(document.fields))
            for attribute, value in standing:
                if draw.random() < _SHARE:
                    other = draw.choice(values[category, attribute.name])
                    for name in (*config.text_columns(), column):
                        made.fields[name] = _replaced(made.fields.get(name), value, other)
            copies.append(made)
    return copies


def _replaced(tree: Any, value: str, other: str) -> Any:
    """A text, or the texts of labels, with one value in place of another: a longer value that holds it changes, too."""
    if isinstance(tree, dict):
        return {name: _replaced(inner, value, other) for name, inner in tree.items()}
    return tree.replace(value, other) if isinstance(tree, str) else tree
