"""gpt-oss: attention with sinks, and experts with clamped gates.

hidden += output(attention(norm(hidden)))
hidden += experts(norm(hidden))
"""

import torch

from raypd.decoding.layers.sources import NormStyle, Rope
from raypd.decoding.models.decoder import ONE_ROPE, DecoderModel, Family
from raypd.decoding.models.experts import SMALL, ExpertsLayer


class GptOssLayer(ExpertsLayer):
    """A layer of gpt-oss."""

    norm_style = NormStyle.ROUND_ONCE


class GptOss(DecoderModel):
    """gpt-oss, whose rotary embedding has one number per pair."""

    norm_style = NormStyle.ROUND_ONCE

    def ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Rope]:
        cos, sin = self.rotary(hidden[None], positions[None])
        return {ONE_ROPE: Rope(cos[0].repeat(1, 2), sin[0].repeat(1, 2))}


GPT_OSS = Family(
    "gpt-oss",
    ("GptOssForCausalLM",),
    GptOssLayer,
    GptOss,
    small=SMALL,
)
