"""`input.reader` of tests: a document for each word of a file. It does what its name says."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def title() -> str:
    """Return what this process is called, which in Ray's processes says what they run."""
    return Path("/proc/self/cmdline").read_bytes().decode()


def rows(name: str, file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file.

    A name may contain `print`, `unpicklable` (a column that cannot be pickled), `once` (the first
    reader is killed), or for every reader `kill`, `hang`, `raise` and `slow` (by two seconds).
    """
    is_reader = title().startswith("ray::ReadDocuments")
    mark = Path(os.environ.get("TMPDIR", "/tmp")) / f"raypd-test-{name.replace('/', '-')}"
    if "print" in name:
        print("a line of the hook", flush=True)
    if "once" in name and is_reader and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if "kill" in name and is_reader:
        os.kill(os.getpid(), signal.SIGKILL)
    if "hang" in name and is_reader:
        time.sleep(10_000)
    if "raise" in name and title().startswith("ray::"):
        raise ValueError("an unknown shop")
    if "slow" in name and is_reader:
        time.sleep(2)
    for word in file.read().decode().split():
        row: dict[str, Any] = {"id": word, "title": "a"}
        if "unpicklable" in name:
            row["lock"] = threading.Lock()
        yield row
