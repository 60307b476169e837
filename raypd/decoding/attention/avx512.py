"""Attention in one C function, for bfloat16 on processors with AVX-512 BF16.

It works like triton_kernel.py. Whatever it does not support is passed to `sdpa`. On processors with
AMX, torch's own attention has faster matrix products, so `auto` chooses that instead.
"""

import struct

import torch

import raypd.decoding.attention.sdpa as sdpa
import raypd.decoding.native as native
from raypd.decoding.attention.plan import KernelPlan, PlanKey
from raypd.decoding.attention.step import BLOCK, AttentionLayer, Step

# The number of rows of a block: one per query and query head. Six at a time fit the registers.
_BLOCK_ROWS = (60,)
_MAX_HEAD_DIM = 576  # DIM in native.c
_MAX_REPEAT = 128  # Not more than ROWS in native.c.


def attend(
    step: Step,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with a single C function; the arguments are those of `Attend`."""
    # The kernel reads only bfloat16, but the cache may hold keys and values in 8 bits.
    is_rounded = step.cache.dtype is not None
    if is_rounded or not _takes(query, *_samples(step, layer, key, value)):
        return sdpa.attend(step, layer, query, key, value)
    query, keys, values = _store(step, layer, query, key, value)
    return _attend_stored(step, layer, query, keys, values)


def attend_stable(
    step: Step,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> torch.Tensor:
    """Attend so that a token's output is bit-identical in every pass and every prompt.

    Each sum runs over the keys that a query sees, whatever lies between them in the cache. For
    this, the keys and values that each segment of queries sees are first copied into one block.
    """
    assert _takes(query, *_samples(step, layer, key, value))
    query, keys, values = _store(step, layer, query, key, value)
    gathered, slots = step.gathered
    return _attend_stored(gathered, layer, query, _copy(keys, slots), _copy(values, slots))


def _copy(stored: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy some slots of [slots, kv_heads, head_dim], keeping the cache's memory layout."""
    return stored.transpose(0, 1).index_select(1, slots).transpose(0, 1)


def _samples(
    step: Step, layer: AttentionLayer, key: torch.Tensor | None, value: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the layer; only their sizes and dtype matter."""
    if key is None:
        return step.cache.write(layer.number, step.slots, None, None, layer.latent_dim)
    if layer.latent_dim is not None:
        return key, key[..., : layer.latent_dim]
    assert value is not None
    return key, value


def _store(
    step: Step,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Store keys and values in the cache unless they are already there.

    Returns:
        The queries with a last stride of 1, and all keys and values of the layer, [slots, kv_heads,
        head_dim] each.
    """
    query = _with_unit_stride(query)
    if key is None:
        keys, values = step.cache.write(layer.number, step.slots, None, None, layer.latent_dim)
        return query, keys, values
    key = _with_unit_stride(key)
    if layer.latent_dim is not None:
        keys = step.cache.latents(layer.number, key)
        native.store(step.slots, key, keys)
        return query, keys, keys[..., : layer.latent_dim]
    assert value is not None
    value = _with_unit_stride(value)
    keys, values = step.cache.layer(layer.number, key, value)
    native.store(step.slots, key, keys)
    native.store(step.slots, value, values)
    return query, keys, values


def _with_unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _attend_stored(
    step: Step, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attend to stored keys and values; return [tokens, heads, head_dim]."""
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    repeat = heads // kv_heads
    out = query.new_empty(tokens, heads, values.shape[2])
    plan = KernelPlan.of(step, PlanKey(repeat, _BLOCK_ROWS, 0))
    _, items = plan.blocks[0]  # All blocks have the same size.
    starts = plan.starts(layer.window)
    # Layers whose window hides nothing share the visibility that the kernel computed.
    window = None if starts is None else layer.window
    is_first = window not in plan.visibility
    if is_first:
        key_blocks = -(-plan.max_own_keys // BLOCK)
        plan.visibility[window] = torch.empty(tokens, key_blocks, dtype=torch.int64)
    visibility = plan.visibility[window]
    sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
    call = struct.pack(  # `Call` in native.c
        "23q2fq",
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        items.data_ptr(),
        plan.queries.data_ptr(),
        plan.keys.data_ptr(),
        0 if starts is None else starts.data_ptr(),
        visibility.data_ptr(),
        len(items),
        *query.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        heads,
        kv_heads,
        head_dim,
        values.shape[2],
        plan.words,
        visibility.shape[1],
        torch.get_num_threads(),
        layer.scale,
        layer.softcap or 0.0,
        0 if sinks is None else sinks.data_ptr(),
    )
    library = native.library()
    if is_first:
        library.raypd_see(call)
    library.raypd_attention(call)
    return out


def refusal(device: torch.device) -> str | None:
    """Return why the kernel cannot run on a device; None if it can, and is compiled."""
    if device.type != "cpu":
        return (
            f"attention 'avx512' needs a CPU, and the model is on {device.type}: use 'sdpa' or "
            "'triton'"
        )
    reason = native.refusal()
    if reason is not None:
        return f"attention 'avx512' {reason}: use 'sdpa'"
    return None


def is_best(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel can run and is faster than torch's own attention."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    return not native.has("amx_bf16") and refusal(device) is None


def takes_sizes(repeat: int, dim: int, value_dim: int) -> bool:
    """Return whether the kernel supports heads of these sizes.

    Args:
        repeat: The number of query heads that share a key head.
        dim: The size of a key.
        value_dim: The size of a value.
    """
    for size in (dim, value_dim):
        if size % 32 or size > _MAX_HEAD_DIM:
            return False
    return repeat <= _MAX_REPEAT


def _takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel supports tensors [tokens, heads, head_dim] of these sizes."""
    repeat = query.shape[1] // key.shape[1]
    if not takes_sizes(repeat, key.shape[-1], value.shape[-1]):
        return False
    return query.dtype == key.dtype == value.dtype == torch.bfloat16
