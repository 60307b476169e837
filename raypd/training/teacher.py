"""Labels from elsewhere: corrections, or answers of a larger model (distillation, HPD section 4.4) or of the model."""

import json
from collections.abc import Sequence
from typing import Any

from raypd import storage
from raypd.dataset.writer import rows_of
from raypd.errors import InputError
from raypd.run.read import by_document
from raypd.tasks.base import Document

Row = dict[str, Any]
Place = tuple[str, int]  # source and place in it, of a document


def label(documents: Sequence[Document], run: str, column: str) -> None:
    """Puts the answers of a run over the same input, or errors, into `column`. Raises InputError: it has none. run: its
    folder, or JSON lines of {id, column}, as `raypd review` writes them."""
    if run.endswith(".jsonl"):
        _label_by_id(documents, run, column)
        return
    rows = by_document(rows_of(run))
    if not rows:
        raise InputError(f"training.labels {run}: holds no answers; give the output folder of a run")
    for document in documents:
        answers = rows.get((document.source, document.place))
        answer = _answer(answers) if answers else None
        if answer is not None:
            document.fields[column] = answer
        elif document.error is None:
            reason = "an answer that failed, was cut or is not valid" if answers else "no answer"
            document.error = f"training.labels: {reason} in the run that labels"


def _label_by_id(documents: Sequence[Document], file: str, column: str) -> None:
    try:
        lines = [json.loads(line) for line in storage.read(storage.absolute(file)).splitlines() if line.strip()]
        by_id = {str(line["id"]): line[column] for line in lines}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"training.labels {file}: expected JSON lines of id and {column!r}: {error!r}") from None
    for document in documents:
        if document.id in by_id:
            document.fields[column] = by_id[document.id]
        elif document.error is None:
            document.error = "training.labels: no label in the file"


def _answer(rows: Sequence[Row]) -> Any:
    """The label in a document's rows; None where one of them failed, was cut or is not valid."""
    if any(row["status"] != "ok" for row in rows):
        return None
    if "record" in rows[0]:
        if any(value["status"] not in ("ok", "null") for value in rows[0]["values"]):
            return None
        return {**dict.fromkeys(value["name"] for value in rows[0]["values"]), **json.loads(rows[0]["record"])}
    turns = sorted((row for row in rows if row["sample"] == 0), key=lambda row: row["turn"])
    return [row["text"] for row in turns] if all(row["finish_reason"] == "stop" for row in turns) else None
