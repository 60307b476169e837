"""Both kinds of GLM-4, and GLM-4.5 with experts, which rotate part of each head."""

from typing import Any

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, NormStyle
from raypd.decoding.models.decoder import DecoderModel, Family
from raypd.decoding.models.experts import SMALL, ExpertsLayer
from raypd.decoding.models.gemma import SandwichLayer
from raypd.decoding.models.llama import PreNormLayer, attention_of
from raypd.decoding.models.phi3 import joined_mlp_of
from raypd.decoding.models.rotation import halves_order, pairs_order, rotary_dim


class _DenseGlm:
    """What both dense kinds have in common: rotation of adjacent pairs, and a joined MLP."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        head_dim = attention.head_dim
        return attention_of(
            attention, order=pairs_order(head_dim, rotary_dim(attention.config, head_dim))
        )

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        return builder.mlp(joined_mlp_of(source.mlp))


class GlmLayer(_DenseGlm, PreNormLayer):
    """A layer of GLM-4 9B from 2024."""


class Glm4Layer(_DenseGlm, SandwichLayer):
    """A layer of GLM-4 from 2025."""

    norm_style = NormStyle.ROUND_FIRST
    norms = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )


class Glm4MoeLayer(ExpertsLayer):
    """A layer of GLM-4.5."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        head_dim = attention.head_dim
        return attention_of(
            attention, order=halves_order(head_dim, rotary_dim(attention.config, head_dim))
        )


GLM = Family("GLM-4 9B of 2024", ("GlmForCausalLM",), GlmLayer)
GLM4 = Family("GLM-4", ("Glm4ForCausalLM",), Glm4Layer, DecoderModel)
GLM4_MOE = Family(
    "GLM-4.5, Solar Open",
    ("Glm4MoeForCausalLM", "SolarOpenForCausalLM"),
    Glm4MoeLayer,
    small={**SMALL, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
)
