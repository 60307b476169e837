"""The families of the registry: each is computed as transformers computes it, on every device."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raypd.decoding import native
from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine
from raypd.decoding.layers.in_c import AmxBuilder, CBuilder
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.models.registry import FAMILIES, find_family
from raypd.decoding.pack import pack_model
from tests.decoding.drivers import built, logits_of
from tests.tiny import HYBRIDS, in_float64, tiny_model

needs_native = pytest.mark.skipif(
    native.refusal() is not None, reason=f"the machine {native.refusal()}"
)
# transformers' types of model with a family, and what their tiny models have beside the sizes.
KINDS: dict[str, dict[str, object]] = {
    "llama": {},
    "ministral": {"sliding_window": 7},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {"sliding_window": 7},
    "cohere2": {"sliding_window": 7, "num_hidden_layers": 4},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 7, "sliding_window_pattern": 2},
    "glm4": {},
    "glm4_moe": {},
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "granitemoe": {"residual_multiplier": 0.5, "logits_scaling": 2.0},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 7},
    "olmoe": {},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
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
    "cohere2": {"norm Cohere2LayerNorm"},
    "ernie4_5_moe": {"router Ernie4_5_MoeTopKRouter"},
    "gemma2": {"activation of an MLP"},
    "gemma3_text": {"activation of an MLP"},
    "glm4_moe": {"router Glm4MoeTopkRouter"},
    "hunyuan_v1_moe": {"router HunYuanMoEV1Gate"},
    "falcon_h1": {"activation of an MLP"},
    "lfm2_moe": {"router Lfm2MoeTopKRouter"},
}
# Their norms or routers are those of transformers, which compute in float32 in every dtype. So do
# recurrences, over whole texts.
IN_FLOAT32 = {"cohere2", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe"}
IDS = torch.arange(5, 65)


def tiny(kind: str, head_dim: int = 16) -> PreTrainedModel:
    sizes = {"head_dim": head_dim}
    if kind == "olmoe":
        # The norms of its queries are as large as its hidden states.
        sizes["hidden_size"] = 4 * head_dim
    model = tiny_model(kind, **KINDS[kind], **sizes)
    if hasattr(model, "set_experts_implementation"):
        # Its grouped products know no float64.
        model.set_experts_implementation("eager")
    return model


def median_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error of the token in the middle.

    In a mixture a rounding may send a token to another expert.
    """
    return float((found - exact).norm(dim=-1).median() / exact.norm(dim=-1).median())


def test_every_family_is_tested() -> None:
    classes = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in KINDS}
    assert classes == {name for family in FAMILIES for name in family.classes}


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_family_has_the_logits_of_transformers(kind: str) -> None:
    model = tiny(kind)
    expected = model(IDS[None], use_cache=False).logits[0]
    assert find_family(model) is not None
    assert isinstance(Engine(copy.deepcopy(model)).model, DecoderModel)
    # Sums over a text's states are added up in another order.
    tolerance = 1e-3 if kind in HYBRIDS else 1e-4
    torch.testing.assert_close(logits_of(model, IDS), expected, atol=tolerance, rtol=tolerance)


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
    assert set(packed.builder.fallbacks) == LEFT_TO_TORCH.get(kind, set())
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
