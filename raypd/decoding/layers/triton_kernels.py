"""Kernels around the products of a layer, for GPUs.

A kernel before an FP8 product writes the product's inputs in FP8. `_store_heads` writes no FP8,
because attention reads 16 bits. In triton's interpreter the kernels run on a CPU.
"""

import torch
import triton
import triton.language as tl

from raypd.decoding.attention.plan import power_of_two
from raypd.decoding.attention.step import Step
from raypd.decoding.layers.expert_weights import GateKind
from raypd.decoding.layers.sources import NormStyle, Rope
from raypd.decoding.layers.triton_gates import activated
from raypd.decoding.quantized import E4M3, Fp8Rows

# The number of heads of a token that one program of `_store_heads` processes.
_HEADS = 16
# The number of elements that one program of `_gated` computes.
_BLOCK = 1024


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, style: NormStyle, fp8: bool = False
) -> torch.Tensor | Fp8Rows:
    """Apply an RMS norm to x [rows, dim], of any row stride; the result may be in FP8."""
    dim = x.shape[-1]
    out, scale = _new_outputs(x, dim, fp8)
    if len(x):
        with torch.cuda.device_of(x):
            _norm[(len(x),)](
                x, weight, out, scale, eps, x.stride(0), dim, power_of_two(dim), int(style), fp8
            )
    if fp8:
        return Fp8Rows(out, scale, x.dtype)
    return out


def store_heads(
    joined: torch.Tensor,
    heads: int,
    rope: Rope | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    style: NormStyle,
    norms_values: bool,
    step: Step,
    number: int,
) -> torch.Tensor:
    """Norm and rotate queries and keys, and store keys and values in the cache.

    Args:
        joined: Queries, keys and values, [tokens, heads + 2 * kv_heads, head_dim], or only queries
            if an earlier layer has stored the keys and values.
        heads: The number of query heads.
        rope: The rotary embedding; None if nothing is rotated.
        norms: The weights of the norms of queries and keys, [head_dim] each; None for no norms.
        eps: What the norms add to mean squares.
        style: How the norms compute.
        norms_values: Whether values are normed too, without a weight.
        step: The pass.
        number: The layer's index in the cache.

    Returns:
        Queries, [tokens, heads, head_dim].
    """
    kv_heads = (joined.shape[1] - heads) // 2
    key = joined[:, heads : heads + kv_heads]
    keys, values = step.cache.layer(number, key, key)
    # Without norms or rotation the kernel reads nothing there, but a tensor must still be passed.
    query_weight, key_weight = norms or (joined, joined)
    cos = joined if rope is None else rope.cos
    sin = joined if rope is None else rope.sin
    with torch.cuda.device_of(joined):
        _store_heads[len(joined), triton.cdiv(joined.shape[1], _HEADS)](
            joined,
            keys,
            values,
            step.slots,
            cos,
            sin,
            query_weight,
            key_weight,
            eps,
            joined.stride(0),
            *keys.stride()[:2],
            *values.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            heads,
            kv_heads,
            norms is not None,
            norms_values,
            int(style),
            rope is not None,
            joined.shape[2] // 2,
            _HEADS,
        )
    return joined[:, :heads]


def store_latents(
    query: torch.Tensor,
    latents: torch.Tensor,
    order: torch.Tensor,
    rope: Rope,
    weight: torch.Tensor,
    eps: float,
    style: NormStyle,
    step: Step,
    number: int,
) -> torch.Tensor:
    """Norm latents, rotate keys and store both in the cache, and rotate queries.

    Args:
        query: [tokens, heads, plain_dim + rope_dim]
        latents: Latents and keys, [tokens, latent_dim + rope_dim], of any row stride.
        order: The indices of the elements of queries and keys in the order of `Rope`, int32
            [rope_dim].
        rope: The rotary embedding.
        weight: The weight of the norm, [latent_dim].
        eps: What the norm adds to mean squares.
        style: How the norm computes.
        step: The pass.
        number: The layer's index in the cache.

    Returns:
        Queries [tokens, heads, latent_dim + rope_dim], of which only the rotated elements are set.
    """
    tokens, heads, query_dim = query.shape
    latent_dim = len(weight)
    rope_dim = len(order)
    keys = step.cache.latents(number, latents[:, None])
    absorbed = query.new_empty(tokens, heads, latent_dim + rope_dim)
    cos = rope.cos
    sin = rope.sin
    with torch.cuda.device_of(query):
        _store_latents[tokens, 1 + triton.cdiv(heads, _HEADS)](
            query,
            latents,
            absorbed,
            keys,
            step.slots,
            order,
            cos,
            sin,
            weight,
            eps,
            *query.stride()[:2],
            latents.stride(0),
            keys.stride(0),
            cos.stride(0),
            sin.stride(0),
            heads,
            query_dim - rope_dim,
            latent_dim,
            rope_dim // 2,
            int(style),
            _HEADS,
        )
    return absorbed


def gated(joined: torch.Tensor, gate: GateKind, fp8: bool) -> torch.Tensor | Fp8Rows:
    """Compute silu(gate) * up or gelu(gate) * up.

    Args:
        joined: Gate and up, concatenated, [rows, 2 * dim].
        gate: Which of the two.
        fp8: Whether the result is in FP8.

    Returns:
        [rows, dim]
    """
    dim = joined.shape[1] // 2
    out, scale = _new_outputs(joined, dim, fp8)
    block = _BLOCK
    warps = 4
    if fp8:
        # One program computes a whole row, because the scale depends on the entire row.
        block = power_of_two(dim)
        warps = 16
    with torch.cuda.device_of(joined):
        _gated[len(out), triton.cdiv(dim, block)](
            joined, out, scale, dim, block, int(gate), fp8, num_warps=warps
        )
    if fp8:
        return Fp8Rows(out, scale, joined.dtype)
    return out


def rows_in_fp8(x: torch.Tensor) -> Fp8Rows:
    """Convert [rows, dim] like `quantized.in_fp8`, in one launch."""
    dim = x.shape[1]
    out, scale = _new_outputs(x, dim, True)
    with torch.cuda.device_of(x):
        _quantize[(len(x),)](x, out, scale, dim, power_of_two(dim))
    return Fp8Rows(out, scale, x.dtype)


def _new_outputs(x: torch.Tensor, dim: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate outputs [rows, dim] for x [rows, ...] and, in FP8, their scales [rows, 1].

    Without FP8 the kernels write no scales, and are passed the outputs instead.
    """
    if fp8:
        out = x.new_empty(len(x), dim, dtype=E4M3)
        return out, x.new_empty(len(x), 1, dtype=torch.float32)
    out = x.new_empty(len(x), dim)
    return out, out


@triton.jit
def _store(row, target, scale, is_inside, FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a row; in FP8, convert it like `in_fp8` first."""
    if FP8:
        row = row.to(tl.float32)
        factor = tl.maximum(tl.div_rn(tl.max(tl.abs(row), 0), 448.0), 1e-30)
        tl.store(scale, factor)
        row = tl.div_rn(row, factor)
    tl.store(target, row.to(target.dtype.element_ty), mask=is_inside)


@triton.jit
def _as_cached(numbers, target):  # type: ignore[no-untyped-def]
    """Convert keys or values to the dtype of the cache at `target`.

    In 8 bits, numbers outside the range are clamped to it, as in `kv_cache.in_8_bits`.
    """
    if target.dtype.element_ty == tl.float8e4nv:
        numbers = numbers.to(tl.float32)
        numbers = tl.minimum(numbers, 448.0, propagate_nan=tl.PropagateNan.ALL)
        numbers = tl.maximum(numbers, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return numbers.to(target.dtype.element_ty)


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]
    x, out, scale, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Convert a row of x [rows, DIM] to FP8."""
    number = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row = tl.load(x + number * DIM + column, mask=column < DIM, other=0.0)
    _store(row, out + number * DIM + column, scale + number, column < DIM, True)


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    scale,
    eps,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    STYLE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Apply an RMS norm to a row of x [rows, DIM]. STYLE is a `NormStyle`."""
    TYPE: tl.constexpr = x.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    column = tl.arange(0, BLOCK)
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(x + number * stride + column, mask=column < DIM, other=0.0).to(WIDE)
    factor = 1 / tl.sqrt(tl.sum(row * row, 0) / DIM + eps)
    row = row * factor
    if STYLE == 0:
        row = row.to(TYPE).to(WIDE)
    by = tl.load(weight + column, mask=column < DIM, other=0.0).to(WIDE)
    if STYLE == 2:
        by += 1
    row *= by
    _store(row.to(TYPE), out + number * DIM + column, scale + number, column < DIM, FP8)


@triton.jit
def _store_heads(  # type: ignore[no-untyped-def]
    joined,
    keys,
    values,
    slots,
    cos,
    sin,
    query_weight,
    key_weight,
    eps,
    token_stride,
    key_slot,
    key_head,
    value_slot,
    value_head,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    STYLE: tl.constexpr,
    ROTATE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process some heads of a token: queries, keys and values.

    Queries are normed and rotated in place. Keys are normed, rotated and stored in the cache.
    Values are stored there unchanged, or normed without a weight. Shapes: joined [tokens, HEADS + 2
    * KV_HEADS, 2 * HALF], its tokens `token_stride` apart, cos and sin [tokens, 2 * HALF], keys and
    values [slots, KV_HEADS, 2 * HALF].
    """
    TYPE: tl.constexpr = joined.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half = tl.arange(0, HALF)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    is_head = (head < HEADS + 2 * KV_HEADS)[:, None]
    offset = token * token_stride + head[:, None] * (2 * HALF) + half[None, :]
    # The first and second halves of the heads, [BLOCK, HALF] each.
    loaded_first = tl.load(joined + offset, mask=is_head, other=0.0)
    loaded_second = tl.load(joined + offset + HALF, mask=is_head, other=0.0)
    first = loaded_first.to(WIDE)
    second = loaded_second.to(WIDE)
    if NORM:
        # The norm is computed for values too, but they are stored unchanged unless NORM_VALUES is
        # set.
        square_sum = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = 1 / tl.sqrt(square_sum / (2 * HALF) + eps)
        first = first * factor[:, None]
        second = second * factor[:, None]
        if STYLE == 0:
            first = first.to(TYPE).to(WIDE)
            second = second.to(TYPE).to(WIDE)
        if NORM_VALUES:
            loaded_first = first.to(TYPE)
            loaded_second = second.to(TYPE)
        query_part = query_weight + half
        key_part = key_weight + half
        weights = tl.where(
            is_query[:, None], tl.load(query_part)[None, :], tl.load(key_part)[None, :]
        )
        weights = weights.to(WIDE)
        if STYLE == 2:
            weights += 1
        first = (first * weights).to(TYPE).to(WIDE)
        weights = tl.where(
            is_query[:, None],
            tl.load(query_part + HALF)[None, :],
            tl.load(key_part + HALF)[None, :],
        )
        weights = weights.to(WIDE)
        if STYLE == 2:
            weights += 1
        second = (second * weights).to(TYPE).to(WIDE)
    rotated_first = first
    rotated_second = second
    if ROTATE:
        cosine = cos + token * cos_stride + half
        sine = sin + token * sin_stride + half
        first_cosine = tl.load(cosine).to(WIDE)[None, :]
        first_sine = tl.load(sine).to(WIDE)[None, :]
        second_cosine = tl.load(cosine + HALF).to(WIDE)[None, :]
        second_sine = tl.load(sine + HALF).to(WIDE)[None, :]
        rotated_first = first * first_cosine - second * first_sine
        rotated_second = second * second_cosine + first * second_sine
    tl.store(joined + offset, rotated_first.to(TYPE), mask=is_query[:, None])
    tl.store(joined + offset + HALF, rotated_second.to(TYPE), mask=is_query[:, None])
    slot = tl.load(slots + token).to(tl.int64)
    key_number = (head - HEADS).to(tl.int64)[:, None]
    target = keys + slot * key_slot + key_number * key_head + half[None, :]
    tl.store(target, _as_cached(rotated_first.to(TYPE), target), mask=is_key[:, None])
    tl.store(target + HALF, _as_cached(rotated_second.to(TYPE), target), mask=is_key[:, None])
    value_number = (head - HEADS - KV_HEADS).to(tl.int64)[:, None]
    target = values + slot * value_slot + value_number * value_head + half[None, :]
    tl.store(target, _as_cached(loaded_first, target), mask=is_value[:, None])
    tl.store(target + HALF, _as_cached(loaded_second, target), mask=is_value[:, None])


@triton.jit
def _store_latents(  # type: ignore[no-untyped-def]
    query,
    latents,
    absorbed,
    keys,
    slots,
    order,
    cos,
    sin,
    weight,
    eps,
    query_token,
    query_head,
    latent_stride,
    key_slot,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    HALF: tl.constexpr,
    STYLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process the latent and the key of a token, or some of its query heads.

    Shapes: query [tokens, HEADS, PLAIN_DIM + 2 * HALF], latents [tokens, LATENT_DIM + 2 * HALF],
    absorbed [tokens, HEADS, LATENT_DIM + 2 * HALF], keys [slots, 1, LATENT_DIM + 2 * HALF].
    """
    TYPE: tl.constexpr = query.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF)
    first_number = tl.load(order + half)[None, :]
    second_number = tl.load(order + HALF + half)[None, :]
    first_cosine = tl.load(cos + token * cos_stride + half).to(WIDE)[None, :]
    second_cosine = tl.load(cos + token * cos_stride + HALF + half).to(WIDE)[None, :]
    first_sine = tl.load(sin + token * sin_stride + half).to(WIDE)[None, :]
    second_sine = tl.load(sin + token * sin_stride + HALF + half).to(WIDE)[None, :]
    is_key = tl.program_id(1) == 0
    if is_key:
        # The two branches share no variable name, because its type would differ between them.
        latent_row = latents + token * latent_stride
        slot = keys + tl.load(slots + token).to(tl.int64) * key_slot
        number = tl.arange(0, LATENT_DIM)
        latent = tl.load(latent_row + number).to(WIDE)
        latent = latent / tl.sqrt(tl.sum(latent * latent, 0) / LATENT_DIM + eps)
        if STYLE == 0:
            latent = latent.to(TYPE).to(WIDE)
        latent = latent * tl.load(weight + number).to(WIDE)
        tl.store(slot + number, _as_cached(latent.to(TYPE), slot))
        key_first = tl.load(latent_row + LATENT_DIM + first_number).to(WIDE)
        key_second = tl.load(latent_row + LATENT_DIM + second_number).to(WIDE)
        key_target = slot + LATENT_DIM + half[None, :]
        rotated_first_key = key_first * first_cosine - key_second * first_sine
        tl.store(key_target, _as_cached(rotated_first_key.to(TYPE), slot))
        rotated_key = key_second * second_cosine + key_first * second_sine
        tl.store(key_target + HALF, _as_cached(rotated_key.to(TYPE), slot))
    else:
        head = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
        is_head = (head < HEADS)[:, None]
        row = query + token * query_token + head[:, None] * query_head + PLAIN_DIM
        first = tl.load(row + first_number, mask=is_head, other=0.0).to(WIDE)
        second = tl.load(row + second_number, mask=is_head, other=0.0).to(WIDE)
        target = absorbed + (token * HEADS + head)[:, None] * (LATENT_DIM + 2 * HALF)
        target += LATENT_DIM + half[None, :]
        rotated_first = first * first_cosine - second * first_sine
        rotated_second = second * second_cosine + first * second_sine
        tl.store(target, rotated_first.to(TYPE), mask=is_head)
        tl.store(target + HALF, rotated_second.to(TYPE), mask=is_head)


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    joined,
    out,
    scale,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Compute out [rows, DIM] = act(gate) * up from joined [rows, 2 * DIM]."""
    TYPE: tl.constexpr = joined.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(joined + row * 2 * DIM + column, mask=column < DIM, other=0.0).to(WIDE)
    up = tl.load(joined + row * 2 * DIM + DIM + column, mask=column < DIM, other=0.0).to(WIDE)
    gated = (activated(gate, GATE, WIDE) * up).to(TYPE)
    _store(gated, out + row * DIM + column, scale + row, column < DIM, FP8)
