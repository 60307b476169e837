"""Gemma: norms whose weights are offsets from 1. Gemma 2 and 3 also have norms after all parts.

hidden += norm(output(attention(norm(hidden))))
hidden += norm(mlp(norm(hidden)))
"""

from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import (
    AttentionSource,
    Linears,
    NormStyle,
    Rope,
)
from raypd.decoding.models.decoder import ONE_ROPE, DecoderLayer, DecoderModel, Family, needed
from raypd.decoding.models.layer_ropes import LayerRopes
from raypd.decoding.models.llama import PreNormLayer, attention_of, mlp_of


class GemmaLayer(PreNormLayer):
    """A layer of the first Gemma."""

    norm_style = NormStyle.OFFSET


class SandwichLayer(DecoderLayer):
    """A layer with norms before and after attention and MLP."""

    norm_style = NormStyle.OFFSET
    # The norms of the transformers layer: before and after attention, before and after the MLP.
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __init__(self, source: Any, builder: Builder) -> None:
        """
        Args:
            source: The transformers layer.
            builder: Builds its parts.
        """
        super().__init__()
        self.rope = self.rope_name(source)
        self.attention = builder.attention(self.attention_source(source))
        self.output = builder.product(Linears(source.self_attn, "o_proj"))
        self.mlp = self.build_mlp(source, builder)
        before, behind, before_mlp, behind_mlp = [getattr(source, name) for name in self.norms]
        self.input_norm = builder.norm(before, self.norm_style, self.attention)
        self.attention_norm = builder.norm(behind, self.norm_style)
        self.mlp_input_norm = builder.norm(before_mlp, self.norm_style, self.mlp)
        self.mlp_norm = builder.norm(behind_mlp, self.norm_style)

    @staticmethod
    def rope_name(source: Any) -> str:
        """Return which of the model's rotary embeddings a transformers layer reads."""
        return ONE_ROPE

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        """Describe the attention of a transformers layer."""
        return attention_of(source.self_attn, norm_style=NormStyle.OFFSET)

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        """Build what follows attention, from a transformers layer."""
        return builder.mlp(mlp_of(source.mlp))

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended = self.attention(self.input_norm(hidden), ropes[self.rope], step)
        attended, hidden = needed(attended, hidden, sample_rows)
        if len(hidden) == 0:
            return hidden
        hidden = hidden + self.attention_norm(self.output(attended))
        return hidden + self.mlp_norm(self.mlp(self.mlp_input_norm(hidden)))


class Gemma3Layer(SandwichLayer):
    """A layer of Gemma 3, which has a rotary embedding per type of layer."""

    @staticmethod
    def rope_name(source: Any) -> str:
        return str(source.self_attn.layer_type)


class Gemma(DecoderModel):
    """What the first Gemma computes around its layers."""

    norm_style = NormStyle.OFFSET


class Gemma2(Gemma):
    """What Gemma 2 computes around its layers."""

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        return bounded(logits, self.text_config.final_logit_softcapping)


class Gemma3(LayerRopes):
    """What Gemma 3 computes around its layers."""

    norm_style = NormStyle.OFFSET

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        return bounded(logits, self.text_config.final_logit_softcapping)


def bounded(logits: torch.Tensor, bound: float | None) -> torch.Tensor:
    """Bound logits by tanh."""
    if bound is None:
        return logits
    return torch.tanh(logits / bound) * bound


_SMALL = {"sliding_window": 16}
GEMMA = Family("Gemma", ("GemmaForCausalLM",), GemmaLayer, Gemma)
GEMMA2 = Family("Gemma 2", ("Gemma2ForCausalLM",), SandwichLayer, Gemma2, small=_SMALL)
GEMMA3 = Family("Gemma 3", ("Gemma3ForCausalLM",), Gemma3Layer, Gemma3, small=_SMALL)
