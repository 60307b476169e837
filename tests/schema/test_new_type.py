"""A type that raypd does not have: one class and one line of the registry are enough."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pyarrow as pa
import pyarrow.dataset as ds
import pydantic
import pytest

from raypd.config.load import load_config
from raypd.config.schema import categories_of
from raypd.dataset import writer
from raypd.decoding.engine import Engine
from raypd.errors import ConfigError
from raypd.run.unit import UnitSummary
from raypd.schema import (
    TYPES,
    Attribute,
    LabelError,
    UnsupportedSchema,
    record_pattern,
    record_schema,
)
from raypd.schema.types.formatted import FormattedText
from raypd.tasks import build_task
from raypd.tasks.base import Document
from raypd.tasks.columns import columns_of, rows_of
from raypd.tasks.prompting import messages
from raypd.tasks.values import check
from raypd.training.example import Skip
from raypd.training.extraction import value_text
from tests.runs import answer, extraction, run_config
from tests.tasks.test_extraction import CONTEXT, document
from tests.tiny import tiny_model, tiny_tokenizer


class ColourType(FormattedText):
    """A colour of the web, such as #ff0000. Its column is an integer."""

    name = "colour"
    regex = "#[0-9a-f]{6}"
    column_type = "colour"

    @classmethod
    def from_json_schema(cls, schema: dict[str, Any]) -> dict[str, Any] | None:
        if schema.get("type") != "string" or schema.get("format") != "color":
            return None
        for keyword in ("pattern", "minLength", "maxLength"):
            if keyword in schema:
                raise UnsupportedSchema(keyword, "beside format color it cannot be enforced")
        return {"type": "colour"}

    def json_schema(self) -> dict[str, Any]:
        return {**super().json_schema(), "format": "color"}

    def hint(self) -> str:
        return "a colour, as #rrggbb"

    def convert(self, word: str) -> str:
        return word.lower()

    def arrow_type(self) -> pa.DataType:
        return pa.int32()

    def stored(self, value: str) -> int:
        return int(value.removeprefix("#"), 16)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TYPES, "colour", ColourType)


COLOUR = {"name": "paint", "type": "colour", "required": True}
COLOURS = {
    "name": "paints",
    "type": "colour",
    "many": True,
    "min_items": 1,
    "required": True,
}
ROWS = {
    "name": "parts",
    "type": "rows",
    "columns": [{"name": "hue", "type": "colour"}],
}


def test_a_slot_is_decoded_checked_and_written_as_the_type_says(tmp_path: Path) -> None:
    task = extraction(shoes=[COLOUR, COLOURS, ROWS])
    sections: dict[str, Any] = {
        "input": {"text_columns": ["title"]},
        "output": {"columns": "typed"},
        "decoding": {"max_value_tokens": 60},
    }
    config = run_config(task, "in.jsonl", tmp_path / "out", **sections)
    documents = [document(row, f"car {row} " * (row + 1)) for row in range(4)]
    engine = Engine(tiny_model("llama", max_position_embeddings=CONTEXT))
    records, _ = answer(build_task(config, tiny_tokenizer(), CONTEXT), documents, engine)
    records.sort(key=lambda record: record.index)
    values = [record.columns["record"] for record in records]
    # The model is random: only the slot's automaton makes a colour of what it writes.
    assert len({value["paint"] for value in values}) > 1
    for value in values:
        for colour in [value["paint"], *value["paints"]]:
            assert re.fullmatch("#[0-9a-f]{6}", colour)

    rows = [
        Document(
            row,
            f"d{row}",
            {},
            source="a.jsonl",
            row=row,
        )
        for row in range(4)
    ]
    table = writer.make_table(rows, rows_of(records, config), columns_of(config), 1)
    summary = UnitSummary("u-0", "f" * 12, "s", "a.jsonl", 0, 4, 4, 0, 0.1)
    assert writer.commit(str(tmp_path / "out"), table, summary)
    stored = ds.dataset(tmp_path / "out/units").to_table()
    assert stored.schema.field("paint").type == pa.int32()
    assert stored.schema.field("paints").type.value_type == pa.int32()
    assert stored["paint"].to_pylist() == [int(value["paint"][1:], 16) for value in values]


@pytest.mark.parametrize(
    ("keys", "text", "status", "value"),
    [
        (COLOUR, '"#FF00aa"', "ok", "#ff00aa"),
        (COLOUR, '"red"', "invalid", None),
        (COLOUR, '"#ff00', "truncated", None),
        (COLOUR, "null", "null", None),
        (COLOURS, '["#000000", "#FFFFFF"]', "ok", ["#000000", "#ffffff"]),
        (COLOURS, "[]", "invalid", None),
        (ROWS, '[{"Hue": "#0000FF"}]', "ok", [{"hue": "#0000ff"}]),
        (ROWS, '[{"hue": "blue"}]', "invalid", None),
    ],
)
def test_what_a_model_writes_is_read_by_the_type(
    keys: dict[str, Any], text: str, status: str, value: Any
) -> None:
    checked = check(Attribute(**keys), text, closed=status != "truncated")
    assert checked.status == status
    assert checked.value == value


def test_a_json_schema_and_a_pydantic_model_become_the_type() -> None:
    colour = Annotated[str, pydantic.Field(json_schema_extra={"format": "color"})]

    class Car(pydantic.BaseModel):
        paint: colour
        trims: list[colour]

    written = {"properties": {"paint": {"type": "string", "format": "color"}}}
    (category,) = categories_of(written, Path()).values()
    assert category["attributes"][0]["type"] == "colour"
    (category,) = categories_of(Car.model_json_schema(), Path()).values()
    assert [attribute["type"] for attribute in category["attributes"]] == ["colour", "colour"]


@pytest.mark.parametrize("keyword", ["pattern", "minLength", "maxLength"])
def test_a_keyword_that_the_type_cannot_enforce_is_refused(keyword: str) -> None:
    paint = {"type": "string", "format": "color", keyword: "#" if keyword == "pattern" else 7}
    with pytest.raises(ConfigError, match=rf"paint\.{keyword}: beside format color"):
        categories_of({"properties": {"paint": paint}}, Path())


def test_yaml_names_the_type(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    head = "input: {path: in.jsonl}\noutput: {path: out}\ntask:\n  attributes:\n"
    file.write_text(head + "  - {name: paint, type: colour}\n")
    config = load_config(file)
    (category,) = config.extraction.categories.values()
    assert isinstance(category.attributes[0].value_type, ColourType)
    assert (
        "- paint (meaning: a colour, as #rrggbb)\n" in messages(config.task, config.model)["record"]
    )


def test_a_server_is_asked_for_the_type() -> None:
    attributes = [Attribute(**COLOUR), Attribute(**ROWS)]
    answer_text = '"paint": "#ff0000",\n"parts": [{"hue": null}, {"hue": "#00ff00"}]\n}'
    assert re.fullmatch(record_pattern(attributes), answer_text)
    assert not re.fullmatch(record_pattern(attributes), answer_text.replace("#00", "red"))
    schema = record_schema(attributes)
    jsonschema.validate(json.loads("{" + answer_text), schema)
    assert not jsonschema.Draft202012Validator(schema).is_valid({"paint": "red", "parts": None})


def test_a_label_is_taught_as_the_slot_takes_it() -> None:
    attribute = Attribute(**COLOUR)
    assert value_text(attribute, "#ff0000") == ' "#ff0000"'
    with pytest.raises(LabelError):
        attribute.value_type.label_text("red")
    with pytest.raises(Skip, match="'paint': a label is not a valid colour"):
        value_text(attribute, "red")


def test_keys_of_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="`minimum` is for type number and integer"):
        Attribute(**COLOUR, minimum=3)
    with pytest.raises(ValueError, match=r"'boolean', .*'rows'.*'colour'"):
        Attribute(name="a", type="color")
