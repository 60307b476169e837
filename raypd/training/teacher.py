"""Labels from elsewhere: corrections, or answers of a larger model (distillation, HPD section 4.4)
or of the model.
"""

import json
from collections.abc import Sequence
from typing import Any

from raypd.config import RunConfig
from raypd.dataset.label_file import ENDINGS, label_rows
from raypd.dataset.writer import rows_of
from raypd.errors import InputError
from raypd.run.read import by_document
from raypd.tasks.base import Document
from raypd.tasks.labels import label_columns

Row = dict[str, Any]
Place = tuple[str, int]  # source and place in it, of a document


def label(documents: Sequence[Document], run: str, config: RunConfig) -> None:
    """Puts the answers of a run over the same input, or errors, into the column of labels.

    Raises InputError: it has none. run: its folder, or a file of labels by id, as `raypd review` or
    a spreadsheet writes it.
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
        answers = rows.get((document.source, document.place))
        answer = _answer(answers) if answers else None
        if answer is not None:
            document.fields[config.training.labels_column] = answer
        elif document.error is None:
            reason = "an answer that failed, was cut or is not valid" if answers else "no answer"
            document.error = f"training.labels: {reason} in the run that labels"


def _label_by_id(documents: Sequence[Document], file: str, config: RunConfig) -> None:
    named = label_columns(config.extraction.categories) if config.task.kind == "extraction" else []
    names = {config.training.labels_column, *named, "scored", "accepted"} - {*config.text_columns()}
    by_id: dict[str, Row] = {}
    for number, key, row in label_rows(file, config.input.id_column):
        labels = {name: row[name] for name in names & row.keys()}
        if by_id.setdefault(key, labels) != labels:
            raise InputError(f"{file}:{number}: the id {key!r} has other labels above")
    if not any(by_id.values()):
        raise InputError(
            f"labels {file}: no column {config.training.labels_column!r}, and none called as "
            "an attribute"
        )
    for document in documents:
        if document.id in by_id:
            others = {name: value for name, value in document.fields.items() if name not in names}
            document.fields = others | by_id[document.id]
        elif document.error is None:
            document.error = "training.labels: no label in the file"


def _answer(rows: Sequence[Row]) -> Any:
    """The label in a document's rows; None where one of them failed, was cut or is not valid."""
    if any(row["status"] != "ok" for row in rows):
        return None
    if "record" in rows[0]:
        if any(value["status"] not in ("ok", "null") for value in rows[0]["values"]):
            return None
        return {
            **dict.fromkeys(value["name"] for value in rows[0]["values"]),
            **json.loads(rows[0]["record"]),
        }
    turns = sorted((row for row in rows if row["sample"] == 0), key=lambda row: row["turn"])
    return (
        [row["text"] for row in turns]
        if all(row["finish_reason"] == "stop" for row in turns)
        else None
    )
