"""Attention over the cache, on any device: one over a shared prefix for all its sequences at once,
one over each sequence's own keys (`Step.calls`), merged by their log-sum-exp in float32 (Hydragen,
cascade attention). Query heads that share a key head are folded into the query length: [heads, n,
d] -> [kv_heads, repeat * n, d].
"""

import torch

from raypd.decoding.attention.step import AttentionLayer, Batch, Step


def attend(
    step: Step,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> torch.Tensor:
    """`Attend` in torch."""
    number, scale, window, softcap = layer
    keys, values = step.cache.write(number, step.slots, key, value)  # [slots, kv_heads, head_dim]
    tokens, heads, head_dim = query.shape
    kv_heads, repeat = keys.shape[1], heads // keys.shape[1]
    out = query.new_empty(tokens, heads, values.shape[2])
    lse = query.new_empty(tokens, heads, dtype=torch.promote_types(query.dtype, torch.float32))
    causal, batches = step.calls(window, _has_kernel(query, keys, values, softcap))
    for span in causal:  # the kernel needs no mask for them
        here, past = slice(span.a, span.b), slice(span.start, span.start + span.length - span.size)
        current = slice(past.stop, span.start + span.length)
        attended = _causal(query[here], keys[current], values[current], scale)
        if past.start < past.stop:
            attended = _merge(
                *attended, *_over(query[here], keys[past], values[past], None, scale, softcap)
            )
        out[here], lse[here] = attended
    for batch in batches:
        rows, queries = batch.shape[:2]
        mask = step.own_mask(batch, window, repeat, query)
        folded = query.index_select(0, batch.asked).view(rows, queries, kv_heads, repeat, head_dim)
        # [rows, kv_heads, repeat * queries, head_dim].
        folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)
        own_out, own_lse = _attention(
            folded, _rows_of(keys, batch), _rows_of(values, batch), mask, scale, softcap
        )
        own_out = own_out.reshape(rows, kv_heads, repeat, queries, -1).permute(0, 3, 1, 2, 4)
        own_lse = own_lse.reshape(rows, kv_heads, repeat, queries).permute(0, 3, 1, 2)
        out.index_copy_(0, batch.asked, own_out.reshape(len(batch.asked), heads, -1))
        lse.index_copy_(0, batch.asked, own_lse.reshape(len(batch.asked), heads))
    for group in step.groups:
        if group.length:
            here, prefix = (
                slice(group.spans[0].a, group.spans[-1].b),
                slice(group.start, group.start + group.length),
            )
            mask = step.prefix_mask(group, window, repeat, query)
            shared = _over(query[here], keys[prefix], values[prefix], mask, scale, softcap)
            out[here] = _merge(out[here], lse[here], *shared)[0]
    return out


def _merge(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from that over each: outputs [..., d], log-sum-exps [...]
    (-inf: none seen).
    """
    weight = torch.sigmoid(second_lse - first_lse)[..., None]
    mixed = torch.lerp(first.to(weight.dtype), second.to(weight.dtype), weight)
    return mixed.to(first.dtype), torch.logaddexp(first_lse, second_lse)


def _rows_of(stored: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[slots, kv_heads, head_dim] -> [rows, kv_heads, keys, head_dim]: a view where rows lie
    evenly, else a copy.
    """
    rows, _, length = batch.shape
    first, stride = batch.spans[0].start, batch.stride
    if stride is not None and batch.spans[-1].start + length <= len(stored):
        slot, head, element = stored.stride()
        shape, strides = (
            (rows, stored.shape[1], length, stored.shape[2]),
            (stride * slot, head, slot, element),
        )
        return stored.as_strided(shape, strides, stored.storage_offset() + first * slot)
    return stored.index_select(0, batch.slots).unflatten(0, (rows, length)).transpose(1, 2)


def _over(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [n, heads, d] over key and value [k, kv_heads, d]: [n, heads, d] with its
    log-sum-exp [n, heads]; 0 and -inf for a query that sees none of the keys.
    """
    n, heads, _ = query.shape
    folded = query.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3)  # [kv_heads, repeat, n, d]
    keys, values = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    # What is not a number in one row would be in others, too: AMX takes rows by tiles.
    if mask is not None:
        blind = mask[0].isinf().all(-1)  # [1, repeat * n]
        mask = mask.masked_fill(blind[..., None], 0)
    out, lse = _attention(folded.flatten(1, 2)[None], keys, values, mask, scale, softcap)
    if mask is not None:
        out, lse = out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)
    return out.reshape(heads, n, -1).transpose(0, 1), lse.reshape(heads, n).t()


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [n, heads, d] over key and value [n, kv_heads, d], each over those up to
    itself.
    """
    kv_heads = key.shape[1]
    # The query heads of a key head stand where a batch would: folded into the length they would
    # need a mask.
    folded = query.unflatten(1, (kv_heads, -1)).permute(2, 1, 0, 3)  # [repeat, kv_heads, n, d]
    keys, values = (
        tensor.transpose(0, 1).expand(len(folded), -1, -1, -1) for tensor in (key, value)
    )
    out, lse = _kernel(folded, keys, values, None, True, scale)
    return out.permute(2, 1, 0, 3).flatten(1, 2), lse.permute(2, 1, 0).flatten(1, 2)


def _has_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float | None
) -> bool:
    """Whether torch has one that returns the log-sum-exp, for such heads."""
    if softcap is not None or key.shape[-1] != value.shape[-1]:
        return False
    aligned = query.dtype != torch.float64 and key.shape[-1] * key.element_size() % 16 == 0
    return query.device.type == "cpu" or (query.device.type == "cuda" and aligned)


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_attention`, by torch's flash attention for CPUs or its memory-efficient one for GPUs."""
    if query.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is not None:  # its rows have to begin at multiples of 16 bytes
        padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))
        mask = padded[..., : mask.shape[-1]].expand(*query.shape[:-1], -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = efficient(query, key, value, mask, True, 0.0, causal, scale=scale)
    return out, lse[..., : query.shape[2]]  # padded to multiples of 32


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [rows, heads, n, d] over key and value [rows, heads, k, d] under an
    additive mask [rows, 1, n, k], with its log-sum-exp [rows, heads, n] in float32 at least.
    """
    if _has_kernel(query, key, value, softcap):
        return _kernel(query, key, value, mask, False, scale)
    scores = (query @ key.transpose(-1, -2)).to(
        torch.promote_types(query.dtype, torch.float32)
    ) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return (torch.exp(scores - lse[..., None]).to(value.dtype) @ value), lse
