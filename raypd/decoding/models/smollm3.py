"""SmolLM3, in which some layers do not rotate queries and keys."""

from typing import Any

from raypd.decoding.layers.sources import AttentionSource
from raypd.decoding.models.decoder import Family
from raypd.decoding.models.llama import PreNormLayer, attention_of


class SmolLm3Layer(PreNormLayer):
    """A layer of SmolLM3."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        return attention_of(attention, rotated=bool(attention.use_rope))


SMOLLM3 = Family("SmolLM3", ("SmolLM3ForCausalLM",), SmolLm3Layer)
