"""Faults on one machine: processes that die, documents that kill, memory and disk that end, clocks,
two starts.
"""

import os
import re
import shutil
import signal
import socket
from pathlib import Path

from raypd.report.status import Watch
from tests.faults.apart import apart, mount
from tests.faults.trial import Outcome, Trial, gated, kill
from tests.processes import ended, start, wait_for
from tests.tiny import save_tiny


def worker_killed(folder: Path) -> Outcome:
    """kill -9 of a decode worker"""
    trial = Trial(folder, gated(3, "killed", 20))
    run = trial.start()
    wait_for((Path(trial.output) / "waiting-killed").exists)  # the fourth unit is in the engine
    os.kill(trial.worker(), signal.SIGKILL)
    trial.go("killed")
    assert "A worker process died; its units will be retried." in ended(run)
    assert {row["attempts"] for row in trial.rows()} == {1, 2}
    return trial.outcome("killed after 3 of 20 units", "its units were tried again elsewhere")


def driver_killed(folder: Path) -> Outcome:
    """kill -9 of the driver"""
    trial = Trial(folder, gated(4, "again", 20))
    run = trial.start()
    trial.wait(4)
    kill(run)
    trial.go("again")
    assert "was killed; taking over its lease" in trial.finish()
    return trial.outcome("killed after 4 of 20 units, the same command again", "resumed")


def _deadly(folder: Path, title: str, rows: set[int], error: str) -> Trial:
    """A run over 100 documents, of which some kill their process; these are error rows."""
    trial = Trial(folder, [title if row in rows else "a" for row in range(100)], unit_documents=50)
    printed = trial.finish()
    assert {row["id"]: row["error"] for row in trial.rows() if row["error"]} == {
        str(row): error for row in rows
    }
    assert printed.count("A worker process died; its units will be retried.") == 3 * len(rows)
    return trial


def poison(folder: Path) -> Outcome:
    """a document that kills its process every time"""
    trial = _deadly(folder, "kill", {41}, "killed its worker process 3 times")
    return trial.outcome(
        "SIGKILL whenever it is decoded", "quarantined: an error row; 3 workers lost"
    )


def broken_engine(folder: Path) -> Outcome:
    """a document that breaks the engine every time"""
    trial = _deadly(
        folder,
        "engine",
        {0, 77},
        "killed its worker process 3 times: RuntimeError: the device is gone",
    )
    return trial.outcome(
        "two documents, an exception out of a step", "2 error rows with the reason"
    )


def out_of_memory(folder: Path) -> Outcome:
    """out of memory in a step (torch.OutOfMemoryError)"""
    model = save_tiny(folder / "model")
    titles = [f"listing number {i} with a text of its own" for i in range(40)]
    decoding = {"max_value_tokens": 8}
    made = {"name": str(model), "device": "cpu", "dtype": "float32"}
    for part in ("roomy", "tight"):
        (folder / part).mkdir()
    roomy = Trial(
        folder / "roomy",
        titles,
        20,
        model=made,
        decoding=decoding,
    )
    tight = Trial(
        folder / "tight",
        titles,
        20,
        model=made,
        decoding=decoding,
    )
    roomy.finish("raypd.answering.components:build")
    tight.finish("tests.faults.run:little_memory")
    failed = [
        int(n)
        for mark in Path(tight.output).glob("out-of-memory-*")
        for n in mark.read_text().split()
    ]
    assert failed
    assert min(failed) > 100
    answers = [{row["id"]: row["record"] for row in trial.rows()} for trial in (roomy, tight)]
    assert answers[0] == answers[1]
    return tight.outcome(
        f"raised in {len(failed)} steps of a real engine", "smaller steps, the same answers"
    )


def disk_full(folder: Path) -> Outcome:
    """disk full on the commit"""
    printed = apart(_disk_full, folder)
    assert "No space left on device" in printed, printed
    trial = Trial(folder, ["a"] * 300)
    return trial.outcome("1 MB file system; room made, the same command again", "said so, resumed")


def _disk_full(folder: Path) -> str:
    """A run on a file system of 1 MB, and again once it has room; its output goes to where the
    outside can see it.
    """
    inner = folder / "disk"
    inner.mkdir()
    mount(str(inner), "size=1m")
    trial = Trial(inner, ["a"] * 300)
    (inner / "ballast").write_bytes(b"x" * 920_000)
    printed = ended(trial.start(), 1)
    assert trial.committed() < 30
    state = Watch(trial.output, []).look().state
    assert state != "running", state  # what was to say how it ended had no room either
    mount(str(inner), "remount,size=64m")
    trial.finish()
    shutil.copytree(trial.output, folder / "out")
    return printed


def clock_set_back(folder: Path) -> Outcome:
    """the clock is set back"""
    trial = Trial(folder, gated(3, "again", 30))
    file = Path(trial.output) / "set-back"
    run = trial.start(
        "tests.faults.run:clock", RAYPD_TEST_CLOCK="-86400", RAYPD_TEST_CLOCK_FILE=str(file)
    )
    trial.wait(3)
    trial.go(file.name)
    wait_for(
        lambda: (file.parent / f"set-back-{run.pid}").exists(),
        "the driver's clock was not set back",
    )
    kill(run)
    trial.go("again")
    trial.finish(
        "tests.faults.run:clock", RAYPD_TEST_CLOCK="-172800", RAYPD_TEST_CLOCK_FILE=str(file)
    )
    return trial.outcome("by a day in driver and workers, kill -9, by two days", "resumed")


def started_twice(folder: Path) -> Outcome:
    """the same run is started twice at once"""
    trial = Trial(folder, gated(0, "refused", 20))
    first = trial.start()
    wait_for((Path(trial.output) / "lease.json").exists)
    printed = ended(trial.start(), 1)
    assert re.search(rf"has been working on it since .* as process {first.pid} on", printed), (
        printed
    )
    trial.go("refused")
    ended(first)
    return trial.outcome(
        "the second start while the first works", "exit code 1, and who holds it since when"
    )


def second_host(folder: Path) -> Outcome:
    """the same run is started on a second host"""
    trial = Trial(folder, gated(4, "again", 20))
    first = trial.start()
    trial.wait(4)
    printed = apart(_refused_elsewhere, folder)
    assert re.search(
        rf"has been working on it since .* as process {first.pid} on {socket.gethostname()}",
        printed,
    ), printed
    kill(first)
    trial.go("again")
    printed = apart(_taken_over_elsewhere, folder)
    assert "no longer has a heartbeat; taking over its lease" in printed, printed
    return trial.outcome(
        "while the first works, and after a kill -9 of it",
        "refused with who holds it; after 45 s without a heartbeat it resumed",
    )


def _refused_elsewhere(folder: Path) -> str:
    return _elsewhere(folder, 1)


def _taken_over_elsewhere(folder: Path) -> str:
    return _elsewhere(folder, 0)


def _elsewhere(folder: Path, code: int) -> str:
    """Start the run of a folder in namespaces whose host has another name."""
    socket.sethostname("second-host")
    run = start("-m", "tests.faults.run", str(folder / "run.yaml"))
    return ended(run, code)
