"""What a worker is made of: an engine and a task, with weights or without (`model: fake`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from raypd.config import ModelConfig, RunConfig
from raypd.errors import ModelError
from raypd.tasks.base import Task
from raypd.tasks.distinct import Distinct, gives_the_same

if TYPE_CHECKING:
    from raypd.models.load import LoadedModel


class Engine(Protocol):
    """What a worker needs of raypd.decoding.engine.Engine. sequences: what is being decoded, each with its `counts`."""

    @property
    def pending(self) -> int: ...

    @property
    def sequences(self) -> Sequence[Any]: ...

    def submit(self, program: Any, *, tag: Any, sampling: Any, seed: int) -> Any: ...

    def step(self) -> list[Any]: ...


@dataclass
class WorkerComponents:
    """What a worker is built from."""

    engine: Engine
    task: Task
    sampling: Any


# Makes them in a worker's process, from the run's configuration and the CPU threads that the worker has.
Build = Callable[[RunConfig, int | None], WorkerComponents]


def build(
    config: RunConfig,
    threads: int | None,
    load: Callable[[ModelConfig], LoadedModel] | None = None,
    each: bool = False,
) -> WorkerComponents:
    """Loads the model and makes engine and task.

    Args:
        config: of the run.
        threads: CPU threads of the worker; None: as torch has them.
        load: in place of `load_model`, for a caller that keeps models.
        each: every document is decoded, also one that says what another says.

    Raises:
        ModelError, ConfigError: the model cannot be loaded, or cannot do what the configuration wants.
    """
    if config.model.is_fake:
        from raypd.testing import fake

        return WorkerComponents(*fake.make(config), None)
    parts = _with_weights(config, threads, load)
    if not each and gives_the_same(config):
        parts.task = Distinct(parts.task, config)
    return parts


def _with_weights(
    config: RunConfig, threads: int | None, load: Callable[[ModelConfig], LoadedModel] | None
) -> WorkerComponents:
    if config.model.endpoint is not None:
        from raypd.models import endpoint
        from raypd.tasks import build_task

        tokenizer = endpoint.byte_tokenizer()
        task = build_task(config, tokenizer, endpoint.CONTEXT)
        return WorkerComponents(endpoint.EndpointEngine(config, tokenizer), task, None)
    if config.engine.kind == "vllm":
        return _of_vllm(config, threads)
    import torch

    from raypd.decoding import engine as decoding
    from raypd.decoding.assisted import AssistedEngine
    from raypd.decoding.llama import pack
    from raypd.decoding.sampling import Sampling
    from raypd.models.load import load_model
    from raypd.tasks import build_task
    from raypd.tasks.prompting import end_tokens

    if threads is not None:
        torch.set_num_threads(threads)
    load = load or load_model
    loaded = load(config.model)
    sizes, sampling = config.engine, config.decoding.sampling
    engine: Engine
    if config.decoding.method == "speculative":
        draft_keys = {"name": config.decoding.draft_model, "revision": None, "adapter": None}
        draft = load(config.model.model_copy(update=draft_keys))
        try:
            engine = AssistedEngine(
                loaded.model,
                draft.model,
                draft_tokens=config.decoding.draft_tokens,
                max_new_tokens=config.decoding.max_new_tokens,
                ends=end_tokens(loaded.tokenizer),
                tokenizer=loaded.tokenizer,
                draft_tokenizer=draft.tokenizer,
            )
        except ValueError as error:
            raise ModelError(f"decoding.draft_model: {error}") from None
    else:
        try:
            engine = decoding.Engine(
                pack(loaded.model),
                max_num_seqs=sizes.most_seqs,
                max_num_batched_tokens=sizes.max_num_batched_tokens,
                cache_tokens=sizes.cache_tokens,
                attention=sizes.attention,
                cuda_graphs=sizes.cuda_graphs,
            )
        except ValueError as error:
            raise ModelError(f"engine.attention: {error}") from None
    task = build_task(config, loaded.tokenizer, loaded.context_length, loaded.model)
    return WorkerComponents(engine, task, Sampling(sampling.temperature, sampling.top_k, sampling.top_p))


def _of_vllm(config: RunConfig, threads: int | None) -> WorkerComponents:
    from raypd.decoding.sampling import Sampling
    from raypd.models.load import context_length, load_tokenizer
    from raypd.models.source import find_source, read_config
    from raypd.models.vllm_engine import VLLMEngine
    from raypd.tasks import build_task

    engine = VLLMEngine(config, threads)
    tokenizer = load_tokenizer(config.model)
    context = context_length(config.model.name, read_config(find_source(config.model)), tokenizer)
    sampling = config.decoding.sampling
    task = build_task(config, tokenizer, context)
    return WorkerComponents(engine, task, Sampling(sampling.temperature, sampling.top_k, sampling.top_p))
