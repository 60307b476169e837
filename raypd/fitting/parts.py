"""The parts of a fit's labelled documents: train, validation and test."""

import hashlib
import json
from collections.abc import Collection

from raypd import storage
from raypd.config import LABELS_NEEDED, RunConfig
from raypd.errors import InputError
from raypd.fitting.context import FitContext
from raypd.fitting.labels import (
    Row,
    asks_teacher,
    constant_labels,
    labelled_documents,
    missing_labels,
    usable_rows,
    write_rows,
)
from raypd.tasks import Document, LabelledExamples, text_of, trained_on_of, words_of
from raypd.text import counted

PARTS = ("train", "validation", "test")
# The number of documents with which the figures mean something.
MIN_DOCUMENTS = {"train": 16, "validation": 4, "test": 30}
_MAX_TEST_SHARE = 0.6
# The fractional parts of its multiples are spread evenly over 0 to 1.
_GOLDEN_RATIO = 0.6180339887498949


def parts_of(context: FitContext) -> dict[str, list[Row]]:
    """Return the labelled documents by part.

    They are drawn and labelled once, and then read from the fit's folder.

    Args:
        context: The fit.

    Raises:
        ConfigError, InputError: If there are too few labelled documents, or no label has a value.
        RunError: If the teacher's run ended.
    """
    paths = {part: context.part(part) for part in PARTS}
    if not all(storage.exists(path) for path in paths.values()):
        _write_parts(context, paths)
    parts = {}
    for part, path in paths.items():
        parts[part] = [json.loads(line) for line in storage.read(path).splitlines()]
    for part, rows in parts.items():
        if len(rows) < MIN_DOCUMENTS[part]:
            for path in paths.values():
                storage.delete(path)
            total = sum(map(len, parts.values()))
            raise InputError(
                f"{counted(total, 'labelled document')}, but {len(rows)} of them are for {part}, "
                f"which needs {MIN_DOCUMENTS[part]}: {_advice(context.config, total)}"
            )
    return parts


def _advice(config: RunConfig, total: int) -> str:
    """Return what to do about too few labelled documents.

    Args:
        config: The configuration of the fit.
        total: The number of its labelled documents.
    """
    documents = config.fit.documents
    if asks_teacher(config):
        advice = f"raise fit.documents ({documents}), or add documents to the input"
    elif total >= documents:
        advice = f"raise fit.documents ({documents}), or label more documents"
    else:
        advice = "label more documents"
    if total < LABELS_NEEDED:
        return f"{advice}; {LABELS_NEEDED} are enough with the default shares"
    return f"{advice}, or change fit.test_share and training.validation_share"


def _write_parts(context: FitContext, paths: dict[str, str]) -> None:
    documents = labelled_documents(context)
    ids = [document.id for document in documents if document.error is None]
    repeated = len(ids) - len(set(ids))
    if repeated:
        context.say(f"{counted(repeated, 'document')} with the id of another: left out")
    rows = usable_rows(context.config, documents, context.say)
    warning = constant_labels(rows, context.config)
    if warning is not None:
        context.say(warning)
    missing = missing_labels(rows, context.config)
    if missing:
        context.say(missing)
    for part, members in split(rows, context.config).items():
        write_rows(paths[part], members)


def split(
    rows: list[Row],
    config: RunConfig,
    test_share: float | None = None,
    seen: Collection[str] | None = None,
) -> dict[str, list[Row]]:
    """Split labelled documents into parts.

    Every category is in every part in proportion. Documents with the same text are in one part. The
    examples that the prompt shows are in train, and so are documents that a model was trained on
    before this fit, because no F1 may be measured on them.

    Args:
        rows: The labelled documents.
        config: The configuration of the fit.
        test_share: The share of test; None for `fit.test_share`. It is raised until test has
            enough documents.
        seen: The ids of the documents that a model was trained on before; None to look for them.
    """
    if seen is None:
        seen = _seen_before(rows, config)
    if test_share is None:
        test_share = config.fit.test_share
    validation_end = test_share + config.training.validation_share
    shown = _texts_in_prompt(config)
    parts: dict[str, list[Row]] = {part: [] for part in PARTS}
    for number, group in enumerate(_ordered_groups(rows, config)):
        position = (number * _GOLDEN_RATIO) % 1
        is_shown = bool(shown) and _words(group[0], config) in shown
        if is_shown or any(row["id"] in seen for row in group):
            parts["train"] += group
        elif position < test_share:
            parts["test"] += group
        elif position < validation_end:
            parts["validation"] += group
        else:
            parts["train"] += group
    if len(parts["test"]) < MIN_DOCUMENTS["test"] and test_share < _MAX_TEST_SHARE:
        return split(rows, config, test_share + 0.02, seen)
    # In this order, the first documents of train are a sample of it.
    parts["train"].sort(key=lambda row: _random_key(row["id"], config))
    return parts


def _ordered_groups(rows: list[Row], config: RunConfig) -> list[list[Row]]:
    """Return documents with the same text together, by category and then in a random order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        text = " ".join(str(row.get(column) or "") for column in config.text_columns())
        groups.setdefault(words_of(text), []).append(row)
    column = config.input.category_column

    def order(words: str) -> tuple[str, bytes]:
        category = str(groups[words][0].get(column)) if column else ""
        return category, _random_key(words, config)

    return [groups[words] for words in sorted(groups, key=order)]


def _random_key(text: str, config: RunConfig) -> bytes:
    """Return a key to sort by, which depends on the seed."""
    return hashlib.sha256(f"{config.training.seed}/{text}".encode()).digest()


def _texts_in_prompt(config: RunConfig) -> set[str]:
    """Return the words of the examples that every prompt shows."""
    examples = LabelledExamples(config.extraction, config.input)
    words = set()
    for category in config.extraction.categories:
        for text, _ in examples.in_common(category):
            words.add(words_of(text))
    return words


def _seen_before(rows: list[Row], config: RunConfig) -> set[str]:
    """Return the ids of documents that a model of the fit was trained or validated on before."""
    labels = {row["id"]: row for row in rows}
    seen: set[str] = set()
    for changes in ({}, *config.fit.candidates.values()):
        model = {"name": config.model.name, "adapter": config.model.adapter}
        for key in model:
            model[key] = changes.get(f"model.{key}", model[key])
        documents = trained_on_of(model)
        if documents.ids:
            seen |= documents.among(labels, config.text_columns())
    return seen


def _words(row: Row, config: RunConfig) -> str:
    return words_of(text_of(Document(0, "", row), config.text_columns()))
