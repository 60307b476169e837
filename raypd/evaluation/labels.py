"""Reads the labels of documents and the answers of a run for an evaluation."""

import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from raypd import storage
from raypd.dataset import about_ids, columns_of, label_rows, unit_rows, unused_columns
from raypd.errors import InputError, raised_as
from raypd.run import NoRun, layout, load_record, similar_folder
from raypd.schema import Attribute
from raypd.tasks import labels_of, trained_on_of
from raypd.text import id_text

Row = dict[str, Any]
# Document id -> the rows that answer it, which are empty if it failed.
Answers = dict[str, list[Row]]
# Document id -> its labels.
Labels = dict[str, Row]
# Category -> name of an attribute that a run extracted -> its name in labels ("a.b" if nested).
AttributeNames = dict[str, dict[str, str]]
# A run of a fit is at most this many levels below the fit's folder (candidates/NAME/SHARE/test).
_LEVELS_OF_FIT = 4
# The types of the values under these names in a row of labels. Anything else is an input column.
_TYPES: dict[str, Any] = {
    "target": dict,
    "questions": list,
    "reference": (str, list),
    "scored": list,
    "accepted": dict,
}


def read_labels(path: str, labels_column: str, run: str = "") -> Labels:
    """Read the labels of documents.

    Args:
        path: JSON lines, or a table with an id and a column per attribute.
        labels_column: The column whose labels become `target`.
        run: The folder of the run whose documents they are, which determines the columns of ids,
            categories and texts; "" if there is none.

    Returns:
        By document id, an object with `target`, `questions` or `reference`.

    Raises:
        InputError: The file cannot be read, or contains no labels.
    """
    config = _recorded_config(run) if run else {}
    source = config.get("input") or {}
    id_column = _id_column(run, source)
    categories = (config.get("task") or {}).get("categories") or {}
    attributes_by_category = {
        name: [Attribute(**attribute) for attribute in schema["attributes"]]
        for name, schema in categories.items()
    }
    category_column = source.get("category_column") or ""
    text_columns = source.get("text_columns") or ()
    labels: Labels = {}
    for number, key, row in label_rows(path, id_column):
        line = f"{path}:{number}"
        try:
            category = str(row.get(category_column))
            attributes: Iterable[Attribute] | None = attributes_by_category.get(category)
            if not attributes:
                attributes = chain(*attributes_by_category.values())
            with raised_as(InputError, line, ValueError):
                record = labels_in(row, labels_column, attributes, text_columns)
            if labels.setdefault(key, record) != record:
                raise InputError(f"{line}: the id {key!r} has other labels above")
            if "target" not in record:
                _check_questions(record.get("questions", []), line)
        except (KeyError, TypeError, AttributeError):
            raise InputError(f"{line}: expected an object of labels") from None
    return labels


def no_ids(path: str, run: str) -> str:
    """Return what is wrong if the labels of a run have no column of ids; "" if they have one.

    The text names a column that contains ids of the run.

    Args:
        path: The file of labels.
        run: The folder of the run.

    Raises:
        InputError: The file cannot be read.
    """
    source = _recorded_config(run).get("input") or {}
    about = about_ids(path, _id_column(run, source))
    if not about:
        return ""
    values_by_column: dict[str, set[str]] = {}
    for _, _, row in label_rows(path, None):
        for column, value in row.items():
            if isinstance(value, (str, int)):
                values_by_column.setdefault(column, set()).add(id_text(value))
    for column, values in values_by_column.items():
        if answers_for(run, values)[0]:
            return f"{about}. The column {column!r} has ids of this run: name it 'id'"
    return f"{about}. Name the column of the ids 'id'"


def columns_without_attribute(
    path: str, labels_column: str, run: str, labels: Labels, names: AttributeNames
) -> list[str]:
    """Return the columns of labels that fit no attribute and are not known columns of the input.

    Args:
        path: The file of labels.
        labels_column: The column whose labels became `target`.
        run: The folder of the run.
        labels: The labels in the file.
        names: The attributes of the run by category.

    Raises:
        InputError: The file cannot be read.
    """
    source = _recorded_config(run).get("input") or {}
    attributes = {name for category in names.values() for name in category.values()}
    heads = {name.partition(".")[0] for name in attributes}
    texts = source.get("text_columns") or ()
    used = {source.get("id_column"), source.get("category_column"), *texts, *attributes, *heads}
    if labels_column not in columns_of(path):
        return unused_columns(path, used)
    targets = [flat_values(record["target"]) for record in labels.values() if "target" in record]
    return list({name: None for target in targets for name in target if name not in attributes})


def _check_questions(questions: list[Row], line: str) -> None:
    for question in questions:
        name = "answer_idx" if question.get("choices") else "answers"
        if not isinstance(question.get(name), list):
            raise InputError(f"{line}: a question without a list of {name!r}: label it or drop it")


def labels_in(
    row: Row, labels_column: str, attributes: Iterable[Attribute], text_columns: Collection[str]
) -> Row:
    """Return the labels in a row of a file.

    Args:
        row: The row, which may also contain columns of the input.
        labels_column: The column whose labels become `target`.
        attributes: The attributes whose columns contain labels if there is no labels_column.
        text_columns: The columns of the documents' texts, which contain no labels.

    Returns:
        The row with `target`, without the names whose values have another type than labels.

    Raises:
        ValueError: A label is not a value of its attribute.
    """
    labels = {**row, "target": labels_of(row, labels_column, attributes, text_columns)}
    return {
        name: value for name, value in labels.items() if isinstance(value, _TYPES.get(name, object))
    }


def asked_attributes(run: str) -> AttributeNames:
    """Return the attributes that a run extracted, by category.

    Args:
        run: The folder of the run.
    """
    return attribute_names(_recorded_config(run).get("task") or {})


def free_texts(run: str) -> set[tuple[str, str]]:
    """Return the (category, attribute) pairs of a run whose values are free texts.

    Args:
        run: The folder of the run.
    """
    task = _recorded_config(run).get("task") or {}
    found = set()
    for category, names in attribute_names(task).items():
        for attribute in task["categories"][category]["attributes"]:
            if attribute.get("type", "text") in ("text", "pattern"):
                found.add((category, names[attribute["name"]]))
    return found


def shown_in_prompt(run: str) -> set[str]:
    """Return the ids of the documents that a run's prompts show with their labels.

    With `task.examples.nearest` there are none, because a document is never an example for itself.
    They are known only while the file of examples can be read, and only if its rows have ids.

    Args:
        run: The folder of the run.
    """
    config = _recorded_config(run)
    examples = (config.get("task") or {}).get("examples")
    if not examples or examples.get("nearest"):
        return set()
    source = config.get("input") or {}
    counts: Counter[str] = Counter()
    ids = set()
    try:
        for _, key, row in label_rows(examples["path"], source.get("id_column")):
            category = str(row.get(source.get("category_column") or ""))
            counts[category] += 1
            if counts[category] <= examples["count"]:
                ids.add(key)
    except InputError:
        return set()
    return ids


def seen_in_training(run: str, labels: Labels) -> set[str]:
    """Return the ids of the labelled documents that a run's model was trained or validated on.

    They are known only for a model that raypd trained, and only while its folder exists.

    Args:
        run: The folder of the run.
        labels: The labels by document id.

    Raises:
        ModelError: The file next to the model's weights cannot be read.
    """
    config = _recorded_config(run)
    source = config.get("input") or {}
    columns = source.get("text_columns") or []
    if source.get("html_columns"):
        # The labels contain markup, but the model was trained on the plain text.
        columns = []
    seen = set()
    for model in (config.get("model"), (config.get("cascade") or {}).get("model")):
        documents = trained_on_of(model or {})
        if documents.ids:
            seen |= documents.among(labels, columns)
    return seen


@dataclass(frozen=True)
class SeenDocuments:
    """The labelled documents that the model of a run has seen with their labels."""

    # Those in the prompt.
    shown: frozenset[str] = frozenset()
    # Those of the others that the model was trained or validated on.
    trained: frozenset[str] = frozenset()

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all of them."""
        return self.shown | self.trained


def seen_documents(run: str, labels: Labels) -> SeenDocuments:
    """Return the labelled documents that an evaluation of a run leaves out.

    Args:
        run: The folder of the run.
        labels: The labels by document id.

    Raises:
        ModelError: The file next to the model's weights cannot be read.
    """
    shown = frozenset(labels.keys() & shown_in_prompt(run))
    return SeenDocuments(shown, frozenset(seen_in_training(run, labels) - shown))


def attribute_names(task: Row) -> AttributeNames:
    """Return the attributes of a configuration's section `task`, by category."""
    names: AttributeNames = {}
    for category, schema in (task.get("categories") or {}).items():
        names[category] = {
            attribute["name"]: ".".join(attribute.get("path") or [attribute["name"]])
            for attribute in schema["attributes"]
        }
    return names


def _id_column(run: str, source: Row) -> str | None:
    """Return the column of ids in the labels of a run.

    A run inside the folder of a fit reads the fit's own files, whose ids are in `id`. The user's
    labels have the id column of the fit's input.

    Args:
        run: The folder of the run; "" if there is none.
        source: Section `input` of its configuration.
    """
    id_column = source.get("id_column")
    if not run or id_column != "id":
        return id_column
    folder = storage.absolute(run).rstrip("/")
    for _ in range(_LEVELS_OF_FIT):
        folder = folder.rpartition("/")[0]
        path = storage.join(folder, layout.FIT)
        if not folder or storage.is_remote(folder):
            # A fit is always local.
            break
        if storage.exists(path):
            try:
                fit = json.loads(storage.read(path))
                return fit.get("id_column") or id_column
            except (OSError, ValueError, AttributeError):
                break
    return id_column


def _recorded_config(run: str) -> Row:
    try:
        return load_record(storage.absolute(run)).config
    # The folder contains only units, so every label counts.
    except NoRun:
        return {}


def category_of(row: Row, labels: Row, names: AttributeNames) -> str:
    """Return the category of a document.

    Args:
        row: The row that answers the document; empty if the document failed.
        labels: The labels of the document.
        names: The attributes of the run by category.

    Returns:
        The category in the row. If it has none, the only category of the run, or the category in
        the labels if the run has several.
    """
    if row.get("category"):
        return str(row["category"])
    if len(names) == 1:
        return str(next(iter(names)))
    return str(labels.get("category") or "")


def read_answers(run: str) -> Answers:
    """Read the answers of a run.

    Args:
        run: The folder of the run.

    Raises:
        InputError: The folder contains no answers.
    """
    answers: Answers = {}
    for row in unit_rows.rows_of(run):
        _add(answers, row)
    if not answers:
        raise _no_answers(run)
    return answers


def answers_for(run: str, ids: Collection[str]) -> tuple[Answers, int]:
    """Read the answers of some documents of a run, without units that cannot contain them.

    Args:
        run: The folder of the run.
        ids: The ids of the documents.

    Returns:
        The answers of those documents that the run has, and the number of its other documents.

    Raises:
        InputError: The folder contains no answers.
    """
    rows, documents = unit_rows.with_ids(run, ids)
    if not documents:
        raise _no_answers(run)
    answers: Answers = {}
    positions = set()
    for row in rows:
        positions.add((row["source"], row["row"]))
        _add(answers, row)
    return answers, documents - len(positions)


def _add(answers: Answers, row: Row) -> None:
    """Add a row to the answers of its document; for a failed document, add only the id."""
    rows = answers.setdefault(row["id"], [])
    if row["status"] == "ok":
        rows.append(row)


def _no_answers(run: str) -> InputError:
    if storage.is_folder(run) or storage.exists(run):
        return InputError(f"{run}: holds no answers; give the output folder of a run")
    hint = similar_folder(run)
    return InputError("; ".join(filter(None, [f"{run}: no such folder", hint])))


def flat_values(tree: Row, prefix: str = "") -> Row:
    """Return the values of nested objects under names such as `a.b`."""
    flat: Row = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flat_values(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
