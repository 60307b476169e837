"""The columns of the output table, for every kind of task.

Every table begins with raypd's own columns (`OWN`), followed by those of the task. `SHAPES`
describes them for each kind of task, and says which of them contain the answer. With
`output.columns: typed`, an extraction has a column of the appropriate type for each attribute
instead of `record` and `values`, as well as columns of details.

The writer, verification, export, the report and nightly tables take the columns from here.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypd.config import DETAILS, OWN_COLUMNS, ExtractionConfig, RunConfig
from raypd.schema import Attribute
from raypd.tasks.base import Document, Record
from raypd.tasks.record import Row, put_value, value_at

OWN = pa.schema(
    [
        pa.field(name, pa.type_for_alias(column.arrow_type), nullable=column.nullable)
        for name, column in OWN_COLUMNS.items()
    ]
)


def own_columns(document: Document, record: Record, attempts: int) -> Row:
    """Return the values of raypd's own columns in the row of an answer.

    Args:
        document: The document.
        record: Its answer, or the reason why there is none.
        attempts: The number of attempts at the unit, including this one.
    """
    return {
        "id": document.id,
        "status": "ok" if record.error is None else "error",
        "error": record.error,
        "source": document.source,
        "row": document.row,
        "attempts": attempts,
    }


# The fields of an item of the column `values`.
_VALUE_FIELDS = [
    ("name", pa.string()),
    # The value as text, whatever its type, or null.
    ("value", pa.string()),
    ("number", pa.float64()),
    ("boolean", pa.bool_()),
    # The probability of a choice, or the mean of the tokens' probabilities (docs/values.md).
    ("confidence", pa.float32()),
    # ok, null, truncated (at K_max), invalid, ambiguous (more than one number) or unsure.
    ("status", pa.string()),
    # The decoded text, if it is not a value.
    ("raw", pa.string()),
    # The position of the value in the document's text: characters [begin, end), or null. `page`
    # counts from 1, with form feeds as the ends of pages, as in the text of a PDF.
    ("span", pa.struct([("begin", pa.int32()), ("end", pa.int32()), ("page", pa.int32())])),
    # Whether the text at the span equals the value exactly, including case and white space.
    ("span_exact", pa.bool_()),
    # The window of a long document that the value was found in, from 0 (task.long_documents).
    ("window", pa.int32()),
]
# The box of a value on the page of a scanned document (input.ocr): left, top, right and bottom, as
# fractions of the page's width and height from its upper left corner.
_BOX = pa.field("box", pa.list_(pa.float32()))
# The model of a cascade that decoded the value: first or second.
_MODEL = pa.field("model", pa.string())
VALUE = pa.struct(_VALUE_FIELDS)
EXTRACTION = pa.schema(
    [
        ("category", pa.string()),
        # The values as a JSON object.
        ("record", pa.string()),
        ("values", pa.list_(VALUE)),
        # Whether the document was cut to fit the context.
        ("truncated", pa.bool_()),
    ]
)
QUESTION_ANSWERING = pa.schema(
    [
        # The question's own id, or its number in the row, from 0.
        ("question_id", pa.string()),
        ("question", pa.string()),
        # A text, the text of a choice, or null if the context does not contain the answer.
        ("answer", pa.string()),
        # The number of the answer among the choices, from 0; null for free answers.
        ("choice_index", pa.int32()),
        # The probability of a choice, or the mean of the tokens' probabilities.
        ("confidence", pa.float32()),
        # ok, null, truncated (at max_answer_tokens) or invalid (empty).
        ("answer_status", pa.string()),
        # Whether the context was cut to fit that of the model.
        ("truncated", pa.bool_()),
    ]
)
GENERATION = pa.schema(
    [
        # The number of the answer among `task.samples`.
        ("sample", pa.int32()),
        # The turn of a conversation.
        ("turn", pa.int32()),
        ("text", pa.string()),
        # It is stop if all threads of the text reached their ends, and otherwise length.
        ("finish_reason", pa.string()),
        ("tokens", pa.int32()),
        # The geometric mean of the tokens' probabilities.
        ("confidence", pa.float32()),
        # The text including the markup that the method writes.
        ("raw", pa.string()),
        # prompt_tokens and the method's own counters, as a JSON object.
        ("counters", pa.string()),
        ("warnings", pa.list_(pa.string())),
    ]
)
# The status of a generated text by its finish_reason.
_STATUSES = {"stop": "ok", "length": "truncated"}


@dataclass
class RowValue:
    """An answer in a row, whatever the task.

    Attributes:
        key: Distinguishes the answer from the others of its document.
        name: The attribute or question; "" if the document itself asks.
        value: The answer as text, or None.
        status: Its status, as in the column `values`.
        confidence: Its confidence, if it has one.
        raw: The decoded text, if it is not a value.
        span: The characters [begin, end) of the document's text.
    """

    key: str
    name: str
    value: str | None
    status: str
    confidence: float | None = None
    raw: str | None = None
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class RowShape:
    """The columns of a kind of task, and what they mean.

    Attributes:
        schema: The columns.
        answer: The column of the answer.
        status: The column of the answer's status; None: an answer that is not null is ok.
        name: The column with the attribute or question; None: the document itself asks.
        parts: Columns that distinguish the rows of a document.
        repeats: Whether several rows of a document may have the same parts, such as a question that
            is asked twice.
        many: Whether the answer is a list of VALUE.
    """

    schema: pa.Schema
    answer: str
    status: str | None = None
    name: str | None = None
    parts: tuple[str, ...] = ()
    repeats: bool = False
    many: bool = False

    def values(self, row: Mapping[str, Any]) -> list[RowValue]:
        """Return the answers of a row; an error row has none."""
        if row.get("status", "ok") != "ok":
            return []
        if self.many:
            return [_value_of_item(item) for item in row[self.answer] or []]
        value = row[self.answer]
        if self.status:
            status = row[self.status]
        else:
            status = "null" if value is None else "ok"
        name = str(row[self.name]) if self.name else ""
        return [
            RowValue(
                self._key(row), name, value, _STATUSES.get(status, status), row.get("confidence")
            )
        ]

    def _key(self, row: Mapping[str, Any]) -> str:
        if len(self.parts) == 1:
            return str(row[self.parts[0]])
        return ", ".join(f"{part} {row[part]}" for part in self.parts)

    def has_columns(self, names: Collection[str]) -> bool:
        """Return whether rows with these columns may have this shape."""
        needed = {self.answer, *self.parts}
        if self.status:
            needed.add(self.status)
        if self.name:
            needed.add(self.name)
        return needed.issubset(names)


def _value_of_item(item: Mapping[str, Any]) -> RowValue:
    """Turn an item of the column `values` into an answer."""
    span = item.get("span")
    return RowValue(
        key=item["name"],
        name=item["name"],
        value=item["value"],
        status=item["status"],
        confidence=item.get("confidence"),
        raw=item.get("raw"),
        span=(span["begin"], span["end"]) if span else None,
    )


SHAPES = {
    "extraction": RowShape(EXTRACTION, "values", many=True),
    "question_answering": RowShape(
        QUESTION_ANSWERING,
        "answer",
        status="answer_status",
        name="question",
        parts=("question_id",),
        repeats=True,
    ),
    "generation": RowShape(GENERATION, "text", status="finish_reason", parts=("turn", "sample")),
}


def shape_of(names: Collection[str]) -> RowShape | None:
    """Return the shape of rows with these columns; None for typed columns (see `record_row`)."""
    for shape in SHAPES.values():
        if shape.has_columns(names):
            return shape
    return None


def parts_of(table: pa.Table) -> Any:
    """Return what distinguishes the rows of a document, for each row of a table.

    If two rows of a document have the same part, one of them is a duplicate.
    """
    shape = shape_of(table.column_names)
    if shape is not None and shape.repeats:
        return [str(number) for number in range(len(table))]
    if shape is None or not shape.parts:
        return [""] * len(table)
    columns = [table[name].cast("string") for name in shape.parts]
    return pc.binary_join_element_wise(*columns, "/", null_handling="replace")


def row_values(row: Mapping[str, Any]) -> list[RowValue]:
    """Return the answers of a row of any task; an error row has none."""
    shape = shape_of(row.keys())
    if shape is None:
        return []
    return shape.values(row)


def value_row(
    name: str, value: Any, status: str, confidence: float | None, raw: str | None = None
) -> Row:
    """Return an item of the column `values`.

    Args:
        name: The attribute's name.
        value: The value, of a JSON type.
        status: Its status.
        confidence: Its confidence, if it has one.
        raw: The decoded text.
    """
    text = value
    if value is not None and not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    boolean = value if isinstance(value, bool) else None
    is_number = isinstance(value, (int, float)) and boolean is None
    has_raw = value is None and status != "null"
    return {
        "name": name,
        "value": text,
        "number": float(value) if is_number else None,
        "boolean": boolean,
        "confidence": confidence,
        "status": status,
        "raw": raw if has_raw else None,
    }


# ------------------------------------------------------------------------
# Typed columns. The details of an attribute are in columns named attribute__detail.

_DETAIL_TYPES = {
    "confidence": pa.float32(),
    "status": pa.string(),
    "span": pa.struct(
        [("begin", pa.int32()), ("end", pa.int32()), ("page", pa.int32()), ("exact", pa.bool_())]
    ),
    "window": pa.int32(),
    "model": pa.string(),
}
assert _DETAIL_TYPES.keys() == set(DETAILS)


def detail_column(name: str, detail: str) -> str:
    """Return the name of the column with a detail of an attribute's value."""
    return f"{name}__{detail}"


def is_detail(column: str, *details: str) -> bool:
    """Return whether a column has one of some details of an attribute's value."""
    return column.endswith(tuple(detail_column("", detail) for detail in details))


def _details(attribute: Attribute, config: RunConfig) -> dict[str, pa.DataType]:
    """Return the types of the details that a run's table has about an attribute."""
    names = ["confidence", "status"]
    if attribute.value_type.has_span:
        names.append("span")
    if config.extraction.long_documents == "split":
        names.append("window")
    if config.cascade.model is not None:
        names.append("model")
    types = {name: _DETAIL_TYPES[name] for name in names}
    if "span" in types and _has_box(config):
        types["span"] = _with_box(types["span"])
    return types


def columns_of(config: RunConfig) -> pa.Schema:
    """Return the task's columns of a run's table.

    Times are stored as text, which Spark and Athena can read and which keeps their offsets.
    """
    if _is_typed(config):
        return _typed_columns(config)
    schema = SHAPES[config.task.kind].schema
    has_box = _has_box(config)
    if config.cascade.model is None and not has_box:
        return schema
    fields = list(VALUE)
    if has_box:
        span = VALUE.get_field_index("span")
        fields[span] = pa.field("span", _with_box(VALUE.field(span).type))
    if config.cascade.model is not None:
        fields.append(_MODEL)
    values = pa.field("values", pa.list_(pa.struct(fields)))
    return schema.set(schema.get_field_index("values"), values)


def _has_box(config: RunConfig) -> bool:
    """Return whether the spans of a run's table have boxes."""
    return isinstance(config.task, ExtractionConfig) and config.input.ocr != "none"


def _with_box(span: pa.StructType) -> pa.StructType:
    return pa.struct([*span, _BOX])


def _is_typed(config: RunConfig) -> bool:
    return isinstance(config.task, ExtractionConfig) and config.output.columns == "typed"


def _typed_columns(config: RunConfig) -> pa.Schema:
    # The types by column; the types of a nested object are a mapping by name.
    types: Row = {}
    for category in config.extraction.categories.values():
        for attribute in category.attributes:
            head, *inner = attribute.key_path
            put_value(types, attribute.key_path, attribute.value_type.arrow_type())
            for detail, arrow_type in _details(attribute, config).items():
                put_value(types, [detail_column(head, detail), *inner], arrow_type)
    return pa.schema([("category", pa.string()), *_fields(types), ("truncated", pa.bool_())])


def _fields(types: Row) -> list[pa.Field]:
    """Return the fields of a schema or struct; mappings become structs."""
    fields = []
    for name, arrow_type in types.items():
        if isinstance(arrow_type, dict):
            arrow_type = pa.struct(_fields(arrow_type))
        fields.append(pa.field(name, arrow_type))
    return fields


def rows_of(records: Sequence[Record], config: RunConfig) -> Sequence[Record]:
    """Return a task's records with the columns of the run's table (`columns_of`).

    An extraction's answers have `record` as nested objects. The table has it as the text of a JSON
    object, or has a typed column for each attribute instead.
    """
    if not isinstance(config.task, ExtractionConfig):
        return records
    return [replace(record, columns=_table_columns(record.columns, config)) for record in records]


def _table_columns(columns: Row, config: RunConfig) -> Row:
    """Return the columns of an extraction's answer in the form of the run's table."""
    # An error row has no record.
    if "record" not in columns:
        return columns
    if _is_typed(config):
        return typed_row(columns, config)
    return {**columns, "record": json.dumps(columns["record"], ensure_ascii=False)}


def typed_row(columns: Row, config: RunConfig) -> Row:
    """Return the task's columns of an answer with typed columns instead of `record` and `values`.

    Args:
        columns: The columns of the answer, with `record` as nested objects.
        config: The run's configuration with `output.columns: typed`.
    """
    category = config.extraction.categories[columns["category"]]
    record = columns["record"]
    items = {item["name"]: item for item in columns["values"]}
    row: Row = {"category": columns["category"], "truncated": columns["truncated"]}
    for attribute in category.attributes:
        head, *inner = attribute.key_path
        item = items.get(attribute.name, {})
        if item.get("span"):
            item = {**item, "span": {**item["span"], "exact": item["span_exact"]}}
        value = attribute.value_type.to_arrow(value_at(record, attribute.key_path))
        put_value(row, attribute.key_path, value)
        for detail in _details(attribute, config):
            put_value(row, [detail_column(head, detail), *inner], item.get(detail))
    return row


def record_row(row: Row) -> Row:
    """Return a row with `record` and `values` instead of typed columns, which lack `raw`.

    A row of another task, or one that already has these columns, is returned unchanged.
    """
    heads = []
    for name in row:
        if detail_column(name, "status") in row and detail_column(name, "confidence") in row:
            heads.append(name)
    if "record" in row or not heads:
        return row
    record: Row = {}
    items: list[Row] = []
    for head in heads:
        cells = _json_value(row[head])
        for path, status in _leaves([], row[detail_column(head, "status")]):
            value = value_at(cells, path)
            put_value(record, [head, *path], value)
            items.append(_item_of_details(row, head, path, value, status))
    others = {name: value for name, value in row.items() if name.split("__")[0] not in heads}
    if row.get("status", "ok") != "ok":
        return {**others, "record": None, "values": None}
    return {**others, "record": json.dumps(record, ensure_ascii=False), "values": items}


def _json_value(cell: Any) -> Any:
    """Return the value of a typed column in the form of a record, in which dates are text."""
    if isinstance(cell, date):
        return cell.isoformat()
    if isinstance(cell, Mapping):
        return {name: _json_value(value) for name, value in cell.items()}
    if isinstance(cell, list):
        return [_json_value(item) for item in cell]
    return cell


def _item_of_details(row: Row, head: str, path: list[str], value: Any, status: str) -> Row:
    """Return the item of the column `values` for a value in typed columns.

    Args:
        row: The row.
        head: The column of the value.
        path: The keys that lead to the value inside the column.
        value: The value.
        status: Its status.
    """

    def detail(name: str) -> Any:
        return value_at(row, [detail_column(head, name), *path])

    item = value_row(".".join([head, *path]), value, status, detail("confidence"))
    span = detail("span")
    item["span"] = span and {key: span[key] for key in span if key != "exact"}
    item["window"] = detail("window")
    if detail_column(head, "model") in row:
        item["model"] = detail("model")
    item["span_exact"] = span and span["exact"]
    return item


def _leaves(path: list[str], status: Any) -> Iterator[tuple[list[str], str]]:
    """Yield the path and the status of each value in a column of statuses."""
    if isinstance(status, Mapping):
        for name, inner in status.items():
            yield from _leaves([*path, name], inner)
    elif status is not None:
        # An attribute of another category has no status.
        yield path, status
