"""`raypd review RUN`: its least sure documents and some at random, to be corrected, as a page (one
file, no server) whose button saves a CSV, and as that CSV. `--apply` reads either back, and writes
documents with labels.
"""

import csv
import io
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypd import storage
from raypd.config import Category, ExtractionConfig, RunConfig
from raypd.dataset import delimited, planner, read_unit, writer
from raypd.errors import ConfigError, InputError, raised_as
from raypd.report import page
from raypd.report.texts import marked, text_in
from raypd.run.load import load_run
from raypd.run.read import by_document, spread
from raypd.tasks.base import Document
from raypd.tasks.columns import RowValue, record_of, record_row, row_values, value_row
from raypd.tasks.documents import input_fields
from raypd.tasks.labels import typed
from raypd.tasks.values import check
from raypd.text import is_formula

PAGE = "review.html"
TABLE = "review.csv"
LABELS = "labels.jsonl"
COLUMNS = ("source", "row", "id", "category", "attribute", "value", "correct", "confidence")
_UNITS = 100  # that are read, evenly spread
_SURE = 1.0  # of a document without confidences
_ROW_DIGITS = 19  # of the largest number of 64 bits
Place = tuple[str, int]  # source and place in it, of a document


@dataclass
class ReviewDocument:
    """A document to look at: its text in pieces, each with the attributes whose values stand there,
    and its values.
    """

    source: str
    row: int
    id: str
    category: str
    values: list[RowValue]
    pieces: list[tuple[str, str]]


def write(root: str, documents: int, overrides: Sequence[str] = ()) -> tuple[str, str]:
    """Writes page and CSV of so many documents into the run's folder; their paths.

    Raises ConfigError: no run of extraction, or nothing is answered; InputError: its input cannot
    be read.
    """
    config = _config(root, overrides)
    chosen = _chosen(root, documents)
    if not chosen:
        raise ConfigError(f"{root}: no document is answered yet")
    texts = documents_at(config, root, chosen)
    shown = []
    for place, row in chosen.items():
        values = [
            _decoded(value, config.extraction.categories[row["category"]])
            for value in row_values(row)
        ]
        text = text_in(texts[place], config) if place in texts else ""
        pieces = list(
            marked(text, [(value.span, value.name) for value in values if value.span is not None])
        )
        shown.append(
            ReviewDocument(*place, str(row["id"]), str(row.get("category") or ""), values, pieces)
        )
    where = storage.join(root, PAGE), storage.join(root, TABLE)
    name = root.rstrip("/").rpartition("/")[2]
    html = page.fill(
        "review.html.j2",
        documents=shown,
        name=name,
        root=root,
        columns=COLUMNS,
        script_of="review.js",
    )
    page.put(where[0], html.encode())
    page.put(where[1], _table(shown).encode("utf-8-sig"))  # spreadsheets know UTF-8 by its mark
    return where


def apply(
    root: str, file: str, output: str | None, overrides: Sequence[str] = ()
) -> tuple[str, int]:
    """Makes labels of a corrected CSV: (where they are, documents). output: None: into the run's
    folder. Raises ConfigError: no run of extraction; InputError, with the line: a bad value, an
    unknown id or attribute.
    """
    config = _config(root, overrides)
    categories = config.extraction.categories
    named: dict[Place, dict[str, Any]] = {}
    of_category: dict[Place, str] = {}
    first_lines: dict[tuple[Place, str], tuple[int, str]] = {}  # a value -> its line, its cell
    for line, row in _rows(file):
        place = (row["source"], int(row["row"]))
        category = row["category"]
        if category in categories:
            attributes = {a.name: a for a in categories[category].attributes}
        else:
            attributes = {}
        if row["attribute"] not in attributes:
            raise InputError(
                f"{file}:{line}: {row['attribute']!r} is no attribute of {category!r} in this run"
            )
        if of_category.setdefault(place, category) != category:
            raise InputError(
                f"{file}:{line}: {row['source']}, row {row['row']}, is of another category on an "
                "earlier line; delete one of these lines"
            )
        first_line, first_cell = first_lines.setdefault(
            (place, row["attribute"]), (line, row["correct"])
        )
        if row["correct"] != first_cell:
            raise InputError(
                f"{file}:{line}: {row['attribute']!r} of {row['source']}, row {row['row']}, is "
                f"{row['correct']!r} here and {first_cell!r} on line {first_line}; delete one of "
                "these lines"
            )
        with raised_as(InputError, f"{file}:{line}", ValueError):
            named.setdefault(place, {})[row["attribute"]] = typed(
                attributes[row["attribute"]], row["correct"]
            )
    documents = documents_at(config, root, named)
    if missing := named.keys() - documents.keys():
        raise InputError(
            f"{file}: the input does not have {sorted(missing)[0]} and {len(missing) - 1} "
            "other documents"
        )
    column = config.training.labels_column
    lines = []
    for place, values in named.items():
        kept = input_fields(documents[place], config)
        schema = categories[of_category[place]]
        looked_at = [
            a.model_copy(update={"omit_null": False}) for a in schema.attributes if a.name in values
        ]
        target = record_of(schema.model_copy(update={"attributes": looked_at}), values)
        labelled: dict[str, Any] = {"id": documents[place].id, **kept, column: target}
        lines.append(json.dumps(labelled, ensure_ascii=False, default=str) + "\n")
    where = storage.absolute(output) if output is not None else storage.join(root, LABELS)
    page.put(where, "".join(lines).encode())
    return where, len(lines)


def _config(root: str, overrides: Sequence[str]) -> RunConfig:
    config = load_run(root, list(overrides))
    if not isinstance(config.task, ExtractionConfig):
        raise ConfigError(f"{root}: only the values of an extraction can be reviewed")
    return config


def _chosen(root: str, documents: int) -> dict[Place, dict[str, Any]]:
    """A row by its place: half of them the least sure, half at random, of units that are evenly
    spread.
    """
    rows: dict[Place, dict[str, Any]] = {}
    for unit, path in spread(sorted(writer.objects(root)), _UNITS):
        for place, (row,) in by_document(
            writer.as_records(writer.read_table(root, unit, path=path)[1])
        ).items():
            if row["status"] == "ok":
                rows[place] = record_row(row)
    least = sorted(rows, key=lambda place: (_sureness(rows[place]), place))[: documents // 2]
    others = sorted(rows.keys() - set(least))
    drawn = random.Random(0).sample(others, min(documents - len(least), len(others)))
    return {place: rows[place] for place in [*least, *drawn]}


def _decoded(value: RowValue, category: Category) -> RowValue:
    """An unsure value, which the table has as null, as the model gave it: that is to be looked
    at.
    """
    if value.status != "unsure" or value.raw is None:
        return value
    attribute = next(attribute for attribute in category.attributes if attribute.name == value.name)
    return replace(
        value, value=value_row(value.name, check(attribute, value.raw).value, "ok", None)["value"]
    )


def _sureness(row: Mapping[str, Any]) -> float:
    return min((v.confidence for v in row_values(row) if v.confidence is not None), default=_SURE)


def documents_at(
    config: RunConfig, root: str, places: Mapping[Place, Any]
) -> dict[Place, Document]:
    """The documents of some places, read from the run's input again."""
    sources = {source for source, _ in places}
    documents: dict[Place, Document] = {}
    for unit in planner.plan(config, root):
        if sources & {part.name for part in unit.parts}:
            for document in read_unit(unit, config):
                if (place := (document.source, int(document.place))) in places:
                    documents[place] = document
    return documents


def _table(documents: Sequence[ReviewDocument]) -> str:
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(COLUMNS)
    for document in documents:
        for value in document.values:
            text = "" if value.value is None else value.value
            sure = "" if value.confidence is None else f"{value.confidence:.3f}"
            cells = [
                document.source,
                document.row,
                document.id,
                document.category,
                value.name,
                text,
                text,
                sure,
            ]
            rows.writerow([harmless(str(cell)) for cell in cells])
    return out.getvalue()


def harmless(cell: str) -> str:
    """Return a cell that a spreadsheet does not run, with a quote before it where it may be taken
    for a formula. A cell that begins with a quote gets another one, so that the first quote of a
    cell never belongs to its text.
    """
    if is_formula(cell) or cell[:1] in ("+", "-", "'"):
        return f"'{cell}"
    return cell


def _rows(file: str) -> list[tuple[int, dict[str, str]]]:
    """(line, cells) of a corrected CSV, as `harmless` had them. Raises InputError."""
    rows = []
    for (_, line, *_), row in delimited.table(file):
        if missing := set(COLUMNS[:7]) - row.keys():
            raise InputError(
                f"{file}:1: no column {', '.join(sorted(missing))}; give a file of `raypd review`"
            )
        if not row["row"].isdecimal() or len(row["row"]) > _ROW_DIGITS:
            raise InputError(f"{file}:{line}: not a line of `raypd review`: its row is no number")
        rows.append((line, {name: cell.removeprefix("'") for name, cell in row.items()}))
    if not rows:
        raise InputError(f"{file}: has no lines; give a file of `raypd review`")
    return rows
