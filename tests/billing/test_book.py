"""The bill of a session: reports in any order, dead sessions, sums exact to the micro-dollar.

Also the meter, which books a worker's time without gaps, and the energy of GPUs.
"""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from raypd.billing import bill as billing, book, energy
from raypd.billing.bill import Bill, NodeTime, apportion, make, shared_seconds
from raypd.billing.book import Book
from raypd.billing.meter import Meter, Seconds, UsageChange, WorkerTime, coarser, joined, zero
from raypd.config import ModelConfig
from raypd.decoding.counts import TokenCounts
from raypd.run.records import encoded, from_json
from raypd.run.unit import UnitSummary
from raypd.run.unit_totals import SessionUnits, UnitTotals
from raypd.run.usage import SECOND, GpuUse, UsageKey
from tests.runs import extraction, run_config

NODE = NodeTime(
    "n",
    100.0,
    usd_per_hour=36.0,
    slots=1,
    price_source="test",
)
HOUR = 3600.0
CATEGORY = UsageKey("a")
# Ten of the thirty busy minutes belong to a unit in flight.
WITH_UNIT_IN_FLIGHT = {
    "prefill": 600.0,
    "decode": 1200.0,
    "open": {"u": (200.0, 400.0)},
}


def new_book(session: str = "s") -> Book:
    ledger = Book(Bill(session, 100.0, 0.0))
    ledger.see([NODE], 1, 100.0)
    return ledger


def report(
    sequence: int, worker: str = "w", heard: float = 110.0, documents: int = 0, **seconds: float
) -> WorkerTime:
    counts = {
        **zero(),
        "documents": documents,
        "prefill_tokens": 10 * documents,
        "seconds": sum(seconds.values()),
    }
    changes = [UsageChange(sequence, {CATEGORY: counts})]
    return WorkerTime(
        worker,
        "n",
        100.0,
        heard,
        sequence=sequence,
        seconds=Seconds(**seconds),
        changes=changes,
        method="hyper_parallel",
        ok=documents,
    )


def numbered_report(worker: str, sequence: int) -> WorkerTime:
    """A report whose contents follow from its number; each one had another document."""
    numbered = report(sequence, worker, documents=sequence, decode=sequence / 10)
    usage = {
        CATEGORY: {
            **zero(),
            "documents": 1,
            "prefill_tokens": 10,
        }
    }
    changes = [UsageChange(number, usage) for number in range(1, sequence + 1)]
    return replace(numbered, changes=changes)


def unit(documents: int, seconds: float = 1.0) -> UnitSummary:
    tokens = {"prefill_tokens": 0, "shared_tokens": 0, "decode_tokens": 5 * documents}
    return UnitSummary(
        unit="u",
        fingerprint="f",
        session="s",
        source="x",
        start=0,
        documents=documents,
        ok=documents,
        failed=0,
        seconds=1.0,
        counts=tokens,
        categories={CATEGORY: {**tokens, "documents": documents, "seconds": seconds}},
    )


def closed_bill(session: str, documents: int, decode: float) -> Bill:
    book_of_session = new_book(session)
    book_of_session.take(report(1, documents=documents, decode=decode))
    book_of_session.close(110.0)
    return book_of_session.bill(110.0)


events = st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans())


@given(st.lists(events, max_size=40))
def test_a_ledger_that_is_killed_neither_loses_nor_doubles_what_was_written(events) -> None:
    """Workers report late and repeatedly; the ledger dies at times and resumes from its file."""
    ledger = new_book()
    ledger.see(
        [
            NODE,
            NodeTime(
                "h",
                90.0,
                head=True,
                usd_per_hour=1.0,
            ),
        ],
        2,
        101.0,
    )
    file = ledger.bill(101.0)
    written: dict[str, int] = {}
    latest: dict[str, int] = {}
    for worker, sequence, dies in events:
        earlier = -1
        if worker in ledger.workers:
            earlier = ledger.workers[worker].sequence
        is_taken = ledger.take(numbered_report(worker, sequence))
        assert is_taken == (sequence > earlier)
        latest[worker] = max(latest.get(worker, -1), sequence)
        if dies:
            ledger = Book(from_json(Bill, json.loads(encoded(file)), "s.json"))
            assert ledger.bill(101.0) == file
        else:
            file = ledger.bill(101.0)
            written = {name: worker.sequence for name, worker in ledger.workers.items()}
        for name, number in written.items():
            assert ledger.workers[name].sequence >= number
    # Every report covers everything that its worker did.
    for worker, sequence in latest.items():
        ledger.take(numbered_report(worker, sequence))
    assert ledger.totals()["documents"] == sum(latest.values())
    assert ledger.totals()["prefill_tokens"] == 10 * sum(latest.values())


@given(st.lists(st.sampled_from(["commit", "report", "lost", "receipt lost", "write", "die"])))
def test_usage_is_counted_once_whatever_becomes_of_reports_receipts_and_the_ledger(steps) -> None:
    meter = Meter("n", clock=lambda: 100.0)
    ledger = new_book()
    file = ledger.bill(101.0)
    tokens = 0
    for number, step in enumerate([*steps, "report", "report"]):
        if step == "commit":
            meter.begin(f"u{number}")
            meter.documents(f"u{number}", ["a"])
            meter.tokens(f"u{number}", ["a"], TokenCounts(0, 0, 7, 1))
            meter.commit(f"u{number}", meter.end(f"u{number}"), 1, 0)
            tokens += 7
        elif step == "write":
            file = ledger.bill(101.0)
            ledger.stored(file)
        elif step == "die":
            ledger = Book(from_json(Bill, json.loads(encoded(file)), "s.json"))
        else:
            sent = meter.report()
            if step != "lost":
                ledger.take(sent)
            if step == "report":
                meter.received(ledger.receipt(meter.id))
    assert ledger.totals()["decode_tokens"] == tokens
    assert ledger.bill(101.0).categories.get(CATEGORY, zero())["decode_tokens"] == tokens


def test_a_report_has_only_the_usage_that_is_not_counted_yet() -> None:
    meter = Meter("n")
    ledger = new_book()

    def commit(unit: str) -> None:
        meter.begin(unit)
        meter.documents(unit, ["a"])
        meter.commit(unit, meter.end(unit), 1, 0)

    commit("u")
    first = meter.report()
    assert [change.sequence for change in first.changes] == [0]
    ledger.take(first)
    meter.received(ledger.receipt(meter.id))
    assert meter.report().changes == []
    commit("v")
    second = meter.report()
    assert [change.usage[CATEGORY]["documents"] for change in second.changes] == [1]
    # Without receipts, the oldest changes are joined and none is dropped.
    for number in range(300):
        commit(f"w{number}")
        last = meter.report()
    assert len(last.changes) <= 100
    ledger.take(last)
    assert ledger.usage[CATEGORY]["documents"] == 302


def test_the_series_keeps_its_first_and_last_point_and_a_bounded_size() -> None:
    ledger = new_book()
    for second in range(100, 9000):
        series = ledger.bill(float(second)).series
    times = [point[0] for point in series]
    assert len(times) <= 2001
    assert times[0] == 100.0
    assert times[-1] == 8999.0
    assert times == sorted(set(times))


def test_a_session_that_died_is_closed_when_the_run_is_summed(tmp_path) -> None:
    output = str(tmp_path)
    ledger = new_book()
    last_report = report(1, heard=109.0, documents=4, decode=8.0)
    last_report.open = {"u": (0.0, 8.0)}
    ledger.take(last_report)
    book.write(output, ledger.bill(110.0))
    (tmp_path / "ledger/broken.json").write_text("{")
    (stored,) = book.bills(output)
    assert not stored.final
    assert stored.parts["lost"] == 0
    assert stored.totals["documents"] == 4

    # The report of the second unit never arrived.
    cost = book.of_run(output, UnitTotals([unit(4), unit(6)]))
    assert cost is not None
    assert cost.usd == 0.1
    assert cost.documents == 10
    assert cost.usd_per_1000_documents == 10.0
    (closed,) = book.bills(output)
    assert closed.final
    assert closed.until == 110.0
    assert closed.usd == 0.1
    assert closed.totals["documents"] == 10
    assert closed.parts["lost"] == pytest.approx(0.08)


def models(*task: Any, **sections: Any) -> dict[str, ModelConfig | None]:
    """The models of a run with these sections."""
    config = run_config(*task, **sections)
    return book.models_of(config.model, config.cascade)


def test_the_first_price_of_a_node_counts_for_the_whole_session() -> None:
    ledger = Book(Bill("s", 100.0, 0.0))
    ledger.see([replace(NODE)], 1, 100.0)
    ledger.see([replace(NODE, usd_per_hour=72.0)], 1, 150.0)
    # 100 seconds of $36 per hour.
    assert ledger.bill(200.0).usd == 1.0


def test_a_server_is_paid_for_every_token_even_if_the_attempt_or_the_session_fails(
    tmp_path,
) -> None:
    endpoint = {"url": "http://a", "usd_per_million_answer_tokens": 1000.0}
    model = {"name": "gpt", "endpoint": endpoint}
    settings = {"model": model, "decoding": {"method": "autoregressive"}}
    ledger = Book(Bill("s", 100.0, 0.0), models(**settings))
    meter = Meter("n")

    def usd_after(step) -> float:
        step()
        ledger.take(meter.report())
        return ledger.bill(110.0).usd

    def decode() -> None:
        meter.begin("u")
        meter.tokens("u", ["a"], TokenCounts(0, 0, 1000, 1))

    assert usd_after(decode) == 1.0
    assert usd_after(lambda: meter.lose("u")) == 1.0
    assert usd_after(decode) == 2.0
    assert usd_after(lambda: meter.commit("u", meter.end("u"), 1, 0)) == 2.0

    book.write(str(tmp_path), ledger.last)
    cost = book.of_run(str(tmp_path), UnitTotals([unit(4)]))
    assert cost is not None
    assert cost.parts["endpoint"] == 2.0
    assert book.bills(str(tmp_path))[0].usd == 2.0
    # The next attempt finds the batches of the one that failed and does not pay for them again.
    endpoint["batch"] = True
    assert Book(ledger.last, models(**settings)).bill(110.0).usd == 1.0


def test_each_model_of_a_cascade_has_its_own_usage_and_price(tmp_path) -> None:
    endpoint = {"url": "http://a", "usd_per_million_answer_tokens": 1000.0}
    large = {"name": "large", "endpoint": endpoint}
    priced = models(
        extraction(a=["Brand"]),
        model={"name": "fake"},
        cascade={"model": large},
    )
    meter = Meter("n")
    meter.begin("u")
    meter.documents("u", ["a"])
    meter.tokens("u", ["a"], TokenCounts(0, 0, 1000, 1))
    meter.tokens("u", ["a"], TokenCounts(0, 0, 3000, 1), SECOND)
    meter.commit("u", meter.end("u"), 1, 0)
    ledger = Book(Bill("s", 100.0, 0.0), priced)
    ledger.take(meter.report())
    book.write(str(tmp_path), ledger.bill(110.0))

    (bill,) = book.bills(str(tmp_path))
    assert bill.parts["endpoint"] == 3.0
    assert bill.categories[UsageKey("a")]["documents"] == 1
    assert bill.categories[UsageKey("a")]["decode_tokens"] == 1000
    assert bill.categories[UsageKey("a", SECOND)]["documents"] == 0
    assert bill.categories[UsageKey("a", SECOND)]["decode_tokens"] == 3000
    assert [str(key) for key in bill.categories] == ["a", "a (second model)"]


def test_a_bill_of_an_earlier_version_names_the_second_model_in_a_suffix() -> None:
    tree = json.loads(encoded(closed_bill("s", 4, 9.0)))
    tree["categories"] = {"a": zero(), "a (second model)": zero()}
    bill = from_json(Bill, tree, "s.json")
    assert list(bill.categories) == [UsageKey("a"), UsageKey("a", SECOND)]


def test_a_pipeline_pays_for_the_seconds_of_its_workers_only() -> None:
    pipeline = Book(Bill("", 100.0, 0.0), workers_only=True)
    pipeline.see(
        [
            NodeTime(
                "n",
                0.0,
                usd_per_hour=36.0,
                slots=4,
            )
        ],
        1,
        100.0,
    )
    pipeline.take(
        report(
            1,
            documents=3,
            startup=10.0,
            decode=20.0,
            idle=10.0,
        )
    )
    bill = pipeline.workers_bill(110.0)
    assert bill.usd == pytest.approx(40 * 0.01 / 4)
    assert bill.documents == 3
    assert bill.prompt_tokens == 30
    assert bill.seconds["decode"] == 20.0
    pipeline.take(replace(report(1, "w2", decode=1.0), node="of unknown price"))
    assert pipeline.workers_bill(110.0).usd is None


def test_a_bill_counts_committed_units_whose_report_is_missing() -> None:
    bill = closed_bill("s", 7, 3.0)
    units = UnitTotals([unit(7), unit(3)]).all()
    assert book.reconcile(bill, units)
    assert bill.totals["documents"] == 10
    assert bill.categories[CATEGORY]["documents"] == 10
    assert bill.categories[CATEGORY]["usd"] == bill.usd
    assert bill.methods["hyper_parallel"]["usd"] == bill.usd
    assert not book.reconcile(bill, units)
    # The bill of a retry keeps its money, while its documents are counted where the rows are.
    assert book.reconcile(bill, SessionUnits())
    assert bill.categories[CATEGORY] == {**zero(), "usd": bill.usd}


def test_a_server_is_paid_for_committed_units_whose_report_is_missing() -> None:
    endpoint = {"url": "http://a", "usd_per_million_answer_tokens": 1000.0}
    model = {"name": "gpt", "endpoint": endpoint}
    priced = models(model=model, decoding={"method": "autoregressive"})
    units = UnitTotals([unit(7), unit(3)]).all()
    paid = sum(counts["decode_tokens"] for counts in units.usage.values()) * 1000.0 / 1e6
    assert paid > 0
    bill = closed_bill("s", 7, 3.0)
    before = bill.usd
    assert book.reconcile(bill, units, priced)
    assert bill.parts["endpoint"] == pytest.approx(paid)
    assert bill.usd == pytest.approx(before + paid)
    assert bill.categories[CATEGORY]["usd"] == bill.usd
    # What the bill had charged already, such as for a failed attempt, is not charged twice.
    bill = closed_bill("s", 7, 3.0)
    bill.parts["endpoint"] = 2 * paid
    assert book.reconcile(bill, units, priced)
    assert bill.parts["endpoint"] == 2 * paid
    assert bill.usd == before


def test_the_cost_of_a_run_is_the_sum_of_its_sessions() -> None:
    cost = book.summed([closed_bill("s", 4, 9.0), closed_bill("t", 6, 9.0)])
    assert cost is not None
    assert cost.usd == 0.2
    assert cost.documents == 10
    assert cost.usd_per_1000_documents == 20.0
    assert round(sum(cost.parts.values()), 6) == cost.usd
    assert book.summed([]) is None


def worker(began: float = 0.0, heard: float = HOUR, open=None, **seconds: float) -> WorkerTime:
    return WorkerTime(
        "w",
        "n",
        began,
        heard,
        seconds=Seconds(**seconds),
        open=open or {},
    )


def node(began=0.0, usd=1.0, slots=1, ended=None, head=False) -> NodeTime:
    return NodeTime(
        "n",
        began,
        head,
        usd_per_hour=usd,
        ended=ended,
        slots=slots,
    )


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
        # A node is billed only within the session.
        (node(-HOUR, 10.0, ended=1800.0), [], {"idle": 5.0}),
        (node(1800.0, 10.0), [], {"idle": 5.0}),
        (node(2 * HOUR, 10.0), [], {}),
        # A head without workers, a node that no worker fits on, a laptop that is head and worker.
        (node(slots=0, head=True), [], {"head": 1.0}),
        (node(slots=0), [], {"other": 1.0}),
        (node(head=True), [worker(decode=HOUR)], {"decode": 1.0}),
        # Before the first worker 8 slots start up for 900 s; then one of the 8 slots is used.
        (
            node(usd=8.0, slots=8),
            [worker(began=900.0, startup=900.0, decode=1800.0)],
            {"startup": 2.25, "decode": 0.5, "idle": 5.25},
        ),
        (node(usd=8.0, slots=8), [], {"idle": 8.0}),
        # A worker that stopped reporting loses its units in flight; one that reports keeps them.
        (
            node(),
            [worker(heard=1800.0, **WITH_UNIT_IN_FLIGHT)],
            {"prefill": 0.111111, "decode": 0.222222, "lost": 0.166667, "idle": 0.5},
        ),
        (
            node(),
            [worker(heard=HOUR - 5, **WITH_UNIT_IN_FLIGHT)],
            {"prefill": 0.166667, "decode": 0.333333, "idle": 0.5},
        ),
        # A worker that reports more than its lifetime is scaled down.
        (
            node(usd=2.0, ended=1800.0),
            [worker(prefill=900, decode=2700)],
            {"prefill": 0.25, "decode": 0.75},
        ),
    ],
)
def test_the_bill_of_an_hour_is_as_computed_by_hand(
    node: NodeTime, workers: list[WorkerTime], expected: dict[str, float]
) -> None:
    bill = make([node], workers, Bill("", 0.0, 0.0), HOUR)
    assert {name: billing.usd(value) for name, value in bill.parts.items() if value} == expected


def test_two_runs_share_the_price_of_a_cluster() -> None:
    assert shared_seconds(0, 100, []) == 100
    assert shared_seconds(0, 100, [(40, 2), (60, 1)]) == 40 + 10 + 40
    assert shared_seconds(50, 55, [(40, 2), (60, 4)]) == 2.5
    shares = [(600.0, 2)]
    first = make([node(usd=10.0)], [], Bill("", 0.0, 0.0, shares=shares), HOUR)
    second = make([node(usd=10.0)], [], Bill("", 600.0, 0.0, shares=shares), HOUR)
    assert first.total + second.total == 10_000_000


def test_a_node_without_a_price_has_its_seconds_on_the_bill() -> None:
    bill = make([node(usd=0.0)], [worker(startup=600, decode=3000)], Bill("", 0.0, 0.0), HOUR)
    assert bill.total == 0
    assert bill.seconds["decode"] == 3000
    assert bill.seconds["startup"] == 600


def test_categories_share_the_whole_bill_by_their_busy_seconds() -> None:
    counts = {
        "a": {"seconds": 1.0},
        "b": {"seconds": 2.0},
        "c": {"seconds": 0.0},
    }
    shared = billing.shared_out(10, counts)
    assert sum(round(share["usd"] * 1e6) for share in shared.values()) == 10
    assert shared["c"]["usd"] == 0
    assert billing.shared_out(10, {}) == {}


@given(st.integers(0, 10**13), st.dictionaries(st.text(max_size=3), st.floats(0, 1e9), max_size=12))
def test_shares_add_up_and_are_in_proportion(total, weights) -> None:
    shares = apportion(total, weights)
    weight_sum = sum(weights.values())
    assert min(shares.values(), default=0) >= 0
    if weight_sum <= 0:
        assert sum(shares.values()) == 0
        return
    assert sum(shares.values()) == total
    for name, share in shares.items():
        exact = total * (weights[name] / weight_sum)
        assert abs(share - exact) <= 1 + total * 1e-12


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
    bill = make(
        nodes,
        workers,
        Bill(
            "",
            began,
            0.0,
            shares=sorted(shares),
            final=final,
        ),
        until,
    )
    assert sum(bill.nodes.values()) == bill.total
    assert sum(bill.parts.values()) == bill.total
    assert set(bill.parts) == set(billing.PARTS)
    assert min(bill.parts.values()) >= 0
    assert min(bill.seconds.values()) >= -1e-6
    # A reader who adds up the rounded parts of the file gets the total to the cent.
    rounded_parts = sum(billing.usd(value) for value in bill.parts.values())
    assert rounded_parts == pytest.approx(billing.usd(bill.total), abs=0.005)


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def meter(clock: SimpleNamespace) -> Meter:
    """The meter of a worker that has loaded its model and begun a unit."""
    worker_meter = Meter("n", "hyper_parallel", clock=lambda: clock.now)
    clock.now += 10
    worker_meter.ready()
    worker_meter.begin("u")
    return worker_meter


class Engine:
    """An engine with given steps, each of (seconds, prefill tokens, decode tokens)."""

    def __init__(self, clock: SimpleNamespace, steps: list[tuple[float, int, int]]) -> None:
        self.clock = clock
        self.steps = steps
        self.sequences = [SimpleNamespace(counts=TokenCounts())]

    def step(self):
        seconds, prefill, decode = self.steps.pop(0)
        self.clock.now += seconds
        counts = self.sequences[0].counts
        counts.prefill_tokens += prefill
        counts.decode_tokens += decode
        return []


def test_a_workers_time_is_booked_without_a_gap(meter: Meter, clock: SimpleNamespace) -> None:
    clock.now += 2
    engine = Engine(
        clock,
        [
            (4.0, 300, 100),
            (1.0, 0, 50),
            (1.0, 0, 0),
        ],
    )
    meter.begin("v")
    meter.step(engine, {"u": 3, "v": 1})  # 3 s of prefill and 1 s of decoding
    meter.step(engine, {"u": 1})  # decoding only
    clock.now += 0.01  # a short pause belongs to the steps
    meter.step(engine, {"u": 1})  # without tokens, a step counts like the one before
    report = meter.report()
    expected = {
        "startup": 10,
        "prefill": 3,
        "decode": 3.01,
        "idle": 2,
        "lost": 0,
    }
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
    begins = [span[0] for span in report.spans]
    ends = [span[1] for span in report.spans]
    assert ends == [*begins[1:], clock.now]


def test_idle_time_in_which_input_is_read_counts_as_waiting_for_it(
    meter: Meter, clock: SimpleNamespace
) -> None:
    with meter.reading():
        clock.now += 3
        with meter.reading():
            clock.now += 1
    clock.now += 2
    assert meter.report().input_seconds == pytest.approx(4)
    # While another unit is decoded, the engine does not wait.
    with meter.reading():
        meter.step(Engine(clock, [(5.0, 10, 0)]), {"u": 1})
    meter.starved(6.0)
    report = meter.report()
    assert report.input_seconds == pytest.approx(10)
    assert meter.reading_seconds == pytest.approx(4)
    assert report.seconds.idle == pytest.approx(6)
    assert billing.input_bound([report]) == pytest.approx(10 / 11)


@pytest.mark.parametrize(
    ("input_seconds", "scale", "note"),
    [
        (12.0, 1.0, "input-bound 12% of the time; add readers (cluster.readers)"),
        (4.0, 1.0, ""),
        # A run of a few seconds tells nothing.
        (12.0, 0.5, ""),
    ],
)
def test_a_bill_says_if_engines_waited_for_input(
    input_seconds: float, scale: float, note: str
) -> None:
    input_seconds *= scale
    seconds = Seconds(startup=50.0, decode=40.0 * scale, idle=60.0 * scale)
    bill = Bill("s", 0.0, 1.0, workers=[WorkerTime("w", "n", 0.0, seconds=seconds)])
    bill.workers[0].input_seconds = input_seconds
    bill.seconds = {"startup": 50.0, "decode": 40.0 * scale, "idle": 60.0 * scale}
    cost = book.summed([bill], 10)
    assert cost is not None
    assert cost.input_bound_note == note
    assert cost.input_bound == input_seconds / (100 * scale)


def test_a_running_step_is_reported_as_far_as_it_has_come(
    meter: Meter, clock: SimpleNamespace
) -> None:
    reports = []

    class Slow(Engine):
        def step(self):
            clock.now += 3
            reports.append(meter.report())
            return super().step()

    meter.step(Slow(clock, [(1.0, 10, 0)]), {"u": 1})
    during_step = reports[0]
    assert during_step.seconds.busy == pytest.approx(3)
    assert sum(during_step.open["u"]) == pytest.approx(3)
    assert during_step.spans[-1][2:] == ("busy", "u")
    after_step = meter.report()
    assert after_step.seconds.busy == pytest.approx(4)
    assert sum(after_step.open["u"]) == pytest.approx(4)


def test_documents_in_one_prompt_share_its_tokens(meter: Meter) -> None:
    shares = meter.tokens("u", ["a", "b", "b"], TokenCounts(7, 0, 1))
    assert [share["prefill_tokens"] for share in shares] == [2, 2, 3]
    usage = meter.end("u").categories
    assert [
        (usage[UsageKey(name)]["prefill_tokens"], usage[UsageKey(name)]["decode_tokens"])
        for name in "ab"
    ] == [
        (2, 0),
        (5, 1),
    ]


def test_an_attempt_that_is_not_committed_is_lost(meter: Meter, clock: SimpleNamespace) -> None:
    meter.step(Engine(clock, [(2.0, 100, 300)]), {"u": 1})
    meter.lose("u")
    meter.lose("u")
    report = meter.report()
    assert report.seconds.busy == 0
    assert report.seconds.lost == pytest.approx(2.0)
    assert report.open == {}


def test_the_seconds_of_a_unit_go_to_its_categories_in_proportion_to_their_tokens(
    meter: Meter, clock: SimpleNamespace
) -> None:
    meter.documents("u", ["a", "a", "b"])
    meter.step(Engine(clock, [(4.0, 100, 100)]), {"u": 3})
    meter.tokens("u", ["a"], TokenCounts(75, 0, 10))
    meter.tokens("u", ["b"], TokenCounts(25, 0, 90))
    done = meter.end("u")
    expected = (2 * 0.75 + 2 * 0.1, 2 * 0.25 + 2 * 0.9)
    assert [done.categories[UsageKey(name)]["seconds"] for name in "ab"] == pytest.approx(expected)
    assert meter.report().ok == 0  # not before it is committed
    meter.commit("u", done, 2, 1)
    meter.lose("u")  # as the worker always does at the end
    report = meter.report()
    assert (report.ok, report.failed, report.seconds.lost) == (2, 1, 0)
    assert report.changes[-1].usage[UsageKey("a")]["documents"] == 2
    assert meter.end("w").categories == {}


def test_a_worker_has_a_bounded_number_of_spans() -> None:
    spans = []
    for i in range(5000):
        spans = joined(spans, (i, i + 1.0, "busy" if i % 2 else "idle", None))
    assert len(spans) <= 120
    assert (spans[0][0], spans[-1][1]) == (0, 5000)
    assert len(coarser(spans)) == -(-len(spans) // 2)
    assert joined([(0, 1, "busy", "u")], (1, 2, "busy", "u")) == [(0, 2, "busy", "u")]


def install_nvml(monkeypatch, counts: bool = True) -> list[int]:
    """Install a fake NVML with two GPUs, and return their counters in millijoules."""
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
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=[50, 90][gpu]),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=[2 << 30, 40 << 30][gpu]),
        nvmlDeviceGetClockInfo=lambda gpu, kind: [900, 2100][gpu],
        nvmlDeviceGetMaxClockInfo=lambda gpu, kind: 2520,
    )
    if not counts:
        fake.nvmlDeviceGetTotalEnergyConsumption = mock.Mock(side_effect=error)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return counters


@pytest.mark.parametrize(
    ("shown", "gpus", "joules"),
    [("0,1", 2, 11.0), ("1", 1, 8.0), ("GPU-b", 1, 8.0), ("1", 0.5, 4.0)],
)
def test_energy_is_counted_on_the_gpus_that_a_worker_sees(monkeypatch, shown, gpus, joules) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    counters = install_nvml(monkeypatch)
    joules_so_far = energy.GpuWatch(gpus).joules
    assert joules_so_far() == 0
    counters[:] = [4000, 13_000]
    assert joules_so_far() == joules


@pytest.mark.parametrize(
    ("shown", "gpus", "counts"), [("", 0, True), ("", 1, True), ("0", 1, False), ("0", 1, None)]
)
def test_energy_is_unknown_without_gpu_counter_or_driver(monkeypatch, shown, gpus, counts) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    install_nvml(monkeypatch, counts is True)
    if counts is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    assert energy.GpuWatch(gpus).joules() is None


def test_samples_of_gpu_use_are_combined_and_a_lost_gpu_is_noticed(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    install_nvml(monkeypatch)
    watch = energy.GpuWatch(2)
    assert [watch(), watch()] == [
        GpuUse(2, 0.7, 40.0, 1500.0, 2520.0),
        GpuUse(4, 0.7, 40.0, 1500.0, 2520.0),
    ]
    uses = [
        None,
        watch(),
        GpuUse(6, 0.2, 41.0, 300.0, 2520.0),
    ]
    assert energy.together(uses) == GpuUse(12, 0.45, 41.0, 900.0, 2520.0)
    assert str(watch()) == "GPUs 70% busy, 40 GiB at most, 1,500 of 2,520 MHz"
    error = sys.modules["pynvml"].NVMLError()
    monkeypatch.setattr(
        sys.modules["pynvml"], "nvmlDeviceGetMemoryInfo", mock.Mock(side_effect=error)
    )
    assert watch().samples == 8
    assert not watch.is_lost()
    error.value = 15
    assert watch.is_lost()
    monkeypatch.setattr(
        sys.modules["pynvml"], "nvmlDeviceGetHandleByIndex", mock.Mock(side_effect=error)
    )
    assert energy.GpuWatch(2).is_lost()  # before this process began


@pytest.mark.parametrize("package", [None, "without a driver"])
def test_gpu_use_is_unknown_without_nvml(monkeypatch, package) -> None:
    if package is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        install_nvml(monkeypatch)
        sys.modules["pynvml"].nvmlInit = mock.Mock(side_effect=sys.modules["pynvml"].NVMLError)
    watch = energy.GpuWatch(1)
    assert watch() is None
    assert not watch.is_lost()
    assert energy.together([None]) is None


def test_the_energy_of_a_run_is_known_if_every_gpu_was_measured() -> None:
    measured = report(1, decode=3600.0)
    unknown = report(1, decode=1800.0)
    measured.joules = 3.6e6
    measured.gpus = 1.0
    unknown.gpus = 2.0
    assert energy.kwh([measured]) == 1.0
    assert energy.kwh([measured, unknown]) is None
    without_gpu = report(1)
    assert energy.kwh([without_gpu]) is None
