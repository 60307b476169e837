"""Faults of a cluster of several nodes on one machine: python -m tests.faults.on_cluster SCENARIO FOLDER, apart.

The functions without an underscore start themselves in namespaces; those with one run there, and print a note.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.apart import own_ray
from tests.faults.trial import Outcome, Trial, apart, gated
from tests.processes import LONG, wait_for


def _trial(folder: Path, free: int, units: int) -> Trial:
    """Units of 10 documents, all of which but the first few wait for the fault."""
    cluster = {"max_workers": 2, "cpus_per_worker": 1, "units_in_flight": 1}
    return Trial(folder, gated(free, "fault", units), cluster=cluster)


def node_removed(folder: Path) -> Outcome:
    """a node is gone in the middle of a run"""
    note = apart("tests.faults.on_cluster", "_node_removed", str(folder))
    return _trial(folder, 4, 30).outcome("1 of 2 worker nodes, not graceful", note.strip())


def spot_handed_back(folder: Path) -> Outcome:
    """spot notice, too short for the unit in flight"""
    note = apart("tests.faults.on_cluster", "_spot_handed_back", str(folder))
    return _trial(folder, 0, 40).outcome("Ray's drain of a node, gone after 4 s", note.strip())


def spot_finished(folder: Path) -> Outcome:
    """spot notice, long enough for the unit in flight"""
    note = apart("tests.faults.on_cluster", "_spot_finished", str(folder))
    return _trial(folder, 2, 20).outcome("Ray's drain of a node, gone after 30 s", note.strip())


def central_actor_killed(folder: Path) -> Outcome:
    """kill -9 of the ledger"""
    note = apart("tests.faults.on_cluster", "_central_actor_killed", str(folder))
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
        self.failed: list[BaseException] = []
        start, ended = scheduler.Scheduler._start, scheduler.Scheduler._ended

        def listen_start(own: Any, worker: Any, attempt: Any) -> None:
            self.scheduler = own
            self.started.append((worker.node, attempt.unit.id))
            start(own, worker, attempt)

        def listen_ended(own: Any, assignment: Any, result: Any) -> Any:
            if result.handed_back:
                self.handed_back.append(assignment.attempt.unit.id)
            return ended(own, assignment, result)

        scheduler.Scheduler._start, scheduler.Scheduler._ended = listen_start, listen_ended  # type: ignore[method-assign]

    def run(self, fault: Callable[[], None]) -> str:
        """The run, with the fault in a thread beside it; what the fault's thread raised is raised here."""
        from raypd.cluster.driver import run_extract
        from tests.cluster import fakes

        def guarded() -> None:
            try:
                fault()
            except BaseException as error:
                self.failed.append(error)
            self.trial.go("fault")

        tree = self.trial.config.model_dump()
        tree["cluster"]["address"] = self.cluster.address
        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        made = run_extract(type(self.trial.config).model_validate(tree), build=fakes.build)
        thread.join(LONG)
        if self.failed:
            raise self.failed[0]
        assert made.failed == 0
        return f"{made.units} units"

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
    attempts = {row["attempts"] for row in stage.trial.rows()}
    assert attempts == {1}, attempts
    return "done elsewhere, and no unit is blamed"


def _spot_handed_back(folder: Path) -> str:
    stage = _Stage(_trial(folder, 0, 40))
    noticed: list[int] = []
    node: list[Any] = []

    def fault() -> None:
        node.append(stage.busy_node())
        stage.notice(node[0], 4)
        wait_for(lambda: stage.handed_back, "nothing was handed back")
        noticed.append(len(stage.started))
        stage.cluster.remove_node(node[0], allow_graceful=False)

    stage.run(fault)
    assert len(stage.handed_back) == 1
    assert all(where != node[0].node_id for where, _ in stage.started[noticed[0] :])
    assert {row["attempts"] for row in stage.trial.rows()} == {1}
    return "handed back at once, no attempt counted, nothing new for the node"


def _spot_finished(folder: Path) -> str:
    stage = _Stage(_trial(folder, 2, 20))
    last: list[str] = []
    node: list[Any] = []
    count: list[int] = []

    def fault() -> None:
        stage.trial.wait(2)
        node.append(stage.busy_node())
        last.append(next(unit for where, unit in reversed(stage.started) if where == node[0].node_id))
        stage.notice(node[0], 30)
        wait_for(lambda: any(worker.leaving for worker in stage.scheduler.workers), "nobody noticed")
        count.append(len(stage.started))

    stage.run(fault)
    assert stage.handed_back == []
    assert [unit for _, unit in stage.started].count(last[0]) == 1
    assert all(where != node[0].node_id for where, _ in stage.started[count[0] :])
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


if __name__ == "__main__":
    own_ray()
    print(globals()[sys.argv[1]](Path(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)  # the namespace ends, and every process in it
