"""Mixtures of experts that otherwise equal Llama: Qwen2-MoE, Qwen3-MoE, Mixtral, ...

    hidden += output(attention(norm(hidden)))
    hidden += experts(norm(hidden))

A layer may also have a plain MLP in place of experts.
"""

from typing import Any

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import (
    AttentionSource,
    ExpertsSource,
    Linears,
    SoftmaxRouter,
)
from raypd.decoding.models.decoder import Family
from raypd.decoding.models.llama import PreNormLayer, attention_of, mlp_of
from raypd.decoding.models.rotation import halves_order, rotary_dim

# The routers that choose by softmax. Those of the second kind always divide by the sum of the
# weights.
_SOFTMAX = {
    "OlmoeTopKRouter",
    "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter",
    "Qwen3NextTopKRouter",
}
_RENORMALIZING = {
    "GptOssTopKRouter",
    "GraniteMoeHybridTopKRouter",
    "GraniteMoeSWATopKRouter",
    "GraniteMoeSharedTopKRouter",
    "GraniteMoeTopKRouter",
    "MixtralTopKRouter",
    "Qwen3_5MoeTopKRouter",
}
# A small mixture uses all its experts, so that no rounding sends a token to a different one.
SMALL = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "mlp_only_layers": [],
}
# The keys of a small mixture whose experts are chosen in groups and whose first layers are dense.
SMALL_WITH_GROUPS = {
    **SMALL,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"],
}


class ExpertsLayer(PreNormLayer):
    """A layer with experts in place of the MLP."""

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        block = source.mlp
        if not hasattr(block, "experts"):
            return builder.mlp(mlp_of(block))
        return builder.experts(experts_of(block))


class MixtralLayer(ExpertsLayer):
    """A layer of Mixtral, whose configuration has one window for all layers."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        return attention_of(attention, window=attention.config.sliding_window)


class CorrectedExpertsLayer(ExpertsLayer):
    """A layer of Hunyuan 3, whose mixture corrects the scores of its router."""

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        block = source.mlp
        if not hasattr(block, "experts"):
            return builder.mlp(mlp_of(block))
        experts = experts_of(block)
        experts.router_inputs = (block.e_score_correction_bias,)
        return builder.experts(experts)


class MiniMaxM2Layer(CorrectedExpertsLayer):
    """A layer of MiniMax-M2, which rotates part of each head and norms all heads together."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        head_dim = attention.head_dim
        order = halves_order(head_dim, rotary_dim(attention.config, head_dim))
        return attention_of(attention, norms_all_heads=True, order=order)


def experts_of(block: Any) -> ExpertsSource:
    """Describe a mixture, using the attribute names of most transformers modules."""
    router = block.router if hasattr(block, "router") else block.gate
    source = ExpertsSource(router=router, experts=block.experts, softmax=softmax_router(router))
    if hasattr(block, "shared_expert"):
        source.shared = mlp_of(block.shared_expert)
        source.shared_gate = Linears(block, "shared_expert_gate")
    elif getattr(block, "shared_experts", None) is not None:
        source.shared = mlp_of(block.shared_experts)
    return source


def softmax_router(router: Any) -> SoftmaxRouter | None:
    """Describe a transformers router if it is of this kind."""
    name = type(router).__name__
    if name in _RENORMALIZING:
        renormalizes = True
    elif name in _SOFTMAX:
        renormalizes = bool(router.norm_topk_prob)
    else:
        return None
    return SoftmaxRouter(router.weight, getattr(router, "bias", None), router.top_k, renormalizes)


EXPERTS = Family(
    "Qwen2-MoE, Qwen3-MoE, dots.llm1",
    (
        "Dots1ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
    ),
    ExpertsLayer,
    small=SMALL_WITH_GROUPS,
)
MIXTRAL = Family("Mixtral", ("MixtralForCausalLM",), MixtralLayer, small=SMALL)
HUNYUAN_3 = Family(
    "Hunyuan 3", ("HYV3ForCausalLM",), CorrectedExpertsLayer, small=SMALL_WITH_GROUPS
)
MINIMAX_M2 = Family("MiniMax-M2", ("MiniMaxM2ForCausalLM",), MiniMaxM2Layer, small=SMALL)
