"""Faults of a cluster of several nodes on one machine.

The functions without an underscore start those with one in namespaces, which return a note.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from raypd.config import RunConfig
from tests.faults.apart import apart
from tests.faults.trial import Outcome, Trial, gated
from tests.processes import LONG, wait_for


def _trial(folder: Path, free: int, units: int) -> Trial:
    """Units of 10 documents, all of which but the first few wait for the fault."""
    cluster = {"max_workers": 2, "cpus_per_worker": 1, "units_in_flight": 1}
    return Trial(folder, gated(free, "fault", units), cluster=cluster)


def node_removed(folder: Path) -> Outcome:
    """a node is gone in the middle of a run"""
    note = apart(_node_removed, folder)
    return _trial(folder, 4, 30).outcome("1 of 2 worker nodes, not graceful", note.strip())


def spot_handed_back(folder: Path) -> Outcome:
    """spot notice, too short for the unit in flight"""
    note = apart(_spot_handed_back, folder)
    return _trial(folder, 0, 40).outcome("Ray's drain of a node, gone after 4 s", note.strip())


def spot_finished(folder: Path) -> Outcome:
    """spot notice, long enough for the unit in flight"""
    note = apart(_spot_finished, folder)
    return _trial(folder, 2, 20).outcome("Ray's drain of a node, gone after 30 s", note.strip())


def central_actor_killed(folder: Path) -> Outcome:
    """kill -9 of the ledger"""
    note = apart(_central_actor_killed, folder)
    return _trial(folder, 4, 30).outcome("its process, in the middle of a run", note.strip())


# ------------------------------------------------------------------------------------------------- in the namespaces


class _Stage:
    """A cluster of a head without workers and nodes for one worker each, and a run whose scheduler is listened to."""

    def __init__(self, trial: Trial) -> None:
        from ray.cluster_utils import Cluster

        from raypd.cluster import scheduler

        self.trial = trial
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(2)]
        self.scheduler: Any = None
        self.started: list[tuple[str, str]] = []  # (node, unit), in order
        self.handed_back: list[str] = []
        start, ended = scheduler.Scheduler._start, scheduler.Scheduler._ended

        def listen_start(own: Any, worker: Any, attempt: Any) -> None:
            self.scheduler = own
            assert worker.node not in {other.node for other in own.workers if other.leaving}
            self.started.append((worker.node, attempt.unit.id))
            start(own, worker, attempt)

        def listen_ended(own: Any, assignment: Any, result: Any) -> Any:
            if result.handed_back:
                self.handed_back.append(assignment.attempt.unit.id)
            return ended(own, assignment, result)

        scheduler.Scheduler._start, scheduler.Scheduler._ended = listen_start, listen_ended  # type: ignore[method-assign]

    def run(self, fault: Callable[[], None]) -> None:
        """The run, with the fault in a thread beside it; what the fault's thread raised is raised here."""
        from raypd.cluster.driver import run_extract
        from tests.cluster import fakes

        def then_go() -> None:
            try:
                fault()
            finally:
                self.trial.go("fault")

        tree = self.trial.config.model_dump()
        tree["cluster"]["address"] = self.cluster.address
        with ThreadPoolExecutor(1) as beside:
            done = beside.submit(then_go)
            made = run_extract(RunConfig.model_validate(tree), build=fakes.build)
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

        accepted, why = GcsClient(address=self.cluster.address).drain_node(
            node.node_id,
            autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            "preemption: spot notice",
            int((time.time() + seconds) * 1000),
        )
        assert accepted, why


def _node_removed(folder: Path) -> str:
    stage = _Stage(_trial(folder, 4, 30))

    def fault() -> None:
        stage.trial.wait(4)
        stage.cluster.remove_node(stage.busy_node(), allow_graceful=False)

    stage.run(fault)
    assert {row["attempts"] for row in stage.trial.rows()} == {1}
    return "done elsewhere, and no unit is blamed"


def _spot_handed_back(folder: Path) -> str:
    stage = _Stage(_trial(folder, 0, 40))

    def fault() -> None:
        node = stage.busy_node()
        stage.notice(node, 4)
        wait_for(lambda: stage.handed_back, "nothing was handed back")
        stage.cluster.remove_node(node, allow_graceful=False)

    stage.run(fault)
    assert len(stage.handed_back) == 1
    assert {row["attempts"] for row in stage.trial.rows()} == {1}
    return "handed back at once, no attempt counted, nothing new for the node"


def _spot_finished(folder: Path) -> str:
    stage = _Stage(_trial(folder, 2, 20))
    last: list[str] = []

    def fault() -> None:
        stage.trial.wait(2)
        node = stage.busy_node()
        last.append(next(unit for where, unit in reversed(stage.started) if where == node.node_id))
        stage.notice(node, 30)
        wait_for(lambda: any(worker.leaving for worker in stage.scheduler.workers), "nobody noticed")

    stage.run(fault)
    assert stage.handed_back == []
    assert [unit for _, unit in stage.started].count(last[0]) == 1
    assert {row["attempts"] for row in stage.trial.rows()} == {1}
    return "finished, nothing new for the node"


def _central_actor_killed(folder: Path) -> str:
    stage = _Stage(_trial(folder, 4, 30))
    killed: list[str] = []

    def fault() -> None:
        from ray._private.state import actors

        stage.trial.wait(4)
        for actor in actors().values():
            if actor["ActorClassName"] != "DecodeWorker" and actor["State"] == "ALIVE":
                os.kill(actor["Pid"], signal.SIGKILL)
                killed.append(actor["ActorClassName"])

    stage.run(fault)
    assert killed
    return f"{', '.join(killed)}: the run went on"
