"""Attention over the cache in one kernel, for GPUs.

The kernel reads every key in place and applies the visibility rule itself, using a few integers per
token (`KernelPlan`), so no mask is built and no keys are gathered. Each program of the kernel
computes a block of one span's queries for one key head; the query heads that share that key head
are folded into the block. It reads the shared prefix first, then the span's own keys.

Only this file and the GPU files in `layers` need triton, so they are imported only where a GPU is
used.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from raypd.decoding.attention.plan import Item, KernelPlan, PlanKey, power_of_two
from raypd.decoding.attention.step import AttentionLayer, Step

# The bytes of shared memory that the keys of one block may take, so that two stages of keys and
# values fit into the 99 KB of sm86, sm89 and sm120.
_KEY_BYTES = 16_384
# The number of rows of a block whose keys are latents.
_LATENT_ROWS = 16


class Tile(NamedTuple):
    """How a block of queries is computed."""

    keys: int  # The number of keys that are read at a time.
    warps: int


class Gpu(NamedTuple):
    """What the kernels need to know about a GPU."""

    capability: tuple[int, int]
    multiprocessors: int


def attend(
    step: Step,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with one kernel, and a second one that merges the parts of split keys.

    The arguments are those of `Attend`.
    """
    # [slots, kv_heads, head_dim]
    keys, values = step.cache.write(layer.number, step.slots, key, value, layer.latent_dim)
    tokens, heads, head_dim = query.shape
    value_dim = values.shape[2]
    # If the first elements of a key are its value, the kernel reads the key in two parts, each
    # once.
    is_latent = layer.latent_dim is not None
    if is_latent:
        # The sums of a row take 2 KB of registers, so only a few query heads share the keys at a
        # time.
        groups = keys.shape[1] * _head_groups(heads // keys.shape[1])
        keys = keys.expand(-1, groups, -1)
        values = values.expand(-1, groups, -1)
    kv_heads = keys.shape[1]
    first_dim = value_dim if is_latent else head_dim
    rest_dim = head_dim - first_dim
    scale = layer.scale
    if query.dtype == torch.float64:
        # Triton rounds numeric arguments to float32, so the scale is applied here.
        query = query * scale
        scale = 1.0
    if query.stride(-1) != 1:
        query = query.contiguous()
    out = query.new_empty(tokens, heads, value_dim)
    gpu = gpu_of(query.device)
    sizes = tiles(gpu.capability, max(head_dim, value_dim), query.element_size())
    if is_latent:
        sizes = {_LATENT_ROWS: sizes[_LATENT_ROWS]}
    repeat = heads // kv_heads
    fill = 2 * gpu.multiprocessors // kv_heads
    plan = KernelPlan.of(step, PlanKey(repeat, tuple(sizes), fill))
    starts = plan.starts(layer.window)
    wide = torch.promote_types(query.dtype, torch.float32)
    split = query.new_empty(plan.split_rows, heads, value_dim, dtype=wide)
    split_lse = query.new_empty(plan.split_rows, heads, dtype=wide)
    value_block = max(16, power_of_two(value_dim))
    with torch.cuda.device_of(query):  # Triton launches on the current device.
        for rows, items in plan.blocks:
            # If many query heads share a key head, they need more rows than any tile has.
            tile = sizes.get(rows) or list(sizes.values())[-1]
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
                layer.softcap or 0.0,
                # Without sinks the kernel reads none, but it still needs a tensor as the argument.
                query if layer.sinks is None else layer.sinks,
                *query.stride()[:2],
                *keys.stride()[:2],
                *values.stride()[:2],
                HEADS=heads,
                KV_HEADS=kv_heads,
                DIM=first_dim,
                REST_DIM=rest_dim,
                VALUE_DIM=value_dim,
                WORDS=plan.words,
                WINDOW=starts is not None,
                SOFTCAP=layer.softcap is not None,
                SINKS=layer.sinks is not None,
                SPLIT=plan.split_rows > 0,
                ROWS=rows,
                BLOCK=tile.keys,
                DIM_BLOCK=max(16, power_of_two(first_dim)),
                REST_BLOCK=max(16, power_of_two(max(1, rest_dim))),
                VALUE_BLOCK=value_block,
                num_warps=tile.warps,
                num_stages=2,
            )
        if plan.split_rows:
            _merge[len(plan.merged), heads](
                split,
                split_lse,
                out,
                plan.merged,
                plan.merged_rows,
                query if layer.sinks is None else layer.sinks,
                SINKS=layer.sinks is not None,
                HEADS=heads,
                VALUE_DIM=value_dim,
                VALUE_BLOCK=value_block,
                num_warps=1,
            )
    return out


def _head_groups(heads: int) -> int:
    """Return the number of groups of at most `_LATENT_ROWS` query heads."""
    size = max(size for size in range(1, _LATENT_ROWS + 1) if heads % size == 0)
    return heads // size


def refusal(device: torch.device) -> str | None:
    """Return why the kernel cannot run on a device; None if it can.

    Triton's interpreter (TRITON_INTERPRET=1) runs on any device.
    """
    if device.type == "cuda" or not isinstance(_attend, triton.JITFunction):
        return None
    return f"attention 'triton' needs a GPU, and the model is on the {device.type}: use 'sdpa'"


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the properties of a GPU.

    Any other device counts as a GPU without multiprocessors, for which keys are not split.
    """
    if device.type != "cuda":
        return Gpu((8, 0), 0)
    capability = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(capability, properties.multi_processor_count)


def tiles(capability: tuple[int, int], dim: int, itemsize: int) -> dict[int, Tile]:
    """Return the tile for each number of rows that a block may have, in ascending order.

    A block has one row per query and query head. The number of keys is chosen so that the queries
    and two stages of keys and values fit into shared memory, and the number of warps so that the
    sums fit into the registers.

    Args:
        capability: The GPU's compute capability.
        dim: The dimension of a head.
        itemsize: The bytes per element.
    """
    if itemsize > 2:  # These products do not use tensor cores.
        return {16: Tile(16, 4)}
    is_large = capability[0] in (9, 10)
    row_bytes = max(16, power_of_two(dim)) * itemsize
    keys = min(64 if is_large else 32, max(16, _KEY_BYTES // row_bytes))
    if row_bytes > 256:
        return {16: Tile(keys, 4), 64: Tile(keys, 8)}
    sizes = {16: Tile(keys, 4), 64: Tile(keys, 4)}
    if is_large:
        sizes[128] = Tile(keys, 8)
    return sizes


# The number of fields of an `Item`, as the kernels read it.
_FIELD_COUNT = tl.constexpr(len(Item._fields))


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
    sinks,
    token_stride,
    head_stride,
    key_slot,
    key_head,
    value_slot,
    value_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    # Shapes: query_rows and out [tokens, heads, dim]; stored_keys and stored_values [slots,
    # kv_heads, dim]; split [rows, heads, dim] and split_lse [rows, heads]. The others are those of
    # `KernelPlan`. If REST_DIM is set, a key has that many more elements after its value.
    REPEAT: tl.constexpr = HEADS // KV_HEADS
    FIELDS: tl.constexpr = 2 + 2 * WORDS
    # The cache may hold keys and values in 8 bits. They are converted after each load.
    TYPE: tl.constexpr = query_rows.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    # The fields of `Item`, in their order.
    item = items + tl.program_id(0) * _FIELD_COUNT
    kv_head = tl.program_id(1)
    first = tl.load(item)
    count = tl.load(item + 1)
    prefix_slot = tl.load(item + 2).to(tl.int64)
    prefix = tl.load(item + 3)
    own_slot = tl.load(item + 4).to(tl.int64)
    own_length = tl.load(item + 5)
    clear = tl.load(item + 6)
    first_key = tl.load(item + 7)
    prefix_begin = tl.load(item + 8)
    row = tl.arange(0, ROWS)
    is_row = row < count * REPEAT
    token = (first + row // REPEAT).to(tl.int64)
    head = kv_head * REPEAT + row % REPEAT
    dim = tl.arange(0, DIM_BLOCK)
    value_dim = tl.arange(0, VALUE_BLOCK)
    is_dim = dim < DIM
    is_value_dim = value_dim < VALUE_DIM
    query_offset = token[:, None] * token_stride + head[:, None] * head_stride + dim[None, :]
    # [ROWS, DIM_BLOCK]
    query = tl.load(query_rows + query_offset, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    rest_dim = tl.arange(0, REST_BLOCK)
    is_rest = rest_dim < REST_DIM
    query_rest = query
    if REST_DIM:
        rest_offset = token[:, None] * token_stride + head[:, None] * head_stride
        rest_offset += (DIM + rest_dim)[None, :]
        query_rest = tl.load(
            query_rows + rest_offset, mask=is_row[:, None] & is_rest[None, :], other=0.0
        )
    start = tl.load(starts + token, mask=is_row, other=0) if WINDOW else row
    # The running sums: the highest score so far, the sum of the weights relative to it, and the sum
    # of the values with these weights.
    high = tl.full([ROWS], float("-inf"), WIDE)
    total = tl.zeros([ROWS], WIDE)
    mixed = tl.zeros([ROWS, VALUE_BLOCK], WIDE)
    key_base = stored_keys + kv_head.to(tl.int64) * key_head + dim[None, :]
    value_base = stored_values + kv_head.to(tl.int64) * value_head + value_dim[None, :]
    rest_base = stored_keys + kv_head.to(tl.int64) * key_head + (DIM + rest_dim)[None, :]

    # All queries see the prefix, whose positions are 0, 1, 2, ...
    for begin in range(0, prefix, BLOCK):
        offset = begin + tl.arange(0, BLOCK)
        is_key = offset < prefix
        is_seen = is_row[:, None] & is_key[None, :]
        if WINDOW:
            is_seen = is_seen & (prefix_begin + offset[None, :] >= start[:, None])
        slot = (prefix_slot + offset)[:, None]
        key = tl.load(key_base + slot * key_slot, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        key = key.to(TYPE)
        rest = key
        value = key
        if REST_DIM:
            rest = tl.load(
                rest_base + slot * key_slot, mask=is_key[:, None] & is_rest[None, :], other=0.0
            ).to(TYPE)
        else:
            value = tl.load(
                value_base + slot * value_slot,
                mask=is_key[:, None] & is_value_dim[None, :],
                other=0.0,
            ).to(TYPE)
        high, total, mixed = _take(
            query,
            query_rest,
            key,
            rest,
            value,
            is_seen,
            high,
            total,
            mixed,
            scale,
            softcap,
            REST_DIM,
            SOFTCAP,
            WIDE,
        )

    done = 0
    # The leading own keys that all queries see need no mask either.
    if not WINDOW:
        done = clear // BLOCK * BLOCK
        for begin in range(0, done, BLOCK):
            offset = begin + tl.arange(0, BLOCK)
            slot = (own_slot + offset)[:, None]
            is_seen = is_row[:, None] & (offset >= 0)[None, :]
            key = tl.load(key_base + slot * key_slot, mask=is_dim[None, :], other=0.0).to(TYPE)
            rest = key
            value = key
            if REST_DIM:
                rest = tl.load(rest_base + slot * key_slot, mask=is_rest[None, :], other=0.0)
                rest = rest.to(TYPE)
            else:
                value = tl.load(
                    value_base + slot * value_slot, mask=is_value_dim[None, :], other=0.0
                ).to(TYPE)
            high, total, mixed = _take(
                query,
                query_rest,
                key,
                rest,
                value,
                is_seen,
                high,
                total,
                mixed,
                scale,
                softcap,
                REST_DIM,
                SOFTCAP,
                WIDE,
            )

    # The remaining own keys are masked by the visibility rule.
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
        key = key.to(TYPE)
        rest = key
        value = key
        if REST_DIM:
            rest = tl.load(
                rest_base + slot * key_slot, mask=is_key[:, None] & is_rest[None, :], other=0.0
            ).to(TYPE)
        else:
            value = tl.load(
                value_base + slot * value_slot,
                mask=is_key[:, None] & is_value_dim[None, :],
                other=0.0,
            ).to(TYPE)
        high, total, mixed = _take(
            query,
            query_rest,
            key,
            rest,
            value,
            is_seen,
            high,
            total,
            mixed,
            scale,
            softcap,
            REST_DIM,
            SOFTCAP,
            WIDE,
        )

    _store(
        out,
        split,
        split_lse,
        sinks,
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
        SINKS,
        SPLIT,
    )


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    out,
    split,
    split_lse,
    sinks,
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
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Write the results of a block.

    The item is read again here, because keeping it through the loops would take one register too
    many.
    """
    token = (tl.load(item, volatile=True) + row // REPEAT).to(tl.int64)
    is_row = row < tl.load(item + 1, volatile=True) * REPEAT
    is_value_dim = (value_dim < VALUE_DIM)[None, :]
    mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
    if SINKS:
        lse = high + tl.log(tl.where(total == 0, 1.0, total))
        is_complete = is_row
        if SPLIT:
            is_complete = is_row & (tl.load(item + 9) < 0)
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(mixed.dtype)
        # Results that are merged later get their sinks during the merge.
        mixed *= tl.where(is_complete, 1 / (1 + tl.exp(sink - lse)), 1.0)[:, None]
    if SPLIT:
        split_row = tl.load(item + 9)
        is_part = is_row & (split_row >= 0)
        is_row = is_row & (split_row < 0)
        part = (split_row + row // REPEAT).to(tl.int64) * HEADS + head
        offset = part[:, None] * VALUE_DIM + value_dim[None, :]
        tl.store(split + offset, mixed, mask=is_part[:, None] & is_value_dim)
        # It is -inf for a row that has seen no key. Computing it only here saves registers.
        lse = high + tl.log(tl.where(total == 0, 1.0, total))
        tl.store(split_lse + part, lse, mask=is_part)
    offset = (token * HEADS + head)[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(out + offset, mixed.to(out.dtype.element_ty), mask=is_row[:, None] & is_value_dim)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    split,
    split_lse,
    out,
    merged,
    rows,
    sinks,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Merge attention over parts of the keys, using its log-sum-exps.

    A program of the kernel merges one query and head.
    """
    entry = merged + tl.program_id(0) * 3
    head = tl.program_id(1)
    token = tl.load(entry).to(tl.int64)
    begin = tl.load(entry + 1)
    end = tl.load(entry + 2)
    value_dim = tl.arange(0, VALUE_BLOCK)
    high = tl.full([1], float("-inf"), split.dtype.element_ty)
    total = tl.zeros([1], split.dtype.element_ty)
    mixed = tl.zeros([VALUE_BLOCK], split.dtype.element_ty)
    for number in range(begin, end):
        result = tl.load(rows + number).to(tl.int64) * HEADS + head
        lse = tl.load(split_lse + result + tl.arange(0, 1))
        part = tl.load(
            split + result * VALUE_DIM + value_dim, mask=value_dim < VALUE_DIM, other=0.0
        )
        higher = tl.maximum(high, lse)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp(high - finite)
        weight = tl.exp(lse - finite)
        total = total * fade + weight
        mixed = mixed * fade + part * weight
        high = higher
    if SINKS:
        sink = tl.load(sinks + head + tl.arange(0, 1)).to(split.dtype.element_ty)
        total += tl.exp(sink - tl.where(high == float("-inf"), 0.0, high))
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
    """Return which own keys the queries see by the visibility rule, [ROWS, BLOCK]."""
    FIELDS: tl.constexpr = 2 + 2 * WORDS
    key_position = tl.load(key, mask=is_key, other=0)
    key_step = tl.load(key + 1, mask=is_key, other=0)
    segment = tl.load(key + 2, mask=is_key, other=0)
    is_before = key_position[None, :] <= position[:, None]
    is_seen = tl.zeros([ROWS, BLOCK], tl.int1)
    for word in tl.static_range(WORDS):
        all_set = tl.load(queries + token * FIELDS + 2 + word, mask=is_row, other=0)
        causal_set = tl.load(queries + token * FIELDS + 2 + WORDS + word, mask=is_row, other=0)
        in_all = ((all_set[:, None] >> (segment % 32)[None, :]) & 1) == 1
        in_causal = ((causal_set[:, None] >> (segment % 32)[None, :]) & 1) == 1
        is_seen = is_seen | ((in_all | (in_causal & is_before)) & (segment // 32 == word)[None, :])
    is_seen = is_seen & is_key[None, :] & is_row[:, None] & (key_step[None, :] <= step[:, None])
    if WINDOW:
        is_seen = is_seen & (key_position[None, :] >= start[:, None])
    return is_seen


@triton.jit
def _take(  # type: ignore[no-untyped-def]
    query,
    query_rest,
    key,
    rest,
    value,
    is_seen,
    high,
    total,
    mixed,
    scale,
    softcap,
    REST_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add a block of keys to the running sums of `_attend`."""
    # [ROWS, BLOCK]
    scores = tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=WIDE)
    if REST_DIM:
        scores += tl.dot(query_rest, tl.trans(rest), input_precision="ieee", out_dtype=WIDE)
    scores *= scale
    if SOFTCAP:
        # This is tanh, which triton does not have.
        small = tl.exp(-2 * tl.abs(scores / softcap))
        scores = softcap * tl.where(scores < 0, -1.0, 1.0) * (1 - small) / (1 + small)
    scores = tl.where(is_seen, scores, float("-inf"))
    higher = tl.maximum(high, tl.max(scores, 1))
    # A row that has seen no key yet has no finite score.
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - finite[:, None])
    fade = tl.exp(high - finite)
    total = total * fade + tl.sum(weights, 1)
    mixed = mixed * fade[:, None]
    mixed += tl.dot(weights.to(value.dtype), value, input_precision="ieee", out_dtype=WIDE)
    return higher, total, mixed
