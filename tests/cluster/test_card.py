"""A GPU that fails: whose death it is, and what becomes of the run. The errors are those that torch raises."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from raypd.cluster import card, driver, pool_executor, ray_session
from raypd.cluster.in_flight import WorkerHandle
from raypd.cluster.ray_session import WorkerResources
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import ClusterConfig, RunConfig
from raypd.dataset.planner import plan
from raypd.errors import ModelError, RunError
from raypd.models.load import resolve_device
from raypd.run import manifest
from raypd.run.retry_policy import UnitLog
from tests.cluster import fakes
from tests.runs import with_keys, write_jsonl

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(("text", "cuda", "fault"), [
    (ECC, True, True), (ILLEGAL, True, False), ("CUDA error: device-side assert triggered", True, False),
    ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True, True),
    ("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx", True, False),
    ("ValueError: unknown error", False, False),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False, False),
    ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", False, False)])  # fmt: skip
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


@pytest.mark.parametrize(("text", "loading", "lost", "blamed"), [
    (ECC, False, False, True), (ECC, True, False, True), (ILLEGAL, True, False, True), (ILLEGAL, False, True, True),
    (ILLEGAL, False, False, False)])  # fmt: skip
def test_two_deaths_of_a_card_leave_it_out_and_blame_no_document(
    run, monkeypatch, text: str, loading: bool, lost: bool, blamed: bool
) -> None:
    (unit,) = plan(run)
    dead, deaths, ends, end = [], [], [], UnitLog.end
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
    assert [why.partition("of it: ")[0] for why in ends] == ["died", "died", left_out if blamed else "died", "died"]


@pytest.mark.parametrize(("first", "lost", "ends"), [
    (ECC, False, ["died", "died", "left out"]), (None, True, ["died", "died", "left out"]),
    (None, False, ["sees no"] * 3)])  # fmt: skip
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_card_that_its_next_process_does_not_see_is_left_out(run, monkeypatch, device, first, lost, ends) -> None:
    """Only where nobody ever saw it is the driver to blame, which ends the run."""
    (unit,) = plan(run)
    unseen = with_keys(run, model={"name": "a/model", "device": device})
    build = lambda config, threads: resolve_device(config.model.device)  # noqa: E731
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
def test_a_run_goes_on_with_the_cards_that_are_left(monkeypatch, workers: int, gpus: int, most: int | None) -> None:
    said: list[str] = []
    executor = pool_executor.PoolExecutor(
        None, WorkerResources(1, 1.0, 1), ClusterConfig(max_workers=workers), said.append  # type: ignore[arg-type]
    )  # fmt: skip
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
    return (failing(ECC, True) if os.environ["CUDA_VISIBLE_DEVICES"] == "0" else fakes.build)(config, threads)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["pool", "ray_data"])
def test_a_broken_card_of_two_costs_no_document(tmp_path: Path, config, capfd, executor: str) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", ["sleep 0.05"] * 200))
    shares = {"gpus_per_worker": 1, "cpus_per_worker": 0.5, "executor": executor}
    run = with_keys(config(path, unit_documents=5, max_workers=2), model={"device": "cpu"}, cluster=shares)
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        done = driver.run_extract(run, build=build_of_two_cards)
    finally:
        ray.shutdown()
    assert (done.ok, done.failed) == (200, 0)
    assert ["NVML" in note for note in done.cost.notes] == [True]  # said once, of two workers
    assert "is left out, 2 worker processes died of it: raypd" in capfd.readouterr().err


@pytest.mark.parametrize(("address", "variable", "running", "here"), [
    (None, None, None, True), ("local", None, "x:1", True), (None, None, "x:1", False), ("auto", None, "x:1", False),
    (None, "10.0.0.1:6379", None, False), ("ray://head:10001", None, None, False)])  # fmt: skip
def test_a_head_may_lack_what_its_workers_have(monkeypatch, address, variable, running, here) -> None:
    monkeypatch.setattr(ray_session.ray_private, "local_address", lambda: running)
    monkeypatch.setattr(ray_session, "_answers", lambda address: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert ray_session.runs_here(ClusterConfig(address=address)) is here
