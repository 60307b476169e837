"""The bill's arithmetic: parts and nodes add up to the last micro-dollar, and every second has its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypd.billing import bill as billing
from raypd.billing.bill import apportion, make, shared_seconds
from raypd.run.records import Bill, NodeTime, Seconds, WorkerTime

HOUR = 3600.0


def worker(began: float = 0.0, heard: float = HOUR, open=None, **seconds: float) -> WorkerTime:
    return WorkerTime("w", "n", began, heard, seconds=Seconds(**seconds), open=open or {})


def node(began=0.0, usd=1.0, slots=1, ended=None, head=False) -> NodeTime:
    return NodeTime("n", began, head, usd_per_hour=usd, ended=ended, slots=slots)


OPEN = {"prefill": 600.0, "decode": 1200.0, "open": {"u": (200.0, 400.0)}}  # 10 of 30 minutes are of a unit in flight


@pytest.mark.parametrize(("node", "workers", "expected"), [
    # An hour of the paper's machine.
    (node(usd=30.13118), [worker(startup=360, prefill=900, decode=1800, idle=180, lost=360)],
     {"startup": 3.013118, "prefill": 7.532795, "decode": 15.06559, "idle": 1.506559, "lost": 3.013118}),
    # A node is billed within the session only.
    (node(-HOUR, 10.0, ended=1800.0), [], {"idle": 5.0}), (node(1800.0, 10.0), [], {"idle": 5.0}),
    (node(2 * HOUR, 10.0), [], {}),
    # A head without workers, a node that can have none, a laptop that is head and worker.
    (node(slots=0, head=True), [], {"head": 1.0}), (node(slots=0), [], {"other": 1.0}),
    (node(head=True), [worker(decode=HOUR)], {"decode": 1.0}),
    # 8 slots x 900 s before the first worker; then one of 8 slots has it.
    (node(usd=8.0, slots=8), [worker(began=900.0, startup=900.0, decode=1800.0)],
     {"startup": 2.25, "decode": 0.5, "idle": 5.25}),
    (node(usd=8.0, slots=8), [], {"idle": 8.0}),
    # The units in flight of a worker that was not heard of are lost, of one that was they are not.
    (node(), [worker(heard=1800.0, **OPEN)], {"prefill": 0.111111, "decode": 0.222222, "lost": 0.166667, "idle": 0.5}),
    (node(), [worker(heard=HOUR - 5, **OPEN)], {"prefill": 0.166667, "decode": 0.333333, "idle": 0.5}),
    # A worker that reports more than it lived is cut.
    (node(usd=2.0, ended=1800.0), [worker(prefill=900, decode=2700)], {"prefill": 0.25, "decode": 0.75})])  # fmt: skip
def test_an_hour_by_hand(node: NodeTime, workers: list[WorkerTime], expected: dict[str, float]) -> None:
    bill = make([node], workers, Bill("", 0.0, 0.0), HOUR)
    assert {name: billing.usd(value) for name, value in bill.parts.items() if value} == expected


def test_two_runs_on_one_cluster_pay_it_together() -> None:
    assert (shared_seconds(0, 100, []), shared_seconds(0, 100, [(40, 2), (60, 1)])) == (100, 40 + 10 + 40)
    assert shared_seconds(50, 55, [(40, 2), (60, 4)]) == 2.5
    one, two = (make([node(usd=10.0)], [], Bill("", began, 0.0, shares=[(600.0, 2)]), HOUR) for began in (0.0, 600.0))
    assert one.total + two.total == 10_000_000


def test_a_machine_without_a_price_has_its_seconds() -> None:
    bill = make([node(usd=0.0)], [worker(startup=600, decode=3000)], Bill("", 0.0, 0.0), HOUR)
    assert (bill.total, bill.seconds["decode"], bill.seconds["startup"]) == (0, 3000, 600)


def test_categories_share_the_whole_bill_by_their_busy_seconds() -> None:
    shared = billing.shared_out(10, {"a": {"seconds": 1.0}, "b": {"seconds": 2.0}, "c": {"seconds": 0.0}})
    assert (sum(round(own["usd"] * 1e6) for own in shared.values()), shared["c"]["usd"]) == (10, 0)
    assert billing.shared_out(10, {}) == {}


@given(st.integers(0, 10**13), st.dictionaries(st.text(max_size=3), st.floats(0, 1e9), max_size=12))
def test_shares_add_up_and_are_in_proportion(total, weights) -> None:
    shares, whole = apportion(total, weights), sum(weights.values())
    assert sum(shares.values()) == (total if whole > 0 else 0)
    assert min(shares.values(), default=0) >= 0
    for name, share in shares.items() if whole > 0 else ():
        assert abs(share - total * (weights[name] / whole)) <= 1 + total * 1e-12


times = st.floats(0, 1e6)
seconds = st.builds(Seconds, *[st.floats(0, 1e5)] * 5)
nodes = st.builds(NodeTime, st.sampled_from("abc"), times, head=st.booleans(), usd_per_hour=st.floats(0, 150),
                  ended=st.none() | times, slots=st.integers(0, 8))  # fmt: skip
workers = st.builds(WorkerTime, st.just("w"), st.sampled_from("abc"), times, times, ended=st.none() | times,
                    seconds=seconds, open=st.dictionaries(st.sampled_from("uv"),
                                                          st.tuples(st.floats(0, 1e5), st.floats(0, 1e5))))  # fmt: skip


@given(
    st.lists(nodes, max_size=3, unique_by=lambda n: n.node), st.lists(workers, max_size=6), times, times,
    st.booleans(), st.lists(st.tuples(times, st.integers(1, 5)), max_size=3))  # fmt: skip
def test_nodes_and_parts_add_up_to_the_last_micro_dollar(nodes, workers, began, until, final, shares) -> None:
    bill = make(nodes, workers, Bill("", began, 0.0, shares=sorted(shares), final=final), until)
    assert (sum(bill.nodes.values()), sum(bill.parts.values())) == (bill.total, bill.total)
    assert set(bill.parts) == set(billing.PARTS)
    assert all(value >= 0 for value in (*bill.parts.values(), *(took + 1e-6 for took in bill.seconds.values())))
    # ... and to the cent as a reader of the file adds them.
    assert abs(sum(billing.usd(v) for v in bill.parts.values()) - billing.usd(bill.total)) < 0.005
