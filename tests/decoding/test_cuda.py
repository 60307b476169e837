"""The engine on a GPU: every method against the unmodified model. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from tests.decoding.cases import CASES, Knowing, pair, run_all
from tests.tiny import in_float64

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _heads_on_the_cpu(monkeypatch):
    draft = Knowing.draft
    monkeypatch.setattr(Knowing, "draft", lambda self, hidden, tree: draft(self, [one.cpu() for one in hidden], tree))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("method", CASES)
def test_float64_is_exact(method, kind):
    model, stock = (in_float64(one) for one in pair(kind))
    case = CASES[method](stock)  # the reference stays on the CPU
    case.check(Engine(model.cuda(), max_num_seqs=3, max_num_batched_tokens=30).run(case.programs()), 1e-9)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_all_methods_at_once_in_float32(kind):
    model, stock = pair(kind)
    engine = Engine(model.cuda(), max_num_seqs=16, max_num_batched_tokens=64, cache_tokens=1024)
    run_all(engine, {method: make(stock) for method, make in CASES.items()}, 1e-2)


def test_a_real_model_writes_what_transformers_writes():
    from raypd.config import ModelConfig
    from raypd.models.load import load_model

    loaded = load_model(ModelConfig(dtype="float32", device="cuda"))
    texts = ["The capital of France is", "def fibonacci(n):", "Ray is a framework for", "1, 2, 3, 5, 8,"]
    prompts = [loaded.tokenizer(text).input_ids for text in texts]
    stop = lambda tokens: tokens[-1] == loaded.tokenizer.eos_token_id  # noqa: E731
    answers = Engine(loaded.model).run([autoregressive(Prompt(prompt), 40, stop) for prompt in prompts])
    stock = load_model(ModelConfig(dtype="float32", device="cuda")).model
    stock.set_attn_implementation("sdpa")
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([prompt], device="cuda")
        written = stock.generate(tokens, max_new_tokens=40, do_sample=False, pad_token_id=0)[0, len(prompt) :].tolist()
        assert answer.tokens == written[: len(answer.tokens)]
        assert len(answer.tokens) == len(written) or stop(answer.tokens)
