"""Whole runs on a real local Ray with a fake engine: after any fault, each document has one row."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from raypd import storage
from raypd.cluster import accounts, driver
from raypd.cluster.worker_pool import Tick, UnitEnded
from raypd.errors import ConfigError, InputError, RunError
from raypd.run import ReadingRecord, layout, read
from raypd.run.console import signals
from raypd.run.unit import UnitResult
from tests.cluster import fakes
from tests.cluster.test_ledger_actor import check_sums
from tests.faults.trial import Trial, kill
from tests.processes import LONG, ended
from tests.runs import run_here, says, with_keys, write_jsonl


def test_a_run_resumes_with_new_input_and_refuses_another_configuration(
    tmp_path, config, ray_here, capsys
) -> None:
    path = str(write_jsonl(tmp_path / "in/a.jsonl", ["a"] * 23 + ["finish", ""]).parent)
    run = with_keys(config(path, max_workers=4), cost={"deadline": "1h"})
    other = config(path, id_column=None)
    result = driver.run_extract(run, build=fakes.build)
    assert sorted(map(int, pq.read_table(tmp_path / "out/units")["id"].to_pylist())) == [*range(25)]
    assert result.documents == 25
    assert result.ok == 22
    assert result.failed == 3
    assert result.units == 3
    tree = json.loads((tmp_path / "out/manifest.json").read_text())
    assert tree["fingerprint"] == run.fingerprint()
    assert tree["prefill_tokens"] == 120
    assert set(tree["versions"]) == {"raypd", "python", "torch", "transformers", "ray", "pyarrow"}
    assert [session["how"] for session in tree["sessions"]] == ["complete"]
    assert tree["config"]["input"]["text_columns"] == ["title"]
    (bill,) = (json.loads(path.read_text()) for path in (tmp_path / "out/ledger").iterdir())
    # One worker is enough for the deadline.
    assert len(bill["workers"]) == 1

    def never(*_):
        return pytest.fail("a worker was built")

    assert "already complete" not in capsys.readouterr().err
    assert driver.run_extract(run, build=never).documents == 25
    assert capsys.readouterr().err.startswith(
        f"{tmp_path / 'out'}: already complete, so nothing was done"
    )
    [first_session] = (tmp_path / "out/sessions").iterdir()
    # Sessions are ordered by time, whatever their names.
    first_session.rename(first_session.with_name("z.json"))
    write_jsonl(tmp_path / "in/b.jsonl", ["a"] * 3)
    result = driver.run_extract(run, build=fakes.build)
    assert result.documents == 28
    assert result.units == 4
    assert [session.documents for session in result.sessions] == [25, 3]
    with pytest.raises(ConfigError) as caught:
        driver.run_extract(other, build=never)
    says(
        caught.value,
        run.fingerprint(),
        other.fingerprint(),
        "input.id_column",
        "another output.path",
    )
    began = f"cluster.unit_documents={run.cluster.unit_documents}"
    with pytest.raises(ConfigError) as caught:
        driver.run_extract(config(path, unit_documents=2), build=never)
    says(
        caught.value,
        f"cluster.unit_documents is 2 now, but the run began with {began}",
        f"To resume, set {began}, or choose another output.path",
    )
    write_jsonl(tmp_path / "in/a.jsonl", ["b"] * 5)
    with pytest.raises(ConfigError, match=r"a\.jsonl was replaced"):
        driver.run_extract(run, build=never)


def test_a_run_ends_early_if_too_many_documents_fail(tmp_path, config, ray_here) -> None:
    # In the first half, four of ten documents have no text.
    titles = ([""] * 4 + ["a"] * 6) * 10 + ["a"] * 100
    keys = {"max_failed_share": 0.3, "units_in_flight": 1}
    with pytest.raises(RunError) as caught:
        driver.run_extract(
            config(str(write_jsonl(tmp_path / "a.jsonl", titles)), **keys), build=fakes.build
        )
    says(
        caught.value,
        "have failed",
        "no text in title",
        "is 0.3",
        "--retry-errors",
        "units committed",
    )
    assert 100 <= pq.read_table(tmp_path / "out/units").num_rows < 200


@pytest.mark.slow
@pytest.mark.ci
def test_workers_that_a_deadline_no_longer_needs_end_while_they_are_busy(
    tmp_path, config, ray_here, monkeypatch
) -> None:
    """Three workers are wanted until 12 units are done, then one; each worker is always busy."""
    wanted = []

    def need(documents: int, **_: Any) -> tuple[int, float]:
        wanted.append(3 if documents > 240 else 1)
        return wanted[-1], 1.0

    monkeypatch.setattr(accounts.budget, "need", need)
    monkeypatch.setattr(accounts, "_RETHINK_SECONDS", 0.5)
    path = str(write_jsonl(tmp_path / "a.jsonl", ["sleep 0.05"] * 360))
    run = config(path, max_workers=3, max_num_seqs=1)
    run = with_keys(run, cost={"deadline": "1h", "prices": {"local": 36.0}})
    assert driver.run_extract(run, build=fakes.build).ok == 360
    assert {3, 1} <= set(wanted)
    (bill,) = (json.loads(path.read_text()) for path in (tmp_path / "out/ledger").iterdir())
    # On a busy machine the third one may not start in time.
    assert len(bill["workers"]) in (2, 3)
    lives = sorted(worker["heard"] - worker["began"] for worker in bill["workers"])
    committed = sorted(worker["ok"] for worker in bill["workers"])
    assert sum(committed) == 360
    # The one that stays does most of the rest; the others have long ended by then.
    assert committed[-1] > 150
    ends = sorted(worker["heard"] for worker in bill["workers"])
    assert bill["until"] - ends[-2] > 5, lives
    assert bill["parts"]["lost"] == 0
    check_sums(bill)


@pytest.mark.parametrize(
    ("failed", "documents", "allowed_share", "ends"),
    [
        (31, 100, 0.3, True),
        (30, 100, 0.3, False),
        (99, 99, 0.3, False),  # too few to judge
        (100, 100, 1.0, True),
        (99, 100, 1.0, False),
    ],
)
def test_a_run_ends_once_more_documents_have_failed_than_are_allowed(
    config, monkeypatch, failed, documents, allowed_share, ends
) -> None:
    session = SimpleNamespace(config=config("x", max_failed_share=allowed_share), output="out")
    session.failed_documents = failed
    session.answered_documents = documents
    errors = pa.table({"error": [None, "no text in title"]})
    monkeypatch.setattr(driver.writer, "read_table", lambda *_: (None, errors))
    unit = SimpleNamespace(id="u")
    if ends:
        with pytest.raises(RunError, match="have failed"):
            driver.DriverSession._check_failed(session, unit)
    else:
        driver.DriverSession._check_failed(session, unit)


def test_a_run_whose_last_unit_has_ended_does_not_fail_for_its_budget() -> None:

    def events(*_):
        yield UnitEnded(Mock(), UnitResult(ok=10))
        yield Tick(0, 0, 1)

    session = Mock(lease=Mock(lost=None))
    accounts = Mock(look=Mock(side_effect=RunError("cost.budget_usd is reached")))
    driver.DriverSession._run(session, Mock(run=events), accounts, iter(()), 1)
    assert accounts.ended.call_count == 1


def test_units_that_workers_had_to_read_are_recorded_even_if_the_readers_delivered_none(
    tmp_path,
) -> None:
    session = SimpleNamespace(lease=SimpleNamespace(id="s"), output=str(tmp_path))
    pool = SimpleNamespace(reading=ReadingRecord(), read_by_workers=Counter({"lost": 3}))
    driver.DriverSession._record_reading(session, pool)
    (record,) = read.readings([str(tmp_path)], ["s"])
    assert record.units == 0
    assert record.read_by_workers == {"lost": 3}
    # A run without readers has nothing to record.
    session.lease.id = "without readers"
    pool.read_by_workers.clear()
    driver.DriverSession._record_reading(session, pool)
    assert read.readings([str(tmp_path)], ["without readers"]) == []


def test_a_run_that_committed_nothing_may_be_restarted_with_another_configuration(
    tmp_path, config, ray_here, capsys
):
    run = config(str(write_jsonl(tmp_path / "a.jsonl", ["a"] * 30)))
    with pytest.raises(RunError, match=r"(?s)ZeroDivisionError.*0 of 3 units committed"):
        driver.run_extract(run, build=lambda *_: 1 // 0)
    changed = with_keys(run, input={"id_column": None})
    for _ in range(2):
        assert driver.run_extract(changed, build=fakes.build).documents == 30
    assert "another configuration that had committed nothing" in capsys.readouterr().err
    assert driver.writer.committed(changed.output.path) == {
        unit.id for unit in driver.planner.plan(changed)
    }
    assert (tmp_path / "out/run.json").stat().st_mode & 0o77 == 0


def test_a_run_survives_kills_of_a_worker_and_of_the_driver_and_a_sigterm(
    tmp_path, ray_here
) -> None:
    """From the third on, each unit waits for a file, so that no session ends before its fault."""
    titles = [["a"] * 2, ["until one"] * 3, ["until two"] * 3, ["until three"] * 4]
    lines = [title for part in titles for first in part for title in (first, *["a"] * 9)]
    run = Trial(tmp_path, lines, cluster={"address": ray.get_runtime_context().gcs_address})
    first = run.start()
    run.wait(2)
    os.kill(run.worker(), signal.SIGKILL)
    run.go("one")
    # Another worker continues.
    run.wait(5)
    kill(first)
    second = run.start()
    run.go("two")
    run.wait(8)
    second.send_signal(signal.SIGTERM)
    out, err = second.communicate(timeout=LONG)
    assert second.returncode == 130
    state = re.fullmatch(
        r"interrupted: (\d+) of 12 units committed; run the same command again to resume",
        err.splitlines()[-1],
    )
    assert state, err
    # The driver may not have received the last result yet.
    assert int(state[1]) in (7, 8)
    assert "Traceback" not in err + out
    # Ray's own handler would print this.
    assert "SIGTERM received" not in err + out
    third = run.start()
    run.go("three")
    assert "documents=120 ok=120 failed=0" in ended(third)
    outcome = run.outcome("")
    assert outcome.rows == 120
    assert outcome.lost == 0
    assert outcome.doubled == 0
    tree = json.loads((tmp_path / "out/manifest.json").read_text())
    assert [session["how"] for session in tree["sessions"]] == ["killed", "interrupted", "complete"]
    # A worker may commit a unit shortly after its driver was killed.
    assert sum(session["documents"] for session in tree["sessions"]) == 120
    assert tree["sessions"][2]["documents"] == 40
    assert not [name for name in os.listdir(tmp_path / "out/units") if name.startswith(".tmp")]


def test_an_interrupted_run_says_whether_something_is_kept(config) -> None:
    run = config("in.jsonl")
    session = driver.DriverSession.__new__(driver.DriverSession)
    session.config = with_keys(run, cluster={"unit_documents": 7})
    session.units, session.done_units = 3, 0
    assert session.kept() == (
        "0 of 3 units committed, so nothing is saved yet, and the same command starts from "
        "the beginning. A unit has up to 7 documents; with a smaller cluster.unit_documents the "
        "first answers are saved sooner"
    )
    session.done_units = 2
    assert session.kept() == "2 of 3 units committed; run the same command again to resume"


@pytest.mark.parametrize(("values", "recorded"), [(70, 70), (None, 0)])
def test_a_run_records_the_calibration_with_which_it_began(
    tmp_path, config, monkeypatch, values, recorded
) -> None:
    calibration = None if values is None else SimpleNamespace(values=values)
    monkeypatch.setattr(driver, "calibration_of", lambda *_: calibration)

    def no_workers(*_: Any, **__: Any) -> None:
        raise RunError("no workers here")

    monkeypatch.setattr(driver, "held", no_workers)
    path = write_jsonl(tmp_path / "a.jsonl", ["a"] * 3)
    with pytest.raises(RunError, match="no workers here"):
        driver.run_extract(config(str(path)), build=fakes.build)
    run = json.loads((tmp_path / "out/run.json").read_text())
    assert run["calibrated_on"] == recorded


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_interrupt_the_clean_up(first) -> None:

    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before = handlers()
    closed = contextlib.ExitStack()
    closed.callback(signal.raise_signal, signal.SIGINT)
    # The outer block is that of a fit, the inner one that of a run.
    with pytest.raises(KeyboardInterrupt), signals(), signals(), closed:
        signal.raise_signal(first)
    assert handlers() == before


def test_units_that_another_session_committed_meanwhile_are_not_processed_again(
    tmp_path, config, monkeypatch
) -> None:
    run = config(str(write_jsonl(tmp_path / "in.jsonl", ["a"] * 25)))
    real = driver.held

    def after_the_other(output, say):
        run_here(with_keys(run, output={"partition": {"date": "1"}}), fakes.build)
        return real(output, say)

    monkeypatch.setattr(driver, "held", after_the_other)
    monkeypatch.setattr(
        driver.DriverSession, "stream", lambda *_: pytest.fail("units are done again")
    )
    result = driver.run_extract(
        with_keys(run, output={"partition": {"date": "2"}}), build=fakes.build
    )
    assert result.documents == 25
    assert result.units == 3


def test_the_relative_output_of_a_submitted_job_is_outside_its_temporary_copy(
    tmp_path, config, monkeypatch
) -> None:
    copy = tmp_path / "runtime_resources/working_dir_files/_ray_pkg_0123"
    copy.mkdir(parents=True)
    run = with_keys(config("a.jsonl"), output={"path": "runs/x"})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert layout.output_folder(run) == str(tmp_path / "runs/x")
    monkeypatch.chdir(copy)
    assert layout.output_folder(run) == str(tmp_path / "raypd/runs/x")


def test_a_submitted_job_without_its_input_says_where_it_looks(
    tmp_path, config, monkeypatch
) -> None:
    copy = tmp_path / "_ray_pkg_0123"
    (copy / "configs").mkdir(parents=True)
    (copy / "offers.yaml").write_text("input: {path: ../offers.csv}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"no such file or folder$"):
        next(storage.find("offers.csv"))
    monkeypatch.chdir(copy)
    for path in ("configs/../offers.csv", "offers-*.csv"):
        with pytest.raises(InputError, match=r"\. This job runs in a copy of the folder") as caught:
            next(storage.find(path))
        assert "a path that all nodes share" in str(caught.value)
        assert "did you mean" not in str(caught.value)
    (copy / "offer.csv").touch()
    with pytest.raises(InputError, match=r"did you mean .*/offer.csv\?\. This job runs in a copy"):
        next(storage.find("offers.csv"))
    with pytest.raises(InputError, match=r"\. This job runs on a node of the cluster, which lacks"):
        next(storage.find("/nowhere/offers.csv"))


@pytest.mark.parametrize(
    ("wanted", "there", "is_offered"),
    [
        ("offers.csv", "offers.yaml", False),
        ("offers", "offers.yaml", False),
        ("nowhere.csv", "answers.csv", False),
        ("offers.csv", "offers.py", False),
        ("offers.csv", "offer.csv", True),
        ("offers.json", "offers.jsonl", True),
        ("offers.csv", "offers.csv.gz", True),
        ("offers", "offers.csv", True),
        ("schema.yaml", "schemas.yaml", True),
    ],
)
def test_no_file_of_another_kind_is_offered_for_one_that_is_missing(
    tmp_path, wanted, there, is_offered
) -> None:
    (tmp_path / there).touch()
    with pytest.raises(InputError, match="no such file or folder") as caught:
        next(storage.find(str(tmp_path / wanted)))
    assert (f"; did you mean {tmp_path / there}?" in str(caught.value)) == is_offered
