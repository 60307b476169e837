"""Attention over the cache, on any device: one over a shared prefix for all its sequences at once, one over each
sequence's own keys, merged by their log-sum-exp in float32 (Hydragen, cascade attention).

Query heads that share a key head are folded into the query length: [heads, n, d] -> [kv_heads, group * n, d].
"""

from __future__ import annotations

import torch

from raypd.decoding.attention.step import Step

NAME = "raypd"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    step: Step | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer.

    Args:
        module: the layer, whose `layer_idx` is its place in the cache.
        query: [1, heads, tokens, head_dim], rotated.
        key, value: [1, kv_heads, tokens, head_dim], the key rotated.
        attention_mask, dropout: not read; the masks are those of `step`.
        scaling: factor of the scores; None: head_dim^-0.5.
        sliding_window: tokens that a query sees at most; None: all.
        softcap: most that a score can be, by tanh; None: no limit.
        s_aux: attention sinks, [heads].
        step: what the pass holds.

    Returns:
        [1, tokens, heads, head_dim], and no weights.

    Raises:
        RuntimeError: the model was called otherwise than by its engine, or has attention sinks.
    """
    if step is None:
        raise RuntimeError(
            "a model of a raypd engine is called through the engine alone, and its layers must hand unknown keyword "
            "arguments on to the attention function"
        )
    if s_aux is not None:
        raise RuntimeError("its attention has sinks, which raypd's attention does not know")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    step.cache.write(layer, step.slots, key[0], value[0])
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    kv_heads = keys.shape[0]
    heads, tokens, head_dim = query.shape[1:]
    repeat = heads // kv_heads
    scale = head_dim**-0.5 if scaling is None else scaling
    folded = query[0].view(kv_heads, repeat, tokens, head_dim)
    out = query.new_empty(kv_heads, repeat, tokens, values.shape[2])

    for group in step.groups:
        first, end = group.spans[0].a, group.spans[-1].b
        if group.length:
            prefix = slice(group.start, group.start + group.length)
            asked = folded[:, :, first:end].reshape(kv_heads, -1, head_dim)
            mask = step.prefix_mask(group, sliding_window, repeat, query)
            prefix_out, prefix_lse = _attend(asked, keys[:, prefix], values[:, prefix], mask, scale, softcap)
            if mask is not None:  # a query whose window does not reach the prefix has nothing to merge
                blind = mask.isinf().all(-1)
                prefix_out = prefix_out.masked_fill(blind[:, None], 0)
                prefix_lse = prefix_lse.masked_fill(blind, -torch.inf)
            shape = (kv_heads, repeat, end - first)
            prefix_out, prefix_lse = prefix_out.view(*shape, -1), prefix_lse.view(shape)
        for span in group.spans:
            own = slice(span.start, span.start + span.length)
            asked = folded[:, :, span.a : span.b].reshape(kv_heads, -1, head_dim)
            mask = step.own_mask(group, span, sliding_window, repeat, query)
            own_out, own_lse = _attend(asked, keys[:, own], values[:, own], mask, scale, softcap)
            own_out = own_out.view(kv_heads, repeat, span.b - span.a, -1)
            if group.length:
                here = slice(span.a - first, span.b - first)
                weight = torch.sigmoid(prefix_lse[:, :, here] - own_lse.view(own_out.shape[:3]))[..., None]
                own_out = torch.lerp(own_out.to(weight.dtype), prefix_out[:, :, here].to(weight.dtype), weight)
            out[:, :, span.a : span.b] = own_out
    return out.view(1, heads, tokens, -1).transpose(1, 2), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [heads, n, d] of query [heads, n, d] over key and value [heads, k, d] under an additive mask [n, k].

    Returns it with its log-sum-exp [heads, n] in float32 at least.
    """
    if query.device.type == "cpu" and softcap is None and key.shape[2] == value.shape[2]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], key[None], value[None], 0.0, False, attn_mask=mask, scale=scale
        )
        return out[0], lse[0]
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(1, 2)).to(wide) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return (torch.exp(scores - lse[..., None]).to(value.dtype) @ value), lse
