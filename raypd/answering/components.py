"""What a worker consists of: an engine and a task, built from a run's configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from raypd.answering.cascade_engine import CascadeEngine
from raypd.config import MOST_REQUESTS, MOST_SEQS, CascadeConfig, ModelConfig, RunConfig
from raypd.decoding import EngineContract
from raypd.errors import ModelError, raised_as
from raypd.tasks import Cascade, Distinct, Task, build_task, gives_the_same, task_alone

if TYPE_CHECKING:
    from raypd.decoding import engine as decoding
    from raypd.models import LoadedModel

# The fewest programs in flight if engine.max_num_seqs is auto.
_MIN_SEQS = 64


@dataclass
class WorkerComponents:
    """What answers documents.

    Attributes:
        engine: Decodes the programs of the task's requests.
        task: Turns documents into requests, and answers into records.
        sampling: How the engine draws tokens unless a request says otherwise.
        max_num_seqs: `engine.max_num_seqs` of the configuration.
    """

    engine: EngineContract
    task: Task
    sampling: Any
    max_num_seqs: int | Literal["auto"]

    def capacity(self, previous: int = 0) -> int:
        """Return how many programs the engine should hold.

        With `auto` it is twice the number of sequences that the engine decodes, and never falls
        below `previous`.
        """
        if self.max_num_seqs != "auto":
            return self.max_num_seqs
        return min(MOST_SEQS, max(_MIN_SEQS, previous, 2 * len(self.engine.sequences)))


# Builds the components in a worker's process from the run's configuration and the number of CPU
# threads that the worker has.
Build = Callable[[RunConfig, int | None], WorkerComponents]
# Replaces load_model for a caller that keeps models between runs.
Load = Callable[[ModelConfig], "LoadedModel"]


def build(
    config: RunConfig,
    threads: int | None,
    load: Load | None = None,
    each: bool = False,
    share: float = 1.0,
) -> WorkerComponents:
    """Load the model, or both models of a cascade, and make the engine and the task.

    Args:
        config: The run's configuration.
        threads: CPU threads to compute with; None leaves torch's default.
        load: Used instead of `load_model`.
        each: Whether to answer every document, even if its text equals another document's.
        share: Share of a GPU's free memory that the KV cache may take.

    Raises:
        ModelError, ConfigError: If the model cannot be loaded or does not fit the configuration.
    """
    second = config.second_model()
    if config.model.is_fake and second is None:
        from raypd.testing import fake

        engine, fake_task = fake.make(config)
        return WorkerComponents(engine, fake_task, None, config.engine.max_num_seqs)
    if second is not None:
        parts = _cascade(config, second, threads, load, share)
        runs = [config, second]
    else:
        parts = _single(config, threads, load, share)
        runs = [config]
    if not each and all(gives_the_same(run.task, run.decoding) for run in runs):
        parts.task = Distinct(parts.task, config.task, config.input)
    uses_batch_api = any(
        run.model.endpoint is not None and run.model.endpoint.batch for run in runs
    )
    if uses_batch_api:
        # Answers arrive only after a batch has been sent, so the batch takes all requests.
        parts.max_num_seqs = MOST_REQUESTS
    return parts


def _cascade(
    config: RunConfig, second: RunConfig, threads: int | None, load: Load | None, share: float
) -> WorkerComponents:
    alone = config.model_copy(update={"cascade": CascadeConfig()})
    # The first model leaves half of a GPU's memory to the second one's weights and cache.
    first_parts = build(alone, threads, load, each=True, share=0.5)
    second_parts = build(second, threads, load, each=True, share=1.0)
    task = Cascade(
        first_parts.task,
        second_parts.task,
        config.cascade,
        config.extraction.categories,
        second_parts.sampling,
    )
    return WorkerComponents(
        CascadeEngine(first_parts.engine, second_parts.engine),
        task,
        first_parts.sampling,
        config.engine.max_num_seqs,
    )


def _single(
    config: RunConfig, threads: int | None, load: Load | None, share: float
) -> WorkerComponents:
    engine: EngineContract
    max_num_seqs = config.engine.max_num_seqs
    if config.model.endpoint is not None:
        from raypd.models import ENDPOINT_CONTEXT, BatchEngine, EndpointEngine, byte_tokenizer

        tokenizer = byte_tokenizer()
        model = config.model
        sizes = config.engine
        if config.model.endpoint.batch:
            run = config.fingerprint()
            engine = BatchEngine(model, config.decoding, sizes, tokenizer, run)
        else:
            engine = EndpointEngine(model, config.decoding, sizes, tokenizer)
        task = build_task(config, tokenizer, ENDPOINT_CONTEXT)
        return WorkerComponents(engine, task, None, max_num_seqs)

    from raypd.decoding import Sampling

    drawn = config.decoding.sampling
    sampling = Sampling(drawn.temperature, drawn.top_k, drawn.top_p)
    if config.engine.kind == "vllm":
        from raypd.models import VLLMEngine

        engine = VLLMEngine(config.model, config.engine, threads)
        return WorkerComponents(engine, task_alone(config), sampling, max_num_seqs)
    engine, task = _own_engine(config, threads, load, share)
    return WorkerComponents(engine, task, sampling, max_num_seqs)


def warm_up(engine: "decoding.Engine", tokens: int) -> None:
    """Compile kernels and select matrix-product algorithms before a worker is ready.

    This runs one full pass of `tokens` tokens and some small passes.
    """
    from raypd.decoding import Prompt, autoregressive

    lengths = (max(1, tokens - 20), 17, 1)
    engine.run(autoregressive(Prompt([0] * length), 3, lambda _: False) for length in lengths)


def _own_engine(
    config: RunConfig, threads: int | None, load: Load | None, share: float
) -> tuple[EngineContract, Task]:
    """Make raypd's own engine, and the task with the model's tokenizer."""
    import torch

    from raypd.decoding import engine as decoding, pack_model
    from raypd.models import load_model

    if threads is not None:
        torch.set_num_threads(threads)
    load = load or load_model
    loaded = load(config.model)
    sizes = config.engine
    loaded.packed = loaded.packed or pack_model(loaded.model, sizes.stable)
    share *= min(1.0, config.cluster.gpus_per_worker or 1.0)
    drafter = None
    if config.decoding.draft_model is not None:
        from raypd.models import load_draft_model

        # The draft model is loaded first: the main model's cache takes all memory that is left.
        drafter = load_draft_model(config.model, config.decoding, sizes, loaded, load, share)
    with raised_as(ModelError, "engine", ValueError):
        engine = decoding.Engine(
            loaded.packed,
            max_num_seqs=sizes.most_seqs,
            max_num_batched_tokens=sizes.batched_tokens(loaded.device.type == "cuda"),
            cache_tokens=sizes.cache_tokens,
            memory_share=share,
            attention=sizes.attention,
            cuda_graphs=sizes.cuda_graphs,
            stable=sizes.stable,
            kv_cache=config.model.kv_cache,
        )
    if loaded.device.type == "cuda":
        warm_up(engine, min(engine.budget.limit, loaded.context_length // 2))
    task = build_task(config, loaded.tokenizer, loaded.context_length, loaded.model, drafter)
    return engine, task
