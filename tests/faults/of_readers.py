"""Faults of the readers, which read ahead of the workers: no document is lost with them."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from raypd.run import ReadingRecord, read
from tests.faults.apart import apart
from tests.faults.on_cluster import Stage
from tests.faults.trial import READERS, Outcome, Trial
from tests.processes import children, ended, wait_for

_FILE_DOCUMENTS = 5


def _trial(folder: Path, files: int, slow: str = "slow", **cluster: Any) -> Trial:
    """Make a run over files of a few documents each, read by tests/cluster/shop_hook.py."""
    inputs = folder / "in"
    inputs.mkdir(exist_ok=True)
    for number in range(files):
        name = f"{number:03d}-{slow}.shop"
        first = number * _FILE_DOCUMENTS
        words = [str(first + offset) for offset in range(_FILE_DOCUMENTS)]
        (inputs / name).write_text("\n".join(words))
    source = {"path": str(inputs), "reader": "tests.cluster.shop_hook:rows"}
    keys = {"readers": 2, "cpus_per_worker": 0.5, "unit_documents": _FILE_DOCUMENTS, **cluster}
    return Trial(
        folder,
        ["a"] * files * _FILE_DOCUMENTS,
        input=source,
        cluster=keys,
    )


def _reading(trial: Trial) -> ReadingRecord:
    """Return what the readers of the only session did."""
    sessions = [session.id for session in read.sessions([trial.output])]
    (reading,) = read.readings([trial.output], sessions)
    return reading


def _readers(run: subprocess.Popen[str]) -> list[Any]:
    return wait_for(lambda: children(run.pid, READERS), "no reader")


def reader_killed(folder: Path) -> Outcome:
    """kill -9 of a reader"""
    trial = _trial(folder, 6)
    run = trial.start()
    for process in _readers(run):
        os.kill(process.pid, signal.SIGKILL)
    ended(run)
    reading = _reading(trial)
    assert reading.units + sum(reading.read_by_workers.values()) >= 6
    return trial.outcome("while it read one of 6 units", "read again by another reader")


def reader_hangs(folder: Path) -> Outcome:
    """a read task that hangs"""
    trial = _trial(folder, 12)
    (folder / "in/004-slow.shop").rename(folder / "in/004-hang.shop")
    trial.finish()
    reading = _reading(trial)
    assert sum(reading.read_by_workers.values()) >= 1, reading
    return trial.outcome(
        "the fifth of 12 units, for ever",
        "after 30 s workers read on themselves; the reader ended with the run",
    )


def object_store_full(folder: Path) -> Outcome:
    """the object store is full"""
    apart(_object_store_full, folder)
    return _large_trial(folder).outcome(
        "80 MB, of which 60 MB are held by others; units of 8 MB, one of 120 MB",
        "blocks were spilled to disk",
    )


def _large_trial(folder: Path) -> Trial:
    titles = ["x" * 800_000] * 95 + ["y" * 24_000_000] * 5
    source = {"max_document_bytes": 30_000_000}
    keys = {
        "readers": 2,
        "read_ahead_mb": 1000,
        "cpus_per_worker": 1,
        "unit_bytes": 1 << 28,
    }
    return Trial(folder, titles, 10, input=source, cluster=keys)


def _object_store_full(folder: Path) -> str:
    import numpy as np
    import ray

    from raypd.cluster.driver import run_extract
    from tests.cluster import fakes

    trial = _large_trial(folder)
    ray.init(
        address="local",
        num_cpus=3,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
    )
    held = ray.put(np.zeros(60 << 20, np.uint8))
    made = run_extract(trial.config, build=fakes.build)
    assert made.ok == 100
    assert len(ray.get(held)) == 60 << 20
    assert _reading(trial).units > 5
    return ""


def readers_node_removed(folder: Path) -> Outcome:
    """the node of the readers is gone"""
    apart(_readers_node_removed, folder)
    return _node_trial(folder).outcome(
        "its blocks and its tasks with it, not graceful", "workers read the rest themselves"
    )


def _node_trial(folder: Path) -> Trial:
    return _trial(folder, 40, cpus_per_worker=1, units_in_flight=1)


def _readers_node_removed(folder: Path) -> str:
    stage = Stage(_node_trial(folder))

    def fault() -> None:
        stage.trial.wait(3)
        (worker_node, *_), *_ = stage.started
        (other,) = [node for node in stage.nodes if node.node_id != worker_node]
        stage.cluster.remove_node(other, allow_graceful=False)

    stage.run(fault)
    reading = _reading(stage.trial)
    assert reading.read_by_workers, reading
    assert {row["attempts"] for row in stage.trial.rows()} == {1}
    return ""
