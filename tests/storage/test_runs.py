"""Whole runs on real Ray whose input and output lie on a real S3 server, behind a proxy that fails
calls.
"""

import gzip
import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from raypd import storage
from raypd.cluster import driver
from raypd.dataset import writer
from raypd.errors import ConfigError
from tests import s3
from tests.cluster import fakes
from tests.fault_proxy import Faults
from tests.processes import LONG, end_all, ended, wait_for
from tests.runs import parquet as as_parquet, run_process, with_keys


@pytest.fixture
def make(config, bucket: str):
    """Makes configurations over `fill`'s input: make(endpoint, units_in_flight=1,
    partition={...}).
    """

    def made(endpoint: str, partition: dict[str, str] | None = None, **keys):
        run = config(
            f"{bucket}/in/*/*",
            f"{bucket}/runs/one",
            {"options": {"endpoint_url": endpoint, "read_timeout": 5}},
            **keys,
        )
        return with_keys(run, output={"partition": partition or {}})

    return made


def fill(bucket: str, jsonl: int = 40, gz: int = 25, parquet: int = 35, title: str = "a") -> int:
    """Input of three kinds in two folders, ids 0, 1, 2, ...; how many documents."""
    rows = [{"id": str(i), "title": title} for i in range(jsonl + gz + parquet)]
    text = [
        "".join(json.dumps(r) + "\n" for r in part).encode()
        for part in (rows[:jsonl], rows[jsonl : jsonl + gz])
    ]
    storage.put(f"{bucket}/in/text/a.jsonl", text[0])
    storage.put(f"{bucket}/in/text/b.jsonl.gz", gzip.compress(text[1]))
    storage.put(
        f"{bucket}/in/tables/c.parquet",
        as_parquet(pa.Table.from_pylist(rows[jsonl + gz :]), row_group_size=8),
    )
    return len(rows)


def ids(output: str) -> Counter[str]:
    """How often each id stands in the output."""
    counts: Counter[str] = Counter()
    for _, path in writer.objects(output):
        with storage.open_file(path) as file:
            counts.update(pq.read_table(file)["id"].to_pylist())
    return counts


def test_a_run_then_new_input_in_another_partition_then_nothing_to_do(
    connected, bucket, make, ray_here
) -> None:
    count = fill(bucket)
    run = make(connected.url, {"date": "2026-11-20"})
    result = driver.run_extract(run, build=fakes.build)
    assert result.documents == count
    assert result.ok == count
    assert result.units == 11
    assert result.units_planned == 11
    assert ids(run.output.path) == Counter(map(str, range(count)))
    storage.put(
        f"{bucket}/in/text/d.jsonl", json.dumps({"id": str(count), "title": "new"}).encode()
    )
    later = make(connected.url, {"date": "2026-11-21"})
    assert driver.run_extract(later, build=fakes.build).units == 12
    assert ids(run.output.path) == Counter(map(str, range(count + 1)))
    folder = f"{run.output.path}/units"
    assert storage.folders(folder) == ["date=2026-11-20", "date=2026-11-21"]
    (name,) = storage.names(f"{folder}/date=2026-11-21")
    assert writer.read_summary(run.output.path, name.removesuffix(".parquet")).documents == 1
    again = driver.run_extract(later, build=lambda *_: pytest.fail("a worker was built"))
    assert (
        json.loads(storage.read(f"{run.output.path}/manifest.json"))["documents"]
        == again.documents
        == count + 1
    )
    assert again.output == run.output.path
    with pytest.raises(
        ConfigError,
        match=r"one/?: already holds a run with another configuration.*input\.id_column",
    ):
        driver.run_extract(with_keys(run, input={"id_column": None}))


@pytest.mark.slow
def test_kill_9_of_the_driver_and_resume_and_no_secret_anywhere(
    connected, bucket, make, proxy, tmp_path
) -> None:
    """All that a run prints, writes, logs and raises is searched for the secret that it signed its
    requests with.
    """
    count = fill(bucket, gz=10, parquet=10, title=f"until {tmp_path}/go")
    storage.put(f"{bucket}/in/first/a.jsonl", b'{"id": "60", "title": "a"}\n' * 10)
    proxy.faults = Faults(share=0.05, seed=2)
    run = make(proxy.url, units_in_flight=1)
    logs = Path("/tmp") / f"r{os.getpid()}"  # Ray's sockets need a short path
    printed = ""
    try:
        ray.shutdown()  # that of other tests, whose logs are elsewhere
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=str(logs),
        )
        run = with_keys(run, cluster={"address": ray.get_runtime_context().gcs_address})
        first = run_process(run, tmp_path)
        wait_for(lambda: first.poll() is not None or writer.committed(run.output.path))
        first.send_signal(signal.SIGKILL)
        printed += "".join(first.communicate())
        assert len(writer.committed(run.output.path)) == 1, printed
        (tmp_path / "go").touch()
        printed += ended(run_process(run, tmp_path))
        assert f"documents={count + 10} ok={count + 10} failed=0" in printed
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_SESSION_TOKEN", "raypd-test-T0K3N-77")
            refused = run_process(run, tmp_path)
        printed += "".join(refused.communicate(timeout=LONG))
        proxy.faults = Faults()
        ray.shutdown()
        assert ids(run.output.path) == Counter({**{str(i): 1 for i in range(count)}, "60": 10})
        texts = {"output of the processes": printed.encode()}
        texts |= {item.path: storage.read(item.path) for item in storage.walk(f"{bucket}/runs")}
        texts |= {str(path): path.read_bytes() for path in logs.rglob("*") if path.is_file()}
        assert len(texts) > 20
        secrets = (s3.SECRET.encode(), b"raypd-test-T0K3N-77")
        assert [
            where for where, text in texts.items() if any(secret in text for secret in secrets)
        ] == []
    finally:
        end_all()
        ray.shutdown()
        shutil.rmtree(logs, ignore_errors=True)
