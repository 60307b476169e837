"""Memory (MB) and computing of a run with the fake engine: python -m tests.cluster.flat_memory
DOCUMENTS [UNIT].
"""

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from raypd.config import RunConfig
from tests.faults.trial import WORKERS
from tests.processes import children
from tests.runs import TITLES, extraction, run_config

_FILE_DOCUMENTS = 50_000
_LOOK_SECONDS = 0.5


def make_corpus(folder: Path, documents: int) -> None:
    """Synthetic product listings in Parquet, ids 0, 1, 2, ..."""
    folder.mkdir(parents=True)
    for start in range(0, documents, _FILE_DOCUMENTS):
        numbers = range(start, min(documents, start + _FILE_DOCUMENTS))
        titles = [
            f"Item {n}: a lamp of {n % 97} lumen, {n % 13} W, in colour {n % 29}, model {n * 7919}"
            for n in numbers
        ]
        table = pa.table({"id": [str(n) for n in numbers], "title": titles})
        pq.write_table(table, folder / f"{start:09d}.parquet", row_group_size=5_000)


def configuration(folder: Path, unit_documents: int, workers: int) -> RunConfig:
    """A run at the speed of the machine: the fake engine takes no time."""
    fast = {
        "load_seconds": 0,
        "step_seconds": 0,
        "prefill_tokens_per_second": 1e12,
        "decode_tokens_per_second": 1e12,
    }
    cluster = {
        "address": "local",
        "unit_documents": unit_documents,
        "max_workers": workers,
    }
    sections = {
        "input": TITLES,
        "model": {"name": "fake", "fake": fast},
        "engine": {"max_num_seqs": 64},
    }
    return run_config(
        extraction(lamp=["power", "colour"]),
        folder / "in",
        folder / "out",
        cluster=cluster,
        **sections,
    )


def watch(held: dict[int, list[float]], stop: threading.Event) -> None:
    """Notes what this process and its decode workers hold (MB), by process, until it is stopped."""
    while not stop.wait(_LOOK_SECONDS):
        for process in (psutil.Process(), *children(os.getpid(), WORKERS)):
            with contextlib.suppress(psutil.Error):
                held.setdefault(process.pid, []).append(process.memory_info().rss / 2**20)


def course(held: list[float]) -> dict[str, float]:
    """MB at a tenth of the time, at the half, at the end, and at most."""
    found = {
        "early": held[len(held) // 10],
        "half": held[len(held) // 2],
        "end": held[-1],
        "most": max(held),
    }
    return {name: round(mb, 1) for name, mb in found.items()}


def measure(
    folder: Path, documents: int, unit_documents: int = 256, workers: int = 2
) -> dict[str, Any]:
    """Runs so many documents; what it took."""
    from raypd.cluster.driver import run_extract

    make_corpus(folder / "in", documents)
    cpu = time.process_time()
    began = time.monotonic()
    held = dict[int, list[float]]()
    stop = threading.Event()
    looking = threading.Thread(target=watch, args=(held, stop))
    looking.start()
    made = run_extract(configuration(folder, unit_documents, workers))
    stop.set()
    looking.join()
    assert made.documents == documents
    assert made.ok == documents
    return {
        "documents": documents,
        "units": made.units,
        "seconds": round(time.monotonic() - began, 1),
        "driver_cpu_seconds": round(time.process_time() - cpu, 1),
        "driver_mb": course(held.pop(os.getpid())),
        "worker_mb": [course(own) for own in held.values() if len(own) > 3],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="raypd-flat-") as folder:
        print(json.dumps(measure(Path(folder), *map(int, sys.argv[1:]))))
