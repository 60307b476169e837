"""Runs as processes of their own, which a test may kill; and how a test waits for what they do."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
# Seconds after which something never happens, on the busiest machine; below pytest's own limit.
LONG = 240.0
_MARK = "RAYPD_TEST_PROCESS"  # in the environment of all that a test's process starts
_marks: set[str] = set()


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Starts Python with these words, from the root of this checkout."""
    mark = uuid.uuid4().hex
    pipe = subprocess.PIPE
    _marks.add(mark)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        _MARK: mark,
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def ended(process: subprocess.Popen[str], code: int = 0, seconds: float = LONG) -> str:
    """Waits for the end of a process, whose exit code has to be this; its output."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, err[-3000:] + out[-3000:]
    return out + err


def wait_for(condition: Callable[[], Any], what: str = "it did not happen") -> Any:
    """Waits until a condition holds; what it returned then."""
    end = time.monotonic() + LONG
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found


def children(pid: int, names: str | tuple[str, ...]) -> list[psutil.Process]:
    """The processes below one whose command begins with one of these names, as Ray's actors have
    them.
    """
    found = []
    with contextlib.suppress(psutil.Error):  # it is just coming or going
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += [process] if " ".join(process.cmdline()).startswith(names) else []
    return found


def end_all() -> None:
    """Kills what the processes of a test have left: Ray's own outlive a driver that was killed."""
    if not _marks:
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone, or somebody else's
            if process.environ().get(_MARK) in _marks:
                process.kill()
    _marks.clear()
