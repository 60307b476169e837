"""The rows of every kind of task: the columns that all have, those of the task, and which of these
are the answer.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypd.config import OWN_COLUMNS, Category, ExtractionConfig, RunConfig
from raypd.schema import Attribute
from raypd.tasks.base import Record

Row = dict[str, Any]
OWN = pa.schema(
    [pa.field(name, pa.type_for_alias(kind), name == "error") for name, kind in OWN_COLUMNS.items()]
)
_VALUE = [
    ("name", pa.string()),
    ("value", pa.string()),  # as text, whatever its type; null where there is none
    ("number", pa.float64()),
    ("boolean", pa.bool_()),
    # Of a choice its probability, else the mean of its tokens' (docs/values.md)
    ("confidence", pa.float32()),
    # Ok, null, truncated (at K_max), invalid, ambiguous (not one number), unsure.
    ("status", pa.string()),
    ("raw", pa.string()),  # what was decoded, where no value could be made of it
    # Where a text stands in the document's: characters [begin, end); null where it does not stand
    # there. page: from 1, where form feeds end pages, as in the text of a PDF.
    ("span", pa.struct([("begin", pa.int32()), ("end", pa.int32()), ("page", pa.int32())])),
    ("span_exact", pa.bool_()),  # whether letter for letter, or but for case and white space
    # Of a document in several (task.long_documents), from 0: where the value was found.
    ("window", pa.int32()),
]
# Of a recognized document (input.ocr): left, top, right and bottom of the value's box, as fractions
# of the page's width and height from its upper left.
_BOX = pa.field("box", pa.list_(pa.float32()))
_MODEL = ("model", pa.string())  # that answered, in a run with a cascade: first or second
VALUE = pa.struct(_VALUE)
EXTRACTION = pa.schema(
    [
        ("category", pa.string()),
        ("record", pa.string()),  # the values as a JSON object
        ("values", pa.list_(VALUE)),
        ("truncated", pa.bool_()),  # the document was cut to fit
    ]
)
QUESTION_ANSWERING = pa.schema(
    [
        ("question_id", pa.string()),  # its own, or its number in the row (from 0)
        ("question", pa.string()),
        ("answer", pa.string()),  # text, or the choice's text; null where the context does not say
        (
            "choice_index",
            pa.int32(),
        ),  # of the answer among the choices, from 0; null for free answers
        ("confidence", pa.float32()),  # of a choice its probability, else the mean of its tokens'
        # Ok | null | truncated (cut at max_answer_tokens) | invalid (empty)
        ("answer_status", pa.string()),
        ("truncated", pa.bool_()),  # the context was cut to fit
    ]
)
GENERATION = pa.schema(
    [
        ("sample", pa.int32()),  # of task.samples
        ("turn", pa.int32()),  # of a conversation
        ("text", pa.string()),
        (
            "finish_reason",
            pa.string(),
        ),  # stop: all threads of the text came to their end; else length
        ("tokens", pa.int32()),
        ("confidence", pa.float32()),  # geometric mean of the token probabilities
        ("raw", pa.string()),  # with markup, where the method writes any
        ("counters", pa.string()),  # prompt_tokens and the method's own, as a JSON object
        ("warnings", pa.list_(pa.string())),
    ]
)
_STATUSES = {"stop": "ok", "length": "truncated"}  # of a text


@dataclass
class RowValue:
    key: str  # tells it from the other answers of its document
    name: str  # what was asked; "" where the document itself asks
    value: str | None
    status: str  # as of VALUE
    confidence: float | None = None
    raw: str | None = None
    span: tuple[int, int] | None = None  # characters of the document's text


@dataclass(frozen=True)
class RowShape:
    """The columns of a kind of task, and which of them say what."""

    schema: pa.Schema
    answer: str
    status: str | None = None  # of the answer; None: where there is one, it is ok
    name: str | None = None  # what was asked
    parts: tuple[str, ...] = ()  # tell the rows of a document apart
    repeats: bool = False  # rows of the same parts may be there: a question that is asked twice
    many: bool = False  # the answer is a list of VALUE

    def values(self, row: Mapping[str, Any]) -> list[RowValue]:
        """The answers of a row; none of an error row."""
        if row.get("status", "ok") != "ok":
            return []
        if self.many:
            return [
                RowValue(
                    v["name"],
                    v["name"],
                    v["value"],
                    v["status"],
                    v.get("confidence"),
                    v.get("raw"),
                    _ends(v),
                )
                for v in row[self.answer] or []
            ]
        value = row[self.answer]
        status = row[self.status] if self.status else "null" if value is None else "ok"
        key = ", ".join(
            f"{part} {row[part]}" if len(self.parts) > 1 else str(row[part]) for part in self.parts
        )
        name = str(row[self.name]) if self.name else ""
        return [RowValue(key, name, value, _STATUSES.get(status, status), row.get("confidence"))]


def _ends(value: Mapping[str, Any]) -> tuple[int, int] | None:
    span = value.get("span")
    return (span["begin"], span["end"]) if span else None


SHAPES = {
    "extraction": RowShape(EXTRACTION, "values", many=True),
    "question_answering": RowShape(
        QUESTION_ANSWERING, "answer", "answer_status", "question", ("question_id",), True
    ),
    "generation": RowShape(GENERATION, "text", "finish_reason", parts=("turn", "sample")),
}


def shape_of(names: Collection[str]) -> RowShape | None:
    """The shape of rows with these columns; None of typed ones (see `record_row`)."""
    return next(
        (s for s in SHAPES.values() if {s.answer, s.status, s.name, *s.parts} <= {None, *names}),
        None,
    )


def parts_of(table: pa.Table) -> Any:
    """What tells the rows of one document apart: the same twice is an answer too many."""
    shape = shape_of(table.column_names)
    if shape is not None and shape.repeats:
        return [str(number) for number in range(len(table))]
    if shape is None or not shape.parts:
        return [""] * len(table)
    columns = [table[name].cast("string") for name in shape.parts]
    return pc.binary_join_element_wise(*columns, "/", null_handling="replace")


def row_values(row: Mapping[str, Any]) -> list[RowValue]:
    """The answers of a row of any task; none of an error row."""
    shape = shape_of(row.keys())
    return [] if shape is None else shape.values(row)


# ------------------------------------------------------------------------
# typed columns
_SPAN = pa.struct(
    [("begin", pa.int32()), ("end", pa.int32()), ("page", pa.int32()), ("exact", pa.bool_())]
)


def columns_of(config: RunConfig) -> pa.Schema:
    """The task's columns as a run's table has them.

    Times stay text: Spark and Athena read it, and offsets are kept.
    """
    if not isinstance(config.task, ExtractionConfig) or config.output.columns == "record":
        schema = SHAPES[config.task.kind].schema
        has_box = _has_box(config)
        if config.cascade.model is None and not has_box:
            return schema
        fields = list(VALUE)
        if has_box:
            number = VALUE.get_field_index("span")
            fields[number] = pa.field("span", _with_box(VALUE.field(number).type))
        if config.cascade.model is not None:
            fields.append(pa.field(*_MODEL))
        values = pa.field("values", pa.list_(pa.struct(fields)))
        return schema.set(schema.get_field_index("values"), values)
    trees: dict[str, Row] = {}  # column -> its type, in nested objects by name
    for category in config.task.categories.values():
        for attribute in category.attributes:
            head, *inner = attribute.place
            _put(trees, [head, *inner], attribute.value_type.arrow_type())
            for detail, kind in _details(attribute, config).items():
                _put(trees, [f"{head}__{detail}", *inner], kind)
    return pa.schema([("category", pa.string()), *_fields(trees), ("truncated", pa.bool_())])


def _has_box(config: RunConfig) -> bool:
    """Whether the spans of a run's table have boxes."""
    return isinstance(config.task, ExtractionConfig) and config.input.ocr != "off"


def _with_box(span: pa.StructType) -> pa.StructType:
    return pa.struct([*span, _BOX])


def _details(attribute: Attribute, config: RunConfig) -> Row:
    """What stands beside an attribute's column, in columns `attribute__detail`: its types."""
    details = {"confidence": pa.float32(), "status": pa.string()}
    if attribute.value_type.has_span:
        details["span"] = _with_box(_SPAN) if _has_box(config) else _SPAN
    if isinstance(config.task, ExtractionConfig) and config.task.long_documents == "split":
        details["window"] = pa.int32()
    return details | ({} if config.cascade.model is None else {"model": pa.string()})


def _fields(tree: Row) -> list[pa.Field]:
    return [
        pa.field(name, pa.struct(_fields(kind)) if isinstance(kind, dict) else kind)
        for name, kind in tree.items()
    ]


def _put(tree: Row, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _get(tree: Any, path: list[str]) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def value_in(record: Any, attribute: Attribute) -> Any:
    """What a record, or labels, have of an attribute: in its nested object, or under its name;
    None: nothing.
    """
    nested = _get(record, attribute.place)
    return nested if nested is not None else record.get(attribute.name)


def lacks(labels: Mapping[str, Any], attribute: Attribute, category: Category) -> bool:
    """Whether labels say nothing of an attribute, not even null.

    Raises ValueError where its object is none.
    """
    if attribute.name in labels:
        return False
    tree: Any = labels
    for end, key in enumerate(attribute.place, 1):
        if tree is None:
            break
        if not isinstance(tree, Mapping):
            raise ValueError(
                f"attribute {attribute.name!r}: a label of {attribute.place[end - 2]!r} is no "
                "object"
            )
        if key not in tree:  # an optional one is absent where it is null, as `record_of` has it
            return (
                not attribute.omit_null and attribute.place[:end] not in category.optional_objects
            )
        tree = tree[key]
    return False


def record_of(category: Category, named: Mapping[str, Any]) -> Row:
    """The record of values by their attributes' names: nested objects are put together again."""
    record: Row = {}
    for attribute in category.attributes:
        value = named.get(attribute.name)
        if value is not None:
            value = attribute.value_type.in_record(value)
        if value is not None or not attribute.omit_null:
            _put(record, attribute.place, value)
    for *above, last in sorted(category.optional_objects, key=len, reverse=True):
        if (holder := _get(record, above)) is not None and not _holds(holder.get(last)):
            holder.pop(last, None)
    return record


def _holds(value: Any) -> bool:
    return any(map(_holds, value.values())) if isinstance(value, dict) else value is not None


def value_row(
    name: str, value: Any, status: str, confidence: float | None, raw: str | None = None
) -> Row:
    """A row of the column `values`. value: as JSON has it; raw: what was decoded."""
    text = (
        value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )
    boolean = value if isinstance(value, bool) else None
    number = float(value) if isinstance(value, (int, float)) and boolean is None else None
    row = {
        "name": name,
        "value": text,
        "number": number,
        "boolean": boolean,
        "confidence": confidence,
    }
    return {**row, "status": status, "raw": raw if value is None and status != "null" else None}


def typed_row(columns: Row, config: RunConfig) -> Row:
    """A row's own columns, `record` and `values`, as typed ones."""
    category = config.extraction.categories.get(columns.get("category") or "")
    if category is None:
        return columns
    row: Row = {"category": columns["category"], "truncated": columns["truncated"]}
    record, values = (
        json.loads(columns["record"]),
        {value["name"]: value for value in columns["values"]},
    )
    for attribute in category.attributes:
        head, *inner = attribute.place
        value = values.get(attribute.name, {})
        if value.get("span"):
            value = {**value, "span": {**value["span"], "exact": value["span_exact"]}}
        stored = attribute.value_type.to_arrow(_get(record, attribute.place))
        _put(row, attribute.place, stored)
        for detail in _details(attribute, config):
            _put(row, [f"{head}__{detail}", *inner], value.get(detail))
    return row


def rows_of(records: Sequence[Record], config: RunConfig) -> Sequence[Record]:
    """A task's records as the run's table has them (`columns_of`)."""
    if not isinstance(config.task, ExtractionConfig) or config.output.columns == "record":
        return records
    return [replace(record, columns=typed_row(record.columns, config)) for record in records]


def record_row(row: Row) -> Row:
    """A row with `record` and `values`, also out of typed columns, which lack raw; any other as it
    is.
    """
    heads = [name for name in row if f"{name}__status" in row and f"{name}__confidence" in row]
    if "record" in row or not heads:
        return row
    record: Row = {}
    values = []
    for head in heads:
        cells = json.loads(json.dumps(row[head], default=date.isoformat))
        for path, status in _leaves([], row[f"{head}__status"]):
            value = _get(cells, path)
            _put(record, [head, *path], value)
            confidence, span, window = (
                _get(row, [f"{head}__{detail}", *path])
                for detail in ("confidence", "span", "window")
            )
            details = {
                "span": span and {key: span[key] for key in span if key != "exact"},
                "window": window,
            }
            if f"{head}__model" in row:
                details["model"] = _get(row, [f"{head}__model", *path])
            details["span_exact"] = span and span["exact"]
            values.append(
                {**value_row(".".join([head, *path]), value, status, confidence), **details}
            )
    kept = {name: value for name, value in row.items() if name.split("__")[0] not in heads}
    ok = row.get("status", "ok") == "ok"
    return {
        **kept,
        "record": json.dumps(record, ensure_ascii=False) if ok else None,
        "values": values if ok else None,
    }


def _leaves(path: list[str], status: Any) -> Iterator[tuple[list[str], str]]:
    if isinstance(status, Mapping):
        for name, inner in status.items():
            yield from _leaves([*path, name], inner)
    elif status is not None:  # of another category
        yield path, status
