"""Granite 3 and 4 without recurrent layers, dense and with experts: scaled embeddings, logits and
residuals.

    hidden += multiplier * output(attention(norm(hidden)))
    hidden += multiplier * mlp(norm(hidden))
"""

from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, Linears, MlpSource, Rope
from raypd.decoding.models.decoder import ONE_ROPE, DecoderModel, Family, needed
from raypd.decoding.models.experts import SMALL, experts_of
from raypd.decoding.models.llama import PreNormLayer, attention_of, mlp_of


class GraniteLayer(PreNormLayer):
    """A layer of Granite."""

    def __init__(self, source: Any, builder: Builder) -> None:
        super().__init__(source, builder)
        self.multiplier = float(source.residual_multiplier)

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        if hasattr(source, "block_sparse_moe"):
            return builder.experts(experts_of(source.block_sparse_moe))
        return builder.mlp(mlp_of(source.mlp))

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended = self.attention(self.input_norm(hidden), ropes[ONE_ROPE], step)
        attended, hidden = needed(attended, hidden, sample_rows)
        if len(hidden) == 0:
            return hidden
        hidden = hidden + self.output(attended) * self.multiplier
        return hidden + self.mlp(self.post_norm(hidden)) * self.multiplier


class Granite(DecoderModel):
    """Granite around its layers."""

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embedded(ids) * self.text_config.embedding_multiplier

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.text_config.logits_scaling


class GraniteHybridLayer(GraniteLayer):
    """A layer of Granite 4 with attention, whose MLP stands beside its experts, if it has any."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        rotated = attention.config.position_embedding_type == "rope"
        return attention_of(attention, rotated=rotated)

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        shared = source.shared_mlp
        mlp = MlpSource(
            Linears(shared, "input_linear"), Linears(shared, "output_linear"), shared.activation
        )
        if not source.has_experts:
            return builder.mlp(mlp)
        experts = experts_of(source.block_sparse_moe)
        experts.shared = mlp
        return builder.experts(experts)


class GraniteHybrid(Granite):
    """Granite 4 without recurrent layers, which may have no rotary embedding."""

    def ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Rope]:
        if self.rotary is None:
            # No layer reads it.
            nothing = hidden.new_empty(0)
            return {ONE_ROPE: Rope(nothing, nothing)}
        return super().ropes(hidden, positions)


def _attends_in_all_layers(config: Any) -> bool:
    return set(config.layer_types) <= {"full_attention"}


GRANITE_4 = Family(
    "Granite 4 without Mamba layers",
    ("GraniteMoeHybridForCausalLM",),
    GraniteHybridLayer,
    GraniteHybrid,
    small={**SMALL, "shared_intermediate_size": 256},
    takes=_attends_in_all_layers,
)
GRANITE = Family(
    "Granite 3, with experts too",
    ("GraniteForCausalLM", "GraniteMoeForCausalLM"),
    GraniteLayer,
    Granite,
    small=SMALL,
)
