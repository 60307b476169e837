"""What `raypd export` writes, `raypd evaluate` and `raypd fit` read as labels."""

import csv
import json

import pytest

from raypd.answering.components import build
from raypd.cluster import driver
from raypd.config.load import make_config
from raypd.dataset.label_file import label_rows
from raypd.errors import InputError
from raypd.evaluation.score import evaluate
from raypd.tasks import record_of, value_row
from raypd.tasks.labels import labels_of, typed
from raypd.testing import fake
from raypd.verify.export import export
from tests.runs import config_tree, write_rows

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "ages": {
            "type": "object",
            "properties": {"from": {"type": "integer"}, "to": {"type": "integer"}},
        },
        "parts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
            },
        },
    },
}


VALUES = {
    "name": "=1+1",
    "tags": ["a; b", "+c"],
    "ages.from": 18,
    "ages.to": None,
    "parts": [{"name": "bolt", "count": 2}],
}


def answered(name, category) -> dict:
    """The columns of an answer with values of each type."""
    values = []
    for attribute in category.attributes:
        value = VALUES[attribute.name]
        status = "null" if value is None else "ok"
        values.append(value_row(attribute.name, value, status, 0.5))
    record = record_of(category, VALUES)
    return {"category": name, "record": record, "values": values, "truncated": False}


@pytest.fixture
def run(tmp_path, in_process, monkeypatch) -> str:
    """The folder of a run with lists, objects and a document that failed."""
    rows = [{"id": str(n), "title": f"Shoe {n}"} for n in range(20)]
    rows.append({"id": "empty", "title": ""})
    write_rows(tmp_path / "in.jsonl", rows)
    tree = config_tree(
        {"schema": SCHEMA},
        tmp_path / "in.jsonl",
        tmp_path / "run",
        model={"name": "fake", "fake": {"load_seconds": 0}},
        input={"text_columns": ["title"], "category_column": None},
    )
    config = make_config(tree)
    monkeypatch.setattr(fake, "_record", answered)
    driver.run_extract(config, build=build)
    return config.output.path


def test_lists_and_objects_in_a_csv_are_json_and_each_value_has_a_status(run, tmp_path):
    path = tmp_path / "answers.csv"
    export(run, str(path))
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"status", "tags__status", "ages__status"} <= rows[0].keys()
    lists = [json.loads(row["tags"]) for row in rows if row["tags"]]
    objects = [json.loads(row["ages"]) for row in rows if row["ages"]]
    parts = [json.loads(row["parts"]) for row in rows if row["parts"]]
    assert lists == [["a; b", "+c"]] * len(lists) != []
    assert objects == [{"from": 18, "to": None}] * len(objects) != []
    assert parts == [[{"name": "bolt", "count": 2}]] * len(parts) != []
    assert rows[0]["name"] == "'=1+1"


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_an_export_read_as_labels_says_what_the_run_said(run, tmp_path, ending):
    path = str(tmp_path / f"answers.{ending}")
    export(run, path)
    evaluation = evaluate(run, path)
    by_name = {measure.name: measure.value for measure in evaluation.measures}
    assert by_name["values right"] == 1.0
    # The document that failed has no labels.
    answered = sum(1 for _, _, row in label_rows(path, "id") if row["status"] == "ok")
    assert evaluation.unlabelled == 21 - answered


def attributes():
    return make_config(config_tree({"schema": SCHEMA})).extraction.categories["record"].attributes


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("a; b", ["a", "b"]),
        ("a", ["a"]),
        ('["a; b", "c"]', ["a; b", "c"]),
        ("a;", ["a"]),
        ("", None),
        ("N/A", None),
    ],
)
def test_a_list_of_texts_is_read_as_json_and_as_people_write_it(cell, value):
    (tags,) = [attribute for attribute in attributes() if attribute.name == "tags"]
    assert typed(tags, cell) == value


@pytest.mark.parametrize("cell", ['{"from": 18, "to": null}', {"from": 18}])
def test_an_object_in_one_cell_is_read_by_its_attributes(cell):
    labels = labels_of({"ages": cell, "name": "x"}, "target", attributes(), ())
    assert labels == {"name": "x", "ages.from": 18, "ages.to": None}


def test_a_cell_that_holds_no_object_is_named():
    with pytest.raises(ValueError, match="ages"):
        labels_of({"ages": "18 to 30"}, "target", attributes(), ())


def test_a_row_of_parts_that_is_no_json_is_refused():
    (parts,) = [attribute for attribute in attributes() if attribute.name == "parts"]
    with pytest.raises(ValueError, match="parts"):
        typed(parts, "bolt; nut")


def test_two_values_for_one_attribute_of_a_reviewed_document_are_refused(tmp_path):
    lines = [
        "source,row,id,category,attribute,value,correct,confidence,reviewed",
        "a.csv,0,1,c,name,x,y,0.5,",
        "a.csv,0,1,c,name,x,z,0.5,",
    ]
    (tmp_path / "review.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match="line 3"):
        list(label_rows(str(tmp_path / "review.csv"), "id"))
