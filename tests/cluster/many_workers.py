"""How long 64 workers on logical GPUs idle at the end of a run: python -m
tests.cluster.many_workers [WORKERS UNITS SECONDS].
documents_per_second: of the whole run, Ray's start too.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults.trial import Trial
from tests.runs import extraction


def trial(folder: Path, workers: int, units: int, unit_documents: int, seconds: float) -> Trial:
    """A run of so many units, each of which takes about so many seconds."""
    titles = ["t" * (20 + 37 * (i % 11)) for i in range(units * unit_documents)]
    # One step a batch of 8 and 4 lanes of about 4 tokens: the step's time is what makes the unit's.
    costs = {"load_seconds": 1, "step_seconds": seconds / (unit_documents / 8 * 7)}
    costs |= {"prefill_tokens_per_second": 1e9, "decode_tokens_per_second": 1e9}
    cluster = {"max_workers": workers, "gpus_per_worker": 1, "units_in_flight": 2}
    keys = {
        "task": extraction(c="abcd"),
        "model": {"name": "fake", "fake": costs},
        "engine": {"max_num_seqs": 8},
    }
    return Trial(folder, titles, unit_documents, cluster=cluster, **keys)


def idle_at_the_end(bill: dict[str, Any]) -> float:
    """Seconds that a worker idles on average, from the first engine that has nothing to do any more
    to the end.
    """
    busy = [
        [(a, b) for a, b, kind, _ in worker["spans"] if kind == "busy"]
        for worker in bill["workers"]
    ]
    busy = [spans for spans in busy if spans]
    first, last = (of(spans[-1][1] for spans in busy) for of in (min, max))
    return round(
        last
        - first
        - sum(max(0.0, b - max(a, first)) for spans in busy for a, b in spans) / len(busy),
        1,
    )


def measure(
    folder: Path, workers: int, units: int, unit_documents: int, seconds: float
) -> dict[str, Any]:
    """Runs it on a Ray of so many logical GPUs."""
    from dataclasses import asdict

    import ray

    from raypd.billing import book
    from raypd.cluster.driver import run_extract

    config = trial(folder, workers, units, unit_documents, seconds).config
    ray.init(
        address="local", num_cpus=8, num_gpus=workers, include_dashboard=False, log_to_driver=False
    )
    began = time.monotonic()
    try:
        made = run_extract(config)
    finally:
        took = time.monotonic() - began
        ray.shutdown()
    assert made.documents == made.ok == units * unit_documents
    (bill,) = map(asdict, book.bills(config.output.path))
    found = {
        "units": made.units,
        "unit_seconds": seconds,
        "idle_seconds": idle_at_the_end(bill),
    }
    return {**found, "documents_per_second": round(made.documents / took, 1)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="raypd-many-") as folder:
        workers, units, seconds = map(int, sys.argv[1:] or ("64", "640", "12"))
        print(json.dumps(measure(Path(folder), workers, units, 64, seconds)))
