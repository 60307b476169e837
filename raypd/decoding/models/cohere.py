"""Command A (Cohere 2): attention and MLP read the same norm, and neighbours are rotated.

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
    """A layer of Cohere 2, whose sliding layers alone rotate."""

    def __init__(self, source: Any, builder: Builder) -> None:
        """
        Args:
            source: The layer of transformers.
            builder: Builds its parts.
        """
        super().__init__()
        attention = source.self_attn
        head_dim = attention.head_dim
        attention_source = attention_of(
            attention,
            order=pairs_order(head_dim, head_dim),
            rotated=attention.sliding_window is not None,
        )
        self.attention = builder.attention(attention_source)
        self.output = builder.product(Linears(attention, "o_proj"))
        self.mlp = builder.mlp(mlp_of(source.mlp))
        # It is a layer norm.
        self.input_norm = builder.norm(source.input_layernorm, None)

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


class Cohere2(DecoderModel):
    """Cohere 2 around its layers."""

    norm_style = None

    def ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Rope]:
        cos, sin = self.rotary(hidden[None], positions[None])
        # It has each number twice, side by side.
        return {ONE_ROPE: Rope(cos[0, :, ::2].repeat(1, 2), sin[0, :, ::2].repeat(1, 2))}

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * self.text_config.logit_scale


COHERE2 = Family("Command A, Command R7B", ("Cohere2ForCausalLM",), ParallelLayer, Cohere2)
