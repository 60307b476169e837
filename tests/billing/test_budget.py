"""A budget is held to the cent over several runs, a deadline asks for the workers it takes or says
that it is lost.
"""

import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from raypd.billing import budget
from raypd.cluster import accounts as accounts_module
from raypd.cluster.accounts import Accounts
from raypd.cluster.driver import run_extract
from raypd.cluster.ledger_actor import Standing
from raypd.config.cluster import deadline_at
from raypd.errors import ConfigError
from tests.cluster.test_ledger_actor import begin, check_rows, check_sums, files, trial
from tests.processes import LONG, ended
from tests.runs import says, with_keys


def test_the_end_follows_the_slowest_pace_and_the_message_suggests_a_budget() -> None:
    assert budget.ends(100.0, [(90.0, 10)], []) == 100.0  # nobody knows
    assert budget.ends(100.0, [(90.0, 10), (98.0, 4)], [2.0, 1.0]) == 90.0 + 1.25 * 20
    assert budget.ends(200.0, [(90.0, 10)], [2.0, 1.0]) == 200.0  # it takes longer than any before
    line = budget.reached(20.0, 19.5, 1500, 5000)
    assert (
        "cost.budget_usd $20.00 is reached: 1,500 of 5,000 documents done for $19.50 ($13.00 "
        "per 1,000)"
    ) in line
    assert "will cost about $45.50" in line
    assert 19.5 + 45.5 < float(re.findall(r"cost\.budget_usd=([\d.]+)", line)[0]) < 80
    # Most of the budget may be left, because the run ends before it is spent.
    line = budget.reached(0.10, 0.05, 130, 200)
    assert float(re.findall(r"cost\.budget_usd=([\d.]+)", line)[0]) > 0.12
    assert "raise cost.budget_usd" in budget.reached(0.1, 0.09, 0, 5000)
    assert "about 5,000" in budget.reached(20.0, 19.5, 1500, 5000, exact=False)
    assert "0 of 1 document done" in budget.reached(0.1, 0.09, 0, 1)


def test_a_deadline_is_a_duration_or_a_time_and_determines_the_number_of_workers() -> None:
    durations = {
        "8h": 28800,
        "1h30m": 5400,
        "90m": 5400,
        "2d": 172800,
        "45s": 45,
        "0.5h": 1800,
    }
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
    assert workers == budget.NEVER
    assert seconds > 10.0


def test_a_deadline_without_a_zone_is_local_time(monkeypatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        noon_utc = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
        assert deadline_at("2026-11-30T21:00", 0.0) == noon_utc
        assert deadline_at("2026-11-30T12:00Z", 0.0) == noon_utc
        assert deadline_at("2026-11-30T07:00-05:00", 0.0) == noon_utc
    finally:
        monkeypatch.undo()
        time.tzset()


@given(
    st.integers(1, 10**6),
    st.floats(1, 1e5),
    st.floats(0.1, 1e3),
    st.floats(0, 600),
    st.integers(0, 50),
)
def test_the_number_of_workers_is_enough_and_clearly_fewer_are_not(
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
    """Make accounts with a fixed standing of the ledger.

    Returns:
        (the accounts, their clock, the lines that the user sees)
    """

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
        accounts = Accounts(run, run.output.path, lease, share, plan, 0, lines.append)
        accounts._standing = Standing(1000.0, *standing, None, stored=True)
        return accounts, clock, lines

    return make


def unit(name: str, documents: int = 10):
    return SimpleNamespace(id=name, expected=documents)


def test_units_begin_only_while_the_budget_pays_for_their_end(session) -> None:
    accounts, clock, _ = session(5.0, 0.1, 0, 0.0, 0.0, budget_usd=10.0)
    # While the pace is unknown, each worker gets one unit.
    assert accounts.admit(unit("a"), 0)
    assert not accounts.admit(unit("b"), 1)
    assert not accounts.held
    assert accounts.admit(unit("c"), 0)
    clock.now += 16.0
    assert accounts.admit(unit("empty"), 0)
    # A unit without documents has no pace.
    accounts.ended(unit("empty"), 0)
    assert not accounts.admit(unit("b"), 1)
    # At 1.6 s per document, a unit takes 20 s including the margin.
    accounts.ended(unit("a"), 10)
    # Of $10, 6.60 are spent, 1.00 is the reserve and 2.00 are for the unit, so 0.40 are left.
    assert accounts.admit(unit("d"), 1)
    clock.now += 4.1
    # Units in flight continue ...
    assert not accounts.admit(unit("e"), 0)
    assert accounts.held
    assert accounts.look(2) is None
    clock.now += 20.0
    # ... until only the reserve is left.
    with pytest.raises(budget.BudgetReached, match="10 of 1,000"):
        accounts.look(2)


def test_the_budget_reserves_the_tokens_of_units_in_flight(session) -> None:
    accounts, _, _ = session(0.0, 0.0, 0, 0.0, 0.0, budget_usd=10.0)
    accounts._asks_server = True
    # The first unit shows what tokens cost.
    assert accounts.admit(unit("a"), 0)
    assert not accounts.admit(unit("b"), 0)
    assert not accounts.held
    accounts.ended(unit("a"), 10)
    accounts._standing = replace(
        accounts._standing,
        usd=2.0,
        documents=10,
        usd_per_document=0.2,
    )
    accounts._unbilled = []
    # Each unit costs 2.50 including the margin.
    assert [accounts.admit(unit(name), 0) for name in "bcd"] == [True, True, True]
    # The cost of this unit is not on the bill yet.
    accounts.ended(unit("b"), 10)
    assert not accounts.admit(unit("e"), 0)
    assert accounts.held


def test_what_units_in_flight_have_cost_already_is_not_reserved_again(session) -> None:
    accounts, _, _ = session(0.0, 0.0, 0, 0.0, 0.0, budget_usd=10.0)
    # Two units cost 2.50 each including the margin, of which 1.00 is part of the 5.00 spent.
    accounts._standing = replace(
        accounts._standing, usd=5.0, documents=10, usd_per_document=0.2, open_usd=1.0
    )
    assert accounts.admit(unit("a"), 0)
    assert accounts.admit(unit("b"), 0)
    assert not accounts.admit(unit("c"), 0)


def test_no_unit_begins_before_the_bill_has_a_file(session, monkeypatch) -> None:
    accounts, _, lines = session(0.0, 0.0, 0, 0.0, 0.0)
    accounts._standing = Standing(1000.0, 0.0, 0.0, 0, 0.0, 0.0, None)
    now = accounts._began
    monkeypatch.setattr(accounts_module.time, "monotonic", lambda: now)
    assert not accounts.admit(unit("a"), 0)
    assert not accounts.held
    assert lines == []
    now += 61
    # The run does not wait for its bill any longer.
    assert accounts.admit(unit("a"), 0)
    assert "cannot be written" in lines[0]


def test_a_deadline_adds_workers_and_says_once_that_it_cannot_be_met(session) -> None:
    # A worker answers one document per second.
    accounts, clock, lines = session(0.0, 0.0, 50, 50.0, 5.0, deadline="300s")
    # No unit has ended yet.
    assert accounts.look(1) is None
    accounts.admit(unit("a"), 0)
    accounts.ended(unit("a"), 50)
    # 950 documents in 270 s take four workers; the number does not change again at once.
    assert accounts.look(1) == 4
    assert accounts.look(1) is None
    assert lines == []
    clock.now += 240
    assert accounts.look(4) == 8
    (line,) = lines
    says(
        line,
        "cannot be met: 950 documents left",
        "8 workers (cluster.max_workers)",
        "8 documents/s",
        "late;",
    )
    clock.now += 40
    accounts.look(8)
    assert len(lines) == 1


@pytest.mark.slow
def test_no_session_exceeds_its_budget_and_a_larger_budget_resumes(tmp_path) -> None:
    """The cluster costs ten cents per second. Budgets include all earlier sessions."""
    run = trial(tmp_path, units=40, prices={"local": 360.0})
    cap = 0.0
    step = 2.5
    sessions = 0
    while True:
        # On a busy machine, starting the workers alone may exceed the first budgets.
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
    assert len(trees) == sessions
    assert sum(tree["totals"]["documents"] for tree in trees) == 400
    assert "cost:   $" in out


@pytest.mark.slow
def test_a_run_that_underestimated_its_units_stops_at_the_reserve(tmp_path) -> None:
    """Units take minutes, which is unknown before the first has ended."""
    run = trial(
        tmp_path,
        units=4,
        prices={"local": 360.0},
        budget_usd=6.0,
    )
    err = ended(begin(run, "model.fake.step_seconds=8"), code=3)
    assert "0 of 40 documents done" in err
    (tree,) = files(tmp_path)
    check_sums(tree)
    assert 4.5 < tree["usd"] <= 6.0
    assert tree["parts"]["lost"] > 0.2
    # Another session with the same budget spends nothing.
    assert "is reached" in ended(begin(run, f"cost.budget_usd={tree['usd']}"), code=3)
    assert files(tmp_path) == [tree]


def test_a_budget_requires_a_price(tmp_path, ray_here) -> None:
    config = trial(
        tmp_path,
        units=1,
        prices={},
        budget_usd=5,
    ).config
    with pytest.raises(ConfigError, match=r"Set cost\.prices\.local in USD per hour"):
        run_extract(config)
