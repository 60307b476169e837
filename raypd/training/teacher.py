"""Labels that are not in the input: corrections in a file, or the answers of another run.

With the answers of a larger model this is distillation (HPD, section 4.4).
"""

import json
from collections.abc import Sequence
from typing import Any

from raypd.config import RunConfig
from raypd.dataset import LABEL_ENDINGS as ENDINGS, label_rows, rows_of
from raypd.errors import InputError
from raypd.run import by_document
from raypd.tasks import Document, label_columns

Row = dict[str, Any]
DocumentKey = tuple[str, int]  # the source of a document, and its row or offset in the source


def label_documents(documents: Sequence[Document], run: str, config: RunConfig) -> None:
    """Put labels into the documents' column of labels.

    A document without a usable label gets an error instead.

    Args:
        documents: The documents, which are changed in place.
        run: The folder of a run over the same input, or a file of labels by id, as `raypd review`
            or a spreadsheet writes it.
        config: The configuration, which names the columns.

    Raises:
        InputError: If the run has no answers, or the file has no labels.
    """
    if run.lower().endswith(ENDINGS):
        _label_by_id(documents, run, config)
        return
    rows = by_document(rows_of(run))
    if not rows:
        raise InputError(
            f"training.labels {run}: holds no answers; give the output folder of a run"
        )
    for document in documents:
        answers = rows.get((document.source, document.row))
        label = _label_of(answers) if answers else None
        if label is not None:
            document.fields[config.training.labels_column] = label
        elif document.error is None:
            reason = "an answer that failed, was cut or is not valid" if answers else "no answer"
            document.error = f"training.labels: {reason} in the run that labels"


def _label_by_id(documents: Sequence[Document], file: str, config: RunConfig) -> None:
    """Put the labels of a file into the documents that have the same ids."""
    columns = {config.training.labels_column, "scored", "accepted"}
    if config.task.kind == "extraction":
        columns |= {*label_columns(config.extraction.categories)}
    columns -= {*config.text_columns()}
    labels_by_id: dict[str, Row] = {}
    for number, key, row in label_rows(file, config.input.id_column):
        labels = {name: row[name] for name in columns & row.keys()}
        if labels_by_id.setdefault(key, labels) != labels:
            raise InputError(f"{file}:{number}: the id {key!r} has other labels above")
    if not any(labels_by_id.values()):
        raise InputError(
            f"labels {file}: no column {config.training.labels_column!r}, and none with the "
            "name of an attribute"
        )
    for document in documents:
        if document.id in labels_by_id:
            fields = {name: value for name, value in document.fields.items() if name not in columns}
            document.fields = fields | labels_by_id[document.id]
        elif document.error is None:
            document.error = "training.labels: no label in the file"


def _label_of(rows: Sequence[Row]) -> Any:
    """Return the label from a document's rows; None if one failed, was cut or is invalid."""
    if any(row["status"] != "ok" for row in rows):
        return None
    if "record" in rows[0]:
        values = rows[0]["values"]
        if any(value["status"] not in ("ok", "null") for value in values):
            return None
        nulls = dict.fromkeys(value["name"] for value in values)
        return {**nulls, **json.loads(rows[0]["record"])}
    turns = sorted((row for row in rows if row["sample"] == 0), key=lambda row: row["turn"])
    if any(row["finish_reason"] != "stop" for row in turns):
        return None
    return [row["text"] for row in turns]
