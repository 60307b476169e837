"""Attention over the cache in torch, on any device.

One call attends to a shared prefix for all its sequences at once, and further calls attend to each
sequence's own keys (`Step.calls`). Their results are merged by their log-sum-exps in float32, as in
Hydragen and cascade attention. Query heads that share a key head are folded into the queries:
[heads, n, d] -> [kv_heads, repeat * n, d]. Keys and values that the cache holds in 8 bits are
converted to the dtype of the queries where they are read.
"""

import torch

from raypd.decoding.attention.step import AttentionLayer, Batch, PrefixGroup, Span, Step

# What attention returns: outputs [..., d], and the log-sum-exps of the scores [...].
Attended = tuple[torch.Tensor, torch.Tensor]


def attend(
    step: Step,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> torch.Tensor:
    """Attend in torch; the arguments are those of `Attend`."""
    # [slots, kv_heads, head_dim]
    keys, values = step.cache.write(layer.number, step.slots, key, value, layer.latent_dim)
    if layer.latent_dim is not None:
        # torch's kernels need values of the same size as keys, so the result is truncated instead.
        values = keys
    tokens, heads, _ = query.shape
    out = query.new_empty(tokens, heads, values.shape[2])
    lse = query.new_empty(tokens, heads, dtype=_wide_dtype(query))
    has_kernel = _has_kernel(query, keys, values, layer.softcap)
    causal_spans, batches = step.calls(layer.window, has_kernel)
    for span in causal_spans:
        rows = slice(span.query_start, span.query_end)
        out[rows], lse[rows] = _attend_causal(span, layer, query[rows], keys, values)
    for batch in batches:
        own_out, own_lse = _attend_batch(step, batch, layer, query, keys, values)
        out.index_copy_(0, batch.query_rows, own_out)
        lse.index_copy_(0, batch.query_rows, own_lse)
    for group in step.groups:
        if group.length:
            rows = slice(group.spans[0].query_start, group.spans[-1].query_end)
            prefix_out, prefix_lse = _attend_prefix(step, group, layer, query[rows], keys, values)
            out[rows], lse[rows] = _merge(out[rows], lse[rows], prefix_out, prefix_lse)
    if layer.sinks is not None:
        # The weights of all keys add up to exp(lse), and the sink's own weight is exp(sink).
        share = torch.sigmoid(lse - layer.sinks)[..., None]
        out = (out * share).to(out.dtype)
    if layer.latent_dim is not None:
        return out[..., : layer.latent_dim]
    return out


def _attend_causal(
    span: Span,
    layer: AttentionLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> Attended:
    """Attend with the queries [n, heads, d] of a causal span to its own keys, without a mask."""
    key_end = span.key_start + span.key_count
    new_start = key_end - span.query_count
    new = slice(new_start, key_end)
    out, lse = _causal(query, keys[new], values[new], layer.scale)
    if span.key_start == new_start:
        return out, lse
    # All queries see all keys of earlier passes.
    past = slice(span.key_start, new_start)
    past_out, past_lse = _over(query, keys[past], values[past], None, layer.scale, layer.softcap)
    return _merge(out, lse, past_out, past_lse)


def _attend_batch(
    step: Step,
    batch: Batch,
    layer: AttentionLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> Attended:
    """Attend with the queries of a batch to their own keys.

    Returns:
        [spans * queries, heads, d] and [spans * queries, heads], with padding.
    """
    spans, queries, _ = batch.shape
    _, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    repeat = heads // kv_heads
    mask = step.own_mask(batch, layer.window, repeat, query)
    folded = query.index_select(0, batch.query_rows)
    folded = folded.view(spans, queries, kv_heads, repeat, head_dim)
    # [spans, kv_heads, repeat * queries, head_dim]
    folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)
    own_keys = _keys_of(keys, batch).to(query.dtype)
    own_values = _keys_of(values, batch).to(query.dtype)
    out, lse = _attention(folded, own_keys, own_values, mask, layer.scale, layer.softcap)
    out = out.reshape(spans, kv_heads, repeat, queries, -1).permute(0, 3, 1, 2, 4)
    lse = lse.reshape(spans, kv_heads, repeat, queries).permute(0, 3, 1, 2)
    rows = spans * queries
    return out.reshape(rows, heads, -1), lse.reshape(rows, heads)


def _attend_prefix(
    step: Step,
    group: PrefixGroup,
    layer: AttentionLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> Attended:
    """Attend with the queries [n, heads, d] of a group to its shared prefix."""
    repeat = query.shape[1] // keys.shape[1]
    mask = step.prefix_mask(group, layer.window, repeat, query)
    prefix = slice(group.start, group.start + group.length)
    return _over(query, keys[prefix], values[prefix], mask, layer.scale, layer.softcap)


def _merge(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> Attended:
    """Combine attention over two sets of keys.

    Outputs are [..., d], log-sum-exps [...]; a log-sum-exp is -inf for a query that saw no key.
    """
    weight = torch.sigmoid(second_lse - first_lse)[..., None]
    mixed = torch.lerp(first.to(weight.dtype), second.to(weight.dtype), weight)
    return mixed.to(first.dtype), torch.logaddexp(first_lse, second_lse)


def _keys_of(stored: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the own keys of a batch, [slots, kv_heads, head_dim] -> [spans, kv_heads, keys,
    head_dim].

    The result is a view if the spans are evenly spaced in the cache; otherwise it is a copy.
    """
    spans, _, length = batch.shape
    first = batch.spans[0].key_start
    is_inside = batch.spans[-1].key_start + length <= len(stored)
    if batch.stride is None or not is_inside:
        copied = stored.index_select(0, batch.key_slots)
        return copied.unflatten(0, (spans, length)).transpose(1, 2)
    _, kv_heads, head_dim = stored.shape
    slot_stride, head_stride, element_stride = stored.stride()
    return stored.as_strided(
        (spans, kv_heads, length, head_dim),
        (batch.stride * slot_stride, head_stride, slot_stride, element_stride),
        stored.storage_offset() + first * slot_stride,
    )


def _over(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> Attended:
    """Attend with query [n, heads, d] to key and value [k, kv_heads, d].

    Returns:
        [n, heads, d] and log-sum-exps [n, heads]; these are 0 and -inf for a query that sees none
        of the keys.
    """
    n, heads, _ = query.shape
    kv_heads = key.shape[1]
    # [kv_heads, repeat, n, d]
    folded = query.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    folded = folded.flatten(1, 2)[None]
    keys = key.to(query.dtype).transpose(0, 1)[None]
    values = value.to(query.dtype).transpose(0, 1)[None]
    if mask is None:
        out, lse = _attention(folded, keys, values, None, scale, softcap)
    else:
        # A row that sees nothing would be NaN, and AMX, which computes rows in tiles, would spread
        # the NaN. Such a row is therefore made to see everything and is cleared afterwards.
        blind = mask[0].isinf().all(-1)  # [1, repeat * n]
        mask = mask.masked_fill(blind[..., None], 0)
        out, lse = _attention(folded, keys, values, mask, scale, softcap)
        out = out.masked_fill(blind[..., None], 0)
        lse = lse.masked_fill(blind, -torch.inf)
    return out.reshape(heads, n, -1).transpose(0, 1), lse.reshape(heads, n).t()


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Attended:
    """Attend with query [n, heads, d] to key and value [n, kv_heads, d], each up to its own row."""
    kv_heads = key.shape[1]
    # The query heads of a key head become a batch; folded into the queries, they would need a mask.
    folded = query.unflatten(1, (kv_heads, -1)).permute(2, 1, 0, 3)  # [repeat, kv_heads, n, d]
    repeat = len(folded)
    keys = key.to(query.dtype).transpose(0, 1).expand(repeat, -1, -1, -1)
    values = value.to(query.dtype).transpose(0, 1).expand(repeat, -1, -1, -1)
    out, lse = _kernel(folded, keys, values, None, True, scale)
    return out.permute(2, 1, 0, 3).flatten(1, 2), lse.permute(2, 1, 0).flatten(1, 2)


def _has_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float | None
) -> bool:
    """Return whether torch has a kernel for these heads that returns the log-sum-exps."""
    if softcap is not None or key.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cuda":
        is_aligned = key.shape[-1] * query.element_size() % 16 == 0
        return is_aligned and query.dtype != torch.float64
    return query.device.type == "cpu"


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> Attended:
    """Attend like `_attention`, with one of torch's kernels.

    It is flash attention on a CPU and memory-efficient attention on a GPU.
    """
    if query.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is not None:
        # The kernel needs rows that begin at multiples of 16 bytes.
        padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))
        mask = padded[..., : mask.shape[-1]].expand(*query.shape[:-1], -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = efficient(query, key, value, mask, True, 0.0, causal, scale=scale)
    # The kernel pads the log-sum-exps to multiples of 32.
    return out, lse[..., : query.shape[2]]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> Attended:
    """Attend with query [rows, heads, n, d] to key and value [rows, heads, k, d].

    The additive mask is [rows, 1, n, k].

    Returns:
        [rows, heads, n, d], and log-sum-exps [rows, heads, n] in float32 at least.
    """
    if _has_kernel(query, key, value, softcap):
        return _kernel(query, key, value, mask, False, scale)
    scores = query @ key.transpose(-1, -2)
    scores = scores.to(_wide_dtype(query)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).to(value.dtype)
    return weights @ value, lse


def _wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return float32, or float64 for a tensor in float64."""
    return torch.promote_types(tensor.dtype, torch.float32)
