"""Models that equal Llama except for an MLP without gates: Apertus, Arcee and StarCoder2.

hidden += output(attention(norm(hidden)))
hidden += down(activation(up(norm(hidden))))
"""

from typing import Any

import torch

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, Linears
from raypd.decoding.models.decoder import DecoderModel, Family
from raypd.decoding.models.llama import PreNormLayer, attention_of


class PlainMlp(torch.nn.Module):
    """An MLP without gates."""

    def __init__(self, up: Linears, down: Linears, activation: Any, builder: Builder) -> None:
        """
        Args:
            up: The first layer.
            down: The second layer.
            activation: The activation between them.
            builder: Builds the parts.
        """
        super().__init__()
        self.up = builder.product(up)
        self.down = builder.product(down)
        self.activation = activation
        builder.fallbacks.append(f"activation {type(activation).__name__}")
        self.reads_fp8 = self.up.reads_fp8

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + MLP(x), [tokens, hidden size]. It may overwrite `residual`."""
        return self.down.add(self.activation(self.up(x)), residual)


class PlainMlpLayer(PreNormLayer):
    """A layer of Arcee."""

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        mlp = source.mlp
        return PlainMlp(Linears(mlp, "up_proj"), Linears(mlp, "down_proj"), mlp.act_fn, builder)


class ApertusLayer(PlainMlpLayer):
    """A layer of Apertus."""

    norms = ("attention_layernorm", "feedforward_layernorm")


class Starcoder2Layer(PreNormLayer):
    """A layer of StarCoder2, which has layer norms and one window for all layers."""

    norm_style = None

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        return attention_of(attention, window=attention.config.sliding_window)

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        mlp = source.mlp
        return PlainMlp(Linears(mlp, "c_fc"), Linears(mlp, "c_proj"), mlp.act, builder)


class Starcoder2(DecoderModel):
    """What StarCoder2 computes around its layers."""

    norm_style = None


APERTUS = Family("Apertus", ("ApertusForCausalLM",), ApertusLayer)
ARCEE = Family("Arcee", ("ArceeForCausalLM",), PlainMlpLayer)
STARCODER2 = Family("StarCoder2", ("Starcoder2ForCausalLM",), Starcoder2Layer, Starcoder2)
