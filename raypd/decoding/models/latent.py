"""Latent attention (MLA): DeepSeek V2 and V3, Kimi-K2, GLM-4.7-Flash, Mistral 4, Youtu and A.X-K1.

    hidden += output(attention(norm(hidden)))
    hidden += experts(norm(hidden)), or an MLP

The cache holds a latent and one rotated key per token and layer, instead of the keys and values of
all heads, which the model would compute from these.
"""

from typing import Any

import torch

from raypd.decoding.attention.step import AttentionLayer, Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import LatentSource, Linears, Rope
from raypd.decoding.models.decoder import ONE_ROPE, DecoderModel, Family, needed
from raypd.decoding.models.experts import SMALL_WITH_GROUPS, ExpertsLayer
from raypd.decoding.models.query_scale import query_scale
from raypd.decoding.models.rotation import pairs_order


class LatentLayer(ExpertsLayer):
    """A layer with latent attention, which rotates either adjacent pairs or halves.

    The configuration says which.
    """

    @staticmethod
    def rotates_pairs(attention: Any) -> bool:
        """Return whether a transformers attention module rotates adjacent pairs."""
        return bool(attention.config.rope_interleave)

    @classmethod
    def build_attention(cls, source: Any, builder: Builder) -> Any:
        attention = source.self_attn
        return builder.latent_attention(latent_of(attention, cls.rotates_pairs(attention)))


class DeepseekV2Layer(LatentLayer):
    """A layer of DeepSeek V2, which always rotates adjacent pairs."""

    @staticmethod
    def rotates_pairs(attention: Any) -> bool:
        return True


class MiniCpm3Layer(LatentLayer):
    """A layer of MiniCPM3, which rotates halves and scales what it adds to the hidden states."""

    def __init__(self, source: Any, builder: Builder) -> None:
        super().__init__(source, builder)
        self.multiplier = float(source.residual_scale)

    @staticmethod
    def rotates_pairs(attention: Any) -> bool:
        return False


class AxK1Layer(LatentLayer):
    """A layer of A.X-K1, which norms the output of its experts."""

    def __init__(self, source: Any, builder: Builder) -> None:
        super().__init__(source, builder)
        self.experts_norm: torch.nn.Module | None = None
        norm = getattr(source.mlp, "post_mlp_layernorm", None)
        if norm is not None:
            self.experts_norm = builder.norm(norm, self.norm_style)

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.experts_norm is None:
            return super().forward(hidden, ropes, step, sample_rows)
        attended = self.attention(self.input_norm(hidden), ropes[ONE_ROPE], step)
        attended, hidden = needed(attended, hidden, sample_rows)
        if len(hidden) == 0:
            return hidden
        hidden = self.output.add(attended, hidden)
        return hidden + self.experts_norm(self.mlp(self.post_norm(hidden)))


class DeepseekV2(DecoderModel):
    """What DeepSeek V2 computes around its layers: its rotary embedding is complex, in float32."""

    def ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Rope]:
        turns = self.rotary(hidden[None], positions[None])[0]  # [tokens, rope_dim / 2]
        return {ONE_ROPE: Rope(turns.real.repeat(1, 2), turns.imag.repeat(1, 2))}


class MiniCpm3(DecoderModel):
    """What MiniCPM3 computes around its layers."""

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.text_config.logits_scaling


class Mistral4(DecoderModel):
    """What Mistral 4 computes around its layers. Its queries grow with their position."""

    def ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Rope]:
        rope = super().ropes(hidden, positions)[ONE_ROPE]
        scale = query_scale(self.text_config, positions, hidden.dtype)
        return {ONE_ROPE: rope._replace(query_scale=scale)}


def latent_of(attention: Any, rotates_pairs: bool) -> LatentSource:
    """Describe a latent attention, using the attribute names of transformers modules.

    Args:
        attention: The transformers module.
        rotates_pairs: Whether it rotates adjacent pairs instead of the two halves.
    """
    rope_dim = attention.qk_rope_head_dim
    query: Linears | None = None
    query_name = "q_proj"
    if attention.q_lora_rank is not None:
        query = Linears(attention, "q_b_proj")
        query_name = "q_a_proj"
    return LatentSource(
        layer=AttentionLayer(
            number=int(attention.layer_idx),
            scale=float(attention.scaling),
            latent_dim=attention.kv_lora_rank,
        ),
        inputs=Linears(attention, query_name, "kv_a_proj_with_mqa"),
        query=query,
        query_norm=None if query is None else attention.q_a_layernorm,
        latent_norm=attention.kv_a_layernorm,
        expansion=Linears(attention, "kv_b_proj"),
        heads=attention.num_heads,
        plain_dim=attention.qk_nope_head_dim,
        rope_dim=rope_dim,
        value_dim=attention.v_head_dim,
        latent_dim=attention.kv_lora_rank,
        order=pairs_order(rope_dim, rope_dim) if rotates_pairs else None,
    )


DEEPSEEK_V2 = Family(
    "DeepSeek V2", ("DeepseekV2ForCausalLM",), DeepseekV2Layer, DeepseekV2, small=SMALL_WITH_GROUPS
)
DEEPSEEK_V3 = Family(
    "DeepSeek V3 and R1, Kimi-K2, GLM-4.7-Flash, Youtu",
    ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM"),
    LatentLayer,
    small=SMALL_WITH_GROUPS,
)
AX_K1 = Family("A.X-K1", ("AXK1ForCausalLM",), AxK1Layer, small=SMALL_WITH_GROUPS)
MINICPM3 = Family("MiniCPM3", ("MiniCPM3ForCausalLM",), MiniCpm3Layer, MiniCpm3)
MISTRAL4 = Family(
    "Mistral Small 4", ("Mistral4ForCausalLM",), LatentLayer, Mistral4, small=SMALL_WITH_GROUPS
)
