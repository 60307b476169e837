"""Attention over a packed training pass, differentiable: the instruction among itself, then every example's own tokens
over the instruction and their example."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = products if query.device.type == "cpu" else fused
    sizes = [layout.shared, *layout.lengths]
    # Split once: the gradients of the parts are then joined once, too.
    (q0, *q), (k0, *k), (v0, *v) = (x[0].split(sizes, dim=1) for x in (query, key, value))
    out = []
    if layout.shared:
        causal = torch.ones(layout.shared, layout.shared, dtype=torch.bool, device=query.device).tril()
        out.append(attend(q0, k0, v0, causal, scale))
    for own, own_key, own_value, seen in zip(q, k, v, layout.seen, strict=True):
        out.append(attend(own, torch.cat([k0, own_key], dim=1), torch.cat([v0, own_value], dim=1), seen, scale))
    return torch.cat(out, dim=1).transpose(0, 1)[None], None


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, queries, head_dim] by torch's kernels. seen: bool [queries, keys]."""
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    return scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=scale)[0]


def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """The same as two matrix products: on a CPU the fused kernel takes four times as long to go back."""
    heads, queries, dim = q.shape
    groups = q.reshape(k.shape[0], -1, dim) * scale  # [kv_heads, heads of it * queries, head_dim]
    hidden = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    with torch.autocast(q.device.type, enabled=False):
        scores = (groups @ k.transpose(1, 2)).view(heads, queries, -1) + hidden
        return (scores.softmax(-1).view(k.shape[0], -1, k.shape[1]) @ v).view(heads, queries, dim)
