"""Phi-3 and Phi-4, whose checkpoints have joined projections and may rotate part of each head."""

from typing import Any

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, Linears, MlpSource
from raypd.decoding.models.decoder import Family
from raypd.decoding.models.llama import PreNormLayer, attention_of
from raypd.decoding.models.rotation import halves_order, rotary_dim


class Phi3Layer(PreNormLayer):
    """A layer of Phi-3."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        config = attention.config
        return attention_of(
            attention,
            window=getattr(config, "sliding_window", None),
            linears=Linears(attention, "qkv_proj"),
            order=halves_order(attention.head_dim, rotary_dim(config, attention.head_dim)),
        )

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        return builder.mlp(joined_mlp_of(source.mlp))


def joined_mlp_of(mlp: Any) -> MlpSource:
    """Describe a transformers MLP whose gate and up projections are one layer."""
    return MlpSource(Linears(mlp, "gate_up_proj"), Linears(mlp, "down_proj"), mlp.activation_fn)


PHI3 = Family("Phi-3, Phi-4", ("Phi3ForCausalLM",), Phi3Layer)
