"""The models of the Llama family (Llama, Mistral, Qwen2, Qwen3), written out: tokens of many
sequences lie in one row.

    hidden = embed(ids)                                          [tokens, hidden size]
    each layer:
        query, key, value = rotate(norm(project(norm(hidden))))  [tokens, heads or kv_heads,
            head_dim]
        hidden += output(attend(query, key, value))
        hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
    logits = head(norm(hidden))                                  [tokens, vocabulary]

A `Layer` reads transformers' modules, whatever they are (quantized, with an adapter), and computes
in torch. The last one computes its MLP only for the tokens whose predictions are wanted: of the
others a pass needs keys and values alone.
"""

from typing import Any

import torch

from raypd.decoding import native
from raypd.decoding.attention.step import AttentionLayer, Step
from raypd.decoding.linear import PackedLinear, PanelLinear, has_pairs
from raypd.decoding.quantized import Int8Linear

# Queries; keys, values, None: in the cache.
Projected = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_FAMILIES = {f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}


def is_llama(model: torch.nn.Module) -> bool:
    return type(model).__name__ in _FAMILIES and type(model).__module__.startswith(
        "transformers.models."
    )


class Layer(torch.nn.Module):
    """A decoder layer in torch.

    A subclass overrides what its device computes another way, from `build` on.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        attention = source.self_attn
        # Mistral's window is one of all layers, and stands in the configuration alone.
        holder = attention.config if type(source).__name__.startswith("Mistral") else attention
        window = getattr(holder, "sliding_window", None)
        self.head_dim = attention.head_dim
        self.attention = AttentionLayer(attention.layer_idx, attention.scaling, window)
        self.input_norm, self.post_norm = source.input_layernorm, source.post_attention_layernorm
        self.query_norm, self.key_norm = (
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
        )
        self.build(attention, source.mlp)

    def build(self, attention: Any, mlp: Any) -> None:
        self.query, self.key, self.value = attention.q_proj, attention.k_proj, attention.v_proj
        self.output = attention.o_proj
        self.gate, self.up, self.down, self.activation = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: Step,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens, hidden size] -> the same, or in the last layer [kept, hidden size]; cos, sin:
        [tokens, head_dim].
        """
        query, key, value = self.project(self.norm(hidden, self.input_norm), cos, sin, step)
        attended = step.attend(step, self.attention, query, key, value)  # [tokens, heads, head_dim]
        if kept is not None:
            attended, hidden = attended[kept], hidden[kept]
            if not len(kept):
                return hidden
        hidden = self.add(self.output, attended.flatten(1), hidden)
        return self.mlp(self.norm(hidden, self.post_norm), hidden)

    @staticmethod
    def norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
        """RMS norm over the last dimension, in float32: x / sqrt(mean(x^2) + eps) * weight."""
        return norm(x)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Step
    ) -> Projected:
        """[tokens, hidden] -> queries [tokens, heads, head_dim], keys, values [tokens, kv_heads,
        head_dim].
        """
        query, key, value = (
            w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.query, self.key, self.value)
        )
        if self.query_norm is not None:
            query, key = self.norm(query, self.query_norm), self.norm(key, self.key_norm)
        return _rotated(query, cos, sin), _rotated(key, cos, sin), value

    @staticmethod
    def add(linear: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] -> [tokens, hidden size]"""
        return residual + linear(x)

    def mlp(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden size] -> the same"""
        return self.add(self.down, self.activation(self.gate(x)) * self.up(x), residual)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, head_dim] by cos, sin [tokens, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class NativeLayer(Layer):
    """A layer by native.c, which takes the weights from transformers'.

    Float32 sums may go in another order than its own. One product makes queries, keys and values;
    one makes gate and up, and joins them in bfloat16.
    """

    @staticmethod
    def takes(source: Any) -> bool:
        """Whether a layer of transformers is one that they compute."""
        attention, mlp = source.self_attn, source.mlp
        inputs = [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
        kinds = {type(linear) for linear in (*inputs, attention.o_proj, mlp.down_proj)}
        paired = kinds == {Int8Linear} or (
            kinds == {torch.nn.Linear} and all(has_pairs(x.weight) for x in inputs)
        )
        fit = (
            attention.head_dim % 32
            == mlp.config.hidden_size % 16
            == mlp.config.intermediate_size % 16
            == 0
        )
        return (
            paired
            and has_pairs(source.input_layernorm.weight)
            and fit
            and mlp.config.hidden_act == "silu"
        )

    def build(self, attention: Any, mlp: Any) -> None:
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.heads = [linear.out_features // self.head_dim for linear in projections]
        self.projection = self.joined(projections)
        self.gated = self.joined([mlp.gate_proj, mlp.up_proj], gated=True)
        self.output, self.down = self.joined([attention.o_proj]), self.joined([mlp.down_proj])
        del attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        del mlp.gate_proj, mlp.up_proj, mlp.down_proj

    @staticmethod
    def norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
        return native.rms_norm(x, norm.weight, norm.variance_epsilon)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Step
    ) -> Projected:
        # [tokens, all heads, head_dim].
        joined = self.projection(x).unflatten(-1, (-1, self.head_dim))
        query, key, value = joined.split(self.heads, 1)
        if self.query_norm is None:
            native.rotate(joined[:, : -self.heads[2]], cos, sin)
            return query, key, value
        query, key = self.norm(query, self.query_norm), self.norm(key, self.key_norm)
        native.rotate(query, cos, sin)
        native.rotate(key, cos, sin)
        return query, key, value

    @staticmethod
    def add(linear: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return linear(x, residual) if isinstance(linear, PanelLinear) else residual + linear(x)

    def mlp(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x = self.gated(x)
        return self.add(
            self.down, x if isinstance(self.gated, PanelLinear) else native.swiglu(x), residual
        )

    @classmethod
    def joined(
        cls, linears: list[Any], gated: bool = False
    ) -> PanelLinear | PackedLinear | Int8Linear:
        """One layer that gives the outputs of all, one behind the other; `gated` as `PanelLinear`
        has it.
        """
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = (
            None
            if linears[0].bias is None
            else torch.cat([linear.bias.detach() for linear in linears])
        )
        if isinstance(linears[0], Int8Linear):
            return Int8Linear(weight, torch.cat([linear.scale for linear in linears]), bias)
        return cls.product(weight, bias, gated)

    @staticmethod
    def product(
        weight: torch.Tensor, bias: torch.Tensor | None, gated: bool
    ) -> PanelLinear | PackedLinear:
        return PanelLinear(weight, bias, gated)


class AmxLayer(NativeLayer):
    """A layer by native.c, but for its products: oneDNN makes them with AMX."""

    @staticmethod
    def product(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> PackedLinear:
        return PackedLinear(weight, bias)


class Llama(torch.nn.Module):
    """A model of the family, of transformers' `model`, whose layers are computed as `layer`
    does.
    """

    def __init__(self, model: Any, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.config, self.dtype = model.config, model.dtype
        self.embed, self.rope, self.norm, self.head = (
            model.model.embed_tokens,
            model.model.rotary_emb,
            model.model.norm,
            model.lm_head,
        )
        self.rms_norm = layer.norm
        self.layers = torch.nn.ModuleList(layer(source) for source in model.model.layers)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: Step,
        full: int | None = None,
        want_hidden: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens, positions [tokens] -> logits [full, vocabulary] of the first `full` of
        `step.kept` (None: all), and last hidden states [kept, hidden size], which are there whether
        wanted or not.
        """
        hidden = self.embed(ids)  # [tokens, hidden size]
        # [tokens, head_dim].
        cos, sin = (part[0] for part in self.rope(hidden[None], positions[None]))
        *before, last = self.layers
        for layer in before:
            hidden = layer(hidden, cos, sin, step)
        # [kept, hidden size].
        hidden = self.rms_norm(last(hidden, cos, sin, step, step.kept), self.norm)
        return self.head(hidden[:full]), hidden
