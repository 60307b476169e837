"""The Llama family written out, its packed and 8-bit layers and its attention in C.

All of them are compared with transformers and with float64.
"""

import copy
import os
import random
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from raypd.decoding import native, quantized
from raypd.decoding.attention import avx512, sdpa
from raypd.decoding.attention.step import Attend, AttentionLayer
from raypd.decoding.engine import Engine
from raypd.decoding.layers.expert_weights import Gate, GateKind
from raypd.decoding.layers.in_c import AmxBuilder, CBuilder
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import Linears
from raypd.decoding.linear import GroupedPanels, PackedLinear, PanelLinear, is_possible, narrowed
from raypd.decoding.methods.autoregressive import Continuation, autoregressive
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, intra_prompt
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.models.stock import Stock
from raypd.decoding.pack import pack_model
from raypd.decoding.quantized import Fp8Linear, Int8Linear, quantize
from tests.decoding.cases import CASES, FAMILIES, case_of, eleventh, methods_and, pair
from tests.decoding.drivers import logits_of, never, prompts_of, tokens_of
from tests.decoding.kernel_cases import random_pass
from tests.tiny import tiny_model

needs_bfloat16 = pytest.mark.skipif(
    not is_possible(), reason="this processor has no products in bfloat16"
)
needs_native = pytest.mark.skipif(
    native.refusal() is not None, reason=f"the machine {native.refusal()}"
)
PACKED = [
    pytest.param(PackedLinear, marks=needs_bfloat16),
    pytest.param(PanelLinear, marks=needs_native),
]
CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(avx512.refusal(CPU) is not None, reason=str(avx512.refusal(CPU)))


@pytest.fixture
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use native.c on processors with AMX too."""
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: True)


def packed_linear(linear: torch.nn.Linear, kind: type, *gate: int) -> torch.nn.Module:
    bias = None if linear.bias is None else linear.bias.detach()
    return kind(linear.weight.detach(), bias, *gate)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def kinds_of(model: torch.nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize(
    ("dtype", "atol", "rtol"), [(torch.float32, 1e-4, 1e-4), (torch.bfloat16, 0.3, 0.05)]
)
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        ),
        ("mistral", {"sliding_window": 7}),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}),
        ("olmo", {}),
    ],
)
def test_a_text_has_the_logits_of_transformers(kind, extra, dtype, atol, rtol) -> None:
    model = tiny_model(kind, **extra).to(dtype)
    ids = torch.arange(5, 65)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(
        logits_of(model, ids),
        expected,
        atol=atol,
        rtol=rtol,
    )
    assert isinstance(Engine(model).model, Stock if kind == "olmo" else DecoderModel)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_the_last_mlp_is_for_the_tokens_whose_predictions_are_wanted(kind: str) -> None:
    model = tiny_model(kind)
    prompts = prompts_of(3, 20, 40)

    def count_tokens(layer: torch.nn.Module) -> list[int]:
        sizes: list[int] = []
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda _, inputs: sizes.append(len(inputs[0]))
        )
        return sizes

    in_first = count_tokens(model.model.layers[0])
    in_last = count_tokens(model.model.layers[-1])
    engine = Engine(model, max_num_batched_tokens=30)
    engine.run(autoregressive(prompt, 4, never) for prompt in prompts)
    assert sum(in_first) > 100
    assert sum(in_last) == len(prompts) * 4


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 3, 70, 900])
@torch.inference_mode()
def test_a_packed_layer_gives_what_it_gave(rows: int, bias: bool, kind: type) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(
        96,
        200,
        bias=bias,
        dtype=torch.bfloat16,
    )
    packed = packed_linear(linear, kind)
    exact = copy.deepcopy(linear).double()
    contiguous = torch.randn(1, rows, 96).bfloat16()
    strided = torch.randn(1, 96, rows).transpose(1, 2).bfloat16()
    for x in (contiguous, strided):
        found = packed(x)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(
            found.double(),
            exact(x.double()),
            atol=1e-5,
            rtol=2**-8,
        )
    torch.testing.assert_close(
        packed.weight,
        linear.weight,
        atol=0,
        rtol=0,
    )


@needs_bfloat16
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_packed_model_answers_as_before_and_its_embedding_is_left_alone(kind: str) -> None:
    model = tiny_model(kind).bfloat16()
    ids = torch.arange(5, 60)
    packed_from = copy.deepcopy(model)
    packed = pack_model(packed_from)
    # What is packed already stays as it is.
    assert pack_model(packed) is packed
    assert torch.nn.Linear not in kinds_of(packed)
    assert isinstance(packed_from.get_output_embeddings(), PackedLinear | PanelLinear)
    embedding = packed_from.get_input_embeddings().weight
    torch.testing.assert_close(embedding, model.get_input_embeddings().weight)
    exact = logits_of(tiny_model(kind).double(), ids)
    error_before = relative_error(logits_of(model, ids), exact)
    assert error_before < 0.1
    assert relative_error(logits_of(packed, ids), exact) < 1.1 * error_before


def gated(x: torch.Tensor, gate: GateKind) -> torch.Tensor:
    return Gate(gate)(x)


@needs_native
@pytest.mark.parametrize("outputs", [64, 200])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_layer_adds_the_residual_and_rounds_once(bias: bool, outputs: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(
        96,
        outputs,
        bias=bias,
        dtype=torch.bfloat16,
    )
    layer = packed_linear(linear, PanelLinear)
    residual = torch.randn(35, 2, outputs).bfloat16().transpose(0, 1) / 2
    x = torch.randn(2, 35, 96).bfloat16()
    exact = copy.deepcopy(linear).double()(x.double()) + residual.double()
    in_torch = (linear(x) + residual).double()
    found = layer(x, residual).double()
    assert (found - exact).norm() < 0.95 * (in_torch - exact).norm()
    torch.testing.assert_close(
        found,
        exact,
        atol=1e-5,
        rtol=2**-8,
    )


@needs_native
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gate", [GateKind.SWIGLU, GateKind.GELU])
@torch.inference_mode()
def test_a_gated_layer_multiplies_by_its_gate_and_rounds_once(gate, bias) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(
        96,
        2 * 112,
        bias=bias,
        dtype=torch.bfloat16,
    )
    layer = packed_linear(linear, PanelLinear, gate)
    assert torch.equal(layer.weight, linear.weight)
    x = torch.randn(2, 35, 96).bfloat16() * 8
    exact = gated(copy.deepcopy(linear).double()(x.double()), gate)
    in_torch = gated(linear(x), gate).double()
    found = layer(x).double()
    assert (found - exact).norm() < 0.7 * (in_torch - exact).norm()
    torch.testing.assert_close(
        found,
        exact,
        atol=1e-5,
        rtol=2**-8,
    )


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 5])
@torch.inference_mode()
def test_a_token_has_the_same_bits_in_every_pass(threads: int) -> None:
    torch.manual_seed(0)
    layer = packed_linear(torch.nn.Linear(576, 416, dtype=torch.bfloat16), PanelLinear)
    x = torch.randn(901, 576).bfloat16()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([layer(row[None]) for row in x])
        for rows in (2, 11, 12, 13, 24, 100, 384, 385, 901):
            assert torch.equal(layer(x[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(threads_before)


@needs_native
@pytest.mark.usefixtures("without_amx")
# The heads of the methods with Medusa compute in float32 only.
@pytest.mark.parametrize(
    ("method", "kind"), methods_and(FAMILIES, sorted(set(CASES) - {"medusa", "apar_medusa"}))
)
def test_answers_are_the_same_bits_whatever_they_are_batched_with(method, kind) -> None:
    model, _ = pair(kind, head_dim=32)
    model = pack_model(model.bfloat16())
    case = case_of(method, "llama")
    answers = set()
    for batch, tokens in ((1, 2048), (64, 2048), (3, 60)):
        engine = Engine(model, max_num_seqs=batch, max_num_batched_tokens=tokens)
        answers.add(repr(engine.run(case.programs())))  # Tokens and log-probabilities.
    assert len(answers) == 1


@needs_native
@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "gpt_oss", "gemma3_text", "youtu"]
)
def test_a_stable_engine_answers_as_one_prompt_a_question_in_the_very_bits(kind: str) -> None:
    has_windows = kind in ("mistral", "gpt_oss", "gemma3_text")
    window = {"sliding_window": 70} if has_windows else {}
    model = pack_model(
        tiny_model(
            kind,
            head_dim=32,
            **window,
        ).bfloat16(),
        stable=True,
    )
    rng = random.Random(0)

    def context() -> Context:
        tokens = tokens_of(rng, 20, 150)
        questions = [Question(tokens_of(rng, 1, 30), eleventh) for _ in range(5)]
        return Context(tokens, questions)

    def answers(prompts: list[PromptTree], batch: int, tokens: int) -> list[Continuation]:
        engine = Engine(model, max_num_seqs=batch, max_num_batched_tokens=tokens, stable=True)
        by_prompt = engine.run(intra_prompt(prompt, 30) for prompt in prompts)
        return [answer for prompt_answers in by_prompt for answer in prompt_answers]

    tree = PromptTree(range(5, 42), [context() for _ in range(4)])
    apart = []
    for context_of_tree in tree.contexts:
        for question in context_of_tree.questions:
            one_question = replace(context_of_tree, questions=[question])
            apart.append(PromptTree(tree.instruction, [one_question]))
    expected = answers(apart, 1, 2048)
    assert {len(answer.tokens) for answer in expected} > {30}
    batches = [
        (apart, 7, 300),
        ([tree], 1, 2048),
        ([tree, *apart[:3]], 4, 100),
    ]
    for prompts, batch, tokens in batches:
        found = answers(prompts, batch, tokens)
        assert repr(found[: len(expected)]) == repr(expected)


def test_an_engine_is_not_stable_where_products_are_torchs() -> None:
    with pytest.raises(ValueError, match="in bfloat16, on a processor with AVX-512 BF16"):
        Engine(tiny_model("llama"), stable=True)


@pytest.mark.parametrize("kind", [torch.nn.Linear, *PACKED])
@pytest.mark.parametrize("rows", [1, 3, 70])
@torch.inference_mode()
def test_some_outputs_are_those_of_the_layer(rows: int, kind: type) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(
        1536,
        300,
        bias=False,
        dtype=torch.bfloat16,
    )
    if kind is not torch.nn.Linear:
        layer = packed_linear(layer, kind)
    x = torch.randn(rows, 1536).bfloat16()
    outputs = torch.tensor([0, 3, 31, 32, 95, 200, 299])
    found = narrowed(layer, outputs)(x)
    expected = layer(x)[:, outputs]
    if kind is PanelLinear:
        assert torch.equal(found, expected)
    torch.testing.assert_close(
        found,
        expected,
        atol=1e-2,
        rtol=2**-7,
    )


@needs_native
@pytest.mark.parametrize("shape", [(0, 576), (1, 16), (2, 35, 576), (700, 2048)])
def test_rms_norm_rounds_as_transformers(shape) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], 1e-5).bfloat16()
    norm.weight.data.normal_()
    for x in (torch.randn(shape).bfloat16() * 5, torch.zeros(shape).bfloat16()):
        found = native.rms_norm(x, norm.weight, 1e-5)
        expected = norm(x)
        # A few numbers may differ, because squares are added up in another order.
        assert (found != expected).sum() <= found.numel() / 1000
        torch.testing.assert_close(
            found,
            expected,
            atol=0,
            rtol=2**-7,
        )


@needs_native
@pytest.mark.parametrize(("gate", "atol"), [(GateKind.SWIGLU, 1e-30), (GateKind.GELU, 1e-14)])
def test_a_gate_is_nearer_to_float64_than_torch(gate: GateKind, atol: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 35, 2 * 1536).bfloat16() * 8
    x[0, 0, :5] = torch.tensor([0.0, -300.0, 300.0, -3e38, 88.0])
    exact = gated(x.double(), gate)
    found = native.gated(x, gate).double()
    in_torch = gated(x, gate).double()
    assert (found - exact).norm() < (in_torch - exact).norm()
    torch.testing.assert_close(
        found,
        exact,
        atol=atol,
        rtol=2**-8,
    )


@needs_native
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
        ("qwen3_moe", {}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 64}),
        ("mixtral", {}),
        ("gpt_oss", {"sliding_window": 7}),
    ],
)
@pytest.mark.parametrize("builder", [CBuilder, AmxBuilder])
def test_layers_in_fewer_steps_are_as_near_to_float64(kind, extra, builder, monkeypatch) -> None:
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: builder is CBuilder)
    model = tiny_model(kind, head_dim=64, **extra).bfloat16()
    ids = torch.arange(5, 65)
    exact = logits_of(copy.deepcopy(model).double(), ids)
    error_before = (logits_of(model, ids) - exact).abs()
    packed = pack_model(model)
    assert type(packed.builder) is builder
    assert packed.builder.fallbacks == []
    assert torch.nn.Linear not in kinds_of(model)
    assert torch.nn.Linear not in kinds_of(packed)
    error = (logits_of(packed, ids) - exact).abs()
    if hasattr(model.config, "num_experts_per_tok"):
        # In a mixture a rounding may send a token to another expert.
        assert error.mean(-1).median() < 1.1 * error_before.mean(-1).median()
        return
    assert error.mean() < 1.1 * error_before.mean()
    assert error.max() < 1.5 * error_before.max()


def test_models_in_other_dtypes_are_not_packed() -> None:
    model = tiny_model("llama", head_dim=32)
    assert pack_model(model) is model
    assert not {PackedLinear, PanelLinear} & set(kinds_of(model))
    assert type(Engine(model).model.builder) is Builder


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=needs_native), "fp8"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 96), (1, 96), (2, 35, 96)])
@torch.inference_mode()
def test_an_8_bit_layer_multiplies_what_it_rounds_to(
    shape: tuple[int, ...], bias: bool, kind: str
) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(
        96,
        208,
        bias=bias,
        dtype=torch.bfloat16,
    )
    layer = Int8Linear.of(linear) if kind == "int8" else Fp8Linear.of(linear)
    x = torch.randn(shape).bfloat16() * 10
    x[..., 3] *= 50  # One feature is large, as in real models.
    found = layer(x)
    assert found.dtype == torch.bfloat16
    assert found.shape == (*shape[:-1], 208)
    weight = layer.weight.double() * layer.scale.double().reshape(-1, 1)
    rounding = float(layer.scale.max())
    largest = x.abs().amax(-1, keepdim=True)
    if kind == "int8":
        torch.testing.assert_close(
            weight,
            linear.weight.double(),
            atol=rounding * 0.51,
            rtol=0,
        )
        scale = largest.double() / 127
        rounded = (x.double() / scale).round() * scale
        atol = 0.2  # A number in the middle may be rounded to the other side.
    else:
        torch.testing.assert_close(
            weight,
            linear.weight.double(),
            atol=rounding,
            rtol=2**-4,
        )
        scale = largest.float() / 448
        rounded = (x / scale).to(torch.float8_e4m3fn).double() * scale
        atol = 1e-3
    exact = rounded @ weight.t()
    if bias:
        exact = exact + linear.bias.double()
    torch.testing.assert_close(
        found.double(),
        exact,
        atol=atol,
        rtol=2**-7,
    )
    assert (found.double() - exact).norm() <= 0.004 * exact.norm()
    if len(shape) == 3:
        # A token has a scale of its own, so it makes no difference what else is in the pass.
        assert torch.equal(layer(x[1:, 7:8]), found[1:, 7:8])


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=needs_native), "fp8"])
@torch.inference_mode()
def test_an_8_bit_layer_of_zeros_gives_its_bias(kind: str) -> None:
    linear = torch.nn.Linear(96, 208, dtype=torch.bfloat16)
    layer = Int8Linear.of(linear) if kind == "int8" else Fp8Linear.of(linear)
    found = layer(torch.zeros(2, 96).bfloat16())
    assert torch.equal(found, linear.bias.expand(2, -1))


def test_a_device_never_holds_the_whole_model_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3", head_dim=32).bfloat16()
    layers = [m.weight.numel() for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    in_fp8 = quantized.in_fp8
    held: list[int] = []  # Numbers in bfloat16 on the device when each layer is converted.

    def noted(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        on_device = [p for p in model.parameters() if p.device.type == "meta"]
        held.append(sum(p.numel() for p in on_device if p.dtype == torch.bfloat16))
        return in_fp8(weight)

    monkeypatch.setattr(quantized, "in_fp8", noted)
    quantize(model, "fp8", torch.device("meta"))
    assert held == layers
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("kind", "quantization", "layer", "min_error", "max_error"),
    [
        pytest.param("llama", "w8a8", Int8Linear, 0.001, 0.1, marks=needs_native),
        ("qwen3", "fp8", Fp8Linear, 0.005, 0.2),
    ],
)
@pytest.mark.usefixtures("without_amx")
def test_a_quantized_model_decodes(kind, quantization, layer, min_error, max_error) -> None:
    model = tiny_model(kind, head_dim=32).bfloat16()
    quantize(model, quantization)
    assert kinds_of(model).count(layer) == 2 * 7
    assert kinds_of(model).count(torch.nn.Linear) == 1
    ids = torch.arange(5, 60)
    with torch.inference_mode():
        exact = tiny_model(kind, head_dim=32)(ids[None]).logits[0]
        error = relative_error(model(ids[None]).logits[0], exact)
        assert min_error < error < max_error
        if layer is Int8Linear:
            model = pack_model(model)
            packed_error = relative_error(logits_of(model, ids), exact)
            assert abs(packed_error - error) < 0.3 * error
            assert kinds_of(model).count(Int8Linear) == 2 * 4
    prompts = prompts_of(3, 5)  # Some share a prefix.
    answers = Engine(model).run(autoregressive(prompt, 12, never) for prompt in prompts)
    assert [len(answer.tokens) for answer in answers] == [12] * 5


@pytest.mark.parametrize(
    ("kind", "quantization", "dtype", "max_error"),
    [
        pytest.param("qwen3_moe", "w8a8", torch.int8, 0.1, marks=needs_native),
        pytest.param("gpt_oss", "w8a8", torch.int8, 0.1, marks=needs_native),
        ("gpt_oss", "fp8", torch.float8_e4m3fn, 0.2),
    ],
)
@pytest.mark.usefixtures("without_amx")
@torch.inference_mode()
def test_experts_are_quantized_like_other_products(kind, quantization, dtype, max_error) -> None:
    model = tiny_model(kind, head_dim=32).bfloat16()
    ids = torch.arange(5, 60)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(50, 64).bfloat16()
    numbers = torch.stack([torch.randperm(4)[:2] for _ in range(50)])
    weights = torch.rand(50, 2).bfloat16()
    exact = experts(x, numbers, weights)
    quantize(model, quantization)
    quantized_experts = model.model.layers[0].mlp.experts
    assert {parameter.dtype for parameter in quantized_experts.parameters()} == {dtype}
    error = relative_error(quantized_experts(x, numbers, weights), exact)
    assert 0.001 < error < max_error
    if dtype == torch.int8:
        in_torch = logits_of(copy.deepcopy(model), ids).double()
        packed = pack_model(model)
        assert packed.builder.fallbacks == []
        # Inputs of the packed ones are rounded too.
        assert (logits_of(packed, ids) - in_torch).norm(dim=-1).median() < (
            0.1 * in_torch.norm(dim=-1).median()
        )


@needs_native
@pytest.mark.parametrize("gate", [GateKind.SWIGLU, GateKind.CLAMPED])
@torch.inference_mode()
def test_grouped_products_are_those_of_each_expert(gate) -> None:
    torch.manual_seed(0)
    weights = torch.randn(5, 2 * 48, 96).bfloat16()
    bias = torch.randn(5, 2 * 48).bfloat16()
    counts = torch.tensor([3, 0, 1, 900, 13])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    x = torch.randn(int(counts.sum()), 96).bfloat16()
    found = GroupedPanels(weights, bias, int(gate), 1.7, 2.0)(x, starts)
    plain = GroupedPanels(weights, bias)(x, starts)
    for number, (start, end) in enumerate(pairwise(starts.tolist())):
        joined = x[start:end].double() @ weights[number].double().T + bias[number].double()
        torch.testing.assert_close(
            plain[start:end].double(),
            joined,
            atol=1e-4,
            rtol=2**-7,
        )
        exact = Gate(gate, 1.7, 2.0)(joined)
        torch.testing.assert_close(
            found[start:end].double(),
            exact,
            atol=1e-3,
            rtol=2**-7,
        )


@torch.inference_mode()
def test_layers_of_fp8_in_one_give_what_each_gives() -> None:
    in_triton = pytest.importorskip("raypd.decoding.layers.in_triton", exc_type=ImportError)
    owner = torch.nn.Module()
    owner.query = Fp8Linear.of(torch.nn.Linear(96, 64, dtype=torch.bfloat16))
    owner.key = Fp8Linear.of(torch.nn.Linear(96, 32, dtype=torch.bfloat16))
    owner.value = Fp8Linear.of(torch.nn.Linear(96, 48, dtype=torch.bfloat16))
    x = torch.randn(35, 96).bfloat16()
    apart = torch.cat([layer(x) for layer in owner.children()], 1)
    joined = in_triton.joined(Linears(owner, "query", "key", "value"))
    assert torch.equal(joined(x), apart)
    assert list(owner.children()) == []


@needs_kernel
@pytest.mark.parametrize("seed", range(20))
def test_a_random_pass_is_as_near_to_float64_as_torchs_attention_is(seed):
    rng = random.Random(seed)
    dim = (32, 64, 96, 128, 256)[seed % 5]
    value_dim = rng.choice([dim, 64])
    kv_heads = rng.choice([1, 2, 3])
    check_kernel(rng, seed, dim, value_dim, kv_heads, rng.choice([1, 2, 3, 7, 32]), False)


@needs_kernel
@pytest.mark.parametrize(
    ("dim", "latent_dim", "heads"),
    # A tiny model, MiniCPM3, GLM-4.7-Flash and DeepSeek V3.
    [(96, 64, 4), (288, 256, 40), (576, 512, 20), (576, 512, 128)],
)
def test_attention_to_latents_is_as_near_to_float64_as_torchs_to_values(dim, latent_dim, heads):
    for seed in range(2):
        check_kernel(random.Random(seed), seed, dim, latent_dim, 1, heads, True)


def check_kernel(
    rng: random.Random,
    seed: int,
    dim: int,
    value_dim: int,
    kv_heads: int,
    repeat: int,
    is_latent: bool,
) -> None:
    """Compare the kernel with torch's attention, which gets values apart, on a random pass."""
    generator = torch.Generator().manual_seed(seed)
    step = random_pass(rng, CPU, (40, 200, 300)[seed % 3])
    tokens = len(step.slots)
    slots = step.cache.allocator.slots

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    keys = numbers(slots, kv_heads, dim)
    values = numbers(slots, kv_heads, value_dim)
    query = numbers(tokens, kv_heads * repeat, dim)
    key = numbers(kv_heads, tokens, dim).transpose(0, 1)
    value = numbers(kv_heads, tokens, value_dim).transpose(0, 1)
    if is_latent:
        values = keys[..., :value_dim]
        value = key[..., :value_dim]

    def attend(attention: Attend, layer: AttentionLayer, dtype: torch.dtype) -> torch.Tensor:
        step.cache.keys[0] = keys.to(dtype, copy=True)
        step.cache.values[0] = values.to(dtype, copy=True)
        step._masks.clear()  # Masks have the dtype of the attention that asked for them first.
        new_value = value.to(dtype)
        if layer.latent_dim is not None:
            del step.cache.values[0]
            new_value = None
        out = attention(step, layer, query.to(dtype), key.to(dtype), new_value)
        return out.double()

    for window in (None, rng.randint(1, 12), 60, 10_000):
        sinks = rng.choice([None, numbers(kv_heads * repeat)])
        scale = rng.choice([dim**-0.5, 0.5])
        layer = AttentionLayer(0, scale, window, rng.choice([None, 2.0]), sinks)
        exact = attend(sdpa.attend, layer, torch.float64)
        torch_error = (attend(sdpa.attend, layer, torch.bfloat16) - exact).abs()
        if is_latent:
            layer = layer._replace(latent_dim=value_dim)
            in_torch = attend(sdpa.attend, layer, torch.float64)
            torch.testing.assert_close(in_torch, exact, atol=1e-12, rtol=0)
        for kernel in (avx512.attend, avx512.attend_stable):
            error = (attend(kernel, layer, torch.bfloat16) - exact).abs()
            assert error.mean() <= 1.05 * torch_error.mean(), layer
            assert error.max() <= 2 * torch_error.max(), layer


@needs_kernel
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
@pytest.mark.parametrize("method", ["autoregressive", "hyper_parallel", "intra_prompt"])
def test_a_method_decodes_what_the_unmodified_model_says(method, kind, monkeypatch):
    """In bfloat16 a token may be another one if the two best are close to each other."""
    takes = avx512._takes
    results = set()

    def noted(*tensors: torch.Tensor) -> bool:
        result = takes(*tensors)
        results.add(result)
        return result

    monkeypatch.setattr(avx512, "_takes", noted)
    model, stock = pair(kind, head_dim=32)
    case = CASES[method](stock)
    engine = Engine(
        model.bfloat16(),
        max_num_seqs=3,
        max_num_batched_tokens=60,
        attention="avx512",
    )
    case.check(engine.run(case.programs()), 0.5)
    assert results == {True}


# The kernel does not take float32, nor the heads of a tiny model by default.
@needs_kernel
@pytest.mark.parametrize(
    ("dtype", "sizes"), [(torch.float32, {"head_dim": 32}), (torch.bfloat16, {})]
)
def test_what_the_kernel_does_not_take_goes_to_torch(dtype, sizes, monkeypatch):
    answers = []
    for attention in ("sdpa", "avx512"):
        engine = Engine(tiny_model("llama", **sizes).to(dtype), attention=attention)
        with monkeypatch.context() as patch:
            patch.setattr(avx512, "struct", None)  # The kernel would fail.
            programs = (autoregressive(prompt, 5, never) for prompt in prompts_of(3, 2, 20))
            answers.append([answer.tokens for answer in engine.run(programs)])
    assert answers[0] == answers[1]


@needs_kernel
@pytest.mark.parametrize(
    ("capabilities", "dtype", "attend"),
    [
        ({"avx512_bf16"}, torch.bfloat16, avx512.attend),
        ({"avx512_bf16"}, torch.float32, sdpa.attend),
        ({"avx512_bf16", "amx_bf16"}, torch.bfloat16, sdpa.attend),
        (set(), torch.bfloat16, sdpa.attend),
    ],
)
def test_auto_takes_the_kernel_for_bfloat16_where_there_is_no_amx(
    capabilities, dtype, attend, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(capabilities, True))
    assert Engine(tiny_model("llama").to(dtype)).attend is attend


@needs_kernel
def test_the_kernel_is_refused_where_the_processor_cannot_run_it(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(ValueError, match="needs a processor with AVX-512 BF16"):
        Engine(tiny_model("llama").bfloat16(), attention="avx512")


@needs_kernel
@pytest.mark.parametrize(
    ("compiler", "reason"), [("false", "false ended with 1"), ("", "there is no C compiler")]
)
def test_without_a_compiler_it_is_refused_and_auto_does_without(
    compiler, reason, tmp_path, monkeypatch
):
    # The library that is loaded already must not be used.
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("PATH", os.environ["PATH"] if compiler else "/nowhere")
    with pytest.raises(ValueError, match=rf"cannot be compiled \({reason}"):
        Engine(tiny_model("llama").bfloat16(), attention="avx512")
    assert Engine(tiny_model("llama").bfloat16()).attend is sdpa.attend
    assert not list(tmp_path.rglob("*.so"))


@needs_kernel
def test_the_library_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = native.library.__wrapped__
    load()
    assert [file.suffix for file in (tmp_path / "raypd").iterdir()] == [".so"]
    compile_ = mock.Mock()
    monkeypatch.setattr(native, "_compile", compile_)
    load()
    assert not compile_.called
