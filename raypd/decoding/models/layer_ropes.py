"""Models with a rotary embedding per type of layer."""

import torch

from raypd.decoding.layers.sources import Rope
from raypd.decoding.models.decoder import DecoderModel


class LayerRopes(DecoderModel):
    """A model whose layers name the type of their rotary embedding."""

    def ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Rope]:
        ropes: dict[str, Rope] = {}
        for layer_type in self.rotary.layer_types:
            cos, sin = self.rotary(hidden[None], positions[None], layer_type)
            # Some families have them in float32.
            ropes[layer_type] = Rope(cos[0].to(hidden.dtype), sin[0].to(hidden.dtype))
        return ropes
