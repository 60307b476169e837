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
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    shared = layout.shared
    q, k, v = (_own(x, layout) for x in (query, key, value))
    if shared:
        k, v = (_behind(whole[:, :, :shared], own) for whole, own in ((key, k), (value, v)))
    out = sdpa(q, k, v, attn_mask=layout.seen[:, None], scale=scaling)  # [examples, heads, longest, head_dim]
    out = out.transpose(1, 2).flatten(0, 1)[layout.there][None]  # [1, own tokens, heads, head_dim]
    if shared:
        q, k, v = (x[:, :, :shared] for x in (query, key, value))
        out = torch.cat([sdpa(q, k, v, is_causal=True, scale=scaling).transpose(1, 2), out], dim=1)
    return out, None


def _own(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[1, heads, tokens, head_dim] -> [examples, heads, longest, head_dim]."""
    return x[0][:, layout.own].transpose(0, 1)


def _behind(shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return torch.cat([shared.expand(own.shape[0], -1, -1, -1), own], dim=2)
