"""The Llama family written out, and its packed linear layers, against transformers and float64."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from raypd.decoding import native
from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine
from raypd.decoding.linear import PackedLinear, PanelLinear, is_possible, narrowed
from raypd.decoding.llama import AmxLayer, Layer, Llama, NativeLayer
from raypd.decoding.methods.autoregressive import Continuation, autoregressive
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, intra_prompt
from raypd.decoding.pack import pack
from raypd.decoding.stock import Stock
from tests.decoding.cases import CASES, FAMILIES, case_of, eleventh, pair
from tests.decoding.drivers import logits_of, never, prompts_of, tokens_of
from tests.tiny import tiny_model

needs_bfloat16 = pytest.mark.skipif(not is_possible(), reason="this processor has no products in bfloat16")
needs_native = pytest.mark.skipif(native.refusal() is not None, reason=f"the machine {native.refusal()}")
PACKED = [pytest.param(PackedLinear, marks=needs_bfloat16), pytest.param(PanelLinear, marks=needs_native)]


def panels(linear: torch.nn.Linear, *gated: bool, kind: type = PanelLinear) -> torch.nn.Module:
    return kind(linear.weight.detach(), None if linear.bias is None else linear.bias.detach(), *gated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "extra"), [
    ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ("mistral", {"sliding_window": 7}),
    *((kind, {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}) for kind in ("qwen2", "qwen3")),
    ("gemma2", {})])  # fmt: skip
def test_a_text_has_the_logits_of_transformers(kind, extra, dtype) -> None:
    model, ids = tiny_model(kind, **extra).to(dtype), torch.arange(5, 65)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    exact = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.3, "rtol": 0.05}
    torch.testing.assert_close(logits_of(model, ids), expected, **exact)
    assert isinstance(Engine(model).model, Stock if kind == "gemma2" else Llama)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_the_last_mlp_is_for_the_tokens_whose_predictions_are_wanted(kind: str) -> None:
    model, prompts, fed = tiny_model(kind), prompts_of(3, 20, 40), ([], [])
    for layer, sizes in zip((model.model.layers[0], model.model.layers[-1]), fed, strict=True):
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0])))
    Engine(model, max_num_batched_tokens=30).run(autoregressive(prompt, 4, never) for prompt in prompts)
    assert sum(fed[0]) > 100
    assert sum(fed[1]) == len(prompts) * 4


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 3, 70, 900])
@torch.inference_mode()
def test_a_layer_gives_what_it_gave(rows: int, bias: bool, kind: type) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 200, bias=bias, dtype=torch.bfloat16)
    packed = panels(linear, kind=kind)
    exact = copy.deepcopy(linear).double()
    for x in (torch.randn(1, rows, 96), torch.randn(1, 96, rows).transpose(1, 2)):
        found = packed(x.bfloat16())
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact(x.bfloat16().double()), atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(packed.weight, linear.weight, atol=0, rtol=0)


@needs_bfloat16
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_model_answers_as_before_and_its_embedding_is_left_alone(kind: str) -> None:
    model, ids = tiny_model(kind).bfloat16(), torch.arange(5, 60)
    packed = copy.deepcopy(model)
    for _ in range(2):  # what is packed stays as it is
        assert pack(packed) is packed
    assert not any(type(module) is torch.nn.Linear for module in packed.modules())
    assert isinstance(packed.get_output_embeddings(), PackedLinear | PanelLinear)
    torch.testing.assert_close(packed.get_input_embeddings().weight, model.get_input_embeddings().weight)
    exact = logits_of(tiny_model(kind).double(), ids)
    error, before = ((logits_of(one, ids) - exact).norm() / exact.norm() for one in (packed, model))
    assert error < 1.1 * before < 0.1


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@needs_native
@pytest.mark.parametrize(("outputs", "gated"), [(64, False), (200, False), (2 * 112, True)])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_layer_adds_the_residual_or_multiplies_by_its_gate_and_rounds_once(bias, outputs, gated) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, outputs, bias=bias, dtype=torch.bfloat16)
    layer, residual = panels(linear, gated), torch.randn(35, 2, outputs).bfloat16().transpose(0, 1) / 2
    assert torch.equal(layer.weight, linear.weight)
    x = torch.randn(2, 35, 96).bfloat16() * (8 if gated else 1)
    behind = swiglu if gated else lambda y: y + residual.to(y.dtype)
    exact, before = behind(copy.deepcopy(linear).double()(x.double())), behind(linear(x))
    found = (layer(x) if gated else layer(x, residual)).double()
    assert (found - exact).norm() < (0.7 if gated else 0.95) * (before.double() - exact).norm()
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=2**-8)


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 5])
@torch.inference_mode()
def test_a_token_has_the_same_bits_in_every_pass(threads: int) -> None:
    torch.manual_seed(0)
    layer, x = panels(torch.nn.Linear(576, 416, dtype=torch.bfloat16)), torch.randn(901, 576).bfloat16()
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
    model, case, found = pack(pair(kind, head_dim=32)[0].bfloat16()), case_of(method, "llama"), set()
    for at_once, tokens in ((1, 2048), (64, 2048), (3, 60)):
        engine = Engine(model, max_num_seqs=at_once, max_num_batched_tokens=tokens)
        found.add(repr(engine.run(case.programs())))  # tokens and log-probabilities
    assert len(found) == 1


@needs_native
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_stable_engine_answers_as_one_prompt_a_question_in_the_very_bits(kind: str) -> None:
    model = pack(
        tiny_model(kind, head_dim=32, **({"sliding_window": 70} if kind == "mistral" else {})).bfloat16(), stable=True
    )
    rng = random.Random(0)

    def context() -> Context:
        return Context(tokens_of(rng, 20, 150), [Question(tokens_of(rng, 1, 30), eleventh) for _ in range(5)])

    def answers(prompts: list[PromptTree], at_once: int, tokens: int) -> list[Continuation]:
        engine = Engine(model, max_num_seqs=at_once, max_num_batched_tokens=tokens, stable=True)
        return [answer for of_prompt in engine.run(intra_prompt(p, 30) for p in prompts) for answer in of_prompt]

    tree = PromptTree(range(5, 42), [context() for _ in range(4)])
    apart = [PromptTree(tree.instruction, [replace(c, questions=[q])]) for c in tree.contexts for q in c.questions]
    wanted = answers(apart, 1, 2048)
    assert {len(answer.tokens) for answer in wanted} > {30}
    for prompts, at_once, tokens in ((apart, 7, 300), ([tree], 1, 2048), ([tree, *apart[:3]], 4, 100)):
        assert repr(answers(prompts, at_once, tokens)[: len(wanted)]) == repr(wanted)


def test_an_engine_is_not_stable_where_products_are_torchs() -> None:
    with pytest.raises(ValueError, match="in bfloat16, on a processor with AVX-512 BF16"):
        Engine(tiny_model("llama"), stable=True)


@pytest.mark.parametrize("kind", [torch.nn.Linear, *PACKED])
@pytest.mark.parametrize("rows", [1, 3, 70])
@torch.inference_mode()
def test_some_outputs_are_those_of_the_layer(rows: int, kind: type) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(1536, 300, bias=False, dtype=torch.bfloat16)
    layer = linear if kind is torch.nn.Linear else kind(linear.weight.detach())
    x, outputs = torch.randn(rows, 1536).bfloat16(), torch.tensor([0, 3, 31, 32, 95, 200, 299])
    found, wanted = narrowed(layer, outputs)(x), layer(x)[:, outputs]
    if kind is PanelLinear:
        assert torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=2**-7)


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
    exact, found, before = swiglu(x.double()), native.swiglu(x).double(), swiglu(x).double()
    assert (found - exact).norm() < (before - exact).norm()
    torch.testing.assert_close(found, exact, atol=1e-30, rtol=2**-8)


@needs_native
@pytest.mark.parametrize(("kind", "extra"), [
    ("llama", {}), ("llama", {"attention_bias": True}), ("qwen2", {}), ("qwen3", {"num_key_value_heads": 4}),
    ("mistral", {"sliding_window": 7, "num_key_value_heads": 1})])  # fmt: skip
@pytest.mark.parametrize("layer", [NativeLayer, AmxLayer])
def test_layers_in_fewer_steps_are_as_near_to_float64(kind, extra, layer, monkeypatch) -> None:
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: layer is NativeLayer)
    model, ids = tiny_model(kind, head_dim=64, **extra).bfloat16(), torch.arange(5, 65)
    exact = logits_of(copy.deepcopy(model).double(), ids)
    before = (logits_of(model, ids) - exact).abs()
    packed = pack(model)
    assert {type(source) for source in packed.layers} == {layer}
    assert not any(type(module) is torch.nn.Linear for module in (*model.modules(), *packed.modules()))
    error = (logits_of(packed, ids) - exact).abs()
    assert error.mean() < 1.1 * before.mean()
    assert error.max() < 1.5 * before.max()


def test_other_types_are_left_alone() -> None:
    model = tiny_model("llama", head_dim=32)
    assert pack(model) is model
    assert not any(isinstance(module, PackedLinear | PanelLinear) for module in model.modules())
    assert {type(layer) for layer in Engine(model).model.layers} == {Layer}
