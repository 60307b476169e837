"""The book: workers' reports in any order, dead sessions; sums to the micro-dollar.

The meter: time without gaps.
"""

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypd.billing import bill as billing
from raypd.billing import book, energy
from raypd.billing.bill import apportion, make, shared_seconds
from raypd.billing.book import Book
from raypd.billing.meter import Meter, coarser, joined, zero
from raypd.decoding.counts import TokenCounts
from raypd.run.records import Bill, CardUse, NodeTime, Seconds, UnitSummary, WorkerTime, from_json
from tests.runs import run_config

NODE = NodeTime("n", 100.0, usd_per_hour=36.0, slots=1, price_source="test")
HOUR = 3600.0
# 10 of 30 minutes are of a unit in flight.
OPEN = {"prefill": 600.0, "decode": 1200.0, "open": {"u": (200.0, 400.0)}}


def new(session: str = "s") -> Book:
    own = Book(Bill(session, 100.0, 0.0))
    own.see([NODE], 1, 100.0)
    return own


def report(
    sequence: int, worker: str = "w", heard: float = 110.0, documents: int = 0, **busy: float
) -> WorkerTime:
    own = {
        **zero(),
        "documents": documents,
        "prefill_tokens": 10 * documents,
        "seconds": sum(busy.values()),
    }
    return WorkerTime(
        worker,
        "n",
        100.0,
        heard,
        sequence=sequence,
        seconds=Seconds(**busy),
        categories={"a": own},
        method="hyper_parallel",
        ok=documents,
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans()), max_size=40))
def test_a_ledger_that_is_killed_loses_nothing_that_was_written_and_doubles_nothing(events) -> None:
    """Workers report late and again; the ledger dies now and then and goes on from what it last
    wrote.
    """
    own = new()
    written = {}
    latest = {}
    own.see([NODE, NodeTime("h", 90.0, head=True, usd_per_hour=1.0)], 2, 101.0)
    file = own.bill(101.0)
    for worker, sequence, dies in events:
        before = own.workers[worker].sequence if worker in own.workers else -1
        assert own.take(report(sequence, worker, documents=sequence, decode=sequence / 10)) == (
            sequence > before
        )
        latest[worker] = max(latest.get(worker, -1), sequence)
        if dies:
            own = Book(from_json(Bill, json.loads(json.dumps(asdict(file))), "s.json"))
            assert own.bill(101.0) == file
        else:
            file = own.bill(101.0)
            written = {w.worker: w.sequence for w in own.workers.values()}
        for name, number in written.items():
            assert own.workers[name].sequence >= number
    for worker, sequence in latest.items():  # a worker says all it did with every report
        own.take(report(sequence, worker, documents=sequence, decode=sequence / 10))
    assert own.totals()["documents"] == sum(latest.values())


def test_the_series_keeps_its_ends_and_its_size() -> None:
    own = new()
    for i in range(100, 9000):
        at = [point[0] for point in own.bill(float(i)).series]
    assert len(at) <= 2001
    assert (at[0], at[-1], at) == (100.0, 8999.0, sorted({*at}))


def test_a_session_that_died_is_closed_when_the_run_is_summed(tmp_path) -> None:
    own = new()
    lost = report(1, heard=109.0, documents=4, decode=8.0)
    lost.open = {"u": (0.0, 8.0)}
    own.take(lost)
    book.write(str(tmp_path), own.bill(110.0))
    (tmp_path / "ledger/broken.json").write_text("{")
    (left,) = book.bills(str(tmp_path))
    assert (left.final, left.parts["lost"], left.totals["documents"]) == (False, 0, 4)
    whole = book.of_run(str(tmp_path), [unit(4), unit(6)])  # the report of the second was lost
    assert (whole.usd, whole.documents, whole.usd_per_1000_documents) == (0.1, 10, 10.0)
    (dead,) = book.bills(str(tmp_path))
    assert (dead.final, dead.until, dead.usd, dead.totals["documents"]) == (True, 110.0, 0.1, 10)
    assert dead.parts["lost"] == pytest.approx(0.08)


def test_every_token_that_a_server_was_asked_for_is_paid_also_those_of_a_session_that_died(
    tmp_path,
) -> None:
    model = {
        "name": "gpt",
        "endpoint": {"url": "http://a", "usd_per_million_answer_tokens": 1000.0},
    }
    settings = {"model": model, "decoding": {"method": "autoregressive"}}
    own = Book(Bill("s", 100.0, 0.0), run_config(**settings))
    meter = Meter("n")
    usd = []
    for end in (lambda: meter.lose("u"), lambda: meter.commit("u", meter.end("u"), 1, 0)):
        meter.begin("u")
        for step in (lambda: meter.tokens("u", ["a"], TokenCounts(0, 0, 1000, 1)), end):
            step()
            own.take(meter.report())
            usd.append(own.bill(110.0).usd)
    assert usd == [1.0, 1.0, 2.0, 2.0]
    book.write(str(tmp_path), own.last)
    assert (
        book.of_run(str(tmp_path), [unit(4)]).parts["endpoint"],
        book.bills(str(tmp_path))[0].usd,
    ) == (2.0, 2.0)
    model["endpoint"]["batch"] = True  # an attempt finds the batches of the one before
    assert Book(own.last, run_config(**settings)).bill(110.0).usd == 1.0


def unit(documents: int, seconds: float = 1.0) -> UnitSummary:
    own = {**zero(), "documents": documents, "decode_tokens": 5 * documents, "seconds": seconds}
    tokens = {"prefill_tokens": 0, "shared_tokens": 0, "decode_tokens": 5 * documents}
    return UnitSummary(
        "u", "f", "s", "x", 0, documents, documents, 0, 1.0, counts=tokens, categories={"a": own}
    )


def closed(session: str, documents: int, decode: float) -> Bill:
    own = new(session)
    own.take(report(1, documents=documents, decode=decode))
    own.close(110.0)
    return own.bill(110.0)


def test_what_was_committed_counts_without_its_report_and_a_run_s_bill_is_its_sessions() -> None:
    bill = closed("s", 7, 3.0)
    assert book.reconcile(bill, [unit(7), unit(3)])
    assert (bill.totals["documents"], bill.categories["a"]["documents"]) == (10, 10)
    assert bill.categories["a"]["usd"] == bill.usd == bill.methods["hyper_parallel"]["usd"]
    assert not book.reconcile(bill, [unit(7), unit(3)])
    # As of a retry.
    assert (book.reconcile(bill, []), bill.categories["a"]) == (True, {**zero(), "usd": bill.usd})
    whole = book.summed([closed("s", 4, 9.0), closed("t", 6, 9.0)])
    assert (whole.usd, whole.documents, whole.usd_per_1000_documents) == (0.2, 10, 20.0)
    assert (round(sum(whole.parts.values()), 6), book.summed([])) == (whole.usd, None)


def worker(began: float = 0.0, heard: float = HOUR, open=None, **seconds: float) -> WorkerTime:
    return WorkerTime("w", "n", began, heard, seconds=Seconds(**seconds), open=open or {})


def node(began=0.0, usd=1.0, slots=1, ended=None, head=False) -> NodeTime:
    return NodeTime("n", began, head, usd_per_hour=usd, ended=ended, slots=slots)


@pytest.mark.parametrize(
    ("node", "workers", "expected"),
    [
        # An hour of the paper's machine.
        (
            node(usd=30.13118),
            [worker(startup=360, prefill=900, decode=1800, idle=180, lost=360)],
            {
                "startup": 3.013118,
                "prefill": 7.532795,
                "decode": 15.06559,
                "idle": 1.506559,
                "lost": 3.013118,
            },
        ),
        # A node is billed within the session only.
        (node(-HOUR, 10.0, ended=1800.0), [], {"idle": 5.0}),
        (node(1800.0, 10.0), [], {"idle": 5.0}),
        (node(2 * HOUR, 10.0), [], {}),
        # A head without workers, a node that can have none, a laptop that is head and worker.
        (node(slots=0, head=True), [], {"head": 1.0}),
        (node(slots=0), [], {"other": 1.0}),
        (node(head=True), [worker(decode=HOUR)], {"decode": 1.0}),
        # 8 slots x 900 s before the first worker; then one of 8 slots has it.
        (
            node(usd=8.0, slots=8),
            [worker(began=900.0, startup=900.0, decode=1800.0)],
            {"startup": 2.25, "decode": 0.5, "idle": 5.25},
        ),
        (node(usd=8.0, slots=8), [], {"idle": 8.0}),
        # The units in flight of a worker that was not heard of are lost, of one that was they are
        # not.
        (
            node(),
            [worker(heard=1800.0, **OPEN)],
            {"prefill": 0.111111, "decode": 0.222222, "lost": 0.166667, "idle": 0.5},
        ),
        (
            node(),
            [worker(heard=HOUR - 5, **OPEN)],
            {"prefill": 0.166667, "decode": 0.333333, "idle": 0.5},
        ),
        # A worker that reports more than it lived is cut.
        (
            node(usd=2.0, ended=1800.0),
            [worker(prefill=900, decode=2700)],
            {"prefill": 0.25, "decode": 0.75},
        ),
    ],
)
def test_an_hour_by_hand(
    node: NodeTime, workers: list[WorkerTime], expected: dict[str, float]
) -> None:
    bill = make([node], workers, Bill("", 0.0, 0.0), HOUR)
    assert {name: billing.usd(value) for name, value in bill.parts.items() if value} == expected


def test_two_runs_pay_a_cluster_together_and_one_without_a_price_has_its_seconds() -> None:
    assert (shared_seconds(0, 100, []), shared_seconds(0, 100, [(40, 2), (60, 1)])) == (
        100,
        40 + 10 + 40,
    )
    assert shared_seconds(50, 55, [(40, 2), (60, 4)]) == 2.5
    one, two = (
        make([node(usd=10.0)], [], Bill("", began, 0.0, shares=[(600.0, 2)]), HOUR)
        for began in (0.0, 600.0)
    )
    assert one.total + two.total == 10_000_000
    bill = make([node(usd=0.0)], [worker(startup=600, decode=3000)], Bill("", 0.0, 0.0), HOUR)
    assert (bill.total, bill.seconds["decode"], bill.seconds["startup"]) == (0, 3000, 600)


def test_categories_share_the_whole_bill_by_their_busy_seconds() -> None:
    shared = billing.shared_out(
        10, {"a": {"seconds": 1.0}, "b": {"seconds": 2.0}, "c": {"seconds": 0.0}}
    )
    assert (sum(round(own["usd"] * 1e6) for own in shared.values()), shared["c"]["usd"]) == (10, 0)
    assert billing.shared_out(10, {}) == {}


@given(st.integers(0, 10**13), st.dictionaries(st.text(max_size=3), st.floats(0, 1e9), max_size=12))
def test_shares_add_up_and_are_in_proportion(total, weights) -> None:
    shares = apportion(total, weights)
    whole = sum(weights.values())
    assert sum(shares.values()) == (total if whole > 0 else 0)
    assert min(shares.values(), default=0) >= 0
    for name, share in shares.items() if whole > 0 else ():
        assert abs(share - total * (weights[name] / whole)) <= 1 + total * 1e-12


times = st.floats(0, 1e6)
seconds = st.builds(Seconds, *[st.floats(0, 1e5)] * 5)
nodes = st.builds(
    NodeTime,
    st.sampled_from("abc"),
    times,
    head=st.booleans(),
    usd_per_hour=st.floats(0, 150),
    ended=st.none() | times,
    slots=st.integers(0, 8),
)
workers = st.builds(
    WorkerTime,
    st.just("w"),
    st.sampled_from("abc"),
    times,
    times,
    ended=st.none() | times,
    seconds=seconds,
    open=st.dictionaries(st.sampled_from("uv"), st.tuples(st.floats(0, 1e5), st.floats(0, 1e5))),
)


@given(
    st.lists(nodes, max_size=3, unique_by=lambda n: n.node),
    st.lists(workers, max_size=6),
    times,
    times,
    st.booleans(),
    st.lists(st.tuples(times, st.integers(1, 5)), max_size=3),
)
def test_nodes_and_parts_add_up_to_the_last_micro_dollar(
    nodes, workers, began, until, final, shares
) -> None:
    bill = make(nodes, workers, Bill("", began, 0.0, shares=sorted(shares), final=final), until)
    assert (sum(bill.nodes.values()), sum(bill.parts.values())) == (bill.total, bill.total)
    assert set(bill.parts) == set(billing.PARTS)
    assert all(
        value >= 0
        for value in (*bill.parts.values(), *(took + 1e-6 for took in bill.seconds.values()))
    )
    # ... and to the cent as a reader of the file adds them.
    assert abs(sum(billing.usd(v) for v in bill.parts.values()) - billing.usd(bill.total)) < 0.005


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def meter(clock: SimpleNamespace) -> Meter:
    """Of a worker that has loaded, with a unit."""
    made = Meter("n", "hyper_parallel", clock=lambda: clock.now)
    clock.now += 10
    made.ready()
    made.begin("u")
    return made


class Engine:
    """Steps that take the seconds and feed the tokens that it is reports."""

    def __init__(self, clock: SimpleNamespace, steps: list[tuple[float, int, int]]) -> None:
        self.clock, self.steps, self.sequences = (
            clock,
            steps,
            [SimpleNamespace(counts=TokenCounts())],
        )

    def step(self):
        seconds, prefill, decode = self.steps.pop(0)
        self.clock.now += seconds
        row = self.sequences[0].counts
        row.prefill_tokens += prefill
        row.decode_tokens += decode
        return []


def test_a_worker_s_time_is_startup_busy_and_idle_without_a_gap(
    meter: Meter, clock: SimpleNamespace
) -> None:
    clock.now += 2
    engine = Engine(clock, [(4.0, 300, 100), (1.0, 0, 50), (1.0, 0, 0)])
    meter.begin("v")
    meter.step(engine, {"u": 3, "v": 1})  # 3 s of prefill, 1 s of decoding
    meter.step(engine, {"u": 1})  # all of it decoding
    clock.now += 0.01  # a pause that belongs to the steps
    meter.step(engine, {"u": 1})  # nothing was fed: as the one before
    report = meter.report()
    expected = {"startup": 10, "prefill": 3, "decode": 3.01, "idle": 2, "lost": 0}
    assert vars(report.seconds) == pytest.approx(expected, abs=1e-6)
    assert report.open == {
        "u": pytest.approx((2.25, 0.75 + 2.01)),
        "v": pytest.approx((0.75, 0.25)),
    }
    assert [(kind, unit) for _, _, kind, unit in report.spans] == [
        ("startup", None),
        ("idle", None),
        ("busy", "u"),
    ]
    assert [end for _, end, *_ in report.spans] == [
        *(began for began, *_ in report.spans[1:]),
        clock.now,
    ]


def test_a_step_that_runs_is_reported_as_far_as_it_is(meter: Meter, clock: SimpleNamespace) -> None:
    reports = []

    class Slow(Engine):
        def step(self):
            clock.now += 3
            reports.append(meter.report())
            return super().step()

    meter.step(Slow(clock, [(1.0, 10, 0)]), {"u": 1})
    for told, seconds in ((reports[0], 3), (meter.report(), 4)):  # not the three twice
        assert (told.seconds.busy, sum(told.open["u"])) == pytest.approx((seconds, seconds))
    assert reports[0].spans[-1][2:] == ("busy", "u")


def test_the_documents_of_one_prompt_share_its_tokens(meter: Meter) -> None:
    meter.tokens("u", ["a", "b", "b"], TokenCounts(7, 0, 1))
    found = meter.end("u").categories
    assert [(found[name]["prefill_tokens"], found[name]["decode_tokens"]) for name in "ab"] == [
        (2, 0),
        (5, 1),
    ]


def test_an_attempt_that_is_not_committed_is_lost(meter: Meter, clock: SimpleNamespace) -> None:
    meter.step(Engine(clock, [(2.0, 100, 300)]), {"u": 1})
    meter.lose("u")
    meter.lose("u")
    report = meter.report()
    assert (report.seconds.busy, report.seconds.lost, report.open) == (0, pytest.approx(2.0), {})


def test_a_unit_s_seconds_go_to_its_categories_by_tokens(
    meter: Meter, clock: SimpleNamespace
) -> None:
    meter.documents("u", ["a", "a", "b"])
    meter.step(Engine(clock, [(4.0, 100, 100)]), {"u": 3})
    meter.tokens("u", ["a"], TokenCounts(75, 0, 10))
    meter.tokens("u", ["b"], TokenCounts(25, 0, 90))
    done = meter.end("u")
    expected = (2 * 0.75 + 2 * 0.1, 2 * 0.25 + 2 * 0.9)
    assert [done.categories[name]["seconds"] for name in "ab"] == pytest.approx(expected)
    assert meter.report().ok == 0  # not before it is committed
    meter.commit("u", done, 2, 1)
    meter.lose("u")  # as the worker always does at the end
    report = meter.report()
    assert (
        (report.ok, report.failed, report.seconds.lost),
        report.categories["a"]["documents"],
    ) == ((2, 1, 0), 2)
    assert meter.end("w").categories == {}


def test_the_picture_of_a_worker_stays_small() -> None:
    spans = []
    for i in range(5000):
        spans = joined(spans, (i, i + 1.0, "busy" if i % 2 else "idle", None))
    assert len(spans) <= 120
    assert ((spans[0][0], spans[-1][1]), len(coarser(spans))) == ((0, 5000), -(-len(spans) // 2))
    assert joined([(0, 1, "busy", "u")], (1, 2, "busy", "u")) == [(0, 2, "busy", "u")]


def driver(monkeypatch, counts: bool = True) -> list[int]:
    """A driver with two GPUs, whose counters (millijoules) the test moves."""
    counters = [1000, 5000]
    error = type("NVMLError", (Exception,), {})
    fake = SimpleNamespace(
        NVMLError=error,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: {"GPU-b": 1}[name],
        nvmlDeviceGetTotalEnergyConsumption=counters.__getitem__,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetUtilizationRates=lambda card: SimpleNamespace(gpu=[50, 90][card]),
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=[2 << 30, 40 << 30][card]),
        nvmlDeviceGetClockInfo=lambda card, kind: [900, 2100][card],
        nvmlDeviceGetMaxClockInfo=lambda card, kind: 2520,
    )
    if not counts:
        fake.nvmlDeviceGetTotalEnergyConsumption = mock.Mock(side_effect=error)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return counters


@pytest.mark.parametrize(
    ("shown", "gpus", "joules"),
    [("0,1", 2, 11.0), ("1", 1, 8.0), ("GPU-b", 1, 8.0), ("1", 0.5, 4.0)],
)
def test_the_counter_of_the_gpus_that_a_worker_sees(monkeypatch, shown, gpus, joules) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    counters = driver(monkeypatch)
    meter = energy.CardWatch(gpus).joules
    assert meter() == 0
    counters[:] = [4000, 13_000]
    assert meter() == joules


@pytest.mark.parametrize(
    ("shown", "gpus", "counts"), [("", 0, True), ("", 1, True), ("0", 1, False), ("0", 1, None)]
)
def test_without_gpu_counter_or_driver_nobody_knows(monkeypatch, shown, gpus, counts) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    driver(monkeypatch, counts is True)
    if counts is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    assert energy.CardWatch(gpus).joules() is None


def test_how_gpus_are_used(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    driver(monkeypatch)
    watch = energy.CardWatch(2)
    assert [watch(), watch()] == [
        CardUse(2, 0.7, 40.0, 1500.0, 2520.0),
        CardUse(4, 0.7, 40.0, 1500.0, 2520.0),
    ]
    cards = [None, watch(), CardUse(6, 0.2, 41.0, 300.0, 2520.0)]
    assert energy.together(cards) == CardUse(12, 0.45, 41.0, 900.0, 2520.0)
    assert str(watch()) == "GPUs 70% busy, 40 GiB at most, 1,500 of 2,520 MHz"
    error = sys.modules["pynvml"].NVMLError()
    monkeypatch.setattr(
        sys.modules["pynvml"], "nvmlDeviceGetMemoryInfo", mock.Mock(side_effect=error)
    )
    assert (watch().samples, watch.is_lost()) == (8, False)
    error.value = 15
    assert watch.is_lost()
    monkeypatch.setattr(
        sys.modules["pynvml"], "nvmlDeviceGetHandleByIndex", mock.Mock(side_effect=error)
    )
    assert energy.CardWatch(2).is_lost()  # before this process began


@pytest.mark.parametrize("package", [None, "without a driver"])
def test_without_nvml_nothing_is_known_of_the_use(monkeypatch, package) -> None:
    driver(monkeypatch) if package else monkeypatch.setitem(sys.modules, "pynvml", None)
    if package:
        sys.modules["pynvml"].nvmlInit = mock.Mock(side_effect=sys.modules["pynvml"].NVMLError)
    watch = energy.CardWatch(1)
    assert (watch(), watch.is_lost(), energy.together([None])) == (None, False, None)


def test_kwh_of_a_run() -> None:
    measured = report(1, decode=3600.0)
    unknown = report(1, decode=1800.0)
    measured.joules = 3.6e6
    measured.gpus = 1.0
    unknown.gpus = 2.0
    of_none = energy.kwh([report(1)])  # it has no GPU
    assert (energy.kwh([measured]), energy.kwh([measured, unknown]), of_none) == (1.0, None, None)
