"""The bill's arithmetic: parts and nodes add up to the last micro-dollar, and every second has its place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raypd.billing import bill as billing
from raypd.billing.bill import Charges, apportion, make, shared_seconds
from raypd.run.records import NodeTime, Seconds, WorkerTime

HOUR = 3600.0


def worker(node: str = "n", began: float = 0.0, heard: float = HOUR, **seconds: float) -> WorkerTime:
    return WorkerTime(f"w-{began}", node, began, heard, seconds=Seconds(**seconds))


def parts(bill: Charges) -> dict[str, float]:
    return {name: billing.usd(value) for name, value in bill.parts.items() if value}


# --------------------------------------------------------------------------------------------------------- by the hand


def test_an_hour_of_the_paper_s_machine() -> None:
    node = NodeTime("n", 0.0, usd_per_hour=30.13118, slots=1)
    bill = make([node], [worker(startup=360, prefill=900, decode=1800, idle=180, lost=360)], 0.0, HOUR)
    assert bill.total == 30_131_180
    assert parts(bill) == {"startup": 3.013118, "prefill": 7.532795, "decode": 15.06559, "idle": 1.506559,
                           "lost": 3.013118}  # fmt: skip


def test_a_node_is_billed_within_the_session_only() -> None:
    node = NodeTime("n", -HOUR, ended=1800.0, usd_per_hour=10.0, slots=1)
    assert make([node], [], 0.0, HOUR).total == 5_000_000
    assert make([NodeTime("n", 1800.0, usd_per_hour=10.0, slots=1)], [], 0.0, HOUR).total == 5_000_000
    assert make([NodeTime("n", 2 * HOUR, usd_per_hour=10.0, slots=1)], [], 0.0, HOUR).total == 0


def test_a_head_without_workers_and_a_node_that_can_have_none() -> None:
    head, other = NodeTime("h", 0.0, head=True, usd_per_hour=1.0), NodeTime("o", 0.0, usd_per_hour=2.0)
    assert parts(make([head, other], [], 0.0, HOUR)) == {"head": 1.0, "other": 2.0}
    both = NodeTime("n", 0.0, head=True, usd_per_hour=1.0, slots=1)  # a laptop is head and worker
    assert parts(make([both], [worker(decode=HOUR)], 0.0, HOUR)) == {"decode": 1.0}


def test_slots_without_a_worker_are_startup_before_the_first_and_idle_after() -> None:
    node = NodeTime("n", 0.0, usd_per_hour=8.0, slots=8)
    late = worker(began=900.0, startup=900.0, decode=1800.0)
    # 8 slots x 900 s before; then one of 8 slots has the worker.
    assert parts(make([node], [late], 0.0, HOUR)) == {"startup": 2.25, "decode": 0.5, "idle": 5.25}
    assert parts(make([node], [], 0.0, HOUR)) == {"idle": 8.0}


def test_work_in_hand_of_a_worker_that_is_gone_is_lost() -> None:
    node = NodeTime("n", 0.0, usd_per_hour=1.0, slots=1)
    dead = worker(heard=1800.0, prefill=600.0, decode=1200.0)
    dead.open = {"u": (200.0, 400.0)}
    assert parts(make([node], [dead], 0.0, HOUR)) == {"prefill": 0.111111, "decode": 0.222222, "lost": 0.166667,
                                                      "idle": 0.5}  # fmt: skip
    heard = worker(heard=HOUR - 5, prefill=600.0, decode=1200.0)
    heard.open = {"u": (200.0, 400.0)}
    assert make([node], [heard], 0.0, HOUR).parts["lost"] == 0
    assert make([node], [heard], 0.0, HOUR, final=True).parts["lost"] == 166_667


def test_two_runs_on_one_cluster_pay_it_together() -> None:
    assert shared_seconds(0, 100, []) == 100
    assert shared_seconds(0, 100, [(40, 2), (60, 1)]) == 40 + 10 + 40
    assert shared_seconds(50, 55, [(40, 2), (60, 4)]) == 2.5
    node = NodeTime("n", 0.0, usd_per_hour=10.0, slots=1)
    one = make([node], [], 0.0, HOUR, shares=[(600.0, 2)])
    two = make([node], [], 600.0, HOUR, shares=[(600.0, 2)])
    assert one.total + two.total == 10_000_000


def test_a_machine_without_a_price_has_its_seconds() -> None:
    bill = make([NodeTime("n", 0.0, slots=1)], [worker(startup=600, decode=3000)], 0.0, HOUR)
    assert bill.total == 0
    assert bill.seconds["decode"] == 3000
    assert bill.seconds["startup"] == 600


def test_a_worker_that_reports_more_than_it_lived_is_cut() -> None:
    node = NodeTime("n", 0.0, ended=1800.0, usd_per_hour=2.0, slots=1)
    bill = make([node], [worker(prefill=900, decode=2700)], 0.0, HOUR)
    assert parts(bill) == {"prefill": 0.25, "decode": 0.75}


def test_categories_share_the_whole_bill_by_their_busy_seconds() -> None:
    shared = billing.shared_out(10, {"a": {"seconds": 1.0}, "b": {"seconds": 2.0}, "c": {"seconds": 0.0}})
    assert sum(round(own["usd"] * 1e6) for own in shared.values()) == 10
    assert shared["c"]["usd"] == 0
    assert billing.shared_out(10, {}) == {}


# ---------------------------------------------------------------------------------------------------------- properties

amounts = st.integers(0, 10**13)
weights = st.dictionaries(st.text(max_size=3), st.floats(0, 1e9), max_size=12)


@given(amounts, weights)
def test_shares_add_up_and_are_in_proportion(total, weights) -> None:
    shares = apportion(total, weights)
    whole = sum(weights.values())
    assert sum(shares.values()) == (total if whole > 0 else 0)
    for name, share in shares.items():
        assert share >= 0
        if whole > 0:
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
def test_nodes_and_parts_add_up_to_the_last_micro_dollar(nodes, workers, began, until, final, shares) -> None:
    bill = make(nodes, workers, began, until, shares=sorted(shares), final=final)
    assert sum(bill.nodes.values()) == bill.total
    assert sum(bill.parts.values()) == bill.total
    assert set(bill.parts) == set(billing.PARTS)
    assert all(value >= 0 for value in bill.parts.values())
    assert all(value >= -1e-6 for value in bill.seconds.values())
    # ... and to the cent as a reader of the file adds them.
    assert abs(sum(billing.usd(v) for v in bill.parts.values()) - billing.usd(bill.total)) < 0.005
