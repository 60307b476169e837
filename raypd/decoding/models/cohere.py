"""Command R and A (Cohere): attention and MLP read the same norm, and adjacent pairs are rotated.

normed = norm(hidden)
hidden += output(attention(normed)) + mlp(normed)
"""

from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import Linears, Rope
from raypd.decoding.models.decoder import ONE_ROPE, DecoderLayer, DecoderModel, Family, needed
from raypd.decoding.models.llama import attention_of, mlp_of
from raypd.decoding.models.rotation import pairs_order


class ParallelLayer(DecoderLayer):
    """A layer of Cohere."""

    def __init__(self, source: Any, builder: Builder) -> None:
        """
        Args:
            source: The transformers layer.
            builder: Builds its parts.
        """
        super().__init__()
        attention = source.self_attn
        head_dim = attention.head_dim
        attention_source = attention_of(
            attention,
            order=pairs_order(head_dim, head_dim),
            rotated=self.is_rotated(attention),
        )
        self.attention = builder.attention(attention_source)
        self.output = builder.product(Linears(attention, "o_proj"))
        self.mlp = builder.mlp(mlp_of(source.mlp))
        # It is a layer norm.
        self.input_norm = builder.norm(source.input_layernorm, None)

    @staticmethod
    def is_rotated(attention: Any) -> bool:
        """Return whether a transformers attention module rotates queries and keys."""
        return True

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        normed = self.input_norm(hidden)
        attended = self.attention(normed, ropes[ONE_ROPE], step)
        attended, hidden = needed(attended, hidden, sample_rows)
        if len(hidden) == 0:
            return hidden
        if sample_rows is not None:
            normed = normed[sample_rows]
        return self.mlp.add(normed, self.output.add(attended, hidden))


class Cohere2Layer(ParallelLayer):
    """A layer of Cohere 2, in which only layers with a sliding window rotate."""

    @staticmethod
    def is_rotated(attention: Any) -> bool:
        return attention.sliding_window is not None


class Cohere(DecoderModel):
    """What Cohere computes around its layers."""

    norm_style = None

    def ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Rope]:
        cos, sin = self.rotary(hidden[None], positions[None])
        # The embedding has each number twice, side by side.
        return {ONE_ROPE: Rope(cos[0, :, ::2].repeat(1, 2), sin[0, :, ::2].repeat(1, 2))}

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * self.text_config.logit_scale


def _has_no_query_norm(config: Any) -> bool:
    # Norms of queries and keys are layer norms with separate weights for each head.
    return not config.use_qk_norm


COHERE = Family(
    "Command R", ("CohereForCausalLM",), ParallelLayer, Cohere, takes=_has_no_query_norm
)
COHERE2 = Family("Command A, Command R7B", ("Cohere2ForCausalLM",), Cohere2Layer, Cohere)
