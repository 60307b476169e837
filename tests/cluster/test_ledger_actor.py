"""The ledger: the bills of real runs add up and survive the death of every process."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from raypd.billing.bill import Bill
from raypd.billing.book import Book
from raypd.billing.meter import WorkerTime
from raypd.cluster import ledger_actor
from raypd.dataset import summaries
from raypd.report.status import Watch
from raypd.run.usage import GpuUse
from tests.faults.trial import Trial
from tests.processes import LONG, children, end_all, ended, start, wait_for
from tests.runs import says


def trial(folder: Path, units: int = 16, titles: Sequence[str] = (), **cost: Any) -> Trial:
    """Prepare a run of the fake model with two workers and units of 10 documents, 0.5 s each.

    Args:
        folder: The folder of the run.
        units: The number of units, if no titles are given.
        titles: The first title of each unit, a command as tests/cluster/fakes.py reads it.
        cost: The section `cost` of the configuration.
    """
    first_titles = list(titles) or ["a product"] * units
    documents = []
    for title in first_titles:
        documents += [title, *["a product"] * 9]
    model = {"name": "fake", "fake": {"load_seconds": 0.5, "step_seconds": 0.1}}
    cluster = {"min_workers": 2, "max_workers": 2, "cpus_per_worker": 0.5}
    return Trial(
        folder, documents, model=model, cluster=cluster, cost={"prices": {"local": 36.0}, **cost}
    )


def begin(run: Trial, *changes: str) -> subprocess.Popen[str]:
    return start("-m", "raypd", "extract", str(run.file), *changes)


def ledger_process(
    driver: subprocess.Popen[str], earlier_pids: Sequence[int] = ()
) -> psutil.Process:
    """Wait for a ledger of the driver with a new process id."""

    def new_ledgers():
        ledgers = children(driver.pid, "ray::Ledger")
        return [process for process in ledgers if process.pid not in earlier_pids]

    return wait_for(new_ledgers, "no ledger")[0]


def files(tmp_path: Path) -> list[dict[str, Any]]:
    """Read the files of all bills, oldest first."""
    trees = [json.loads(path.read_text()) for path in tmp_path.glob("out/ledger/*.json")]
    return sorted(trees, key=lambda tree: tree["began"])


def check_sums(tree: dict[str, Any]) -> None:
    """Check that nodes, parts and categories add up to the bill, and that spans do not overlap."""
    assert sum(node["usd"] for node in tree["nodes"]) == pytest.approx(tree["usd"], abs=1e-9)
    assert sum(tree["parts"].values()) == pytest.approx(tree["usd"], abs=1e-9)
    if tree["categories"]:
        assert sum(row["usd"] for row in tree["categories"]) == pytest.approx(tree["usd"], abs=1e-9)
        assert sum(row["documents"] for row in tree["categories"]) == tree["totals"]["documents"]
    for worker in tree["workers"]:
        for span, next_span in pairwise(worker["spans"]):
            assert span[1] <= next_span[0] + 1e-3


def test_a_bill_notes_once_that_nvml_does_not_answer() -> None:
    ledger = object.__new__(ledger_actor.Ledger)
    ledger.book = Book(Bill("s", 100.0, 0.0))
    ledger.report(WorkerTime("without GPU", "n", 100.0))
    assert ledger.book.last.notes == []
    for name in ("first", "second"):
        ledger.report(WorkerTime(name, "n", 100.0, gpus=1.0))
        (note,) = ledger.book.last.notes
        assert "NVML" in note
    ledger.report(
        WorkerTime(
            "third",
            "n",
            100.0,
            gpus=1.0,
            gpu_use=GpuUse(1),
        )
    )
    assert len(ledger.book.last.notes) == 1


def test_a_ledger_waits_for_storage_to_read_its_file(monkeypatch) -> None:
    monkeypatch.setattr(ledger_actor, "_ROUND_SECONDS", 0.0)
    monkeypatch.setattr(ledger_actor.read, "record", Mock(side_effect=[OSError("away"), None]))
    assert ledger_actor._stored_bill("out", "s") is None


def test_a_ledger_that_cannot_write_its_bill_is_ended_all_the_same(monkeypatch) -> None:
    fake_ray = Mock(get=Mock(side_effect=OSError("away")))
    monkeypatch.setattr(ledger_actor, "ray", fake_ray)
    handle = Mock()
    ledger_actor.close(handle)
    fake_ray.kill.assert_called_once_with(handle)


def check_rows(run: Trial) -> None:
    outcome = run.outcome("")
    assert outcome.lost == 0
    assert outcome.doubled == 0


@pytest.mark.slow
def test_two_runs_on_an_ec2_node_share_its_price(tmp_path, monkeypatch) -> None:
    """The variables that infra/docker/node-environment.sh sets reach the bill."""
    import ray

    monkeypatch.setenv("RAYPD_PRICES", str(tmp_path / "prices.json"))
    node = {
        "CLOUD_INSTANCE_TYPE_NAME": "g6e.48xlarge",
        "NODE_MARKET_TYPE": "spot",
        "NODE_REGION": "us-west-2",
    }
    for name, value in {**node, "NODE_ZONE": "us-west-2b"}.items():
        monkeypatch.setenv(f"RAY_{name}", value)
    config = trial(tmp_path, prices={}).config
    # The Ray of other tests has another environment.
    ray.shutdown()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        began = time.time()
        output = str(tmp_path / "out")
        handles = [
            ledger_actor.start(config, output, name, began, 1.0, 0.0) for name in ("one", "two")
        ]
        standings = ray.get([handle.standing.remote() for handle in handles])
        halves = pytest.approx([30.13118 / 3600 / 2] * 2)

        def each_pays_half() -> bool:
            looks = ray.get([handle.standing.remote() for handle in handles])
            return [standing.usd_per_second for standing in looks] == halves

        # The first ledger sees the second when it looks again.
        wait_for(each_pays_half)
        for handle in handles:
            ledger_actor.close(handle)
    finally:
        ray.shutdown()
    assert standings[0].unpriced is None
    for tree in files(tmp_path):
        assert tree["final"]
        (node,) = tree["nodes"]
        assert node["instance_type"] == "g6e.48xlarge"
        assert node["market"] == "spot"
        assert node["region"] == "us-west-2"
        assert node["usd_per_hour"] == 30.13118
        assert node["slots"] == 2
        assert node["head"]
        assert "no spot price is known" in node["price_source"]
        assert tree["shares"][0][1] == 2
        assert "share" in tree["notes"][0]
        assert tree["usd"] < node["seconds"] * 30.13118 / 3600
        # There was no worker.
        assert tree["parts"]["head"] == tree["usd"]
    assert len(files(tmp_path)) == 2


@pytest.mark.slow
def test_a_run_has_a_bill_that_adds_up(tmp_path) -> None:
    run = trial(tmp_path, units=8)
    out = ended(begin(run))
    check_rows(run)
    (tree,) = files(tmp_path)
    check_sums(tree)
    assert tree["final"]
    assert [tree["totals"][name] for name in ("documents", "ok", "failed")] == [80, 80, 0]
    (node,) = tree["nodes"]
    assert node["usd"] == pytest.approx(node["seconds"] * 36 / 3600, abs=1e-5)
    assert tree["began"] <= node["began"] < tree["until"]
    assert tree["parts"]["startup"] > 0
    assert tree["parts"]["decode"] > 0
    assert tree["parts"]["lost"] == 0
    assert tree["parts"]["head"] == 0
    # At least 20 steps of 0.1 s.
    assert tree["seconds"]["decode"] + tree["seconds"]["prefill"] > 2
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["cost"]["usd"] == tree["usd"]
    assert manifest["decode_tokens"] == tree["totals"]["decode_tokens"]
    says(out, "cost:   $", "per 1,000 documents")
    units = summaries.some(str(tmp_path / "out"), 100)
    workers = {worker["worker"] for worker in tree["workers"]}
    assert {summary.worker for summary in units} == workers
    for summary in units:
        assert summary.busy_seconds > 0
        assert summary.began > tree["began"]


@pytest.mark.slow
def test_a_killed_ledger_resumes_from_its_file(tmp_path) -> None:
    run = trial(tmp_path, titles=[*["a product"] * 4, *["until one"] * 6, *["until two"] * 8])
    driver = run.start()
    killed: list[int] = []
    for committed, name in ((4, "one"), (10, "two")):
        run.wait(committed)
        process = ledger_process(driver, killed)
        process.kill()
        killed.append(process.pid)
        ledger_process(driver, killed)
        run.go(name)
    ended(driver)
    check_rows(run)
    (tree,) = files(tmp_path)
    check_sums(tree)
    assert tree["final"]
    assert tree["totals"]["documents"] == 180
    # Neither worker misses time or has it twice, except for up to a second of idle time that the
    # last report may not contain yet.
    assert len(tree["workers"]) == 2
    for worker in tree["workers"]:
        lived = worker["heard"] - worker["began"]
        assert lived - 1.01 < sum(worker["seconds"].values()) < lived + 0.01
    assert tree["usd"] == pytest.approx((tree["until"] - tree["nodes"][0]["began"]) / 100, abs=1e-5)


@pytest.mark.slow
def test_the_time_of_a_killed_workers_units_in_flight_is_lost(tmp_path) -> None:
    run = trial(tmp_path, titles=["until killed"] * 8)
    driver = run.start()

    def reported() -> dict[str, Any] | None:
        """Return a worker whose report has busy time of a unit in flight."""
        for tree in files(tmp_path):
            for worker in tree["workers"]:
                if sum(map(sum, worker["open"].values())) > 0:
                    return worker
        return None

    killed = wait_for(reported, "no report of what is in flight")
    os.kill(killed["pid"], signal.SIGKILL)

    def is_replaced() -> bool:
        return sum(len(tree["workers"]) for tree in files(tmp_path)) == 3

    wait_for(is_replaced, "the worker was not replaced")
    run.go("killed")
    ended(driver)
    check_rows(run)
    (tree,) = files(tmp_path)
    check_sums(tree)
    assert tree["totals"]["documents"] == 80
    assert len(tree["workers"]) == 3
    (lost,) = (worker for worker in tree["workers"] if worker["open"])
    assert lost["pid"] == killed["pid"]
    seconds = sum(map(sum, lost["open"].values()))
    assert seconds >= sum(map(sum, killed["open"].values()))
    assert tree["seconds"]["lost"] == pytest.approx(seconds, abs=0.01)
    assert tree["parts"]["lost"] > 0


@pytest.mark.slow
def test_a_killed_driver_stops_the_bill_and_the_next_session_adds_to_it(tmp_path) -> None:
    run = trial(tmp_path, titles=[*["a product"] * 8, *["until again"] * 4])
    driver = run.start()
    actor = ledger_process(driver)
    # A session that has committed a unit has a bill, even if its workers' reports are lost.
    run.wait(1)
    driver.kill()
    driver.wait()
    psutil.wait_procs([actor], timeout=LONG)
    assert not actor.is_running()
    (left,) = files(tmp_path)
    assert not left["final"]
    # Processes of Ray outlive a driver that was killed.
    end_all()
    run.go("again")
    run.finish()
    check_rows(run)
    first, second = files(tmp_path)
    # The bill did not grow after the kill.
    assert first["usd"] == left["usd"]
    assert first["totals"]["documents"] + second["totals"]["documents"] == 120
    check_sums(first)
    check_sums(second)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["cost"]["sessions"] == 2
    assert manifest["cost"]["usd"] == pytest.approx(first["usd"] + second["usd"])
    assert manifest["cost"]["documents"] == manifest["documents"] == 120
    shown = Watch(str(tmp_path / "out")).look()
    assert shown.documents == 120
    assert shown.usd == pytest.approx(manifest["cost"]["usd"])
