"""`raypd review RUN`: let a person correct the least certain documents and some random ones.

They are written as a page (one file, no server), whose button saves a CSV, and as that CSV.
`--apply` reads the corrected CSV and writes documents with labels.
"""

import csv
import io
import json
import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any

import raypd.report.page as page
from raypd import storage
from raypd.config import Category, ExtractionConfig, RunConfig
from raypd.dataset import (
    AT_RANDOM,
    CHOSEN,
    LEAST_SURE,
    columns_of,
    delimited,
    label_rows,
    may_have,
    planner,
    read_unit,
    unit_rows,
    was_left_open,
    was_reviewed,
    writer,
)
from raypd.errors import ConfigError, InputError, raised_as
from raypd.report.texts import marked, text_in
from raypd.run import Unit, by_document, layout, load_record, load_run, spread
from raypd.schema import TYPES, Attribute
from raypd.tasks import (
    Document,
    RowValue,
    input_fields,
    labels as tasks_labels,
    record_of,
    record_row,
    row_values,
    value_row,
    values as tasks_values,
)
from raypd.text import counted, is_formula

PAGE = "review.html"
TABLE = "review.csv"
COLUMNS = (
    "source",
    "row",
    "id",
    "category",
    "attribute",
    "value",
    "correct",
    "confidence",
    "status",
    "raw",
    "reviewed",
    CHOSEN,
)
# What is said of an answer that is no value, by its status.
_ABOUT_UNREAD = {
    "ambiguous": "not clearly one number",
    "invalid": "not a value of this type",
    "truncated": "cut before its end",
    "unsure": "too uncertain",
}
# Words for null, of which the first is taken that is no value of the attribute.
_NULL_WORDS = ("null", "none", "n/a")
# Units that are read, evenly spread.
_UNITS = 100
_THREADS = 8
# Values of an enum that a list of choices shows.
_MOST_CHOICES = 500
# The confidence of a document without confidences.
_CERTAIN = 1.0
# Digits of the largest number of 64 bits.
_ROW_DIGITS = 19
# (source, row) of a document.
Position = tuple[str, int]


@dataclass
class ReviewBox:
    """How the page lets a person edit a value.

    Attributes:
        kind: choice (of some values), list (item by item) or text.
        choices: The values of a choice.
        items: The items of a list.
        pattern: The regular expression of its texts, as browsers have it; "" for any text.
        form: How its texts are written.
        about_unread: Why the answer is no value, if it is neither a value nor null; "" otherwise.
        null_word: What the CSV has where a person says that the document does not say.
    """

    kind: str
    choices: list[str] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    pattern: str = ""
    form: str = ""
    about_unread: str = ""
    null_word: str = ""


@dataclass
class ReviewDocument:
    """A document to review, with its values.

    Attributes:
        pieces: Its text in pieces, each with the names of the attributes whose values are there.
        boxes: How each attribute is edited, by its name.
        chosen: Why it was chosen: AT_RANDOM or LEAST_SURE.
    """

    source: str
    row: int
    id: str
    category: str
    values: list[RowValue]
    pieces: list[tuple[str, str]]
    boxes: dict[str, ReviewBox]
    chosen: str


def write(root: str, documents: int, overrides: Sequence[str] = ()) -> tuple[str, str, int]:
    """Write page and CSV into the run's folder, without documents that have labels there.

    Args:
        root: The folder of the run.
        documents: How many documents to choose.
        overrides: Keys of the configuration that have changed, as key=value.

    Returns:
        The paths of page and CSV, and the number of labelled documents that were left out.

    Raises:
        ConfigError: If the run is not an extraction, if nothing is answered yet, if all that is
            answered has labels, or if the CSV holds corrections that would be lost.
        InputError: If its input cannot be read.
    """
    config = _config(root, overrides)
    table_path = storage.join(root, TABLE)
    _check_no_corrections(table_path, root, config)
    labelled = _labels_in_folder(root)
    rows, left_out, at_random = _chosen_rows(root, documents, labelled.keys())
    if left_out and not rows:
        raise ConfigError(
            f"{root}: all {left_out:,} answered documents already have labels, in "
            f"{storage.join(root, layout.LABELS)}"
        )
    if not rows:
        raise ConfigError(f"{root}: no document is answered yet")
    texts = documents_at(config, root, rows)
    shown = [
        _review_document(
            position,
            row,
            texts.get(position),
            AT_RANDOM if position in at_random else LEAST_SURE,
            config,
        )
        for position, row in rows.items()
    ]
    html = page.fill(
        "review.html.j2",
        documents=shown,
        categories=page.named_categories(document.category for document in shown),
        position=page.position_of(config.input.model_dump(include={"format", "reader"})),
        name=root.rstrip("/").rpartition("/")[2],
        root=root,
        left_out=left_out,
        run=_name_of_run(root),
        columns=COLUMNS,
        script_of="review.js",
    )
    page_path = storage.join(root, PAGE)
    page.put(page_path, html.encode())
    # Spreadsheets recognise UTF-8 by its byte order mark.
    page.put(table_path, _table(shown).encode("utf-8-sig"))
    return page_path, table_path, left_out


def _name_of_run(root: str) -> str:
    """Return what tells a run from all others, also from an earlier one in its folder."""
    record = load_record(root)
    return f"{root} {record.fingerprint} {record.created}"


def _labels_in_folder(root: str) -> dict[str, dict[str, Any]]:
    """Return the rows of the run's file of labels by document id."""
    path = storage.join(root, layout.LABELS)
    if not storage.exists(path):
        return {}
    return {key: row for _, key, row in label_rows(path, None)}


def _check_no_corrections(path: str, root: str, config: RunConfig) -> None:
    """Refuse to replace a CSV with corrections that are not in the run's labels."""
    if not storage.exists(path):
        return
    lines = _rows(path, root, config)
    reviewed = {_position(cells): cells["id"] for _, cells in lines if was_reviewed(cells)}
    if reviewed and not _are_applied(reviewed, lines, path, root, config):
        raise ConfigError(
            f"{path}: holds the review of {counted(len(reviewed), 'document')}, which a new file "
            f"would replace. Run `raypd review {root} --apply {path}` to turn it into labels, then "
            "move or delete the file"
        )


def _are_applied(
    reviewed: Mapping[Position, str],
    lines: Sequence[tuple[int, dict[str, str]]],
    path: str,
    root: str,
    config: RunConfig,
) -> bool:
    """Return whether the run's labels hold the corrections of all reviewed documents of a CSV."""
    labels = _Labels(path, config.extraction.categories)
    try:
        for line, cells in lines:
            if _position(cells) in reviewed:
                labels.add(line, cells)
    except InputError:
        return False
    known = _labels_in_folder(root)
    for position, values in labels.values.items():
        label = known.get(reviewed[position], {}).get(config.training.labels_column)
        if label != labels.record(position, values):
            return False
    return True


def _review_document(
    position: Position,
    row: dict[str, Any],
    document: Document | None,
    chosen: str,
    config: RunConfig,
) -> ReviewDocument:
    """Prepare a document for review; without its text if the input does not have it any more."""
    source, row_number = position
    category = config.extraction.categories[row["category"]]
    values = [_to_review(value, category) for value in row_values(row)]
    text = ""
    if document is not None:
        text = text_in(document, config)
    spans = [(value.span, value.name) for value in values if value.span is not None]
    return ReviewDocument(
        source,
        row_number,
        str(row["id"]),
        str(row.get("category") or ""),
        values,
        list(marked(text, spans)),
        {value.name: _box(value, category) for value in values},
        chosen,
    )


def _box(value: RowValue, category: Category) -> ReviewBox:
    """Return how a value is edited."""
    attribute = next(attribute for attribute in category.attributes if attribute.name == value.name)
    box = _empty_box(value, attribute)
    if value.value is None and value.status in _ABOUT_UNREAD:
        box.about_unread = _ABOUT_UNREAD[value.status]
        box.null_word = next(word for word in (*_NULL_WORDS, "") if _is_same(attribute, word, None))
    return box


def _empty_box(value: RowValue, attribute: Attribute) -> ReviewBox:
    """Return how a value of an attribute is edited, whether it could be read or not."""
    if attribute.many and attribute.type != "rows":
        items = []
        for item in json.loads(value.value or "[]"):
            text = item
            if not isinstance(item, str):
                text = json.dumps(item, ensure_ascii=False)
            items.append(text)
        return ReviewBox(
            "list", items=items, pattern=_pattern(attribute), form=TYPES[attribute.type].example
        )
    if attribute.many:
        return ReviewBox("text")
    if attribute.type == "boolean":
        return ReviewBox("choice", choices=["true", "false"])
    if attribute.type == "enum" and len(attribute.values) <= _MOST_CHOICES:
        return ReviewBox("choice", choices=list(attribute.values))
    return ReviewBox("text", pattern=_pattern(attribute), form=TYPES[attribute.type].example)


def _pattern(attribute: Attribute) -> str:
    """Return the regular expression of one value's label, as browsers have it."""
    value_type = TYPES[attribute.type](attribute)
    # In a class of characters, browsers want a sign to be escaped. Their \d has ASCII digits alone.
    return value_type.label_pattern().replace("[+-]", r"[+\-]").replace(r"\d", r"\p{Nd}")


def apply(
    root: str, file: str, output: str | None, overrides: Sequence[str] = ()
) -> tuple[str, int, int, int]:
    """Turn a corrected CSV into labels.

    The labels of other documents in the run's file of labels are kept.

    Args:
        root: The folder of the run.
        file: The CSV.
        output: The file to write; None for a file in the run's folder.
        overrides: Keys of the configuration that have changed, as key=value.

    Returns:
        The path of the labels, the number of documents in the file, how many of them the CSV has,
        and the number of values that the CSV changes.

    Raises:
        ConfigError: If the run is not an extraction.
        InputError: If a line has a wrong value, or an unknown id or attribute.
    """
    config = _config(root, overrides)
    labels = _Labels(file, config.extraction.categories)
    lines_of_file = _rows(file, root, config)
    reviewed = {_position(cells) for _, cells in lines_of_file if was_reviewed(cells)}
    if not reviewed:
        raise InputError(f"{file}: no document is marked as reviewed. {_how_to_review(file)}")
    changed = set()
    chosen: dict[Position, str] = {}
    for line, cells in lines_of_file:
        if _position(cells) not in reviewed:
            continue
        labels.add(line, cells)
        if cells["correct"] != cells["value"]:
            changed.add((_position(cells), cells["attribute"]))
        if cells.get(CHOSEN):
            chosen[_position(cells)] = cells[CHOSEN]
    if not labels.values:
        raise InputError(
            f"{file}: no reviewed document has a label, because none of their answers is a value "
            "and none was corrected. Write the value into `correct`, or `null` if the document "
            "does not state it"
        )
    documents = documents_at(config, root, labels.values)
    missing = sorted(labels.values.keys() - documents.keys())
    if missing:
        raise InputError(
            f"{file}: the input does not have {missing[0]} and {len(missing) - 1} other documents"
        )
    lines = []
    path = storage.join(root, layout.LABELS)
    if output is not None:
        path = storage.absolute(output)
    elif storage.exists(path):
        new_ids = {str(documents[position].id) for position in labels.values}
        for _, document_id, row in label_rows(path, None):
            if document_id not in new_ids:
                lines.append(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    for position, values in labels.values.items():
        document = documents[position]
        labelled: dict[str, Any] = {
            "id": document.id,
            **input_fields(document, config.task, config.input),
            config.training.labels_column: labels.record(position, values),
        }
        if position in chosen:
            labelled[CHOSEN] = chosen[position]
        lines.append(json.dumps(labelled, ensure_ascii=False, default=str) + "\n")
    page.put(path, "".join(lines).encode())
    return path, len(lines), len(labels.values), len(changed)


def _how_to_review(file: str) -> str:
    """Return what marks a document of a file as reviewed."""
    if "attribute" in columns_of(file):
        return "Put an x into the column `reviewed` of a document's lines, or change `correct`"
    return (
        "Correct a value of a document in its column, or add a column `reviewed` and put an x into "
        "the lines that are right as they are"
    )


class _Labels:
    """The values of a corrected CSV, by document.

    Args:
        file: The CSV, for error messages.
        categories: The categories of the run.
    """

    def __init__(self, file: str, categories: Mapping[str, Category]) -> None:
        self.values: dict[Position, dict[str, Any]] = {}
        self._file = file
        self._categories = categories
        self._category_of: dict[Position, str] = {}
        # (position, attribute) -> the first line with its value, and the cell.
        self._first_lines: dict[tuple[Position, str], tuple[int, str]] = {}

    def add(self, line: int, cells: Mapping[str, str]) -> None:
        """Add the value of a line, unless the review left it open.

        Raises:
            InputError: If the line has a wrong value or an unknown attribute, or contradicts an
                earlier line.
        """
        position = _position(cells)
        category = cells["category"]
        name = cells["attribute"]
        value = cells["correct"]
        attribute = self._attribute(category, name)
        if attribute is None:
            raise InputError(
                f"{self._file}:{line}: {name!r} is not an attribute of {category!r} in this run"
            )
        document = f"{cells['source']}, row {cells['row']}"
        if self._category_of.setdefault(position, category) != category:
            raise InputError(
                f"{self._file}:{line}: {document}, is of another category on an earlier line; "
                "delete one of these lines"
            )
        first_line, first_value = self._first_lines.setdefault((position, name), (line, value))
        if value != first_value:
            raise InputError(
                f"{self._file}:{line}: {name!r} of {document}, is {value!r} here and "
                f"{first_value!r} on line {first_line}; delete one of these lines"
            )
        if was_left_open(cells):
            return
        with raised_as(InputError, f"{self._file}:{line}", ValueError):
            self.values.setdefault(position, {})[name] = tasks_labels.typed(attribute, value)

    def record(self, position: Position, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of a document; its null values are kept."""
        category = self._categories[self._category_of[position]]
        attributes = []
        for attribute in category.attributes:
            if attribute.name in values:
                attributes.append(attribute.model_copy(update={"omit_null": False}))
        return record_of(category.model_copy(update={"attributes": attributes}), values)

    def _attribute(self, category: str, name: str) -> Attribute | None:
        if category not in self._categories:
            return None
        for attribute in self._categories[category].attributes:
            if attribute.name == name:
                return attribute
        return None


def _config(root: str, overrides: Sequence[str]) -> RunConfig:
    """Load the configuration of a run, which must be an extraction."""
    config = load_run(root, list(overrides))
    if not isinstance(config.task, ExtractionConfig):
        raise ConfigError(f"{root}: only the values of an extraction can be reviewed")
    return config


def _chosen_rows(
    root: str, documents: int, labelled: Collection[str] = ()
) -> tuple[dict[Position, dict[str, Any]], int, set[Position]]:
    """Choose rows of evenly spread units: half of them at random, half the least certain.

    The random ones are drawn from all, so that they stand for all. The least certain ones are those
    of the others. The two halves alternate, so that somebody who reviews the first documents alone
    has both.

    Args:
        root: The folder of the run.
        documents: How many rows to choose.
        labelled: The ids of documents that are left out.

    Returns:
        The rows, the number of documents of these units that were left out, and the positions of
        the rows that were drawn at random.
    """
    rows: dict[Position, dict[str, Any]] = {}
    left_out = 0
    objects = spread(sorted(writer.objects(root)), _UNITS)
    for table in unit_rows.of_paths(path for _, path in objects):
        for position, (row,) in by_document(writer.as_records(table)).items():
            if row["status"] != "ok":
                continue
            if row["id"] in labelled:
                left_out += 1
                continue
            rows[position] = record_row(row)
    count = min(documents, len(rows))
    drawn = random.Random(0).sample(sorted(rows), count - count // 2)
    others = rows.keys() - set(drawn)
    by_confidence = sorted(others, key=lambda position: (_confidence(rows[position]), position))
    pairs = zip_longest(drawn, by_confidence[: count // 2])
    positions = [position for position in chain(*pairs) if position is not None]
    return {position: rows[position] for position in positions}, left_out, set(drawn)


def _to_review(value: RowValue, category: Category) -> RowValue:
    """Return a value as a person reviews it.

    An uncertain value, which is null in the table, is shown as the model gave it. If it is no value
    even so, its status says why. A cut text is not offered as a value, because nobody would notice
    that a part of it became the label.
    """
    if value.status == "truncated" and value.value is not None:
        return replace(value, value=None, raw=value.value)
    if value.status != "unsure" or value.raw is None:
        return value
    attribute = next(attribute for attribute in category.attributes if attribute.name == value.name)
    checked = tasks_values.check(attribute, value.raw)
    if checked.value is None:
        return replace(value, status=checked.status)
    return replace(value, value=value_row(value.name, checked.value, "ok", None)["value"])


def _confidence(row: Mapping[str, Any]) -> float:
    """Return the confidence of a row's least certain value."""
    confidences = [value.confidence for value in row_values(row) if value.confidence is not None]
    return min(confidences, default=_CERTAIN)


def documents_at(
    config: RunConfig, root: str, positions: Mapping[Position, Any]
) -> dict[Position, Document]:
    """Read documents from the run's input again.

    Args:
        config: The configuration of the run.
        root: The folder of the run.
        positions: The (source, row) of the documents, as keys.
    """
    rows_by_source: defaultdict[str, list[int]] = defaultdict(list)
    for source, row in positions:
        rows_by_source[source].append(row)

    def has_any(unit: Unit) -> bool:
        for source in {part.name for part in unit.parts} & rows_by_source.keys():
            if any(may_have(unit, source, row) for row in rows_by_source[source]):
                return True
        return False

    def read(unit: Unit) -> list[Document]:
        return read_unit(unit, config)

    documents: dict[Position, Document] = {}
    units = (unit for unit in planner.plan(config, root) if has_any(unit))
    for unit_documents in storage.in_threads(read, units, _THREADS):
        for document in unit_documents:
            position = (document.source, int(document.row))
            if position in positions:
                documents[position] = document
    return documents


def _table(documents: Sequence[ReviewDocument]) -> str:
    """Return documents as CSV, one line per value."""
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(COLUMNS)
    for document in documents:
        for value in document.values:
            text = ""
            if value.value is not None:
                text = value.value
            confidence = ""
            if value.confidence is not None:
                confidence = f"{value.confidence:.3f}"
            cells = [
                document.source,
                document.row,
                document.id,
                document.category,
                value.name,
                text,
                text,
                confidence,
                value.status,
                (value.raw or "").strip(),
                "",
                document.chosen,
            ]
            rows.writerow([harmless(str(cell)) for cell in cells])
    return out.getvalue()


def harmless(cell: str) -> str:
    """Return a cell that a spreadsheet does not run as a formula.

    A cell that may be taken for a formula gets a quote before it. So does a cell that begins with a
    quote, so that the first quote of a cell never belongs to its text.
    """
    if is_formula(cell) or cell[:1] in ("+", "-", "'"):
        return f"'{cell}"
    return cell


def _position(cells: Mapping[str, str]) -> Position:
    return cells["source"], int(cells["row"])


def _rows(file: str, root: str, config: RunConfig) -> list[tuple[int, dict[str, str]]]:
    """Read a corrected CSV of `raypd review` or `raypd export`.

    Args:
        file: The CSV.
        root: The folder of the run.
        config: The configuration of the run.

    Returns:
        (line, cells) of each value, with the columns of `raypd review`.

    Raises:
        InputError: If the file is neither.
    """
    # If there is no such file, the error names one that is nearly called so.
    next(storage.find(file))
    rows = []
    for (_, line, *_), row in delimited.table(file):
        if "attribute" not in row and {"source", "row", "status"} <= row.keys():
            return _exported_rows(file, root, config)
        missing = set(COLUMNS[:7]) - row.keys()
        if missing:
            raise InputError(
                f"{file}:1: no column {', '.join(sorted(missing))}; give a file of `raypd review`"
            )
        if not row["row"].isdecimal() or len(row["row"]) > _ROW_DIGITS:
            raise InputError(
                f"{file}:{line}: not a line of `raypd review`: its row is not a number"
            )
        rows.append((line, {name: cell.removeprefix("'") for name, cell in row.items()}))
    if not rows:
        raise InputError(f"{file}: has no lines; give a file of `raypd review`")
    return rows


def _exported_rows(file: str, root: str, config: RunConfig) -> list[tuple[int, dict[str, str]]]:
    """Read a corrected CSV of `raypd export` as the lines of `raypd review`.

    A document counts as reviewed if it is marked in a column `reviewed`, or if a value differs from
    the answer of the run.
    """
    table = list(label_rows(file, None))
    answers: dict[Position, dict[str, Any]] = {}
    positions = {_exported_position(file, line, row) for line, _, row in table}
    for answer in unit_rows.rows_of(root):
        position = (answer["source"], int(answer["row"]))
        if position in positions and answer["status"] == "ok":
            values = {value["name"]: value for value in answer["values"]}
            answers[position] = {"category": answer["category"], "values": values}
    rows = []
    for line, _, row in table:
        position = _exported_position(file, line, row)
        if position not in answers:
            raise InputError(
                f"{file}:{line}: the run has no answer for {position[0]}, row {position[1]}"
            )
        values = answers[position]["values"]
        category = config.extraction.categories[answers[position]["category"]]
        with raised_as(InputError, f"{file}:{line}", ValueError):
            labels = tasks_labels.labels_of(row, "", category.attributes, ()) or {}
        for attribute in category.attributes:
            name = ".".join(attribute.key_path)
            if name not in labels:
                continue
            answer_value = values.get(attribute.name) or {}
            answer_text = answer_value.get("value") or ""
            correct = value_row(name, labels[name], "ok", None)["value"] or ""
            if _is_same(attribute, answer_text, labels[name]):
                # An export writes 58000 as 58000.0.
                correct = answer_text
            if not correct and isinstance(row.get(name), str):
                # A person may write `null`, unlike an export.
                correct = row[name].strip()
            cells = {
                "source": position[0],
                "row": str(position[1]),
                "id": str(row["id"]),
                "category": str(answers[position]["category"]),
                "attribute": attribute.name,
                "value": answer_text,
                "correct": correct,
                "status": str(answer_value.get("status") or ""),
                "reviewed": str(row.get("reviewed") or ""),
            }
            rows.append((line, cells))
    return rows


def _is_same(attribute: Attribute, text: str, label: Any) -> bool:
    """Return whether the text of an answer is the value of a label."""
    try:
        value: Any = tasks_labels.typed(attribute, text)
    except ValueError:
        return False
    return bool(value == label)


def _exported_position(file: str, line: int, row: Mapping[str, Any]) -> Position:
    """Return the position of a row of `raypd export`."""
    number = str(row["row"])
    if not number.isdecimal() or len(number) > _ROW_DIGITS:
        raise InputError(f"{file}:{line}: not a line of `raypd export`: its row is not a number")
    return str(row["source"]), int(number)
