"""Who gets which unit: nobody idles while another has a queue. Whole runs are in test_driver.py."""

import gc
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
import ray

from raypd.answering.request_queue import Progress
from raypd.cluster import driver, pool_executor
from raypd.cluster.in_flight import Assignment, WorkerHandle
from raypd.cluster.ledger_actor import Ask, PoolState
from raypd.cluster.ray_data_executor import RayDataExecutor
from raypd.config import ClusterConfig
from raypd.errors import RunError
from raypd.run.records import UnitResult
from raypd.run.unit import Unit
from tests.cluster import fakes, flat_memory
from tests.processes import LONG, wait_for
from tests.runs import write_jsonl

BEGUN = Progress(answered=10, begun=True, seconds_left=60.0)
PLACES = (
    ("a", "w1", "stays", 0),
    ("b", "w2", "goes", 0),
    ("c", "w1", "stays", 1),
    ("ended", "w1", "stays", 0),
)
ASKS = [Ask(Unit(unit, ()), *place) for unit, *place in PLACES]


class Actor:
    """Notes what it is asked for, and answers nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            remote=lambda *arguments: self.calls.append((name, *arguments)) or object()
        )


def worker(*progress: Progress) -> WorkerHandle:
    """A worker with a unit in flight for each progress: u0, u1, ..."""
    made = WorkerHandle(Actor(), node="n")
    for number, own in enumerate(progress):
        assignment = Assignment(Unit(f"u{number}", ()), progress=own)
        assignment.reported = assignment.since
        made.assignments[object()] = assignment
    return made


def assigning(
    *workers: WorkerHandle, units: int = 0, **attributes: Any
) -> pool_executor.PoolExecutor:
    """An executor that has assigned so many units to these workers."""
    own = pool_executor.PoolExecutor(None, None, ClusterConfig(units_in_flight=2), print)  # type: ignore[arg-type]
    own.workers += workers
    own._source = iter([Unit(f"new{n}", ()) for n in range(units)])
    vars(own).update(attributes)
    own._assign()
    return own


def calls(*workers: WorkerHandle) -> list[list[tuple[Any, ...]]]:
    return [
        [call if call[0] == "cancel" else call[1].id for call in own.actor.calls] for own in workers
    ]


def test_an_idle_worker_gets_a_unit_that_has_not_begun() -> None:
    one = worker(BEGUN, Progress())
    two = worker(BEGUN, Progress(), Progress())
    own = assigning(one, two, worker())
    assert calls(one, two) == [[], [("cancel", "u2", True)]]  # of who has most
    own._assign()  # it is on its way
    assert calls(one, two) == [[], [("cancel", "u2", True)]]
    _, cancelled = two.assignments.popitem()
    assert list(own._ended(cancelled, UnitResult(handed_back=True))) == []
    own._assign()
    assert calls(own.workers[2]) == [["u2"]]


def test_a_long_wait_of_an_engine_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = assigning(worker(BEGUN._replace(waiting="429: waiting 60 s")))
    said = list[str]()
    for name in ("_watch_nodes", "_assign", "_resize"):
        monkeypatch.setattr(own, name, lambda: None)
    monkeypatch.setattr(own, "_wait", lambda: iter(()))
    own.say = said.append
    ticks = own.run((), set(), 1)
    assert [type(next(ticks)).__name__ for _ in range(3)] == ["Tick"] * 3
    assert said == ["429: waiting 60 s"]


@pytest.mark.parametrize(
    "why", ["begun", "its only unit", "closing", "nobody is idle", "not the end"]
)
def test_no_unit_is_taken_back(why: str) -> None:
    busy = worker(
        *[BEGUN] * (2 if why == "begun" else 1),
        *[Progress()] * (why not in ("begun", "its only unit")),
    )
    idle = worker(*[BEGUN] * (why == "nobody is idle"))
    assigning(busy, idle, units=why == "not the end", closing=why == "closing")
    assert calls(busy) == [[]]


@pytest.mark.parametrize(
    ("progress", "typical", "left", "cancelled"),
    [
        (BEGUN, 0.0, 70.0, False),
        (BEGUN, 0.0, 64.0, True),
        (Progress(), 30.0, 40.0, False),  # it takes what units took lately
        (Progress(), 30.0, 34.0, True),
        (Progress(), 0.0, 21.0, False),  # nothing is known
        (Progress(), 0.0, 19.0, True),
        (BEGUN, 0.0, math.inf, False),
    ],
)
def test_what_cannot_be_committed_before_a_node_goes_is_handed_back(
    progress, typical, left, cancelled
) -> None:
    busy = worker(progress)
    own = assigning(busy, _unit_seconds=typical)
    own.nodes = SimpleNamespace(look=lambda: None, seconds_left=lambda node: left)  # type: ignore[assignment]
    own._source = iter([Unit("new", ())])
    own._exhausted = False
    own._watch_nodes()
    own._assign()
    assert busy.leaving
    assert calls(busy) == [[("cancel", "u0", False)] * cancelled]


def test_what_ray_kills_for_memory_is_a_death_like_any_other(tmp_path, monkeypatch):
    dead = worker(BEGUN)
    said = []
    executor = assigning(
        dead, say=said.append, spec=SimpleNamespace(output=str(tmp_path)), wanted=1
    )

    def get(ref):
        raise ray.exceptions.OutOfMemoryError(
            "1 worker(s) were killed due to the node running low on memory"
        )

    stub = {
        "exceptions": ray.exceptions,
        "get": get,
        "wait": lambda refs, **_: (refs, []),
        "kill": lambda actor: None,
    }
    monkeypatch.setattr(pool_executor, "ray", SimpleNamespace(**stub))
    monkeypatch.setattr(pool_executor, "is_alive", lambda node: True)
    assert list(executor._wait()) == []
    assert said == [
        "a worker process died because the machine ran out of memory; its units are tried again"
    ]
    assert ([unit.id for unit in executor._again], executor.workers) == (["u0"], [])
    # Before it was ready.
    for gone, deaths in ((Mock(preempted=True), 0), (Mock(preempted=False), 1)):
        executor.workers.append(loading := WorkerHandle(Actor(), starting=object()))
        executor._lost(loading, gone)
        assert executor._deaths.loading == deaths


def test_a_run_whose_last_unit_moves_to_an_idle_worker(
    tmp_path: Path, config, ray_here, monkeypatch
) -> None:
    """Two workers, two units in flight each; the first stands until the third has moved, kills, and
    is replaced.
    """
    for name, own in (("a", "until c-moved"), ("b", "quick"), ("c", "kill once"), ("d", "quick")):
        write_jsonl(tmp_path / f"in/{name}.jsonl", [own] * 10)
    run = config(str(tmp_path / "in"), max_workers=2, units_in_flight=2, max_num_seqs=1)
    started: dict[str, list[int]] = {}
    start = pool_executor.PoolExecutor._start
    assign = pool_executor.PoolExecutor._assign

    def listen(self, worker, assigned) -> None:
        unit = assigned.name
        if unit == "c.jsonl" and worker.assignments:
            # While the first is still being read the second would be begun, and then it is not
            # given back.
            wait_for(
                lambda: any(
                    progress.begun for progress in ray.get(worker.actor.progress.remote()).values()
                )
            )
        started.setdefault(unit, []).append(id(worker))
        start(self, worker, assigned)
        if len(started.get("c.jsonl", [])) == 2:
            (tmp_path / "out/c-moved").touch()

    # Both are ready before the first unit is assigned, whichever process starts sooner.
    def patient(self) -> None:
        if started or sum(worker.ready for worker in self.workers) == 2:
            assign(self)

    monkeypatch.setattr(pool_executor.PoolExecutor, "_start", listen)
    monkeypatch.setattr(pool_executor.PoolExecutor, "_assign", patient)
    monkeypatch.setattr(pool_executor, "_IDLE_SECONDS", LONG)
    assert driver.run_extract(run, build=fakes.build).ok == 40
    assert started["c.jsonl"][0] == started["a.jsonl"][0] != started["c.jsonl"][1]
    rows = pq.read_table(tmp_path / "out/units").to_pylist()
    found = Counter((row["source"], row["id"], row["attempts"]) for row in rows)
    # A death is an attempt, a move is none.
    assert found == {(f"{n}.jsonl", str(i), 1 + (n == "c")): 1 for n in "abcd" for i in range(10)}


@pytest.mark.slow
def test_the_drivers_memory_does_not_grow_with_the_units(
    tmp_path: Path, ray_here, monkeypatch
) -> None:
    counted: list[Counter[str]] = []
    take = driver.DriverSession._take
    seen = [0]

    def look(self, *ended) -> None:
        seen[0] += 1
        if seen[0] in (50, 125, 200):
            gc.collect()
            counted.append(Counter(type(item).__name__ for item in gc.get_objects()))
        take(self, *ended)

    monkeypatch.setattr(driver.DriverSession, "_take", look)
    flat_memory.make_corpus(tmp_path / "in", 840)
    made = driver.run_extract(flat_memory.configuration(tmp_path, 4, 2))
    assert (made.documents, made.units) == (840, 210)
    first, second, third = counted
    grown = {name: (second[name] - first[name], n - second[name]) for name, n in third.items()}
    # Half an object a unit; of rich's samples it keeps 1,000.
    grown = {name: n for name, n in grown.items() if min(n) > 75 / 2 and name != "ProgressSample"}
    assert not grown, json.dumps(grown)


def executor(said: list[str], **attributes: Any) -> RayDataExecutor:
    """One whose run has the units a, b and c, and that admits one unit a worker; the node `goes`
    was given notice.
    """
    own = RayDataExecutor(None, None, ClusterConfig(max_workers=2), said.append)  # type: ignore[arg-type]
    own._left = 3
    own._done = {"ended"}
    own.admit = lambda unit, beside: beside == 0
    own.nodes = SimpleNamespace(look=lambda: None, seconds_left={"goes": 4.0}.get)  # type: ignore[assignment]
    vars(own).update(attributes)
    return own


def state(asks: list[Ask], starts: int = 0, deaths: int = 0) -> PoolState:
    return PoolState(asks, {"w1", "w2"}, {"w1", "w2"}, 0, 0, starts, deaths, set(), [])


def test_who_waits_who_begins_and_who_hands_back_what_then_stays_open() -> None:
    said: list[str] = []
    own = executor(said)
    a, b, _, ended = ASKS
    assert own._answers(state(ASKS)) == {a: True, b: False, ended: False}  # c waits
    assert (own._begun, own._answers(state(ASKS[1:2]))) == ({"a": "w1"}, {b: False})
    assert said == ["a node is going away in 4 s: no more units for it"]
    own.closing = True
    assert not any(own._answers(state(ASKS)).values())
    own = executor([])
    assert list(own._ended(a.unit, UnitResult(handed_back=True))) == []
    assert [event.unit.id for event in own._ended(a.unit, UnitResult(ok=1))] == ["a"]
    assert (list(own._ended(a.unit, UnitResult(ok=1))), own._left, own._done) == (
        [],
        2,
        {"a", "ended"},
    )
    with pytest.raises(RunError, match="no weights"):
        list(own._ended(b.unit, UnitResult(error="no weights", fatal=True)))


def test_passes_are_short_under_a_deadline_and_what_one_leaves_comes_again() -> None:
    own = executor([], wanted=1)
    passes = list[str]()

    def one_pass(units: list[Unit], *_: object) -> Any:
        passes.append("".join(unit.id for unit in units))
        return (
            event
            for unit in units[len(passes) == 1 :]
            for event in own._ended(unit, UnitResult(ok=1))
        )

    own._pass = one_pass  # type: ignore[method-assign]
    assert len(list(own.run([Unit(name, ()) for name in "abcdefghij"], {"j"}, 9))) == 9
    # Eight units a worker; a is handed back, and j had ended before.
    assert passes == ["abcdefgh", "i", "a"]


def test_deaths_without_end_end_the_run() -> None:
    said: list[str] = []
    own = executor(said)
    own._answers(state([], deaths=2))
    own._answers(state([], deaths=2))
    assert said == ["a worker process died; its units are tried again"] * 2
    own._answers(state([], deaths=1))  # by a ledger that died itself
    assert len(said) == 2
    with pytest.raises(RunError, match="nothing gets done"):
        own._answers(state([], deaths=31))
    own = executor(said)
    own._answers(state([], starts=9))  # two of them may be loading yet
    with pytest.raises(RunError, match="die while they load the model"):
        own._answers(state([], starts=10))
