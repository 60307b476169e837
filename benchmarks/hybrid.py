"""How much faster hyper-parallel decoding is on a hybrid model, on a CPU with random weights.

The model has the layers of Qwen3.5 (three gated delta nets for each layer of attention), in half
the width of its smallest size, and 113 million weights. W1 and W6 are those of
`benchmarks.gpu.works`, with fewer documents and questions. All methods run in turn inside one
process, and each has an engine of its own over the same weights.

    python -m benchmarks.hybrid
    python -m benchmarks.hybrid --documents 8 --repeats 1
    python -m benchmarks.hybrid --quantization w8a8
    OMP_NUM_THREADS=1 python -m benchmarks.hybrid --threads 1     # on a machine that is not idle

Random weights take the same time as real ones, and no method can end early, because every value has
exactly its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.works import Counted, Questions, Work, never
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.guided import guided
from raypd.decoding.pack import pack_model
from raypd.decoding.program import Program
from raypd.decoding.quantized import quantize

SHAPE: dict[str, Any] = {
    "vocab_size": 65_536,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# W1 with `decoding.skeleton: slots`, where a value has a token of its own in place of a key.
SLOTS = Work(key=1)
# W6 with fewer questions, so that it takes seconds on two cores.
QUESTIONS = Questions(shared=400, own=300, attributes=16, key=20, value=10)


class Held(Counted):
    """The automaton of a value that `guided` decodes: nothing is forced, and nothing taken back."""

    def forced(self, state: int, left: int) -> list[int]:
        return []

    def closing(self, tokens: list[int]) -> list[int]:
        return tokens[-1:]

    def behind(self, tokens: list[int]) -> int:
        return 0


Programs = Callable[[], Iterator[Program[Any]]]


def make_model(dtype: torch.dtype, quantization: str) -> PreTrainedModel:
    """Return a hybrid with random weights.

    Args:
        dtype: Of the weights.
        quantization: "none" or "w8a8".
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    if quantization != "none":
        quantize(model, quantization)
    return model


def programs_of(documents: int, vocabulary: int) -> dict[str, Programs]:
    """Return what each method is asked.

    Args:
        documents: Documents of W1 and contexts of W6.
        vocabulary: Tokens of the model.
    """
    work = Work()
    texts = work.draw(documents, vocabulary, seed=1)
    contexts = QUESTIONS.draw(max(1, documents // 4), vocabulary, seed=2)

    def answers() -> Iterator[Program[Any]]:
        requests, length = work.whole_requests(texts, vocabulary)
        for tokens in requests:
            yield autoregressive(Prompt(tokens, work.shared), length, never)

    def in_order() -> Iterator[Program[Any]]:
        for tokens in texts:
            prompt = work.slotted(tokens, vocabulary)
            for slot in prompt.slots:
                slot.grammar = Held(work.value)  # type: ignore[assignment]
            yield guided(prompt, work.value)

    def values() -> Iterator[Program[Any]]:
        for tokens in texts:
            yield work.program(tokens, vocabulary, isolate=True)

    def slots() -> Iterator[Program[Any]]:
        for tokens in texts:
            yield SLOTS.program(tokens, vocabulary, isolate=True)

    def apart() -> Iterator[Program[Any]]:
        shared = QUESTIONS.shared + QUESTIONS.own
        requests, length = QUESTIONS.single_requests(contexts, vocabulary)
        for tokens in requests:
            yield autoregressive(Prompt(tokens, shared), length, never)

    def together() -> Iterator[Program[Any]]:
        for tokens in contexts:
            yield QUESTIONS.program(tokens, vocabulary, isolate=True)

    return {
        "W1 autoregressive": answers,
        "W1 guided": in_order,
        "W1 hyper_parallel, keys": values,
        "W1 hyper_parallel, slots": slots,
        "W6 autoregressive, a prompt a question": apart,
        "W6 intra_prompt": together,
    }


def main(
    documents: Annotated[int, typer.Option(min=1, help="Documents of W1")] = 24,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each method")] = 3,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    quantization: Annotated[str, typer.Option(help="none or w8a8")] = "none",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; all if not given")
    ] = None,
    only: Annotated[str, typer.Option(help="Methods whose names contain this")] = "",
) -> None:
    """Print the seconds of each method, and its ratio to the first one of its work."""
    if threads is not None:
        torch.set_num_threads(threads)
    model = make_model(getattr(torch, dtype), quantization)
    packed = pack_model(model)
    works = programs_of(documents, SHAPE["vocab_size"])
    works = {name: programs for name, programs in works.items() if only in name}
    engines = {name: Engine(packed) for name in works}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, programs in works.items():
            engine = engines[name]
            while engine.scheduler.evict_prefix():
                pass  # Each run reads the instruction anew.
            began = time.perf_counter()
            cpu_began = time.process_time()
            engine.run(programs())
            if turn:  # The first turn allocates memory.
                seconds[name].append(time.perf_counter() - began)
                cpu_seconds[name].append(time.process_time() - cpu_began)
    firsts: dict[str, tuple[float, float]] = {}
    for name in works:
        wall = median(seconds[name])
        cpu = median(cpu_seconds[name])
        first_wall, first_cpu = firsts.setdefault(name.split()[0], (wall, cpu))
        print(
            f"{name:40} {wall:7.2f} s, {cpu:7.2f} CPU s; faster than the first: "
            f"{first_wall / wall:.2f} x, {first_cpu / cpu:.2f} x in CPU s"
        )


if __name__ == "__main__":
    typer.run(main)
