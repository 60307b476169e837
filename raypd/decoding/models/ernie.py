"""ERNIE 4.5, dense and with experts, which rotates adjacent pairs in a head."""

from typing import Any

from raypd.decoding.layers.sources import AttentionSource
from raypd.decoding.models.decoder import Family
from raypd.decoding.models.experts import SMALL, ExpertsLayer
from raypd.decoding.models.llama import attention_of
from raypd.decoding.models.rotation import pairs_order


class ErnieLayer(ExpertsLayer):
    """A layer of ERNIE 4.5."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        head_dim = attention.head_dim
        return attention_of(attention, order=pairs_order(head_dim, head_dim))


ERNIE = Family(
    "ERNIE 4.5, with experts too",
    ("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM"),
    ErnieLayer,
    small={**SMALL, "moe_num_experts": 4, "moe_k": 4},
)
