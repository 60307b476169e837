"""How fast the engine is on a GPU: W1 (an instruction of 400 tokens in common, documents of 300, 16 attributes of 5 key
and 5 value tokens) with random weights, `hyper_parallel` and `autoregressive` with both kinds of attention and as CUDA
graphs, transformers' own `generate`, and `hyper_parallel` with weights in FP8.

    python -m benchmarks.gpu              # on a GPU: Qwen3-1.7B and Qwen3-8B in bfloat16, about four minutes
    python -m benchmarks.gpu --tiny       # anywhere: that it works, no figures

Needs torch, transformers, triton and numpy, and nothing else. Random weights cost the same time as real ones, and no
method can end early, as every value has its 5 tokens.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.quantized import quantize

GRAPHS = "triton, graphs"
FP8 = "hyper_parallel, fp8"
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "tie_word_embeddings": True},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True},
}  # fmt: skip
LARGE = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Run = Callable[[list[list[int]]], tuple[int, int, int]]  # prompts -> passes, tokens that are fed, tokens that are asked


@dataclass
class Work:
    """Sizes of W1, in tokens but for the attributes."""

    shared: int = 400
    own: int = 300
    attributes: int = 16
    key: int = 5
    value: int = 5

    @property
    def answer(self) -> int:
        """Tokens of an answer that is written token by token."""
        return self.attributes * (self.key + self.value)

    def documents(self, count: int, vocabulary: int, seed: int) -> list[list[int]]:
        """Prompts without keys: an instruction, the same in all, and a document."""
        rng = random.Random(seed)
        instruction = [rng.randrange(vocabulary) for _ in range(self.shared)]
        return [instruction + [rng.randrange(vocabulary) for _ in range(self.own)] for _ in range(count)]

    def slotted(self, tokens: list[int], vocabulary: int) -> SlottedPrompt:
        keys = [n % vocabulary for n in range(self.attributes * self.key)]
        ends = range(len(tokens) + self.key - 1, len(tokens) + len(keys), self.key)
        slots: list[Any] = [Slot(end, Counted(self.value)) for end in ends]  # type: ignore[arg-type]
        return SlottedPrompt(tokens + keys, slots, shared=self.shared)


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


def with_engine(model: PreTrainedModel, work: Work, method: str, attention: str, sizes: dict[str, int]) -> Run:
    graphs = attention == GRAPHS
    engine = Engine(model, **sizes, attention="triton" if graphs else attention, cuda_graphs=graphs)

    def run(prompts: list[list[int]]) -> tuple[int, int, int]:
        before = engine.steps
        if method == "autoregressive":
            plain = (Prompt(tokens, shared=work.shared) for tokens in prompts)
            engine.run(autoregressive(prompt, work.answer, lambda _: False) for prompt in plain)
            own, asked = work.own + work.answer - 1, work.answer
        else:
            slotted = (work.slotted(tokens, model.config.vocab_size) for tokens in prompts)
            engine.run(hyper_parallel(prompt, work.value) for prompt in slotted)
            own, asked = work.own + work.attributes * (work.key + work.value - 1), work.attributes * work.value
        return engine.steps - before, work.shared + len(prompts) * own, len(prompts) * asked

    return run


def with_generate(model: PreTrainedModel, work: Work, batch: int) -> Run:
    model.set_attn_implementation("sdpa")
    settings = {"max_new_tokens": work.answer, "min_new_tokens": work.answer, "do_sample": False, "pad_token_id": 0}

    def run(prompts: list[list[int]]) -> tuple[int, int, int]:
        for start in range(0, len(prompts), batch):
            ids = torch.tensor(prompts[start : start + batch], device=DEVICE)
            model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        fed = len(prompts) * (work.shared + work.own + work.answer - 1)
        return work.answer * -(-len(prompts) // batch), fed, len(prompts) * work.answer

    return run


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


def ceiling(size: int, rounds: int = 20) -> float:
    """Operations a second of a bfloat16 matrix product on random data, the best of three."""
    a, b = torch.randn(2, size, size, device=DEVICE, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(rounds):
            a @ b

    timed(products)
    return 2 * size**3 * rounds / min(timed(products)[0] for _ in range(3))


COLUMNS = ("model", "method", "attention", "documents", "seconds", "documents/s", "passes", "tokens fed/s",
           "% of matmul", "GiB")  # fmt: skip


def row(name: str, model: PreTrainedModel, args: argparse.Namespace, work: Work, method: str, attention: str) -> list:
    """One line of the table: a warm-up, which compiles kernels, and a timed run."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    count = args.documents if method.startswith("hyper_parallel") else max(2, args.documents // 4)
    sizes = {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.max_num_batched_tokens}
    if method == "generate":
        run = with_generate(model, work, args.max_num_seqs)
    else:
        run = with_engine(model, work, method, attention, sizes)
    vocabulary = model.config.vocab_size
    run(work.documents(min(count, args.max_num_seqs), vocabulary, seed=1))
    seconds, (passes, fed, asked) = timed(run, work.documents(count, vocabulary, seed=2))
    head = model.get_output_embeddings().weight.numel()
    body = sum(weight.numel() for part in model.model.layers for weight in part.parameters())
    share = 2 * (body * fed + head * asked) / seconds / args.ceiling  # of attention's own products nothing is counted
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.0f}" if DEVICE.type == "cuda" else "-"
    figures = [f"{seconds:.2f}", f"{count / seconds:.2f}", passes, f"{fed / seconds:.0f}", f"{100 * share:.1f}", peak]
    return [name, method, attention, count, *figures]


def main() -> int:
    """Prints the table; 1 where a line of it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and little work, on any device")
    parser.add_argument("--models", nargs="+", choices=[*SHAPES], default=["Qwen3-1.7B", "Qwen3-8B"])
    parser.add_argument("--documents", type=int, default=256, help="of hyper_parallel; a quarter for the others")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=300, help="no line of the table is begun after so many")
    args = parser.parse_args()
    begin, work = time.monotonic(), Work()
    if args.tiny:
        args.models, args.documents, args.max_num_seqs, args.max_num_batched_tokens = ["tiny"], 4, 2, 64
        work = Work(shared=20, own=15, attributes=3, key=2, value=2)
    elif DEVICE.type != "cuda":
        parser.error("there is no GPU here: --tiny runs anywhere")
    args.ceiling = ceiling(256 if args.tiny else 8192)
    packages = {"torch": torch.__version__, "transformers": transformers.__version__}
    if importlib.util.find_spec("triton"):
        packages["triton"] = importlib.metadata.version("triton")
    card = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"
    print(f"{card}; {packages}; bfloat16 matmul {args.ceiling / 1e12:.1f} TFLOP/s; {work}", flush=True)
    attentions = ["sdpa"]
    if "triton" in packages and (DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"):
        attentions += ["triton", GRAPHS] if DEVICE.type == "cuda" else ["triton"]
    todo = [(method, attention) for method in ("hyper_parallel", "autoregressive") for attention in attentions]
    todo.append(("generate", "sdpa"))
    if DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9):
        todo += [(FP8, attention) for attention in attentions]  # the last, as the weights are changed
    lines: list[list[Any]] = []
    failed = 0
    for name in args.models:
        config = Qwen3Config(**(SHAPES[name] if name == "tiny" else {**LARGE, **SHAPES[name]}))
        torch.manual_seed(0)
        with DEVICE:
            model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.generation_config.eos_token_id = None
        for method, attention in todo:
            if time.monotonic() - begin > args.seconds:
                lines.append([name, method, attention, "no time left"])
            else:
                try:
                    if method == FP8:
                        quantize(model, "fp8")  # what is quantized stays as it is
                    lines.append(row(name, model, args, work, method, attention))
                except Exception as error:  # the others are still worth their time
                    lines.append([name, method, attention, f"failed: {type(error).__name__}: {error}"[:300]])
                    failed = 1
            print("...", *lines[-1], flush=True)
            gc.collect()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
        del model
    print("\n| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for line in lines:
        print("| " + " | ".join(map(str, line)) + " |")
    return failed


if __name__ == "__main__":
    sys.exit(main())
