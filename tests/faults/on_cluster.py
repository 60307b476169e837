"""Faults of a cluster of several nodes on one machine, each in namespaces of its own; they return a
note.
"""

import functools
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.faults.apart import apart
from tests.faults.trial import Outcome, Trial, gated
from tests.processes import LONG, wait_for
from tests.runs import with_keys


class Stage:
    """A cluster of a head without workers and nodes for one worker each, and a run whose pool is
    listened to.
    """

    def __init__(self, trial: Trial) -> None:
        from ray.cluster_utils import Cluster

        self.trial = trial
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(2)]
        self.pool: Any = None
        self.started: list[tuple[str, str]] = []  # (node, unit), in order
        self.handed_back: list[str] = []  # units that were begun
        self._listen_to_pool()

    def _listen_to_pool(self) -> None:
        from raypd.cluster.worker_pool import WorkerPool

        start = WorkerPool._start
        ended = WorkerPool._ended

        def listen_start(pool: Any, worker: Any, streamed: Any) -> None:
            self.pool = pool
            assert worker.node not in {other.node for other in pool.workers if other.draining}
            self.started.append((worker.node, streamed.unit.id))
            start(pool, worker, streamed)

        def listen_ended(pool: Any, assignment: Any, result: Any) -> Any:
            if result.handed_back:
                self.handed_back.append(assignment.unit.id)
            return ended(pool, assignment, result)

        WorkerPool._start = listen_start  # type: ignore[method-assign]
        WorkerPool._ended = listen_ended  # type: ignore[method-assign]

    def noticed(self) -> bool:
        """Whether the run knows that a node goes away."""
        return bool(self.pool.nodes._ends)

    def run(self, fault: Callable[[], None]) -> None:
        """The run, with the fault in a thread beside it; what the fault's thread raised is raised
        here.
        """
        from raypd.cluster.driver import run_extract
        from tests.cluster import fakes

        def then_go() -> None:
            try:
                fault()
            finally:
                self.trial.go("fault")

        config = with_keys(self.trial.config, cluster={"address": self.cluster.address})
        with ThreadPoolExecutor(1) as beside:
            done = beside.submit(then_go)
            made = run_extract(config, build=fakes.build)
            done.result(LONG)
        assert made.failed == 0

    def busy_node(self) -> Any:
        """A worker node that has been given a unit, once both have."""
        wait_for(lambda: len({node for node, _ in self.started}) == 2)
        return next(node for node in self.nodes if node.node_id == self.started[-1][0])

    def notice(self, node: Any, seconds: float) -> None:
        """The spot notice, as a cloud's watcher gives it to Ray."""
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        how = reason, "preemption: spot notice", int((time.time() + seconds) * 1000)
        accepted, why = GcsClient(address=self.cluster.address).drain_node(node.node_id, *how)
        assert accepted, why


def on_stage(
    free: int, units: int, done: str
) -> Callable[[Callable[[Stage], str]], Callable[[Path], Outcome]]:
    """Makes a fault of a function that plays it: units of 10 documents, of which all but `free`
    wait for it.
    """

    def decorate(play: Callable[[Stage], str]) -> Callable[[Path], Outcome]:
        def trial(folder: Path) -> Trial:
            cluster = {"max_workers": 2, "cpus_per_worker": 1, "units_in_flight": 1}
            return Trial(folder, gated(free, "fault", units), cluster=cluster)

        def inside(folder: Path) -> str:
            return play(Stage(trial(folder)))

        @functools.wraps(play)
        def fault(folder: Path) -> Outcome:
            note = apart(inside, folder)
            made = trial(folder)
            assert {row["attempts"] for row in made.rows()} == {1}  # no unit is blamed
            return made.outcome(done, note.strip())

        inside.__qualname__, fault.inside = f"{play.__name__}.inside", inside  # type: ignore[attr-defined]
        return fault

    return decorate


@on_stage(4, 30, "1 of 2 worker nodes, not graceful")
def node_removed(stage: Stage) -> str:
    """a node is gone in the middle of a run"""

    def fault() -> None:
        stage.trial.wait(4)
        stage.cluster.remove_node(stage.busy_node(), allow_graceful=False)

    stage.run(fault)
    return "done elsewhere, and no unit is blamed"


@on_stage(0, 40, "Ray's drain of a node, gone after 4 s")
def spot_handed_back(stage: Stage) -> str:
    """spot notice, too short for the unit in flight"""

    def fault() -> None:
        node = stage.busy_node()
        stage.notice(node, 4)
        wait_for(lambda: stage.handed_back, "nothing was handed back")
        stage.cluster.remove_node(node, allow_graceful=False)

    stage.run(fault)
    assert len(stage.handed_back) == 1
    return "handed back at once, no attempt counted, nothing new for the node"


@on_stage(2, 20, "Ray's drain of a node, gone after 30 s")
def spot_finished(stage: Stage) -> str:
    """spot notice, long enough for the unit in flight"""
    last: list[str] = []

    def fault() -> None:
        stage.trial.wait(2)
        node = stage.busy_node()
        last.append(next(unit for where, unit in reversed(stage.started) if where == node.node_id))
        stage.notice(node, 30)
        wait_for(stage.noticed, "nobody noticed")

    stage.run(fault)
    assert stage.handed_back == []
    assert [unit for _, unit in stage.started].count(last[0]) == 1
    return "finished, nothing new for the node"


@on_stage(4, 30, "its process, in the middle of a run")
def central_actor_killed(stage: Stage) -> str:
    """kill -9 of the ledger"""
    killed: list[int] = []

    def fault() -> None:
        from ray._private.state import actors

        stage.trial.wait(4)
        for actor in actors().values():
            if actor["ActorClassName"] == "Ledger" and actor["State"] == "ALIVE":
                os.kill(actor["Pid"], signal.SIGKILL)
                killed.append(actor["Pid"])

    stage.run(fault)
    assert killed
    return "the run went on"
