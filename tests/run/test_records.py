"""Records are written as JSON and read back, also those of other versions and damaged ones."""

import json
import math

import pytest

from raypd.billing import book
from raypd.billing.bill import Bill, NodeTime
from raypd.billing.meter import WorkerTime
from raypd.run import records
from raypd.run.lease import Session
from raypd.run.manifest import Manifest, SessionTotals
from raypd.run.records import RecordError, from_json
from raypd.run.training import TrainingAttempt, TrainingData, TrainingRecord
from raypd.run.unit import UnitSummary
from raypd.run.usage import SECOND, UsageKey


def bill() -> Bill:
    worker = WorkerTime(
        "w",
        "n",
        2.0,
        open={"u": (1.0, 2.0)},
        spans=[(2.0, 3.5, "startup", None)],
        lost_usage={UsageKey("c"): {"documents": 3, "seconds": 0.5}},
    )
    return Bill(
        "s",
        1.0,
        2.5,
        nodes=[NodeTime("n", 1.0)],
        workers=[worker],
        series=[[1.0, 0.5, 3, 0, 9]],
        kwh=0.1,
        shares=[(4.0, 2)],
    )


@pytest.mark.parametrize(
    "record",
    [
        bill(),
        Session(1.0, "s", 2.0),
        Manifest(
            sessions=[SessionTotals("s", "2026", "2027", "complete", 1.5, 2, 3)],
            config={"a": {"b": [1]}},
        ),
        UnitSummary("u", "f", "s", "a.jsonl", 0, 2, 1, 1, 0.5, counts={"steps": 3}),
    ],
)
def test_a_record_comes_back_from_its_file(tmp_path, record):
    path = str(tmp_path / "record.json")
    records.write(path, record)
    assert records.read(type(record), path) == record
    assert list(json.loads((tmp_path / "record.json").read_text())) == list(vars(record))


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("put", [records.write, lambda path, record: book.write(path, record)])
def test_a_number_that_json_cannot_express_is_not_written(tmp_path, number, put):
    with pytest.raises(ValueError, match="not JSON compliant"):
        put(str(tmp_path / "run"), Bill("s", 1.0, number))
    assert not list(tmp_path.iterdir())


def test_files_of_other_versions_are_read():
    tree = json.loads(records.encoded(bill()))
    del tree["shares"], tree["nodes"][0]["slots"]
    tree["nodes"][0]["source_of"] = "x"
    record = from_json(Bill, {**tree, "later": 1}, "s.json")
    assert record == Bill(**{**vars(bill()), "shares": []})
    assert (
        type(record.workers[0].lost_usage[UsageKey("c")]["documents"]) is int
    )  # as it stands in the file


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"usd": "much"}, "s.json: cannot be read: usd: Input should be a valid number"),
        ({"nodes": [{"node": "n", "began": {}}]}, "s.json: cannot be read: nodes.0.began: "),
        ({"workers": [{"worker": "w"}]}, "s.json: cannot be read: workers.0.node: Field required"),
    ],
)
def test_the_message_names_the_file_and_the_key_of_a_wrong_value(changed, message):
    with pytest.raises(RecordError, match=f"^{message}"):
        from_json(Bill, {**json.loads(records.encoded(bill())), **changed}, "s.json")


@pytest.mark.parametrize("text", ["{", "[]", "3", "", '{"began": 1}'])
def test_the_message_names_a_file_that_holds_no_such_record(tmp_path, text):
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=rf"^{path}: cannot be read: "):
        records.read(Bill, str(path))


def test_usage_is_a_list_of_rows_in_the_file():
    usage = {
        UsageKey("shoes"): {"documents": 3},
        UsageKey("shoes", SECOND): {"documents": 0},
    }
    summary = UnitSummary("u", "f", "s", "a.jsonl", 0, 2, 1, 1, 0.5, categories=usage)
    tree = json.loads(records.encoded(summary))
    assert tree["categories"] == [
        {"category": "shoes", "model": "first", "documents": 3},
        {"category": "shoes", "model": "second", "documents": 0},
    ]
    assert from_json(UnitSummary, tree, "u.json") == summary


@pytest.mark.parametrize(
    ("losses", "weights", "falls", "is_scored_later"),
    [
        ([2.0, 1.5, 1.6], "adapter", True, True),
        ([2.0, 2.1, 2.2], "model", False, True),
        ([2.0], "model", True, True),
        ([2.0, 2.2], "heads", False, False),
    ],
)
def test_the_description_of_a_training_says_whether_its_loss_fell_and_that_answers_are_unscored(
    losses, weights, falls, is_scored_later
):
    curve = [(10 * (n + 1), 3.0, loss) for n, loss in enumerate(losses)]
    attempt = TrainingAttempt(1e-4, min(losses), 10 * len(losses), 1000, curve)
    data = TrainingData(90, 10, 1000, 100, {}, "digest")
    record = TrainingRecord("hyper_parallel", data, [attempt], f"/out/{weights}", 1.0, 0.0)
    description = record.describe()
    assert ("never fell below that of step 10" in description) != falls
    for advice in ("answers were not scored", "raypd evaluate RUN LABELS", "raypd fit"):
        assert (advice in description) == is_scored_later
