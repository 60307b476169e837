"""The ledger: what workers measure, what the book makes of it, and a bill that survives whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypd.billing import book
from raypd.billing.book import Book
from raypd.billing.meter import Meter, coarser, joined, zero
from raypd.cluster import ledger_actor
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.run.records import Bill, NodeTime, Seconds, Spans, UnitSummary, WorkerTime, from_json, to_json
from tests.processes import LONG, end_all, ended, start, wait_for

# ------------------------------------------------------------------------------------------------------------- meter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Steps that take the seconds and feed the tokens that it is told."""

    def __init__(self, clock: Clock, steps: list[tuple[float, int, int]]) -> None:
        self.clock, self.steps, self.sequences = clock, steps, [SimpleNamespace(counts=counts())]

    def step(self) -> list[Any]:
        seconds, prefill, decode = self.steps.pop(0)
        self.clock.now += seconds
        row = self.sequences[0].counts
        row.prefill_tokens += prefill
        row.decode_tokens += decode
        return []


def counts(prefill: int = 0, decode: int = 0) -> SimpleNamespace:
    return SimpleNamespace(prefill_tokens=prefill, shared_tokens=0, decode_tokens=decode)


def test_a_worker_s_time_is_startup_busy_and_idle_without_a_gap() -> None:
    clock = Clock()
    meter = Meter("n", "hyper_parallel", clock=clock)
    clock.now += 10
    meter.ready()
    clock.now += 2
    engine = Engine(clock, [(4.0, 300, 100), (1.0, 0, 50), (1.0, 0, 0)])
    meter.begin("u")
    meter.begin("v")
    meter.step(engine, {"u": 3, "v": 1})  # 3 s of prefill, 1 s of decoding
    meter.step(engine, {"u": 1})  # all of it decoding
    clock.now += 0.01  # a pause that belongs to the steps
    meter.step(engine, {"u": 1})  # nothing was fed: as the one before
    report = meter.report()
    assert vars(report.seconds) == pytest.approx(
        {"startup": 10, "prefill": 3, "decode": 3.01, "idle": 2, "lost": 0}, abs=1e-6
    )
    assert report.open == {"u": pytest.approx((2.25, 0.75 + 2.01)), "v": pytest.approx((0.75, 0.25))}
    assert [(kind, unit) for _, _, kind, unit in report.spans] == [("startup", None), ("idle", None), ("busy", "u")]
    for (_, end, _, _), (began, _, _, _) in zip(report.spans, report.spans[1:], strict=False):
        assert end == began
    assert report.spans[-1][1] == clock.now


def test_a_step_that_runs_is_told_as_far_as_it_is() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    meter.ready()
    meter.begin("u")
    told = []

    class Slow(Engine):
        def step(self) -> list[Any]:
            clock.now += 3
            told.append(meter.report())
            return super().step()

    meter.step(Slow(clock, [(1.0, 10, 0)]), {"u": 1})
    assert told[0].seconds.busy == pytest.approx(3)
    assert sum(told[0].open["u"]) == pytest.approx(3)
    assert told[0].spans[-1][2:] == ("busy", "u")
    assert meter.report().seconds.busy == pytest.approx(4)  # not the three twice
    assert sum(meter.report().open["u"]) == pytest.approx(4)


def test_an_attempt_that_came_to_nothing_is_lost() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    meter.ready()
    meter.begin("u")
    meter.step(Engine(clock, [(2.0, 100, 300)]), {"u": 1})
    meter.lose("u")
    meter.lose("u")
    assert vars(meter.report().seconds) == pytest.approx(
        {"startup": 0, "prefill": 0, "decode": 0, "idle": 0, "lost": 2.0}
    )
    assert meter.report().open == {}


def test_a_unit_s_seconds_go_to_its_categories_by_tokens() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    meter.ready()
    meter.begin("u")
    meter.documents("u", ["a", "a", "b"])
    meter.step(Engine(clock, [(4.0, 100, 100)]), {"u": 3})
    meter.tokens("u", ["a"], counts(75, 10))
    meter.tokens("u", ["b"], counts(25, 90))
    done = meter.end("u")
    assert done.categories["a"]["seconds"] == pytest.approx(2 * 0.75 + 2 * 0.1)
    assert done.categories["b"]["seconds"] == pytest.approx(2 * 0.25 + 2 * 0.9)
    assert meter.report().ok == 0  # not before it is committed
    meter.commit("u", done, 2, 1)
    meter.lose("u")  # as the worker always does at the end
    report = meter.report()
    assert (report.ok, report.failed, report.seconds.lost) == (2, 1, 0)
    assert report.categories["a"]["documents"] == 2
    assert meter.end("w").categories == {}


def test_the_documents_of_one_prompt_share_its_tokens() -> None:
    meter = Meter()
    meter.begin("u")
    meter.tokens("u", ["a", "b", "b"], counts(7, 1))
    found = meter.end("u").categories
    assert [found[name]["prefill_tokens"] for name in "ab"] == [2, 5]
    assert [found[name]["decode_tokens"] for name in "ab"] == [0, 1]


def test_the_picture_of_a_worker_stays_small() -> None:
    spans: Spans = []
    for i in range(5000):
        spans = joined(spans, (i, i + 1.0, "busy" if i % 2 else "idle", None))
    assert len(spans) <= 120
    assert (spans[0][0], spans[-1][1]) == (0, 5000)
    assert len(coarser(spans)) == -(-len(spans) // 2)
    assert joined([(0, 1, "busy", "u")], (1, 2, "busy", "u")) == [(0, 2, "busy", "u")]


# -------------------------------------------------------------------------------------------------------------- book

NODE = NodeTime("n", 100.0, usd_per_hour=36.0, slots=1, price_source="test")


def report(sequence: int, worker: str = "w", heard: float = 110.0, documents: int = 0, **busy: float) -> WorkerTime:
    own = {**zero(), "documents": documents, "prefill_tokens": 10 * documents, "seconds": sum(busy.values())}
    return WorkerTime(worker, "n", 100.0, heard, sequence=sequence, seconds=Seconds(**busy), categories={"a": own},
                      method="hyper_parallel", ok=documents)  # fmt: skip


def test_a_report_that_comes_twice_or_late_changes_nothing() -> None:
    plain, rough = Book("s", 100.0), Book("s", 100.0)
    for own in (plain, rough):
        own.see([NODE], 1, 100.0)
    reports = [report(i, documents=i, decode=float(i), heard=100.0 + i) for i in range(1, 6)]
    for own in reports:
        assert plain.take(own)
    for i in (0, 0, 2, 1, 4, 3, 4):
        rough.take(reports[i])
    assert plain.bill(110.0) == rough.bill(110.0)
    assert plain.totals()["documents"] == 5
    assert not plain.take(reports[0])


def test_a_book_goes_on_from_its_file() -> None:
    own = Book("s", 100.0, budget_usd=5.0)
    own.see([NODE, NodeTime("h", 90.0, head=True, usd_per_hour=1.0)], 2, 105.0)
    own.take(report(3, documents=7, decode=4.0, prefill=1.0))
    kept = from_json(Bill, json.loads(json.dumps(to_json(own.bill(110.0)))), "s.json")
    again = book.from_bill(kept, budget_usd=5.0)
    assert again.bill(110.0) == kept
    assert not again.take(report(3, documents=99))
    assert again.take(report(4, documents=8, decode=5.0))
    assert again.totals()["documents"] == 8


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans()), max_size=40))
def test_a_ledger_that_is_killed_loses_nothing_that_was_written_and_doubles_nothing(events) -> None:
    """Workers report in any order and again; the ledger dies now and then and goes on from what it last wrote."""
    own, written, latest = Book("s", 100.0), {}, {}
    own.see([NODE], 1, 100.0)
    file = own.bill(101.0)
    for worker, sequence, dies in events:
        own.take(report(sequence, worker, documents=sequence, decode=sequence / 10))
        latest[worker] = max(latest.get(worker, -1), sequence)
        if dies:
            own = book.from_bill(file)
        else:
            file = own.bill(101.0)
            written = {w.worker: w.sequence for w in own.workers.values()}
        for name, number in written.items():
            assert own.workers[name].sequence >= number
    for worker, sequence in latest.items():  # a worker says all it did with every report
        own.take(report(sequence, worker, documents=sequence, decode=sequence / 10))
    assert own.totals()["documents"] == sum(latest.values())


def test_the_series_keeps_its_ends_and_its_size() -> None:
    own = Book("s", 0.0)
    own.see([NODE], 1, 0.0)
    for i in range(9000):
        series = own.bill(float(i)).series
    assert len(series) <= 2001
    assert (series[0][0], series[-1][0]) == (0.0, 8999.0)
    assert [point[0] for point in series] == sorted({point[0] for point in series})


def test_a_session_that_died_is_closed_by_who_reads_it(tmp_path) -> None:
    own = Book("s", 100.0)
    own.see([NODE], 1, 100.0)
    lost = report(1, heard=109.0, decode=8.0)
    lost.open = {"u": (0.0, 8.0)}
    own.take(lost)
    book.write(str(tmp_path), own.bill(110.0))
    (fresh,) = book.bills(str(tmp_path), now=111.0)
    assert (fresh.final, fresh.parts["lost"]) == (False, 0)
    (dead,) = book.bills(str(tmp_path), now=1000.0)
    assert (dead.final, dead.until, dead.usd) == (True, 110.0, 0.1)
    assert dead.parts["lost"] == pytest.approx(0.08)
    (tmp_path / "ledger/broken.json").write_text("{")
    assert [bill.usd for bill in book.bills(str(tmp_path))] == [0.1]


def unit(documents: int, seconds: float = 1.0) -> UnitSummary:
    own = {**zero(), "documents": documents, "decode_tokens": 5 * documents, "seconds": seconds}
    tokens = {"prefill_tokens": 0, "shared_tokens": 0, "decode_tokens": 5 * documents}
    return UnitSummary("u", "f", "s", "x", 0, documents, documents, 0, 1.0, counts=tokens, categories={"a": own})


def test_what_was_committed_counts_even_when_its_report_was_lost() -> None:
    own = Book("s", 100.0)
    own.see([NODE], 1, 100.0)
    own.take(report(1, documents=7, decode=3.0))
    own.close(110.0)
    bill = own.bill(110.0)
    assert book.reconcile(bill, [unit(7), unit(3)])
    assert bill.totals["documents"] == 10
    assert bill.categories["a"]["documents"] == 10
    assert bill.categories["a"]["usd"] == bill.usd == bill.methods["hyper_parallel"]["usd"]
    assert not book.reconcile(bill, [unit(7), unit(3)])
    old = unit(20)
    old.categories = {}
    assert not book.reconcile(bill, [old])


def test_a_run_s_bill_is_its_sessions_together() -> None:
    bills = []
    for name, documents in (("s", 4), ("t", 6)):
        own = Book(name, 100.0)
        own.see([NODE], 1, 100.0)
        own.take(report(1, documents=documents, decode=9.0))
        own.close(110.0)
        bills.append(own.bill(110.0))
    whole = book.summed(bills)
    assert whole is not None
    assert (whole.usd, whole.documents, whole.usd_per_1000_documents) == (0.2, 10, 20.0)
    assert round(sum(whole.parts.values()), 6) == whole.usd
    assert book.summed([]) is None


# --------------------------------------------------------------------------------------------------------- real runs


def write_run(tmp_path: Path, documents: int = 160, titles: Sequence[str] = (), **cost: Any) -> Path:
    """A run of model: fake with two workers: units of 10 documents, each about half a second."""
    titles = titles or [f"a product {i}" for i in range(documents)]
    lines = [{"id": str(i), "title": title, "category": "ab"[i % 2]} for i, title in enumerate(titles)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree = {
        "input": {"path": str(tmp_path / "d.jsonl"), "text_columns": ["title"]},
        "output": {"path": str(tmp_path / "out")},
        "model": {"name": "fake", "fake": {"load_seconds": 0.5, "step_seconds": 0.1}},
        "engine": {"max_num_seqs": 4},
        "task": {"categories": {c: {"attributes": [{"name": "x"}]} for c in "ab"}},
        "cluster": {"unit_documents": 10, "address": "local", "min_workers": 2, "max_workers": 2,
                    "cpus_per_worker": 0.5, "units_in_flight": 1},
        "cost": {"prices": {"local": 36.0}, **cost},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    return tmp_path / "run.yaml"


def begin(run: Path, *changes: str) -> subprocess.Popen[str]:
    return start("-m", "raypd", "extract", str(run), *changes)


def begin_steered(tmp_path: Path, units: Sequence[str]) -> subprocess.Popen[str]:
    """A run whose units each do at their first document what tests/cluster/fakes.py does at such a title."""
    titles = [title for unit in units for title in (unit, *["a product"] * 9)]
    return start("-m", "tests.cluster.run", str(write_run(tmp_path, titles=titles)))


def ledger_process(driver: subprocess.Popen[str], but: Sequence[int] = ()) -> psutil.Process:
    """The process of a driver's ledger, once there is one besides those that were."""

    def look() -> psutil.Process | None:
        for process in psutil.Process(driver.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.pid not in but and " ".join(process.cmdline()).startswith("ray::Ledger"):
                    return process
        return None

    found: psutil.Process = wait_for(look, "no ledger")
    return found


def files(tmp_path: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(p.read_text()) for p in tmp_path.glob("out/ledger/*.json")), key=lambda t: t["began"])


def wait_until(tmp_path: Path, committed: int) -> None:
    wait_for(lambda: len(list(tmp_path.glob("out/units/*.parquet"))) >= committed, "no progress")


def check_sums(tree: dict[str, Any]) -> None:
    """All of the bill adds up to the cent, and better."""
    assert sum(node["usd"] for node in tree["nodes"]) == pytest.approx(tree["usd"], abs=1e-9)
    assert sum(tree["parts"].values()) == pytest.approx(tree["usd"], abs=1e-9)
    if tree["categories"]:
        assert sum(own["usd"] for own in tree["categories"].values()) == pytest.approx(tree["usd"], abs=1e-9)
        assert sum(own["documents"] for own in tree["categories"].values()) == tree["totals"]["documents"]
    for worker in tree["workers"]:
        assert all(a[1] <= b[0] + 1e-3 for a, b in zip(worker["spans"], worker["spans"][1:], strict=False))


def check_rows(tmp_path: Path, documents: int) -> None:
    found: Counter[str] = Counter()
    for path in tmp_path.glob("out/units/*.parquet"):
        found.update(pq.read_table(path)["id"].to_pylist())
    assert found == Counter({str(i): 1 for i in range(documents)})


@pytest.mark.slow
def test_two_runs_on_an_ec2_node_share_its_price(tmp_path, monkeypatch) -> None:
    """What infra/docker/node-environment.sh sets reaches the bill, and a time with two ledgers is paid by halves."""
    import ray

    for name, value in {
        "RAY_CLOUD_INSTANCE_TYPE_NAME": "g6e.48xlarge",
        "RAY_NODE_MARKET_TYPE": "spot",
        "RAY_NODE_REGION": "us-west-2",
        "RAY_NODE_ZONE": "us-west-2b",
        "RAYPD_PRICES": str(tmp_path / "prices.json"),
    }.items():
        monkeypatch.setenv(name, value)
    config = RunConfig.model_validate(json.loads(write_run(tmp_path, prices={}).read_text()))
    ray.shutdown()  # that of other tests, whose environment is another
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        began, output = time.time(), str(tmp_path / "out")
        handles = [ledger_actor.start(config, output, name, began, 1.0, 0.0) for name in ("one", "two")]
        standings = [ledger_actor.ask(handle.standing) for handle in handles]
        halves = pytest.approx([30.13118 / 3600 / 2] * 2)  # when the first has looked again, and sees the second
        wait_for(lambda: [ledger_actor.ask(handle.standing).usd_per_second for handle in handles] == halves)
        bills = [ledger_actor.close(handle, output, name) for handle, name in zip(handles, ("one", "two"), strict=True)]
    finally:
        ray.shutdown()
    assert standings[0].unpriced is None
    for bill in bills:
        assert bill is not None
        (node,) = bill.nodes
        assert (node.instance_type, node.market, node.region) == ("g6e.48xlarge", "spot", "us-west-2")
        assert (node.usd_per_hour, node.slots, node.head) == (30.13118, 2, True)
        assert "no spot price is known" in node.price_source
        assert bill.shares[0][1] == 2
        assert "share" in bill.notes[0]
        assert bill.usd < node.seconds * 30.13118 / 3600
        assert bill.parts["head"] == bill.usd  # no worker came
    assert files(tmp_path) == json.loads(json.dumps([to_json(bill) for bill in bills]))


@pytest.mark.slow
def test_a_run_has_a_bill_that_adds_up(tmp_path) -> None:
    out = ended(begin(write_run(tmp_path, documents=80)))
    check_rows(tmp_path, 80)
    (tree,) = files(tmp_path)
    check_sums(tree)
    assert tree["final"]
    assert {name: tree["totals"][name] for name in ("documents", "ok", "failed")} == {
        "documents": 80,
        "ok": 80,
        "failed": 0,
    }
    (node,) = tree["nodes"]
    assert node["usd"] == pytest.approx(node["seconds"] * 36 / 3600, abs=1e-5)
    assert tree["began"] <= node["began"] < tree["until"]
    assert tree["parts"]["startup"] > 0
    assert tree["seconds"]["decode"] + tree["seconds"]["prefill"] > 2  # 20 steps of 0.1 s at the very least
    assert tree["parts"]["decode"] > 0
    assert tree["parts"]["lost"] == tree["parts"]["head"] == 0
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["cost"]["usd"] == tree["usd"]
    assert manifest["decode_tokens"] == tree["totals"]["decode_tokens"]
    assert "cost:   $" in out
    assert "per 1,000 documents" in out
    summaries = [writer.read_summary(str(tmp_path / "out"), u) for u in writer.committed(str(tmp_path / "out"))]
    assert {s.worker for s in summaries} == {worker["worker"] for worker in tree["workers"]}
    assert all(s.busy_seconds > 0 and s.began > tree["began"] for s in summaries)


@pytest.mark.slow
def test_a_killed_ledger_goes_on_from_its_file(tmp_path) -> None:
    driver = begin_steered(tmp_path, [*["a product"] * 4, *["until one"] * 6, *["until two"] * 8])
    killed: list[int] = []
    for committed, name in ((4, "one"), (10, "two")):
        wait_until(tmp_path, committed)
        process = ledger_process(driver, killed)
        process.kill()
        killed.append(process.pid)
        ledger_process(driver, killed)
        (tmp_path / "out" / name).touch()
    ended(driver)
    check_rows(tmp_path, 180)
    (tree,) = files(tmp_path)
    check_sums(tree)
    assert tree["final"]
    assert tree["totals"]["documents"] == 180
    # No time is missing and none is there twice: two workers were on the node from their start to their last word, in
    # which a second of doing nothing may not be told yet.
    assert len(tree["workers"]) == 2
    for worker in tree["workers"]:
        lived = worker["heard"] - worker["began"]
        assert lived - 1.01 < sum(worker["seconds"].values()) < lived + 0.01
    assert tree["usd"] == pytest.approx((tree["until"] - tree["nodes"][0]["began"]) / 100, abs=1e-5)


@pytest.mark.slow
def test_what_a_killed_worker_had_in_hand_is_lost(tmp_path) -> None:
    """Its engine stands still in a unit from before it is killed."""
    driver = begin_steered(tmp_path, ["until killed"] * 8)

    def told() -> dict[str, Any] | None:
        workers = [worker for tree in files(tmp_path) for worker in tree["workers"]]
        return next((worker for worker in workers if sum(sum(busy) for busy in worker["open"].values()) > 0), None)

    killed = wait_for(told, "no report of what is in hand")
    os.kill(killed["pid"], signal.SIGKILL)
    wait_for(lambda: sum(len(tree["workers"]) for tree in files(tmp_path)) == 3, "nobody in its place")
    (tmp_path / "out/killed").touch()
    ended(driver)
    check_rows(tmp_path, 80)
    (tree,) = files(tmp_path)
    check_sums(tree)
    assert tree["totals"]["documents"] == 80
    assert len(tree["workers"]) == 3
    (lost,) = (worker for worker in tree["workers"] if worker["open"])
    assert lost["pid"] == killed["pid"]
    seconds = sum(map(sum, lost["open"].values()))
    assert seconds >= sum(map(sum, killed["open"].values())) > 0
    assert tree["seconds"]["lost"] == pytest.approx(seconds, abs=0.01)
    assert tree["parts"]["lost"] > 0


@pytest.mark.slow
def test_a_killed_driver_stops_the_bill_and_the_next_session_adds_to_it(tmp_path) -> None:
    driver = begin_steered(tmp_path, [*["a product"] * 8, *["until again"] * 4])
    actor = ledger_process(driver)
    wait_for(lambda: any(tree["totals"]["documents"] for tree in files(tmp_path)), "no bill")
    driver.kill()
    driver.wait()
    psutil.wait_procs([actor], timeout=LONG)
    assert not actor.is_running()
    (left,) = files(tmp_path)
    assert not left["final"]
    assert left["totals"]["documents"] > 0
    end_all()  # Ray's own, which outlive a driver that was killed
    (tmp_path / "out/again").touch()
    ended(start("-m", "tests.cluster.run", str(tmp_path / "run.yaml")))
    check_rows(tmp_path, 120)
    first, second = files(tmp_path)
    assert first == left  # nobody billed on
    check_sums(first)
    check_sums(second)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["cost"]["sessions"] == 2
    assert manifest["cost"]["usd"] == pytest.approx(first["usd"] + second["usd"])
