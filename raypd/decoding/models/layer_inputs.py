"""What Gemma 3n and 4 share: layers that read the keys of earlier layers, and per-layer inputs.

Each layer has its own embedding for every token. Together with a projection of the token's common
embedding, it gates what the layer adds last.
"""

from typing import Any

import torch

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, Linears, NormStyle
from raypd.decoding.models.llama import attention_of


def shared_attention_of(attention: Any) -> AttentionSource:
    """Describe an attention that norms queries, keys and values and may share keys and values."""
    source = attention_of(
        attention,
        value_norm=getattr(attention, "v_norm", None),
        norm_style=NormStyle.ROUND_ONCE,
    )
    if attention.is_kv_shared_layer:
        source.is_reader = True
        source.linears = Linears(attention, "q_proj")
        source.layer = source.layer._replace(number=_stored_by(attention))
    elif attention.v_proj is None:
        source.values_are_keys = True
        source.linears = Linears(attention, "q_proj", "k_proj")
    return source


def _stored_by(attention: Any) -> int:
    """Return the index of the layer whose keys and values an attention reads."""
    config = attention.config
    for number, mode in enumerate(config.kv_sharing_modes):
        if mode == "store" and config.layer_types[number] == attention.layer_type:
            return number
    raise AssertionError("kv_sharing_modes has a layer that stores for each type")


class LayerInputs(torch.nn.Module):
    """The inputs of each layer, in addition to the hidden states."""

    def __init__(self, source: Any, builder: Builder, dtype: torch.dtype) -> None:
        """
        Args:
            source: The transformers model, without its head.
            builder: Builds the parts.
            dtype: The dtype of the hidden states.
        """
        super().__init__()
        config = source.config
        self.embed = source.embed_tokens_per_layer
        self.vocabulary = int(config.vocab_size_per_layer_input)
        self.layers = int(config.num_hidden_layers)
        self.projection = builder.product(Linears(source, "per_layer_model_projection"))
        self.norm = builder.norm(source.per_layer_projection_norm, NormStyle.ROUND_ONCE)
        self.projection_scale = float(config.hidden_size**-0.5)
        self.scale = float(2.0**-0.5)
        if torch.is_tensor(source.per_layer_input_scale):
            # Gemma 3n rounds them to the dtype first.
            self.projection_scale = float(source.per_layer_projection_scale.to(dtype))
            self.scale = float(source.per_layer_input_scale.to(dtype))

    def forward(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Compute the inputs.

        Args:
            ids: [tokens]
            embedded: [tokens, hidden size]

        Returns:
            [tokens, layers, size of an input]
        """
        # Tokens beyond the end of the embedding, such as those of images, get the row of token 0.
        by_layer = self.embed(torch.where(ids < self.vocabulary, ids, 0))
        projected = self.projection(embedded) * self.projection_scale
        normed = self.norm(projected.view(len(ids) * self.layers, -1))
        inputs = (normed.view(by_layer.shape) + by_layer) * self.scale
        return inputs.unflatten(-1, (self.layers, -1))


class LayerInputGate(torch.nn.Module):
    """What a layer adds last, computed from the hidden states and its per-layer inputs."""

    def __init__(self, source: Any, builder: Builder) -> None:
        """
        Args:
            source: The transformers layer.
            builder: Builds the parts.
        """
        super().__init__()
        self.gate = builder.product(Linears(source, "per_layer_input_gate"))
        self.activation = source.act_fn
        builder.fallbacks.append(f"activation {type(self.activation).__name__}")
        self.projection = builder.product(Linears(source, "per_layer_projection"))
        self.norm = builder.norm(source.post_per_layer_input_norm, NormStyle.ROUND_ONCE)

    def forward(self, hidden: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
        """Compute what is added.

        Args:
            hidden: [tokens, hidden size]
            layer_input: [tokens, size of an input]

        Returns:
            [tokens, hidden size]
        """
        gated = self.activation(self.gate(hidden)) * layer_input
        added: torch.Tensor = self.norm(self.projection(gated))
        return added
