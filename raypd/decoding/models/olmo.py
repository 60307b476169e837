"""OLMo 2 and 3, and EXAONE 4: norms after attention and MLP instead of before them.

hidden += norm(output(attention(hidden)))
hidden += norm(mlp(hidden))
"""

from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, Linears, NormStyle, Rope
from raypd.decoding.models.decoder import ONE_ROPE, DecoderLayer, DecoderModel, Family, needed
from raypd.decoding.models.experts import SMALL, SMALL_WITH_GROUPS, ExpertsLayer
from raypd.decoding.models.layer_ropes import LayerRopes
from raypd.decoding.models.llama import attention_of, mlp_of


class PostNormLayer(DecoderLayer):
    """A layer whose norms come after attention and MLP."""

    norm_style = NormStyle.ROUND_FIRST

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
        self.mlp = builder.mlp(mlp_of(source.mlp))
        self.attention_norm = builder.norm(source.post_attention_layernorm, self.norm_style)
        self.mlp_norm = builder.norm(source.post_feedforward_layernorm, self.norm_style)

    @staticmethod
    def rope_name(source: Any) -> str:
        """Return which of the model's rotary embeddings a transformers layer reads."""
        return ONE_ROPE

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        """Describe the attention of a transformers layer."""
        attention = source.self_attn
        window = attention.sliding_window if attention.is_sliding else None
        # If some layers have sliding windows, the others do not rotate.
        rotated = attention.sliding_window is None or attention.is_sliding
        return attention_of(attention, window=window, rotated=rotated)

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended = self.attention(hidden, ropes[self.rope], step)
        attended, hidden = needed(attended, hidden, sample_rows)
        if len(hidden) == 0:
            return hidden
        hidden = hidden + self.attention_norm(self.output(attended))
        return hidden + self.mlp_norm(self.mlp(hidden))


class OlmoLayer(PostNormLayer):
    """A layer of OLMo 2 or 3, whose norms of queries and keys span all heads."""

    norm_style = NormStyle.ROUND_ONCE

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        return attention_of(source.self_attn, norms_all_heads=True, norm_style=NormStyle.ROUND_ONCE)


class Olmo3Layer(OlmoLayer):
    """A layer of OLMo 3, which has a rotary embedding per type of layer."""

    @staticmethod
    def rope_name(source: Any) -> str:
        return str(source.self_attn.attention_type)


class Olmo(DecoderModel):
    """What OLMo 2 computes around its layers."""

    norm_style = NormStyle.ROUND_ONCE


class Olmo3(LayerRopes):
    """What OLMo 3 computes around its layers."""

    norm_style = NormStyle.ROUND_ONCE


class OlmoeLayer(ExpertsLayer):
    """A layer of OLMoE, which is a Llama layer with experts and norms over all heads."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        return attention_of(source.self_attn, norms_all_heads=True)


class ExaoneMoeLayer(ExpertsLayer):
    """A layer of K-EXAONE, whose attention is that of EXAONE 4 with a norm before it."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        return PostNormLayer.attention_source(source)


def _has_no_clipping(config: Any) -> bool:
    return config.clip_qkv is None


OLMO2 = Family("OLMo 2", ("Olmo2ForCausalLM",), OlmoLayer, Olmo)
OLMO3 = Family("OLMo 3", ("Olmo3ForCausalLM",), Olmo3Layer, Olmo3)
OLMOE = Family("OLMoE", ("OlmoeForCausalLM",), OlmoeLayer, small=SMALL, takes=_has_no_clipping)
EXAONE4 = Family("EXAONE 4", ("Exaone4ForCausalLM",), PostNormLayer)
EXAONE_MOE = Family("K-EXAONE", ("ExaoneMoeForCausalLM",), ExaoneMoeLayer, small=SMALL_WITH_GROUPS)
