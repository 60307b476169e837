"""Differentiable attention over a packed pass.

The tokens of the instruction see each other; own tokens see the instruction and their example.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from raypd.training.packing import Layout

NAME = "raypd_training"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend; transformers calls this function in every layer.

    Args:
        module: The attention layer.
        query: [1, heads, tokens, head_dim], rotated.
        key: [1, kv_heads, tokens, head_dim], rotated.
        value: [1, kv_heads, tokens, head_dim].
        attention_mask: Unused; `layout` says what is visible.
        scaling: The factor of the scores; None for head_dim ** -0.5.
        layout: Which tokens of the pass belong together.

    Returns:
        [1, tokens, heads, head_dim], and no attention weights.
    """
    assert layout is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = products if query.device.type == "cpu" else fused
    # Under autocast the rotation leaves queries and keys in float32.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    out = attend(query[0], key[0], value[0], layout, scale)
    return out.transpose(0, 1)[None], None


def fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
) -> torch.Tensor:
    """Attend by torch's kernels: one call for the instruction, one for all examples as padded rows.

    Args:
        q: [heads, tokens, head_dim].
        k: [kv_heads, tokens, head_dim].
        v: [kv_heads, tokens, head_dim].
        layout: Which tokens of the pass belong together.
        scale: The factor of the scores.

    Returns:
        [heads, tokens, head_dim].
    """
    repeat = q.shape[0] // k.shape[0]
    shared = layout.shared
    k = k.repeat_interleave(repeat, 0)
    v = v.repeat_interleave(repeat, 0)
    padded = layout.padded
    examples, _, longest, _ = padded.visible.shape

    def own_rows(x: torch.Tensor) -> torch.Tensor:
        """[heads, tokens, head_dim] -> [examples, heads, longest, head_dim]."""
        # The backward pass of `index_select` is one kernel; that of an index in brackets sorts.
        return x.index_select(1, padded.index).unflatten(1, (examples, longest)).transpose(0, 1)

    def with_instruction(x: torch.Tensor) -> torch.Tensor:
        """[heads, tokens, head_dim] -> [examples, heads, shared + longest, head_dim]."""
        instruction = x[None, :, :shared].expand(examples, -1, -1, -1)
        return torch.cat([instruction, own_rows(x)], dim=2)

    out = scaled_dot_product_attention(
        own_rows(q), with_instruction(k), with_instruction(v), attn_mask=padded.visible, scale=scale
    )
    # [heads, own tokens, head_dim]
    out = out.transpose(0, 1).flatten(1, 2).index_select(1, padded.own_tokens)
    if not shared:
        return out
    instruction_out = scaled_dot_product_attention(
        q[None, :, :shared], k[None, :, :shared], v[None, :, :shared], is_causal=True, scale=scale
    )
    return torch.cat([instruction_out[0], out], dim=1)


def products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
) -> torch.Tensor:
    """Compute the same as `fused` by matrix products, example by example.

    On a CPU the backward pass of the fused kernel takes four times as long.
    """
    sizes = [layout.shared, *layout.lengths]
    # Each tensor is split once, so that the gradients of its parts are joined once.
    q_parts = q.split(sizes, dim=1)
    k_parts = k.split(sizes, dim=1)
    v_parts = v.split(sizes, dim=1)
    out = []
    if layout.shared:
        causal = torch.ones(layout.shared, layout.shared, dtype=torch.bool).tril()
        out.append(_products(q_parts[0], k_parts[0], v_parts[0], causal, scale))
    for number, visible in enumerate(layout.visible, 1):
        keys = torch.cat([k_parts[0], k_parts[number]], dim=1)
        values = torch.cat([v_parts[0], v_parts[number]], dim=1)
        out.append(_products(q_parts[number], keys, values, visible, scale))
    return torch.cat(out, dim=1)


def _products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend by two matrix products.

    Args:
        q: [heads, queries, head_dim].
        k: [kv_heads, keys, head_dim].
        v: [kv_heads, keys, head_dim].
        visible: bool [queries, keys].
        scale: The factor of the scores.

    Returns:
        [heads, queries, head_dim].
    """
    heads, queries, dim = q.shape
    kv_heads, keys, _ = k.shape
    # [kv_heads, heads per kv head * queries, head_dim]
    grouped = q.reshape(kv_heads, -1, dim) * scale
    bias = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
    with torch.autocast(q.device.type, enabled=False):
        scores = (grouped @ k.transpose(1, 2)).view(heads, queries, keys) + bias
        weights = scores.softmax(-1).view(kv_heads, -1, keys)
        return (weights @ v).view(heads, queries, dim)
