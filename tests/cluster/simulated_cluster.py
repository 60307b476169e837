"""A whole run on a simulated cluster, for its memory: python -m tests.cluster.simulated_cluster
[UNITS WORKERS].

Everything that the head node of a run does is real: plan, scheduler, accounts, ledger, summaries
and the end of the run. A thousand actors of Ray do not fit on a small machine, so the workers are
simulated behind the calls that the scheduler makes (`run`, `progress`, `cancel`, `hello`). Such a
worker reads its unit, has the fake engine answer it, commits it and reports to the ledger, with a
meter of its own. They all run in this process, one after the other, when the scheduler waits.
"""

import gc
import json
import os
import pickle
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from raypd.answering import UnitProgress, components
from raypd.billing import Meter, NodeTime
from raypd.cluster import accounts, driver, ledger_actor, machines, worker_handle, worker_pool
from raypd.cluster.ledger_actor import Ledger
from raypd.cluster.ray_session import WorkerResources
from raypd.cluster.worker import WorkerSpec
from raypd.dataset import read_unit, writer
from raypd.run import Unit, UnitResult, UnitSummary
from raypd.tasks import billed_as, columns_of, rows_of
from tests.cluster.flat_memory import configuration, make_corpus
from tests.runs import answer

WORKERS_PER_NODE = 8
# Units that end while the scheduler waits once: a quarter of a second of a thousand workers.
_UNITS_PER_WAIT = 64
_SAMPLES = 8


class Reference:
    """A result that may be outstanding, in place of Ray's reference to an object."""

    def __init__(self, value: Any = None, done: bool = True) -> None:
        self.value = value
        self.done = done

    def resolve(self, value: Any) -> None:
        self.value = value
        self.done = True


class Handle:
    """In place of an actor's handle: `handle.method.remote(...)` calls the method of an object."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def remote(*arguments: Any, **keys: Any) -> Reference:
            # As Ray brings them: copies.
            result = method(*pickle.loads(pickle.dumps(arguments)), **keys)
            return result if isinstance(result, Reference) else Reference(result)

        return SimpleNamespace(remote=remote)


class SimulatedWorker:
    """A worker without a process."""

    def __init__(self, cluster: "Cluster", spec: WorkerSpec, number: int) -> None:
        self._cluster = cluster
        self._spec = spec
        self._node = f"n{number // WORKERS_PER_NODE}"
        self._meter = Meter(self._node, spec.config.decoding.method)
        self._waiting: dict[str, Reference] = {}

    def hello(self) -> tuple[str, None]:
        self._meter.ready()
        return self._node, None

    def progress(self) -> dict[str, UnitProgress]:
        return dict.fromkeys(self._waiting, UnitProgress())

    def cancel(self, unit_id: str, only_waiting: bool) -> None:
        reference = self._waiting.pop(unit_id, None)
        if reference is not None:
            reference.resolve(UnitResult(handed_back=True))

    def run(self, unit: Unit, **_: Any) -> Reference:
        reference = Reference(done=False)
        self._waiting[unit.id] = reference
        self._cluster.queue.append((self, unit))
        return reference

    def work(self, unit: Unit) -> bool:
        """Process a unit; return whether it was still this worker's."""
        reference = self._waiting.pop(unit.id, None)
        if reference is None:
            return False
        reference.resolve(self._process(unit))
        return True

    def _process(self, unit: Unit) -> UnitResult:
        config = self._spec.config
        meter = self._meter
        began = time.time()
        meter.begin(unit.id)
        documents = read_unit(unit, config)
        categories = [billed_as(document, config.task, config.input) for document in documents]
        meter.documents(unit.id, categories)
        records, ended = answer(self._cluster.parts.task, documents, self._cluster.parts.engine)
        for finished, category in zip(ended, categories, strict=True):
            meter.tokens(unit.id, [category], finished.counts)
        usage = meter.end(unit.id)
        table = writer.make_table(documents, rows_of(records, config), columns_of(config), 1)
        ok, failed = writer.count_documents(table)
        first_id, last_id = writer.id_range(table)
        summary = UnitSummary(
            unit=unit.id,
            fingerprint=self._cluster.fingerprint,
            session=self._spec.session,
            source=unit.name,
            start=unit.start,
            documents=len(documents),
            ok=ok,
            failed=failed,
            seconds=1.0,
            began=began,
            worker=meter.id,
            categories=usage.categories,
            first_id=first_id,
            last_id=last_id,
        )
        commit = writer.commit(self._spec.output, table, summary)
        meter.commit(unit.id, usage, ok, failed)
        receipt = self._spec.ledger.report.remote(meter.report()).value
        meter.received(pickle.loads(pickle.dumps(receipt)))
        return UnitResult(ok=ok, failed=failed, commit=commit)


class Cluster:
    """In place of the module `ray`."""

    exceptions = ray.exceptions

    def __init__(self, config: Any, samples_every: int) -> None:
        self.fingerprint = config.fingerprint()
        self.parts = components.build(config, None)
        self.queue: deque[tuple[SimulatedWorker, Unit]] = deque()
        self.started = 0  # workers
        self.ended = 0  # units
        self.most_in_flight = 0
        self.samples: list[dict[str, int]] = []
        self.ledger: Ledger | None = None
        self._samples_every = samples_every

    def start_ledger(self, config: Any, output: str, session: str, began: float, *_: Any) -> Handle:
        def nodes() -> list[NodeTime]:
            count = -(-max(1, self.started) // WORKERS_PER_NODE)
            return [
                NodeTime(f"n{number}", began, usd_per_hour=36.0, slots=WORKERS_PER_NODE)
                for number in range(count)
            ]

        self.ledger = Ledger(config, output, session, began, nodes)
        return Handle(self.ledger)

    def remote(self, kind: type) -> Any:
        """Return what makes workers."""

        def make(spec: WorkerSpec) -> Handle:
            self.started += 1
            return Handle(SimulatedWorker(self, spec, self.started - 1))

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))

    def kill(self, actor: Any) -> None:
        pass

    def get(self, reference: Reference, timeout: float | None = None) -> Any:
        return reference.value

    def wait(
        self, references: Sequence[Reference], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Reference], list[Reference]]:
        ready = [reference for reference in references if reference.done]
        if not ready and timeout:
            self._advance()
            ready = [reference for reference in references if reference.done]
        chosen = ready[:num_returns]
        return chosen, []

    def _advance(self) -> None:
        """Let some units end."""
        self.most_in_flight = max(self.most_in_flight, len(self.queue))
        for _ in range(min(_UNITS_PER_WAIT, len(self.queue))):
            worker, unit = self.queue.popleft()
            self.ended += worker.work(unit)
            if self.ended % self._samples_every == 0:
                self._sample()

    def _sample(self) -> None:
        assert self.ledger is not None
        gc.collect()
        bill = pickle.dumps(self.ledger.book.bill(time.time()))
        resident = psutil.Process().memory_info().rss
        self.samples.append(
            {
                "units": self.ended,
                "mb": round(resident / 2**20),
                "ledger_bytes": len(bill),
            }
        )


def simulate(
    folder: Path, units: int, workers: int, patch: pytest.MonkeyPatch, unit_documents: int = 1
) -> dict[str, Any]:
    """Run so many units on so many simulated workers, and measure."""
    make_corpus(folder / "in", units * unit_documents)
    config = configuration(folder, unit_documents, workers)
    config = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"readers": 0, "units_in_flight": 2})}
    )
    cluster = Cluster(config, max(1, units // _SAMPLES))
    for module in (worker_pool, worker_handle, accounts, ledger_actor):
        patch.setattr(module, "ray", cluster)
    patch.setattr(ledger_actor, "start", cluster.start_ledger)
    patch.setattr(ledger_actor, "Metrics", lambda run: SimpleNamespace(show=lambda bill: None))
    patch.setattr(machines, "runs", lambda: 1)
    # What a power failure would lose is not measured, and waiting for the disk takes longest.
    patch.setattr(os, "fsync", lambda handle: None)
    quiet = SimpleNamespace(look=lambda: None, seconds_left=lambda node: None)
    patch.setattr(worker_pool, "NodeWatch", lambda: quiet)
    session = SimpleNamespace(
        connected=lambda *_: nullcontext(True),
        runs_here=lambda _: True,
        worker_resources=lambda _: WorkerResources(1.0, 0.0, 1),
        silence_ray_logs=lambda *_: None,
    )
    patch.setattr(driver, "ray_session", session)
    began = time.monotonic()
    cpu = time.process_time()
    made = driver.run_extract(config, build=components.build)
    assert cluster.ledger is not None
    totals = cluster.ledger.book.bill(time.time()).totals
    return {
        "units": made.units,
        "documents": made.documents,
        "ok": made.ok,
        "billed_documents": totals["documents"],
        "workers": cluster.started,
        "most_in_flight": cluster.most_in_flight,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "samples": cluster.samples,
    }


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory(prefix="raypd-simulated-") as directory,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        units, workers = map(int, sys.argv[1:] or ("200000", "1024"))
        print(json.dumps(simulate(Path(directory), units, workers, monkeypatch)))
