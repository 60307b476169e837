"""Who gets which unit: nobody idles while another has a queue, and the driver's memory does not grow with the run."""

from __future__ import annotations

import gc
import json
import math
from collections import Counter
from pathlib import Path

import pytest

from raypd.cluster import driver, scheduler, work_stealing
from tests.cluster import fakes, flat_memory
from tests.processes import LONG, wait_for
from tests.runs import write_jsonl


def test_a_worker_that_has_run_dry_gets_the_unit_that_waits_at_another(tmp_path: Path, config, ray_here, monkeypatch):
    """Two workers with two units in flight each; the first unit stands still until the third has moved."""
    for name, title in (("a", "until c-moved"), ("b", "quick"), ("c", "quick"), ("d", "quick")):
        write_jsonl(tmp_path / f"in/{name}.jsonl", [title] * 10)
    run = config(str(tmp_path / "in"), max_workers=2, units_in_flight=2, max_num_seqs=1)
    given: list[tuple[int, str]] = []
    import ray

    give = scheduler.Scheduler._give

    def listen(self, worker, attempt) -> None:
        if attempt.unit.name == "c.jsonl" and worker.given:
            # While the first is still being read the second would be begun, and then it is not given back.
            wait_for(lambda: any(progress.begun for progress in ray.get(worker.actor.progress.remote()).values()))
        given.append((id(worker), attempt.unit.name))
        give(self, worker, attempt)
        if [unit for _, unit in given].count("c.jsonl") == 2:
            (tmp_path / "out/c-moved").touch()

    monkeypatch.setattr(scheduler.Scheduler, "_give", listen)
    monkeypatch.setattr(scheduler, "_IDLE_SECONDS", LONG)
    monkeypatch.setattr(work_stealing, "WORTH_SECONDS", math.inf)
    # Both are ready before the first unit is given out, whichever process starts sooner.
    monkeypatch.setattr(scheduler.Scheduler, "_assign", _patient(scheduler.Scheduler._assign, 2))
    made = driver.run_extract(run, build=fakes.build)
    assert made.ok == 40
    by_unit: dict[str, list[int]] = {}
    for worker, unit in given:
        by_unit.setdefault(unit, []).append(worker)
    assert len(by_unit["a.jsonl"]) == 1
    assert len(by_unit["c.jsonl"]) == 2, given
    assert by_unit["c.jsonl"][0] == by_unit["a.jsonl"][0] != by_unit["c.jsonl"][1]


def _patient(assign, workers: int):
    def wait(self) -> None:
        if sum(worker.ready for worker in self.workers) >= workers or any(worker.given for worker in self.workers):
            assign(self)

    return wait


@pytest.mark.slow
def test_the_drivers_memory_does_not_grow_with_the_units(tmp_path: Path, ray_here, monkeypatch) -> None:
    """Python's own objects at three units, since some come once; flat_memory.py measures whole processes."""
    counted: list[Counter[str]] = []
    take = driver._Run._take
    seen = [0]

    def look(self, event, display) -> None:
        seen[0] += 1
        if seen[0] in (50, 125, 200):
            gc.collect()
            counted.append(Counter(type(item).__name__ for item in gc.get_objects()))
        take(self, event, display)

    monkeypatch.setattr(driver._Run, "_take", look)
    flat_memory.make_corpus(tmp_path / "in", 840)
    made = driver.run_extract(flat_memory.configuration(tmp_path, 4, 2))
    assert (made.documents, made.units) == (840, 210)
    first, second, third = counted
    grown = {name: (second[name] - first[name], n - second[name]) for name, n in third.items()}
    grown = {name: counts for name, counts in grown.items() if min(counts) > 75 / 2}  # half an object a unit
    assert not grown, json.dumps(grown)
