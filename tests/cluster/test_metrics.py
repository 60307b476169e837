"""Metrics against what Ray really exports: scraped over HTTP, parsed by Prometheus' own client."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from raypd.cluster.metrics import COUNTERS, GAUGES
from raypd.run.records import Bill, NodeTime, WorkerTime
from tests.processes import LONG
from tests.s3 import free_ports

pytestmark = pytest.mark.slow  # a Ray with metrics

SCRIPT = """
import json, sys, time, urllib.request
import ray
from raypd.cluster.metrics import Metrics
from raypd.run.records import Bill, from_json

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
"""

TAGS = {tag for _, tag in (COUNTERS | GAUGES).values() if tag}


def bill(ok, usd, spans, budget=None):
    totals = {"ok": ok, "failed": 1, "prefill_tokens": 100 * ok, "shared_tokens": 0, "decode_tokens": 7}
    nodes = [NodeTime("a", 0.0, market="spot"), NodeTime("b", 0.0, market="spot", ended=3.0)]
    workers = [WorkerTime("v", "a", 0.0, spans=spans), WorkerTime("w", "b", 0.0, ended=1.0)]
    parts, categories = {"decode": usd, "idle": 0.5}, {"shoes": {"documents": ok}}
    return Bill("s", 0.0, usd, totals=totals, categories=categories, parts=parts, budget_usd=budget, nodes=nodes,
                workers=workers)  # fmt: skip


def test_what_prometheus_scrapes_after_two_bills():
    """Counters are the bill's totals, gauges its state; a state that no worker has any more falls to zero."""
    from prometheus_client.parser import text_string_to_metric_families

    bills = [bill(3, 1.0, [[0, 1, "startup", None]]), bill(5, 2.5, [[0, 1, "startup", None], [1, 2, "busy", "u"]], 9.0)]
    lines = "".join(json.dumps(asdict(b)) + "\n" for b in bills)
    (port,) = free_ports(1)
    command = [sys.executable, "-c", SCRIPT, "ray_raypd_budget_usd", str(port)]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    found = {}
    for family in text_string_to_metric_families(done.stdout + "\n"):
        for sample in family.samples:
            assert sample.labels["run"] == "products"
            tag = [value for key, value in sample.labels.items() if key in TAGS]
            found[sample.name, tag[0] if tag else ""] = sample.value
    expected = {("documents_total", "ok"): 5, ("documents_total", "failed"): 1, ("tokens_total", "prefill"): 500,
                ("category_documents_total", "shoes"): 5, ("cost_usd", "decode"): 2.5, ("cost_usd", "idle"): 0.5,
                ("budget_usd", ""): 9, ("nodes", "spot"): 1, ("workers", "busy"): 1,
                ("workers", "startup"): 0}  # fmt: skip
    assert {key: found.get((f"ray_raypd_{key[0]}", key[1])) for key in expected} == expected
