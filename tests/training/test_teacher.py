"""The answers of a run as labels."""

import json

import pytest

from raypd.dataset import writer
from raypd.errors import InputError
from raypd.run.records import UnitSummary
from raypd.tasks import columns
from raypd.tasks.base import Document, Record
from raypd.training import teacher


def documents(count):
    return [Document(i, "the same id", {}, source="a.jsonl", place=i) for i in range(count)]


def commit(output, records, schema):
    table = writer.make_table(documents(4), records, schema, 1)
    ok, failed = writer.count_documents(table)
    assert writer.commit(str(output), table, UnitSummary("u", "f", "s", "a.jsonl", 0, 4, ok, failed, 0.1), {})


def test_whole_answers_of_an_extraction_are_labels(tmp_path):
    def answer(index, status):
        values = [{"name": "Brand", "value": f"b{index}", "status": status}]
        record = json.dumps({"Brand": f"b{index}"})
        return Record(index, {"category": "c", "record": record, "values": values, "truncated": False})

    with pytest.raises(InputError, match="holds no answers"):
        teacher.label(documents(1), str(tmp_path), "target")
    records = [answer(0, "ok"), answer(1, "null"), answer(2, "truncated"), Record(3, error="it failed")]
    commit(tmp_path, records, columns.EXTRACTION)
    labelled = documents(5)
    teacher.label(labelled, str(tmp_path), "target")
    reasons = 2 * ["an answer that failed, was cut or is not valid"] + ["no answer"]
    errors = [(None, f"training.labels: {reason} in the run that labels") for reason in reasons]
    labels = [(document.fields.get("target"), document.error) for document in labelled]
    assert labels == [({"Brand": "b0"}, None), ({"Brand": "b1"}, None), *errors]


def test_corrected_labels_are_joined_by_id(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text('{"id": 7, "target": {"Brand": "b"}}\n')
    labelled = [Document(0, "7", {}), Document(1, "8", {})]
    teacher.label(labelled, str(file), "target")
    assert (labelled[0].fields, labelled[1].error) == (
        {"target": {"Brand": "b"}},
        "training.labels: no label in the file",
    )
    file.write_text('{"id": 7}\n')
    with pytest.raises(InputError, match=r"labels\.jsonl: expected JSON lines of id and 'target'"):
        teacher.label(labelled, str(file), "target")


def test_whole_conversations_are_labels(tmp_path):
    def turn(index, number, reason="stop", sample=0):
        return Record(index, {"sample": sample, "turn": number, "text": f"{index}.{number}", "finish_reason": reason})

    records = [turn(0, 1), turn(0, 0), turn(0, 0, sample=1), turn(1, 0, "length"), turn(2, 0), turn(3, 0, "length")]
    commit(tmp_path, records, columns.GENERATION)
    labelled = documents(4)
    teacher.label(labelled, str(tmp_path), "responses")
    assert [document.fields.get("responses") for document in labelled] == [["0.0", "0.1"], None, ["2.0"], None]
