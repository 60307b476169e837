"""How many requests a unit costs: docs/storage.md promises these counts."""

from collections import Counter

import pytest

from raypd import storage
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import RunConfig, StorageConfig
from raypd.dataset import planner, writer
from raypd.run import manifest, retry_policy
from raypd.run.retry_policy import UnitLog
from tests.cluster import fakes
from tests.fault_proxy import Proxy
from tests.runs import write_jsonl


@pytest.fixture
def run(proxy: Proxy, bucket: str, config, tmp_path) -> RunConfig:
    """A run of four units of ten documents, whose input and output are behind the proxy."""
    settings = {"options": {"endpoint_url": proxy.url}}
    storage.configure(StorageConfig.model_validate(settings))
    path = write_jsonl(tmp_path / "a.jsonl", [f"title {i}" for i in range(40)])
    storage.put(f"{bucket}/in/a.jsonl", path.read_bytes())
    return config(f"{bucket}/in/a.jsonl", f"{bucket}/out", storage=settings)


def requests_of(proxy: Proxy, step) -> Counter[str]:
    """The requests of a step: METHOD and the folder of the key."""
    before = len(proxy.log)
    step()
    counts: Counter[str] = Counter()
    for method, path, _ in proxy.log[before:]:
        key = path.partition("?")[0]
        folder = next((name for name in ("in", "units", "failures") if f"/{name}/" in key), "")
        counts[f"{method} {folder}".strip()] += 1
    return counts


def test_a_unit_costs_one_put_and_the_gets_of_its_input(run, proxy) -> None:
    output = run.output.path
    manifest.claim(run, output)
    worker = DecodeWorker(WorkerSpec(run, output, "s", build=fakes.build))
    units = list(planner.plan(run))
    assert len(units) == 4
    for unit in units[:3]:
        counts = requests_of(proxy, lambda unit=unit: worker.run(unit, again=False))
        assert counts == {"GET in": 1, "PUT units": 1}
    # A unit that another worker may have begun costs a look, and a record of the attempt.
    UnitLog(output, "s", worker.node, "died", lambda node: True).died(units[3].id)
    assert retry_policy.attempted(output) == {units[3].id}
    counts = requests_of(proxy, lambda: worker.run(units[3]))
    assert counts["PUT units"] == 1
    assert counts["HEAD units"] == 1
    assert counts["PUT failures"] >= 2
    assert counts["DELETE failures"] == 1
    assert retry_policy.attempted(output) == set()
    _, rows = writer.read_table(output, units[3].id)
    assert set(rows["attempts"].to_pylist()) == {2}
    assert writer.committed(output) == {unit.id for unit in units}
    worker.close()


def test_a_look_at_a_finished_run_costs_no_request_per_unit(run, proxy) -> None:
    from raypd.dataset import CommittedUnits, summaries

    output = run.output.path
    manifest.claim(run, output)
    worker = DecodeWorker(WorkerSpec(run, output, "s", build=fakes.build))
    summary_writer = summaries.SummaryWriter(output)
    for unit in planner.plan(run):
        summary_writer.add(worker.run(unit, again=False).commit)
    summary_writer.flush()
    worker.close()
    counts = requests_of(proxy, lambda: list(summaries.read(CommittedUnits(output))))
    # Two listings, a look for table files before and after, and the file of summaries.
    assert counts.total() <= 6
    assert counts["GET units"] == counts["HEAD units"] == 0
