"""Falcon-H1: attention and Mamba-2 read the same norm in parallel, and everything has a factor.

normed = norm(hidden)
hidden += a * output(mamba(normed)) + b * output(attention(c * normed))
hidden += d * mlp(norm(hidden))
"""

from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import Linears, MlpSource, Rope
from raypd.decoding.models.decoder import ONE_ROPE, DecoderLayer, DecoderModel, Family, needed
from raypd.decoding.models.granite_hybrid import MAMBA_SMALL
from raypd.decoding.models.llama import attention_of
from raypd.decoding.models.recurrences import build_recurrence


class ScaledActivation(torch.nn.Module):
    """An activation whose inputs are multiplied by a factor."""

    def __init__(self, activation: Any, factor: float) -> None:
        super().__init__()
        self.activation = activation
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self.activation(x * self.factor)
        return activated


class FalconH1Layer(DecoderLayer):
    """A layer of Falcon-H1."""

    def __init__(self, source: Any, builder: Builder) -> None:
        """
        Args:
            source: The transformers layer.
            builder: Builds its parts.
        """
        super().__init__()
        attention = source.self_attn
        attention_source = attention_of(attention)
        # A factor of all keys is also a factor of all scores.
        scale = attention_source.layer.scale * float(attention.key_multiplier)
        attention_source.layer = attention_source.layer._replace(scale=scale)
        self.attention = builder.attention(attention_source)
        self.output = builder.product(Linears(attention, "o_proj"))
        self.recurrence = build_recurrence(source.mamba, builder)
        self.recurrence_output = builder.product(Linears(source.mamba, "out_proj"))
        mlp = source.feed_forward
        activation = mlp.act_fn
        if mlp.gate_multiplier != 1.0:
            activation = ScaledActivation(activation, float(mlp.gate_multiplier))
        self.mlp = builder.mlp(
            MlpSource(Linears(mlp, "gate_proj", "up_proj"), Linears(mlp, "down_proj"), activation)
        )
        # Both attention and the recurrence read its result.
        self.input_norm = builder.norm(source.input_layernorm)
        self.post_norm = builder.norm(source.pre_ff_layernorm)
        self.attention_in = float(source.attention_in_multiplier)
        self.attention_out = float(source.attn_out_multiplier)
        self.recurrence_out = float(source.ssm_out_multiplier)
        self.mlp_out = float(mlp.down_multiplier)

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        normed = self.input_norm(hidden)
        mixed = self.recurrence(normed, step)
        attended = self.attention(normed * self.attention_in, ropes[ONE_ROPE], step)
        if sample_rows is not None:
            mixed = mixed[sample_rows]
        attended, hidden = needed(attended, hidden, sample_rows)
        if len(hidden) == 0:
            return hidden
        recurred = self.recurrence_output(mixed) * self.recurrence_out
        hidden = hidden + (recurred + self.output(attended) * self.attention_out)
        return hidden + self.mlp(self.post_norm(hidden)) * self.mlp_out


class FalconH1(DecoderModel):
    """What Falcon-H1 computes around its layers."""

    norm_name = "final_layernorm"

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embedded(ids) * self.text_config.embedding_multiplier

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * self.text_config.lm_head_multiplier


FALCON_H1 = Family(
    "Falcon-H1",
    ("FalconH1ForCausalLM",),
    FalconH1Layer,
    FalconH1,
    small={
        **MAMBA_SMALL,
        "mamba_d_ssm": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    layer_types=frozenset({"hybrid"}),
)
