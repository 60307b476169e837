"""The ledger: a bill of real runs that adds up, and survives whoever is killed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from raypd.billing.book import Book
from raypd.cluster import ledger_actor
from raypd.dataset import writer
from raypd.report.status import Watch
from raypd.run.records import Bill, CardUse, WorkerTime
from tests.faults.trial import Trial
from tests.processes import LONG, children, end_all, ended, start, wait_for
from tests.runs import says


def trial(folder: Path, units: int = 16, titles: Sequence[str] = (), **cost: Any) -> Trial:
    """A run of model: fake with two workers: units of 10 documents, each about half a second.
    titles: what each unit does at its first document, as tests/cluster/fakes.py reads it.
    """
    titles = [title for first in titles for title in (first, *["a product"] * 9)] or [
        "a product"
    ] * 10 * units
    model = {"name": "fake", "fake": {"load_seconds": 0.5, "step_seconds": 0.1}}
    cluster = {"min_workers": 2, "max_workers": 2, "cpus_per_worker": 0.5}
    return Trial(
        folder, titles, model=model, cluster=cluster, cost={"prices": {"local": 36.0}, **cost}
    )


def begin(run: Trial, *changes: str) -> subprocess.Popen[str]:
    return start("-m", "raypd", "extract", str(run.file), *changes)


def ledger_process(driver: subprocess.Popen[str], but: Sequence[int] = ()) -> psutil.Process:
    """The process of a driver's ledger, once there is one besides those that were."""

    def look():
        return [p for p in children(driver.pid, "ray::Ledger") if p.pid not in but]

    return wait_for(look, "no ledger")[0]


def files(tmp_path: Path) -> list[dict[str, Any]]:
    return sorted(
        (json.loads(p.read_text()) for p in tmp_path.glob("out/ledger/*.json")),
        key=lambda t: t["began"],
    )


def check_sums(tree: dict[str, Any]) -> None:
    """All of the bill adds up to the cent, and better."""
    assert sum(node["usd"] for node in tree["nodes"]) == pytest.approx(tree["usd"], abs=1e-9)
    assert sum(tree["parts"].values()) == pytest.approx(tree["usd"], abs=1e-9)
    if tree["categories"]:
        assert sum(own["usd"] for own in tree["categories"].values()) == pytest.approx(
            tree["usd"], abs=1e-9
        )
        assert (
            sum(own["documents"] for own in tree["categories"].values())
            == tree["totals"]["documents"]
        )
    for worker in tree["workers"]:
        assert all(
            a[1] <= b[0] + 1e-3 for a, b in zip(worker["spans"], worker["spans"][1:], strict=False)
        )


def test_a_driver_that_does_not_answer_is_said_once() -> None:
    ledger = object.__new__(ledger_actor.Ledger)
    ledger.book = Book(Bill("s", 100.0, 0.0))
    ledger._heard = {}
    ledger._starts = 0
    for number, gpus in enumerate((0.0, 1.0, 1.0)):
        ledger.report(WorkerTime(f"w{number}", "n", 100.0, gpus=gpus), (0, 0))
        assert ["NVML" in note for note in ledger.book.last.notes] == [True] * min(1, number)
    ledger.report(WorkerTime("w0", "n", 100.0, sequence=9, gpus=1.0, cards=CardUse(1)), (0, 0))
    assert len(ledger.book.last.notes) == 1


def test_a_ledger_waits_for_storage_and_ends_though_its_bill_cannot_be_written(monkeypatch) -> None:
    monkeypatch.setattr(ledger_actor, "_ROUND_SECONDS", 0.0)
    monkeypatch.setattr(ledger_actor.read, "record", Mock(side_effect=[OSError("away"), None]))
    assert ledger_actor._kept("out", "s") is None
    monkeypatch.setattr(ledger_actor, "ray", there := Mock(get=Mock(side_effect=OSError("away"))))
    ledger_actor.close(handle := Mock())
    there.kill.assert_called_once_with(handle)


def check_rows(run: Trial) -> None:
    found = run.outcome("")
    assert (found.lost, found.doubled) == (0, 0)


@pytest.mark.slow
def test_two_runs_on_an_ec2_node_share_its_price(tmp_path, monkeypatch) -> None:
    """What infra/docker/node-environment.sh sets reaches the bill, and a time with two ledgers is
    paid by halves.
    """
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
    ray.shutdown()  # that of other tests, whose environment is another
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        began = time.time()
        output = str(tmp_path / "out")
        handles = [
            ledger_actor.start(config, output, name, began, 1.0, 0.0) for name in ("one", "two")
        ]
        standings = ray.get([handle.standing.remote() for handle in handles])
        # When the first has looked again, and sees the second.
        halves = pytest.approx([30.13118 / 3600 / 2] * 2)
        wait_for(
            lambda: (
                [ray.get(handle.standing.remote()).usd_per_second for handle in handles] == halves
            )
        )
        for handle in handles:
            ledger_actor.close(handle)
    finally:
        ray.shutdown()
    assert standings[0].unpriced is None
    for tree in files(tmp_path):
        assert tree["final"]
        (node,) = tree["nodes"]
        assert (node["instance_type"], node["market"], node["region"]) == (
            "g6e.48xlarge",
            "spot",
            "us-west-2",
        )
        assert (node["usd_per_hour"], node["slots"], node["head"]) == (30.13118, 2, True)
        assert "no spot price is known" in node["price_source"]
        assert tree["shares"][0][1] == 2
        assert "share" in tree["notes"][0]
        assert tree["usd"] < node["seconds"] * 30.13118 / 3600
        assert tree["parts"]["head"] == tree["usd"]  # no worker came
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
    assert (
        min(tree["parts"]["startup"], tree["parts"]["decode"])
        > tree["parts"]["lost"]
        == tree["parts"]["head"]
        == 0
    )
    # 20 steps of 0.1 s at the very least.
    assert tree["seconds"]["decode"] + tree["seconds"]["prefill"] > 2
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["cost"]["usd"] == tree["usd"]
    assert manifest["decode_tokens"] == tree["totals"]["decode_tokens"]
    says(out, "cost:   $", "per 1,000 documents")
    summaries = [
        writer.read_summary(str(tmp_path / "out"), u)
        for u in writer.committed(str(tmp_path / "out"))
    ]
    assert {s.worker for s in summaries} == {worker["worker"] for worker in tree["workers"]}
    assert all(s.busy_seconds > 0 and s.began > tree["began"] for s in summaries)


@pytest.mark.slow
def test_a_killed_ledger_goes_on_from_its_file(tmp_path) -> None:
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
    assert (tree["final"], tree["totals"]["documents"]) == (True, 180)
    # No time is missing and none is there twice: two workers were on the node from their start to
    # their last report, in which a second of doing nothing may be missing yet.
    assert len(tree["workers"]) == 2
    for worker in tree["workers"]:
        lived = worker["heard"] - worker["began"]
        assert lived - 1.01 < sum(worker["seconds"].values()) < lived + 0.01
    assert tree["usd"] == pytest.approx((tree["until"] - tree["nodes"][0]["began"]) / 100, abs=1e-5)


@pytest.mark.slow
def test_what_a_killed_worker_had_in_flight_is_lost(tmp_path) -> None:
    run = trial(tmp_path, titles=["until killed"] * 8)
    driver = run.start()

    def reported() -> dict[str, Any] | None:
        workers = [worker for tree in files(tmp_path) for worker in tree["workers"]]
        return next(
            (
                worker
                for worker in workers
                if sum(sum(busy) for busy in worker["open"].values()) > 0
            ),
            None,
        )

    killed = wait_for(reported, "no report of what is in flight")
    os.kill(killed["pid"], signal.SIGKILL)
    wait_for(
        lambda: sum(len(tree["workers"]) for tree in files(tmp_path)) == 3, "nobody in its place"
    )
    run.go("killed")
    ended(driver)
    check_rows(run)
    (tree,) = files(tmp_path)
    check_sums(tree)
    assert (tree["totals"]["documents"], len(tree["workers"])) == (80, 3)
    (lost,) = (worker for worker in tree["workers"] if worker["open"])
    assert lost["pid"] == killed["pid"]
    seconds = sum(map(sum, lost["open"].values()))
    assert seconds >= sum(map(sum, killed["open"].values())) > 0
    assert tree["seconds"]["lost"] == pytest.approx(seconds, abs=0.01)
    assert tree["parts"]["lost"] > 0


@pytest.mark.slow
def test_a_killed_driver_stops_the_bill_and_the_next_session_adds_to_it(tmp_path) -> None:
    run = trial(tmp_path, titles=[*["a product"] * 8, *["until again"] * 4])
    driver = run.start()
    actor = ledger_process(driver)
    # A session that commits has a bill by then, though its workers' reports may be lost.
    run.wait(1)
    driver.kill()
    driver.wait()
    psutil.wait_procs([actor], timeout=LONG)
    assert not actor.is_running()
    (left,) = files(tmp_path)
    assert not left["final"]
    end_all()  # Ray's own, which outlive a driver that was killed
    run.go("again")
    run.finish()
    check_rows(run)
    first, second = files(tmp_path)
    assert first["usd"] == left["usd"]  # nobody billed on
    assert first["totals"]["documents"] + second["totals"]["documents"] == 120
    check_sums(first)
    check_sums(second)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["cost"]["sessions"] == 2
    assert manifest["cost"]["usd"] == pytest.approx(first["usd"] + second["usd"])
    assert manifest["cost"]["documents"] == manifest["documents"] == 120
    shown = Watch(str(tmp_path / "out")).look()  # the same price as the manifest's
    assert (shown.documents, shown.usd) == (120, pytest.approx(manifest["cost"]["usd"]))
