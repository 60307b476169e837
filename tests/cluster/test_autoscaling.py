"""Zero workers when idle: a run asks Ray's real autoscaler for nodes, which are processes, and gives them back."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray.cluster_utils import AutoscalingCluster

from tests.faults.apart import apart
from tests.faults.trial import Trial
from tests.processes import ended, start, wait_for

_IDLE_MINUTES = 0.1
_COMMANDS = ("setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands")
_COMMANDS += ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files")
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


class Growing(AutoscalingCluster):
    """Ray's own test cluster; its wheel lacks the file that this configuration stands in otherwise."""

    def _generate_config(
        self, head_resources: dict, worker_node_types: dict, autoscaler_v2: bool = False, **keys: Any
    ) -> dict:
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        provider = {"type": "external", "module": _PROVIDER, "gcs_address": "127.0.0.1:6379", "launch_multiple": True,
                    "head_node_id": FAKE_HEAD_NODE_ID}  # fmt: skip
        return {"cluster_name": "growing", "max_workers": 8, "idle_timeout_minutes": _IDLE_MINUTES,
                "upscaling_speed": 1.0, "provider": provider, "head_node_type": "ray.head.default",
                "available_node_types": {**worker_node_types, "ray.head.default": head},
                "auth": {"ssh_user": "nobody"}, "docker": {}, "file_mounts": {},
                **{key: [] for key in _COMMANDS}, **keys}  # fmt: skip


def watch(lines: list[tuple[float, int]], stop: threading.Event, began: float) -> None:
    """Notes (seconds, worker nodes) whenever their number changes."""
    import ray

    while not stop.wait(0.3):
        now = sum(node["Alive"] and node["Resources"].get("GPU", 0) > 0 for node in ray.nodes())
        if not lines or lines[-1][1] != now:
            lines.append((time.monotonic() - began, now))
            print(f"{lines[-1][0]:6.1f} s  {now} worker nodes", flush=True)


def trial(folder: Path) -> Trial:
    model = {"name": "fake", "fake": {"load_seconds": 1, "prefill_tokens_per_second": 10_000}}
    cluster = {"address": None, "max_workers": 2, "gpus_per_worker": 1, "units_in_flight": 2}
    return Trial(folder, ["t" * 400] * 2000, 100, model=model, engine={"max_num_seqs": 64}, cluster=cluster)


def run(folder: Path) -> str:
    """Runs `raypd extract` with model fake as a user types it, on a cluster whose head takes no workers.

    Returns as JSON how many worker nodes there were in turn.
    """
    import ray

    worker = {"resources": {"CPU": 1, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    cluster = Growing({"CPU": 0}, {"gpu": worker}, autoscaler_v2=True)
    cluster.start()
    lines: list[tuple[float, int]] = []
    stop = threading.Event()
    ray.init(address="auto", log_to_driver=False, logging_level="critical")
    began = time.monotonic()
    watcher = threading.Thread(target=watch, args=(lines, stop, began), daemon=True)
    watcher.start()
    wait_for(lambda: lines)
    print(ended(start("-m", "raypd", "extract", str(trial(folder).file))))
    wait_for(lambda: not lines[-1][1], "its nodes are still there")
    stop.set()
    watcher.join()
    return json.dumps([count for _, count in lines])


@pytest.mark.slow
def test_from_no_node_to_two_and_back(tmp_path: Path) -> None:
    printed = apart(run, tmp_path)
    nodes = json.loads(printed.splitlines()[-1])
    assert (nodes[0], max(nodes), nodes[-1]) == (0, 2, 0), printed
    found = trial(tmp_path).outcome("")
    assert (found.rows, found.lost, found.doubled) == (2000, 0, 0)
