"""Layers of 8 bits, and the C kernel for CPUs, which takes bfloat16: against float64, and in models."""

import os
import random

import pytest
import torch

from raypd.decoding import native, quantized
from raypd.decoding.attention import avx512, sdpa
from raypd.decoding.attention.step import Attend, AttentionLayer
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.pack import pack
from raypd.decoding.quantized import Fp8Linear, Int8Linear, quantize
from tests.decoding.cases import CASES, pair
from tests.decoding.drivers import logits_of, never, prompts_of
from tests.decoding.kernel_cases import random_pass
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
    assert (held, {parameter.device.type for parameter in model.parameters()}) == (layers, {"meta"})


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


CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(avx512.refusal(CPU) is not None, reason=str(avx512.refusal(CPU)))


@needs_kernel
@pytest.mark.parametrize("seed", range(20))
def test_a_random_pass_is_as_near_to_float64_as_torchs_attention_is(seed):
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    step = random_pass(rng, CPU, (40, 200, 300)[seed % 3])
    dim = (32, 64, 96, 128, 256)[seed % 5]
    value_dim, kv_heads, repeat = rng.choice([dim, 64]), rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 7, 32])

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16()

    keys, values = (numbers(step.cache.allocator.slots, kv_heads, size) for size in (dim, value_dim))
    new = [numbers(len(step.slots), kv_heads * repeat, dim)]
    new += [numbers(kv_heads, len(step.slots), size).transpose(0, 1) for size in (dim, value_dim)]
    for window in (None, rng.randint(1, 12), 60, 10_000):
        layer = AttentionLayer(0, rng.choice([dim**-0.5, 0.5]), window, rng.choice([None, 2.0]))
        outputs = []
        for attend, dtype in (
            (avx512.attend, torch.bfloat16), (avx512.attend_stable, torch.bfloat16),
            (sdpa.attend, torch.bfloat16), (sdpa.attend, torch.float64),
        ):  # fmt: skip
            step.cache.keys[0], step.cache.values[0] = keys.to(dtype, copy=True), values.to(dtype, copy=True)
            step._masks.clear()  # they are of one dtype
            outputs.append(attend(step, layer, *(tensor.to(dtype) for tensor in new)).double())
        *kernels, torchs = ((output - outputs[3]).abs() for output in outputs[:3])
        for error in kernels:
            assert error.mean() <= 1.05 * torchs.mean(), layer
            assert error.max() <= 2 * torchs.max(), layer


@needs_kernel
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
@pytest.mark.parametrize("method", ["autoregressive", "hyper_parallel", "intra_prompt"])
def test_a_method_decodes_what_the_unmodified_model_says(method, kind, monkeypatch):
    """As near as bfloat16 is: a token may be another one where the two best are that close."""
    taken = []
    monkeypatch.setattr(avx512, "_takes", lambda *args: taken.append(_takes(*args)) or taken[-1])
    model, stock = pair(kind, head_dim=32)
    case = CASES[method](stock)
    engine = Engine(model.bfloat16(), max_num_seqs=3, max_num_batched_tokens=60, attention="avx512")
    case.check(engine.run(case.programs()), 0.5)
    assert set(taken) == {True}


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_it_does_not_take_goes_to_torch(dtype, monkeypatch):
    """Numbers of 32 bits; heads of 16."""
    sizes, answers = {"head_dim": 32} if dtype == torch.float32 else {}, []
    for attention in ("sdpa", "avx512"):
        engine = Engine(tiny_model("llama", **sizes).to(dtype), attention=attention)
        monkeypatch.setattr(avx512, "struct", None)  # would fail
        found = engine.run(autoregressive(p, 5, never) for p in prompts_of(3, 2, 20))
        answers.append([answer.tokens for answer in found])
        monkeypatch.undo()
    assert answers[0] == answers[1]


@needs_kernel
def test_auto_takes_it_for_bfloat16_where_there_is_no_amx(monkeypatch):
    def chosen(dtype: torch.dtype) -> Attend:
        return Engine(tiny_model("llama").to(dtype)).attend

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert (chosen(torch.float32), chosen(torch.bfloat16)) == (sdpa.attend, avx512.attend)
    for capabilities in ({"avx512_bf16": True, "amx_bf16": True}, {}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda there=capabilities: there)
        assert chosen(torch.bfloat16) is sdpa.attend
    with pytest.raises(ValueError, match="needs a processor with AVX-512 BF16"):
        Engine(tiny_model("llama").bfloat16(), attention="avx512")


@needs_kernel
@pytest.mark.parametrize(("compiler", "why"), [("false", "false ended with 1"), ("", "there is no C compiler")])
def test_without_a_compiler_it_is_refused_and_auto_goes_on(compiler, why, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "library", native.library.__wrapped__)  # what is loaded is not used again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("PATH", "/nowhere" if not compiler else os.environ["PATH"])
    with pytest.raises(ValueError, match=rf"cannot be compiled \({why}"):
        Engine(tiny_model("llama").bfloat16(), attention="avx512")
    assert Engine(tiny_model("llama").bfloat16()).attend is sdpa.attend
    assert not list(tmp_path.rglob("*.so"))


@needs_kernel
def test_it_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_ = native.library.__wrapped__
    compile_()
    assert [one.suffix for one in (tmp_path / "raypd").iterdir()] == [".so"]
    monkeypatch.setenv("CC", "false")
    compile_()


_takes = avx512._takes
