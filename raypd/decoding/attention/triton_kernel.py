"""Attention over the cache in one kernel, for GPUs: it reads every key where it lies and knows the
rule of visibility itself, from a few integers a token (`KernelPlan`), so no mask is built and
nothing is gathered. A program of the kernel has a block of one span's queries for one key head,
whose query heads are folded into it, and reads the shared prefix, then the span's own keys. The one
file that needs triton: imported only where it is asked for.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from raypd.decoding.attention.plan import KernelPlan, power_of_two
from raypd.decoding.attention.step import AttentionLayer, Step


def attend(
    step: Step,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> torch.Tensor:
    """`Attend` by one kernel, and one that merges where keys of a query are split over several
    blocks.
    """
    number, scale, window, softcap = layer
    keys, values = step.cache.write(number, step.slots, key, value)  # [slots, kv_heads, head_dim]
    tokens, heads, head_dim = query.shape
    kv_heads, repeat, value_dim = keys.shape[1], heads // keys.shape[1], values.shape[2]
    if query.dtype == torch.float64:  # the kernel takes numbers in float32
        query, scale = query * scale, 1.0
    query = query if query.stride(-1) == 1 else query.contiguous()
    out = query.new_empty(tokens, heads, value_dim)
    capability, processors = card(query.device)
    sizes = tiles(capability, max(head_dim, value_dim), query.element_size())
    plan = step.plans.get(repeat)
    if plan is None:
        plan = step.plans[repeat] = KernelPlan(
            step, repeat, tuple(sizes), 2 * processors // kv_heads
        )
    starts = plan.starts(window)
    wide = torch.promote_types(query.dtype, torch.float32)
    split = query.new_empty(plan.split_rows, heads, value_dim, dtype=wide)
    split_lse = query.new_empty(plan.split_rows, heads, dtype=wide)
    dims = {
        "DIM_BLOCK": max(16, power_of_two(head_dim)),
        "VALUE_BLOCK": max(16, power_of_two(value_dim)),
    }
    with torch.cuda.device_of(query):  # triton launches on the current device
        for rows, items in plan.blocks:
            # Of more rows: many heads share a key head.
            block, warps = sizes.get(rows) or list(sizes.values())[-1]
            _attend[len(items), kv_heads](
                query,
                keys,
                values,
                out,
                split,
                split_lse,
                items,
                plan.queries,
                plan.keys,
                plan.queries if starts is None else starts,
                scale,
                softcap or 0.0,
                *query.stride()[:2],
                *keys.stride()[:2],
                *values.stride()[:2],
                HEADS=heads,
                KV_HEADS=kv_heads,
                DIM=head_dim,
                VALUE_DIM=value_dim,
                WORDS=plan.words,
                WINDOW=starts is not None,
                SOFTCAP=softcap is not None,
                SPLIT=plan.split_rows > 0,
                ROWS=rows,
                BLOCK=block,
                **dims,
                num_warps=warps,
                num_stages=2,
            )
        if plan.split_rows:
            _merge[len(plan.merged), heads](
                split,
                split_lse,
                out,
                plan.merged,
                plan.merged_rows,
                HEADS=heads,
                VALUE_DIM=value_dim,
                VALUE_BLOCK=dims["VALUE_BLOCK"],
                num_warps=1,
            )
    return out


def refusal(device: torch.device) -> str | None:
    """Why the kernel cannot run on a device; None: it can.

    Triton's interpreter (TRITON_INTERPRET=1) runs on any.
    """
    if device.type == "cuda" or not isinstance(_attend, triton.JITFunction):
        return None
    return f"attention 'triton' needs a GPU, and the model is on the {device.type}: use 'sdpa'"


@cache
def card(device: torch.device) -> tuple[tuple[int, int], int]:
    """Capability and multiprocessors of a device; none of what is no GPU, where keys are not
    split.
    """
    if device.type != "cuda":
        return (8, 0), 0
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(
        device
    ).multi_processor_count


def tiles(capability: tuple[int, int], dim: int, itemsize: int) -> dict[int, tuple[int, int]]:
    """By the rows of a block, rising, one a query and query head: its keys, so that queries and two
    stages of keys and values fit the shared memory (99 KB of sm86, sm89 and sm120), and its warps,
    so that sums fit the registers.
    """
    large = capability[0] in (9, 10)
    row_bytes = max(16, power_of_two(dim)) * itemsize
    keys = min(64 if large else 32, max(16, 16_384 // row_bytes))
    if itemsize > 2:  # products without tensor cores
        return {16: (16, 4)}
    if row_bytes > 256:
        return {16: (keys, 4), 64: (keys, 8)}
    return {16: (keys, 4), 64: (keys, 4), **({128: (keys, 8)} if large else {})}


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query_rows,
    stored_keys,
    stored_values,
    out,
    split,
    split_lse,
    items,
    queries,
    keys,
    starts,
    scale,
    softcap,
    token_stride,
    head_stride,
    key_slot,
    key_head,
    value_slot,
    value_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    # query_rows, out [tokens, heads, dim]; stored_* [slots, kv_heads, dim]; split [rows, heads,
    # dim] and its log-sum-exps [rows, heads]; the others as in `KernelPlan`.
    REPEAT: tl.constexpr = HEADS // KV_HEADS
    FIELDS: tl.constexpr = 2 + 2 * WORDS
    WIDE: tl.constexpr = tl.float64 if query_rows.dtype.element_ty == tl.float64 else tl.float32
    item = items + tl.program_id(0) * 10
    kv_head = tl.program_id(1)
    first, count = tl.load(item), tl.load(item + 1)
    prefix_slot, prefix = tl.load(item + 2).to(tl.int64), tl.load(item + 3)
    own_slot, own_length = tl.load(item + 4).to(tl.int64), tl.load(item + 5)
    clear, first_key = tl.load(item + 6), tl.load(item + 7)
    prefix_begin = tl.load(item + 8)
    row = tl.arange(0, ROWS)
    is_row = row < count * REPEAT
    token = (first + row // REPEAT).to(tl.int64)
    head = kv_head * REPEAT + row % REPEAT
    dim, value_dim = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    is_dim, is_value_dim = dim < DIM, value_dim < VALUE_DIM
    place = token[:, None] * token_stride + head[:, None] * head_stride + dim[None, :]
    # [ROWS, DIM_BLOCK].
    query = tl.load(query_rows + place, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    start = tl.load(starts + token, mask=is_row, other=0) if WINDOW else row
    # The highest score so far, the sum of weights relative to it, and.
    high = tl.full([ROWS], float("-inf"), WIDE)
    total = tl.zeros([ROWS], WIDE)
    mixed = tl.zeros([ROWS, VALUE_BLOCK], WIDE)  # the values by those weights
    key_base = stored_keys + kv_head.to(tl.int64) * key_head + dim[None, :]
    value_base = stored_values + kv_head.to(tl.int64) * value_head + value_dim[None, :]

    # All queries see the prefix, whose positions are 0, 1, 2, ...
    for begin in range(0, prefix, BLOCK):
        offset = begin + tl.arange(0, BLOCK)
        is_key = offset < prefix
        is_seen = is_row[:, None] & is_key[None, :]
        if WINDOW:
            is_seen = is_seen & (prefix_begin + offset[None, :] >= start[:, None])
        slot = (prefix_slot + offset)[:, None]
        key = tl.load(key_base + slot * key_slot, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        value = tl.load(
            value_base + slot * value_slot, mask=is_key[:, None] & is_value_dim[None, :], other=0.0
        )
        high, total, mixed = _take(
            query, key, value, is_seen, high, total, mixed, scale, softcap, SOFTCAP, WIDE
        )

    done = 0
    if not WINDOW:  # the leading own keys that all queries see, too
        done = clear // BLOCK * BLOCK
        for begin in range(0, done, BLOCK):
            offset = begin + tl.arange(0, BLOCK)
            slot = (own_slot + offset)[:, None]
            is_seen = is_row[:, None] & (offset >= 0)[None, :]
            key = tl.load(key_base + slot * key_slot, mask=is_dim[None, :], other=0.0)
            value = tl.load(value_base + slot * value_slot, mask=is_value_dim[None, :], other=0.0)
            high, total, mixed = _take(
                query, key, value, is_seen, high, total, mixed, scale, softcap, SOFTCAP, WIDE
            )

    position = tl.load(queries + token * FIELDS, mask=is_row, other=0)
    step = tl.load(queries + token * FIELDS + 1, mask=is_row, other=0)
    for begin in range(done, own_length, BLOCK):
        offset = begin + tl.arange(0, BLOCK)
        is_key = offset < own_length
        is_seen = _seen(
            queries,
            keys + (first_key + offset) * 3,
            token,
            position,
            step,
            start,
            is_row,
            is_key,
            WORDS,
            WINDOW,
            ROWS,
            BLOCK,
        )
        slot = (own_slot + offset)[:, None]
        key = tl.load(key_base + slot * key_slot, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        value = tl.load(
            value_base + slot * value_slot, mask=is_key[:, None] & is_value_dim[None, :], other=0.0
        )
        high, total, mixed = _take(
            query, key, value, is_seen, high, total, mixed, scale, softcap, SOFTCAP, WIDE
        )

    _store(
        out,
        split,
        split_lse,
        item,
        row,
        head,
        value_dim,
        high,
        total,
        mixed,
        HEADS,
        VALUE_DIM,
        REPEAT,
        SPLIT,
    )


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    out,
    split,
    split_lse,
    item,
    row,
    head,
    value_dim,
    high,
    total,
    mixed,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    REPEAT: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Writes the sums of a block.

    Its item is read once more: kept through the loops it is one register too many.
    """
    token = (tl.load(item, volatile=True) + row // REPEAT).to(tl.int64)
    is_row = row < tl.load(item + 1, volatile=True) * REPEAT
    is_value_dim = (value_dim < VALUE_DIM)[None, :]
    mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
    if SPLIT:
        split_row = tl.load(item + 9)
        is_part, is_row = is_row & (split_row >= 0), is_row & (split_row < 0)
        part = (split_row + row // REPEAT).to(tl.int64) * HEADS + head
        place = part[:, None] * VALUE_DIM + value_dim[None, :]
        tl.store(split + place, mixed, mask=is_part[:, None] & is_value_dim)
        lse = high + tl.log(tl.where(total == 0, 1.0, total))  # -inf where it has seen nothing
        tl.store(split_lse + part, lse, mask=is_part)
    place = (token * HEADS + head)[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=is_row[:, None] & is_value_dim)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    split,
    split_lse,
    out,
    merged,
    rows,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Attention over all keys out of that over parts of them, by their log-sum-exps; a program has
    a query and head.
    """
    entry, head = merged + tl.program_id(0) * 3, tl.program_id(1)
    token, begin, end = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    value_dim = tl.arange(0, VALUE_BLOCK)
    high = tl.full([1], float("-inf"), split.dtype.element_ty)
    total = tl.zeros([1], split.dtype.element_ty)
    mixed = tl.zeros([VALUE_BLOCK], split.dtype.element_ty)
    for number in range(begin, end):
        place = tl.load(rows + number).to(tl.int64) * HEADS + head
        lse = tl.load(split_lse + place + tl.arange(0, 1))
        part = tl.load(split + place * VALUE_DIM + value_dim, mask=value_dim < VALUE_DIM, other=0.0)
        higher = tl.maximum(high, lse)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp(high - finite), tl.exp(lse - finite)
        total, mixed, high = total * fade + weight, mixed * fade + part * weight, higher
    mixed = (mixed / tl.where(total == 0, 1.0, total)).to(out.dtype.element_ty)
    tl.store(
        out + (token * HEADS + head) * VALUE_DIM + value_dim, mixed, mask=value_dim < VALUE_DIM
    )


@triton.jit
def _seen(  # type: ignore[no-untyped-def]
    queries,
    key,
    token,
    position,
    step,
    start,
    is_row,
    is_key,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[ROWS, BLOCK] which own keys the queries see, by the rule of visibility."""
    FIELDS: tl.constexpr = 2 + 2 * WORDS
    key_position = tl.load(key, mask=is_key, other=0)
    key_step = tl.load(key + 1, mask=is_key, other=0)
    segment = tl.load(key + 2, mask=is_key, other=0)
    upto = key_position[None, :] <= position[:, None]
    is_seen = tl.zeros([ROWS, BLOCK], tl.int1)
    for word in tl.static_range(WORDS):
        all_set = tl.load(queries + token * FIELDS + 2 + word, mask=is_row, other=0)
        causal_set = tl.load(queries + token * FIELDS + 2 + WORDS + word, mask=is_row, other=0)
        in_all = ((all_set[:, None] >> (segment % 32)[None, :]) & 1) == 1
        in_causal = ((causal_set[:, None] >> (segment % 32)[None, :]) & 1) == 1
        is_seen = is_seen | ((in_all | (in_causal & upto)) & (segment // 32 == word)[None, :])
    is_seen = is_seen & is_key[None, :] & is_row[:, None] & (key_step[None, :] <= step[:, None])
    if WINDOW:
        is_seen = is_seen & (key_position[None, :] >= start[:, None])
    return is_seen


@triton.jit
def _take(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    is_seen,
    high,
    total,
    mixed,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The running sums of `_attend` with a block of keys more."""
    # [ROWS, BLOCK].
    scores = tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=WIDE) * scale
    if SOFTCAP:
        small = tl.exp(-2 * tl.abs(scores / softcap))  # tanh, which triton has not
        scores = softcap * tl.where(scores < 0, -1.0, 1.0) * (1 - small) / (1 + small)
    scores = tl.where(is_seen, scores, float("-inf"))
    higher = tl.maximum(high, tl.max(scores, 1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    weights = tl.exp(scores - finite[:, None])
    fade = tl.exp(high - finite)
    total = total * fade + tl.sum(weights, 1)
    mixed = mixed * fade[:, None]
    mixed += tl.dot(weights.to(value.dtype), value, input_precision="ieee", out_dtype=WIDE)
    return higher, total, mixed
