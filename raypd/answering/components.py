"""What a worker is made of: an engine (of a cascade's two models as one) and a task, with weights
or without.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from raypd.config import CascadeConfig, ModelConfig, RunConfig
from raypd.config.model import MOST_REQUESTS, MOST_SEQS
from raypd.errors import ModelError, raised_as
from raypd.tasks import build_task, task_alone
from raypd.tasks.base import Task
from raypd.tasks.cascade import Cascade, SecondProgram
from raypd.tasks.distinct import Distinct, gives_the_same

if TYPE_CHECKING:
    from raypd.decoding import engine as decoding
    from raypd.models.load import LoadedModel

_LEAST_SEQS = 64  # of engine.max_num_seqs: auto


class Engine(Protocol):
    """What a worker needs of raypd.decoding.engine.Engine. sequences: what is being decoded, each
    with its `counts`.
    """

    @property
    def pending(self) -> int: ...

    @property
    def sequences(self) -> Sequence[Any]: ...

    def submit(self, program: Any, *, tag: Any, sampling: Any, seed: int) -> Any: ...

    def step(self) -> list[Any]: ...


class CascadeEngine:
    """Gives each program to the engine of its model; a step is one of each that has something to
    do.
    """

    def __init__(self, first: Engine, second: Engine) -> None:
        self.first = first
        self.second = second

    @property
    def pending(self) -> int:
        return self.first.pending + self.second.pending

    @property
    def sequences(self) -> Sequence[Any]:
        return [*self.first.sequences, *self.second.sequences]

    def submit(self, program: Any, *, tag: Any, sampling: Any, seed: int) -> None:
        if isinstance(program, SecondProgram):
            self.second.submit(program.program, tag=tag, sampling=sampling, seed=seed)
        else:
            self.first.submit(program, tag=tag, sampling=sampling, seed=seed)

    def step(self) -> list[Any]:
        busy = [engine for engine in (self.first, self.second) if engine.pending]
        if all(hasattr(engine, "patience") for engine in busy):
            seconds = 1.0 / max(1, len(busy))
        else:
            seconds = 0.0
        for engine in busy:
            if hasattr(engine, "patience"):  # a server's, which must not keep a model here waiting
                engine.patience = seconds
        return [result for engine in busy for result in engine.step()]


@dataclass
class WorkerComponents:
    """What a worker is built from. max_num_seqs: engine.max_num_seqs of the configuration."""

    engine: Engine
    task: Task
    sampling: Any
    max_num_seqs: int | Literal["auto"]

    def capacity(self, before: int = 0) -> int:
        """Programs that the engine is to hold; for `auto` at least `before`, and as many again as
        it decodes.
        """
        if self.max_num_seqs != "auto":
            return self.max_num_seqs
        return min(MOST_SEQS, max(_LEAST_SEQS, before, 2 * len(self.engine.sequences)))


# Makes them in a worker's process, from the run's configuration and the CPU threads that the worker
# has.
Build = Callable[[RunConfig, int | None], WorkerComponents]
# In place of load_model, for a caller that keeps models.
Load = Callable[[ModelConfig], "LoadedModel"]


def build(
    config: RunConfig,
    threads: int | None,
    load: Load | None = None,
    each: bool = False,
    share: float = 1.0,
) -> WorkerComponents:
    """Loads the model, or both of a cascade; makes engine and task.

    Raises ModelError, ConfigError. threads: of the CPU (None: torch's). each: also a document that
    says what another says. share: of a GPU's free memory, for the cache.
    """
    engine: Engine
    task: Task
    if (second := config.second_model()) is not None:
        alone = config.model_copy(update={"cascade": CascadeConfig()})
        # The first leaves half of a GPU's memory to the second's weights and cache.
        parts = [
            build(run, threads, load, each=True, share=share)
            for run, share in ((alone, 0.5), (second, 1.0))
        ]
        engine = CascadeEngine(parts[0].engine, parts[1].engine)
        sampling = parts[0].sampling
        task = Cascade(parts[0].task, parts[1].task, config, parts[1].sampling)
    elif config.model.is_fake:
        from raypd.testing import fake

        return WorkerComponents(*fake.make(config), None, config.engine.max_num_seqs)
    elif config.model.endpoint is not None:
        from raypd.models import endpoint, endpoint_batch

        tokenizer = endpoint.byte_tokenizer()
        if config.model.endpoint.batch:
            engine = endpoint_batch.BatchEngine(config, tokenizer)
        else:
            engine = endpoint.EndpointEngine(config, tokenizer)
        sampling = None
        task = build_task(config, tokenizer, endpoint.CONTEXT)
    else:
        from raypd.decoding.sampling import Sampling

        if config.engine.kind == "vllm":
            from raypd.models.vllm_engine import VLLMEngine

            engine = VLLMEngine(config, threads)
            task = task_alone(config)
        else:
            engine, task = _of_raypd(config, threads, load, share)
        drawn = config.decoding.sampling
        sampling = Sampling(drawn.temperature, drawn.top_k, drawn.top_p)
    runs = [config] if second is None else [config, second]
    if not each and all(map(gives_the_same, runs)):
        task = Distinct(task, config)
    # Of a batch API all that there is, since nothing comes back before a batch is sent.
    batches = any(run.model.endpoint is not None and run.model.endpoint.batch for run in runs)
    return WorkerComponents(
        engine, task, sampling, MOST_REQUESTS if batches else config.engine.max_num_seqs
    )


def warm_up(engine: "decoding.Engine", tokens: int) -> None:
    """Compiles kernels and chooses products before a worker is ready, with a full pass and with
    small ones.
    """
    from raypd.decoding.methods.autoregressive import Prompt, autoregressive

    engine.run(
        autoregressive(Prompt([0] * n), 3, lambda _: False) for n in (max(1, tokens - 20), 17, 1)
    )


def _of_raypd(
    config: RunConfig, threads: int | None, load: Load | None, share: float
) -> tuple[Engine, Task]:
    import torch

    from raypd.decoding import engine as decoding
    from raypd.decoding.pack import pack
    from raypd.models.load import load_model

    if threads is not None:
        torch.set_num_threads(threads)
    load = load or load_model
    loaded = load(config.model)
    sizes = config.engine
    loaded.packed = loaded.packed or pack(loaded.model, sizes.stable)
    with raised_as(ModelError, "engine", ValueError):
        engine = decoding.Engine(
            loaded.packed,
            max_num_seqs=sizes.most_seqs,
            max_num_batched_tokens=sizes.batched_tokens(loaded.device.type == "cuda"),
            cache_tokens=sizes.cache_tokens,
            memory_share=share * min(1.0, config.cluster.gpus_per_worker or 1.0),
            attention=sizes.attention,
            cuda_graphs=sizes.cuda_graphs,
            stable=sizes.stable,
        )
    if loaded.device.type == "cuda":
        warm_up(engine, min(engine.budget.most, loaded.context_length // 2))
    return engine, build_task(config, loaded.tokenizer, loaded.context_length, loaded.model)
