"""`engine.kind: vllm`: vLLM decodes in place of raypd's engine, in the worker's process.

A program is sent the tokens that vLLM samples and, when it has ended, its request is aborted: the
program alone decides where an answer ends.
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

from raypd.config import RunConfig
from raypd.decoding import ANY_OBJECT, Feed, Finished, Predictions, Program, Sampling, TokenCounts
from raypd.errors import ModelError
from raypd.models.cache import quiet
from raypd.models.device import resolve_device, resolve_dtype
from raypd.models.load import load_model
from raypd.models.source import find_source

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a step is a call, and its seconds are on the bill
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a machine may have several workers
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
}


def check_vllm(config: RunConfig) -> None:
    """Raises ModelError where vLLM is wanted and is not installed here."""
    if config.engine.kind == "vllm" and importlib.util.find_spec("vllm") is None:
        advice = (
            "pip install 'raypd[vllm]' on machines with GPUs; without, `make vllm` makes .venv-vllm"
        )
        raise ModelError(f"engine.kind vllm: vLLM is not installed here: {advice}")


@dataclass
class _VLLMSequence:
    program: Program[Any]
    tag: Any
    counts: TokenCounts = field(default_factory=TokenCounts)


class VLLMEngine:
    """vLLM with prefix caching, an adapter merged into its weights.

    Raises ModelError where it is missing or fails.
    """

    patience: float | None = None
    waiting = ""

    def __init__(self, config: RunConfig, threads: int | None) -> None:
        check_vllm(config)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if threads is not None:
            torch.set_num_threads(threads)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        model = config.model
        sizes = config.engine
        device = resolve_device(config.model.device)
        dtype = str(resolve_dtype(model.dtype, device)).removeprefix("torch.")
        with _whole_model(config) as (model_path, revision):
            arguments: dict[str, Any] = {
                "model": model_path,
                "revision": revision,
                "trust_remote_code": model.trust_remote_code,
                "dtype": dtype,
                "max_num_seqs": sizes.most_seqs,
                "max_num_batched_tokens": max(
                    sizes.batched_tokens(device.type == "cuda"), sizes.most_seqs
                ),
                "enable_prefix_caching": True,
                "disable_log_stats": True,
            }
            try:
                self._vllm = LLMEngine.from_engine_args(EngineArgs(**{**arguments, **sizes.vllm}))
            except Exception as error:
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
                raise ModelError(f"model {model.name!r}: vLLM does not load it: {why}") from error
        self._context = int(self._vllm.model_config.max_model_len)
        self._running: dict[str, _VLLMSequence] = {}
        self._numbers = itertools.count()

    @property
    def pending(self) -> int:
        return len(self._running)

    @property
    def sequences(self) -> list[_VLLMSequence]:
        return list(self._running.values())

    def submit(self, program: Program[Any], *, tag: Any, sampling: Sampling, seed: int) -> None:
        """Hands vLLM the prompt of a program that decodes one token after the other."""
        feed = next(program)
        number = str(next(self._numbers))
        prompt = list(feed.tokens)
        parameters = self._parameters(feed, sampling, seed, self._context - len(prompt))
        self._vllm.add_request(number, {"prompt_token_ids": prompt}, parameters)
        self._running[number] = _VLLMSequence(program, tag, TokenCounts(prefill_tokens=len(prompt)))

    def step(self) -> list[Finished]:
        """One step of vLLM; the programs that ended with it."""
        finished = []
        for output in self._vllm.step():
            sequence = self._running.get(output.request_id)
            if sequence is None:  # its program has ended, and the abort came too late for this step
                continue
            ended = self._advance(sequence, output)
            if ended is not None:
                del self._running[output.request_id]
                if not output.finished:
                    self._vllm.abort_request([output.request_id])
                finished.append(ended)
        return finished

    def close(self) -> None:
        """Release vLLM's memory, so that the process can start another engine."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._running.clear()
        self._vllm.engine_core.shutdown()
        del self._vllm
        cleanup_dist_env_and_memory()

    def _advance(self, sequence: _VLLMSequence, output: Any) -> Finished | None:
        (completion,) = output.outputs
        counts = sequence.counts
        cached = output.num_cached_tokens or 0
        if not counts.decode_tokens:
            counts.prefill_tokens = counts.prefill_tokens - cached
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
        why = RuntimeError(
            f"vLLM ended the answer after {counts.decode_tokens} tokens "
            f"({completion.finish_reason})"
        )
        return Finished(sequence.tag, None, why, counts)

    def _parameters(self, feed: Feed, sampling: Sampling, seed: int, max_tokens: int) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        form = None
        if feed.pattern == ANY_OBJECT:
            form = StructuredOutputsParams(json_object=True)
        elif feed.pattern is not None:
            form = StructuredOutputsParams(regex=feed.pattern)
        elif feed.allowed_token_ids is not None and any(feed.allowed_token_ids):
            raise ValueError(
                "engine.kind vllm cannot hold this answer to its form: set engine.kind: raypd"
            )
        return SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=seed % 2**63 if sampling.temperature else None,
            max_tokens=max_tokens,
            logprobs=0,  # that of the token itself
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=form,
        )


@contextlib.contextmanager
def _whole_model(config: RunConfig) -> Iterator[tuple[str, str | None]]:
    """(folder or Hub id, revision) of the weights; with an adapter a folder that is there for the
    block alone.
    """
    model = config.model
    if model.adapter is None:
        source = find_source(model, weights=True)
        yield source.location, source.revision
        return
    with tempfile.TemporaryDirectory() as folder, quiet():
        loaded = load_model(model.model_copy(update={"device": "cpu"}), purpose="vllm")
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        del loaded
        yield folder, None
