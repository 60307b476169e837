"""The stream of documents on a real Ray: order, faults of readers, and what workers read then."""

from __future__ import annotations

import gzip
import json
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray.data._internal.stats import get_or_create_stats_actor

from raypd import storage
from raypd.answering import progress
from raypd.cluster import document_stream, driver, unit_block
from raypd.cluster.document_stream import DocumentStream, StreamedUnit, StreamProgress, free_share
from raypd.cluster.ray_session import WorkerResources
from raypd.config import ClusterConfig, RunConfig
from raypd.dataset import planner, read_unit
from raypd.dataset.formats import ranges
from raypd.report import Watch, data as report_data, page
from raypd.run import ReadingRecord, usage
from raypd.run.unit import Unit
from tests.cluster import fakes
from tests.fault_proxy import Proxy
from tests.processes import LONG, children
from tests.runs import says, with_keys, write_jsonl

WORKER = WorkerResources(cpus=1.0, gpus=0.0, threads=1)


@pytest.fixture
def hooked(tmp_path: Path, config) -> Callable[..., RunConfig]:
    """Make a configuration over files of three documents each, read by `shop_hook`."""

    def make(*names: str, **keys) -> RunConfig:
        for number, name in enumerate(names):
            lines = "".join(f"{number}-{row}\n" for row in range(3))
            (tmp_path / "in").mkdir(exist_ok=True)
            (tmp_path / f"in/{number:02d}-{name}.shop").write_text(lines)
        keys = {"readers": 2, "cpus_per_worker": 1, "unit_documents": 3, **keys}
        return config(str(tmp_path / "in"), reader="tests.cluster.shop_hook:rows", **keys)

    return make


def streamed(stream: DocumentStream, waiting: bool = True) -> Iterator[StreamedUnit]:
    """Yield all units of a stream, as a worker that has nothing else to do takes them."""
    ends = time.monotonic() + LONG
    while time.monotonic() < ends:
        try:
            unit = stream.next(0.0 if waiting else None)
        except StopIteration:
            return
        if unit is None:
            time.sleep(0.01)
        else:
            yield unit
    pytest.fail("the stream does not end")


def test_blocks_come_in_the_order_of_the_plan_with_the_documents_of_their_units(
    tmp_path, config, ray_here, monkeypatch
) -> None:
    monkeypatch.setattr(document_stream, "_FIRST_PASS_UNITS", 5)
    for name in "ab":
        write_jsonl(tmp_path / f"in/{name}.jsonl", [f"{name} {row}" for row in range(200)])
    run = config(str(tmp_path / "in"), unit_documents=7, readers=2)
    plan = planner.plan(run)
    stream = DocumentStream("run", plan, run, WORKER)
    order = []
    sizes = Counter[int]()
    for item in streamed(stream):
        assert item.block is not None
        documents, why_not = unit_block.fetch_documents(item.unit, item.block)
        assert why_not == ""
        assert documents == read_unit(item.unit, run)
        order.append(item.unit.id)
        sizes[item.block.index] += 1
    stream.close()
    assert order == [unit.id for unit in plan]
    # Units that are read quickly share blocks.
    assert len(sizes) > 4
    assert stream.progress() == StreamProgress(
        read=len(order),
        waiting=0,
        waiting_bytes=0,
    )


def requested_bytes(proxy: Proxy, size: int) -> int:
    """Return the bytes of an object of this size that GET requests have asked for."""
    total = 0
    for method, path, headers in proxy.log:
        if method == "GET" and "/in." in path:
            first, _, last = headers["Range"].removeprefix("bytes=").partition("-")
            if first:
                total += min(int(last or size), size - 1) - int(first) + 1
            else:
                total += int(last)
    return total


@pytest.mark.parametrize("ending", ["jsonl.gz", "parquet"])
def test_readers_read_a_file_that_cannot_be_split_about_once(
    ending, tmp_path, config, ray_here, monkeypatch, bucket, proxy
) -> None:
    monkeypatch.setattr(document_stream, "_FIRST_PASS_UNITS", 5)
    monkeypatch.setattr(ranges, "_LARGE_GROUP_BYTES", 1 << 20)
    rows = []
    for number in range(4000):
        rows.append({"id": str(number), "title": random.Random(number).randbytes(1000).hex()})
    file = tmp_path / f"in.{ending}"
    if ending == "parquet":
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, file, row_group_size=len(rows), use_dictionary=False)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        file.write_bytes(gzip.compress(lines.encode()))
    storage.put(f"{bucket}/{file.name}", file.read_bytes())
    run = config(
        f"{bucket}/{file.name}",
        unit_documents=100,
        readers=3,
        storage={"options": {"endpoint_url": proxy.url}},
    )
    storage.configure(run.storage)
    plan = planner.plan(run)
    proxy.log.clear()
    stream = DocumentStream("run", plan, run, WORKER)
    ids = []
    for item in streamed(stream):
        assert item.block is not None
        documents, _ = unit_block.fetch_documents(item.unit, item.block)
        assert documents is not None
        ids += [document.id for document in documents]
    stream.close()
    assert ids == [row["id"] for row in rows]
    size = file.stat().st_size
    assert size <= requested_bytes(proxy, size) < 1.5 * size


def test_row_groups_and_files_are_read_side_by_side(tmp_path, config, monkeypatch) -> None:
    monkeypatch.setattr(ranges, "_LARGE_GROUP_BYTES", 400)
    rows = pa.table({"id": [str(n) for n in range(80)], "title": ["some text"] * 80})
    (tmp_path / "in").mkdir()
    pq.write_table(rows, tmp_path / "in/a.parquet", row_group_size=40, use_dictionary=False)
    pq.write_table(rows, tmp_path / "in/b.parquet", row_group_size=8, use_dictionary=False)
    for name in "cd":
        lines = "".join(json.dumps(row) + "\n" for row in rows.to_pylist())
        (tmp_path / f"in/{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_jsonl(tmp_path / "in/e.jsonl", ["some text"] * 80)
    run = config(str(tmp_path / "in"), unit_documents=10)
    units = list(planner.plan(run))
    tasks = document_stream._in_tasks([[unit] for unit in units])
    sizes = Counter[str]()
    for task in tasks:
        names = {unit.name for block in task for unit in block}
        assert len(names) == 1
        sizes[f"{names.pop()[0]} {len(task)}"] += 1
    # Two large row groups; small ones; two files; lines that anybody can enter.
    assert sizes == {
        "a 4": 2,
        "b 1": 8,
        "c 8": 1,
        "d 8": 1,
        "e 1": 8,
    }


def test_the_bytes_that_are_read_ahead_are_limited(tmp_path, config, ray_here) -> None:
    write_jsonl(tmp_path / "in.jsonl", [os.urandom(400_000).hex() for _ in range(60)])
    run = config(str(tmp_path / "in.jsonl"), unit_documents=1, readers=2)
    run = with_keys(run, cluster={"read_ahead_mb": 8})
    plan = planner.plan(run)
    stream = DocumentStream("run", plan, run, WORKER)
    held = []
    for item in streamed(stream):
        held.append(item)
        if len(held) == 3:
            break
    # With more time, more would be read.
    time.sleep(3)
    assert 0 < stream.progress().waiting_bytes < 12e6
    assert stream.progress().read < 20
    rest = list(streamed(stream))
    stream.close()
    assert len(held) + len(rest) == plan.units


@pytest.mark.parametrize(
    ("nodes", "gpus", "max_workers", "cpus"),
    [
        # A laptop: the CPUs are the workers'.
        ([{"CPU": 2.0}], 0.0, 2, 0.0),
        # A g6e.48xlarge, and one with a node of CPUs only beside it.
        ([{"CPU": 192.0, "GPU": 8.0}], 1.0, 8, 184.0),
        ([{"CPU": 192.0, "GPU": 8.0}, {"CPU": 64.0}], 1.0, 8, 248.0),
        # Fewer workers than GPUs; more workers than the nodes that have come up can hold.
        ([{"CPU": 192.0, "GPU": 8.0}], 1.0, 2, 190.0),
        ([{"CPU": 4.0, "GPU": 1.0}], 1.0, 100, 3.0),
        ([], 1.0, 4, 0.0),
    ],
)
def test_readers_get_the_cpus_that_workers_leave_free(nodes, gpus, max_workers, cpus) -> None:
    alive = [{"Resources": {**node, "object_store_memory": 5.0}} for node in nodes]
    cluster = ClusterConfig(max_workers=max_workers)
    share = free_share(alive, WorkerResources(1.0, gpus, 1), cluster)
    assert share == (cpus, 5.0 * len(nodes))


def test_without_free_cpus_the_units_come_without_blocks(monkeypatch, config) -> None:
    monkeypatch.setattr(document_stream.ray, "nodes", list)
    units = [Unit(name, ()) for name in "abc"]
    stream = DocumentStream("run", units, config("x"), WORKER)
    stream.prepare()
    assert list(streamed(stream)) == [StreamedUnit(unit) for unit in units]


def run_both(run: RunConfig) -> tuple[Any, list, list]:
    """Run with readers and without; return the manifest, and the rows of both."""
    tables = []
    for readers, output in ((2, run.output.path), (0, f"{run.output.path}-alone")):
        each = with_keys(
            run,
            cluster={"readers": readers},
            output={"path": output},
        )
        try:
            made: Any = driver.run_extract(each, build=fakes.build)
        except driver.RunError as error:
            made = str(error).replace("-alone", "")
        rows = pq.read_table(f"{output}/units").to_pylist()
        tables.append((made, sorted(rows, key=lambda row: row["id"])))
    return tables[0][0], tables[0][1], tables[1][1]


def test_a_hook_that_prints_raises_or_returns_what_cannot_be_pickled_gives_the_same_rows(
    hooked, ray_here, capfd
) -> None:
    run = hooked("print", "plain", "unpicklable", "raise", "plain")
    made, rows, alone = run_both(run)
    says(made, "1 units of the input cannot be read", "03-raise.shop", "an unknown shop")
    assert rows == alone
    assert len(rows) == 4 * 3
    printed = capfd.readouterr().err
    says(printed, "2 units of the input had to be read by workers", unit_block.READING_FAILED)


def test_an_object_that_changes_while_it_is_read_ahead_gives_the_message_of_a_worker(
    tmp_path, config, ray_here, between
) -> None:
    for name in "abc":
        write_jsonl(tmp_path / f"in/{name}.jsonl", ["a"] * 10)
    run = config(str(tmp_path / "in"), readers=2, cpus_per_worker=1)
    sizes = iter((7, 8))
    # The object changes once the plan is made, before a reader opens it.
    between(lambda: write_jsonl(tmp_path / "in/b.jsonl", ["changed"] * next(sizes)))
    made, rows, alone = run_both(run)
    says(made, "1 units of the input cannot be read", "b.jsonl: has changed since")
    assert len(rows) == 20
    assert rows == alone


def test_workers_that_starve_read_later_units_and_the_readers_leave_these_out(
    hooked, ray_here
) -> None:
    run = hooked(*["slow"] * 12)
    plan = [unit.id for unit in planner.plan(run)]
    record = ReadingRecord()
    stream = DocumentStream("run", planner.plan(run), run, WORKER, record)
    helped = []
    read_ahead = []
    ends = time.monotonic() + LONG
    try:
        while len(helped) + len(read_ahead) < len(plan):
            assert time.monotonic() < ends
            streamed = stream.next(document_stream._BEHIND_SECONDS + 1)
            if streamed is None:
                time.sleep(0.05)
            elif streamed.block is None:
                assert streamed.why_not == unit_block.READERS_BEHIND
                helped.append(streamed.unit.id)
            else:
                documents, _ = unit_block.fetch_documents(streamed.unit, streamed.block)
                assert documents is not None
                read_ahead.append(streamed.unit.id)
        with pytest.raises(StopIteration):
            stream.next(None)
    finally:
        stream.close()
    assert sorted(helped + read_ahead) == sorted(plan)
    assert read_ahead == sorted(read_ahead, key=plan.index)
    # Two readers may have begun two units each; workers get all others.
    assert len(helped) >= 7
    # Two seconds a unit: the readers have not read what workers read.
    assert record.units == len(read_ahead)
    assert 2 * len(read_ahead) <= record.reader_seconds < 2 * len(read_ahead) + 2


def test_workers_never_recognize_scanned_pages_for_slow_readers(hooked, ray_here) -> None:
    run = with_keys(hooked(*["slow"] * 6), input={"ocr": "auto"})
    stream = DocumentStream("run", planner.plan(run), run, WORKER)
    try:
        for _ in range(20):
            streamed = stream.next(document_stream._BEHIND_SECONDS + 1)
            assert streamed is None or streamed.block is not None
            time.sleep(0.05)
    finally:
        stream.close()


def test_a_run_shows_what_was_read_ahead_and_how_long_engines_waited(
    hooked, ray_here, monkeypatch, capfd
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    monkeypatch.setattr(usage, "_SHORT_SECONDS", 0.0)
    run = hooked(*["slow"] * 4)
    made = driver.run_extract(run, build=fakes.build)
    assert made.documents == 12
    assert made.cost is not None
    # The engine has next to nothing to do, so it waits for the readers nearly all of the time; on
    # a very busy machine its own little work takes longer.
    assert made.cost.input_bound > 0.25
    says(capfd.readouterr().err, "units read and parsed", "waiting (", "decoding")
    report = report_data.load(run.output.path)
    (reading,) = report.reading
    assert reading.session == report.sessions[-1].id
    assert reading.units == 4
    assert reading.reader_seconds > 4 * 2
    assert reading.read_by_workers == {}
    says(reading.operators, "ReadDocuments", "4 tasks executed")
    says(page.render(report), "Reading ahead", "ReadDocuments", "input-bound")
    says(" ".join(Watch(run.output.path).look().notes), "input-bound", "add readers")
    # Ray's dashboard lists the execution under the name of the run.
    datasets = ray.get(get_or_create_stats_actor().get_datasets.remote())
    assert [name for name in datasets if name.startswith("out_")]


@pytest.mark.slow
@pytest.mark.ci
def test_a_reader_that_is_killed_is_replaced_and_one_that_always_dies_leaves_its_unit_to_a_worker(
    hooked, ray_here, capfd
) -> None:
    run = hooked(f"once-{uuid.uuid4().hex}", "plain", "kill", *["plain"] * 4, unit_documents=3)
    made = driver.run_extract(run, build=fakes.build)
    assert made.documents == made.ok == 21
    says(capfd.readouterr().err, "had to be read by workers", unit_block.STREAM_FAILED)


@pytest.mark.slow
@pytest.mark.ci
def test_workers_go_around_a_reader_that_hangs(hooked, ray_here, monkeypatch, capfd) -> None:
    monkeypatch.setattr(document_stream, "_STALL_SECONDS", 1.0)
    monkeypatch.setattr(document_stream, "_HANG_SECONDS", 3.0)
    run = hooked("plain", "hang", *["plain"] * 8)
    made = driver.run_extract(run, build=fakes.build)
    assert made.documents == made.ok == 30
    says(capfd.readouterr().err, "had to be read by workers", unit_block.STREAM_STALLED)
    # The hanging reader was ended with its execution.
    assert not children(os.getpid(), "ray::ReadDocuments")
