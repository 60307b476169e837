"""Profiles a configuration on a sample: a decode worker's request queue, engine and meter, without
storage. The sample comes round after round. The window begins when as many documents are answered
as the engine decodes at a time, and ends with whole rounds: no start, no drain. A document takes
its tokens at the seconds a token that the meter gives in it.
"""

import contextlib
import gc
import importlib.util
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from raypd.answering.components import WorkerComponents, build
from raypd.answering.progress import ProgressLines
from raypd.answering.request_queue import Cancelled, RequestQueue, UnitState
from raypd.billing import bill as billing
from raypd.billing import book
from raypd.billing.meter import Meter
from raypd.cluster.one_worker import OneWorker
from raypd.config import RunConfig
from raypd.errors import RunError
from raypd.estimation import sampling
from raypd.estimation.bootstrap import Array
from raypd.estimation.machines import TOKENS, instance_gpu
from raypd.run.usage import Usage, UsageKey
from raypd.tasks.base import Document
from raypd.text import counted

_SAMPLES = 8  # parts of the window whose speeds are compared
_UNIT = "sample"
Tokens = Usage  # the category of a row is its number
_POLL_SECONDS = 0.05


@dataclass
class DocumentCost:
    seconds: float  # of one worker
    prefill_tokens: float
    shared_tokens: float
    decode_tokens: float
    rows: list[dict[str, Any]] = field(default_factory=list)  # columns of its output rows
    error: str | None = None  # why it has none
    server_usd: float = 0.0  # for tokens, to a server behind model.endpoint


@dataclass
class WorkerFacts:
    machine: str  # in words
    gpu: str | None = None  # as instance types have it; None on a CPU, and for one that no type has
    # Other (dtype, quantization) of weights worth a try.
    types: list[tuple[str, str]] = field(default_factory=list)
    vllm: bool = False  # whether it is installed


@dataclass
class Profile:
    method: str
    # Of the documents in their order; None where one was not answered in time.
    costs: list[DocumentCost | None]
    seconds: float  # of the window
    # (seconds at the rates of the whole window, seconds) of parts of it.
    samples: list[tuple[float, float]]
    load_seconds: float  # 0 when the model was loaded before
    warmup_seconds: float  # of the first documents: instructions are computed, the engine fills up
    worker: WorkerFacts
    complete: bool  # the limit did not cut the window short

    @property
    def documents_per_second(self) -> float:
        """Of the sample as it was drawn."""
        seconds = [cost.seconds for cost in self.costs if cost is not None]
        return len(seconds) / sum(seconds) if sum(seconds) else 0.0


class SteppedMeter(Meter):
    """A run's meter with readings after each step. in_flight_limit: documents, 0: no window.
    together: per prompt.
    """

    def __init__(self, method: str, in_flight_limit: int, together: int, **options: Any) -> None:
        super().__init__(method=method, **options)
        self._in_flight_limit = in_flight_limit
        self._together = together
        self._in_flight = 0
        self.answered: Callable[[], int] = lambda: 0
        # (answered, prefill s, decode s, prefill tokens, decode tokens)
        self.readings: list[tuple[float, ...]] = []

    def step(self, engine: Any, programs: Mapping[str, int]) -> list[Any]:
        finished = super().step(engine, programs)
        # All are, in an engine that does not list them.
        running = len(engine.sequences) or engine.pending
        self._in_flight = max(
            self._in_flight, min(self._in_flight_limit, self._together * (running + len(finished)))
        )
        self.read()
        return finished

    def window(self, sample: int) -> tuple[int, int]:
        """Documents before the window, and in it: whole rounds, and as many as are in flight, which
        end together.
        """
        return self._in_flight, sample * math.ceil(max(self._in_flight, sample) / sample)

    def read(self) -> None:
        self.readings.append((self.answered(), *self.totals()))


class Profiler:
    """Profiles configurations one after the other, and keeps the last model that it loaded.

    Also as a Ray actor.
    """

    def __init__(self, threads: int | None = None, weights: bool = False) -> None:
        """weights: a model will be loaded, so that torch is imported now."""
        self.threads = threads
        self._model: tuple[Any, Any] | None = None
        self._done = (0, 0)
        if weights:
            import raypd.models.load  # noqa: F401  # its seconds are the start of a process, not of a load

    def ready(self) -> bool:
        return True

    def facts(self, config: RunConfig) -> WorkerFacts:
        """What this machine is.

        Raises ModelError where it has not the device of the configuration.
        """
        if config.model.is_fake:
            return WorkerFacts("fake engine")
        if config.model.endpoint is not None:
            return WorkerFacts(config.model.endpoint.url)
        from raypd.decoding import native
        from raypd.models.load import has_fp8, resolve_device, resolve_dtype

        model = config.model
        device = resolve_device(config.model.device)
        dtype, best = (
            str(resolve_dtype(name, device)).removeprefix("torch.")
            for name in (model.dtype, "auto")
        )
        plain = dict.fromkeys([best, "float16"] if device.type == "cuda" else ["float32", best])
        types = [(name, "none") for name in plain if (name, "none") != (dtype, model.quantization)]
        vllm = importlib.util.find_spec("vllm") is not None
        if device.type != "cuda":  # bitsandbytes runs on a CPU, and slowly
            if best == "bfloat16" and model.quantization != "w8a8" and native.refusal() is None:
                types.append((best, "w8a8"))
            return WorkerFacts(_processor(), types=types, vllm=vllm)
        import torch

        gpu = torch.cuda.get_device_properties(device)
        if importlib.util.find_spec("bitsandbytes"):
            types += [(model.dtype, kind) for kind in ("int8", "nf4") if kind != model.quantization]
        if best == "bfloat16" and model.quantization != "fp8" and has_fp8(device):
            types.append((best, "fp8"))
        return WorkerFacts(gpu.name, instance_gpu(gpu.name, gpu.total_memory / 2**30), types, vllm)

    def progress(self) -> tuple[int, int]:
        """(documents answered, documents wanted) of the profile that is being made."""
        return self._done

    def profile(
        self,
        config: RunConfig,
        documents: Sequence[Document],
        limit: float = math.inf,
        slow: bool = False,
    ) -> Profile:
        """Profiles a configuration, for `limit` seconds at most.

        Raises UserError: it cannot be run, EngineBroken. slow: a full engine may end nothing in
        time. The sample alone, in two thirds of it at most, gives tokens; the seconds a token are
        of that or of the full engine, which of them decoded more.
        """
        began = time.perf_counter()
        self._done = (0, 0)
        vllm = config.engine.kind == "vllm"
        if vllm:  # it wants all memory
            self._model = None
            gc.collect()
        # A sample comes round.
        parts = build(config, self.threads, None if vllm else self._load, each=True)
        loaded = time.perf_counter()
        # One document a category: the instruction of each is computed once.
        first = {
            sampling.kind_of(document, config)[0]: place for place, document in enumerate(documents)
        }
        places = range(len(documents)) if slow else list(first.values())
        sample = [documents[place] for place in places]
        alone_seconds = 2 * limit / 3 if slow else math.inf
        warm = self._answer(config, parts, sample, 0, alone_seconds)
        warmed = time.perf_counter()
        full = self._answer(
            config,
            parts,
            documents,
            most_in_flight(config),
            limit + (loaded - warmed if slow else 0),
        )
        readings, *_, (lead, count) = (
            max(full, warm, key=lambda part: part[0][-1, 4]) if slow else full
        )
        _, unit, tokens, _ = warm if slow else full
        parts.engine.close()
        del parts
        gc.collect()  # the engine's cache must be gone before the next one makes its own
        window, complete = _window(readings, lead, count)
        spent = window.sum(0)  # prefill seconds, decode seconds, prefill tokens, decode tokens
        rates = spent[:2] / np.maximum(spent[2:], 1)
        costs = _costs(config, unit, tokens, rates, len(documents))
        samples = [(float(part[2:] @ rates), float(part[:2].sum())) for part in window]
        later = sum(cost.seconds for place in places if (cost := costs[place]) is not None)
        times = (float(spent[:2].sum()), samples, loaded - began, max(0.0, warmed - loaded - later))
        complete = complete or (slow and None not in costs)
        # The shorter ones have ended; the others took at least what they have so far.
        if slow and None in costs:
            ended = sum(
                np.array([cost.prefill_tokens, cost.decode_tokens])
                for cost in costs
                if cost is not None
            )
            each = (warm[0][-1, 3:] - ended) / costs.count(None)
            rest = DocumentCost(float(each @ rates), float(each[0]), 0.0, float(each[1]))
            costs = [rest if cost is None else cost for cost in costs]
        return Profile(config.decoding.method, costs, *times, self.facts(config), complete)

    def _answer(
        self,
        config: RunConfig,
        parts: WorkerComponents,
        documents: Sequence[Document],
        in_flight: int,
        limit: float,
    ) -> tuple[Array, UnitState, Tokens, tuple[int, int]]:
        """Answers round after round until the window has ended and each was answered once.
        in_flight: documents; 0: each is answered once, no window. Returns readings, tokens by row,
        and the window.
        """
        ends = time.monotonic() + limit
        # Twice what is in flight behind the window keeps the engine full to its end.
        count = 4 * in_flight + (2 if in_flight else 1) * len(documents)
        stream = [
            _copy(config, documents[n % len(documents)], n, n // len(documents))
            for n in range(count)
        ]
        meter = SteppedMeter(
            config.decoding.method, in_flight, config.decoding.documents_per_prompt
        )
        meter.ready()
        queue = RequestQueue(parts, meter)
        first = set(range(len(documents)))
        with contextlib.closing(queue), queue.unit(_UNIT) as unit:
            queue.count(unit, {copy.index: str(copy.index) for copy in stream})
            meter.answered = lambda: len(unit.answered)
            with queue.answering(unit, stream) as answering:
                while True:
                    ended = answering.done() or time.monotonic() >= ends
                    answered = unit.answered
                    window = meter.window(len(documents))
                    self._done = (min(len(answered), sum(window)), sum(window))
                    if ended or (len(answered) >= sum(window) and first <= answered):
                        break
                    wait([answering], timeout=_POLL_SECONDS)
            with contextlib.suppress(Cancelled):
                answering.result()
            meter.read()  # answers are read after the step that ended them
            # As of now: the engine still steps, and behind this block the unit's seconds are lost
            # ones.
            return np.array(meter.readings), unit, meter.end(_UNIT).categories, window

    def _load(self, model: Any) -> Any:
        from raypd.models.load import load_model

        if self._model is None or self._model[0] != model:
            self._model = None  # first give the memory back
            gc.collect()
            self._model = (model, load_model(model))
        return self._model[1]


def _copy(config: RunConfig, document: Document, index: int, number: int) -> Document:
    """A document once more; a later copy gets its number in front, as vLLM computes no text
    twice.
    """
    fields = document.fields
    column = next(iter(config.text_columns() or config.wanted_columns().values()), "")
    if config.engine.kind == "vllm" and number and isinstance(fields.get(column), str):
        fields = {**fields, column: f"{number} {fields[column]}"}
    return replace(document, index=index, fields=fields)


def _window(readings: Array, lead: int, count: int) -> tuple[Array, bool]:
    """What was metered in equal parts of the window (of all, where time cut it early), `[parts,
    4]`; if it is whole.
    """
    begin, end = np.searchsorted(readings[:, 0], (lead, lead + count))
    begin = 0 if end == len(readings) and begin > end // 2 else begin
    window = readings[begin : end + 1, 1:]
    edges = np.linspace(0, len(window) - 1, max(1, min(_SAMPLES, len(window) // 2)) + 1).astype(int)
    return np.diff(window[edges], axis=0) if len(window) > 1 else np.zeros((0, 4)), bool(
        end < len(readings)
    )


def _costs(
    config: RunConfig, unit: UnitState, tokens: Tokens, rates: Array, count: int
) -> list[DocumentCost | None]:
    """What each document took, on average over its rounds. tokens: by row."""
    answered = sorted(unit.answered)
    models = book.models_of(config)

    def cost(number: int) -> DocumentCost | None:
        rounds = [row for row in answered if row % count == number]
        if not rounds:
            return None
        billed = [
            (tokens.get(UsageKey(str(row), name), {}), model)
            for row in rounds
            for name, model in models.items()
        ]
        fed = {
            name: sum(counts.get(name, 0.0) for counts, _ in billed) / len(rounds)
            for name in TOKENS
        }
        usd = (
            sum(book.token_usd(counts, model) for counts, model in billed if counts)
            / len(rounds)
            / billing.MICRO
        )
        seconds = fed["prefill_tokens"] * float(rates[0]) + fed["decode_tokens"] * float(rates[1])
        first = [record for record in unit.records if record.index == rounds[0]]
        error = next((record.error for record in first if record.error is not None), None)
        rows = [record.columns for record in first if record.error is None]
        return DocumentCost(seconds, **fed, rows=rows, error=error, server_usd=usd)

    return [cost(number) for number in range(count)]


def most_in_flight(config: RunConfig) -> int:
    """Most documents that an engine decodes at the same time."""
    return config.engine.most_seqs * config.decoding.documents_per_prompt


def _processor() -> str:
    with (
        contextlib.suppress(OSError, StopIteration),
        open("/proc/cpuinfo", encoding="utf-8") as file,
    ):
        return next(
            line.partition(":")[2].strip() for line in file if line.startswith("model name")
        )
    return platform.processor() or platform.machine()


class RemoteProfiler(OneWorker):
    def __init__(self, config: RunConfig, verbose: bool) -> None:
        super().__init__(
            config, verbose, lambda share: (Profiler, (share.threads, config.model.has_weights))
        )

    def facts(self, config: RunConfig) -> WorkerFacts:
        """What its machine is. Raises what `Profiler.facts` raises, RunError."""
        return self.call("the worker to measure on", "facts", config, progress=lambda _: None)

    def profile(
        self,
        config: RunConfig,
        documents: Sequence[Document],
        limit: float,
        label: str,
        slow: bool = False,
    ) -> Profile:
        """As `Profiler.profile`, and shows under a label how far it is.

        RunError, too, where the process dies.
        """
        with _display(label) as update:
            return self.call(
                label, "profile", config, list(documents), limit, slow, progress=update
            )


@contextlib.contextmanager
def _display(label: str) -> Iterator[Callable[[tuple[int, int]], None]]:
    """Progress of one profile on stderr, (documents answered, wanted): a bar on a terminal, lines
    elsewhere.
    """
    console = Console(stderr=True)
    lines = ProgressLines()
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
    ]
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    row = bar.add_task(label, total=None, done="")

    def update(counts: tuple[int, int], at_once: bool = False) -> None:
        done, total = counts
        text = f"{done / total:.0%} done" if total else "loading the model, warming up"
        bar.update(row, total=total or None, completed=done, done=text)
        if bar.disable:
            lines.show(f"{label}: {text}", at_once)

    update((0, 0), at_once=True)
    with bar:
        yield update


def check_sample(profiled: Profile) -> None:
    """Raises RunError where the sample gave nothing to go by."""
    done = [cost for cost in profiled.costs if cost is not None]
    failed = [cost for cost in done if cost.error is not None]
    if not done or profiled.seconds <= 0:
        advice = "raise --minutes (of a fit: fit.sample_minutes) or lower engine.max_num_seqs"
        raise RunError(
            f"not one of {counted(len(profiled.costs), 'document')} was done in the time "
            f"given: {advice}"
        )
    if len(failed) == len(done):
        raise RunError(f"every document of the sample failed, the first because: {failed[0].error}")
