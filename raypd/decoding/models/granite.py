"""Granite without Mamba layers, dense and with experts: scaled embeddings, logits and residuals.

hidden += multiplier * output(attention(norm(hidden)))
hidden += multiplier * mlp(norm(hidden))
"""

from typing import Any

import torch

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, Linears, MlpSource, Rope
from raypd.decoding.models.decoder import NO_ROPE, DecoderModel, Family
from raypd.decoding.models.experts import SMALL, experts_of
from raypd.decoding.models.llama import PreNormLayer, attention_of, mlp_of
from raypd.decoding.models.rotation import in_dtype


class GraniteLayer(PreNormLayer):
    """A layer of Granite."""

    def __init__(self, source: Any, builder: Builder) -> None:
        super().__init__(source, builder)
        self.multiplier = float(source.residual_multiplier)

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        if not hasattr(source, "block_sparse_moe"):
            return builder.mlp(mlp_of(source.mlp))
        experts = experts_of(source.block_sparse_moe)
        if getattr(source, "shared_mlp", None) is not None:
            experts.shared = shared_mlp_of(source.shared_mlp)
        return builder.experts(experts)


class GraniteSwaLayer(GraniteLayer):
    """A layer of Granite with sliding windows and sinks, which has its own rotary embedding.

    A base of 0 means that the layer does not rotate.
    """

    @staticmethod
    def rope_name(source: Any) -> str:
        return _rope_of_base(_rope_base(source.self_attn))

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        return attention_of(attention, rotated=_rope_base(attention) != 0)


class Granite(DecoderModel):
    """What Granite computes around its layers."""

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embedded(ids) * self.text_config.embedding_multiplier

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.text_config.logits_scaling


class GraniteSwa(Granite):
    """Granite with sliding windows, whose layers share one rotary embedding per base."""

    rotary_name = "rotary_embs"

    def ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Rope]:
        ropes = {_rope_of_base(0): NO_ROPE}
        for rotary in self.rotary:
            cos, sin = rotary(hidden[None], positions[None])
            base = rotary.config.rope_parameters["rope_theta"]
            ropes[_rope_of_base(base)] = in_dtype(Rope(cos[0], sin[0]), hidden.dtype)
        return ropes


def shared_mlp_of(mlp: Any) -> MlpSource:
    """Describe the MLP of Granite that all tokens go through, next to the experts."""
    return MlpSource(Linears(mlp, "input_linear"), Linears(mlp, "output_linear"), mlp.activation)


def _rope_base(attention: Any) -> float:
    return float(attention.config.layer_rope_theta[attention.layer_idx])


def _rope_of_base(base: float) -> str:
    return f"rope of base {float(base)}"


GRANITE = Family(
    "Granite 3, with experts too",
    ("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    GraniteLayer,
    Granite,
    small=SMALL,
)
GRANITE_SWA = Family(
    "Granite with sliding windows, with experts too",
    ("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"),
    GraniteSwaLayer,
    GraniteSwa,
    small={**SMALL, "sliding_window": 16},
)
