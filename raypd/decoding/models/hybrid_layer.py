"""A layer that attends or recurs, and whose MLP reads another norm.

hidden += output(attention or recurrence(norm(hidden)))
hidden += mlp(norm(hidden))
"""

from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.recurrent import Recurrence
from raypd.decoding.layers.sources import AttentionSource, Linears, NormStyle, Rope
from raypd.decoding.models.decoder import ONE_ROPE, DecoderLayer, needed
from raypd.decoding.models.llama import attention_of, mlp_of
from raypd.decoding.models.recurrences import build_recurrence


class HybridLayer(DecoderLayer):
    """A layer of a hybrid. Subclasses name its parts in the module of transformers."""

    norm_style = NormStyle.ROUND_FIRST
    # The names of the recurrence, the product behind attention, and the norms.
    recurrence_name = "mamba"
    output_name = "o_proj"
    norm_names = ("input_layernorm", "post_attention_layernorm")
    # The factor of what is added to the hidden states; None if the family has none.
    multiplier: float | None = None

    def __init__(self, source: Any, builder: Builder) -> None:
        """
        Args:
            source: The layer of transformers.
            builder: Builds its parts.
        """
        super().__init__()
        self.recurrence: Recurrence | None = None
        module = getattr(source, self.recurrence_name, None)
        if module is None:
            attention = source.self_attn
            self.attention = builder.attention(self.attention_source(attention))
            self.output = builder.product(Linears(attention, self.output_name))
        else:
            self.recurrence = build_recurrence(module, builder)
            self.output = builder.product(Linears(module, "out_proj"))
        self.mlp = self.build_mlp(source, builder)
        first, second = [getattr(source, name) for name in self.norm_names]
        reader = self.attention if module is None else self.recurrence
        self.input_norm = builder.norm(first, self.norm_style, reader)
        self.post_norm = builder.norm(second, self.norm_style, self.mlp)

    @staticmethod
    def attention_source(attention: Any) -> AttentionSource:
        """Describe an attention of transformers."""
        return attention_of(attention)

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        """Build what follows attention or recurrence, from a layer of transformers."""
        return builder.mlp(mlp_of(source.mlp))

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        normed = self.input_norm(hidden)
        if self.recurrence is None:
            mixed = self.attention(normed, ropes[ONE_ROPE], step)
        else:
            mixed = self.recurrence(normed, step)
        mixed, hidden = needed(mixed, hidden, sample_rows)
        if len(hidden) == 0:
            return hidden
        if self.multiplier is not None:
            hidden = hidden + self.output(mixed) * self.multiplier
            return hidden + self.mlp(self.post_norm(hidden)) * self.multiplier
        hidden = self.output.add(mixed, hidden)
        return self.mlp.add(self.post_norm(hidden), hidden)
