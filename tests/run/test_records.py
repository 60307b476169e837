"""Records of a run's folder: to JSON and back, of other versions, what is wrong with a file; and
figures in words.
"""

import json
import math
from dataclasses import asdict

import pytest

from raypd.billing import book
from raypd.run import records, text
from raypd.run.records import (
    Bill,
    Manifest,
    NodeTime,
    RecordError,
    Session,
    UnitSummary,
    WorkerTime,
    from_json,
)
from raypd.run.training import TrainingAttempt, TrainingData, TrainingRecord


def bill() -> Bill:
    worker = WorkerTime(
        "w",
        "n",
        2.0,
        open={"u": (1.0, 2.0)},
        spans=[(2.0, 3.5, "startup", None)],
        categories={"c": {"documents": 3, "seconds": 0.5}},
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
            sessions=[records.SessionTotals("s", "2026", "2027", "complete", 1.5, 2, 3)],
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
def test_no_file_holds_a_number_that_json_does_not_have(tmp_path, number, put):
    with pytest.raises(ValueError, match="not JSON compliant"):
        put(str(tmp_path / "run"), Bill("s", 1.0, number))
    assert not list(tmp_path.iterdir())


def test_files_of_other_versions_are_read():
    tree = asdict(bill())
    del tree["shares"], tree["nodes"][0]["slots"]
    tree["nodes"][0]["source_of"] = "x"
    record = from_json(Bill, {**tree, "later": 1}, "s.json")
    assert record == Bill(**{**vars(bill()), "shares": []})
    assert type(record.workers[0].categories["c"]["documents"]) is int  # as it stands in the file


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"usd": "much"}, "s.json: cannot be read: usd: Input should be a valid number"),
        ({"nodes": [{"node": "n", "began": {}}]}, "s.json: cannot be read: nodes.0.began: "),
        ({"workers": [{"worker": "w"}]}, "s.json: cannot be read: workers.0.node: Field required"),
    ],
)
def test_a_wrong_value_is_named_with_file_and_key(changed, message):
    with pytest.raises(RecordError, match=f"^{message}"):
        from_json(Bill, {**asdict(bill()), **changed}, "s.json")


@pytest.mark.parametrize("text", ["{", "[]", "3", "", '{"began": 1}'])
def test_a_file_that_holds_no_such_record_is_named(tmp_path, text):
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=rf"^{path}: cannot be read: "):
        records.read(Bill, str(path))


def test_money_shares_and_durations_and_foreign_text_made_visible_and_bounded():
    assert (text.cost(0.0), text.cost(0.67)) == ("no price", "$0.67")
    money = {
        0: "$0.00",
        0.00002: "$0.00002",
        0.0123: "$0.012",
        0.67: "$0.67",
        12.3456: "$12.35",
        9999.99: "$9,999.99",
    }
    money |= {597_000.4: "$597,000", -3.5: "-$3.50"}
    assert {value: text.usd(value) for value in money} == money
    shares = {
        (0, 10): "0%",
        (1, 100_000): "<0.1%",
        (1, 40): "2.5%",
        (1, 3): "33%",
        (99_999, 100_000): ">99.9%",
    }
    shares |= {(5, 5): "100%", (1, 0): text.NONE}
    assert {value: text.share(*value) for value in shares} == shares
    times = {
        0.04: "0.0 s",
        42.4: "42 s",
        59.9: "1 min 0 s",
        192: "3 min 12 s",
        18_240: "5 h 4 min",
        183_600: "2 d 3 h",
    }
    assert {value: text.duration(value) for value in times} == times
    assert text.clean("a\0b\x1b[31m\u202ec\td\n") == "a\\u0000b\\u001b[31m\\u202ec\td\n"
    assert text.clean("x" * 20, 5) == "xxxxx… (20 characters)"
    assert text.clean("e" + "\u0301" * 50) == "e" + "\u0301" * 4
    assert text.clean("漢字 عربى é 👩‍👧") == "漢字 عربى é 👩‍👧"


@pytest.mark.parametrize(
    ("losses", "weights", "falls", "asks"),
    [
        ([2.0, 1.5, 1.6], "adapter", True, True),
        ([2.0, 2.1, 2.2], "model", False, True),
        ([2.0], "model", True, True),
        ([2.0, 2.2], "heads", False, False),
    ],
)
def test_a_training_says_that_it_measured_no_answers_and_where_its_loss_never_fell(
    losses, weights, falls, asks
):
    curve = [(10 * (n + 1), 3.0, loss) for n, loss in enumerate(losses)]
    attempt = TrainingAttempt(1e-4, min(losses), 10 * len(losses), 1000, curve)
    data = TrainingData(90, 10, 1000, 100, {}, "digest")
    said = TrainingRecord("hyper_parallel", data, [attempt], f"/out/{weights}", 1.0, 0.0).describe()
    assert ("never fell below that of step 10" in said) != falls
    assert (
        "answers were not scored" in said
        and "raypd evaluate RUN LABELS" in said
        and "raypd fit" in said
    ) == asks
