"""The models of the Llama family (Llama, Mistral, Qwen2, Qwen3), written out.

The tokens of many sequences lie in one row:

    hidden = embed(ids)                                          [tokens, hidden size]
    each layer:
        query, key, value = rotate(norm(project(norm(hidden))))  [tokens, heads or kv_heads,
                                                                  head_dim]
        hidden += output(attend(query, key, value))
        hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
    logits = head(norm(hidden))                                  [tokens, vocabulary]

A `Layer` reads transformers' modules, whatever they are (quantized, with an adapter), and computes
in torch. The last layer computes its MLP only for the tokens behind which a next one is wanted; of
the others a pass needs keys and values alone.
"""

from typing import Any

import torch

import raypd.decoding.native as native
from raypd.decoding.attention.step import AttentionLayer, Step
from raypd.decoding.linear import PackedLinear, PanelLinear, has_pairs
from raypd.decoding.quantized import Int8Linear

# Queries, and keys and values, or None for those that a kernel has put into the cache already.
Projected = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_FAMILIES = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}


def is_llama(model: torch.nn.Module) -> bool:
    """Tell whether a model of the family is computed by transformers' own code."""
    kind = type(model)
    return kind.__name__ in _FAMILIES and kind.__module__.startswith("transformers.models.")


class Layer(torch.nn.Module):
    """A decoder layer in torch.

    A subclass overrides what its device computes in another way, from `build` on.
    """

    def __init__(self, source: Any) -> None:
        """
        Args:
            source: The layer of transformers.
        """
        super().__init__()
        attention = source.self_attn
        # Mistral has one window for all layers, which only the configuration holds.
        is_mistral = type(source).__name__.startswith("Mistral")
        holder = attention.config if is_mistral else attention
        window = getattr(holder, "sliding_window", None)
        self.head_dim = attention.head_dim
        self.attention = AttentionLayer(attention.layer_idx, attention.scaling, window)
        self.input_norm = source.input_layernorm
        self.post_norm = source.post_attention_layernorm
        self.query_norm = getattr(attention, "q_norm", None)
        self.key_norm = getattr(attention, "k_norm", None)
        self.build(attention, source.mlp)

    def build(self, attention: Any, mlp: Any) -> None:
        """Take the linear layers from transformers' modules."""
        self.query = attention.q_proj
        self.key = attention.k_proj
        self.value = attention.v_proj
        self.output = attention.o_proj
        self.gate = mlp.gate_proj
        self.up = mlp.up_proj
        self.down = mlp.down_proj
        self.activation = mlp.act_fn

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the layer.

        Args:
            hidden: [tokens, hidden size]
            cos: [tokens, head_dim]
            sin: [tokens, head_dim]
            step: The pass.
            sample_rows: In the last layer, the rows that are needed behind attention, [samples].

        Returns:
            [tokens, hidden size], or [samples, hidden size] in the last layer.
        """
        query, key, value = self.project(self.norm(hidden, self.input_norm), cos, sin, step)
        attended = step.attend(step, self.attention, query, key, value)  # [tokens, heads, head_dim]
        if sample_rows is not None:
            attended = attended[sample_rows]
            hidden = hidden[sample_rows]
            if len(sample_rows) == 0:
                return hidden
        hidden = self.add(self.output, attended.flatten(1), hidden)
        return self.mlp(self.norm(hidden, self.post_norm), hidden)

    @staticmethod
    def norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
        """Apply an RMS norm in float32: x / sqrt(mean(x^2) + eps) * weight."""
        return norm(x)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Step
    ) -> Projected:
        """Compute queries [tokens, heads, head_dim], keys, values [tokens, kv_heads, head_dim]."""
        query = self.query(x).unflatten(-1, (-1, self.head_dim))
        key = self.key(x).unflatten(-1, (-1, self.head_dim))
        value = self.value(x).unflatten(-1, (-1, self.head_dim))
        if self.query_norm is not None:
            query = self.norm(query, self.query_norm)
            key = self.norm(key, self.key_norm)
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value

    @staticmethod
    def add(linear: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + linear(x), [tokens, hidden size]."""
        return residual + linear(x)

    def mlp(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + MLP(x), [tokens, hidden size]."""
        return self.add(self.down, self.activation(self.gate(x)) * self.up(x), residual)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to x [tokens, heads, head_dim] by cos, sin [tokens, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class NativeLayer(Layer):
    """A layer by native.c, which takes the weights from transformers' modules.

    Sums in float32 may be added up in another order than in torch. One product computes queries,
    keys and values. Another one computes gate and up, and multiplies them in bfloat16.
    """

    @staticmethod
    def takes(source: Any) -> bool:
        """Tell whether a layer of transformers can be computed this way."""
        attention = source.self_attn
        mlp = source.mlp
        inputs = [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
        kinds = {type(linear) for linear in (*inputs, attention.o_proj, mlp.down_proj)}
        if kinds == {torch.nn.Linear}:
            if not all(has_pairs(linear.weight) for linear in inputs):
                return False
        elif kinds != {Int8Linear}:
            return False
        if mlp.config.hidden_act != "silu" or not has_pairs(source.input_layernorm.weight):
            return False
        if mlp.config.hidden_size % 16 or mlp.config.intermediate_size % 16:
            return False
        return attention.head_dim % 32 == 0

    def build(self, attention: Any, mlp: Any) -> None:
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        # Query heads, key heads, value heads.
        self.heads = [linear.out_features // self.head_dim for linear in projections]
        self.projection = self.joined(projections)
        self.gated = self.joined([mlp.gate_proj, mlp.up_proj], gated=True)
        self.output = self.joined([attention.o_proj])
        self.down = self.joined([mlp.down_proj])
        # The weights were copied, so the model need not hold them twice.
        del attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        del mlp.gate_proj, mlp.up_proj, mlp.down_proj

    @staticmethod
    def norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
        return native.rms_norm(x, norm.weight, norm.variance_epsilon)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Step
    ) -> Projected:
        joined = self.projection(x).unflatten(-1, (-1, self.head_dim))  # [tokens, all heads, ...]
        query, key, value = joined.split(self.heads, 1)
        if self.query_norm is None:
            # Queries and keys are neighbours, and are rotated in one call.
            value_heads = self.heads[2]
            native.rotate(joined[:, :-value_heads], cos, sin)
            return query, key, value
        query = self.norm(query, self.query_norm)
        key = self.norm(key, self.key_norm)
        native.rotate(query, cos, sin)
        native.rotate(key, cos, sin)
        return query, key, value

    @staticmethod
    def add(linear: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if isinstance(linear, PanelLinear):
            return linear(x, residual)
        return residual + linear(x)

    def mlp(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x = self.gated(x)
        if not isinstance(self.gated, PanelLinear):
            x = native.swiglu(x)
        return self.add(self.down, x, residual)

    @classmethod
    def joined(
        cls, linears: list[Any], gated: bool = False
    ) -> PanelLinear | PackedLinear | Int8Linear:
        """Join linear layers into one that gives all their outputs, one after the other.

        Args:
            linears: The layers.
            gated: As `PanelLinear` has it.
        """
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = None
        if linears[0].bias is not None:
            bias = torch.cat([linear.bias.detach() for linear in linears])
        if isinstance(linears[0], Int8Linear):
            scale = torch.cat([linear.scale for linear in linears])
            return Int8Linear(weight, scale, bias)
        return cls.product(weight, bias, gated)

    @staticmethod
    def product(
        weight: torch.Tensor, bias: torch.Tensor | None, gated: bool
    ) -> PanelLinear | PackedLinear:
        """Make a linear layer of a weight in bfloat16."""
        return PanelLinear(weight, bias, gated)


class AmxLayer(NativeLayer):
    """A layer by native.c, except its products, which oneDNN computes with AMX."""

    @staticmethod
    def product(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> PackedLinear:
        return PackedLinear(weight, bias)


class Llama(torch.nn.Module):
    """A model of the Llama family."""

    def __init__(self, model: Any, layer: type[Layer] = Layer) -> None:
        """
        Args:
            model: The model of transformers, whose modules it uses.
            layer: How its layers are computed.
        """
        super().__init__()
        self.config = model.config
        self.dtype = model.dtype
        self.embed = model.model.embed_tokens
        self.rope = model.model.rotary_emb
        self.norm = model.model.norm
        self.head = model.lm_head
        self.rms_norm = layer.norm
        self.layers = torch.nn.ModuleList(layer(source) for source in model.model.layers)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: Step,
        full_count: int | None = None,
        want_hidden: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the model over a pass.

        Args:
            ids: Token ids, [tokens].
            positions: [tokens]
            step: The pass.
            full_count: How many of `step.sample_rows` need logits, from the first on; None for all.
            want_hidden: Not used, since hidden states are there anyway.

        Returns:
            Logits [full_count, vocabulary], and last hidden states [samples, hidden size].
        """
        hidden = self.embed(ids)  # [tokens, hidden size]
        cos, sin = self.rope(hidden[None], positions[None])
        cos = cos[0]  # [tokens, head_dim]
        sin = sin[0]
        *first_layers, last_layer = self.layers
        for layer in first_layers:
            hidden = layer(hidden, cos, sin, step)
        hidden = last_layer(hidden, cos, sin, step, step.sample_rows)
        hidden = self.rms_norm(hidden, self.norm)  # [samples, hidden size]
        return self.head(hidden[:full_count]), hidden
