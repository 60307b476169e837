"""Records of a run's folder: to JSON and back, of other versions, and what is wrong with a file in words."""

import json
import math
from dataclasses import asdict

import pytest

from raypd.billing import book
from raypd.run.records import (
    Bill,
    Energy,
    Manifest,
    NodeTime,
    RecordError,
    Session,
    SessionTotals,
    UnitSummary,
    WorkerTime,
    from_json,
    read,
    write,
)


def bill() -> Bill:
    worker = WorkerTime("w", "n", 2.0, open={"u": (1.0, 2.0)}, spans=[(2.0, 3.5, "startup", None)],
                        categories={"c": {"documents": 3, "seconds": 0.5}})  # fmt: skip
    return Bill("s", 1.0, 2.5, nodes=[NodeTime("n", 1.0)], workers=[worker], series=[[1.0, 0.5, 3, 0, 9]],
                energy=Energy(0.1), shares=[(4.0, 2)])  # fmt: skip


@pytest.mark.parametrize("record", [
    bill(), Session(1.0, "s", 2.0),
    Manifest(sessions=[SessionTotals("s", "2026", "2027", "complete", 1.5, 2, 3)], config={"a": {"b": [1]}}),
    UnitSummary("u", "f", "s", "a.jsonl", 0, 2, 1, 1, 0.5, counts={"steps": 3})])  # fmt: skip
def test_a_record_comes_back_from_its_file(tmp_path, record):
    path = str(tmp_path / "record.json")
    write(path, record)
    assert read(type(record), path) == record
    assert list(json.loads((tmp_path / "record.json").read_text())) == list(vars(record))


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("put", [write, lambda path, record: book.write(path, record)])
def test_no_file_holds_a_number_that_json_does_not_have(tmp_path, number, put):
    with pytest.raises(ValueError, match="not JSON compliant"):
        put(str(tmp_path / "run"), Bill("s", 1.0, number))
    assert not list(tmp_path.iterdir())


def test_files_of_other_versions_are_read():
    tree = asdict(bill())
    del tree["shares"], tree["nodes"][0]["slots"]
    record = from_json(Bill, {**tree, "later": 1, "energy": {"kwh": 0.1, "source_of": "x"}}, "s.json")
    assert record == Bill(**{**vars(bill()), "shares": []})
    assert type(record.workers[0].categories["c"]["documents"]) is int  # as it stands in the file


@pytest.mark.parametrize(("changed", "message"), [
    ({"usd": "much"}, "s.json: cannot be read: usd: Input should be a valid number"),
    ({"nodes": [{"node": "n", "began": {}}]}, "s.json: cannot be read: nodes.0.began: "),
    ({"workers": [{"worker": "w"}]}, "s.json: cannot be read: workers.0.node: Field required")])  # fmt: skip
def test_a_wrong_value_is_named_with_file_and_key(changed, message):
    with pytest.raises(RecordError, match=f"^{message}"):
        from_json(Bill, {**asdict(bill()), **changed}, "s.json")


@pytest.mark.parametrize("text", ["{", "[]", "3", "", '{"began": 1}'])
def test_a_file_that_holds_no_such_record_is_named(tmp_path, text):
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=rf"^{path}: cannot be read: "):
        read(Bill, str(path))
