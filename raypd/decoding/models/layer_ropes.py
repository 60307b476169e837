"""Models with a rotary embedding per type of layer."""

import torch

from raypd.decoding.layers.sources import Rope
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.models.rotation import in_dtype


class LayerRopes(DecoderModel):
    """A model whose layers name the type of their rotary embedding."""

    def ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Rope]:
        ropes: dict[str, Rope] = {}
        for layer_type in self.rotary.layer_types:
            cos, sin = self.rotary(hidden[None], positions[None], layer_type)
            ropes[layer_type] = in_dtype(Rope(cos[0], sin[0]), hidden.dtype)
        return ropes
