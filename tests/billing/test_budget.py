"""A budget is held to the cent over several runs, a deadline asks for the workers it takes or says
that it is lost.
"""

import re
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypd.billing import budget
from raypd.cluster import accounts as accounts_module
from raypd.cluster.accounts import Accounts
from raypd.cluster.driver import run_extract
from raypd.cluster.ledger_actor import Standing
from raypd.config.cluster import deadline_at
from raypd.errors import ConfigError
from tests.cluster.test_ledger_actor import begin, check_rows, check_sums, files, trial
from tests.faults.trial import EXECUTORS
from tests.processes import LONG, ended
from tests.runs import says, with_keys


def test_the_end_is_that_of_the_slowest_pace_and_its_message_says_how_to_go_on() -> None:
    assert budget.ends(100.0, [(90.0, 10)], []) == 100.0  # nobody knows
    assert budget.ends(100.0, [(90.0, 10), (98.0, 4)], [2.0, 1.0]) == 90.0 + 1.25 * 20
    assert budget.ends(200.0, [(90.0, 10)], [2.0, 1.0]) == 200.0  # it takes longer than any before
    line = budget.reached(20.0, 19.5, 1500, 5000)
    assert (
        "cost.budget_usd $20.00 is reached: 1,500 of 5,000 documents done for $19.50 ($13.00 "
        "per 1,000)"
    ) in line
    assert "takes about $45.50" in line
    assert 19.5 + 45.5 < float(re.findall(r"cost\.budget_usd=([\d.]+)", line)[0]) < 80
    assert "raise cost.budget_usd" in budget.reached(0.1, 0.09, 0, 5000)
    assert "about 5,000" in budget.reached(20.0, 19.5, 1500, 5000, exact=False)
    assert "0 of 1 document done" in budget.reached(0.1, 0.09, 0, 1)


def test_a_deadline_is_a_duration_or_a_time_and_takes_so_many_workers() -> None:
    durations = {"8h": 28800, "1h30m": 5400, "90m": 5400, "2d": 172800, "45s": 45, "0.5h": 1800}
    assert {text: deadline_at(text, 1000.0) - 1000.0 for text in durations} == durations
    assert deadline_at("2026-11-30T18:00:00+00:00", 0.0) == 1796061600
    assert deadline_at("2026-11-30T18:00", 0.0) == datetime(2026, 11, 30, 18).timestamp()
    assert deadline_at("2026-11-30", 0.0) == datetime(2026, 11, 30).timestamp()
    for text in ("", "soon", "8 hours", "25:00"):
        with pytest.raises(ValueError, match="neither a time"):
            deadline_at(text, 0.0)
    # 10 documents/s each, no startup: 10,000 in 100 s takes ten.
    assert budget.need(10_000, 100.0, 10.0, 0.0, 1, 20) == (10, 100.0)
    assert budget.need(900, 100.0, 10.0, 50.0, 1, 20) == (1, 90.0)
    # New ones lose their startup: one worker does 1,000 of 10,000 in 100 s, each new one 500.
    assert budget.need(10_000, 100.0, 10.0, 50.0, 1, 40)[0] in (19, 20)
    assert budget.need(10_000, 100.0, 10.0, 0.0, 1, 4) == (10, 250.0)
    workers, seconds = budget.need(10_000, 10.0, 10.0, 50.0, 1, 4)
    assert (workers, seconds > 10.0) == (budget.NEVER, True)


@given(
    st.integers(1, 10**6),
    st.floats(1, 1e5),
    st.floats(0.1, 1e3),
    st.floats(0, 600),
    st.integers(0, 50),
)
def test_so_many_workers_are_enough_and_few_less_are_not(
    documents, seconds, rate, startup, running
) -> None:
    workers, takes = budget.need(documents, seconds, rate, startup, running, budget.NEVER)
    if workers < budget.NEVER:
        assert takes <= (1 + 1e-6) * seconds
        if workers > max(2, running):
            assert (
                budget.need(
                    documents, seconds, rate, startup, running, max(1, int(workers * 0.95) - 1)
                )[1]
                > seconds
            )


@pytest.fixture
def session(config, monkeypatch):
    """Accounts whose ledger always says the same, their clock, and the lines that the user gets."""

    def make(*standing: float, **cost) -> tuple[Accounts, SimpleNamespace, list[str]]:
        clock = SimpleNamespace(now=1000.0)
        lines = []
        monkeypatch.setattr(accounts_module.ledger_actor, "start", lambda *_: None)
        monkeypatch.setattr(accounts_module.time, "time", lambda: clock.now)
        monkeypatch.setattr(Accounts, "_ask", lambda self: None)
        run = with_keys(config("x.jsonl", max_workers=8), cost=cost)
        share = SimpleNamespace(cpus=1, gpus=0)
        lease = SimpleNamespace(id="s", began=1000.0)
        plan = SimpleNamespace(documents=1000, exact=True)
        own = Accounts(run, run.output.path, lease, share, plan, 0, lines.append)
        own._standing = Standing(1000.0, *standing, None, kept=True)
        return own, clock, lines

    return make


def unit(name: str, documents: int = 10):
    return SimpleNamespace(id=name, expected=documents)


def test_units_are_begun_while_their_end_can_be_paid(session) -> None:
    own, clock, _ = session(5.0, 0.1, 0, 0.0, 0.0, budget_usd=10.0, reserve_seconds=10.0)
    # The pace is not known: one a worker.
    assert (own.admit(unit("a"), 0), own.admit(unit("b"), 1), own.held) == (True, False, False)
    assert own.admit(unit("c"), 0)
    clock.now += 16.0
    assert own.admit(unit("empty"), 0)
    own.ended(unit("empty"), 0)  # says nothing of the pace
    assert not own.admit(unit("b"), 1)
    own.ended(unit("a"), 10)  # 1.6 s a document; with caution a unit takes 20 s
    # 6.60 spent by now, 1.00 in reserve, 2.00 for the unit: 0.40 to spare.
    assert own.admit(unit("d"), 1)
    clock.now += 4.1
    # What is in flight goes on ...
    assert (own.admit(unit("e"), 0), own.held, own.look(2)) == (False, True, None)
    clock.now += 20.0
    # ... until only the reserve is left.
    with pytest.raises(budget.BudgetReached, match="10 of 1,000"):
        own.look(2)


def test_tokens_of_what_is_in_flight_are_kept_of_the_budget(session) -> None:
    own, _, _ = session(0.0, 0.0, 0, 0.0, 0.0, budget_usd=10.0)
    own._asks_server = True
    # One to learn from.
    assert (own.admit(unit("a"), 0), own.admit(unit("b"), 0), own.held) == (True, False, False)
    own.ended(unit("a"), 10)
    own._standing = replace(own._standing, usd=2.0, documents=10, usd_per_document=0.2)
    own._unbilled = []
    # 2.50 each, with caution.
    assert [own.admit(unit(name), 0) for name in "bcd"] == [True, True, True]
    own.ended(unit("b"), 10)  # what it took since then is not on the bill yet
    assert (own.admit(unit("e"), 0), own.held) == (False, True)


def test_no_unit_is_begun_before_the_bill_has_a_file(session, monkeypatch) -> None:
    own, _, lines = session(0.0, 0.0, 0, 0.0, 0.0)
    own._standing = Standing(1000.0, 0.0, 0.0, 0, 0.0, 0.0, None)
    now = own._began
    monkeypatch.setattr(accounts_module.time, "monotonic", lambda: now)
    assert (own.admit(unit("a"), 0), own.held, lines) == (False, False, [])
    now += 61
    assert own.admit(unit("a"), 0)  # a bill is not worth a run
    assert "cannot be written" in lines[0]


def test_a_deadline_asks_for_workers_and_says_when_it_is_lost(session) -> None:
    # One document a second and worker.
    own, clock, lines = session(0.0, 0.0, 50, 50.0, 5.0, deadline="300s")
    assert own.look(1) is None  # no unit has ended
    own.admit(unit("a"), 0)
    own.ended(unit("a"), 50)
    assert (own.look(1), own.look(1), lines) == (4, None, [])  # 950 in 270 s; not again at once
    clock.now += 240
    assert own.look(4) == 8
    (line,) = lines
    says(
        line,
        "cannot be met: 950 documents left",
        "8 workers (cluster.max_workers)",
        "8 documents/s",
        "late;",
    )
    clock.now += 40
    own.look(8)
    assert len(lines) == 1


@pytest.mark.slow
def test_the_cap_is_held_to_the_cent_and_a_larger_one_goes_on(tmp_path) -> None:
    """Ten cents a second: every session that is cut stays below its cap with all sessions before
    it.
    """
    run = trial(tmp_path, units=40, prices={"local": 360.0}, reserve_seconds=10.0)
    cap = 0.0
    step = 2.5
    sessions = 0
    while True:
        # On a busy machine the start alone may take the first ones.
        cap = round(cap + step, 2)
        step = 1.3 * step
        sessions += 1
        assert sessions < 20, "no end"
        process = begin(run, f"cost.budget_usd={cap}")
        out, err = process.communicate(timeout=LONG)
        trees = files(tmp_path)
        assert sum(tree["usd"] for tree in trees) <= cap
        for tree in trees:
            check_sums(tree)
            assert tree["final"]
        if process.returncode == 0:
            break
        assert process.returncode == 3, err
        assert f"cost.budget_usd ${cap:.2f} is reached" in err
    assert sessions > 1
    check_rows(run)
    assert (len(trees), sum(tree["totals"]["documents"] for tree in trees)) == (sessions, 400)
    assert "cost:   $" in out


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_run_that_misjudged_is_stopped_and_what_is_in_flight_is_lost(tmp_path, executor) -> None:
    """Units that take minutes: nobody knows it before the first has ended."""
    run = trial(tmp_path, units=4, prices={"local": 360.0}, reserve_seconds=10.0, budget_usd=6.0)
    err = ended(begin(run, "model.fake.step_seconds=8", f"cluster.executor={executor}"), code=3)
    assert "0 of 40 documents done" in err
    (tree,) = files(tmp_path)
    check_sums(tree)
    assert 4.5 < tree["usd"] <= 6.0
    assert tree["parts"]["lost"] > 0.2
    # Not a cent more.
    assert "is reached" in ended(begin(run, f"cost.budget_usd={tree['usd']}"), code=3)
    assert files(tmp_path) == [tree]


def test_a_budget_needs_a_price(tmp_path, ray_here) -> None:
    config = trial(tmp_path, units=1, prices={}, budget_usd=5).config
    with pytest.raises(ConfigError, match=r"set cost\.prices\.local in USD per hour"):
        run_extract(config)
