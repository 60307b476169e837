"""Gemma 3n: several streams of hidden states; each layer computes one and corrects all.

A layer predicts the streams, computes attention and MLP on one of them as in Gemma 3, and adds the
error of its prediction to all of them (AltUp). Layers share keys and values, and have per-layer
inputs (layer_inputs.py).
"""

import math
from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, Linears, NormStyle, Rope
from raypd.decoding.models.decoder import DecoderLayer, Family
from raypd.decoding.models.gemma import SandwichLayer, bounded
from raypd.decoding.models.layer_inputs import LayerInputGate, LayerInputs, shared_attention_of
from raypd.decoding.models.layer_ropes import LayerRopes
from raypd.decoding.models.llama import mlp_of

# The smallest mean square by which a stream is divided.
_MIN_SQUARE = 1e-5


class SparseActivation:
    """The activation of an MLP in which only the largest gates count.

    A gate counts if it is a certain number of standard deviations above the mean of its token.
    """

    def __init__(self, activation: Any, sparsity: float) -> None:
        """
        Args:
            activation: The activation applied to the remaining gates.
            sparsity: The share of gates that do not count, assuming that they are normally
                distributed.
        """
        self.activation = activation
        normal = torch.distributions.normal.Normal(0, 1)
        self.deviations = normal.icdf(torch.tensor(sparsity, dtype=torch.float32))

    def __call__(self, gate: torch.Tensor) -> torch.Tensor:
        deviations = float(self.deviations.to(gate.dtype))
        mean = gate.mean(-1, keepdim=True)
        deviation = gate.std(-1, keepdim=True, unbiased=False)
        activated: torch.Tensor = self.activation(
            torch.relu(gate - (mean + deviation * deviations))
        )
        return activated


class Laurel(torch.nn.Module):
    """A learned residual: hidden + norm(right(left(hidden)))."""

    def __init__(self, source: Any, builder: Builder) -> None:
        """
        Args:
            source: The transformers module.
            builder: Builds the parts.
        """
        super().__init__()
        self.left = builder.product(Linears(source, "linear_left"))
        self.right = builder.product(Linears(source, "linear_right"))
        self.norm = builder.norm(source.post_laurel_norm, NormStyle.ROUND_ONCE)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden size] -> [tokens, hidden size]"""
        added: torch.Tensor = self.norm(self.right(self.left(hidden)))
        return hidden + added


class Gemma3nLayer(SandwichLayer):
    """A layer of Gemma 3n."""

    norm_style = NormStyle.ROUND_ONCE

    def __init__(self, source: Any, builder: Builder) -> None:
        super().__init__(source, builder)
        # Not only attention reads its result, so the result is not in FP8.
        self.input_norm = builder.norm(source.input_layernorm, self.norm_style)
        self.altup = source.altup
        self.active = int(source.config.altup_active_idx)
        self.scales_corrected = bool(source.config.altup_correct_scale)
        self.laurel = Laurel(source.laurel, builder)
        self.gate = LayerInputGate(source, builder)

    @staticmethod
    def rope_name(source: Any) -> str:
        return str(source.self_attn.layer_type)

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        return shared_attention_of(source.self_attn)

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        mlp = mlp_of(source.mlp)
        sparsity = source.mlp.activation_sparsity
        if sparsity > 0:
            mlp.activation = SparseActivation(mlp.activation, sparsity)
        return builder.mlp(mlp)

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
        layer_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the layer.

        Args:
            hidden: [streams, tokens, hidden size]
            ropes: The model's rotary embeddings, by name.
            step: The pass.
            sample_rows: In the last layer, the rows that are needed after attention, [samples].
            layer_input: The layer's per-layer inputs, [tokens, size of an input].

        Returns:
            [streams, tokens, hidden size], or [streams, samples, hidden size] in the last layer.
        """
        assert layer_input is not None
        predicted = self.altup.predict(hidden[:, None])[:, 0]
        normed = self.input_norm(predicted[self.active])
        attended = self.attention(normed, ropes[self.rope], step)
        if sample_rows is not None:
            predicted = predicted[:, sample_rows]
            normed = normed[sample_rows]
            attended = attended[sample_rows]
            layer_input = layer_input[sample_rows]
        if len(attended) == 0:
            return predicted
        active = predicted[self.active]
        active = active + self.attention_norm(self.output(attended))
        active = (active + self.laurel(normed)) / math.sqrt(2)
        active = active + self.mlp_norm(self.mlp(self.mlp_input_norm(active)))
        corrected: torch.Tensor = self.altup.correct(predicted[:, None], active[None])[:, 0]
        first = corrected[self.active]
        if self.scales_corrected:
            first = self.altup.scale_corrected_output(first)
        corrected[1:] += self.gate(first, layer_input)
        return corrected


class Gemma3n(LayerRopes):
    """What Gemma 3n computes around its layers."""

    norm_style = NormStyle.ROUND_ONCE

    def __init__(self, model: Any, layer: type[DecoderLayer], builder: Builder) -> None:
        super().__init__(model, layer, builder)
        source = model.model
        self.layer_inputs = LayerInputs(source, builder, self.dtype)
        self.spread = _products(source.altup_projections, builder)
        self.gather = _products(source.altup_unembed_projections, builder)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the streams of ids [tokens], [streams, tokens, hidden size]."""
        first = super().embedded(ids)
        streams = [first]
        for product in self.spread:
            streams.append(_with_magnitude_of(first, product(first)))
        return torch.stack(streams)

    def through_layers(
        self, ids: torch.Tensor, hidden: torch.Tensor, ropes: dict[str, Rope], step: Step
    ) -> torch.Tensor:
        inputs = self.layer_inputs(ids, hidden[0])
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            sample_rows = step.sample_rows if number == last else None
            hidden = layer(hidden, ropes, step, sample_rows, inputs[:, number])
        first = hidden[0]
        streams = [first]
        for product, stream in zip(self.gather, hidden[1:], strict=True):
            streams.append(_with_magnitude_of(first, product(stream)))
        return torch.stack(streams).mean(0)

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        return bounded(logits, self.text_config.final_logit_softcapping)


def _products(linears: torch.nn.ModuleList, builder: Builder) -> torch.nn.ModuleList:
    names = [str(number) for number in range(len(linears))]
    return torch.nn.ModuleList([builder.product(Linears(linears, name)) for name in names])


def _with_magnitude_of(first: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """Scale the tokens of a stream [tokens, hidden size] to the magnitude of the first stream's."""
    target = (first**2).mean(-1, keepdim=True) ** 0.5
    magnitude = torch.sqrt((stream**2).mean(-1, keepdim=True).clamp(min=_MIN_SQUARE))
    return stream * target / magnitude


GEMMA3N = Family(
    "Gemma 3n",
    ("Gemma3nForCausalLM",),
    Gemma3nLayer,
    Gemma3n,
    small={"sliding_window": 16, "num_kv_shared_layers": 0},
)
