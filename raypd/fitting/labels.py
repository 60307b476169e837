"""The labelled documents of a fit: drawn evenly, and labelled by a column, a run or a teacher."""

import json
from collections import Counter
from typing import Any

from raypd import storage
from raypd.config import RunConfig, with_changes
from raypd.dataset import (
    LABEL_ENDINGS,
    about_ids,
    kind_of,
    label_rows,
    planner,
    read_unit,
    unused_columns,
    without_documents,
)
from raypd.errors import InputError
from raypd.estimation import sampling
from raypd.evaluation import flat_values
from raypd.fitting.context import PLAIN_FILE, FitContext, extract, is_run, teacher_config
from raypd.tasks import (
    Document,
    about_missing,
    category_of,
    input_fields,
    label_columns,
    labels_of,
)
from raypd.text import Say, counted, share
from raypd.training import label_documents
from raypd.verify import dead_letters

Row = dict[str, Any]
UNLABELLED = "unlabelled-"  # begins the names of the teacher's inputs; fit.documents follows
_SHOWN_NAMES = 8


def asks_teacher(config: RunConfig) -> bool:
    """Return whether the labels of a fit are answers that its teacher has to give."""
    return config.fit.labels is None and config.fit.teacher is not None


def labelled_documents(context: FitContext) -> list[Document]:
    """Draw the documents of a fit, with labels in training.labels_column.

    Documents without a label have an error.

    Args:
        context: The fit.

    Raises:
        InputError: If no document has labels, or the teacher answered none.
        RunError: If the teacher's run ended.
    """
    config = context.config
    fit = config.fit
    if asks_teacher(config):
        return _labelled_by_teacher(context, _drawn(context, config))
    if fit.labels is None:
        return _drawn(context, config)
    if is_run(fit.labels):
        documents = _drawn(context, config)
        label_documents(documents, fit.labels, config)
        return documents
    if without_documents(fit.labels, config.text_columns(), config.input.id_column):
        documents = _documents_with_labels(config, fit.labels)
        label_documents(documents, fit.labels, config)
        return documents
    _check_ids_or_texts(config, fit.labels)
    return _drawn(context, _reading_labels(config, fit.labels))


def _check_ids_or_texts(config: RunConfig, labels: str) -> None:
    """Raise InputError if labels have neither the ids of documents nor their texts."""
    if not _is_label_file(labels):
        return
    texts = {*config.text_columns()}
    if any(texts & row.keys() for _, _, row in label_rows(labels, None)):
        return
    about = about_ids(labels, config.input.id_column)
    if about:
        named = ", ".join(map(repr, sorted(texts)))
        raise InputError(
            f"fit.labels {labels}: {about}. Name the column of the ids 'id' (or add the documents' "
            f"texts: {named})"
        )


def _is_label_file(labels: str) -> bool:
    path = storage.absolute(labels)
    is_named_so = labels.lower().endswith(LABEL_ENDINGS)
    return is_named_so and storage.exists(path) and not storage.is_folder(path)


def _drawn(context: FitContext, source: RunConfig) -> list[Document]:
    """Draw fit.documents documents of `source`; leave out those that cannot be read."""
    config = context.config
    named = label_columns(config.extraction.categories)
    columns = (config.training.labels_column, *named, "scored", "accepted")
    sample = sampling.draw(source, config.fit.documents, columns=columns)
    if sample.unreadable:
        texts = ", ".join(source.text_columns())
        context.say(
            f"{counted(sample.unreadable, 'document')} left out: without a text in {texts}, or "
            "unreadable"
        )
    return [document for document in sample.documents if document.error is None]


def _reading_labels(config: RunConfig, labels: str) -> RunConfig:
    """Return a configuration whose input are the labelled documents, whatever the corpus is."""
    table = kind_of(labels) if storage.is_folder(labels) else None
    return with_changes(
        config, {"input.path": labels, "input.format": table or "auto", **PLAIN_FILE}
    )


def _documents_with_labels(config: RunConfig, labels: str) -> list[Document]:
    """Return documents of the corpus whose ids are in a file of labels, spread evenly over them."""
    ids = {key for _, key, _ in label_rows(labels, config.input.id_column)}
    documents = []
    for unit in planner.plan(config):
        documents += [document for document in read_unit(unit, config) if document.id in ids]
    if not documents:
        raise InputError(
            f"fit.labels {labels}: no document of the input has its ids, such as {min(ids)!r}"
        )
    count = min(len(documents), config.fit.documents)
    return [documents[number * len(documents) // count] for number in range(count)]


def _labelled_by_teacher(context: FitContext, documents: list[Document]) -> list[Document]:
    """Let the teacher answer documents; return them with its answers as labels."""
    config = context.config
    count = config.fit.documents
    unlabelled = storage.join(context.folder, f"{UNLABELLED}{count}.jsonl")
    if not storage.exists(unlabelled):
        rows = []
        for document in documents:
            rows.append({**input_fields(document, config.task, config.input), "id": document.id})
        write_rows(unlabelled, rows)
    output = storage.join(context.folder, f"teacher-{count}")
    run = teacher_config(config, unlabelled, output)
    manifest = extract(context, run)
    if not manifest.ok:
        reason = dead_letters.most_frequent(manifest.output) or "no reason is known"
        raise InputError(
            f"fit.teacher answered none of {counted(manifest.documents, 'document')}: {reason}"
        )
    answered = [document for unit in planner.plan(run) for document in read_unit(unit, run)]
    label_documents(answered, manifest.output, config)
    return answered


def usable_rows(config: RunConfig, documents: list[Document], say: Say) -> list[Row]:
    """Return the rows that a fit stores of labelled documents.

    Args:
        config: The configuration of the fit.
        documents: The documents; of equal ids the first is used.
        say: Shows the user how many documents are left out, and why.

    Raises:
        InputError: If there are none, no label has a value, or none is of an attribute.
    """
    column = config.training.labels_column
    categories = config.extraction.categories
    rows: dict[str, Row] = {}
    errors: Counter[str] = Counter()
    for document in documents:
        labels = None
        try:
            category = categories[category_of(document, config.input, categories)]
            labels = labels_of(document.fields, column, category.attributes, config.text_columns())
        except ValueError as error:
            document.error = document.error or str(error)
        if document.error is not None:
            errors[document.error] += 1
        elif not isinstance(labels, dict):
            errors[f"column {column!r} holds no labels ({{attribute: value or null}})"] += 1
        else:
            further = ("scored", "accepted")
            fields = input_fields(document, config.task, config.input, further)
            rows.setdefault(document.id, {**fields, "id": document.id, column: labels})
    if not rows:
        reason = next(iter(errors), "there are no documents")
        sources = f"column training.labels_column ({column!r}), from fit.labels or from fit.teacher"
        raise InputError(f"no labelled document: {reason}. Labels come from {sources}")
    if errors:
        reason, _ = errors.most_common(1)[0]
        often = "" if len(errors) == 1 else "most often because: "
        say(f"{counted(errors.total(), 'document')} left out: {often}{reason}")
    _check_labels(config, list(rows.values()))
    return list(rows.values())


def _check_labels(config: RunConfig, rows: list[Row]) -> None:
    """Raise InputError if no label is of an attribute, or every label is null."""
    column = config.training.labels_column
    attributes = set()
    for category in config.extraction.categories.values():
        attributes |= {".".join(attribute.key_path) for attribute in category.attributes}
    labelled: set[str] = set()
    for row in rows:
        labelled |= flat_values(row[column]).keys()
    if attributes.isdisjoint(labelled):
        names = ", ".join(sorted(labelled)[:_SHOWN_NAMES])
        expected = ", ".join(sorted(attributes)[:_SHOWN_NAMES])
        raise InputError(
            f"no label is of an attribute: the labels are of {names}, the attributes are {expected}"
        )
    if all(value is None for row in rows for value in row[column].values()):
        raise InputError(
            f"every label of {counted(len(rows), 'document')} is null: there is nothing to learn"
        )


def write_rows(path: str, rows: list[Row]) -> None:
    """Write rows as JSON lines.

    They are ASCII, which can hold half of a surrogate pair. Dates, which come from Parquet, become
    texts.
    """
    lines = [json.dumps(row, default=str) + "\n" for row in rows]
    storage.put(path, "".join(lines).encode())


def missing_labels(rows: list[Row], config: RunConfig) -> str:
    """Return a note that names the attributes without labels; "" if there are none."""
    column = config.training.labels_column
    categories = config.extraction.categories
    wanted: dict[str, None] = {}
    labelled: set[str] = set()
    for row in rows:
        category = str(row.get(config.input.category_column or ""))
        of_row = [categories[category]] if category in categories else categories.values()
        for name in (".".join(a.key_path) for c in of_row for a in c.attributes):
            wanted[name] = None
        labelled |= flat_values(row[column]).keys()
    missing = [name for name in wanted if name not in labelled]
    labels = config.fit.labels
    others: list[str] = [name for name in sorted(labelled) if name not in wanted]
    if missing and labels is not None and _is_label_file(labels) and not others:
        source = config.input
        used = {source.id_column, source.category_column, *config.text_columns(), column}
        others = unused_columns(labels, used | {*label_columns(categories)})
    return about_missing(missing, others)


def constant_labels(rows: list[Row], config: RunConfig) -> str | None:
    """Return a warning that names the attributes with one and the same label in every document.

    An F1 over these means little. Returns None if there are none.
    """
    column = config.training.labels_column
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row[column].items():
            values.setdefault(name, set()).add(json.dumps(value))
    constant = sorted(name for name, distinct in values.items() if len(distinct) == 1)
    if not constant:
        return None
    attributes = counted(len(values), "attribute")
    return (
        "the label is the same in every document, so little can be learned: "
        f"{', '.join(constant[:_SHOWN_NAMES])} ({len(constant)} of {attributes}, "
        f"{share(len(constant), len(values))})"
    )
