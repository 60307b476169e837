"""A store that gives way is not taken for damage: nothing is left out for it, whatever input.on_damaged says."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from raypd import storage
from raypd.cluster import driver
from raypd.cluster.summary import print_summary
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.dataset.planner import plan
from raypd.errors import ConfigError, InputError, RunError
from raypd.run import load, manifest
from raypd.run.retry_policy import Attempt
from raypd.verify.verification import verify
from tests.cluster import fakes
from tests.fault_proxy import Faults, Proxy
from tests.runs import parquet

OBJECTS = 15  # three units of five
ERRNOS = ("EIO", "ESTALE", "EMFILE", "ENOSPC", "ETIMEDOUT")


@pytest.fixture
def corpus(proxy: Proxy, bucket: str, config) -> Callable[..., RunConfig]:
    """Objects of one document each, ids 0, 1, 2, ..., half of them Parquet; makes configurations over them."""
    for i in range(OBJECTS):
        if i % 2:
            storage.put(f"{bucket}/in/{i:02d}.parquet", parquet({"id": [str(i)], "title": ["t"]}))
        else:
            storage.put(f"{bucket}/in/{i:02d}.jsonl", json.dumps({"id": str(i), "title": "t"}).encode())

    def make(on_damaged: str = "skip", output: str = "out", read_timeout: int = 60) -> RunConfig:
        settings = {"endpoint_url": proxy.url, "max_attempts": 2, "read_timeout": read_timeout}
        made = config(f"{bucket}/in", output, settings, on_damaged=on_damaged, unit_documents=5)
        storage.configure(made.storage)
        return made

    return make


def after(calls: int, text: str = "/in/") -> Callable[[str, str], bool]:
    """Says of a proxy's call whether so many on objects were before it; listings go on."""
    lock, seen = threading.Lock(), 0

    def may_fail(method: str, path: str) -> bool:
        nonlocal seen
        if text not in path or "list-type" in path:
            return False
        with lock:
            seen += 1
            return seen > calls

    return may_fail


@pytest.mark.parametrize(
    ("kind", "on_damaged"), [*((kind, "skip") for kind in ("503", "500", "reset", "cut", "hang")), ("cut", "fail")]
)
def test_a_store_that_stops_answering_ends_planning_and_nothing_is_called_damaged(
    proxy, corpus, kind, on_damaged
) -> None:
    run = corpus(on_damaged, read_timeout=1 if kind == "hang" else 60)
    proxy.faults = Faults(share=1.0, kinds=(kind,), only=after(10))
    said = r"/in/\d\d\.\w+: .*; planning ended there.*; the same command resumes$"
    with pytest.raises(RunError, match=said) as caught:
        driver.run_extract(run, build=fakes.build)
    assert not isinstance(caught.value, InputError)
    assert "\n" not in str(caught.value)
    assert proxy.failed[kind]
    assert not Path(run.output.path).exists()
    proxy.faults = Faults()
    made = plan(corpus(on_damaged))
    assert (made.documents, made.totals.damaged) == (OBJECTS, 0)


def test_a_listing_that_is_refused_for_overload_is_no_fault_of_the_input(proxy, corpus) -> None:
    run = corpus()
    proxy.faults = Faults(share=1.0, kinds=("503",))
    with pytest.raises(RunError, match=r"overloaded.*planning ended there.*the same command resumes"):
        plan(run)


def test_the_command_ends_with_one_line_and_exit_code_1(proxy, corpus, tmp_path) -> None:
    run = corpus()
    (tmp_path / "run.yaml").write_text(run.model_dump_json())
    proxy.faults = Faults(share=1.0, kinds=("503",), only=after(10))
    command = [sys.executable, "-m", "raypd", "extract", str(tmp_path / "run.yaml"), "model=fake"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "overloaded (SlowDown)" in done.stderr
    assert "the same command resumes" in done.stderr


def test_new_objects_during_an_outage_are_planned_by_the_next_command(proxy, corpus, bucket) -> None:
    run = corpus()
    plan(run).keep(run.output.path)
    before = plan(run, run.output.path)
    for i in range(5):
        storage.put(f"{bucket}/in/new{i}.jsonl", b'{"id": "n%d", "title": "t"}' % i)
    proxy.faults = Faults(share=1.0, kinds=("503",), only=after(2))
    with pytest.raises(RunError, match="planning ended there"):
        plan(run, run.output.path)
    proxy.faults = Faults()
    made = plan(run, run.output.path)
    assert (made.documents, made.totals.damaged) == (OBJECTS + 5, 0)
    assert {u.id for u in before} <= {u.id for u in made}


# ------------------------------------------------------------------------------------------------------------ refusals


def test_an_object_that_is_forbidden_is_left_out_and_listed(proxy, corpus) -> None:
    proxy.faults = Faults(share=1.0, kinds=("403",), only=lambda method, path: "/in/07" in path or "/in/08" in path)
    made = plan(corpus())
    assert made.documents == OBJECTS - 2
    assert [unit.name for unit in made.damaged()] == ["07.parquet", "08.jsonl"]
    assert all("forbidden: " in str(unit.damaged) for unit in made.damaged())


@pytest.mark.parametrize("on_damaged", ["skip", "fail"])
def test_a_bucket_whose_every_object_is_forbidden_is_refused(proxy, corpus, on_damaged) -> None:
    proxy.faults = Faults(share=1.0, kinds=("403",), only=after(0))
    with pytest.raises(InputError, match=rf"(?s)forbidden: .*none of the {OBJECTS} objects can be read"):
        driver.run_extract(corpus(on_damaged), build=fakes.build)


def test_a_run_of_which_nothing_could_be_read_does_not_end_well(proxy, corpus) -> None:
    run = corpus("skip")
    made = plan(run)
    unreadable = manifest.Unreadable()
    for unit in made:
        unreadable.add(unit, f"{unit.path}: cannot be read: gone")
    with pytest.raises(RunError, match=r"(?s)nothing could be read of the input, 3 units of it:\n  s3://.*on_damaged"):
        driver.finish(run, run.output.path, made, unreadable)


def test_an_output_that_is_forbidden_is_refused_before_anything_starts(proxy, corpus, bucket) -> None:
    run = corpus(output=f"{bucket}/out")
    proxy.faults = Faults(
        share=1.0, kinds=("403",), only=lambda method, path: "/out" in path and "list-type" not in path
    )
    with pytest.raises(ConfigError, match=rf"output.path: {bucket}/out.*: forbidden: .*need s3:PutObject"):
        driver.run_extract(run, build=fakes.build)
    proxy.faults = Faults(share=1.0, kinds=("503",), only=lambda method, path: "/out" in path)
    with pytest.raises(storage.Unavailable, match="overloaded"):
        driver.run_extract(run, build=fakes.build)
    with pytest.raises(storage.Unavailable, match="overloaded"):
        load.load_record(run.output.path, [f"storage.endpoint_url={proxy.url}", "storage.max_attempts=2"])


def test_the_summary_says_what_was_left_out_and_where_the_rows_are(proxy, corpus, bucket) -> None:
    proxy.faults = Faults(share=1.0, kinds=("403",), only=lambda method, path: "/in/08" in path)
    run = corpus(output=f"{bucket}/out")
    made = plan(run)
    manifest.claim(run, run.output.path)
    worker = DecodeWorker(WorkerSpec(run, run.output.path, "s", build=fakes.build))
    worker.run_unit(next(iter(made)))
    worker.close()
    said = io.StringIO()
    print_summary(driver.finish(run, run.output.path, made), Console(file=said, width=100))
    assert "left out: 1 unit of the input that cannot be read" in said.getvalue()
    assert f"rows:     {bucket}/out/units/*.parquet" in said.getvalue()


# ----------------------------------------------------------------------------------------------------------- in a run


def test_a_worker_tries_again_what_an_outage_kept_from_it(proxy, corpus, bucket) -> None:
    run = corpus(output=f"{bucket}/out")
    unit = next(iter(plan(run)))
    manifest.claim(run, run.output.path)
    worker = DecodeWorker(WorkerSpec(run, run.output.path, "s", build=fakes.build))
    try:
        for kind, where in (("503", "/in/"), ("reset", "/in/"), ("503", "/out/units/"), ("reset", "/out/units/")):
            proxy.faults = Faults(share=1.0, kinds=(kind,), only=lambda method, path, where=where: where in path)
            said = worker.run(Attempt(unit))
            assert (said.retry, said.unreadable, said.fatal) == (True, False, False), said
        proxy.faults = Faults()
        assert worker.run(Attempt(unit)).ok == run.cluster.unit_documents
    finally:
        worker.close()


def test_verify_does_not_call_damaged_what_it_cannot_reach(proxy, corpus, bucket) -> None:
    run = corpus(output=f"{bucket}/out")
    manifest.claim(run, run.output.path)
    worker = DecodeWorker(WorkerSpec(run, run.output.path, "s", build=fakes.build))
    for unit in plan(run):
        worker.run_unit(unit)
    worker.close()
    assert verify(run.output.path, run).well
    for text in ("/out/units/", "/in/"):
        proxy.faults = Faults(share=1.0, kinds=("503",), only=after(0 if text == "/out/units/" else OBJECTS, text))
        with pytest.raises(RunError, match="overloaded"):
            verify(run.output.path, run)
        proxy.faults = Faults()
    storage.put(next(writer.objects(run.output.path))[1], b"PAR1")
    assert verify(run.output.path, run).damaged.units == 1


def test_a_stored_plan_that_is_out_of_reach_is_not_to_be_deleted(proxy, corpus, bucket) -> None:
    run = corpus(output=f"{bucket}/out")
    plan(run).keep(run.output.path)
    stored = plan(run, run.output.path)
    proxy.faults = Faults(share=1.0, kinds=("503",), only=after(0, "/out/plan/"))
    with pytest.raises(storage.Unavailable, match="overloaded"):
        list(stored)


# -------------------------------------------------------------------------------------------------------- local files


class Failing(io.BytesIO):
    """A file that opens, and fails when it is read."""

    def __init__(self, error: OSError) -> None:
        super().__init__(b"x" * 1000)
        self._error = error

    def read(self, size: int | None = -1) -> bytes:
        raise self._error


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config) -> Callable[[str, OSError], RunConfig]:
    """Three files, one of which raises an error when it is read."""
    for name in "ac":
        (tmp_path / f"{name}.jsonl").write_text('{"id": "1", "title": "t"}\n')

    def make(name: str, error: OSError) -> RunConfig:
        (tmp_path / name).write_bytes(b"x" * 1000)
        real = {"open_read": storage.open_read, "open_file": storage.open_file}

        def opened(which: str) -> Callable[..., Any]:
            def open_it(path: str, *rest: Any, **keys: Any) -> Any:
                if not path.endswith(name):
                    return real[which](path, *rest, **keys)
                failing = Failing(error)
                return pa.PythonFile(failing, mode="r") if which == "open_file" else failing

            return open_it

        for which in real:
            monkeypatch.setattr(storage, which, opened(which))
        return config(str(tmp_path), on_damaged="skip")

    return make


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.jsonl.zst", "b.parquet"])
@pytest.mark.parametrize("code", ERRNOS)
def test_a_disk_or_mount_that_fails_is_not_damage_of_a_file(files, name, code) -> None:
    error = OSError(getattr(errno, code), "the disk says no")
    with pytest.raises(RunError, match=rf"{name}: the disk says no; planning ended there.*the same command resumes"):
        plan(files(name, error))


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.parquet"])
def test_a_file_that_may_not_be_read_is_listed(files, name) -> None:
    made = plan(files(name, PermissionError(errno.EACCES, "Permission denied")))
    assert [unit.name for unit in made.damaged()] == [name]
    assert made.documents == 2
