"""Who is asked for a share, and runs whose last unit is shared: whatever dies, every document once in one object."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from raypd.billing import book
from raypd.cluster import driver, scheduler, work_stealing
from raypd.cluster.components import WorkerComponents
from raypd.cluster.in_hand import Given, Lent, Worker
from raypd.cluster.shares import Progress
from raypd.cluster.work_stealing import Lending
from raypd.config import ClusterConfig, RunConfig
from raypd.dataset import writer
from raypd.run.records import UnitResult, to_json
from raypd.run.retry_policy import Attempt
from raypd.run.unit import Unit
from tests.cluster import fakes
from tests.cluster.test_ledger_actor import check_sums
from tests.processes import LONG, wait_for
from tests.runs import write_jsonl

# ------------------------------------------------------------------------------------------------- the pool's choices


class Actor:
    """Notes what it is asked, and answers nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.asked.append((name, arguments))
            return (object(), object()) if name == "borrow" else object()

        method = SimpleNamespace(remote=remote)
        method.options = lambda **_: method
        return method

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for asked, arguments in self.asked if asked == name]


def busy(needs: float | None, name: str = "u", deaths: int = 0, **progress: Any) -> Worker:
    """A worker with a unit in hand that will take it so many seconds."""
    worker = Worker(Actor(), node="n")
    given = Given(attempt=Attempt(Unit(name, ()), deaths=deaths))
    given.told(Progress(**{"answered": 10, "begun": True, "left": 50, "needs": needs, **progress}))
    worker.given[object()] = given
    return worker


def idle() -> Worker:
    return Worker(Actor(), node="n")


def unit_of(worker: Worker) -> Given:
    return next(iter(worker.given.values()))


def asks(*workers: Worker) -> list[int]:
    """How many shares each is asked for."""
    return [sum(len(names) for _, names in worker.actor.of("lend")) for worker in workers]


def test_who_has_most_left_is_asked_and_only_where_it_is_worth_it() -> None:
    short, long, longer = busy(3.0, "a"), busy(60.0, "b"), busy(100.0, "c")
    own = Lending([short, long, longer, idle()])
    own.offer(0.0)
    assert asks(short, long, longer) == [0, 0, 1]
    own.offer(0.0)  # the idle worker is spoken for
    assert asks(short, long, longer) == [0, 0, 1]
    own = Lending([busy(3.0), idle(), idle()])
    own.offer(0.0)
    assert own.awaited() == []
    single = busy(20.0)
    Lending([single, *(idle() for _ in range(9))]).offer(0.0)
    assert asks(single) == [4]  # five of them, four seconds for each


def test_shares_go_to_where_the_longest_is_left() -> None:
    small, large = busy(50.0, "a"), busy(120.0, "b")
    Lending([small, large, *(idle() for _ in range(4))]).offer(0.0)
    assert asks(small, large) == [1, 3]


def test_without_a_pace_a_unit_takes_what_others_took() -> None:
    new = busy(None, answered=0)
    Lending([new, idle()]).offer(0.0)
    assert asks(new) == [0]
    Lending([new, idle()]).offer(300.0)
    assert asks(new) == [1]


@pytest.mark.parametrize("why", ["bisecting", "leaving", "wanted", "not begun", "empty", "alone", "nobody is idle"])
def test_nothing_is_lent(why: str) -> None:
    lender, other = busy(100.0, deaths=why == "bisecting", begun=why != "not begun"), idle()
    lender.leaving = why == "leaving"
    for flag in ("empty", "alone"):
        setattr(unit_of(lender), flag, why == flag)
    if why == "wanted":
        unit_of(lender).wanted = time.monotonic()
    if why == "nobody is idle":
        other.leaving = True
    Lending([lender, other]).offer(100.0)
    assert asks(lender) == [0]


def lent(lender: Worker, borrower: Worker, names: list[str], closing: bool = False) -> Lending:
    """A unit whose owner has answered with shares."""
    own = Lending([lender, borrower])
    own.offer(0.0)
    (ask,) = own._asks.values()
    own._asks.clear()
    own._lend(ask, {name: [[7, 8], [9]] for name in names}, closing)
    return own


def test_what_nobody_can_take_any_more_goes_back() -> None:
    lender, borrower = busy(100.0), idle()
    lent(lender, borrower, ["x", "y"])
    assert [name for _, name, _ in borrower.actor.of("borrow")] == ["y"] or len(borrower.given) == 1
    assert len(lender.actor.of("take_back")) == 1
    lender, borrower = busy(100.0), idle()
    lent(lender, borrower, ["x"], closing=True)
    assert borrower.given == {}
    assert lender.actor.of("take_back") == [("u", "x")]


def test_a_borrower_that_hands_back_and_one_that_fails() -> None:
    for error, alone in ((None, False), ("it cannot be read", True)):
        lender, borrower = busy(100.0), idle()
        own = lent(lender, borrower, ["x"])
        share = borrower.given.popitem()[1]
        assert isinstance(share, Lent)
        own.answered(share, UnitResult(error=error, handed_back=error is None))
        assert lender.actor.of("take_back") == [("u", "x")]
        assert lender.actor.of("returned") == []
        assert unit_of(lender).alone == alone


def test_a_process_that_dies_of_a_share_counts_for_the_unit_and_a_node_that_goes_does_not() -> None:
    for blame in (True, False):
        lender, borrower = busy(100.0), idle()
        own = lent(lender, borrower, ["x"])
        share = borrower.given.popitem()[1]
        assert isinstance(share, Lent)
        own.lost(share, blame)
        assert lender.actor.of("take_back") == [("u", "x")]
        unit = unit_of(lender)
        assert (unit.alone, unit.deaths, unit.burdened(unit.attempt).bisecting) == (blame, int(blame), blame)


def test_shares_of_a_lost_unit_are_dropped_whoever_has_them() -> None:
    lender, borrower = busy(100.0), idle()
    own = lent(lender, borrower, ["x"])
    share = unit_of(borrower)
    further = idle()
    own._workers.append(further)
    share.told(Progress(answered=1, begun=True, left=20, needs=50.0))
    own.offer(0.0)
    (ask,) = own._asks.values()
    own._lend(ask, {"y": [[9]]}, False)
    own.drop(unit_of(lender))
    assert borrower.actor.of("hand_back") == [("x", False)]
    assert further.actor.of("hand_back") == [("y", False)]
    further_share, borrower_share = further.given.popitem()[1], borrower.given.popitem()[1]
    for dropped in (further_share, borrower_share):
        assert isinstance(dropped, Lent)
        own.answered(dropped, UnitResult(handed_back=True))
    assert lender.actor.of("take_back") == borrower.actor.of("take_back") == []


def test_who_waits_for_what_it_has_lent_can_borrow() -> None:
    lender, borrower = busy(100.0), idle()
    own = lent(lender, borrower, ["x"])
    assert own.free() == []
    unit_of(lender).told(Progress(answered=60, begun=True, left=0, needs=0.0))
    assert own.free() == [lender]


def test_a_run_at_the_end_of_its_budget_lends_nothing() -> None:
    order: Any = None
    own = scheduler.Scheduler(order, order, ClusterConfig(), print)
    own.workers += [busy(100.0), idle()]
    own._dry = own.closing = True
    own._assign()
    assert asks(*own.workers) == [0, 0]
    own.closing = False
    own._assign()
    assert asks(*own.workers) == [1, 0]


# ------------------------------------------------------------------------------------------------------------ real runs


class Held(fakes.FakeEngine):
    """Waits at a document `hold` until the file `go` is there."""

    def step(self) -> list[fakes.Finished]:
        assert self.folder is not None
        if any("hold" in titles for titles, _ in self.queue[: self.batch]):
            wait_for((self.folder / "go").exists, "nobody let it go")
        return super().step()


def build(config: RunConfig, threads: int | None) -> WorkerComponents:
    folder = Path(config.output.path)
    return WorkerComponents(Held(config.engine.max_num_seqs, folder), fakes.FakeTask(), None)


class Stage:
    """A run of a long unit, whose documents wait but for the first, and a quick one for every other worker.

    titles: of the long unit behind its first 8 documents. borrowed: who has got a share of it, from whom.
    """

    def __init__(self, tmp_path: Path, config: Any, monkeypatch: Any, workers: int, titles: list[str]) -> None:
        self.count = 8 + len(titles)
        write_jsonl(tmp_path / "in/a.jsonl", ["first"] * 8 + titles)
        for i in range(1, workers):
            write_jsonl(tmp_path / f"in/b{i}.jsonl", ["quick"] * self.count)
        keys = {"max_workers": workers, "units_in_flight": 1, "max_num_seqs": 4, "unit_documents": self.count}
        self.run = config(str(tmp_path / "in"), **keys)
        self.documents = self.count * workers
        self.borrowed: list[tuple[Worker, Worker]] = []
        self.said: list[str] = []
        borrow, assign, given_word = (
            work_stealing.Lending._borrow,
            scheduler.Scheduler._assign,
            driver.progress.Display.say,
        )

        def listen(own: Lending, worker: Worker, ask: Any, name: str, groups: Any) -> None:
            borrow(own, worker, ask, name, groups)
            self.borrowed.append((worker, ask.worker))
            self.on_borrowed()

        def patient(own: scheduler.Scheduler) -> None:  # all are there before the first unit is given out
            if sum(worker.ready for worker in own.workers) >= workers or any(worker.given for worker in own.workers):
                self.began = True
            if self.began:
                assign(own)

        def say(own: Any, line: str) -> None:
            self.said.append(line)
            given_word(own, line)

        self.began = False
        monkeypatch.setattr(work_stealing, "WORTH_SECONDS", 0.05)
        monkeypatch.setattr(work_stealing.Lending, "_borrow", listen)
        monkeypatch.setattr(scheduler.Scheduler, "_assign", patient)
        monkeypatch.setattr(driver.progress.Display, "say", say)
        monkeypatch.setattr(scheduler, "_IDLE_SECONDS", LONG)

    def on_borrowed(self) -> None:
        """Called after each share that is borrowed."""

    def go(self) -> None:
        (Path(self.run.output.path) / "go").touch()

    def rows(self) -> list[dict[str, Any]]:
        """Of the long unit's one object, after a look at all of the run: every document once."""
        made = driver.run_extract(self.run, build=build)
        found: dict[str, list[dict[str, Any]]] = {}
        for name, path in writer.objects(self.run.output.path):
            found[name] = pq.read_table(path).to_pylist()
        (long,) = (rows for rows in found.values() if rows[0]["source"] == "a.jsonl")
        assert [row["id"] for row in long] == [str(i) for i in range(self.count)]
        assert sum(map(len, found.values())) == made.documents == self.documents
        (bill,) = map(to_json, book.bills(self.run.output.path))
        check_sums(bill)
        assert bill["totals"]["documents"] == self.documents
        assert bill["totals"]["decode_tokens"] == made.decode_tokens
        return long


def pid(worker: Worker) -> int:
    from ray._private.state import actors

    return int(actors(worker.actor._actor_id.hex())["Pid"])


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_long_unit_is_shared_by_all_and_committed_once(
    tmp_path: Path, config, monkeypatch, ray_here, workers: int
) -> None:
    stage = Stage(tmp_path, config, monkeypatch, workers, ["hold"] * 192)

    def look() -> None:
        if len({id(borrower) for borrower, _ in stage.borrowed}) == workers - 1:
            stage.go()

    stage.on_borrowed = look  # type: ignore[method-assign]
    rows = stage.rows()
    assert {row["attempts"] for row in rows} == {1}
    assert Counter(row["status"] for row in rows) == {"ok": stage.count}
    (bill,) = map(to_json, book.bills(stage.run.output.path))
    tokens = [sum(own["decode_tokens"] for own in worker["categories"].values()) for worker in bill["workers"]]
    assert sum(tokens) == workers * stage.count / 2 * 3  # three for every work of two documents
    assert sum(own > stage.count / 2 * 3 for own in tokens) == workers - 1  # their own unit, and some of the long one
    assert all(worker["seconds"]["lost"] == 0 for worker in bill["workers"])


@pytest.mark.slow
def test_a_borrower_that_is_killed_blames_nobody(tmp_path: Path, config, monkeypatch, ray_here) -> None:
    stage = Stage(tmp_path, config, monkeypatch, 2, ["hold"] * 92)

    def kill() -> None:
        os.kill(pid(stage.borrowed[0][0]), signal.SIGKILL)
        stage.go()

    stage.on_borrowed = kill  # type: ignore[method-assign]
    rows = stage.rows()
    assert {row["attempts"] for row in rows} == {1}  # its owner did the rest, in the same attempt
    assert len(stage.borrowed) == 1
    assert any("what it helped with is done elsewhere" in line for line in stage.said)


@pytest.mark.slow
def test_an_owner_that_is_killed_has_its_unit_tried_again(tmp_path: Path, config, monkeypatch, ray_here) -> None:
    stage = Stage(tmp_path, config, monkeypatch, 2, ["hold"] * 92)

    def kill() -> None:
        os.kill(pid(stage.borrowed[0][1]), signal.SIGKILL)
        stage.go()

    stage.on_borrowed = kill  # type: ignore[method-assign]
    rows = stage.rows()
    assert {row["attempts"] for row in rows} == {2}
    assert len(stage.borrowed) == 1  # with care, and so by one worker
    assert any("its units are tried again" in line for line in stage.said)


@pytest.mark.slow
def test_a_document_that_kills_who_borrows_it_is_found(tmp_path: Path, config, monkeypatch, ray_here) -> None:
    stage = Stage(tmp_path, config, monkeypatch, 2, ["hold"] * 87 + ["kill"] + ["hold"] * 4)
    stage.on_borrowed = stage.go  # type: ignore[method-assign]
    rows = stage.rows()
    errors = {row["id"]: row["error"] for row in rows if row["error"]}
    assert list(errors) == ["95"]
    assert errors["95"].startswith("killed its worker process")
    assert len(stage.borrowed) == 1
