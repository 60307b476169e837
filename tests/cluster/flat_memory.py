"""Memory and cost of a run of many documents with the fake engine: python -m tests.cluster.flat_memory DOCUMENTS [UNIT]

Makes the corpus, runs it, and prints what driver and workers held while it went on (MB), and what the driver computed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd.config import RunConfig

_FILE_DOCUMENTS = 50_000
_LOOK_SECONDS = 0.5


def make_corpus(folder: Path, documents: int) -> None:
    """Synthetic product listings in Parquet, ids 0, 1, 2, ..."""
    folder.mkdir(parents=True)
    for start in range(0, documents, _FILE_DOCUMENTS):
        numbers = range(start, min(documents, start + _FILE_DOCUMENTS))
        titles = [
            f"Item {n}: a lamp of {n % 97} lumen, {n % 13} W, in colour {n % 29}, model {n * 7919}" for n in numbers
        ]
        table = pa.table({"id": [str(n) for n in numbers], "title": titles})
        pq.write_table(table, folder / f"{start:09d}.parquet", row_group_size=5_000)


def configuration(folder: Path, unit_documents: int, workers: int) -> RunConfig:
    """A run at the speed of the machine: the fake engine takes no time."""
    fast = {"load_seconds": 0, "step_seconds": 0, "prefill_tokens_per_second": 1e12, "decode_tokens_per_second": 1e12}
    return RunConfig.model_validate(
        {
            "input": {"path": str(folder / "in"), "text_columns": ["title"], "category_column": None},
            "output": {"path": str(folder / "out")},
            "task": {"categories": {"lamp": {"attributes": [{"name": "power"}, {"name": "colour"}]}}},
            "model": {"name": "fake", "fake": fast},
            "engine": {"max_num_seqs": 64},
            "cluster": {"address": "local", "unit_documents": unit_documents, "max_workers": workers},
        }
    )


def resident(pid: int | str) -> float | None:
    """MB that a process holds; None when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
    return None


class Watch:
    """Looks at driver and workers while a run goes on."""

    def __init__(self) -> None:
        self.driver: list[tuple[float, float]] = []  # (seconds, MB)
        self.workers: dict[int, list[tuple[float, float]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._began = time.monotonic()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            now = time.monotonic() - self._began
            self.driver.append((now, resident("self") or 0.0))
            for pid in worker_processes():
                if (held := resident(pid)) is not None:
                    self.workers.setdefault(pid, []).append((now, held))


def worker_processes() -> list[int]:
    """Processes of this Ray's decode workers."""
    import ray
    from ray._private.state import actors

    if not ray.is_initialized():
        return []
    with contextlib.suppress(Exception):  # it is just coming or going
        return [a["Pid"] for a in actors().values() if a["ActorClassName"] == "DecodeWorker" and a["State"] == "ALIVE"]
    return []


def course(held: list[tuple[float, float]]) -> dict[str, float]:
    """MB at a tenth of the time, at the half, at the end, and at most."""
    at = [held[min(len(held) - 1, int(len(held) * part))][1] for part in (0.1, 0.5, 1.0)]
    return {
        "early": round(at[0], 1),
        "half": round(at[1], 1),
        "end": round(at[2], 1),
        "most": round(max(m for _, m in held), 1),
    }


def measure(folder: Path, documents: int, unit_documents: int, workers: int) -> dict[str, Any]:
    """Runs so many documents; what it took."""
    from raypd.cluster.driver import run_extract

    make_corpus(folder / "in", documents)
    cpu, began = time.process_time(), time.monotonic()
    with Watch() as watch:
        made = run_extract(configuration(folder, unit_documents, workers))
    assert (made.documents, made.ok) == (documents, documents)
    return {
        "documents": documents,
        "units": made.units,
        "seconds": round(time.monotonic() - began, 1),
        "driver_cpu_seconds": round(time.process_time() - cpu, 1),
        "driver_mb": course(watch.driver),
        "worker_mb": [course(held) for held in watch.workers.values() if len(held) > 3],
    }


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("documents", type=int)
    options.add_argument("unit_documents", type=int, nargs="?", default=256)
    options.add_argument("--workers", type=int, default=2)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="raypd-flat-") as folder:
        print(json.dumps(measure(Path(folder), given.documents, given.unit_documents, given.workers)))
