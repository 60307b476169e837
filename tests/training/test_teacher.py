"""The answers of a run as labels."""

import json

import pytest

from raypd.errors import InputError
from raypd.tasks import columns
from raypd.tasks.base import Document, Record
from raypd.training import teacher
from tests.runs import committed, run_config


def documents(count):
    return [Document(i, "the same id", {}, source="a.jsonl", place=i) for i in range(count)]


def test_whole_answers_of_an_extraction_are_labels(tmp_path):
    def answer(index, status):
        values = [{"name": "Brand", "value": f"b{index}", "status": status}]
        record = json.dumps({"Brand": f"b{index}"})
        return Record(index, {"category": "c", "record": record, "values": values, "truncated": False})

    with pytest.raises(InputError, match="holds no answers"):
        teacher.label(documents(1), str(tmp_path), "target")
    records = [answer(0, "ok"), answer(1, "null"), answer(2, "truncated"), Record(3, error="it failed")]
    committed(tmp_path, run_config(), documents(4), records, columns.EXTRACTION)
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
    assert labelled[0].fields == {"target": {"Brand": "b"}}
    assert labelled[1].error == "training.labels: no label in the file"
    file.write_text('{"id": 7}\n')
    with pytest.raises(InputError, match=r"labels\.jsonl: expected JSON lines of id and 'target'"):
        teacher.label(labelled, str(file), "target")


def test_whole_conversations_are_labels(tmp_path):
    def turn(index, number, reason="stop", sample=0):
        return Record(index, {"sample": sample, "turn": number, "text": f"{index}.{number}", "finish_reason": reason})

    records = [turn(0, 1), turn(0, 0), turn(0, 0, sample=1), turn(1, 0, "length"), turn(2, 0), turn(3, 0, "length")]
    committed(tmp_path, run_config("generation"), documents(4), records)
    labelled = documents(4)
    teacher.label(labelled, str(tmp_path), "responses")
    assert [document.fields.get("responses") for document in labelled] == [["0.0", "0.1"], None, ["2.0"], None]
