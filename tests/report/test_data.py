"""Reading a run's folder: figures that add up, and what is missing, torn or unfinished."""

import json
import re
import time

import numpy as np
import pytest

from raypd.config.secrets import HIDDEN, redact
from raypd.report import data, units
from raypd.report.charts import RunningTime, speeds
from raypd.report.ledger import RunBill
from raypd.run.records import Bill, from_json
from tests.report.builder import Plan, build


def test_figures_are_those_of_the_units_and_of_the_sessions_bills(make):
    run = make(units=30, documents=20, sessions=3)
    assert (run.state, (run.units.committed, run.units.total("documents"))) == ("complete", (30, 600))
    assert (run.units.total("ok") + run.units.total("failed"), run.units.tokens("decode_tokens")) == (600, 600 * 24)
    assert [s.how for s in run.sessions] == ["interrupted", "interrupted", "complete"]
    assert sum(s.documents for s in run.sessions) == 600
    assert sum(run.sample.errors.values()) == run.units.total("failed") > 0
    bill, dollars = run.bill, [usd for _, usd in run.bill.series]
    assert (len(bill.sessions), bill.cost.documents) == (3, 600)
    parts = (bill.parts.values(), (n.usd for n in bill.nodes), (s.usd or 0 for s in run.sessions), dollars[-1:])
    assert [sum(usd) for usd in parts] == pytest.approx([bill.usd] * 4)
    assert dollars == sorted(dollars)  # a later session goes on where the one before ended


def test_retries_are_on_the_bill(tmp_path):
    root = build(tmp_path / "run", Plan(units=6))
    before, retry = data.load(str(root)).bill, build(tmp_path / "retry", Plan(units=1, workers=1))
    for file in (*retry.glob("ledger/*.json"), *retry.glob("sessions/*.json")):
        text = file.read_text().replace(file.stem, "retry-1")
        file.unlink()
        file.with_stem("retry-1").write_text(text)
    (root / "retries").mkdir()
    retry.rename(root / "retries/1")
    after = data.load(str(root)).bill
    for part in ("ledger", "sessions"):  # what has ended is copied into the run
        (root / part / "retry-1.json").write_bytes((root / f"retries/1/{part}/retry-1.json").read_bytes())
    copied = data.load(str(root))
    assert copied.bill.usd == pytest.approx(after.usd)
    assert [s.usd for s in copied.sessions if s.id == "retry-1"] == [pytest.approx(after.parts["retry"])]
    sums = (before.usd + after.parts["retry"], sum(after.parts.values()), sum(n.usd for n in after.nodes))
    assert [*sums] == pytest.approx([after.usd] * 3)
    assert after.usd > before.usd
    assert after.cost.documents == before.cost.documents  # the documents were there already


def test_a_torn_ledger_file_is_named_and_the_others_count(tmp_path):
    root = build(tmp_path / "run", Plan(units=8, sessions=2))
    (first, second) = sorted((root / "ledger").iterdir())
    whole = json.loads(second.read_text())["usd"]
    first.write_text(first.read_text()[:100])
    bill = data.load(str(root)).bill
    assert (bill.torn, bill.usd) == ([str(first)], pytest.approx(whole))


def test_the_last_line_of_a_worker_that_died_is_shown_and_bookkeeping_is_not(tmp_path):
    root = build(tmp_path / "run", Plan(units=3))
    (root / "failures").mkdir()
    texts = {"u1.txt": "Traceback\nRuntimeError: the device is gone\n", "u1.hand.json": "[1]", "u2.txt": ""}
    for name, text in texts.items():
        (root / "failures" / name).write_text(text)
    expected = [("u1", "RuntimeError: the device is gone"), ("u2", "its worker left no reason")]
    assert data.load(str(root)).failures == expected


def test_the_smallest_ledger_file_that_the_contract_allows():
    bill = RunBill([from_json(Bill, {"session": "s", "began": 1.0, "usd": 2.5}, "s.json")])
    assert (bill.usd, bill.newest.budget_usd, bill.workers, bill.cost.kwh) == (2.5, None, [], None)


def test_a_damaged_unit_is_named_and_not_counted_and_those_of_a_partition_are(tmp_path):
    root = build(tmp_path / "run", Plan(units=5, documents=10))
    (root / "units/shop=a").mkdir()
    broken, moved, *_ = sorted((root / "units").glob("*.parquet"))
    moved.rename(root / "units/shop=a" / moved.name)
    broken.write_bytes(broken.read_bytes()[:-100])
    run = data.load(str(root))
    assert (run.units.damaged, run.units.total("documents")) == ([str(broken)], 40)


def test_very_many_units_are_read_in_part_and_scaled(make, monkeypatch):
    monkeypatch.setattr(units, "READ_UNITS", 10)
    run = make(units=40, documents=10)
    assert (run.units.all_read, len(run.units.read), run.units.total("documents")) == (False, 10, 400)


@pytest.mark.parametrize(("how", "ago"), [("running", 5), ("killed", 3600), ("interrupted", 5), ("failed", 5)])
def test_state_of_a_run_that_is_not_finished(make, how, ago):
    kept = "running" if how == "killed" else how  # of a session that was killed no end is kept
    assert make(units=10, missing=3, how=kept, now=time.time() - ago).state == how


def test_a_session_whose_process_is_gone_is_killed_at_once(make, monkeypatch):
    running = make(units=10, missing=3, how="running", now=time.time() - 5)
    assert running.state == "running"
    monkeypatch.setattr(data.lease, "killed", lambda root: running.sessions[-1].id)
    assert data.load(running.root).state == "killed"


def test_secrets_do_not_leave():
    engine = {"max_num_batched_tokens": 2048, "cache_tokens": None, "max_value_tokens": 30, "password": None}
    tree = {"storage": {"secret_access_key": "abc", "access_key_id": "AKIAABCDEFGHIJKLMNOP", "session_token": "t"},
            "input": {"path": ["https://user:pass@host/a?X-Amz-Signature=deadbeef&x=1", "s3://corpus/a"]},
            "model": {"name": "m", "token": "hf_abcdefghijklmnopqrstuvwx", "note": "key AKIAABCDEFGHIJKLMNOP"},
            "engine": engine}  # fmt: skip
    shown = redact(tree)
    assert not re.search("abc|AKIA|pass@|deadbeef|hf_a", json.dumps(shown))
    paths = [f"https://{HIDDEN}@host/a?X-Amz-Signature={HIDDEN}&x=1", "s3://corpus/a"]
    assert (shown["engine"], shown["input"]["path"]) == (engine, paths)


def test_the_clock_stands_between_two_sessions_and_speed_adds_up_to_all_documents(make):
    run = make(units=20, documents=10, sessions=2)
    first, second = run.sessions
    clock = RunningTime(run.sessions)
    assert clock.total == pytest.approx(first.seconds + second.seconds)
    assert clock.at([first.ended, first.ended + 3600, second.began]).tolist() == pytest.approx([first.seconds] * 3)
    assert clock.borders == [pytest.approx(first.seconds)]
    edges, values = speeds(run, clock)
    assert float((values * np.diff(edges)).sum()) == pytest.approx(200)
