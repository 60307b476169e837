"""Measures a configuration on a sample: the decode worker itself, in a temporary run, with a clock at its engine.

The sample goes round as a ring: its documents come again and again, and the clock runs while the engine is full, from
one completed document until as many more as the ring has (or as whole rings that fill the engine) are completed. The
engine is then in the state in which the clock found it, so that what was measured is the work of every document of the
sample, equally often: no start, no drain, no half-done work at the edges. Before that one document of every category
is done for warm-up.

A document's seconds are its shares of the passes that it took part in, by its tokens in them.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from raypd.cluster.components import WorkerComponents, build
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import RunConfig
from raypd.dataset import planner
from raypd.estimate import sampling
from raypd.estimate.clock import RING, Cost, Meter
from raypd.run import manifest
from raypd.tasks.base import Document


@dataclass
class Measured:
    """One configuration on one worker.

    costs: of the documents in the order they were given; None where one was not completed within the limit.
    documents, seconds: completed while the clock ran, and how long it ran. stretches: (tokens, seconds) of parts of it.
    load_seconds: 0 when the model was loaded before. gpu: its name, None on a CPU.
    """

    method: str
    costs: list[Cost | None]
    documents: int
    seconds: float
    stretches: list[tuple[float, float]]
    load_seconds: float
    warmup_seconds: float
    gpu: str | None
    gpu_memory_gib: float
    machine: str
    threads: int | None
    complete: bool

    @property
    def documents_per_second(self) -> float:
        """Of the sample as it was drawn, without the weights of its strata."""
        return self.documents / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Facts:
    """A worker's machine. gpu: its name, None on a CPU. dtype: of the configuration's weights there, "" without any.

    fast_dtypes, quantizations: of weights that are worth a try on it.
    """

    gpu: str | None
    gpu_memory_gib: float
    machine: str
    dtype: str = ""
    fast_dtypes: list[str] = field(default_factory=list)
    quantizations: list[str] = field(default_factory=list)


class Bench:
    """Measures configurations one after the other, and keeps the last model that it loaded. Also as a Ray actor."""

    def __init__(
        self,
        threads: int | None = None,
        make: Callable[[RunConfig, int | None], WorkerComponents] | None = None,
        weights: bool = False,
    ) -> None:
        """weights: a model will be loaded, so that torch is imported now."""
        self.threads, self._make = threads, make
        self._model: tuple[Any, Any] | None = None
        self._done = (0, 0)
        if weights:
            import raypd.models.load  # noqa: F401  # its seconds are the start of a process, not a measurement

    def ready(self) -> bool:
        """Answers once the process stands."""
        return True

    def facts(self, config: RunConfig) -> Facts:
        """What this machine is. Raises ModelError where it has not the device of the configuration."""
        machine = this_machine(config)
        if config.model.is_fake:
            return Facts(*machine)
        from raypd.models.load import resolve_device, resolve_dtype

        device = resolve_device(config.model.device)
        dtype = str(resolve_dtype(config.model.dtype, device)).removeprefix("torch.")
        best = str(resolve_dtype("auto", device)).removeprefix("torch.")
        if device.type != "cuda":  # bitsandbytes runs on a CPU, and slowly
            return Facts(*machine, dtype, ["float32", *([best] if best != "float32" else [])])
        there = importlib.util.find_spec("bitsandbytes") is not None
        return Facts(*machine, dtype, [best, "float16"], ["int8", "nf4"] if there else [])

    def progress(self) -> tuple[int, int]:
        """(documents done, documents to do) of the measurement in hand."""
        return self._done

    def measure(self, config: RunConfig, documents: Sequence[Document], limit: float | None = None) -> Measured:
        """Measures one configuration. limit: seconds after which the clock stops in any case.

        Raises UserError where the configuration cannot be run, EngineBroken where its engine fails.
        """
        began = time.perf_counter()
        self._done = (0, 0)
        parts = self._parts(config)
        loaded = time.perf_counter() - began
        lead = in_flight(config)
        with tempfile.TemporaryDirectory(prefix="raypd-") as folder:
            # Whole rounds, and never less than the engine has in hand: documents that were begun together also end
            # together, and a window within such a wave would say nothing.
            count = len(documents) * math.ceil(max(lead, len(documents)) / len(documents))
            # Twice what is in hand behind it keeps the engine full to the end.
            stream = list(sampling.around(documents, lead + count + 2 * lead))
            firsts = sampling.first_of_each(documents, config)
            warm = Meter(parts, 0, len(firsts) + 1)
            begun = time.perf_counter()
            _run(config, list(enumerate(firsts)), os.path.join(folder, "warm"), warm, self.threads)
            warmed = time.perf_counter() - begun
            meter = Meter(parts, lead, count, limit, self._tell)
            _run(config, stream, os.path.join(folder, "ring"), meter, self.threads)
        measured = meter.result(len(documents))
        machine = this_machine(config)
        # The engine's cache must be gone before the next one makes its own.
        del parts, warm
        meter.forget()
        gc.collect()
        return Measured(
            config.decoding.method, *measured, loaded, warmed, *machine, self.threads, complete=not meter.cut_short
        )

    def _tell(self, done: int, total: int) -> None:
        self._done = (done, total)

    def _parts(self, config: RunConfig) -> WorkerComponents:
        if self._make is not None:
            return self._make(config, self.threads)
        if config.decoding.method == "speculative":
            self._model = None  # it cannot use a model that an engine has had, nor one model as both
            return build(config, self.threads)
        return build(config, self.threads, self._load)

    def _load(self, model: Any) -> Any:
        from raypd.models.load import load_model

        if self._model is None or self._model[0] != model:
            self._model = None  # first give the memory back
            gc.collect()
            self._model = (model, load_model(model))
        return self._model[1]


def in_flight(config: RunConfig) -> int:
    """Documents that an engine decodes at the same time."""
    decoding = config.decoding
    if decoding.method == "speculative":
        return 1
    stack = 1
    if decoding.method == "hyper_parallel" and decoding.isolate == "none":
        stack = decoding.stacked_documents
    elif decoding.method == "intra_prompt":
        stack = decoding.contexts_per_prompt
    return config.engine.max_num_seqs * stack


def this_machine(config: RunConfig) -> tuple[str | None, float, str]:
    """(name of the GPU that a worker uses, None on a CPU; its memory in GiB; the machine in words)."""
    if config.model.is_fake:
        return None, 0.0, "fake engine"
    from raypd.models.load import resolve_device

    device = resolve_device(config.model.device)
    if device.type == "cuda":
        import torch

        facts = torch.cuda.get_device_properties(device)
        return facts.name, facts.total_memory / 2**30, facts.name
    return None, 0.0, _processor()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# --------------------------------------------------------------------------------------------------- the temporary run


def _run(
    config: RunConfig, stream: Sequence[tuple[int, Document]], folder: str, meter: Meter, threads: int | None
) -> None:
    """Takes numbered documents through a decode worker in a run of their own."""
    os.makedirs(folder)
    path = os.path.join(folder, "sample.jsonl")
    key = config.input.id_column
    with open(path, "w", encoding="utf-8") as file:
        for number, document in stream:
            fields = {**document.fields, RING: number, **({key: document.id} if key else {})}
            file.write(json.dumps(fields, default=str) + "\n")
    tree = config.model_dump()
    tree["input"] |= {"path": path, "format": "jsonl"}
    tree["output"] |= {"path": os.path.join(folder, "run")}
    tree["cluster"] |= {"unit_documents": len(stream)}
    own = RunConfig.model_validate(tree)
    manifest.claim(own, own.output.path)
    order = WorkerSpec(own, own.output.path, "measurement", threads, lambda *_: meter.parts)
    decoder = DecodeWorker(order)
    try:
        with ThreadPoolExecutor(config.cluster.units_in_flight) as pool:
            for _ in pool.map(decoder.run_unit, planner.plan(own)):
                pass
    finally:
        decoder.close()
