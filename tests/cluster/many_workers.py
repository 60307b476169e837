"""How busy 64 workers on logical GPUs are kept, and how long the tail is: python -m tests.cluster.many_workers

Every worker's programs take their time by the clock (the fake engine), so that two cores carry them all. Prints the
share of the workers' time, from when the first unit was given out to the end of the run, in which they had a unit in
hand, and the tail: from the first worker that had nothing to do any more to the end of the run. A worker counts from
its own first unit on: that 64 processes take a minute to start on two cores is the machine's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
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
            "engine": {"batch": 8},
            "cluster": {"max_workers": workers, "gpus_per_worker": 1, "unit_documents": unit_documents},
        }
    )


class Ears:
    """Listens to the pool: when each worker was ready, and had units in hand."""

    def __init__(self) -> None:
        from raypd.cluster import pool

        self.ready: dict[int, float] = {}
        self.spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._since: dict[int, float] = {}
        give, answered = pool.Pool._give, pool.Pool._answered

        def listen_give(own: Any, worker: Any, attempt: Any) -> None:
            self._since.setdefault(id(worker), time.monotonic())
            give(own, worker, attempt)

        def listen_answered(own: Any, worker: Any, attempt: Any, answer: Any) -> Any:
            if not worker.given:
                self.spans[id(worker)].append((self._since.pop(id(worker)), time.monotonic()))
            return answered(own, worker, attempt, answer)

        pool.Pool._give, pool.Pool._answered = listen_give, listen_answered  # type: ignore[method-assign]

    def figures(self) -> dict[str, float]:
        first = min(began for spans in self.spans.values() for began, _ in spans)
        last = max(ended for spans in self.spans.values() for _, ended in spans)
        busy = sum(ended - began for spans in self.spans.values() for began, ended in spans)
        started = {who: min(began for began, _ in spans) for who, spans in self.spans.items()}
        idle_from = min(max(ended for _, ended in spans) for spans in self.spans.values())
        available = sum(last - began for began in started.values())
        return {
            "workers": len(self.spans),
            "seconds": round(last - first, 1),
            "all_started_after": round(max(started.values()) - first, 1),
            "busy_share": round(busy / available, 4),
            "tail_seconds": round(last - idle_from, 1),
        }


def measure(folder: Path, workers: int, units: int, unit_documents: int, seconds: float) -> dict[str, Any]:
    """Runs it on a Ray of so many logical GPUs."""
    import ray

    from raypd.cluster.pipeline import run_extract

    config = configuration(folder, workers, units, unit_documents, seconds)
    ray.init(address="local", num_cpus=8, num_gpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        ears = Ears()
        made = run_extract(config)
    finally:
        ray.shutdown()
    assert made.documents == made.ok == units * unit_documents
    return {"units": made.units, "unit_seconds": seconds, **ears.figures()}


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--workers", type=int, default=64)
    options.add_argument("--units", type=int, default=640)
    options.add_argument("--unit-documents", type=int, default=64)
    options.add_argument("--seconds", type=float, default=12)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="raypd-many-") as folder:
        print(json.dumps(measure(Path(folder), given.workers, given.units, given.unit_documents, given.seconds)))
