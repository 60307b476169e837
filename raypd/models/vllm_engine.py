"""`engine.kind: vllm`: vLLM decodes in place of raypd's engine, in the worker's process.

The engine sends the tokens that vLLM samples to the program, and aborts vLLM's request when the
program has ended. So the program alone decides where an answer ends.
"""

import contextlib
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from raypd.config import EngineConfig, ModelConfig
from raypd.decoding import ANY_OBJECT, Feed, Finished, Predictions, Program, Sampling, TokenCounts
from raypd.errors import ModelError
from raypd.models.cache import quiet
from raypd.models.device import resolve_device, resolve_dtype
from raypd.models.load import load_model
from raypd.models.source import find_source

_ENVIRONMENT = {
    # A step of vLLM is then a call in this process, and its seconds are on the bill.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # A machine may have several workers, so none may bind itself to all cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # GiB of memory.
    "VLLM_CPU_KVCACHE_SPACE": "4",
}
# The number of characters of a vLLM error that a message shows.
_MAX_ERROR = 400


def check_vllm(engine: EngineConfig) -> None:
    """Check that vLLM is installed here if the section `engine` needs it.

    Raises:
        ModelError: If it is needed and missing.
    """
    if engine.kind == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ModelError(
            "engine.kind vllm: vLLM is not installed here: pip install 'raypd[vllm]' on machines "
            "with GPUs; on machines without, `make vllm` makes .venv-vllm"
        )


@dataclass
class _VLLMSequence:
    program: Program[Any]
    tag: Any
    counts: TokenCounts = field(default_factory=TokenCounts)


class VLLMEngine:
    """vLLM with prefix caching. An adapter is merged into the weights."""

    patience: float | None = None
    waiting = ""

    def __init__(self, model: ModelConfig, sizes: EngineConfig, threads: int | None) -> None:
        """Load the model.

        Args:
            model: The section `model`.
            sizes: The section `engine`.
            threads: CPU threads to compute with; None leaves torch's default.

        Raises:
            ModelError: If vLLM is missing or does not load the model.
        """
        check_vllm(sizes)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if threads is not None:
            torch.set_num_threads(threads)
        self._vllm = _load_vllm(model, sizes)
        self._context = int(self._vllm.model_config.max_model_len)
        self._running: dict[str, _VLLMSequence] = {}
        self._request_numbers = itertools.count()

    @property
    def pending(self) -> int:
        return len(self._running)

    @property
    def sequences(self) -> list[_VLLMSequence]:
        return list(self._running.values())

    def submit(self, program: Program[Any], *, tag: Any, sampling: Sampling, seed: int) -> None:
        """Hand vLLM the prompt of a program that decodes one token after the other."""
        feed = next(program)
        request_id = str(next(self._request_numbers))
        prompt = list(feed.tokens)
        parameters = _sampling_parameters(feed, sampling, seed, self._context - len(prompt))
        self._vllm.add_request(request_id, {"prompt_token_ids": prompt}, parameters)
        counts = TokenCounts(prefill_tokens=len(prompt))
        self._running[request_id] = _VLLMSequence(program, tag, counts)

    def step(self) -> list[Finished]:
        """Do one step of vLLM, and return the programs that ended with it."""
        finished = []
        for output in self._vllm.step():
            sequence = self._running.get(output.request_id)
            if sequence is None:
                # The program has ended, but the abort came too late for this step.
                continue
            result = self._advance(sequence, output)
            if result is not None:
                del self._running[output.request_id]
                if not output.finished:
                    self._vllm.abort_request([output.request_id])
                finished.append(result)
        return finished

    def close(self) -> None:
        """Release vLLM's memory, so that the process can start another engine."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._running.clear()
        self._vllm.engine_core.shutdown()
        del self._vllm
        cleanup_dist_env_and_memory()

    def _advance(self, sequence: _VLLMSequence, output: Any) -> Finished | None:
        """Send vLLM's new tokens to the program; return its result if it has ended."""
        (completion,) = output.outputs
        counts = sequence.counts
        if not counts.decode_tokens:
            # With the first token vLLM says how much of the prompt its cache held.
            cached = output.num_cached_tokens or 0
            counts.prefill_tokens -= cached
            counts.shared_tokens = cached
        for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
            counts.decode_tokens += 1
            counts.steps += 1
            try:
                sequence.program.send(Predictions([token], [logprobs[token].logprob]))
            except StopIteration as end:
                return Finished(sequence.tag, end.value, None, counts)
            except Exception as error:
                return Finished(sequence.tag, None, error, counts)
        if not output.finished:
            return None
        sequence.program.close()
        ended_early = RuntimeError(
            f"vLLM ended the answer after {counts.decode_tokens} tokens "
            f"({completion.finish_reason})"
        )
        return Finished(sequence.tag, None, ended_early, counts)


def _load_vllm(model: ModelConfig, sizes: EngineConfig) -> Any:
    """Return vLLM's engine with a model."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    device = resolve_device(model.device)
    dtype = str(resolve_dtype(model.dtype, device)).removeprefix("torch.")
    # vLLM rejects a step that is too small for one token of each sequence.
    batched_tokens = max(sizes.batched_tokens(device.type == "cuda"), sizes.most_seqs)
    with _merged_model(model) as (path, revision):
        arguments: dict[str, Any] = {
            "model": path,
            "revision": revision,
            "trust_remote_code": model.trust_remote_code,
            "dtype": dtype,
            "kv_cache_dtype": model.kv_cache,
            "max_num_seqs": sizes.most_seqs,
            "max_num_batched_tokens": batched_tokens,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            # The configuration may override each of them.
            **sizes.vllm,
        }
        try:
            return LLMEngine.from_engine_args(EngineArgs(**arguments))
        except Exception as error:
            reason = " ".join(str(error).split())[:_MAX_ERROR]
            raise ModelError(
                f"model {model.name!r}: vLLM does not load it: {type(error).__name__}: {reason}"
            ) from error


@contextlib.contextmanager
def _merged_model(model: ModelConfig) -> Iterator[tuple[str, str | None]]:
    """Yield where vLLM finds the weights with the adapter merged into them.

    Yields:
        A folder or Hub id, and its revision. If there is an adapter, it is a temporary folder.
    """
    if model.adapter is None:
        source = find_source(model, weights=True)
        yield source.location, source.revision
        return
    with tempfile.TemporaryDirectory() as folder, quiet():
        loaded = load_model(model.model_copy(update={"device": "cpu"}), purpose="vllm")
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        # vLLM needs the memory.
        del loaded
        yield folder, None


def _sampling_parameters(feed: Feed, sampling: Sampling, seed: int, max_tokens: int) -> Any:
    """Return vLLM's parameters of a request.

    Raises:
        ValueError: If vLLM cannot restrict the answer as the program does.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    structure = None
    if feed.pattern == ANY_OBJECT:
        structure = StructuredOutputsParams(json_object=True)
    elif feed.pattern is not None:
        structure = StructuredOutputsParams(regex=feed.pattern)
    elif feed.allowed_token_ids is not None and any(feed.allowed_token_ids):
        raise ValueError(
            "engine.kind vllm cannot restrict this answer to its form: set engine.kind: raypd"
        )
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=seed % 2**63 if sampling.temperature else None,
        max_tokens=max_tokens,
        # Only the log probability of the sampled token itself.
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=structure,
    )
