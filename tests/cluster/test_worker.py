"""The decode worker in this process with a fake engine: overlapping units, errors, faulty GPUs."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import ray

from raypd.answering.request_queue import EngineBroken, UnitState
from raypd.billing import Bill, WorkerTime, book
from raypd.cluster import driver, faulty_gpus, ray_session, worker as worker_module
from raypd.cluster.ray_session import WorkerResources
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.cluster.worker_handle import WorkerHandle
from raypd.cluster.worker_pool import WorkerPool
from raypd.config import ClusterConfig, RunConfig
from raypd.dataset import read_unit, summaries, writer
from raypd.dataset.planner import plan
from raypd.decoding.counts import Finished, TokenCounts
from raypd.errors import ModelError, RunError
from raypd.models.device import resolve_device
from raypd.run import manifest, records, retry_policy
from raypd.run.retry_policy import Attempt, AttemptRecord, UnitLog, attempts_path
from raypd.run.unit import Unit
from raypd.run.unit_totals import UnitTotals
from raypd.tasks.base import Record
from tests.cluster import fakes
from tests.processes import LONG, wait_for
from tests.runs import with_keys, write_jsonl

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def make_worker(run, **keys) -> DecodeWorker:
    manifest.claim(run, run.output.path)
    return DecodeWorker(WorkerSpec(run, run.output.path, "s", **{"build": fakes.build, **keys}))


@pytest.fixture
def begin(tmp_path: Path, config):
    """Make a run over documents with the given titles.

    Returns:
        (the configuration, a worker, the units)
    """

    def make(
        titles: Sequence[str], unit_documents: int = 100, **keys
    ) -> tuple[RunConfig, DecodeWorker, list[Unit]]:
        path = write_jsonl(tmp_path / "a.jsonl", titles)
        run = config(str(path), unit_documents=unit_documents, **keys)
        return run, make_worker(run), list(plan(run))

    return make


def rows(run, unit) -> list[dict]:
    return writer.read_rows(run.output.path, unit.id, 1000)


def test_units_overlap_so_that_the_engine_does_not_drain(begin) -> None:
    run, worker, units = begin(
        ["a"] * 400,
        unit_documents=50,
        max_num_seqs=4,
    )
    request_queue = worker.request_queue
    step = worker.parts.engine.step

    def planned() -> bool:
        """Return whether a batch of requests is queued, or every request is planned."""
        if len(request_queue._queue) >= request_queue.capacity:
            return True
        if request_queue._unit_count < len(units):
            return False
        states = request_queue._units.values()
        return all(state.begun is not None and not state.has_more for state in states)

    def patient() -> list[Finished]:
        # However slow the machine is, the engine is slower.
        wait_for(planned)
        return step()

    worker.parts.engine.step = patient  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as in_flight:
        list(in_flight.map(worker.run, units))
    assert writer.committed(run.output.path) == {unit.id for unit in units}
    fill = worker.parts.engine.fill
    # 200 programs in batches of 4: every step except the first and the last two is full, also at
    # the borders of units.
    assert sum(fill) == 200
    assert sum(batch < 4 for batch in fill) <= 3, fill
    counts = writer.read_summary(run.output.path, units[0].id).counts
    assert counts == {
        "prefill_tokens": 250,
        "shared_tokens": 100,
        "decode_tokens": 75,
        "steps": 50,
    }


def test_requests_are_planned_only_while_the_engine_has_room(begin) -> None:
    _, worker, (unit,) = begin(
        ["a"] * 200,
        unit_documents=200,
        max_num_seqs=4,
    )
    ahead = []

    class Task(fakes.FakeTask):
        def plan(self, documents):
            for item in super().plan(documents):
                ahead.append(len(worker.request_queue._queue) + worker.request_queue._in_engine)
                yield item

    worker.parts.task = Task()
    worker.run(unit)
    assert len(ahead) == 100
    assert max(ahead) <= 2 * 4


def test_an_error_fails_only_the_documents_of_its_program(begin) -> None:
    titles = ["a", "b", "program", "c", "finish", "d", "submit", "e", "f", "plan", "g", "", "h"]
    run, worker, (unit,) = begin(titles)
    submit = worker.parts.engine.submit

    def refuse(program, **keys) -> None:
        submit(["submit"] if "submit" in program else program, **keys)

    worker.parts.engine.submit = refuse  # type: ignore[method-assign]
    summary, _ = worker.process(unit, Attempt())
    # The rows of the table are identified by byte offset; number them in order.
    status = {}
    for number, row in enumerate(sorted(rows(run, unit), key=lambda row: row["row"])):
        status[number] = row["error"] or row["category"]
    assert len(status) == len(titles)
    assert status[0] == "A"
    assert status[2] == status[3] == "ValueError: the program failed"
    assert status[4] == status[5] == "ValueError: the answer cannot be read"
    assert status[6] == status[7] == "ValueError: the engine does not take it"
    assert status[9] == "ValueError: the plan failed"
    # After the error, these were planned one by one.
    assert status[8] == "F"
    assert status[10] == "G"
    assert re.fullmatch(r"a.jsonl, byte \d+: no text in title", status[11])
    assert summary.documents == 13
    assert summary.ok == 5
    assert summary.failed == 8


def test_truncated_documents_are_counted(begin, monkeypatch) -> None:
    def cut(row, values):
        return Record(row, {**values, "truncated": "LONG" in str(values)})

    monkeypatch.setattr(fakes, "Record", cut)
    run, worker, (unit,) = begin(["a", "long", "a", "twice long", "long"])
    summary, _ = worker.process(unit, Attempt())
    assert summary.truncated == 3
    units = UnitTotals(summaries.some(run.output.path, 100))
    assert manifest.make(run, run.output.path, 1, units, manifest.Unreadable(), None).truncated == 3


def test_a_committed_unit_is_not_decoded_again(begin) -> None:
    run, worker, (unit,) = begin(["a", "b"])
    first = worker.run(unit)
    second_worker = make_worker(run)
    second = second_worker.run(unit)
    assert second.error is None
    assert (second.ok, second.failed) == (first.ok, first.failed)
    assert second_worker.parts.engine.fill == []


def test_the_attempts_of_a_row_count_the_tries_after_errors_of_storage(begin, monkeypatch) -> None:
    run, worker, (unit,) = begin(["a", "b"])
    errors = [OSError(errno.EIO, "the mount is gone"), OSError(errno.EIO, "still gone")]

    def read(*arguments):
        if errors:
            raise errors.pop()
        return read_unit(*arguments)

    monkeypatch.setattr(worker_module, "read_unit", read)
    monkeypatch.setattr(worker_module, "_RETRY_SECONDS", 0.0)
    assert worker.run(unit, again=False).ok == 2
    assert {row["attempts"] for row in rows(run, unit)} == {3}


def test_a_broken_engine_fails_the_current_unit_and_the_next(begin) -> None:
    _, worker, (unit,) = begin(["engine"])
    for _ in range(2):
        with pytest.raises(EngineBroken, match="the device is gone"):
            worker.process(unit, Attempt())


def test_the_reason_that_a_dying_worker_stores_contains_no_secret(
    begin, monkeypatch, capsys
) -> None:
    run, worker, (unit,) = begin(["a"])
    broken = EngineBroken("GET https://me:Pa55word@hub.example/m?token=t0ken failed")
    monkeypatch.setattr(worker, "process", mock.Mock(side_effect=broken))
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit):
        worker.run(unit)
    reason = Path(retry_policy.failure_path(run.output.path, unit.id)).read_text()
    assert reason == "GET https://(hidden)@hub.example/m?token=(hidden) failed"
    assert reason in capsys.readouterr().err


def test_a_bisecting_attempt_leaves_a_checkpoint_before_each_group(begin) -> None:
    run, worker, (unit,) = begin(["a"] * 40)
    checkpoints = []
    step = worker.parts.engine.step

    def look():
        record = records.read(AttemptRecord, attempts_path(run.output.path, unit.id))
        checkpoints.append(record.group)
        return step()

    worker.parts.engine.step = look  # type: ignore[method-assign]
    worker.process(
        unit,
        Attempt(
            number=4,
            deaths=3,
            suspects=(7, 8),
            quarantined={5: 3},
        ),
    )
    others = tuple(row for row in range(40) if row not in (5, 7, 8))
    assert list(dict.fromkeys(checkpoints)) == [
        (7,),
        (8,),
        others,
    ]
    table = rows(run, unit)
    assert [row["id"] for row in table if row["error"]] == ["5"]
    assert table[5]["error"] == "killed its worker process 3 times"
    assert {row["attempts"] for row in table} == {4}


def test_a_unit_whose_worker_died_is_alone_in_a_worker(tmp_path: Path, begin) -> None:
    run, worker, (first, bad, later) = begin(["until go", *["a"] * 29], unit_documents=10)
    UnitLog(run.output.path, "s", worker.node, "it died", lambda node: True).begin(
        bad.id, Attempt()
    )
    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(worker.run, first)]
        wait_for((tmp_path / "out/waiting-go").exists)
        results.append(pool.submit(worker.run, bad))
        wait_for(worker._entry.locked)
        results.append(pool.submit(worker.run, later))
        assert worker.progress().keys() == {first.id}
        (tmp_path / "out/go").touch()
        assert [result.result(LONG).ok for result in results] == [10, 10, 10]
    attempts = {}
    for unit in (first, bad, later):
        attempts[unit.id] = {row["attempts"] for row in rows(run, unit)}
    assert attempts == {
        first.id: {1},
        bad.id: {2},
        later.id: {1},
    }
    summaries = [writer.read_summary(run.output.path, unit.id) for unit in (first, bad, later)]
    summaries.sort(key=lambda summary: summary.committed_at)
    assert [summary.unit for summary in summaries[:2]] == [first.id, bad.id]
    assert list((tmp_path / "out/failures").iterdir()) == []


def test_a_unit_that_keeps_killing_workers_is_given_up_until_it_is_run_again(begin) -> None:
    run, worker, (unit,) = begin(["a"] * 10)
    UnitLog(run.output.path, "s", worker.node, "it died", lambda node: True).begin(
        unit.id, Attempt(30, deaths=29)
    )
    assert (
        worker.run(unit).error == "its worker processes died each time: none of them left a reason"
    )
    assert worker.run(unit).ok == 10


def test_a_cancelled_unit_is_handed_back(tmp_path: Path, begin) -> None:
    # The engine stops after its first step until it may go on.
    titles = [*["a"] * 8, "until go", *["a"] * 191]
    run, worker, (first, second) = begin(titles)
    with ThreadPoolExecutor(2) as pool:
        begun = pool.submit(worker.run, first)
        wait_for(lambda: worker.progress().get(first.id, (0, 0))[0])
        behind = pool.submit(worker.run, second)
        wait_for(lambda: second.id in worker.progress())
        # Only the second unit has not begun.
        worker.cancel(first.id, only_waiting=True)
        worker.cancel(second.id, only_waiting=True)
        assert behind.result(LONG).handed_back
        assert not begun.done()
        worker.cancel(first.id, only_waiting=False)
        assert begun.result(LONG).handed_back
    assert writer.committed(run.output.path) == set()
    assert worker.meter.report().open == {}
    assert worker.meter.report().changes == []
    (tmp_path / "out/go").touch()
    # What is left of the cancelled units in the engine does no harm and is billed as lost.
    assert worker.run(second).ok == 100
    report = worker.meter.report()
    counts = [count for change in report.changes for count in change.usage.values()]
    counts += report.lost_usage.values()
    assert sum(count["decode_tokens"] for count in counts) == 3 * sum(worker.parts.engine.fill)


def test_the_ledger_has_the_last_unit_when_its_result_is_returned(begin, monkeypatch) -> None:
    """The driver closes the bill as soon as it has the result; a later report does not count."""
    _, worker, (unit,) = begin(["a"] * 100)
    bill = book.Book(Bill("s", 0.0, 0.0))

    def deliver(references: list[WorkerTime], timeout: float) -> tuple[list, list]:
        for report in references:
            bill.take(report)
        return references, []

    # A call is delivered when somebody waits for it, as late as on a machine under load.
    worker._ledger = SimpleNamespace(report=SimpleNamespace(remote=lambda report: report))
    monkeypatch.setattr(ray, "wait", deliver)
    monkeypatch.setattr(ray, "get", lambda report: bill.receipt(report.worker))
    assert worker.run(unit).ok == 100
    (taken,) = bill.workers.values()
    assert taken.ok == 100
    assert taken.open == {}
    assert bill.totals()["documents"] == 100


def test_a_document_is_answered_when_no_request_of_it_is_left() -> None:
    state = UnitState(
        1,
        "u",
        documents=2,
        begun=0.0,
        records=[Record(0), Record(1)],
        open_requests=Counter({1: 1}),
    )
    assert state.answered == {0}
    assert state.progress().answered == 1


@pytest.mark.parametrize(("decoded", "batch"), [(8, 64), (100, 200), (300, 256)])
def test_an_engine_that_decodes_many_sequences_gets_a_larger_batch(
    begin, decoded: int, batch: int
) -> None:
    _, worker, (unit,) = begin(
        ["a"] * 1200,
        unit_documents=1200,
        max_num_seqs="auto",
    )
    engine = worker.parts.engine
    pending = []
    engine.batch = 7
    engine.sequences = [Finished("", None, None, TokenCounts())] * decoded
    step = engine.step

    def noted() -> list[Finished]:
        pending.append(engine.pending)
        return step()

    engine.step = noted  # type: ignore[method-assign]
    worker.run(unit)
    assert worker.request_queue.capacity == batch
    assert max(pending) <= batch


def test_a_worker_that_does_not_see_its_gpu_processes_nothing(begin, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run, _, (unit,) = begin(["a"])
    worker = make_worker(run, gpus=1.0)
    result = worker.run(unit)
    assert result.fatal
    assert not worker.loaded
    assert "was given a GPU, and torch" in (result.error or "")


def test_the_allocator_of_a_gpu_worker_expands_segments_unless_it_is_configured(
    begin, monkeypatch
) -> None:
    run, _, _ = begin(["a"])
    on_cpu = with_keys(run, model={"device": "cpu"})
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert make_worker(on_cpu, gpus=1.0).loaded
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert make_worker(on_cpu, gpus=1.0).loaded
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize(
    ("text", "cuda", "fault"),
    [
        (ECC, True, True),
        (ILLEGAL, True, False),
        ("CUDA error: device-side assert triggered", True, False),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True, True),
        ("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx", True, False),
        ("ValueError: unknown error", False, False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False, False),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", False, False),
    ],
)
def test_errors_of_a_faulty_gpu_are_recognized(text: str, cuda: bool, fault: bool) -> None:
    assert faulty_gpus.is_cuda_error(text) == cuda
    assert faulty_gpus.is_fault(text) == fault


def failing(text: str, loading: bool):
    """Return a `build` that raises while loading, or whose engine raises in its first step."""

    def build(config, threads):
        if loading:
            raise ModelError("its weights cannot be loaded") from RuntimeError(text)
        parts = fakes.build(config, threads)
        parts.engine.step = mock.Mock(side_effect=RuntimeError(text))
        return parts

    return build


@pytest.fixture
def run(tmp_path: Path, config) -> RunConfig:
    """A run over one document that has begun."""
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    run = with_keys(config(str(path)), model={"device": "cpu"})
    manifest.claim(run, run.output.path)
    return run


@pytest.mark.parametrize(
    ("text", "loading", "lost", "blamed"),
    [
        (ECC, False, False, True),
        (ECC, True, False, True),
        (ILLEGAL, True, False, True),
        (ILLEGAL, False, True, True),
        (ILLEGAL, False, False, False),
    ],
)
def test_a_gpu_is_not_used_after_two_deaths_and_no_document_is_blamed(
    run, monkeypatch, text, loading, lost, blamed
) -> None:
    (unit,) = plan(run)
    dead = []
    deaths = []
    ends = []
    end = UnitLog.end
    monkeypatch.setattr("os._exit", lambda code: dead.append(code) or sys.exit(code))
    monkeypatch.setattr(UnitLog, "end", lambda *arguments: None if dead else end(*arguments))
    monkeypatch.setattr("raypd.billing.energy.GpuWatch.is_lost", lambda self: lost)
    for shown in ("3", "3", "3", "4"):
        dead.clear()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        spec = WorkerSpec(
            run,
            run.output.path,
            "s",
            build=failing(text, loading),
            gpus=1.0,
        )
        ends.append("died")
        with contextlib.suppress(SystemExit):
            worker = DecodeWorker(spec)
            deaths.append(worker.log.next(unit.id).deaths)
            if (why := worker.hello()[1]) is not None:
                ends[-1] = why
            else:
                worker.run(unit)
    if blamed:
        assert sum(deaths) == 0
    else:
        assert sum(deaths) == 1 + 2 + 3
    *first_ends, third_end, other_gpu = ends
    assert first_ends == ["died", "died"]
    if blamed:
        assert re.match(
            "GPU 3 of node .* is faulty .* 2 worker processes died because of it", third_end
        )
    else:
        assert third_end == "died"
    assert other_gpu == "died"


@pytest.mark.parametrize(
    ("first", "lost", "ends"),
    [
        (ECC, False, ["died", "died", "no longer used"]),
        (None, True, ["died", "died", "no longer used"]),
        (None, False, ["sees no"] * 3),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_disappears_after_a_fault_is_not_used(
    run, monkeypatch, device, first, lost, ends
) -> None:
    """If no process ever saw the GPU, the driver is to blame, and the run ends."""
    (unit,) = plan(run)
    unseen = with_keys(run, model={"name": "a/model", "device": device})

    def build(config, threads):
        return resolve_device(config.model.device)

    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("raypd.billing.energy.GpuWatch.is_lost", lambda self: lost)
    seen = []
    for number in range(3):
        config, parts = (run, failing(first, True)) if first and number == 0 else (unseen, build)
        try:
            worker = DecodeWorker(
                WorkerSpec(
                    config,
                    run.output.path,
                    "s",
                    build=parts,
                    gpus=1.0,
                )
            )
        except SystemExit:
            seen.append("died")
        else:
            error = worker.run(unit).error or ""
            assert (worker.hello()[1] is not None) == ("is faulty" in error)
            seen.append(next(iter(re.findall("no longer used|sees no", error)), error))
    assert seen == ends


def test_a_lack_of_memory_is_not_blamed_on_the_gpu(run) -> None:
    build = failing("CUDA out of memory. Tried to allocate 2 GiB", True)
    worker = DecodeWorker(
        WorkerSpec(
            run,
            run.output.path,
            "s",
            build=build,
            gpus=1.0,
        )
    )
    assert worker.run(next(iter(plan(run)))).error == "its weights cannot be loaded"


@pytest.mark.parametrize(("workers", "gpus", "max_workers"), [(8, 8, 7), (1, 8, 1), (1, 1, None)])
def test_a_run_continues_with_the_gpus_that_are_left(
    monkeypatch, workers: int, gpus: int, max_workers: int | None
) -> None:
    lines: list[str] = []
    pool = WorkerPool(
        None,
        WorkerResources(1, 1.0, 1),
        ClusterConfig(max_workers=workers),
        lines.append,  # type: ignore[arg-type]
    )
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(gpus)})
    bad = WorkerHandle(SimpleNamespace())
    pool.workers.append(bad)
    if max_workers is None:
        with pytest.raises(RunError, match="no GPU is left: GPU 3 is broken"):
            pool._pin(bad, "GPU 3 is broken")
    else:
        pool._pin(bad, "GPU 3 is broken")
        assert pool._max_workers == max_workers
    assert lines == ["GPU 3 is broken"]
    assert pool.workers == []
    assert pool._pinning == [bad]


def build_with_gpu_0_broken(config, threads):
    if os.environ["CUDA_VISIBLE_DEVICES"] == "0":
        return failing(ECC, True)(config, threads)
    return fakes.build(config, threads)


@pytest.mark.slow
def test_a_faulty_gpu_of_two_costs_no_document(tmp_path: Path, config, capfd) -> None:
    # The run takes longer than two starts of a worker.
    path = str(write_jsonl(tmp_path / "a.jsonl", ["sleep 0.2"] * 200))
    shares = {"gpus_per_worker": 1, "cpus_per_worker": 0.5}
    run = with_keys(
        config(
            path,
            unit_documents=5,
            max_workers=2,
        ),
        model={"device": "cpu"},
        cluster=shares,
    )
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        done = driver.run_extract(run, build=build_with_gpu_0_broken)
    finally:
        ray.shutdown()
    assert done.ok == 200
    assert done.failed == 0
    # Both workers reported this, and it is noted once.
    assert ["NVML" in note for note in done.cost.notes] == [True]
    assert (
        "no longer used: 2 worker processes died because of it, the last one with: raypd"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("address", "variable", "running", "here"),
    [
        (None, "", None, True),
        ("local", None, "x:1", True),
        (None, None, "x:1", False),
        ("auto", None, "x:1", False),
        (None, "10.0.0.1:6379", None, False),
        ("ray://head:10001", None, None, False),
    ],
)
def test_only_a_run_that_starts_ray_uses_this_machine(
    monkeypatch, address, variable, running, here
) -> None:
    monkeypatch.setattr(ray_session.ray_private, "local_address", lambda: running)
    monkeypatch.setattr(ray_session, "_answers", lambda address: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert ray_session.runs_here(ClusterConfig(address=address)) is here
