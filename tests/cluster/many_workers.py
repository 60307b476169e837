"""How long 64 workers on logical GPUs idle at the end of a run: python -m tests.cluster.many_workers

Every worker's programs take their time by the clock (the fake engine), so that two cores carry them all.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from raypd.config import RunConfig


def configuration(folder: Path, workers: int, units: int, unit_documents: int, seconds: float) -> RunConfig:
    """A run of so many units, each of which takes about so many seconds."""
    corpus = folder / "corpus.jsonl"
    with open(corpus, "w") as file:
        for i in range(units * unit_documents):
            file.write(json.dumps({"id": i, "title": "t" * (20 + 37 * (i % 11))}) + "\n")
    # One step a batch of 8 and 4 lanes of about 4 tokens: the step's time is what makes the unit's.
    steps = unit_documents / 8 * 7
    costs = {"load_seconds": 1, "step_seconds": seconds / steps, "prefill_tokens_per_second": 1e9}
    return RunConfig.model_validate(
        {
            "input": {"path": str(corpus), "text_columns": ["title"], "category_column": None},
            "output": {"path": str(folder / "out")},
            "task": {"categories": {"c": {"attributes": [{"name": n} for n in "abcd"]}}},
            "model": {"name": "fake", "fake": {**costs, "decode_tokens_per_second": 1e9}},
            "engine": {"max_num_seqs": 8},
            "cluster": {"max_workers": workers, "gpus_per_worker": 1, "unit_documents": unit_documents},
        }
    )


def idle_at_the_end(bill: dict[str, Any]) -> float:
    """Seconds that a worker idles on average, from the first engine that has nothing to do any more to the end."""
    busy = [[(a, b) for a, b, kind, _ in worker["spans"] if kind == "busy"] for worker in bill["workers"]]
    busy = [spans for spans in busy if spans]
    first, last = (of(spans[-1][1] for spans in busy) for of in (min, max))
    at_work = sum(max(0.0, b - max(a, first)) for spans in busy for a, b in spans)
    return round(last - first - at_work / len(busy), 1)


def measure(folder: Path, workers: int, units: int, unit_documents: int, seconds: float) -> dict[str, Any]:
    """Runs it on a Ray of so many logical GPUs."""
    import ray

    from raypd.billing import book
    from raypd.cluster.driver import run_extract
    from raypd.run.records import to_json

    config = configuration(folder, workers, units, unit_documents, seconds)
    ray.init(address="local", num_cpus=8, num_gpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        made = run_extract(config)
    finally:
        ray.shutdown()
    assert made.documents == made.ok == units * unit_documents
    (bill,) = map(to_json, book.bills(config.output.path))
    return {"units": made.units, "unit_seconds": seconds, "idle_seconds": idle_at_the_end(bill)}


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--workers", type=int, default=64)
    options.add_argument("--units", type=int, default=640)
    options.add_argument("--unit-documents", type=int, default=64)
    options.add_argument("--seconds", type=float, default=12)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="raypd-many-") as folder:
        print(json.dumps(measure(Path(folder), given.workers, given.units, given.unit_documents, given.seconds)))
