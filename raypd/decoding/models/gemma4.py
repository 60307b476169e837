"""Gemma 4: layers that share keys and values, per-layer inputs, and experts alongside the MLP.

hidden += norm(output(attention(norm(hidden))))
hidden += norm(mlp(norm(hidden)))                 or norm(norm(mlp(...)) + norm(experts(...)))
hidden += norm(project(gelu(gate(hidden)) * the layer's input of the token)), in small models
hidden *= a number of the layer
"""

from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, ExpertsSource, NormStyle, Rope
from raypd.decoding.models.decoder import DecoderLayer, Family, needed
from raypd.decoding.models.experts import SMALL
from raypd.decoding.models.gemma import SandwichLayer, bounded
from raypd.decoding.models.layer_inputs import LayerInputGate, LayerInputs, shared_attention_of
from raypd.decoding.models.layer_ropes import LayerRopes


class ExpertsBeside(torch.nn.Module):
    """The experts of a layer that also has an MLP."""

    def __init__(self, source: Any, builder: Builder) -> None:
        """
        Args:
            source: The transformers layer.
            builder: Builds the parts.
        """
        super().__init__()
        style = NormStyle.ROUND_ONCE
        self.experts = builder.experts(ExpertsSource(router=source.router, experts=source.experts))
        self.input_norm = builder.norm(source.pre_feedforward_layernorm_2, style)
        self.mlp_norm = builder.norm(source.post_feedforward_layernorm_1, style)
        self.norm = builder.norm(source.post_feedforward_layernorm_2, style)

    def forward(self, hidden: torch.Tensor, mlp: torch.Tensor) -> torch.Tensor:
        """Add the experts' output to that of the MLP.

        Args:
            hidden: The hidden states that the MLP has read, [tokens, hidden size].
            mlp: [tokens, hidden size]
        """
        # The router has its own norm.
        weights, numbers = self.experts.router(hidden)
        nothing = torch.zeros_like(hidden)
        mixed = self.experts.mix(self.input_norm(hidden), weights, numbers, nothing)
        total: torch.Tensor = self.mlp_norm(mlp) + self.norm(mixed)
        return total


class Gemma4Layer(SandwichLayer):
    """A layer of Gemma 4."""

    norm_style = NormStyle.ROUND_ONCE
    factor: torch.Tensor

    def __init__(self, source: Any, builder: Builder) -> None:
        super().__init__(source, builder)
        self.experts: ExpertsBeside | None = None
        if getattr(source, "enable_moe_block", False):
            self.experts = ExpertsBeside(source, builder)
        self.gate: LayerInputGate | None = None
        if getattr(source, "hidden_size_per_layer_input", None):
            self.gate = LayerInputGate(source, builder)
        self.register_buffer("factor", source.layer_scalar, persistent=False)

    @staticmethod
    def rope_name(source: Any) -> str:
        return str(source.self_attn.layer_type)

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        return shared_attention_of(source.self_attn)

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
        layer_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the layer as `DecoderLayer` does, with per-layer inputs [tokens, size]."""
        attended = self.attention(self.input_norm(hidden), ropes[self.rope], step)
        attended, hidden = needed(attended, hidden, sample_rows)
        if len(hidden) == 0:
            return hidden
        hidden = hidden + self.attention_norm(self.output(attended))
        mixed = self.mlp(self.mlp_input_norm(hidden))
        if self.experts is not None:
            mixed = self.experts(hidden, mixed)
        hidden = hidden + self.mlp_norm(mixed)
        if self.gate is not None:
            assert layer_input is not None
            if sample_rows is not None:
                layer_input = layer_input[sample_rows]
            hidden = hidden + self.gate(hidden, layer_input)
        return hidden * self.factor


class Gemma4(LayerRopes):
    """What Gemma 4 computes around its layers."""

    norm_style = NormStyle.ROUND_ONCE

    def __init__(self, model: Any, layer: type[DecoderLayer], builder: Builder) -> None:
        super().__init__(model, layer, builder)
        self.layer_inputs: LayerInputs | None = None
        if getattr(model.model, "hidden_size_per_layer_input", None):
            self.layer_inputs = LayerInputs(model.model, builder, self.dtype)

    def through_layers(
        self, ids: torch.Tensor, hidden: torch.Tensor, ropes: dict[str, Rope], step: Step
    ) -> torch.Tensor:
        if self.layer_inputs is None:
            return super().through_layers(ids, hidden, ropes, step)
        inputs = self.layer_inputs(ids, hidden)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            sample_rows = step.sample_rows if number == last else None
            hidden = layer(hidden, ropes, step, sample_rows, inputs[:, number])
        return hidden

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        return bounded(logits, self.text_config.final_logit_softcapping)


def _is_causal(config: Any) -> bool:
    return config.use_bidirectional_attention != "all"


GEMMA4 = Family(
    "Gemma 4, with experts too",
    ("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
    Gemma4Layer,
    Gemma4,
    small={**SMALL, "sliding_window": 16, "top_k_experts": 4, "num_kv_shared_layers": 0},
    takes=_is_causal,
)
