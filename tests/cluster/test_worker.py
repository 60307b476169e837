"""The decode worker in this process, with a fake engine: overlap of units, what an error costs, a
GPU that fails.
"""

from __future__ import annotations

import contextlib
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
from raypd.cluster import card, driver, pool_executor, ray_session
from raypd.cluster.in_flight import WorkerHandle
from raypd.cluster.ray_session import WorkerResources
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import ClusterConfig, RunConfig
from raypd.dataset import writer
from raypd.dataset.planner import plan
from raypd.decoding.counts import Finished, TokenCounts
from raypd.errors import ModelError, RunError
from raypd.models.load import resolve_device
from raypd.run import manifest, records, retry_policy
from raypd.run.retry_policy import Attempt, AttemptRecord, UnitLog, attempts_path
from raypd.run.unit import Unit
from raypd.tasks.base import Record
from tests.cluster import fakes
from tests.processes import LONG, wait_for
from tests.runs import with_keys, write_jsonl

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def worker(run, **keys) -> DecodeWorker:
    manifest.claim(run, run.output.path)
    return DecodeWorker(WorkerSpec(run, run.output.path, "s", **{"build": fakes.build, **keys}))


@pytest.fixture
def begin(tmp_path: Path, config):
    """(configuration over documents with these titles, a worker of it, its units)"""

    def make(
        titles: Sequence[str], unit_documents: int = 100, **keys
    ) -> tuple[RunConfig, DecodeWorker, list[Unit]]:
        run = config(
            str(write_jsonl(tmp_path / "a.jsonl", titles)), unit_documents=unit_documents, **keys
        )
        return run, worker(run), list(plan(run))

    return make


def rows(run, unit) -> list[dict]:
    return writer.read_rows(run.output.path, unit.id, 1000)


def test_units_overlap_so_that_the_engine_does_not_drain(begin) -> None:
    run, made, units = begin(["a"] * 400, unit_documents=50, max_num_seqs=4)
    request_queue = made.request_queue
    step = made.parts.engine.step

    def planned() -> bool:
        """Whether the units have planned what they may: a batch, or all that there is."""
        states = list(request_queue._units.values())
        all_begun = request_queue._unit_count == len(units) and not any(
            own.has_more or own.begun is None for own in states
        )
        return len(request_queue._queue) >= request_queue.capacity or all_begun

    def patient() -> list[Finished]:
        wait_for(planned)  # however slow the machine is, the engine is slower
        return step()

    made.parts.engine.step = patient  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as in_flight:
        list(in_flight.map(made.run_unit, units))
    assert writer.committed(run.output.path) == {u.id for u in units}
    fill = made.parts.engine.fill
    # 200 works in batches of 4: every step but the first and the last two is full, across the
    # borders of units too.
    assert sum(fill) == 200
    assert sum(n < 4 for n in fill) <= 3, fill
    counts = writer.read_summary(run.output.path, units[0].id).counts
    assert counts == {"prefill_tokens": 250, "shared_tokens": 100, "decode_tokens": 75, "steps": 50}


def test_work_is_planned_as_the_engine_has_room(begin) -> None:
    _, made, (unit,) = begin(["a"] * 200, unit_documents=200, max_num_seqs=4)
    ahead = []

    class Task(fakes.FakeTask):
        def plan(self, documents):
            for item in super().plan(documents):
                ahead.append(len(made.request_queue._queue) + made.request_queue._in_engine)
                yield item

    made.parts.task = Task()
    made.run_unit(unit)
    assert (len(ahead), max(ahead) <= 2 * 4) == (100, True)


def test_an_error_costs_the_documents_of_its_work_alone(begin) -> None:
    titles = ["a", "b", "program", "c", "finish", "d", "submit", "e", "f", "plan", "g", "", "h"]
    run, made, (unit,) = begin(titles)
    submit = made.parts.engine.submit

    def refuse(program, **keys) -> None:
        submit(["submit"] if "submit" in program else program, **keys)

    made.parts.engine.submit = refuse  # type: ignore[method-assign]
    summary = made.run_unit(unit)
    found = rows(run, unit)
    places = {place: row for row, place in enumerate(sorted({r["row"] for r in found}))}
    status = {places[r["row"]]: (r["error"] or r["category"]) for r in found}
    assert (len(status), status[0]) == (len(titles), "A")
    assert status[2] == status[3] == "ValueError: the program failed"
    assert status[4] == status[5] == "ValueError: the answer cannot be read"
    assert status[6] == status[7] == "ValueError: the engine does not take it"
    assert status[9] == "ValueError: the plan failed"
    assert (status[8], status[10]) == ("F", "G")  # planned again one by one
    assert re.fullmatch(r"a.jsonl, byte \d+: no text in title", status[11])
    assert (summary.documents, summary.ok, summary.failed) == (13, 5, 8)


def test_documents_that_were_cut_are_counted(begin, monkeypatch) -> None:

    def cut(row, values):
        return Record(row, {**values, "truncated": "LONG" in str(values)})

    monkeypatch.setattr(fakes, "Record", cut)
    run, made, (unit,) = begin(["a", "long", "a", "twice long", "long"])
    assert made.run_unit(unit).truncated == 3
    units = writer.summaries(run.output.path)
    assert manifest.make(run, run.output.path, 1, units, manifest.Unreadable(), None).truncated == 3


def test_a_committed_unit_is_not_decoded_again(begin) -> None:
    run, made, (unit,) = begin(["a", "b"])
    first = made.run_unit(unit)
    again = worker(run)
    assert (again.run_unit(unit), again.parts.engine.fill) == (first, [])


def test_a_broken_engine_breaks_the_units_that_it_holds(begin) -> None:
    _, made, (unit,) = begin(["engine"])
    for _ in range(2):  # and the next one at once
        with pytest.raises(EngineBroken, match="the device is gone"):
            made.run_unit(unit)


def test_what_a_dying_worker_leaves_holds_no_secret(begin, monkeypatch, capsys) -> None:
    run, made, (unit,) = begin(["a"])
    broken = EngineBroken("GET https://me:Pa55word@hub.example/m?token=t0ken failed")
    monkeypatch.setattr(made, "run_unit", mock.Mock(side_effect=broken))
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit):
        made.run(unit)
    left = Path(retry_policy.failure_path(run.output.path, unit.id)).read_text()
    assert left == "GET https://(hidden)@hub.example/m?token=(hidden) failed"
    assert left in capsys.readouterr().err


def test_a_bisecting_attempt_leaves_a_checkpoint_before_each_group(begin) -> None:
    run, made, (unit,) = begin(["a"] * 40)
    marks = []
    step = made.parts.engine.step

    def look():
        marks.append(records.read(AttemptRecord, attempts_path(run.output.path, unit.id)).group)
        return step()

    made.parts.engine.step = look  # type: ignore[method-assign]
    made.run_unit(unit, Attempt(number=4, deaths=3, suspects=(7, 8), quarantined={5: 3}))
    assert list(dict.fromkeys(marks)) == [
        (7,),
        (8,),
        tuple(r for r in range(40) if r not in (5, 7, 8)),
    ]
    found = rows(run, unit)
    assert [r["id"] for r in found if r["error"]] == ["5"]
    assert found[5]["error"] == "killed its worker process 3 times"
    assert {r["attempts"] for r in found} == {4}


def test_a_unit_whose_worker_died_is_alone_in_a_worker(tmp_path: Path, begin) -> None:
    run, made, (first, bad, later) = begin(["until go", *["a"] * 29], unit_documents=10)
    UnitLog(run.output.path, "s", made.node, "it died", lambda node: True).begin(bad.id, Attempt())
    with ThreadPoolExecutor(3) as pool:
        begun = pool.submit(made.run, first)
        wait_for((tmp_path / "out/waiting-go").exists)
        alone = pool.submit(made.run, bad)
        wait_for(made._entry.locked)
        behind = pool.submit(made.run, later)
        assert made.progress().keys() == {first.id}
        (tmp_path / "out/go").touch()
        assert [own.result(LONG).ok for own in (begun, alone, behind)] == [10, 10, 10]
    attempts = {
        unit.id: {row["attempts"] for row in rows(run, unit)} for unit in (first, bad, later)
    }
    assert attempts == {first.id: {1}, bad.id: {2}, later.id: {1}}
    summaries = [writer.read_summary(run.output.path, unit.id) for unit in (first, bad, later)]
    assert [summary.unit for summary in sorted(summaries, key=lambda own: own.committed_at)][
        :2
    ] == [first.id, bad.id]
    assert list((tmp_path / "out/failures").iterdir()) == []


def test_a_unit_that_costs_process_after_process_is_given_up_and_may_be_tried_anew(begin) -> None:
    run, made, (unit,) = begin(["a"] * 10)
    UnitLog(run.output.path, "s", made.node, "it died", lambda node: True).begin(
        unit.id, Attempt(30, deaths=29)
    )
    assert made.run(unit).error == "its worker processes died each time: none of them left a reason"
    assert made.run(unit).ok == 10


def test_a_unit_is_handed_back_when_it_is_wanted_back(tmp_path: Path, begin) -> None:
    titles = [*["a"] * 8, "until go", *["a"] * 191]  # the engine stands still after its first step
    run, made, (first, second) = begin(titles)
    with ThreadPoolExecutor(2) as pool:
        begun = pool.submit(made.run, first)
        wait_for(lambda: made.progress().get(first.id, (0, 0))[0])
        behind = pool.submit(made.run, second)
        wait_for(lambda: second.id in made.progress())
        made.cancel(first.id, True)  # it was begun: it stays
        made.cancel(second.id, True)
        assert behind.result(LONG).handed_back
        assert not begun.done()
        made.cancel(first.id, False)
        assert begun.result(LONG).handed_back
    assert writer.committed(run.output.path) == set()
    assert made.meter.report().open == made.meter.report().categories == {}
    (tmp_path / "out/go").touch()
    assert made.run(second).ok == 100  # and what is left of them in the engine spoils nothing
    bill = made.meter.report()  # which has it, too
    counts = [*bill.categories.values(), *bill.lost_categories.values()]
    assert sum(count["decode_tokens"] for count in counts) == 3 * sum(made.parts.engine.fill)


def test_a_document_is_answered_when_no_request_of_it_is_left() -> None:
    state = UnitState(
        1,
        "u",
        documents=2,
        begun=0.0,
        records=[Record(0), Record(1)],
        open_requests=Counter({1: 1}),
    )
    assert (state.answered, state.progress().answered) == ({0}, 1)


@pytest.mark.parametrize(("decoded", "batch"), [(8, 64), (100, 200), (300, 256)])
def test_an_engine_that_decodes_many_is_given_more(begin, decoded: int, batch: int) -> None:
    _, made, (unit,) = begin(["a"] * 1200, unit_documents=1200, max_num_seqs="auto")
    engine = made.parts.engine
    given = []
    engine.batch, engine.sequences = 7, [Finished("", None, None, TokenCounts())] * decoded
    step = engine.step

    def noted() -> list[Finished]:
        given.append(engine.pending)
        return step()

    engine.step = noted  # type: ignore[method-assign]
    made.run_unit(unit)
    assert max(given) <= made.request_queue.capacity == batch


def test_a_worker_that_was_given_a_gpu_and_sees_none_decodes_nothing(tmp_path, begin, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run, _, (unit,) = begin(["a"])
    made = worker(run, gpus=1.0)
    result = made.run(unit)
    assert (result.fatal, made.loaded) == (True, False)
    assert "was given a GPU, and torch" in (result.error or "")
    asked_for_it = with_keys(run, model={"device": "cpu"}, output={"path": str(tmp_path / "cpu")})
    for said, read in (
        ("max_split_size_mb:64", "max_split_size_mb:64"),
        (None, "expandable_segments:True"),
    ):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", said or "")
        if said is None:
            monkeypatch.delenv("PYTORCH_ALLOC_CONF")
        assert worker(asked_for_it, gpus=1.0).loaded
        assert os.environ["PYTORCH_ALLOC_CONF"] == read


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
def test_whose_fault_an_error_is(text: str, cuda: bool, fault: bool) -> None:
    assert (card.is_cuda_error(text), card.is_fault(text)) == (cuda, fault)


def failing(text: str, loading: bool):
    """A worker's parts whose engine, or whose load, raises."""

    def build(config, threads):
        if loading:
            raise ModelError("its weights cannot be loaded") from RuntimeError(text)
        parts = fakes.build(config, threads)
        parts.engine.step = lambda: (_ for _ in ()).throw(RuntimeError(text))
        return parts

    return build


@pytest.fixture
def run(tmp_path: Path, config) -> RunConfig:
    """Of one document, begun."""
    made = with_keys(config(str(write_jsonl(tmp_path / "a.jsonl", ["a"]))), model={"device": "cpu"})
    manifest.claim(made, made.output.path)
    return made


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
def test_two_deaths_leave_a_card_out_and_blame_no_document(
    run, monkeypatch, text, loading, lost, blamed
) -> None:
    (unit,) = plan(run)
    dead = []
    deaths = []
    ends = []
    end = UnitLog.end
    monkeypatch.setattr("os._exit", lambda code: dead.append(code) or sys.exit(code))
    monkeypatch.setattr(UnitLog, "end", lambda *arguments: None if dead else end(*arguments))
    monkeypatch.setattr("raypd.billing.energy.CardWatch.is_lost", lambda self: lost)
    for shown in ("3", "3", "3", "4"):
        dead.clear()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        spec = WorkerSpec(run, run.output.path, "s", build=failing(text, loading), gpus=1.0)
        ends.append("died")
        with contextlib.suppress(SystemExit):
            worker = DecodeWorker(spec)
            deaths.append(worker.log.next(unit.id)[0].deaths)
            if (why := worker.hello()[1]) is not None:
                ends[-1] = why
            else:
                worker.run(unit)
    assert sum(deaths) == (0 if blamed else 1 + 2 + 3)
    left_out = "GPU 3 of node  is left out, 2 worker processes died "
    assert [why.partition("of it: ")[0] for why in ends] == [
        "died",
        "died",
        left_out if blamed else "died",
        "died",
    ]


@pytest.mark.parametrize(
    ("first", "lost", "ends"),
    [
        (ECC, False, ["died", "died", "left out"]),
        (None, True, ["died", "died", "left out"]),
        (None, False, ["sees no"] * 3),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_card_that_its_next_process_does_not_see_is_left_out(
    run, monkeypatch, device, first, lost, ends
) -> None:
    """Only where nobody ever saw it is the driver to blame, which ends the run."""
    (unit,) = plan(run)
    unseen = with_keys(run, model={"name": "a/model", "device": device})

    def build(config, threads):
        return resolve_device(config.model.device)

    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("raypd.billing.energy.CardWatch.is_lost", lambda self: lost)
    seen = []
    for number in range(3):
        config, parts = (run, failing(first, True)) if first and number == 0 else (unseen, build)
        try:
            worker = DecodeWorker(WorkerSpec(config, run.output.path, "s", build=parts, gpus=1.0))
        except SystemExit:
            seen.append("died")
        else:
            error = worker.run(unit).error or ""
            assert (worker.hello()[1] is not None) == ("is left out" in error)
            seen.append(next(iter(re.findall("left out|sees no", error)), error))
    assert seen == ends


def test_too_little_memory_is_no_fault_of_a_card(run) -> None:
    build = failing("CUDA out of memory. Tried to allocate 2 GiB", True)
    worker = DecodeWorker(WorkerSpec(run, run.output.path, "s", build=build, gpus=1.0))
    assert worker.run(next(iter(plan(run)))).error == "its weights cannot be loaded"


@pytest.mark.parametrize(("workers", "gpus", "most"), [(8, 8, 7), (1, 8, 1), (1, 1, None)])
def test_a_run_goes_on_with_the_cards_that_are_left(
    monkeypatch, workers: int, gpus: int, most: int | None
) -> None:
    said: list[str] = []
    executor = pool_executor.PoolExecutor(
        None,
        WorkerResources(1, 1.0, 1),
        ClusterConfig(max_workers=workers),
        said.append,  # type: ignore[arg-type]
    )
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(gpus)})
    bad = WorkerHandle(SimpleNamespace())
    executor.workers.append(bad)
    if most is None:
        with pytest.raises(RunError, match="no GPU is left: GPU 3 is broken"):
            executor._leave_out(bad, "GPU 3 is broken")
    else:
        executor._leave_out(bad, "GPU 3 is broken")
        assert executor._most == most
    assert (said, executor.workers, executor._left_out) == (["GPU 3 is broken"], [], [bad])


def build_of_two_cards(config, threads):
    """GPU 0 is broken."""
    return (failing(ECC, True) if os.environ["CUDA_VISIBLE_DEVICES"] == "0" else fakes.build)(
        config, threads
    )


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["pool", "ray_data"])
def test_a_broken_card_of_two_costs_no_document(
    tmp_path: Path, config, capfd, executor: str
) -> None:
    # Longer than two starts of a worker.
    path = str(write_jsonl(tmp_path / "a.jsonl", ["sleep 0.2"] * 200))
    shares = {"gpus_per_worker": 1, "cpus_per_worker": 0.5, "executor": executor}
    run = with_keys(
        config(path, unit_documents=5, max_workers=2), model={"device": "cpu"}, cluster=shares
    )
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        done = driver.run_extract(run, build=build_of_two_cards)
    finally:
        ray.shutdown()
    assert (done.ok, done.failed) == (200, 0)
    assert ["NVML" in note for note in done.cost.notes] == [True]  # said once, of two workers
    assert "is left out, 2 worker processes died of it: raypd" in capfd.readouterr().err


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
def test_a_head_may_lack_what_its_workers_have(
    monkeypatch, address, variable, running, here
) -> None:
    monkeypatch.setattr(ray_session.ray_private, "local_address", lambda: running)
    monkeypatch.setattr(ray_session, "_answers", lambda address: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert ray_session.runs_here(ClusterConfig(address=address)) is here
