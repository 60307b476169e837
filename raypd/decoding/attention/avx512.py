"""Attention in one C function, for bfloat16 with AVX-512 BF16: as triton_kernel.py; what it does
not take goes to `sdpa`. On processors with AMX torch's own attention has faster products, and
`auto` leaves it to that.
"""

import struct

import torch

from raypd.decoding import native
from raypd.decoding.attention import sdpa
from raypd.decoding.attention.plan import KernelPlan
from raypd.decoding.attention.step import BLOCK, AttentionLayer, Step

_ROWS = (60,)  # rows of a block, one a query and query head; registers hold six at a time
_MOST_DIM = 256  # DIM in native.c
_MOST_REPEAT = 32


def attend(
    step: Step,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> torch.Tensor:
    """`Attend` by one function of C."""
    if key is None or value is None or not _takes(query, key, value):
        return sdpa.attend(step, layer, query, key, value)
    return _attended(step, layer, *_stored(step, layer, query, key, value))


def attend_stable(
    step: Step,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> torch.Tensor:
    """`attend`, whose sums go over the keys that a query sees, whatever lies between them: a
    token's output is the same bits in every pass and prompt. Keys and values are copied together
    first, for each segment of queries.
    """
    assert _takes(query, key, value)  # type: ignore[arg-type]
    query, keys, values = _stored(step, layer, query, key, value)  # type: ignore[arg-type]
    gathered, slots = step.gathered
    return _attended(
        gathered,
        layer,
        query,
        *(x.transpose(0, 1).index_select(1, slots).transpose(0, 1) for x in (keys, values)),
    )


def _stored(
    step: Step, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries with a last stride of 1; the layer's keys and values [slots, kv_heads, head_dim], the
    new ones stored.
    """
    query, key, value = (
        new if new.stride(-1) == 1 else new.contiguous() for new in (query, key, value)
    )
    keys, values = step.cache.layer(layer.number, key, value)
    native.store(step.slots, key, keys)
    native.store(step.slots, value, values)
    return query, keys, values


def _attended(
    step: Step, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention [tokens, heads, head_dim] of queries over keys and values that are stored."""
    _, scale, window, softcap = layer
    tokens, heads, head_dim = query.shape
    kv_heads, repeat = keys.shape[1], heads // keys.shape[1]
    out = query.new_empty(tokens, heads, values.shape[2])
    plan = step.plans.get(repeat)
    if plan is None:
        plan = step.plans[repeat] = KernelPlan(step, repeat, _ROWS)
    items = plan.blocks[0][1]  # all of the one size
    starts = plan.starts(window)
    window = None if starts is None else window
    first = window not in plan.seen  # layer of the pass with that window
    if first:
        plan.seen[window] = torch.empty(tokens, -(-plan.most_own // BLOCK), dtype=torch.int64)
    visibility = plan.seen[window]
    call = struct.pack(  # `Call` in native.c
        "23q2f",
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
        scale,
        softcap or 0.0,
    )
    if first:
        native.library().raypd_see(call)
    native.library().raypd_attention(call)
    return out


def refusal(device: torch.device) -> str | None:
    """Why the kernel cannot run on a device; None: it can, and is compiled."""
    if device.type != "cpu":
        return (
            f"attention 'avx512' needs a CPU, and the model is on {device.type}: use 'sdpa' or "
            "'triton'"
        )
    return (
        None if (reason := native.refusal()) is None else f"attention 'avx512' {reason}: use 'sdpa'"
    )


def is_best(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel can run, and is faster than torch's own attention."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and not native.has("amx_bf16")
        and refusal(device) is None
    )


def _takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel computes attention of these sizes: [tokens, heads, head_dim]."""
    sizes = key.shape[-1], value.shape[-1]
    fit = (
        all(size % 32 == 0 and size <= _MOST_DIM for size in sizes)
        and query.shape[1] // key.shape[1] <= _MOST_REPEAT
    )
    return fit and query.dtype == key.dtype == value.dtype == torch.bfloat16
