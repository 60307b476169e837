"""Layers of 8 bits against float64, and a model of them."""

import pytest
import torch

from raypd.decoding import native, quantized
from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.pack import pack
from raypd.decoding.quantized import Fp8Linear, Int8Linear, quantize
from tests.decoding.drivers import logits_of, never, prompts_of
from tests.tiny import tiny_model

needs_native = pytest.mark.skipif(native.refusal() is not None, reason=f"the machine {native.refusal()}")


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=needs_native), "fp8"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 96), (1, 96), (2, 35, 96)])
@torch.inference_mode()
def test_a_layer_multiplies_what_it_rounds_to(shape: tuple[int, ...], bias: bool, kind: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 208, bias=bias, dtype=torch.bfloat16)
    layer = Int8Linear.of(linear) if kind == "int8" else Fp8Linear.of(linear)
    x = torch.randn(shape).bfloat16() * 10
    x[..., 3] *= 50  # of one feature
    found = layer(x)
    assert (found.dtype, found.shape) == (torch.bfloat16, (*shape[:-1], 208))
    weight, step = layer.weight.double() * layer.scale.double().reshape(-1, 1), float(layer.scale.max())
    most = x.abs().amax(-1, keepdim=True)
    if kind == "int8":
        torch.testing.assert_close(weight, linear.weight.double(), atol=step * 0.51, rtol=0)
        rounded = (x.double() / (scale := most.double() / 127)).round() * scale
    else:
        torch.testing.assert_close(weight, linear.weight.double(), atol=step, rtol=2**-4)
        rounded = (x / (scale := most.float() / 448)).to(torch.float8_e4m3fn).double() * scale
    exact = rounded @ weight.t() + (linear.bias.double() if bias else 0)
    atol = 0.2 if kind == "int8" else 1e-3  # in int8 a rounding may fall to the other side
    torch.testing.assert_close(found.double(), exact, atol=atol, rtol=2**-7)
    assert (found.double() - exact).norm() <= 0.004 * exact.norm()
    if len(shape) == 3:
        assert torch.equal(layer(x[1:, 7:8]), found[1:, 7:8])  # whatever else is in the pass: scales are a token's own
    assert layer(torch.zeros(2, 96).bfloat16()).double().sub(linear.bias if bias else 0).abs().max() == 0


def test_a_device_never_holds_the_whole_model_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held, convert = tiny_model("qwen3", head_dim=32).bfloat16(), [], quantized.in_fp8
    layers = [m.weight.numel() for m in model.model.modules() if isinstance(m, torch.nn.Linear)]

    def seen(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held.append(sum(p.numel() for p in model.parameters() if (p.device.type, p.dtype) == ("meta", torch.bfloat16)))
        return convert(weight)

    monkeypatch.setattr(quantized, "in_fp8", seen)
    quantize(model, "fp8", torch.device("meta"))
    assert held == layers
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(("kind", "quantization", "layer", "least", "most"), [
    pytest.param("llama", "w8a8", Int8Linear, 0.001, 0.1, marks=needs_native),
    ("qwen3", "fp8", Fp8Linear, 0.005, 0.2)])  # fmt: skip
def test_a_quantized_model_decodes(
    kind: str, quantization: str, layer: type, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layer is Int8Linear:
        monkeypatch.setattr(avx512, "is_best", lambda device, dtype: True)  # on processors with AMX, too
    model, ids = tiny_model(kind, head_dim=32).bfloat16(), torch.arange(5, 60)[None]
    quantize(model, quantization)
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(layer), kinds.count(torch.nn.Linear)) == (2 * 7, 1)
    with torch.inference_mode():
        before = tiny_model(kind, head_dim=32)(ids).logits
        error = (model(ids).logits - before).norm() / before.norm()
        assert least < error < most
        if layer is Int8Linear:
            model = pack(model)
            assert abs((logits_of(model, ids[0]) - before).norm() / before.norm() - error) < 0.3 * error
            assert [type(module) for module in model.modules()].count(Int8Linear) == 2 * 4
    answers = Engine(model).run(autoregressive(prompt, 12, never) for prompt in prompts_of(3, 5))  # some share a prefix
    assert [len(answer.tokens) for answer in answers] == [12] * 5


@torch.inference_mode()
def test_layers_of_fp8_in_one_give_what_each_gives() -> None:
    cuda_layer = pytest.importorskip("raypd.decoding.cuda_layer", exc_type=ImportError)
    layers = [Fp8Linear.of(torch.nn.Linear(96, outputs, dtype=torch.bfloat16)) for outputs in (64, 32, 48)]
    x = torch.randn(35, 96).bfloat16()
    assert torch.equal(cuda_layer._joined(layers)(x), torch.cat([layer(x) for layer in layers], 1))
