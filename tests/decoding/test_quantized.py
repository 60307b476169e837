"""Layers of 8 bits against float64, and a model of them."""

from __future__ import annotations

import pytest
import torch

from raypd.decoding import native
from raypd.decoding.engine import Engine
from raypd.decoding.llama import pack
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.quantized import Fp8Linear, Int8Linear, quantize
from tests.decoding.drivers import logits_of, never
from tests.tiny import tiny_model

needs_native = pytest.mark.skipif(native.refusal() is not None, reason=f"the machine {native.refusal()}")


@needs_native
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 96), (1, 96), (2, 35, 96)])
@torch.inference_mode()
def test_a_layer_of_int8_multiplies_what_it_rounds_to(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 208, bias=bias, dtype=torch.bfloat16)
    layer = Int8Linear.of(linear)
    x = torch.randn(shape).bfloat16() * 10
    x[..., 3] *= 50  # of one feature
    found = layer(x)
    assert found.dtype == torch.bfloat16
    wide, weight = x.double(), layer.weight.double() * layer.scale.double()[:, None]
    torch.testing.assert_close(weight, linear.weight.double(), atol=float(layer.scale.max()) * 0.51, rtol=0)
    scale = wide.abs().amax(-1, keepdim=True) / 127
    rounded = (wide / scale).round() * scale
    exact = rounded @ weight.t() + (linear.bias.double() if bias else 0)
    torch.testing.assert_close(found.double(), exact, atol=0.2, rtol=2**-7)  # a rounding may fall to the other side
    assert (found.double() - exact).norm() <= 0.004 * exact.norm()
    if len(shape) == 3:
        assert torch.equal(layer(x[1:, 7:8]), found[1:, 7:8])  # whatever else is in the pass
    assert layer(torch.zeros(2, 96).bfloat16()).double().sub(linear.bias if bias else 0).abs().max() == 0


@needs_native
def test_a_quantized_model_decodes_whatever_it_is_batched_with() -> None:
    model = tiny_model("llama", head_dim=32).bfloat16()
    quantize(model, "w8a8")
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(Int8Linear), kinds.count(torch.nn.Linear)) == (2 * 7, 1)
    exact = tiny_model("llama", head_dim=32)
    ids = torch.arange(5, 60)[None]
    with torch.inference_mode():
        before = exact(ids).logits
        error = (model(ids).logits - before).norm() / before.norm()
        packed = pack(model)
        assert abs((logits_of(packed, ids[0]) - before).norm() / before.norm() - error) < 0.3 * error
    assert 0.001 < error < 0.1
    assert [type(module) for module in packed.modules()].count(Int8Linear) == 2 * 4
    prompts = [Prompt(list(range(5 + n, 40 + 3 * n))) for n in range(5)]
    answers = Engine(packed).run(autoregressive(p, 12, never) for p in prompts)
    assert [len(answer.tokens) for answer in answers] == [12] * 5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 96), (1, 96), (2, 35, 96)])
@torch.inference_mode()
def test_a_layer_of_fp8_multiplies_what_it_rounds_to(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 208, bias=bias, dtype=torch.bfloat16)
    layer = Fp8Linear(linear)
    x = torch.randn(shape).bfloat16() * 10
    x[..., 3] *= 50  # of one feature
    found = layer(x)
    assert (found.dtype, found.shape) == (torch.bfloat16, (*shape[:-1], 208))
    weight = layer.weight.double() * layer.scale.double().t()
    torch.testing.assert_close(weight, linear.weight.double(), atol=float(layer.scale.max()), rtol=2**-4)
    scale = x.abs().amax(-1, keepdim=True).float() / 448
    rounded = (x / scale).to(torch.float8_e4m3fn).double() * scale
    exact = rounded @ weight.t() + (linear.bias.double() if bias else 0)
    torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=2**-7)
    if len(shape) == 3:
        assert torch.equal(layer(x[1:, 7:8]), found[1:, 7:8])  # scales are the token's own
    assert layer(torch.zeros(2, 96).bfloat16()).double().sub(linear.bias if bias else 0).abs().max() == 0


def test_a_model_of_fp8_decodes() -> None:
    model, exact = tiny_model("qwen3").bfloat16(), tiny_model("qwen3")
    quantize(model, "fp8")
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(Fp8Linear), kinds.count(torch.nn.Linear)) == (2 * 7, 1)
    ids = torch.arange(5, 60)[None]
    with torch.inference_mode():
        error = (model(ids).logits - exact(ids).logits).norm() / exact(ids).logits.norm()
    assert 0.005 < error < 0.2
    answers = Engine(model).run(autoregressive(Prompt(list(range(5 + n, 40 + 3 * n))), 12, never) for n in range(3))
    assert [len(answer.tokens) for answer in answers] == [12] * 3
