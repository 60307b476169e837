"""Qwen3.5, Qwen3.6 and Qwen3-Next, dense and with experts: gated delta nets alongside attention.

    hidden += output(delta net(norm(hidden))), or output(attention(norm(hidden)) * sigmoid(gate))
    hidden += mlp(norm(hidden))

Attention rotates part of each head.
"""

from typing import Any

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, NormStyle
from raypd.decoding.models.decoder import DecoderModel, Family
from raypd.decoding.models.experts import SMALL, experts_of
from raypd.decoding.models.hybrid_layer import HybridLayer
from raypd.decoding.models.llama import attention_of, mlp_of
from raypd.decoding.models.phi3 import rotary_dim
from raypd.decoding.models.rotation import halves_order


class Qwen35Layer(HybridLayer):
    """A layer of Qwen3.5 or Qwen3-Next."""

    norm_style = NormStyle.OFFSET
    recurrence_name = "linear_attn"

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        head_dim = attention.head_dim
        return attention_of(
            attention,
            norm_style=NormStyle.OFFSET,
            order=halves_order(head_dim, rotary_dim(attention.config, head_dim)),
            gated=True,
        )

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        block = source.mlp
        if not hasattr(block, "experts"):
            return builder.mlp(mlp_of(block))
        return builder.experts(experts_of(block))


class Qwen35(DecoderModel):
    """What Qwen3.5 computes around its layers."""

    norm_style = NormStyle.OFFSET


_SMALL = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    **SMALL,
}
_LAYER_TYPES = frozenset({"linear_attention"})
QWEN3_5 = Family(
    "Qwen3.5, Qwen3.6, NuExtract3, with experts too",
    ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    Qwen35Layer,
    Qwen35,
    small=_SMALL,
    layer_types=_LAYER_TYPES,
)
QWEN3_NEXT = Family(
    "Qwen3-Next",
    ("Qwen3NextForCausalLM",),
    Qwen35Layer,
    Qwen35,
    small=_SMALL,
    layer_types=_LAYER_TYPES,
)
