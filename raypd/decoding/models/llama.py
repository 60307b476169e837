"""The Llama family: Llama, Mistral, Qwen2 and Qwen3.

hidden += output(attention(norm(hidden)))
hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
"""

from typing import Any

import torch

from raypd.decoding.attention.step import AttentionLayer, Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import AttentionSource, Linears, MlpSource, NormStyle, Rope
from raypd.decoding.models.decoder import ONE_ROPE, DecoderLayer, Family, needed


class PreNormLayer(DecoderLayer):
    """A layer whose attention and MLP each read a norm of the hidden states.

    A subclass overrides `rope_name`, `attention_source`, `build_attention`, `build_mixer` or
    `build_mlp`.
    """

    # None for norms that are not RMS norms.
    norm_style: NormStyle | None = NormStyle.ROUND_FIRST
    # The norms of the transformers layer, before attention and before the MLP.
    norms = ("input_layernorm", "post_attention_layernorm")
    # The product after attention.
    output_name = "o_proj"
    # The factor of everything that is added to the hidden states; None if the family has none.
    multiplier: float | None = None

    def __init__(self, source: Any, builder: Builder) -> None:
        """
        Args:
            source: The transformers layer.
            builder: Builds its parts.
        """
        super().__init__()
        self.rope = self.rope_name(source)
        mixer = self.build_mixer(source, builder)
        self.mlp = self.build_mlp(source, builder)
        before, before_mlp = [getattr(source, name) for name in self.norms]
        self.input_norm = builder.norm(before, self.norm_style, mixer)
        self.post_norm = builder.norm(before_mlp, self.norm_style, self.mlp)

    def build_mixer(self, source: Any, builder: Builder) -> Any:
        """Build attention and the product after it; return the part that reads the first norm."""
        self.attention = self.build_attention(source, builder)
        self.output = builder.product(Linears(source.self_attn, self.output_name))
        return self.attention

    @staticmethod
    def rope_name(source: Any) -> str:
        """Return which of the model's rotary embeddings a transformers layer reads."""
        return ONE_ROPE

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        """Describe the attention of a transformers layer."""
        return attention_of(source.self_attn)

    @classmethod
    def build_attention(cls, source: Any, builder: Builder) -> Any:
        """Build the attention of a transformers layer."""
        return builder.attention(cls.attention_source(source))

    @staticmethod
    def build_mlp(source: Any, builder: Builder) -> Any:
        """Build what follows attention, from a transformers layer."""
        return builder.mlp(mlp_of(source.mlp))

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended = self.attention(self.input_norm(hidden), ropes[self.rope], step)
        return self.added(attended, hidden, sample_rows)

    def added(
        self, mixed: torch.Tensor, hidden: torch.Tensor, sample_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Add the result of attention to the hidden states, and then that of the MLP.

        Args:
            mixed: The output of attention, [tokens, heads * head_dim].
            hidden: [tokens, hidden size]
            sample_rows: As in `forward`.
        """
        mixed, hidden = needed(mixed, hidden, sample_rows)
        if len(hidden) == 0:
            return hidden
        if self.multiplier is not None:
            hidden = hidden + self.output(mixed) * self.multiplier
            return hidden + self.mlp(self.post_norm(hidden)) * self.multiplier
        hidden = self.output.add(mixed, hidden)
        return self.mlp.add(self.post_norm(hidden), hidden)


class MistralLayer(PreNormLayer):
    """A layer of Mistral, whose configuration has one window for all layers."""

    @staticmethod
    def attention_source(source: Any) -> AttentionSource:
        attention = source.self_attn
        return attention_of(attention, window=attention.config.sliding_window)


def attention_of(attention: Any, **overrides: Any) -> AttentionSource:
    """Describe an attention, using the attribute names of most transformers modules.

    Args:
        attention: The transformers module.
        overrides: `window`, and fields of `AttentionSource`.
    """
    window = overrides.pop("window", getattr(attention, "sliding_window", None))
    sinks = getattr(attention, "sinks", None)
    head_dim = attention.head_dim
    heads = attention.config.num_attention_heads
    layer = AttentionLayer(
        number=int(attention.layer_idx),
        scale=float(attention.scaling),
        window=window,
        softcap=getattr(attention, "attn_logit_softcapping", None),
        sinks=None if sinks is None else sinks.detach(),
    )
    source = AttentionSource(
        layer=layer,
        linears=Linears(attention, "q_proj", "k_proj", "v_proj"),
        heads=heads,
        # If the layers of a configuration differ, it does not give the number for all of them.
        kv_heads=heads // attention.num_key_value_groups,
        head_dim=head_dim,
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
    )
    for name, value in overrides.items():
        setattr(source, name, value)
    return source


def mlp_of(mlp: Any) -> MlpSource:
    """Describe an MLP, using the attribute names of most transformers modules."""
    return MlpSource(Linears(mlp, "gate_proj", "up_proj"), Linears(mlp, "down_proj"), mlp.act_fn)


LLAMA = Family(
    "Llama, Qwen2, Qwen3, Ministral, Seed-OSS",
    (
        "LlamaForCausalLM",
        "MinistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SeedOssForCausalLM",
    ),
    PreNormLayer,
)
MISTRAL = Family("Mistral", ("MistralForCausalLM",), MistralLayer)
