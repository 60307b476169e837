"""The pool: which worker gets which unit. Whole runs are in test_driver.py."""

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

from raypd.answering.request_queue import UnitProgress
from raypd.cluster import driver, ray_session, worker_deaths, worker_pool
from raypd.cluster.document_stream import StreamedUnit
from raypd.cluster.unit_queue import UnitQueue
from raypd.cluster.worker_deaths import WorkerDeaths
from raypd.cluster.worker_handle import Assignment, WorkerHandle
from raypd.cluster.worker_pool import WorkerPool
from raypd.config import ClusterConfig
from raypd.dataset import summaries
from raypd.errors import RunError
from raypd.run import UnitLog, retry_policy
from raypd.run.unit import Unit, UnitResult
from tests.cluster import fakes, flat_memory
from tests.processes import LONG, wait_for
from tests.runs import write_jsonl

BEGUN = UnitProgress(answered=10, begun=True, seconds_left=60.0)


class Actor:
    """An actor that records its calls and never answers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any, **keys: Any) -> object:
            self.calls.append((name, *arguments))
            self.keys = keys
            return object()

        return SimpleNamespace(remote=remote)


def worker(*progress: UnitProgress) -> WorkerHandle:
    """Make a worker with a unit in flight for each progress: u0, u1, ..."""
    handle = WorkerHandle(Actor(), node="n", depth=2)
    for number, unit_progress in enumerate(progress):
        assignment = Assignment(Unit(f"u{number}", ()), progress=unit_progress)
        assignment.reported = assignment.since
        handle.assignments[object()] = assignment
    return handle


def assigning(*workers: WorkerHandle, units: int = 0, **attributes: Any) -> WorkerPool:
    """Make a pool with the given workers, and let it assign the given number of units."""
    cluster = ClusterConfig(units_in_flight=2, readers=0)
    pool = WorkerPool(None, None, cluster, print)  # type: ignore[arg-type]
    pool.workers += workers
    pool._queue = UnitQueue([Unit(f"new{n}", ()) for n in range(units)])
    vars(pool).update(attributes)
    pool._assign()
    return pool


def calls(*workers: WorkerHandle) -> list[list[tuple[Any, ...]]]:
    """Return the calls of each worker: a `run` as the id of its unit, others in full."""
    calls_of_workers = []
    for handle in workers:
        worker_calls = []
        for call in handle.actor.calls:
            worker_calls.append(call[1].id if call[0] == "run" else call)
        calls_of_workers.append(worker_calls)
    return calls_of_workers


def test_an_idle_worker_steals_a_unit_that_has_not_begun() -> None:
    first = worker(BEGUN, UnitProgress())
    second = worker(BEGUN, UnitProgress(), UnitProgress())
    pool = assigning(first, second, worker())
    # The unit is taken from the worker with the most units.
    assert calls(first, second) == [[], [("cancel", "u2", True)]]
    # While the unit is on its way, no other one is taken.
    pool._assign()
    assert calls(first, second) == [[], [("cancel", "u2", True)]]
    _, cancelled = second.assignments.popitem()
    assert list(pool._ended(cancelled, UnitResult(handed_back=True))) == []
    pool._assign()
    assert calls(pool.workers[2]) == [["u2"]]


def test_a_long_wait_of_an_engine_is_shown_once(tmp_path, monkeypatch) -> None:
    spec = SimpleNamespace(output=str(tmp_path), session="s")
    pool = assigning(worker(BEGUN._replace(waiting="429: waiting 60 s")), spec=spec)
    lines = list[str]()
    for name in ("_watch_nodes", "_assign", "_resize"):
        monkeypatch.setattr(pool, name, lambda: None)
    monkeypatch.setattr(pool, "_wait", lambda: iter(()))
    pool.say = lines.append
    ticks = pool.run((), set(), 1)
    assert [type(next(ticks)).__name__ for _ in range(3)] == ["Tick"] * 3
    assert lines == ["429: waiting 60 s"]


@pytest.mark.parametrize(
    "why", ["begun", "its only unit", "closing", "nobody is idle", "not the end"]
)
def test_no_unit_is_stolen_without_need(why: str) -> None:
    if why == "begun":
        busy = worker(BEGUN, BEGUN)
    elif why == "its only unit":
        busy = worker(UnitProgress())
    else:
        busy = worker(BEGUN, UnitProgress())
    idle = worker(BEGUN) if why == "nobody is idle" else worker()
    assigning(busy, idle, units=why == "not the end", closing=why == "closing")
    assert calls(busy) == [[]]


def test_workers_above_the_wanted_number_get_no_more_units_and_end() -> None:
    alone = worker(BEGUN, UnitProgress())
    alone.node = "other"
    pair = [worker(BEGUN), worker(BEGUN)]
    loading = WorkerHandle(Actor(), starting=object())
    pool = assigning(*pair, alone, loading, wanted=2)
    pool._queue = UnitQueue([Unit(f"new{n}", ()) for n in range(9)])
    pool._retire()
    pool._assign()
    # The one that loads has nothing to finish, and the one alone on its node frees the node.
    assert [handle.retiring for handle in pool.workers] == [False, False, True, True]
    # What a retiring worker has not begun goes to another worker.
    assert calls(*pair, alone) == [
        ["new0"],
        ["new1"],
        [("cancel", "u1", True)],
    ]
    assert pool._is_spare(loading)
    alone.assignments.clear()
    assert pool._is_spare(alone)
    # If more are wanted again, it goes on.
    pool.wanted = 3
    pool._retire()
    pool._assign()
    assert [handle.retiring for handle in pool.workers] == [False, False, False, True]
    assert calls(alone)[0][1:] == ["new2", "new3"]


@pytest.mark.parametrize(
    ("units_in_flight", "waited", "depth"), [("auto", 3.0, 3), ("auto", 0.1, 2), (2, 3.0, 2)]
)
def test_a_worker_whose_engine_waited_for_input_overlaps_more_units(
    units_in_flight, waited, depth
) -> None:
    pool = assigning(busy := worker(BEGUN))
    pool.cluster = ClusterConfig(units_in_flight=units_in_flight)
    (assignment,) = busy.assignments.values()
    assignment.since -= 10
    pool._adapt_depth(busy, assignment, UnitResult(reading_seconds=waited))
    assert busy.depth == depth


def test_a_unit_that_waits_for_the_budget_is_counted_once_as_read_by_its_worker() -> None:
    pool = assigning(busy := worker())
    pool._queue.put_back(StreamedUnit(Unit("lost", ()), None, "its block was lost"))
    pool.admit = lambda unit, beside: False
    pool._assign()
    pool._assign()
    assert calls(busy) == [[]]
    pool.admit = lambda unit, beside: True
    pool._assign()
    assert calls(busy) == [["lost"]]
    assert pool.read_by_workers == {"its block was lost": 1}


def test_an_idle_worker_steals_while_the_readers_are_late_and_says_how_long_it_waited(
    monkeypatch,
) -> None:
    idle = worker()
    busy = worker(BEGUN, UnitProgress())
    pool = assigning()
    pool.workers += [idle, busy]
    blocks = iter(
        [
            None,
            None,
            StreamedUnit(Unit("late", ())),
        ]
    )
    stream = SimpleNamespace(next=lambda starved: next(blocks))
    pool._queue = UnitQueue((), stream)  # type: ignore[arg-type]
    pool._assign()
    assert calls(idle, busy) == [[], [("cancel", "u1", True)]]
    idle.starved_since -= 5
    pool._assign()
    monkeypatch.setattr(idle.actor, "calls", [])
    pool._assign()
    assert calls(idle) == [["late"]]
    assert 5 <= idle.actor.keys["starved"] < 6
    assert idle.starved_since is None


@pytest.mark.parametrize(
    ("progress", "typical", "left", "cancelled"),
    [
        (BEGUN, 0.0, 70.0, False),
        (BEGUN, 0.0, 64.0, True),
        # Without progress, a unit is expected to take as long as recent units.
        (UnitProgress(), 30.0, 40.0, False),
        (UnitProgress(), 30.0, 34.0, True),
        # Nothing is known.
        (UnitProgress(), 0.0, 21.0, False),
        (UnitProgress(), 0.0, 19.0, True),
        (BEGUN, 0.0, math.inf, False),
    ],
)
def test_a_draining_worker_hands_back_units_that_it_cannot_commit_in_time(
    progress, typical, left, cancelled
) -> None:
    busy = worker(progress)
    pool = assigning(busy, _unit_seconds=typical)
    pool.nodes = SimpleNamespace(look=lambda: None, seconds_left=lambda node: left)  # type: ignore[assignment]
    pool._queue = UnitQueue([Unit("new", ())])
    pool._watch_nodes()
    pool._assign()
    assert busy.draining
    assert calls(busy) == [[("cancel", "u0", False)] * cancelled]


def test_a_worker_killed_for_memory_is_lost_and_its_units_are_retried(tmp_path, monkeypatch):
    dead = worker(BEGUN)
    lines = []
    spec = SimpleNamespace(output=str(tmp_path), session="s")
    pool = assigning(
        dead,
        _deaths=WorkerDeaths(spec, lines.append),
        wanted=1,
    )  # type: ignore[arg-type]

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
    monkeypatch.setattr(worker_pool, "ray", SimpleNamespace(**stub))
    monkeypatch.setattr(worker_deaths, "is_alive", lambda node: True)
    assert list(pool._wait()) == []
    assert lines == [
        f"A worker process was {ray_session.KILLED_FOR_MEMORY}; its units will be retried."
    ]
    assert pool._queue.take(None).unit.id == "u0"
    assert pool.workers == []
    # The next worker learns of the death from storage.
    assert pool._deaths.attempted == retry_policy.attempted(str(tmp_path)) == {"u0"}
    attempt = UnitLog(str(tmp_path), "s", "n", "another", lambda node: True).next("u0")
    assert attempt is not None
    assert (attempt.number, attempt.deaths) == (2, 1)
    # The error of a run whose workers never load their model says it, too.
    pool._deaths.while_loading = 3
    loading = WorkerHandle(Actor(), starting=object())
    pool.workers.append(loading)
    with pytest.raises(RunError) as ended:
        pool._lost(loading, ray.exceptions.OutOfMemoryError("low on memory.\nRay's advice"))
    assert str(ended.value).endswith(f"load the model: {ray_session.KILLED_FOR_MEMORY}")
    pool._deaths.while_loading = 0
    # A preempted worker does not count as one that cannot start.
    for preempted, deaths in ((True, 0), (False, 1)):
        loading = WorkerHandle(Actor(), starting=object())
        pool.workers.append(loading)
        pool._lost(loading, Mock(preempted=preempted))
        assert pool._deaths.while_loading == deaths


def test_the_last_unit_of_a_run_moves_to_an_idle_worker(
    tmp_path: Path, config, ray_here, monkeypatch
) -> None:
    """There are two workers with two units in flight each.

    Unit a waits until unit c has moved to the other worker. Unit c kills its worker once.
    """
    for name, title in (("a", "until c-moved"), ("b", "quick"), ("c", "kill once"), ("d", "quick")):
        write_jsonl(tmp_path / f"in/{name}.jsonl", [title] * 10)
    run = config(
        str(tmp_path / "in"),
        max_workers=2,
        units_in_flight=2,
        max_num_seqs=1,
    )
    started: dict[str, list[int]] = {}
    start = WorkerPool._start
    assign = WorkerPool._assign

    def listen(self, worker, assigned) -> None:
        unit = assigned.unit.name
        if unit == "c.jsonl" and worker.assignments:
            # If the first unit were still being read, the second one would begin and could not be
            # stolen any more.
            wait_for(
                lambda: any(
                    progress.begun for progress in ray.get(worker.actor.progress.remote()).values()
                )
            )
        started.setdefault(unit, []).append(id(worker))
        start(self, worker, assigned)
        if len(started.get("c.jsonl", [])) == 2:
            (tmp_path / "out/c-moved").touch()

    # No unit is assigned before both workers are ready, whichever process starts first.
    def patient(self) -> None:
        if started or sum(worker.ready for worker in self.workers) == 2:
            assign(self)

    monkeypatch.setattr(WorkerPool, "_start", listen)
    monkeypatch.setattr(WorkerPool, "_assign", patient)
    monkeypatch.setattr(worker_pool, "_IDLE_SECONDS", LONG)
    assert driver.run_extract(run, build=fakes.build).ok == 40
    assert started["c.jsonl"][0] == started["a.jsonl"][0] != started["c.jsonl"][1]
    rows = pq.read_table(tmp_path / "out/units").to_pylist()
    attempts = Counter((row["source"], row["id"], row["attempts"]) for row in rows)
    # A death counts as an attempt, and a move does not.
    assert attempts == {
        (f"{n}.jsonl", str(i), 1 + (n == "c")): 1 for n in "abcd" for i in range(10)
    }


@pytest.mark.slow
def test_the_memory_of_the_driver_does_not_grow_with_the_units(
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
    # The driver holds the summaries of a bounded number of units as objects.
    monkeypatch.setattr(summaries, "_CHUNK_UNITS", 20)
    flat_memory.make_corpus(tmp_path / "in", 840)
    result = driver.run_extract(flat_memory.configuration(tmp_path, 4, 2))
    assert result.documents == 840
    assert result.units == 210
    first, second, third = counted
    grown = {name: (second[name] - first[name], n - second[name]) for name, n in third.items()}
    # Half an object a unit; of rich's samples it keeps 1,000.
    grown = {name: n for name, n in grown.items() if min(n) > 75 / 2 and name != "ProgressSample"}
    assert not grown, json.dumps(grown)
