"""Ministral 3, a Mistral whose queries grow with their position."""

import torch

from raypd.decoding.layers.sources import Rope
from raypd.decoding.models.decoder import ONE_ROPE, DecoderModel, Family
from raypd.decoding.models.llama import MistralLayer
from raypd.decoding.models.query_scale import query_scale


class Ministral3(DecoderModel):
    """What Ministral 3 computes around its layers."""

    def ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Rope]:
        rope = super().ropes(hidden, positions)[ONE_ROPE]
        scale = query_scale(self.text_config, positions, hidden.dtype)
        return {ONE_ROPE: rope._replace(query_scale=scale)}


MINISTRAL3 = Family("Ministral 3", ("Ministral3ForCausalLM",), MistralLayer, Ministral3)
