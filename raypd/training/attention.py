"""Differentiable attention over a packed pass: the instruction among itself, own tokens over it and
their example.
"""

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
    layout: Layout | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer; returns [1, tokens, heads,
    head_dim].
    """
    assert layout is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = products if query.device.type == "cpu" else fused
    # Under autocast the rotation leaves them in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return attend(query[0], key[0], value[0], layout, scale).transpose(0, 1)[None], None


def fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
) -> torch.Tensor:
    """[heads, tokens, head_dim] by torch's kernels: a call for the instruction, one for all
    examples as padded rows.
    """
    repeat, shared = q.shape[0] // k.shape[0], layout.shared
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    index, tokens, visible = layout.padded
    rows = len(visible), visible.shape[2]
    # [examples, heads, longest, head_dim]; `index_select` goes back by one kernel, an index in
    # brackets by sorting
    q_own, k_own, v_own = (
        x.index_select(1, index).unflatten(1, rows).transpose(0, 1) for x in (q, k, v)
    )
    q0, k0, v0 = (x[None, :, :shared] for x in (q, k, v))
    keys = torch.cat([k0.expand(len(visible), -1, -1, -1), k_own], dim=2)
    values = torch.cat([v0.expand(len(visible), -1, -1, -1), v_own], dim=2)
    out = scaled_dot_product_attention(q_own, keys, values, attn_mask=visible, scale=scale)
    out = out.transpose(0, 1).flatten(1, 2).index_select(1, tokens)  # [heads, own tokens, head_dim]
    if not shared:
        return out
    return torch.cat(
        [scaled_dot_product_attention(q0, k0, v0, is_causal=True, scale=scale)[0], out], dim=1
    )


def products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
) -> torch.Tensor:
    """The same as matrix products of each example: on a CPU the fused kernel takes four times as
    long to go back.
    """
    sizes = [layout.shared, *layout.lengths]
    # Split once: the gradients of the parts are then joined once, too.
    (q0, *qs), (k0, *ks), (v0, *vs) = (x.split(sizes, dim=1) for x in (q, k, v))
    out = []
    if layout.shared:
        out.append(
            _products(
                q0, k0, v0, torch.ones(layout.shared, layout.shared, dtype=torch.bool).tril(), scale
            )
        )
    for q_own, k_own, v_own, visible in zip(qs, ks, vs, layout.visible, strict=True):
        out.append(
            _products(
                q_own, torch.cat([k0, k_own], dim=1), torch.cat([v0, v_own], dim=1), visible, scale
            )
        )
    return torch.cat(out, dim=1)


def _products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """[heads, queries, head_dim]. k, v: [kv_heads, keys, head_dim]. visible: bool [queries,
    keys].
    """
    heads, queries, dim = q.shape
    groups = q.reshape(k.shape[0], -1, dim) * scale  # [kv_heads, heads of it * queries, head_dim]
    hidden = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
    with torch.autocast(q.device.type, enabled=False):
        scores = (groups @ k.transpose(1, 2)).view(heads, queries, -1) + hidden
        return (scores.softmax(-1).view(k.shape[0], -1, k.shape[1]) @ v).view(heads, queries, dim)
