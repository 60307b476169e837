"""Attention over a packed training pass, differentiable: the instruction among itself, then every example's own tokens
over the instruction and their example."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from raypd.training.packing import Layout

NAME = "raypd_training"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim], rotated
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim], rotated
    value: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer; returns [1, tokens, heads, head_dim]."""
    assert layout is not None
    repeat = query.shape[1] // key.shape[1]
    sizes = [layout.shared, *layout.lengths]
    # Split once: the gradients of the parts are then joined once, too.
    (q0, *q), (k0, *k), (v0, *v) = (
        x.split(sizes, dim=2) for x in (query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1))
    )
    out = [sdpa(q0, k0, v0, is_causal=True, scale=scaling)] if layout.shared else []
    for own, own_key, own_value, seen in zip(q, k, v, layout.seen, strict=True):
        keys, values = torch.cat([k0, own_key], dim=2), torch.cat([v0, own_value], dim=2)
        out.append(sdpa(own, keys, values, attn_mask=seen, scale=scaling))
    return torch.cat(out, dim=2).transpose(1, 2), None
