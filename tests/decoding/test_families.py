"""The families of the registry: each is computed as transformers computes it, on every device."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from transformers import PreTrainedModel

from raypd.decoding import native
from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine
from raypd.decoding.layers.in_c import AmxBuilder, CBuilder
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.models.registry import FAMILIES, find_family
from raypd.decoding.pack import pack_model
from raypd.decoding.text import Prompt
from tests.decoding.drivers import built, logits_of, never
from tests.tiny import HYBRIDS, in_float64, tiny_model

needs_native = pytest.mark.skipif(
    native.refusal() is not None, reason=f"the machine {native.refusal()}"
)
# Models of Gemma 4 with an MLP or experts, which have no inputs per layer and share no keys.
LARGE_GEMMA4: dict[str, object] = {
    "sliding_window": 7,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 30.0,
}
# Positions from which the queries of a tiny model grow.
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 20,
    "llama_4_scaling_beta": 0.5,
}
# Granite with sliding windows. Its first layer does not rotate, and the others have two bases.
GRANITE_SWA: dict[str, object] = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "layer_rope_theta": [0, 1e4, 5e4],
    "sliding_window": 7,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "embedding_multiplier": 3.0,
}
# transformers' types of model with a family, and what their tiny models have beside the sizes. Some
# have variants, whose names stand behind a colon.
KINDS: dict[str, dict[str, object]] = {
    "llama": {},
    "ministral": {"sliding_window": 7},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "afmoe": {"sliding_window": 7},
    "apertus": {},
    "arcee": {},
    "axk1": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v3:halves": {"rope_interleave": False, "q_lora_rank": None, "attention_bias": True},
    "dots1": {"sliding_window": 7, "max_window_layers": 1},
    "exaone_moe": {"sliding_window": 7},
    "gemma3n_text": {"sliding_window": 7},
    "gemma4_text": {"sliding_window": 7},
    "gemma4_text:dense": LARGE_GEMMA4,
    "gemma4_text:experts": {
        **LARGE_GEMMA4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "gemma4_unified_text": {**LARGE_GEMMA4, "attention_k_eq_v": False},
    "glm4_moe_lite": {},
    "hy_v3": {},
    "minicpm3": {},
    # All experts, so that no rounding sends a token to another one.
    "minimax_m2": {"num_experts_per_tok": 4},
    "ministral3": {"rope_parameters": dict(GROWING), "sliding_window": 7},
    "mistral4": {"rope_parameters": dict(GROWING)},
    "starcoder2": {"sliding_window": 7},
    "solar_open": {"n_group": 1},
    "youtu": {},
    "qwen2_moe": {
        "shared_expert_intermediate_size": 64,
        "use_sliding_window": True,
        "sliding_window": 7,
    },
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 7},
    "mixtral": {"sliding_window": 7},
    "gpt_oss": {"sliding_window": 7},
    "cohere": {},
    "cohere2": {"sliding_window": 7, "num_hidden_layers": 4},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {"sliding_window": 7},
    "gemma": {},
    "gemma2": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 7, "sliding_window_pattern": 2},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "granitemoe": {"residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "residual_multiplier": 0.5,
    },
    "granite_swa": GRANITE_SWA,
    "granitemoe_swa": {
        **GRANITE_SWA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "granitemoehybrid:attention": {
        "num_hidden_layers": 2,
        "layer_types": ["attention", "attention"],
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.5,
    },
    "granitemoehybrid:experts": {
        "num_hidden_layers": 2,
        "layer_types": ["attention", "attention"],
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
    },
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 7},
    "olmoe": {},
    "phi3": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_window": 7,
    },
    "smollm3": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "granitemoehybrid": {
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "position_embedding_type": "rope",
    },
    "bamba": {},
    "nemotron_h": {},
    "falcon_h1": {
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.7,
        "embedding_multiplier": 2.0,
        "key_multiplier": 0.6,
        "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.8, 0.7],
        "ssm_in_multiplier": 1.3,
        "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
        "ssm_out_multiplier": 0.8,
    },
    "lfm2": {},
    "lfm2_moe": {"use_expert_bias": True},
}
# The parts that the builders of native.c leave to torch.
LEFT_TO_TORCH = {
    "afmoe": {"router BatchRouter"},
    "apertus": {"activation XIELUActivation"},
    "arcee": {"activation ReLUSquaredActivation"},
    "axk1": {"router AXK1TopkRouter"},
    "cohere": {"norm CohereLayerNorm"},
    "cohere2": {"norm Cohere2LayerNorm"},
    "deepseek_v2": {"router DeepseekV2TopkRouter"},
    "deepseek_v3": {"router DeepseekV3TopkRouter"},
    "deepseek_v3:halves": {"products", "router DeepseekV3TopkRouter"},
    "dots1": {"router Dots1TopkRouter"},
    "ernie4_5_moe": {"router Ernie4_5_MoeTopKRouter"},
    "exaone_moe": {"router ExaoneMoeTopkRouter"},
    "gemma3n_text": {"activation of an MLP", "activation GELUTanh"},
    "gemma4_text": {"activation GELUTanh"},
    "gemma4_text:experts": {"router Gemma4TextRouter"},
    "glm4_moe": {"router Glm4MoeTopkRouter"},
    "glm4_moe_lite": {"router Glm4MoeLiteTopkRouter"},
    "hunyuan_v1_moe": {"router HunYuanMoEV1Gate"},
    "falcon_h1": {"activation of an MLP"},
    "hy_v3": {"router HYV3TopKRouter"},
    "lfm2_moe": {"router Lfm2MoeTopKRouter"},
    "minimax_m2": {"router MiniMaxM2TopKRouter"},
    "mistral4": {"router Mistral4TopkRouter"},
    "solar_open": {"router SolarOpenTopkRouter"},
    "starcoder2": {"norm LayerNorm", "activation GELUTanh"},
}
# Their norms or routers are those of transformers, which compute in float32 in every dtype. So do
# recurrences, over whole texts.
IN_FLOAT32 = {
    "afmoe",
    "axk1",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3:halves",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "gemma3n_text",
    "gemma4_text:experts",
    "glm4_moe",
    "glm4_moe_lite",
    "hunyuan_v1_moe",
    "hy_v3",
    "minimax_m2",
    "mistral4",
    "solar_open",
}
# Families whose cache holds latents. Their heads have sizes of their own.
LATENT = {
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3:halves",
    "glm4_moe_lite",
    "minicpm3",
    "mistral4",
    "youtu",
}
# Models whose heads together are as large as their hidden states.
HEADS_OF_HIDDEN_SIZE = {"olmoe", "starcoder2"}
# Scalings of the rotation from a length on that texts of the tests reach, by kinds of models.
TRAINED_LENGTH = {"original_max_position_embeddings": 16}
ROTATIONS: dict[str, tuple[str, dict[str, object]]] = {
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **TRAINED_LENGTH,
        },
    ),
    "yarn": ("qwen3", {"rope_type": "yarn", "factor": 4.0, **TRAINED_LENGTH}),
    "yarn with mscale": (
        "deepseek_v3",
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            **TRAINED_LENGTH,
        },
    ),
    "yarn that is not truncated": (
        "gpt_oss",
        {"rope_type": "yarn", "factor": 32.0, "truncate": False, **TRAINED_LENGTH},
    ),
    "longrope": (
        "phi3",
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.5] * 8,
            "long_factor": [1.5] * 8,
            **TRAINED_LENGTH,
        },
    ),
}
IDS = torch.arange(5, 65)


def tiny(kind: str, head_dim: int = 16) -> PreTrainedModel:
    sizes = {} if kind in LATENT else {"head_dim": head_dim}
    if kind in HEADS_OF_HIDDEN_SIZE:
        sizes["hidden_size"] = 4 * head_dim
    model = tiny_model(type_of(kind), **KINDS[kind], **sizes)
    if hasattr(model, "set_experts_implementation"):
        # Its grouped products know no float64.
        model.set_experts_implementation("eager")
    return model


def type_of(kind: str) -> str:
    return kind.partition(":")[0]


def median_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error of the token in the middle.

    In a mixture a rounding may send a token to another expert.
    """
    return float((found - exact).norm(dim=-1).median() / exact.norm(dim=-1).median())


def test_every_family_is_tested() -> None:
    classes = {type(tiny(kind)).__name__ for kind in KINDS}
    registered = {name for family in FAMILIES for name in family.classes}
    assert classes == registered, (
        f"add to KINDS the model types of {sorted(registered - classes)}, or their classes to a "
        f"Family: {sorted(classes - registered)}"
    )


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_family_has_the_logits_of_transformers(kind: str) -> None:
    model = tiny(kind)
    expected = model(IDS[None], use_cache=False).logits[0]
    assert find_family(model) is not None
    assert isinstance(Engine(copy.deepcopy(model)).model, DecoderModel)
    # Sums over a text's states are added up in another order.
    tolerance = 1e-3 if kind in HYBRIDS else 1e-4
    torch.testing.assert_close(
        logits_of(model, IDS),
        expected,
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize("name", ROTATIONS)
@torch.inference_mode()
def test_every_scaling_of_the_rotation_is_that_of_transformers(name: str) -> None:
    kind, rope = ROTATIONS[name]
    model = tiny_model(kind, rope_parameters={"rope_theta": 1e4, **rope})
    plain = tiny_model(kind)
    expected = model(IDS[None], use_cache=False).logits[0]
    assert not torch.allclose(expected, plain(IDS[None], use_cache=False).logits[0], atol=0.1)
    assert isinstance(Engine(copy.deepcopy(model)).model, DecoderModel)
    torch.testing.assert_close(
        logits_of(model, IDS),
        expected,
        atol=1e-4,
        rtol=1e-4,
    )


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("builder", [CBuilder, AmxBuilder])
def test_packed_parts_are_as_near_to_float64(kind, builder, monkeypatch) -> None:
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: builder is CBuilder)
    model = tiny(kind, 64).bfloat16()
    exact = logits_of(copy.deepcopy(model).double(), IDS)
    error_before = median_error(logits_of(built(copy.deepcopy(model), Builder()), IDS), exact)
    packed = pack_model(model)
    assert type(packed.builder) is builder
    left = set(packed.builder.fallbacks)
    assert left == LEFT_TO_TORCH.get(kind, set()), (
        f"native.c lacks these parts, so torch computes them: {left}. If that is meant, add them "
        f"to LEFT_TO_TORCH under {kind!r}"
    )
    assert torch.nn.Linear not in {type(module) for module in packed.modules()}
    assert median_error(logits_of(packed, IDS), exact) < 1.15 * error_before


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="test_triton.py runs it")
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_parts_for_gpus_have_the_logits_of_transformers(kind: str) -> None:
    from raypd.decoding.layers.in_triton import CudaBuilder

    model = in_float64(tiny(kind))
    ids = IDS[:28]
    expected = model(ids[None], use_cache=False).logits[0]
    found = logits_of(built(model, CudaBuilder()), ids, "triton")
    atol = 1e-5 if kind in IN_FLOAT32 else 1e-9
    if kind in HYBRIDS:
        atol = 1e-4
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", sorted(LATENT))
def test_a_token_of_latent_attention_takes_a_latent_and_a_key_per_layer(kind: str) -> None:
    model = tiny(kind)
    config = model.config
    engine = Engine(model)
    engine.run([autoregressive(Prompt([5, 6, 7]), 2, never)])
    numbers = config.kv_lora_rank + config.qk_rope_head_dim
    assert engine.cache.slot_bytes == 4 * numbers * config.num_hidden_layers
    assert engine.cache.values == {}


@pytest.mark.parametrize("kind", sorted(LATENT))
@torch.inference_mode()
def test_absorbed_weights_are_as_near_to_float64_as_transformers(kind: str) -> None:
    """In bfloat16, where a latent's keys and values are rounded in one and queries in the other."""
    model = tiny(kind)
    exact = logits_of(copy.deepcopy(model).double(), IDS)
    half = model.bfloat16()
    in_transformers = median_error(half(IDS[None], use_cache=False).logits[0].double(), exact)
    assert median_error(logits_of(half, IDS).double(), exact) < 1.3 * in_transformers


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_store_them_once(kind: str) -> None:
    engine = Engine(tiny(kind))
    engine.run([autoregressive(Prompt([5, 6, 7]), 2, never)])
    # The first two of four layers.
    assert sorted(engine.cache.keys) == [0, 1]
    assert sorted(engine.cache.values) == [0, 1]
