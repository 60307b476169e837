"""An S3 error in each operation, against a real server: what the user sees; an outage is never
called damage.
"""

import contextlib
import errno
import io
import itertools
import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from rich.console import Console

from raypd import storage
from raypd.cli.summary import print_summary
from raypd.cluster import driver
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import RunConfig
from raypd.dataset.plan import stored
from raypd.dataset.planner import plan
from raypd.errors import ConfigError, InputError, RunError
from raypd.run import load, manifest
from raypd.run.unreadable import Unreadable
from raypd.storage.local import Local
from raypd.verify.verification import verify
from tests.cluster import fakes
from tests.fault_proxy import Faults, Proxy
from tests.runs import parquet, run_here, says

OBJECTS = 15  # three units of five
# What a user does with a run, some of it in a folder that holds a complete one.
OPERATIONS = {
    "plan": plan,
    "verify": lambda run: verify(run.output.path, run),
    "run": lambda run: driver.run_extract(run, build=fakes.build),
    "load": lambda run: load.load_record(
        run.output.path, [f"storage.options.endpoint_url={run.storage.requests.endpoint_url}"]
    ),
    "stored plan": lambda run: list(stored(run.output.path) or []),
}
PLANNING_ENDED = (
    r"/in/\d\d\.\w+: .*; planning stopped there.*; run the same command again to resume$"
)
NONE_READABLE = rf"(?s)forbidden: .*none of the {OBJECTS} objects can be read"


def line(id: str) -> bytes:
    return json.dumps({"id": id, "title": "t"}).encode()


@pytest.fixture
def corpus(proxy: Proxy, bucket: str, config):
    """Objects of one document each, ids 0, 1, 2, ..., half of them Parquet; makes configurations
    over them.
    """
    for i in range(OBJECTS):
        kind, data = (
            ("parquet", parquet({"id": [str(i)], "title": ["t"]}))
            if i % 2
            else ("jsonl", line(str(i)))
        )
        storage.put(f"{bucket}/in/{i:02d}.{kind}", data)

    def make(on_damaged: str = "skip", output: str = "out", read_timeout: int = 60) -> RunConfig:
        options = {"max_attempts": 2, "read_timeout": read_timeout}
        settings = {"options": {"endpoint_url": proxy.url, **options}}
        run = config(f"{bucket}/in", output, settings, on_damaged=on_damaged, unit_documents=5)
        storage.configure(run.storage)
        return run

    return make


def after(calls: int, text: str = "/in/"):
    """Says of a proxy's call whether so many on objects were before it; listings go on."""
    counter = itertools.count(1)
    return lambda method, path: text in path and "list-type" not in path and next(counter) > calls


@pytest.mark.parametrize(
    ("operation", "kind", "path", "calls", "error", "words"),
    [
        *(
            ("run", kind, "/in/", 10, RunError, PLANNING_ENDED)
            for kind in ("503", "500", "reset", "cut", "hang")
        ),
        (
            "plan",
            "503",
            "",
            None,
            RunError,
            r"overloaded.*planning stopped there.*run the same command again to resume",
        ),
        ("plan", "403", "/in/", 0, InputError, NONE_READABLE),
        ("run", "403", "/in/", 0, InputError, NONE_READABLE),
        (
            "run",
            "403",
            "/out",
            0,
            ConfigError,
            r"output.path: .*/out.*: forbidden: .*need s3:PutObject",
        ),
        ("run", "503", "/out", None, storage.Unavailable, "overloaded"),
        ("load", "503", "/out", None, storage.Unavailable, "overloaded"),
        ("stored plan", "503", "/000000.parquet", 0, storage.Unavailable, "overloaded"),
        ("verify", "503", "/out/units/", 0, RunError, "overloaded"),
        ("verify", "503", "/in/", 0, RunError, "overloaded"),
    ],
)
def test_what_the_user_sees(
    proxy, corpus, bucket, operation, kind, path, calls, error, words
) -> None:
    """calls: that go well before, of those on objects; None: none does, nor a listing."""
    on_damaged = "fail" if operation == "run" and kind in ("cut", "403") else "skip"
    run = corpus(on_damaged, f"{bucket}/out", read_timeout=1 if kind == "hang" else 60)
    if operation in ("load", "stored plan", "verify"):
        planned = plan(run, run.output.path)
        planned.keep(run.output.path)
        run_here(run, planned=planned)
    only = after(calls, path) if calls is not None else lambda method, place: path in place
    proxy.faults = Faults(
        share=1.0,
        kinds=(kind,),
        only=only,
    )
    with pytest.raises(error, match=words) as caught:
        OPERATIONS[operation](run)
    assert isinstance(caught.value, InputError) == (error is InputError)
    assert proxy.failed[kind]
    proxy.faults = Faults()
    units = plan(corpus(on_damaged))
    assert units.documents == OBJECTS
    assert units.totals.damaged == 0
    assert storage.exists(f"{run.output.path}/run.json") == (
        operation in ("load", "stored plan", "verify")
    )


def test_the_command_ends_with_one_line_and_exit_code_1(proxy, corpus, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(corpus().model_dump_json())
    proxy.faults = Faults(
        share=1.0,
        kinds=("503",),
        only=after(10),
    )
    command = [
        sys.executable,
        "-m",
        "raypd",
        "extract",
        str(tmp_path / "run.yaml"),
        "model=fake",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (1, ""), done
    # One line.
    assert re.fullmatch(
        r".*overloaded \(SlowDown\).*run the same command again to resume.*\n", done.stderr
    )


def test_new_objects_during_an_outage_are_planned_by_the_next_command(
    proxy, corpus, bucket
) -> None:
    run = corpus()
    plan(run).keep(run.output.path)
    before = plan(run, run.output.path)
    for i in range(5):
        storage.put(f"{bucket}/in/new{i}.jsonl", line(f"n{i}"))
    proxy.faults = Faults(
        share=1.0,
        kinds=("503",),
        only=after(2),
    )
    with pytest.raises(RunError, match="planning stopped there"):
        plan(run, run.output.path)
    proxy.faults = Faults()
    units = plan(run, run.output.path)
    assert units.documents == OBJECTS + 5
    assert units.totals.damaged == 0
    assert {u.id for u in before} <= {u.id for u in units}


def test_an_object_that_is_forbidden_is_left_out_and_listed(proxy, corpus, bucket) -> None:
    proxy.faults = Faults(
        share=1.0, kinds=("403",), only=lambda method, path: "/in/07" in path or "/in/08" in path
    )
    run = corpus(output=f"{bucket}/out")
    units = plan(run)
    assert units.documents == OBJECTS - 2
    assert [unit.name for unit in units.damaged()] == ["07.parquet", "08.jsonl"]
    assert all("forbidden: " in str(unit.damaged) for unit in units.damaged())
    console = Console(file=io.StringIO(), width=100)
    manifest = driver.finish(run, run.output.path, run_here(run, planned=units))
    storage.configure(run.storage)
    print_summary(manifest, console)
    words = (
        "left out: 2 units of the input that cannot be read",
        f"rows:     {bucket}/out/units/*.parquet",
    )
    says(console.file.getvalue(), *words)


def test_a_run_of_which_nothing_could_be_read_does_not_end_well(proxy, corpus) -> None:
    run = corpus("skip")
    unreadable = Unreadable()
    units = plan(run)
    for unit in units:
        unreadable.add(unit, f"{unit.parts[0].path}: cannot be read: gone")
    with pytest.raises(
        RunError,
        match=r"(?s)none of the 3 units of the input can be read:\n  s3://.*on_damaged",
    ):
        driver.finish(run, run.output.path, units, unreadable)


def test_a_worker_tries_again_what_an_outage_kept_from_it(
    proxy, corpus, bucket, monkeypatch
) -> None:
    run = corpus(output=f"{bucket}/out")
    unit = next(iter(plan(run)))
    manifest.claim(run, run.output.path)
    worker = DecodeWorker(WorkerSpec(run, run.output.path, "s", build=fakes.build))
    pauses = []
    monkeypatch.setattr(
        "raypd.cluster.worker.time", SimpleNamespace(**{**vars(time), "sleep": pauses.append})
    )
    with contextlib.closing(worker):
        for kind, where in (
            ("503", "/in/"),
            ("reset", "/in/"),
            ("503", "/out/units/"),
            ("reset", "/out/units/"),
        ):
            proxy.faults = Faults(
                share=1.0, kinds=(kind,), only=lambda method, path, where=where: where in path
            )
            result = worker.run(unit)
            assert (result.retry, result.unreadable, result.fatal, pauses) == (
                True,
                False,
                False,
                [2.0, 4.0],
            ), result
            pauses.clear()
        proxy.faults = Faults()
        assert worker.run(unit).ok == run.cluster.unit_documents


@pytest.fixture
def files(tmp_path, monkeypatch: pytest.MonkeyPatch, config):
    """Three files, one of which raises an error when it is read."""
    for name in "ac":
        (tmp_path / f"{name}.jsonl").write_text('{"id": "1", "title": "t"}\n')

    def make(name: str, error: OSError) -> RunConfig:
        (tmp_path / name).write_bytes(b"x" * 1000)
        real = Local.open_read
        broken = mock.Mock(side_effect=error)
        failing = type("Failing", (io.BytesIO,), {"read": broken, "peek": broken})

        def open_read(self, path, *arguments):
            if path.endswith(name):
                return failing(b"x" * 1000)
            return real(self, path, *arguments)

        monkeypatch.setattr(Local, "open_read", open_read)
        return config(str(tmp_path), on_damaged="skip")

    return make


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.jsonl.zst", "b.parquet"])
@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOSPC, errno.ETIMEDOUT]
)
def test_a_disk_or_mount_that_fails_is_not_damage_of_a_file(files, name, code) -> None:
    with pytest.raises(
        RunError,
        match=rf"{name}: the disk says no; planning stopped there.*same command again to resume",
    ):
        plan(files(name, OSError(code, "the disk says no")))


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.parquet"])
def test_a_file_that_may_not_be_read_is_listed(files, name) -> None:
    units = plan(files(name, PermissionError(errno.EACCES, "Permission denied")))
    assert [unit.name for unit in units.damaged()] == [name]
    assert units.documents == 2
