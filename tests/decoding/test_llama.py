"""The Llama family written out, its packed and 8-bit layers and C kernel, against transformers and
float64.
"""

import copy
import os
import random
from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from raypd.decoding import native, quantized
from raypd.decoding.attention import avx512, sdpa
from raypd.decoding.attention.step import Attend, AttentionLayer
from raypd.decoding.engine import Engine
from raypd.decoding.linear import PackedLinear, PanelLinear, is_possible, narrowed
from raypd.decoding.llama import AmxLayer, Layer, Llama, NativeLayer
from raypd.decoding.methods.autoregressive import Continuation, autoregressive
from raypd.decoding.methods.intra_prompt import Context, PromptTree, Question, intra_prompt
from raypd.decoding.pack import pack
from raypd.decoding.quantized import Fp8Linear, Int8Linear, quantize
from raypd.decoding.stock import Stock
from tests.decoding.cases import CASES, FAMILIES, case_of, eleventh, pair
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
_takes = avx512._takes


def panels(linear: torch.nn.Linear, *gated: bool, kind: type = PanelLinear) -> torch.nn.Module:
    return kind(
        linear.weight.detach(), None if linear.bias is None else linear.bias.detach(), *gated
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        ),
        ("mistral", {"sliding_window": 7}),
        *(
            (kind, {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1})
            for kind in ("qwen2", "qwen3")
        ),
        ("gemma2", {}),
    ],
)
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
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0]))
        )
    Engine(model, max_num_batched_tokens=30).run(
        autoregressive(prompt, 4, never) for prompt in prompts
    )
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
        torch.testing.assert_close(
            found.double(), exact(x.bfloat16().double()), atol=1e-5, rtol=2**-8
        )
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
    torch.testing.assert_close(
        packed.get_input_embeddings().weight, model.get_input_embeddings().weight
    )
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
def test_a_layer_adds_the_residual_or_multiplies_by_its_gate_and_rounds_once(
    bias, outputs, gated
) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, outputs, bias=bias, dtype=torch.bfloat16)
    layer, residual = (
        panels(linear, gated),
        torch.randn(35, 2, outputs).bfloat16().transpose(0, 1) / 2,
    )
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
    layer, x = (
        panels(torch.nn.Linear(576, 416, dtype=torch.bfloat16)),
        torch.randn(901, 576).bfloat16(),
    )
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
# Their heads know float32 alone.
@pytest.mark.parametrize("method", sorted(set(CASES) - {"medusa", "apar_medusa"}))
def test_answers_are_the_same_bits_whatever_they_are_batched_with(
    method, kind, monkeypatch
) -> None:
    # On processors with AMX, too.
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: True)
    model, case, found = (
        pack(pair(kind, head_dim=32)[0].bfloat16()),
        case_of(method, "llama"),
        set(),
    )
    for at_once, tokens in ((1, 2048), (64, 2048), (3, 60)):
        engine = Engine(model, max_num_seqs=at_once, max_num_batched_tokens=tokens)
        found.add(repr(engine.run(case.programs())))  # tokens and log-probabilities
    assert len(found) == 1


@needs_native
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_stable_engine_answers_as_one_prompt_a_question_in_the_very_bits(kind: str) -> None:
    model = pack(
        tiny_model(
            kind, head_dim=32, **({"sliding_window": 70} if kind == "mistral" else {})
        ).bfloat16(),
        stable=True,
    )
    rng = random.Random(0)

    def context() -> Context:
        return Context(
            tokens_of(rng, 20, 150), [Question(tokens_of(rng, 1, 30), eleventh) for _ in range(5)]
        )

    def answers(prompts: list[PromptTree], at_once: int, tokens: int) -> list[Continuation]:
        engine = Engine(model, max_num_seqs=at_once, max_num_batched_tokens=tokens, stable=True)
        return [
            answer
            for of_prompt in engine.run(intra_prompt(p, 30) for p in prompts)
            for answer in of_prompt
        ]

    tree = PromptTree(range(5, 42), [context() for _ in range(4)])
    apart = [
        PromptTree(tree.instruction, [replace(c, questions=[q])])
        for c in tree.contexts
        for q in c.questions
    ]
    wanted = answers(apart, 1, 2048)
    assert {len(answer.tokens) for answer in wanted} > {30}
    for prompts, at_once, tokens in (
        (apart, 7, 300),
        ([tree], 1, 2048),
        ([tree, *apart[:3]], 4, 100),
    ):
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
        # Sums of squares may go in another order.
        assert (found != wanted).sum() <= found.numel() / 1000
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
@pytest.mark.parametrize("layer", [NativeLayer, AmxLayer])
def test_layers_in_fewer_steps_are_as_near_to_float64(kind, extra, layer, monkeypatch) -> None:
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: layer is NativeLayer)
    model, ids = tiny_model(kind, head_dim=64, **extra).bfloat16(), torch.arange(5, 65)
    exact = logits_of(copy.deepcopy(model).double(), ids)
    before = (logits_of(model, ids) - exact).abs()
    packed = pack(model)
    assert {type(source) for source in packed.layers} == {layer}
    assert not any(
        type(module) is torch.nn.Linear for module in (*model.modules(), *packed.modules())
    )
    error = (logits_of(packed, ids) - exact).abs()
    assert error.mean() < 1.1 * before.mean()
    assert error.max() < 1.5 * before.max()


def test_other_types_are_left_alone() -> None:
    model = tiny_model("llama", head_dim=32)
    assert pack(model) is model
    assert not any(isinstance(module, PackedLinear | PanelLinear) for module in model.modules())
    assert {type(layer) for layer in Engine(model).model.layers} == {Layer}


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=needs_native), "fp8"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 96), (1, 96), (2, 35, 96)])
@torch.inference_mode()
def test_a_layer_multiplies_what_it_rounds_to(
    shape: tuple[int, ...], bias: bool, kind: str
) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 208, bias=bias, dtype=torch.bfloat16)
    layer = Int8Linear.of(linear) if kind == "int8" else Fp8Linear.of(linear)
    x = torch.randn(shape).bfloat16() * 10
    x[..., 3] *= 50  # of one feature
    found = layer(x)
    assert (found.dtype, found.shape) == (torch.bfloat16, (*shape[:-1], 208))
    weight, step = (
        layer.weight.double() * layer.scale.double().reshape(-1, 1),
        float(layer.scale.max()),
    )
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
        # Whatever else is in the pass: scales are a token's own.
        assert torch.equal(layer(x[1:, 7:8]), found[1:, 7:8])
    assert (
        layer(torch.zeros(2, 96).bfloat16()).double().sub(linear.bias if bias else 0).abs().max()
        == 0
    )


def test_a_device_never_holds_the_whole_model_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held, convert = tiny_model("qwen3", head_dim=32).bfloat16(), [], quantized.in_fp8
    layers = [m.weight.numel() for m in model.model.modules() if isinstance(m, torch.nn.Linear)]

    def seen(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held.append(
            sum(
                p.numel()
                for p in model.parameters()
                if (p.device.type, p.dtype) == ("meta", torch.bfloat16)
            )
        )
        return convert(weight)

    monkeypatch.setattr(quantized, "in_fp8", seen)
    quantize(model, "fp8", torch.device("meta"))
    assert (held, {parameter.device.type for parameter in model.parameters()}) == (layers, {"meta"})


@pytest.mark.parametrize(
    ("kind", "quantization", "layer", "least", "most"),
    [
        pytest.param("llama", "w8a8", Int8Linear, 0.001, 0.1, marks=needs_native),
        ("qwen3", "fp8", Fp8Linear, 0.005, 0.2),
    ],
)
def test_a_quantized_model_decodes(kind, quantization, layer, least, most, monkeypatch) -> None:
    if layer is Int8Linear:
        # On processors with AMX, too.
        monkeypatch.setattr(avx512, "is_best", lambda device, dtype: True)
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
            assert (
                abs((logits_of(model, ids[0]) - before).norm() / before.norm() - error)
                < 0.3 * error
            )
            assert [type(module) for module in model.modules()].count(Int8Linear) == 2 * 4
    # Some share a prefix.
    answers = Engine(model).run(autoregressive(prompt, 12, never) for prompt in prompts_of(3, 5))
    assert [len(answer.tokens) for answer in answers] == [12] * 5


@torch.inference_mode()
def test_layers_of_fp8_in_one_give_what_each_gives() -> None:
    cuda_layer = pytest.importorskip("raypd.decoding.cuda_layer", exc_type=ImportError)
    layers = [
        Fp8Linear.of(torch.nn.Linear(96, outputs, dtype=torch.bfloat16)) for outputs in (64, 32, 48)
    ]
    x = torch.randn(35, 96).bfloat16()
    assert torch.equal(cuda_layer._joined(layers)(x), torch.cat([layer(x) for layer in layers], 1))


@needs_kernel
@pytest.mark.parametrize("seed", range(20))
def test_a_random_pass_is_as_near_to_float64_as_torchs_attention_is(seed):
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    step = random_pass(rng, CPU, (40, 200, 300)[seed % 3])
    dim = (32, 64, 96, 128, 256)[seed % 5]
    value_dim, kv_heads, repeat = (
        rng.choice([dim, 64]),
        rng.choice([1, 2, 3]),
        rng.choice([1, 2, 3, 7, 32]),
    )

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16()

    keys, values = (
        numbers(step.cache.allocator.slots, kv_heads, size) for size in (dim, value_dim)
    )
    new = [numbers(len(step.slots), kv_heads * repeat, dim)]
    new += [numbers(kv_heads, len(step.slots), size).transpose(0, 1) for size in (dim, value_dim)]
    for window in (None, rng.randint(1, 12), 60, 10_000):
        layer = AttentionLayer(0, rng.choice([dim**-0.5, 0.5]), window, rng.choice([None, 2.0]))
        outputs = []
        for attend, dtype in (
            (avx512.attend, torch.bfloat16),
            (avx512.attend_stable, torch.bfloat16),
            (sdpa.attend, torch.bfloat16),
            (sdpa.attend, torch.float64),
        ):
            step.cache.keys[0], step.cache.values[0] = (
                keys.to(dtype, copy=True),
                values.to(dtype, copy=True),
            )
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
@pytest.mark.parametrize(
    ("compiler", "why"), [("false", "false ended with 1"), ("", "there is no C compiler")]
)
def test_without_a_compiler_it_is_refused_and_auto_goes_on(compiler, why, tmp_path, monkeypatch):
    # What is loaded is not used again.
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
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
