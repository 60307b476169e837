"""LFM2, dense and with experts: gated short convolutions alongside attention.

hidden += output(convolution or attention(norm(hidden)))
hidden += mlp(norm(hidden))
"""

from typing import Any

import torch

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, ExpertsSource, Linears, MlpSource
from raypd.decoding.models.decoder import DecoderModel, Family
from raypd.decoding.models.experts import SMALL
from raypd.decoding.models.hybrid_layer import HybridLayer
from raypd.decoding.models.llama import attention_of


class Lfm2Layer(HybridLayer):
    """A layer of LFM2."""

    recurrence_name = "conv"
    output_name = "out_proj"
    norms = ("operator_norm", "ffn_norm")

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        return attention_of(
            attention, query_norm=attention.q_layernorm, key_norm=attention.k_layernorm
        )

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        block = source.feed_forward
        if not hasattr(block, "experts"):
            gate_and_up = Linears(block, "w1", "w3")
            return builder.mlp(MlpSource(gate_and_up, Linears(block, "w2"), torch.nn.SiLU()))
        # The router adds a bias to the scores of the experts before it chooses.
        bias = getattr(block, "expert_bias", None)
        return builder.experts(ExpertsSource(block.gate, block.experts, router_inputs=(bias,)))


class Lfm2(DecoderModel):
    """What LFM2 computes around its layers."""

    norm_name = "embedding_norm"


class Lfm2Moe(Lfm2):
    """What LFM2 with experts computes around its layers."""

    rotary_name = "pos_emb"


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_LAYER_TYPES = frozenset({"conv"})
LFM2 = Family("LFM2", ("Lfm2ForCausalLM",), Lfm2Layer, Lfm2, small=_HEADS, layer_types=_LAYER_TYPES)
LFM2_MOE = Family(
    "LFM2 with experts",
    ("Lfm2MoeForCausalLM",),
    Lfm2Layer,
    Lfm2Moe,
    small={**SMALL, **_HEADS, "num_dense_layers": 0},
    layer_types=_LAYER_TYPES,
)
