"""raypd's side of the comparison, and the machine's ceiling.

python -m benchmarks.engines JOB.json

Each has a process of its own like every other engine, driven by lines on standard input
(`peers.serve`). Only the engine is timed, over prompts that are token ids already; answers are read
afterwards.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

import raypd
from benchmarks.peers import Loaded, serve
from benchmarks.works import documents_of
from raypd.config import ModelConfig
from raypd.config.load import make_config
from raypd.decoding.attention import avx512
from raypd.decoding.attention.step import AttentionLayer, PrefixGroup, Span, Step
from raypd.decoding.engine import Engine
from raypd.decoding.kv_cache import KVCache, SlotAllocator
from raypd.decoding.linear import is_possible, pack_linears
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, intra_prompt
from raypd.decoding.pack import pack_model
from raypd.decoding.program import Program
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.visibility import one_segment
from raypd.models.load import LoadedModel, load_model
from raypd.tasks import build_task
from raypd.tasks.base import Record, Request

_TEXT_TOKENS = 2048  # of the text with which attention is measured
_ROUNDS = 8  # of which the fastest counts
_PRODUCT_ROWS = (256, 1024, 2048)

Reader = Callable[[Any], list[Any]]


class Given:
    """The automaton of a slot whose value is given, or is any tokens of a fixed length."""

    def __init__(self, length: int, tokens: list[int] | None = None) -> None:
        self.length = length
        self._allowed: list[AllowedTokens] | None = None
        if tokens is not None:
            self._allowed = [AllowedTokens(np.array([token])) for token in tokens]

    def allowed(self, state: int, left: int | None) -> AllowedTokens | None:
        return None if self._allowed is None else self._allowed[state]

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def done(self, state: int) -> bool:
        return state >= self.length

    def completion(self, state: int) -> str | None:
        return None


Programs = Iterator[tuple[Program[Any], Reader]]


def _programs(work: dict[str, Any], guided: bool, loaded: LoadedModel) -> Callable[[], Programs]:
    """Return a function that makes the programs of a work, each with a reader of its answer.

    It is called for every run, because a program can run only once.
    """
    inputs = work["raypd"]
    if "run" in inputs:
        return _task_programs(work, guided, loaded)

    def programs() -> Programs:
        for prompt in inputs.get("prompts", []):
            yield _slotted(prompt), _no_answers
        for tree in inputs.get("trees", []):
            questions = [Question(tokens, _never) for tokens in tree["questions"]]
            prompt_tree = PromptTree(tree["shared"], [Context(tree["context"], questions)])
            yield intra_prompt(prompt_tree, tree["most"]), _no_answers

    return programs


def _no_answers(answer: Any) -> list[Any]:
    """Read nothing, because the answers are random or given."""
    return []


def _never(tokens: Any) -> bool:
    """Let an answer take all the tokens that it may have."""
    return False


def _slotted(prompt: dict[str, Any]) -> Program[Any]:
    """Return the program of a prompt whose values are given, or have given lengths."""
    rules: list[Any] = []
    if prompt.get("values") is not None:
        rules += [Given(len(value), value) for value in prompt["values"]]
    else:
        rules += [Given(length) for length in prompt["lengths"]]
    slots = [Slot(end, rule) for end, rule in zip(prompt["ends"], rules, strict=True)]
    slotted = SlottedPrompt(prompt["tokens"], slots, prompt["shared"])
    return hyper_parallel(slotted, max(rule.length for rule in rules))


def _task_programs(
    work: dict[str, Any], guided: bool, loaded: LoadedModel
) -> Callable[[], Programs]:
    """Return a function that makes the programs of a task over the rows of a work."""
    inputs = work["raypd"]
    if guided:
        method = "guided"
    elif work["unit"] == "questions":
        method = "intra_prompt"
    else:
        method = "hyper_parallel"
    config = make_config(inputs["run"], [f"decoding.method={method}"])
    task = build_task(config, loaded.tokenizer, loaded.context_length)
    documents = documents_of(inputs["rows"])

    def programs() -> Programs:
        for request in task.plan(documents):
            assert not isinstance(request, Record)
            yield request.program, partial(_read, request)

    return programs


def _read(request: Request, answer: Any) -> list[Any]:
    """Return what the records of a request answer: values by attribute, or texts."""
    answers: list[Any] = []
    for record in request.finish(answer):
        if not isinstance(record, Record):
            continue
        if "values" in record.columns:
            values = record.columns["values"]
            answers.append({value["name"]: value["value"] for value in values})
        else:
            answers.append(record.columns.get("answer"))
    return answers


def load_raypd(job: dict[str, Any], work: dict[str, Any]) -> Loaded:
    """Load raypd's engine.

    Args:
        job: The engine's job, as `peers.serve` reads it.
        work: The work of the job.
    """
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    loaded = load_model(ModelConfig(name=job["model"], dtype=job["dtype"], device=job["device"]))
    engine = Engine(pack_model(loaded.model))
    programs = _programs(work, job["guided"], loaded)

    def run(requests: list[Any]) -> dict[str, Any]:
        # There may be fewer requests than programs, in the warm-up.
        batch = [item for item, _ in zip(programs(), requests, strict=False)]
        answers: list[Any] = [None] * len(batch)
        fed = 0
        later = 0  # decoded tokens that are fed
        decoded = 0
        began = time.perf_counter()
        for number, (program, _) in enumerate(batch):
            engine.submit(program, tag=number)
        while engine.pending:
            for done in engine.step():
                if done.error is not None:
                    raise done.error
                answers[done.tag] = done.answer
                # The first token of each value is sampled at the end of the prompt, so that one
                # token per value is not fed. A guided record counts as one value.
                values = 1 if job["guided"] else len(done.answer)
                fed_later = done.counts.decode_tokens - values
                fed += done.counts.prefill_tokens + fed_later
                later += fed_later
                decoded += sum(len(value.tokens) for value in done.answer)
        seconds = time.perf_counter() - began
        read_answers: list[Any] = []
        for (_, read), answer in zip(batch, answers, strict=True):
            read_answers += read(answer)
        return {
            "fed": fed,
            "later": later,
            "decoded": decoded,
            "seconds": seconds,
            "answers": read_answers,
        }

    def forget() -> None:
        """Drop the shared prefixes; the cache keeps its size."""
        engine.scheduler.prefixes.clear()
        engine.cache.allocator = SlotAllocator(engine.cache.allocator.slots)

    return run, forget


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass(frozen=True)
class _Attention:
    """One way to compute attention in one layer.

    Attributes:
        pairs: The number of (token, key that it sees).
        call: Computes it once.
    """

    pairs: int
    call: Callable[[], object]


def _attentions(
    config: Any, dtype: torch.dtype, device: torch.device, in_c: bool
) -> list[_Attention]:
    """Return the ways to compute attention of a text that follows a text of the same length.

    torch's attends to the first text alone. raypd's function in C is added if `in_c`.
    """
    n = _TEXT_TOKENS
    dim = _head_dim(config)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(n, heads, dim, dtype=dtype, device=device)

    query = random(config.num_attention_heads)
    key = random(config.num_key_value_heads)
    value = random(config.num_key_value_heads)
    # [1, heads, tokens, head_dim].
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (query, key, value))

    def with_torch() -> object:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    attentions = [_Attention(n * n, with_torch)]
    if in_c:
        slots = np.arange(n, 2 * n)
        keys = np.zeros((3, n), dtype=np.int64)  # position, segment, step
        keys[0] = slots
        group = PrefixGroup([Span(0, n, n, n, one_segment(), keys, keys, n)], 0, n)
        step = Step(
            KVCache(2 * n, None, device),
            [group],
            torch.from_numpy(slots),
            torch.arange(0),
            avx512.attend,
        )
        layer = AttentionLayer(0, dim**-0.5)

        def with_c() -> object:
            return avx512.attend(step, layer, query, key, value)

        attentions.append(_Attention(n * n + n * (n + 1) // 2, with_c))
    return attentions


def load_ceiling(job: dict[str, Any]) -> Loaded:
    """Prepare to measure the ceiling of the machine.

    It is the fastest product of activations with one of the model's own matrices, and the fastest
    attention of a text, by torch or by raypd.

    Args:
        job: The engine's job, as `peers.serve` reads it.
    """
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    config = AutoConfig.from_pretrained(job["model"]).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings().weight
    embeddings = model.get_input_embeddings().weight
    layer_weights = sum(weight.numel() for weight in model.parameters()) - head.numel()
    if embeddings is not head:
        layer_weights -= embeddings.numel()
    shapes = {
        weight.shape
        for weight in model.parameters()
        if weight.dim() == 2 and weight.shape != head.shape
    }
    device = torch.device("cuda" if torch.cuda.is_available() and job["device"] != "cpu" else "cpu")
    dtype = getattr(torch, job["dtype"])
    in_c = avx512.is_best(device, torch.bfloat16)
    attentions = _attentions(config, dtype, device, in_c)
    # The operations of a token that sees a key, in all layers: a product with the key, and one with
    # the value.
    pair = 4 * config.num_attention_heads * _head_dim(config) * config.num_hidden_layers

    @torch.inference_mode()
    def run(requests: list[Any]) -> dict[str, Any]:
        flops = 0.0
        for rows in _PRODUCT_ROWS:
            for shape in shapes:
                flops = max(flops, _product_flops(rows, shape, device, dtype, in_c))
        # Per second, in one layer.
        pairs = max(way.pairs / _fastest([way.call], device) for way in attentions)
        return {
            "flops": flops,
            "layers": layer_weights,
            "head": head.numel(),
            "pair": pair,
            "pair_flops": pair / config.num_hidden_layers * pairs,
            "answers": [],
            "decoded": 0,
        }

    return run, _nothing


def _nothing() -> None:
    """Empty no cache, because there is none."""


def _product_flops(
    rows: int, shape: torch.Size, device: torch.device, dtype: torch.dtype, in_c: bool
) -> float:
    """Return the operations per second of a product with a matrix, plain or packed."""
    out, into = shape
    x = torch.randn(rows, into, device=device, dtype=dtype)
    plain = torch.nn.Linear(into, out, bias=False, device=device, dtype=dtype)
    packed = torch.nn.Sequential(plain)
    if device.type == "cpu" and (in_c or is_possible()):
        pack_linears(packed, in_c)
    return 2 * rows * into * out / _fastest([partial(plain, x), partial(packed, x)], device)


def _fastest(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Return the seconds of the fastest of several rounds of calls."""
    times = []
    for call in calls * _ROUNDS:
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - began)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run the job that the command line names."""
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    with open(job["work"], encoding="utf-8") as file:
        work = json.load(file)
    load = load_ceiling if job["engine"] == "ceiling" else partial(load_raypd, work=work)
    serve(job, load, {"raypd": raypd.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
