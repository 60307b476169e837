"""The output columns of every kind of task, beside those that all have (raypd.dataset.writer)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import pyarrow as pa

from raypd.config import Attribute, Category, ExtractionConfig, RunConfig
from raypd.tasks.base import Record

VALUE = pa.struct(
    [
        ("name", pa.string()),
        ("value", pa.string()),  # as text, whatever its type; null where there is none
        ("number", pa.float64()),
        ("boolean", pa.bool_()),
        ("confidence", pa.float32()),  # of a choice its probability, else the mean of its tokens' (docs/methods.md)
        ("status", pa.string()),  # ok | null | truncated (cut at K_max) | invalid | ambiguous (not one number)
        ("raw", pa.string()),  # what was decoded, where no value could be made of it
        # Where a text stands in the document's: characters [begin, end); null where it does not stand there.
        ("span", pa.struct([("begin", pa.int32()), ("end", pa.int32())])),
        ("span_exact", pa.bool_()),  # whether letter for letter, or but for case and white space
        ("window", pa.int32()),  # of a document in several (task.too_long), from 0: where the value was found
    ]
)
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
        ("choice_index", pa.int32()),  # of the answer among the choices, from 0; null for free answers
        ("confidence", pa.float32()),  # of a choice its probability, else the mean of its tokens'
        ("answer_status", pa.string()),  # ok | null | truncated (cut at max_answer_tokens) | invalid (empty)
        ("truncated", pa.bool_()),  # the context was cut to fit
    ]
)
GENERATION = pa.schema(
    [
        ("sample", pa.int32()),  # of task.samples
        ("turn", pa.int32()),  # of a conversation
        ("text", pa.string()),
        ("finish_reason", pa.string()),  # stop: all threads of the text came to their end; else length
        ("tokens", pa.int32()),
        ("confidence", pa.float32()),  # geometric mean of the token probabilities
        ("raw", pa.string()),  # with markup, where the method writes any
        ("counters", pa.string()),  # prompt_tokens and the method's own, as a JSON object
        ("warnings", pa.list_(pa.string())),
    ]
)
BY_KIND = {"extraction": EXTRACTION, "question_answering": QUESTION_ANSWERING, "generation": GENERATION}

# ------------------------------------------------------------------------------------------------- typed columns
_SPAN = pa.struct([("begin", pa.int32()), ("end", pa.int32()), ("exact", pa.bool_())])
_TYPES = {"integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_(), "date": pa.date32()}
Tree = dict[str, Any]


def columns_of(config: RunConfig) -> pa.Schema:
    """The task's columns as a run's table has them: with output.columns typed, of all categories together.

    A time stays text, which Spark and Athena read, and so does a date-time, whose offset a timestamp would lose.
    """
    if not isinstance(config.task, ExtractionConfig) or config.output.columns == "record":
        return BY_KIND[config.task.kind]
    trees: dict[str, Tree] = {}  # column -> its type, in nested objects by name
    for category in config.task.categories.values():
        for attribute in category.attributes:
            head, *inner = attribute.place
            found = {"": _type(attribute), "__confidence": pa.float32(), "__status": pa.string()}
            if _has_span(attribute):
                found["__span"] = _SPAN
            if config.task.too_long == "windows":
                found["__window"] = pa.int32()
            for suffix, kind in found.items():
                _put(trees, [head + suffix, *inner], kind)
    return pa.schema([("category", pa.string()), *_fields(trees), ("truncated", pa.bool_())])


def _type(attribute: Attribute) -> pa.DataType:
    kind = _TYPES.get(attribute.type, pa.string())
    return pa.list_(kind) if attribute.many else kind


def _has_span(attribute: Attribute) -> bool:
    return not attribute.many and attribute.type not in ("integer", "number", "boolean")


def _fields(tree: Tree) -> list[pa.Field]:
    return [pa.field(name, pa.struct(_fields(kind)) if isinstance(kind, dict) else kind) for name, kind in tree.items()]


def _put(tree: Tree, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _get(tree: Any, path: list[str]) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def value_in(record: Any, attribute: Attribute) -> Any:
    """What a record, or labels, have of an attribute: in its nested object, or under its name; None: nothing."""
    nested = _get(record, attribute.place)
    return nested if nested is not None else record.get(attribute.name)


def record_of(category: Category, named: Mapping[str, Any]) -> Tree:
    """The record of values by their attributes' names: nested objects are put together again."""
    record: Tree = {}
    for attribute in category.attributes:
        value = named.get(attribute.name)
        if value is not None or not attribute.omit_null:
            _put(record, attribute.place, value)
    for *above, last in sorted(category.optional_objects, key=len, reverse=True):
        if (holder := _get(record, above)) is not None and not _holds(holder.get(last)):
            holder.pop(last, None)
    return record


def _holds(value: Any) -> bool:
    return any(map(_holds, value.values())) if isinstance(value, dict) else value is not None


def value_row(name: str, value: Any, status: str, confidence: float | None, raw: str | None = None) -> Tree:
    """A row of the column `values`. value: as JSON has it; raw: what was decoded."""
    text = value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    boolean = value if isinstance(value, bool) else None
    number = float(value) if isinstance(value, (int, float)) and boolean is None else None
    row = {"name": name, "value": text, "number": number, "boolean": boolean, "confidence": confidence}
    return {**row, "status": status, "raw": raw if value is None and status != "null" else None}


def typed_row(columns: Tree, config: RunConfig) -> Tree:
    """A row's own columns, `record` and `values`, as typed ones."""
    assert isinstance(config.task, ExtractionConfig)
    category = config.task.categories.get(columns.get("category") or "")
    if category is None:
        return columns
    row: Tree = {"category": columns["category"], "truncated": columns["truncated"]}
    record, values = json.loads(columns["record"]), {value["name"]: value for value in columns["values"]}
    for attribute in category.attributes:
        head, *inner = attribute.place
        own = values.get(attribute.name, {})
        _put(row, [head, *inner], _arrow(attribute, _get(record, attribute.place)))
        _put(row, [f"{head}__confidence", *inner], own.get("confidence"))
        _put(row, [f"{head}__status", *inner], own.get("status"))
        if _has_span(attribute):
            span = own.get("span")
            _put(row, [f"{head}__span", *inner], span and {**span, "exact": own["span_exact"]})
        if config.task.too_long == "windows":
            _put(row, [f"{head}__window", *inner], own.get("window"))
    return row


def rows_of(records: Sequence[Record], config: RunConfig) -> Sequence[Record]:
    """A task's records as the run's table has them (`columns_of`)."""
    if not isinstance(config.task, ExtractionConfig) or config.output.columns == "record":
        return records
    return [replace(record, columns=typed_row(record.columns, config)) for record in records]


def _arrow(attribute: Attribute, value: Any) -> Any:
    if isinstance(value, list):
        return [_arrow(attribute.item, one) for one in value]
    if value is not None and attribute.type == "date":
        return date.fromisoformat(value)
    return float(value) if value is not None and attribute.type == "number" else value


def record_row(row: Tree) -> Tree:
    """A row with `record` and `values`, also out of typed columns, which lack raw; any other as it is."""
    heads = [name for name in row if f"{name}__status" in row and f"{name}__confidence" in row]
    if "record" in row or not heads:
        return row
    record: Tree = {}
    values = []
    for head in heads:
        for path, status in _leaves([], row[f"{head}__status"]):
            value = _json(_get(row, [head, *path]))
            _put(record, [head, *path], value)
            span = _get(row, [f"{head}__span", *path]) or {}
            own = value_row(".".join([head, *path]), value, status, _get(row, [f"{head}__confidence", *path]))
            found = {"begin": span["begin"], "end": span["end"]} if span else None
            window = _get(row, [f"{head}__window", *path])
            values.append({**own, "span": found, "span_exact": span.get("exact"), "window": window})
    kept = {name: value for name, value in row.items() if name.split("__")[0] not in heads}
    ok = row.get("status", "ok") == "ok"
    return {**kept, "record": json.dumps(record, ensure_ascii=False) if ok else None, "values": values if ok else None}


def _leaves(path: list[str], status: Any) -> Iterator[tuple[list[str], str]]:
    if isinstance(status, Mapping):
        for name, inner in status.items():
            yield from _leaves([*path, name], inner)
    elif status is not None:  # of another category
        yield path, status


def _json(value: Any) -> Any:
    if isinstance(value, list):
        return [_json(one) for one in value]
    return value.isoformat() if isinstance(value, date) else value
