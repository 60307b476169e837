"""AFMoE, the family of Arcee's Trinity models: gated attention, and norms around all parts.

normed = norm(hidden)
hidden += norm(output(attention(normed) * sigmoid(gate(normed))))
hidden += norm(experts(norm(hidden))), or an MLP
"""

from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, ExpertsSource, Linears, NormStyle, Rope
from raypd.decoding.models.decoder import ONE_ROPE, DecoderModel, Family, needed
from raypd.decoding.models.experts import SMALL, experts_of
from raypd.decoding.models.gemma import SandwichLayer
from raypd.decoding.models.llama import attention_of, mlp_of


class BatchRouter(torch.nn.Module):
    """A transformers router that takes batches of texts."""

    def __init__(self, router: Any) -> None:
        """
        Args:
            router: The transformers module.
        """
        super().__init__()
        self.router = router

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[tokens, hidden size] -> logits, weights and numbers, [tokens, ...] each"""
        chosen: tuple[torch.Tensor, ...] = self.router(x[None], bias)
        return chosen


class AfmoeLayer(SandwichLayer):
    """A layer of AFMoE."""

    norm_style = NormStyle.ROUND_ONCE
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_mlp_layernorm",
        "post_mlp_layernorm",
    )

    def __init__(self, source: Any, builder: Builder) -> None:
        super().__init__(source, builder)
        # Both attention and the gate read its result, so the result is not in FP8.
        self.input_norm = builder.norm(source.input_layernorm, self.norm_style)
        self.gate = builder.product(Linears(source.self_attn, "gate_proj"))

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        return attention_of(
            attention, norm_style=NormStyle.ROUND_ONCE, rotated=attention.is_local_attention
        )

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        block = source.mlp
        if not hasattr(block, "experts"):
            return builder.mlp(mlp_of(block))
        experts: ExpertsSource = experts_of(block)
        experts.router = BatchRouter(block.router)
        experts.router_inputs = (block.expert_bias,)
        return builder.experts(experts)

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
        attended = attended * torch.sigmoid(self.gate(normed))
        hidden = hidden + self.attention_norm(self.output(attended))
        return hidden + self.mlp_norm(self.mlp(self.mlp_input_norm(hidden)))


class Afmoe(DecoderModel):
    """What AFMoE computes around its layers."""

    norm_style = NormStyle.ROUND_ONCE

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = super().embedded(ids)
        if not self.text_config.mup_enabled:
            return hidden
        scaled: torch.Tensor = hidden * (self.text_config.hidden_size**0.5)
        return scaled


AFMOE = Family(
    "AFMoE, Trinity",
    ("AfmoeForCausalLM",),
    AfmoeLayer,
    Afmoe,
    small={**SMALL, "num_dense_layers": 0, "sliding_window": 16},
)
