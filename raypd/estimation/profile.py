"""Profile a configuration on a sample of documents.

A profile runs the request queue, the engine and the meter of a decode worker, without storage. The
sample is answered round after round. The measured window starts once as many documents have been
answered as the engine decodes at the same time, and it ends after whole rounds, so that neither the
start nor the drain of the engine counts. The cost of a document is its tokens, multiplied by the
seconds per token that the meter shows within the window.
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

import raypd.estimation.sampling as sampling
from raypd.answering import (
    Cancelled,
    ProgressLines,
    RequestQueue,
    TimeLeft,
    UnitState,
    WorkerComponents,
    build,
)
from raypd.billing import Meter, bill as billing, book
from raypd.cluster import OneWorker
from raypd.config import ModelConfig, RunConfig
from raypd.errors import RunError
from raypd.estimation.bootstrap import Array
from raypd.estimation.machines import TOKENS, instance_gpu
from raypd.run import Usage, UsageKey
from raypd.tasks import Document
from raypd.text import counted

# The window is cut into this many parts, whose speeds are compared.
_WINDOW_PARTS = 8
_UNIT = "sample"
_POLL_SECONDS = 0.05
# The columns of `SteppedMeter.readings`.
_ANSWERED = 0
_PREFILL_TOKENS = 3
_DECODE_TOKENS = 4


@dataclass
class DocumentCost:
    """What one document of the sample took, on average over its rounds."""

    seconds: float  # of one worker
    prefill_tokens: float
    shared_tokens: float
    decode_tokens: float
    rows: list[dict[str, Any]] = field(default_factory=list)  # columns of its output rows
    error: str | None = None  # why it has no rows
    server_usd: float = 0.0  # for tokens, to the server of model.endpoint


@dataclass
class WorkerFacts:
    """The machine that a profile is measured on."""

    machine: str  # in words
    # The GPU as instance types name it; None on a CPU, and for a GPU that no instance type has.
    gpu: str | None = None
    # Further (dtype, quantization) of the weights that are worth trying.
    types: list[tuple[str, str]] = field(default_factory=list)
    vllm: bool = False  # whether vLLM is installed


@dataclass
class Profile:
    """The measured speed of one configuration."""

    method: str
    # One per document, in their order; None for a document that was not answered in time.
    costs: list[DocumentCost | None]
    seconds: float  # of the window
    # Per part of the window: (its seconds at the rates of the whole window, its seconds).
    samples: list[tuple[float, float]]
    load_seconds: float  # 0 when the model was loaded before
    # Seconds of the first documents, while instructions are computed and the engine fills up.
    warmup_seconds: float
    worker: WorkerFacts
    complete: bool  # the limit did not cut the window short
    # If it did: the number of answers, and their number in a complete measurement. That is larger
    # than the sample, because documents before the window are answered again in the window.
    answers: tuple[int, int] | None = None

    @property
    def documents_per_second(self) -> float:
        """Documents per second of the sample as it was drawn."""
        seconds = [cost.seconds for cost in self.costs if cost is not None]
        total = sum(seconds)
        if not total:
            return 0.0
        return len(seconds) / total


@dataclass
class _Measurement:
    """What the meter and the queue show after the sample was answered."""

    readings: Array  # [steps, 5]: see `SteppedMeter.readings`
    unit: UnitState
    tokens: Usage
    lead: int  # documents that are answered before the window starts
    count: int  # documents in the window

    @property
    def totals(self) -> Array:
        """Prefill and decode tokens so far, `[2]`."""
        totals: Array = self.readings[-1, _PREFILL_TOKENS:]
        return totals

    @property
    def decode_tokens(self) -> float:
        return float(self.readings[-1, _DECODE_TOKENS])


class SteppedMeter(Meter):
    """A run's meter that also keeps its readings after each step.

    Args:
        method: The decoding method.
        in_flight_limit: The most documents that the engine decodes at the same time; 0 if no window
            is measured.
        documents_per_prompt: Documents that share one prompt.
        options: Further arguments of `Meter`.
    """

    def __init__(
        self, method: str, in_flight_limit: int, documents_per_prompt: int, **options: Any
    ) -> None:
        super().__init__(method=method, **options)
        self._in_flight_limit = in_flight_limit
        self._documents_per_prompt = documents_per_prompt
        self._in_flight = 0
        self.answered: Callable[[], int] = lambda: 0
        # (answered, prefill s, decode s, prefill tokens, decode tokens)
        self.readings: list[tuple[float, ...]] = []

    def step(self, engine: Any, programs: Mapping[str, int]) -> list[Any]:
        """Step the engine, and keep a reading."""
        finished = super().step(engine, programs)
        # An engine that does not list its sequences runs everything that is pending.
        running = len(engine.sequences) or engine.pending
        documents = self._documents_per_prompt * (running + len(finished))
        self._in_flight = max(self._in_flight, min(self._in_flight_limit, documents))
        self.read()
        return finished

    def window(self, sample_size: int) -> tuple[int, int]:
        """Return how many documents come before the window, and how many are in it.

        The window has whole rounds of the sample. It has at least as many documents as are in
        flight, because those end together.
        """
        rounds = math.ceil(max(self._in_flight, sample_size) / sample_size)
        return self._in_flight, sample_size * rounds

    def read(self) -> None:
        """Append a reading of the totals so far."""
        self.readings.append((self.answered(), *self.totals()))


class Profiler:
    """Profiles configurations one after the other, and keeps the last model that it loaded.

    It is used directly or as a Ray actor.
    """

    def __init__(self, threads: int | None = None, weights: bool = False) -> None:
        """Prepare the process.

        Args:
            threads: CPU threads of the engine; None for the default.
            weights: Whether a model will be loaded, so that torch should be imported now.
        """
        self.threads = threads
        self._model: tuple[Any, Any] | None = None
        self._progress = (0, 0)
        if weights:
            # The seconds of this import belong to the start of the process, not to a model's load.
            from raypd.models import load_model  # noqa: F401

    def ready(self) -> bool:
        return True

    def facts(self, config: RunConfig) -> WorkerFacts:
        """Describe this machine.

        Raises:
            ModelError: If it lacks the device that the configuration names.
        """
        model = config.model
        if model.is_fake:
            return WorkerFacts("fake engine")
        if model.endpoint is not None:
            return WorkerFacts(model.endpoint.url)
        from raypd.models import resolve_device, resolve_dtype

        device = resolve_device(model.device)
        dtype = str(resolve_dtype(model.dtype, device)).removeprefix("torch.")
        best_dtype = str(resolve_dtype("auto", device)).removeprefix("torch.")
        vllm = importlib.util.find_spec("vllm") is not None
        if device.type == "cuda":
            return _gpu_facts(model, device, dtype, best_dtype, vllm)
        return _cpu_facts(model, dtype, best_dtype, vllm)

    def progress(self) -> tuple[int, int]:
        """Return (documents answered, documents wanted) of the current profile.

        The first never decreases. The second may grow, because the window begins once the engine
        is full. Both are 0 until the window or, for a slow method, the first pass begins.
        """
        return self._progress

    def profile(
        self,
        config: RunConfig,
        documents: Sequence[Document],
        limit: float = math.inf,
        slow: bool = False,
    ) -> Profile:
        """Profile a configuration.

        Args:
            config: The configuration.
            documents: The sample.
            limit: Seconds that the measurement may take.
            slow: Whether a full engine may finish nothing within the limit. If so, the sample is
                first answered alone, within two thirds of the limit, which gives each document's
                tokens; the seconds per token are taken from whichever of the two decoded more.

        Raises:
            UserError: If the configuration cannot be run.
            EngineBroken: If the engine fails.
        """
        began = time.perf_counter()
        self._progress = (0, 0)
        components = self._build(config)
        loaded = time.perf_counter()
        # The first documents compute the instructions and fill the engine's cache.
        warmup_indices = _warmup_indices(config, documents, slow)
        warmup_documents = [documents[index] for index in warmup_indices]
        warmup_limit = math.inf
        if slow:
            warmup_limit = 2 * limit / 3
        passes = None
        if slow:
            passes = (0, len(documents))
        alone = self._answer(config, components, warmup_documents, 0, warmup_limit, passes)
        warmed = time.perf_counter()
        if slow:
            limit -= warmed - loaded
        passes = (len(documents) if slow else 0, 0)
        full = self._answer(config, components, documents, most_in_flight(config), limit, passes)
        components.engine.close()
        del components
        # The engine's cache must be released before the next engine allocates its own.
        gc.collect()
        speed_source = full
        tokens_source = full
        if slow:
            tokens_source = alone
            if alone.decode_tokens > full.decode_tokens:
                speed_source = alone
        parts, complete = _window(speed_source)
        rates = _rates(parts)
        costs = _costs(config, tokens_source, rates, len(documents))
        warmup_costs = [costs[index] for index in warmup_indices]
        answering_seconds = sum(cost.seconds for cost in warmup_costs if cost is not None)
        if slow:
            # Each document should have been answered once.
            unfinished = costs.count(None)
            complete = unfinished == 0
            answers = (len(costs) - unfinished, len(costs))
            if unfinished:
                costs = _with_unfinished(costs, alone, rates)
        else:
            answers = (int(full.readings[-1, _ANSWERED]), full.lead + full.count)
        return Profile(
            method=config.decoding.method,
            costs=costs,
            seconds=float(parts[:, :2].sum()),
            samples=[(float(part[2:] @ rates), float(part[:2].sum())) for part in parts],
            load_seconds=loaded - began,
            warmup_seconds=max(0.0, warmed - loaded - answering_seconds),
            worker=self.facts(config),
            complete=complete,
            answers=None if complete else answers,
        )

    def _build(self, config: RunConfig) -> WorkerComponents:
        """Build the engine and the task; every document is answered, because a sample is
        repeated.
        """
        load: Callable[[Any], Any] | None = self._load
        if config.engine.kind == "vllm":
            # vLLM needs all of the memory, and loads the model itself.
            self._model = None
            gc.collect()
            load = None
        return build(config, self.threads, load, each=True)

    def _answer(
        self,
        config: RunConfig,
        components: WorkerComponents,
        documents: Sequence[Document],
        in_flight: int,
        limit: float,
        passes: tuple[int, int] | None = None,
    ) -> _Measurement:
        """Answer documents in rounds until the window ends and each was answered at least once.

        Args:
            config: The configuration.
            components: The engine and the task.
            documents: The sample.
            in_flight: Documents that the engine decodes at the same time; 0 to answer each document
                once, without a window.
            limit: Seconds after which it stops.
            passes: The documents of the passes before and after this one, which count in the
                progress; None to show none.
        """
        deadline = time.monotonic() + limit
        stream = _stream(config, documents, in_flight)
        meter = SteppedMeter(
            config.decoding.method, in_flight, config.decoding.documents_per_prompt
        )
        meter.ready()
        queue = RequestQueue(components, meter)
        first_round = set(range(len(documents)))
        with contextlib.closing(queue), queue.unit(_UNIT) as unit:
            queue.count(unit, {copy.index: str(copy.index) for copy in stream})
            meter.answered = lambda: len(unit.answered)
            with queue.answering(unit, stream) as answering:
                while True:
                    ended = answering.done() or time.monotonic() >= deadline
                    answered = unit.answered
                    lead, count = meter.window(len(documents))
                    wanted = lead + count
                    if passes is not None:
                        before, after = passes
                        done = before + min(len(answered), wanted)
                        self._progress = (done, before + wanted + after)
                    if ended or (len(answered) >= wanted and first_round <= answered):
                        break
                    wait([answering], timeout=_POLL_SECONDS)
            with contextlib.suppress(Cancelled):
                answering.result()
            # Answers are read after the step that finished them.
            meter.read()
            # The tokens are taken here because the engine still steps; after this block the seconds
            # of the unit would count as lost.
            tokens = meter.end(_UNIT).categories
            return _Measurement(np.array(meter.readings), unit, tokens, lead, count)

    def _load(self, model: Any) -> Any:
        """Load a model, or return the one that was loaded last if it is the same."""
        from raypd.models import load_model

        if self._model is None or self._model[0] != model:
            # Release the memory of the previous model first.
            self._model = None
            gc.collect()
            self._model = (model, load_model(model))
        return self._model[1]


def _gpu_facts(
    model: ModelConfig, device: Any, dtype: str, best_dtype: str, vllm: bool
) -> WorkerFacts:
    """Describe a GPU and the weights that are worth trying on it."""
    import torch

    from raypd.models import has_fp8

    gpu = torch.cuda.get_device_properties(device)
    types = _plain_types(model, dtype, [best_dtype, "float16"])
    if importlib.util.find_spec("bitsandbytes"):
        for quantization in ("int8", "nf4"):
            if quantization != model.quantization:
                types.append((model.dtype, quantization))
    if best_dtype == "bfloat16" and model.quantization != "fp8" and has_fp8(device):
        types.append((best_dtype, "fp8"))
    instance = instance_gpu(gpu.name, gpu.total_memory / 2**30)
    return WorkerFacts(gpu.name, instance, types, vllm)


def _cpu_facts(model: ModelConfig, dtype: str, best_dtype: str, vllm: bool) -> WorkerFacts:
    """Describe a CPU and the weights that are worth trying on it.

    bitsandbytes is left out: it runs on a CPU, but slowly.
    """
    from raypd.decoding import native

    types = _plain_types(model, dtype, ["float32", best_dtype])
    if best_dtype == "bfloat16" and model.quantization != "w8a8" and native.refusal() is None:
        types.append((best_dtype, "w8a8"))
    return WorkerFacts(_processor(), types=types, vllm=vllm)


def _plain_types(model: ModelConfig, dtype: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the dtypes among `names`, without quantization, that the model does not have yet."""
    types = [(name, "none") for name in dict.fromkeys(names)]
    return [pair for pair in types if pair != (dtype, model.quantization)]


def _warmup_indices(config: RunConfig, documents: Sequence[Document], slow: bool) -> list[int]:
    """Choose the documents that are answered before the window.

    One document per category is enough, because the instruction of each category is computed once.
    If the engine is slow, all documents are answered, which gives their tokens.
    """
    if slow:
        return list(range(len(documents)))
    by_category: dict[str, int] = {}
    for index, document in enumerate(documents):
        category, _ = sampling.kind_of(document, config)
        by_category[category] = index
    return list(by_category.values())


def _stream(config: RunConfig, documents: Sequence[Document], in_flight: int) -> list[Document]:
    """Repeat the sample often enough to keep the engine full until the window ends."""
    count = len(documents)
    if in_flight:
        # Twice as many documents as are in flight come after the window.
        count = 4 * in_flight + 2 * len(documents)
    stream = []
    for index in range(count):
        repetition, row = divmod(index, len(documents))
        stream.append(_copy(config, documents[row], index, repetition))
    return stream


def _copy(config: RunConfig, document: Document, index: int, repetition: int) -> Document:
    """Copy a document under another index.

    With vLLM, a repeated copy starts with the number of its repetition, because vLLM does not
    compute the same text twice.
    """
    fields = document.fields
    column = next(iter(config.text_columns() or config.wanted_columns().values()), "")
    if config.engine.kind == "vllm" and repetition and isinstance(fields.get(column), str):
        fields = {**fields, column: f"{repetition} {fields[column]}"}
    return replace(document, index=index, fields=fields)


def _window(measurement: _Measurement) -> tuple[Array, bool]:
    """Cut the window into parts.

    If the limit came so early that more than half of the readings are before the window, all
    readings count.

    Returns:
        What was metered in each part, `[parts, 4]` (prefill seconds, decode seconds, prefill
        tokens, decode tokens), and whether the window is complete.
    """
    readings = measurement.readings
    lead = measurement.lead
    begin, end = np.searchsorted(readings[:, _ANSWERED], (lead, lead + measurement.count))
    complete = bool(end < len(readings))
    if not complete and begin > end // 2:
        begin = 0
    window = readings[begin : end + 1, 1:]
    if len(window) <= 1:
        return np.zeros((0, 4)), complete
    parts = max(1, min(_WINDOW_PARTS, len(window) // 2))
    edges = np.linspace(0, len(window) - 1, parts + 1).astype(int)
    return np.diff(window[edges], axis=0), complete


def _rates(parts: Array) -> Array:
    """Return the seconds per prefill token and per decode token over all parts, `[2]`."""
    totals = parts.sum(0)
    rates: Array = totals[:2] / np.maximum(totals[2:], 1)
    return rates


def _with_unfinished(
    costs: Sequence[DocumentCost | None], alone: _Measurement, rates: Array
) -> list[DocumentCost | None]:
    """Give unfinished documents an equal share of the tokens that no finished document accounts
    for.

    The shorter documents have finished; the others took at least as much as they have so far.
    """
    finished_tokens = np.zeros(2)
    for cost in costs:
        if cost is not None:
            finished_tokens += (cost.prefill_tokens, cost.decode_tokens)
    tokens = (alone.totals - finished_tokens) / list(costs).count(None)
    unfinished = DocumentCost(
        seconds=float(tokens @ rates),
        prefill_tokens=float(tokens[0]),
        shared_tokens=0.0,
        decode_tokens=float(tokens[1]),
    )
    return [unfinished if cost is None else cost for cost in costs]


def _costs(
    config: RunConfig, measurement: _Measurement, rates: Array, count: int
) -> list[DocumentCost | None]:
    """Compute what each of `count` documents took, on average over its rounds."""
    repetitions: list[list[int]] = [[] for _ in range(count)]
    for row in sorted(measurement.unit.answered):
        repetitions[row % count].append(row)
    return [_cost(config, measurement, rates, rows) for rows in repetitions]


def _cost(
    config: RunConfig, measurement: _Measurement, rates: Array, repetitions: Sequence[int]
) -> DocumentCost | None:
    """Average the cost of one document over its repetitions (rows of the stream)."""
    if not repetitions:
        return None
    models = book.models_of(config.model, config.cascade)
    totals = dict.fromkeys(TOKENS, 0.0)
    micro_usd = 0.0
    for row in repetitions:
        for name, model in models.items():
            # The category of a row is its number.
            counts = measurement.tokens.get(UsageKey(str(row), name), {})
            for kind in TOKENS:
                totals[kind] += counts.get(kind, 0.0)
            if counts:
                micro_usd += book.token_usd(counts, model)
    means = {name: total / len(repetitions) for name, total in totals.items()}
    records = [record for record in measurement.unit.records if record.index == repetitions[0]]
    errors = [record.error for record in records if record.error is not None]
    return DocumentCost(
        seconds=float(means["prefill_tokens"] * rates[0] + means["decode_tokens"] * rates[1]),
        **means,
        rows=[record.columns for record in records if record.error is None],
        error=errors[0] if errors else None,
        server_usd=micro_usd / len(repetitions) / billing.MICRO,
    )


def most_in_flight(config: RunConfig) -> int:
    """Return the most documents that an engine decodes at the same time."""
    return config.engine.most_seqs * config.decoding.documents_per_prompt


def _processor() -> str:
    """Return the name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class RemoteProfiler(OneWorker):
    """A `Profiler` in a separate worker process."""

    def __init__(self, config: RunConfig, verbose: bool) -> None:
        super().__init__(
            config, verbose, lambda share: (Profiler, (share.threads, config.model.has_weights))
        )

    def facts(self, config: RunConfig) -> WorkerFacts:
        """Describe the worker's machine.

        Raises:
            ModelError: If it lacks the device that the configuration names.
            RunError: If the process dies.
        """
        return self.call("the worker to measure on", "facts", config, progress=lambda _: None)

    def profile(
        self,
        config: RunConfig,
        documents: Sequence[Document],
        limit: float,
        label: str,
        slow: bool = False,
    ) -> Profile:
        """Profile a configuration as `Profiler.profile` does, and show the progress.

        Args:
            config: The configuration.
            documents: The sample.
            limit: Seconds that the measurement may take.
            label: The name under which the progress is shown.
            slow: See `Profiler.profile`.

        Raises:
            UserError: If the configuration cannot be run.
            RunError: If the process dies.
        """
        with _display(label, limit) as update:
            return self.call(
                label, "profile", config, list(documents), limit, slow, progress=update
            )


@contextlib.contextmanager
def _display(label: str, limit: float) -> Iterator[Callable[[tuple[int, int]], None]]:
    """Show the progress of one profile on stderr: as a bar on a terminal, as lines elsewhere.

    Args:
        label: The name under which it is shown.
        limit: Seconds that the measurement may take.

    Yields:
        A function that takes (documents answered, documents wanted).
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

    left = TimeLeft(limit)
    share = 0.0

    def update(counts: tuple[int, int], at_once: bool = False) -> None:
        nonlocal share
        answered, wanted = counts
        text = "loading the model, warming up"
        if wanted:
            # More documents may be wanted than before, but the share that is shown never decreases.
            share = max(share, answered / wanted)
            text = f"{share:.0%} done"
            remaining = left.update(answered, wanted)
            if remaining:
                text += f", {remaining}"
        bar.update(row, total=1.0 if wanted else None, completed=share, done=text)
        if bar.disable:
            lines.show(f"{label}: {text}", at_once)

    update((0, 0), at_once=True)
    with bar:
        yield update


def check_sample(
    profiled: Profile, sample_option: str = "--sample", minutes_option: str = "--minutes"
) -> None:
    """Check that a profile measured something.

    Args:
        profiled: The profile.
        sample_option: The user's name for the size of the sample.
        minutes_option: The user's name for the time limit.

    Raises:
        RunError: If no document was answered in time, or every document failed.
    """
    answered = [cost for cost in profiled.costs if cost is not None]
    failed = [cost for cost in answered if cost.error is not None]
    if answered and profiled.seconds <= 0:
        raise RunError(
            f"{counted(len(answered), 'document')} took too little time to measure: raise "
            f"{sample_option}; of the fake model, model.fake sets the costs (step_seconds, "
            "decode_tokens_per_second)"
        )
    if not answered:
        raise RunError(
            f"none of {counted(len(profiled.costs), 'document')} was answered within the "
            f"time limit: raise {minutes_option} or lower engine.max_num_seqs"
        )
    if len(failed) == len(answered):
        raise RunError(f"every document of the sample failed, the first because: {failed[0].error}")
