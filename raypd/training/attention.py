"""Differentiable attention over a packed pass.

The tokens of the instruction see each other; own tokens see the instruction and their example.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from raypd.training.packing import PassLayout

NAME = "raypd_training"
# transformers layers that know their window but leave it to the mask, which is not read here.
_LEAVE_WINDOW_TO_MASK = ("Qwen2MoeAttention",)


@dataclass(frozen=True)
class Scores:
    """How a layer turns the products of queries and keys into weights.

    Attributes:
        scale: The factor of the scores.
        softcap: The bound of the scores, applied by tanh; None for no bound.
        sinks: For each head, the score of a key without a value, which every query sees, [heads];
            None for no sinks.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def are_plain(self) -> bool:
        """Whether the scores are plain products, which torch's kernels support."""
        return self.softcap is None and self.sinks is None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    layout: PassLayout | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend; transformers calls this function in every layer.

    Args:
        module: The attention layer.
        query: [1, heads, tokens, head_dim], rotated.
        key: [1, kv_heads, tokens, head_dim], rotated.
        value: [1, kv_heads, tokens, value_dim].
        attention_mask: Unused; `layout` says what is visible.
        scaling: The factor of the scores; None for head_dim ** -0.5.
        sliding_window: The number of tokens that a query sees; None for all.
        softcap: The bound of the scores; None for no bound.
        s_aux: Attention sinks, [heads].
        layout: Which tokens of the pass belong together.

    Returns:
        [1, tokens, heads, value_dim], and no attention weights.
    """
    assert layout is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scale, softcap, s_aux)
    if type(module).__name__ in _LEAVE_WINDOW_TO_MASK:
        sliding_window = getattr(module, "sliding_window", None)
    is_fused = query.device.type != "cpu" and scores.are_plain
    attend = fused if is_fused else products
    # Under autocast the rotation leaves queries and keys in float32.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    out = attend(query[0], key[0], value[0], layout.in_window(sliding_window), scores)
    # Some models assume that it is contiguous in memory.
    return out.transpose(0, 1).contiguous()[None], None


def fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PassLayout, scores: Scores
) -> torch.Tensor:
    """Attend by torch's kernels: one call for the instruction, one for all examples as padded rows.

    Args:
        q: [heads, tokens, head_dim].
        k: [kv_heads, tokens, head_dim].
        v: [kv_heads, tokens, value_dim].
        layout: Which tokens of the pass belong together.
        scores: How the layer turns scores into weights; the scores must be plain.

    Returns:
        [heads, tokens, value_dim].
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
        own_rows(q),
        with_instruction(k),
        with_instruction(v),
        attn_mask=padded.visible,
        scale=scores.scale,
    )
    # [heads, own tokens, value_dim]
    out = out.transpose(0, 1).flatten(1, 2).index_select(1, padded.own_tokens)
    if not shared:
        return out
    is_causal = layout.window is None
    instruction_out = scaled_dot_product_attention(
        q[None, :, :shared],
        k[None, :, :shared],
        v[None, :, :shared],
        attn_mask=None if is_causal else layout.instruction,
        is_causal=is_causal,
        scale=scores.scale,
    )
    return torch.cat([instruction_out[0], out], dim=1)


def products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PassLayout, scores: Scores
) -> torch.Tensor:
    """Compute the same as `fused` by matrix products, example by example, with any scores.

    On a CPU the backward pass of the fused kernel takes four times as long.
    """
    sizes = [layout.shared, *layout.lengths]
    # Each tensor is split once, so that the gradients of its parts are joined once.
    q_parts = q.split(sizes, dim=1)
    k_parts = k.split(sizes, dim=1)
    v_parts = v.split(sizes, dim=1)
    out = []
    if layout.shared:
        out.append(_products(q_parts[0], k_parts[0], v_parts[0], layout.instruction, scores))
    for number, visible in enumerate(layout.visible, 1):
        keys = torch.cat([k_parts[0], k_parts[number]], dim=1)
        values = torch.cat([v_parts[0], v_parts[number]], dim=1)
        out.append(_products(q_parts[number], keys, values, visible, scores))
    return torch.cat(out, dim=1)


def _products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Attend by two matrix products.

    Args:
        q: [heads, queries, head_dim].
        k: [kv_heads, keys, head_dim].
        v: [kv_heads, keys, value_dim].
        visible: bool [queries, keys].
        scores: How the layer turns scores into weights.

    Returns:
        [heads, queries, value_dim].
    """
    heads, queries, dim = q.shape
    kv_heads, keys, _ = k.shape
    # [kv_heads, heads per kv head * queries, head_dim]
    grouped = q.reshape(kv_heads, -1, dim) * scores.scale
    bias = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
    with torch.autocast(q.device.type, enabled=False):
        logits = (grouped @ k.transpose(1, 2)).view(heads, queries, keys)
        if scores.softcap is not None:
            logits = (logits / scores.softcap).tanh() * scores.softcap
        logits = logits + bias
        if scores.sinks is not None:
            sinks = scores.sinks.to(logits.dtype)[:, None, None].expand(-1, queries, -1)
            logits = torch.cat([logits, sinks], dim=-1)
        weights = logits.softmax(-1)[..., :keys].reshape(kv_heads, -1, keys)
        return (weights @ v).view(heads, queries, v.shape[-1])
