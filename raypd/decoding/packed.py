"""A model on a CPU in bfloat16, made faster in place: its answers are as exact as before.

Weights of linear layers lie as their products read them, which are those of native.c or, where those cannot run or the
processor has AMX, oneDNN's. Sums in float32 may go in another order than transformers', as its own do in passes of
other sizes. In the attention layers of common families one product makes queries, keys and values, and one function
rotates them, in float32; in their MLPs one product makes gate and up and joins them.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from raypd.decoding import native
from raypd.decoding.attention import avx512
from raypd.decoding.last_layer import PLAIN
from raypd.decoding.native import PANEL
from raypd.decoding.quantized import Int8Linear

_TOKENS = 2048  # of a pass for which the layout is chosen; it is as good for fewer


class PanelLinear(torch.nn.Module):
    """A linear layer in bfloat16 on a CPU with AVX-512 BF16, for inference alone. A token's outputs are the same bits
    whatever else is in the pass.

    Args:
        linear: gives its weight, which is copied, and its bias.
        gated: the first half of its outputs are gates of the second, and SwiGLU is what the layer gives.
    """

    def __init__(self, linear: torch.nn.Linear, gated: bool = False) -> None:
        super().__init__()
        self.outputs, self.gated = linear.out_features, gated
        rows = [linear.weight.detach(), *([] if linear.bias is None else [linear.bias.detach()[:, None].float()])]
        if gated:  # half a panel of gates, half a panel of what they gate
            rows = [part.view(2, -1, PANEL // 2, part.shape[1]).transpose(0, 1).reshape(part.shape) for part in rows]
        rows = [torch.nn.functional.pad(part, (0, 0, 0, -len(part) % PANEL)) for part in rows]
        self.panels = rows[0].view(-1, PANEL, linear.in_features // 2, 2).transpose(1, 2).contiguous()
        self.bias = rows[1][:, 0].contiguous() if len(rows) > 1 else None

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was, made anew: [out_features, in_features]."""
        rows = self.panels.transpose(1, 2).flatten(2).flatten(0, 1)[: self.outputs]
        if self.gated:
            rows = rows.view(-1, 2, PANEL // 2, rows.shape[1]).transpose(0, 1).reshape(rows.shape)
        return rows

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features], or half of them; what is added to it is like it."""
        return native.linear(x, self.panels, self.bias, self.outputs, self.gated, residual)


class PackedLinear(torch.nn.Module):
    """A linear layer in bfloat16 on a CPU by oneDNN, for inference alone.

    Args:
        linear: gives its weight, which is copied, and its bias.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TOKENS)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was, made anew: [out_features, in_features]."""
        return self.packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


AnyLinear = torch.nn.Linear | PanelLinear | PackedLinear


def pack(model: torch.nn.Module) -> None:
    """Packs layers where they gain by it; an embedding keeps a weight that it shares."""
    in_c = avx512.is_best(torch.device("cpu"), torch.bfloat16)
    if not in_c and not is_possible():
        return
    for parent in list(model.modules()):
        if in_c and type(parent).__module__ in PLAIN:
            _fuse(parent)
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and _gains(child.weight):
                setattr(parent, name, PanelLinear(child) if in_c else PackedLinear(child))


def _fuse(module: Any) -> None:
    """Gives a layer of a plain family a forward pass of fewer steps."""
    name = type(module).__name__
    if name.endswith("DecoderLayer"):
        _fuse(module.self_attn)
        _fuse(module.mlp)
        both = hasattr(module.self_attn, "qkv_proj") and hasattr(module.mlp, "gate_up_proj")
        if both and "forward" not in vars(module):  # the last layer may have been shortened
            module.forward = MethodType(_layer, module)
    elif name.endswith("Attention") and hasattr(module, "q_proj") and module.head_dim % 32 == 0:
        joined = _joined([module.q_proj, module.k_proj, module.v_proj])
        if joined is not None:
            module.qkv_proj = joined
            del module.q_proj, module.k_proj, module.v_proj
            module.forward = MethodType(_attention, module)
    elif name.endswith("MLP") and hasattr(module, "gate_proj") and module.config.hidden_act == "silu":
        joined = _joined([module.gate_proj, module.up_proj])
        if joined is not None and module.intermediate_size % 16 == 0:
            module.gate_up_proj = joined if isinstance(joined, Int8Linear) else PanelLinear(joined, gated=True)
            del module.gate_proj, module.up_proj
            module.forward = MethodType(_mlp, module)
    elif name.endswith("RMSNorm") and _gains(module.weight) and len(module.weight) % 16 == 0:
        module.forward = MethodType(_rms_norm, module)


def _joined(parts: list[Any]) -> torch.nn.Linear | Int8Linear | None:
    """One layer that gives the outputs of all, one behind the other; None: they are of other kinds."""
    quantized = all(type(part) is Int8Linear for part in parts)
    if not quantized and not all(type(part) is torch.nn.Linear and _gains(part.weight) for part in parts):
        return None
    weight = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    if quantized:
        return Int8Linear(weight, torch.cat([part.scale for part in parts]), bias)
    outputs, inputs = weight.shape
    joined = torch.nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    joined.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = torch.nn.Parameter(bias, requires_grad=False)
    return joined


def _rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return native.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _layer(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A layer whose `_attention` and `_mlp` add what goes past them."""
    normed = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(hidden_states=normed, residual=hidden_states, **kwargs)
    return self.mlp(self.post_attention_layernorm(hidden_states), hidden_states)


def _mlp(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    x = self.gate_up_proj(x)
    return _added(self.down_proj, native.swiglu(x) if isinstance(self.gate_up_proj, Int8Linear) else x, residual)


def _added(linear: Any, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """linear(x), and the residual where there is one."""
    if isinstance(linear, PanelLinear):
        return linear(x, residual)
    return linear(x) if residual is None else residual + linear(x)


def _attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: None = None,
    residual: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention's forward pass, without a cache of transformers: [batch, tokens, hidden_size] -> the same."""
    shape = hidden_states.shape[:-1]
    joined = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))  # [batch, tokens, all heads, head_dim]
    kv_heads = joined.shape[2] // (self.num_key_value_groups + 2)
    sizes = [kv_heads * self.num_key_value_groups, kv_heads, kv_heads]
    cos, sin = (one.expand(*shape, -1).flatten(0, 1) for one in position_embeddings)
    if hasattr(self, "q_norm"):
        query, key, value = joined.split(sizes, 2)
        query, key = self.q_norm(query), self.k_norm(key)
        for one in (query, key):
            native.rotate(one.view(-1, *one.shape[2:]), cos, sin)
    else:
        rotated = joined[:, :, : sizes[0] + kv_heads]
        native.rotate(rotated.view(-1, *rotated.shape[2:]), cos, sin)
        query, key, value = joined.split(sizes, 2)
    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    heads_first = (one.transpose(1, 2) for one in (query, key, value))
    window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))  # mistral: of the model
    out, weights = attend(
        self, *heads_first, attention_mask, dropout=0.0, scaling=self.scaling, sliding_window=window, **kwargs
    )
    return _added(self.o_proj, out.flatten(2), residual), weights


def narrowed(linear: AnyLinear, outputs: torch.Tensor) -> torch.nn.Linear | PanelLinear:
    """Some outputs of a linear layer without a bias, as a layer of its own; in `PanelLinear` they are the same bits.

    Args:
        linear: the layer.
        outputs: [n] indices.
    """
    if isinstance(linear, PanelLinear):
        weight = linear.panels[outputs // PANEL, :, outputs % PANEL].flatten(1)
    else:
        weight = linear.weight.detach()[outputs]
    some = torch.nn.Linear(weight.shape[1], len(outputs), bias=False, device="meta")
    some.weight = torch.nn.Parameter(weight, requires_grad=False)
    return PanelLinear(some) if isinstance(linear, PanelLinear) else some


def is_possible() -> bool:
    """Whether this torch, on this processor, has oneDNN's. They are those of torch.compile, and not documented."""
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _gains(weight: torch.Tensor) -> bool:
    """Whether it is one of bfloat16 on a CPU, with rows of pairs."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return plain and weight.numel() > 0 and weight.shape[-1] % 2 == 0
