"""Granite 3, dense and with experts: scaled embeddings, logits and residuals.

hidden += multiplier * output(attention(norm(hidden)))
hidden += multiplier * mlp(norm(hidden))
"""

from typing import Any

import torch

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.models.decoder import DecoderModel, Family
from raypd.decoding.models.experts import SMALL, experts_of
from raypd.decoding.models.llama import PreNormLayer, mlp_of


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


class Granite(DecoderModel):
    """Granite around its layers."""

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embedded(ids) * self.text_config.embedding_multiplier

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.text_config.logits_scaling


GRANITE = Family(
    "Granite 3, with experts too",
    ("GraniteForCausalLM", "GraniteMoeForCausalLM"),
    GraniteLayer,
    Granite,
    small=SMALL,
)
