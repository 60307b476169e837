"""Packed linear layers give what they gave, but for the order of sums in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from raypd.decoding import native
from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.packed import PackedLinear, PanelLinear, is_possible, narrowed, pack
from tests.decoding.cases import CASES, FAMILIES, pair
from tests.decoding.drivers import never
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(not is_possible(), reason="this processor has no products in bfloat16")


needs_native = pytest.mark.skipif(native.refusal() is not None, reason=f"the machine {native.refusal()}")


@pytest.mark.parametrize("kind", [PackedLinear, pytest.param(PanelLinear, marks=needs_native)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 3, 70, 900])
@torch.inference_mode()
def test_a_layer_gives_what_it_gave(rows: int, bias: bool, kind: type) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 200, bias=bias, dtype=torch.bfloat16)
    packed = kind(linear)
    exact = copy.deepcopy(linear).double()
    for x in (torch.randn(1, rows, 96), torch.randn(1, 96, rows).transpose(1, 2)):
        found = packed(x.bfloat16())
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact(x.bfloat16().double()), atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(packed.weight, linear.weight, atol=0, rtol=0)


def test_a_model_answers_as_before_and_its_embedding_is_left_alone() -> None:
    model = tiny_model("llama").bfloat16()
    packed = copy.deepcopy(model)
    for _ in range(2):  # what is packed stays as it is
        pack(packed)
    assert not any(type(module) is torch.nn.Linear for module in packed.modules())
    assert isinstance(packed.get_output_embeddings(), PackedLinear | PanelLinear)
    torch.testing.assert_close(packed.get_input_embeddings().weight, model.get_input_embeddings().weight)
    ids = torch.arange(5, 60)[None]
    with torch.inference_mode():
        exact = tiny_model("llama").double()(ids).logits
        found, before = ((one(ids).logits - exact).norm() / exact.norm() for one in (packed, model))
    assert found < 1.1 * before < 0.1
    prompts = [Prompt(list(range(5 + n, 40 + 3 * n))) for n in range(5)]
    answers = Engine(packed).run(autoregressive(p, 12, never) for p in prompts)
    assert [len(answer.tokens) for answer in answers] == [12] * 5


@needs_native
def test_a_last_layer_that_an_engine_has_shortened_stays_so(monkeypatch) -> None:
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: True)
    model = tiny_model("llama", head_dim=32).bfloat16()
    packed, prompts = copy.deepcopy(model), [Prompt(list(range(5 + n, 40 + 3 * n))) for n in range(5)]
    pack(packed)
    engine = Engine(model)
    pack(model)
    found, wanted = (one.run(autoregressive(p, 12, never) for p in prompts) for one in (engine, Engine(packed)))
    assert found == wanted


@needs_native
@pytest.mark.parametrize("outputs", [64, 200])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_layer_adds_the_residual_and_rounds_once(bias: bool, outputs: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, outputs, bias=bias, dtype=torch.bfloat16)
    x, residual = torch.randn(2, 35, 96).bfloat16(), torch.randn(35, 2, outputs).bfloat16().transpose(0, 1) / 2
    exact = copy.deepcopy(linear).double()(x.double()) + residual.double()
    found, before = PanelLinear(linear)(x, residual), residual + linear(x)
    assert (found.double() - exact).norm() < 0.95 * (before.double() - exact).norm()
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=2**-8)


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 5])
@torch.inference_mode()
def test_a_token_has_the_same_bits_in_every_pass(threads: int) -> None:
    torch.manual_seed(0)
    layer = PanelLinear(torch.nn.Linear(576, 416, dtype=torch.bfloat16))
    x = torch.randn(901, 576).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([layer(row[None]) for row in x])
        for rows in (2, 11, 12, 13, 24, 100, 384, 385, 901):
            assert torch.equal(layer(x[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("method", sorted(set(CASES) - {"medusa", "apar_medusa"}))  # their heads know float32 alone
def test_answers_are_the_same_bits_whatever_they_are_batched_with(method, kind, monkeypatch) -> None:
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: True)  # on processors with AMX, too
    model, stock = pair(kind, head_dim=32)
    pack(model.bfloat16())
    case, found = CASES[method](stock), set()
    for at_once, tokens in ((1, 2048), (64, 2048), (3, 60), (5, 200)):
        engine = Engine(model, max_num_seqs=at_once, max_num_batched_tokens=tokens)
        found.add(repr(engine.run(case.programs())))  # tokens and log-probabilities
    assert len(found) == 1


@pytest.mark.parametrize("kind", [torch.nn.Linear, PackedLinear, pytest.param(PanelLinear, marks=needs_native)])
@pytest.mark.parametrize("rows", [1, 3, 70])
@torch.inference_mode()
def test_some_outputs_are_those_of_the_layer(rows: int, kind: type) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(1536, 300, bias=False, dtype=torch.bfloat16)
    layer = linear if kind is torch.nn.Linear else kind(linear)
    x, outputs = torch.randn(rows, 1536).bfloat16(), torch.tensor([0, 3, 31, 32, 95, 200, 299])
    found, wanted = narrowed(layer, outputs)(x), layer(x)[:, outputs]
    if kind is PanelLinear:
        assert torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=2**-7)


@needs_native
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_gated_layer_is_nearer_to_float64_than_torch(bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 2 * 112, bias=bias, dtype=torch.bfloat16)
    layer = PanelLinear(linear, gated=True)
    assert torch.equal(layer.weight, linear.weight)
    x = torch.randn(2, 35, 96).bfloat16() * 8
    gate, up = copy.deepcopy(linear).double()(x.double()).chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    gate, up = linear(x).chunk(2, -1)
    found, before = layer(x).double(), (torch.nn.functional.silu(gate) * up).double()
    assert (found - exact).norm() < 0.7 * (before - exact).norm()
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=2**-8)


@needs_native
@pytest.mark.parametrize("shape", [(0, 576), (1, 16), (2, 35, 576), (700, 2048)])
def test_rms_norm_rounds_as_transformers(shape) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], 1e-5).bfloat16()
    norm.weight.data.normal_()
    for x in (torch.randn(shape).bfloat16() * 5, torch.zeros(shape).bfloat16()):
        found, wanted = native.rms_norm(x, norm.weight, 1e-5), norm(x)
        assert (found != wanted).sum() <= found.numel() / 1000  # sums of squares may go in another order
        torch.testing.assert_close(found, wanted, atol=0, rtol=2**-7)


@needs_native
def test_swiglu_is_nearer_to_float64_than_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 35, 2 * 1536).bfloat16() * 8
    x[0, 0, :5] = torch.tensor([0.0, -300.0, 300.0, -3e38, 88.0])
    gate, up = x.chunk(2, -1)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    found, before = native.swiglu(x).double(), (torch.nn.functional.silu(gate) * up).double()
    assert (found - exact).norm() < (before - exact).norm()
    torch.testing.assert_close(found, exact, atol=1e-30, rtol=2**-8)


@needs_native
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
    ],
)
def test_layers_in_fewer_steps_are_as_near_to_float64(kind, extra, monkeypatch) -> None:
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: True)  # on processors with AMX, too
    model = tiny_model(kind, head_dim=64, **extra).bfloat16()
    exact, packed = copy.deepcopy(model).double(), copy.deepcopy(model)
    for _ in range(2):
        pack(packed)
    names = {name for name, _ in packed.model.layers[0].self_attn.named_children()}
    assert names - {"q_norm", "k_norm"} == {"qkv_proj", "o_proj"}
    assert {name for name, _ in packed.model.layers[0].mlp.named_children()} == {"gate_up_proj", "down_proj", "act_fn"}
    ids = torch.arange(5, 125).view(2, 60)
    with torch.inference_mode():
        wanted = exact(ids).logits
        found, before = ((one(ids).logits - wanted).abs() for one in (packed, model))
    assert found.mean() < 1.1 * before.mean()
    assert found.max() < 1.5 * before.max()


def test_other_types_are_left_alone() -> None:
    model = tiny_model("llama")
    pack(model)
    assert not any(isinstance(module, PackedLinear | PanelLinear) for module in model.modules())
