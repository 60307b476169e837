"""raypd's side of the comparison, and the machine's ceiling: python -m benchmarks.engines JOB.json

A process of its own like every other engine's, which the same lines of standard input drive
(`peers.serve`). The engine alone is timed, over prompts that are ids already, as with the others;
what an answer means is read later.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
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
from raypd.decoding.pack import pack
from raypd.decoding.program import Program
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.visibility import one_segment
from raypd.models.load import LoadedModel, load_model
from raypd.tasks import build_task
from raypd.tasks.base import Record, Request

_TEXT = 2048  # tokens of the text that attention is measured with

Reader = Callable[[Any], list[Any]]


class Given:
    """The rule of a slot whose value is given, or of any tokens up to a length."""

    def __init__(self, length: int, tokens: list[int] | None = None) -> None:
        self.length = length
        self._allowed = (
            None if tokens is None else [AllowedTokens(np.array([token])) for token in tokens]
        )

    def allowed(self, state: int, left: int | None) -> AllowedTokens | None:
        return None if self._allowed is None else self._allowed[state]

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def done(self, state: int) -> bool:
        return state >= self.length

    def completion(self, state: int) -> str | None:
        return None


def _programs(
    work: dict[str, Any], guided: bool, loaded: LoadedModel
) -> Callable[[], Iterator[tuple[Program[Any], Reader]]]:
    """What makes the work's programs anew for every run, each with what reads its answer."""
    given = work["raypd"]
    if "run" in given:
        method = (
            "guided"
            if guided
            else "intra_prompt"
            if work["unit"] == "questions"
            else "hyper_parallel"
        )
        task = build_task(
            make_config(given["run"], [f"decoding.method={method}"]),
            loaded.tokenizer,
            loaded.context_length,
        )
        documents = documents_of(given["rows"])

        def planned() -> Iterator[tuple[Program[Any], Reader]]:
            for request in task.plan(documents):
                assert not isinstance(request, Record)
                yield request.program, partial(_read, request)

        return planned

    def made() -> Iterator[tuple[Program[Any], Reader]]:
        for one in given.get("prompts", []):
            values = one.get("values")
            lengths = one["lengths"] if values is None else list(map(len, values))
            rules = [
                Given(*pair) for pair in zip(lengths, values or [None] * len(lengths), strict=True)
            ]
            slots = [Slot(*pair) for pair in zip(one["ends"], rules, strict=True)]  # type: ignore[arg-type]
            yield (
                hyper_parallel(SlottedPrompt(one["tokens"], slots, one["shared"]), max(lengths)),
                lambda answer: [],
            )
        for tree in given.get("trees", []):
            questions = [Question(tokens, lambda answer: False) for tokens in tree["questions"]]
            prompt = PromptTree(tree["shared"], [Context(tree["context"], questions)])
            yield intra_prompt(prompt, tree["most"]), lambda answer: []

    return made


def _read(request: Request, answer: Any) -> list[Any]:
    """What the records of a request answer: values by attribute, or texts."""
    columns = [record.columns for record in request.finish(answer) if isinstance(record, Record)]
    return [
        {value["name"]: value["value"] for value in one["values"]}
        if "values" in one
        else one.get("answer")
        for one in columns
    ]


def load_raypd(job: dict[str, Any], work: dict[str, Any]) -> Loaded:
    """raypd's engine. job, work: what is done with it, as `peers.serve` reads them."""
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    loaded = load_model(ModelConfig(name=job["model"], dtype=job["dtype"], device=job["device"]))
    engine = Engine(pack(loaded.model))
    programs = _programs(work, job["guided"], loaded)

    def run(requests: list[Any]) -> dict[str, Any]:
        made = [one for one, _ in zip(programs(), requests, strict=False)]
        answers: list[Any] = [None] * len(made)
        found = {"fed": 0, "later": 0, "decoded": 0}
        begin = time.perf_counter()
        for number, (program, _) in enumerate(made):
            engine.submit(program, tag=number)
        while engine.pending:
            for done in engine.step():
                if done.error is not None:
                    raise done.error
                answers[done.tag] = done.answer
                # The first token of each is sampled behind the prompt.
                later = done.counts.decode_tokens - (1 if job["guided"] else len(done.answer))
                found["fed"] += done.counts.prefill_tokens + later
                found["later"] += later
                found["decoded"] += sum(len(value.tokens) for value in done.answer)
        seconds = time.perf_counter() - begin
        said = [
            item for (_, read), answer in zip(made, answers, strict=True) for item in read(answer)
        ]
        return {**found, "seconds": seconds, "answers": said}

    def forget() -> None:
        """Drops the shared prefixes; the cache keeps its size."""
        engine.scheduler.prefixes.clear()
        engine.cache.allocator = SlotAllocator(engine.cache.allocator.slots)

    return run, forget


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _attentions(
    config: Any, dtype: torch.dtype, device: torch.device, in_c: bool
) -> list[tuple[int, Callable[[], object]]]:
    """Attention of a text behind as long a one, in one layer, by torch (that to the first text
    alone) and, where it can, by raypd's function in C; with the pairs (token, key that it sees) of
    each.
    """
    heads, kv_heads, dim, n = (
        config.num_attention_heads,
        config.num_key_value_heads,
        _head_dim(config),
        _TEXT,
    )
    query, key, value = (
        torch.randn(n, count, dim, dtype=dtype, device=device)
        for count in (heads, kv_heads, kv_heads)
    )
    # [1, heads, tokens, head_dim].
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (query, key, value))
    calls: list[tuple[int, Callable[[], object]]] = [
        (n * n, lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True))
    ]
    if in_c:
        keys = np.zeros((3, n), dtype=np.int64)  # position, segment, step
        keys[0] = slots = np.arange(n, 2 * n)
        group = PrefixGroup([Span(0, n, n, n, one_segment(), keys, keys, n)], 0, n)
        step = Step(
            KVCache(2 * n, None, device),
            [group],
            torch.from_numpy(slots),
            torch.arange(0),
            avx512.attend,
        )
        layer = AttentionLayer(0, dim**-0.5)
        calls.append(
            (n * n + n * (n + 1) // 2, lambda: avx512.attend(step, layer, query, key, value))
        )
    return calls


def load_ceiling(job: dict[str, Any]) -> Loaded:
    """The fastest product of activations with one of the model's own matrices, and the fastest
    attention of a text, by torch or by raypd.
    """
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    config = AutoConfig.from_pretrained(job["model"]).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(weight.numel() for weight in model.parameters())
    head = model.get_output_embeddings().weight
    looked_up = model.get_input_embeddings().weight
    layers = total - head.numel() - (0 if looked_up is head else looked_up.numel())
    matrices = {
        weight.shape
        for weight in model.parameters()
        if weight.dim() == 2 and weight.shape != head.shape
    }
    device = torch.device("cuda" if torch.cuda.is_available() and job["device"] != "cpu" else "cpu")
    kind: dict[str, Any] = {"device": device, "dtype": getattr(torch, job["dtype"])}
    in_c = avx512.is_best(device, torch.bfloat16)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    attentions = _attentions(config, kind["dtype"], device, in_c)
    # Operations of a token that sees a key, in all layers: a product with the key, one with the
    # value.
    pair = 4 * config.num_attention_heads * _head_dim(config) * config.num_hidden_layers

    def fastest(calls: list[Callable[[], object]]) -> float:
        """Seconds."""
        times = []
        for call in calls * 8:
            wait()
            begin = time.perf_counter()
            call()
            wait()
            times.append(time.perf_counter() - begin)
        return min(times)

    @torch.inference_mode()
    def run(requests: list[Any]) -> dict[str, Any]:
        best = 0.0
        for rows in (256, 1024, 2048):
            for out, into in matrices:
                x, plain = (
                    torch.randn(rows, into, **kind),
                    torch.nn.Linear(into, out, bias=False, **kind),
                )
                packed = torch.nn.Sequential(plain)
                if device.type == "cpu" and (in_c or is_possible()):
                    pack_linears(packed, in_c)
                best = max(
                    best, 2 * rows * into * out / fastest([partial(plain, x), partial(packed, x)])
                )
        pairs = max(pairs / fastest([call]) for pairs, call in attentions)  # a second, in one layer
        found = {"flops": best, "layers": layers, "head": head.numel(), "pair": pair}
        return {
            **found,
            "pair_flops": pair / config.num_hidden_layers * pairs,
            "answers": [],
            "decoded": 0,
        }

    return run, lambda: None


def main() -> None:
    """Runs the job that the command line names."""
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    with open(job["work"], encoding="utf-8") as file:
        work = json.load(file)
    load = load_ceiling if job["engine"] == "ceiling" else partial(load_raypd, work=work)
    serve(job, load, {"raypd": raypd.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
