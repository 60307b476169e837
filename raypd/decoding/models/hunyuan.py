"""Hunyuan, dense and with experts, whose norms of queries and keys come after the rotation."""

from typing import Any

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource
from raypd.decoding.models.decoder import Family
from raypd.decoding.models.experts import SMALL, ExpertsLayer, experts_of
from raypd.decoding.models.llama import attention_of, mlp_of


class HunyuanLayer(ExpertsLayer):
    """A layer of Hunyuan."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        return attention_of(
            attention,
            query_norm=attention.query_layernorm,
            key_norm=attention.key_layernorm,
            norms_last=True,
        )

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        block = source.mlp
        if not hasattr(block, "experts"):
            return builder.mlp(mlp_of(block))
        experts = experts_of(block)
        experts.shared = mlp_of(block.shared_mlp)
        return builder.experts(experts)


HUNYUAN = Family(
    "Hunyuan, with experts too",
    ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"),
    HunyuanLayer,
    small={**SMALL, "moe_topk": 4},
)
