"""Granite 4, with and without Mamba-2 layers, dense and with experts, and Bamba.

    hidden += multiplier * output(mamba or attention(norm(hidden)))
    hidden += multiplier * (experts(normed) + mlp(normed)), where normed = norm(hidden)

Granite has further factors around the layers, and some of its models do not rotate. Bamba has no
factors.
"""

from typing import Any

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource
from raypd.decoding.models.decoder import DecoderModel, Family
from raypd.decoding.models.experts import SMALL, experts_of
from raypd.decoding.models.granite import Granite, shared_mlp_of
from raypd.decoding.models.hybrid_layer import HybridLayer
from raypd.decoding.models.llama import attention_of, mlp_of
from raypd.decoding.models.phi3 import rotary_dim
from raypd.decoding.models.rotation import halves_order


class GraniteHybridLayer(HybridLayer):
    """A layer of Granite 4."""

    def __init__(self, source: Any, builder: Builder) -> None:
        super().__init__(source, builder)
        self.multiplier = float(source.residual_multiplier)

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        rotated = attention.config.position_embedding_type == "rope"
        return attention_of(attention, rotated=rotated)

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        dense = shared_mlp_of(source.shared_mlp)
        if not source.has_experts:
            return builder.mlp(dense)
        experts = experts_of(source.block_sparse_moe)
        experts.shared = dense
        return builder.experts(experts)


class BambaLayer(HybridLayer):
    """A layer of Bamba, which rotates part of each head."""

    norms = ("input_layernorm", "pre_ff_layernorm")

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        head_dim = attention.head_dim
        order = halves_order(head_dim, rotary_dim(attention.config, head_dim))
        return attention_of(attention, order=order)

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        return builder.mlp(mlp_of(source.feed_forward))


class Bamba(DecoderModel):
    """What Bamba computes around its layers."""

    norm_name = "final_layernorm"


# Sizes of Mamba-2 layers that fit a hidden size of 256.
MAMBA_SMALL = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_LAYER_TYPES = frozenset({"linear_attention"})


def _attends_in_all_layers(config: Any) -> bool:
    return set(config.layer_types) <= {"full_attention"}


# Every decoding method supports it, because it has no recurrence.
GRANITE_4 = Family(
    "Granite 4 without Mamba layers",
    ("GraniteMoeHybridForCausalLM",),
    GraniteHybridLayer,
    Granite,
    small={**SMALL, "shared_intermediate_size": 256},
    takes=_attends_in_all_layers,
)
GRANITE_HYBRID = Family(
    "Granite 4 with Mamba layers",
    ("GraniteMoeHybridForCausalLM",),
    GraniteHybridLayer,
    Granite,
    small={**SMALL, **MAMBA_SMALL, **_HEADS, "shared_intermediate_size": 256},
    layer_types=_LAYER_TYPES,
)
BAMBA = Family(
    "Bamba",
    ("BambaForCausalLM",),
    BambaLayer,
    Bamba,
    small={**MAMBA_SMALL, **_HEADS},
    layer_types=_LAYER_TYPES,
)
