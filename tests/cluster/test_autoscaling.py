"""Zero workers when idle, by Ray's real autoscaler with processes as nodes; and metrics as
Prometheus reads them.
"""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray.cluster_utils import AutoscalingCluster

from raypd.billing.bill import Bill, NodeTime
from raypd.billing.meter import WorkerTime
from raypd.cluster.metrics import COUNTERS, GAUGES
from raypd.run import read
from raypd.run.records import encoded
from raypd.run.usage import UsageKey
from tests.faults.apart import apart
from tests.faults.trial import Trial
from tests.processes import LONG, ended, start, wait_for
from tests.s3 import free_ports

_IDLE_MINUTES = 0.1
_COMMANDS = (
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "initialization_commands",
)
_COMMANDS += ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files")
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


class Growing(AutoscalingCluster):
    """Ray's own test cluster; its wheel lacks the file that this configuration stands in
    otherwise.
    """

    def _generate_config(
        self, head_resources: dict, worker_node_types: dict, autoscaler_v2=False, **keys
    ) -> dict:
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        provider = {
            "type": "external",
            "module": _PROVIDER,
            "gcs_address": "127.0.0.1:6379",
            "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
        }
        return {
            "cluster_name": "growing",
            "max_workers": 8,
            "idle_timeout_minutes": _IDLE_MINUTES,
            "upscaling_speed": 1.0,
            "provider": provider,
            "head_node_type": "ray.head.default",
            "available_node_types": {**worker_node_types, "ray.head.default": head},
            "auth": {"ssh_user": "nobody"},
            "docker": {},
            "file_mounts": {},
            **{key: [] for key in _COMMANDS},
            **keys,
        }


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
    return Trial(
        folder, ["t" * 400] * 2000, 100, model=model, engine={"max_num_seqs": 64}, cluster=cluster
    )


def run(folder: Path) -> str:
    """Runs `raypd extract` with model fake on a cluster whose head takes no workers.

    JSON: worker nodes in turn.
    """
    import ray

    worker = {
        # A CPU is left for a reader, which must neither ask for a node nor keep one.
        "resources": {"CPU": 2, "GPU": 1},
        "node_config": {},
        "min_workers": 0,
        "max_workers": 3,
    }
    cluster = Growing({"CPU": 0}, {"gpu": worker}, autoscaler_v2=True)
    cluster.start()
    lines: list[tuple[float, int]] = []
    stop = threading.Event()
    ray.init(address="auto", log_to_driver=False, logging_level="critical")
    began = time.monotonic()
    watcher = threading.Thread(
        target=watch,
        args=(lines, stop, began),
        daemon=True,
    )
    watcher.start()
    wait_for(lambda: lines)
    print(ended(start("-m", "raypd", "extract", str(trial(folder).file))))
    wait_for(lambda: not lines[-1][1], "its nodes are still there")
    stop.set()
    watcher.join()
    config = trial(folder).config
    sessions = [session.id for session in read.sessions([config.output.path])]
    (reading,) = read.readings([config.output.path], sessions)
    print(f"units read ahead: {reading.units}")
    return json.dumps([count for _, count in lines])


@pytest.mark.slow
def test_a_cluster_scales_from_no_node_to_two_and_back(tmp_path: Path) -> None:
    printed = apart(run, tmp_path)
    nodes = json.loads(printed.splitlines()[-1])
    assert nodes[0] == 0, printed
    assert max(nodes) == 2, printed
    assert nodes[-1] == 0, printed
    # The last units of the plan are cut into smaller ones.
    assert "units read ahead: 26" in printed
    outcome = trial(tmp_path).outcome("")
    assert outcome.rows == 2000
    assert outcome.lost == 0
    assert outcome.doubled == 0


SCRIPT = """
import json, sys, time, urllib.request
import ray
from raypd.cluster.metrics import Metrics
from raypd.billing.bill import Bill
from raypd.run.records import from_json

port = int(sys.argv[2])
ray.init(
    address="local", num_cpus=1, include_dashboard=False, _metrics_export_port=port, logging_level=50,
    log_to_driver=False, _system_config={"metrics_report_interval_ms": 500},
)
metrics = ray.remote(num_cpus=0)(Metrics).remote("products")
for line in sys.stdin:
    ray.get(metrics.show.remote(from_json(Bill, json.loads(line), 'stdin')))
wanted = sys.argv[1]
until = time.monotonic() + 200
text = ""
while wanted not in text and time.monotonic() < until:
    time.sleep(0.2)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
print("\\n".join(line for line in text.splitlines() if "raypd" in line))
"""  # noqa: E501

TAGS = {tag for _, tag in (COUNTERS | GAUGES).values() if tag}


def bill(ok, usd, spans, budget=None):
    totals = {
        "ok": ok,
        "failed": 1,
        "prefill_tokens": 100 * ok,
        "shared_tokens": 0,
        "decode_tokens": 7,
    }
    nodes = [
        NodeTime("a", 0.0, market="spot"),
        NodeTime(
            "b",
            0.0,
            market="spot",
            ended=3.0,
        ),
    ]
    workers = [WorkerTime("v", "a", 0.0, spans=spans), WorkerTime("w", "b", 0.0, ended=1.0)]
    parts = {"decode": usd, "idle": 0.5}
    categories = {UsageKey("shoes"): {"documents": ok}}
    return Bill(
        "s",
        0.0,
        usd,
        totals=totals,
        categories=categories,
        parts=parts,
        budget_usd=budget,
        nodes=nodes,
        workers=workers,
    )


@pytest.mark.slow  # a Ray with metrics
def test_prometheus_scrapes_the_metrics_of_the_latest_bill():
    """Counters are the bill's totals, gauges its state; a state that no worker has any more falls
    to zero.
    """
    from prometheus_client.parser import text_string_to_metric_families

    bills = [
        bill(3, 1.0, [[0, 1, "startup", None]]),
        bill(5, 2.5, [[0, 1, "startup", None], [1, 2, "busy", "u"]], 9.0),
    ]
    lines = "".join(encoded(bill, indent=None).decode() for bill in bills)
    (port,) = free_ports(1)
    command = [sys.executable, "-c", SCRIPT, "ray_raypd_budget_usd", str(port)]
    done = subprocess.run(
        command,
        input=lines,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    samples = {}
    for family in text_string_to_metric_families(done.stdout + "\n"):
        for sample in family.samples:
            assert sample.labels["run"] == "products"
            tag = [value for key, value in sample.labels.items() if key in TAGS]
            samples[sample.name, tag[0] if tag else ""] = sample.value
    expected = {
        ("documents_total", "ok"): 5,
        ("documents_total", "failed"): 1,
        ("tokens_total", "prefill"): 500,
        ("category_documents_total", "shoes"): 5,
        ("cost_usd", "decode"): 2.5,
        ("cost_usd", "idle"): 0.5,
        ("budget_usd", ""): 9,
        ("nodes", "spot"): 1,
        ("workers", "busy"): 1,
        ("workers", "startup"): 0,
    }
    assert {key: samples.get((f"ray_raypd_{key[0]}", key[1])) for key in expected} == expected
