"""The Llama family's layers on GPUs: four products and five kernels each, where torch alone starts
fifty-six.

    norm
    queries, keys and values in one product
    norms of queries and keys, rotation, keys and values into the cache
    attention output, which the product adds to the hidden states
    norm
    gate and up in one product
    silu(gate) * up
    down, which the product adds to the hidden states

In FP8 there are twelve: the kernels before a product write its inputs in FP8, and a kernel of its
own converts the output of attention. `_store_heads` writes no FP8, because attention reads 16 bits.

The file needs triton. In triton's interpreter the kernels run on a CPU.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from raypd.decoding.attention.plan import power_of_two
from raypd.decoding.attention.step import Step
from raypd.decoding.llama import Layer, Projected
from raypd.decoding.quantized import E4M3, Fp8Linear, Fp8Rows

# Heads of a token that a program of `_store_heads` computes.
_HEADS = 16
# Numbers that a program of `_swiglu` computes.
_BLOCK = 1024


class CudaLayer(Layer):
    """A layer by these kernels, with the weights of transformers' modules.

    The kernels compute in float32 and round once.
    """

    @staticmethod
    def takes(source: Any) -> bool:
        """Tell whether a layer of transformers can be computed this way."""
        attention = source.self_attn
        mlp = source.mlp
        if attention.head_dim != power_of_two(attention.head_dim):
            return False
        if mlp.config.hidden_act != "silu":
            return False
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        kinds = {type(linear) for linear in linears}
        return kinds in ({torch.nn.Linear}, {Fp8Linear})

    def build(self, attention: Any, mlp: Any) -> None:
        self.heads = attention.q_proj.weight.shape[0] // self.head_dim
        self.kv_heads = attention.k_proj.weight.shape[0] // self.head_dim
        self.projection = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gated = _joined([mlp.gate_proj, mlp.up_proj])
        self.output = attention.o_proj
        self.down = mlp.down_proj
        self.fp8 = isinstance(self.output, Fp8Linear)
        if self.fp8:
            self.norm = partial(self.norm, fp8=True)  # type: ignore[method-assign]
        # The weights were copied, so the model need not hold them twice.
        del attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj

    @staticmethod
    def norm(x: torch.Tensor, norm: Any, fp8: bool = False) -> Any:
        dim = x.shape[-1]
        out, scale = _new_outputs(x, dim, fp8)
        if len(x):
            with torch.cuda.device_of(x):
                _norm[(len(x),)](
                    x, norm.weight, out, scale, norm.variance_epsilon, dim, power_of_two(dim), fp8
                )
        if fp8:
            return Fp8Rows(out, scale, x.dtype)
        return out

    def project(self, x: Any, cos: torch.Tensor, sin: torch.Tensor, step: Step) -> Projected:
        # [tokens, heads + 2 * kv_heads, head_dim]
        joined = self.projection(x).unflatten(-1, (-1, self.head_dim))
        key = joined[:, self.heads : self.heads + self.kv_heads]
        keys, values = step.cache.layer(self.attention.number, key, key)
        # Without norms the kernel reads no weights, but needs some tensor in their place.
        query_weight = cos
        key_weight = cos
        eps = 0.0
        if self.query_norm is not None and self.key_norm is not None:
            query_weight = self.query_norm.weight
            key_weight = self.key_norm.weight
            eps = self.query_norm.variance_epsilon
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
                *keys.stride()[:2],
                *values.stride()[:2],
                cos.stride(0),
                sin.stride(0),
                self.heads,
                self.kv_heads,
                self.query_norm is not None,
                self.head_dim // 2,
                _HEADS,
            )
        # Keys and values are in the cache now.
        return joined[:, : self.heads], None, None

    @staticmethod
    def add(linear: Any, x: Any, residual: torch.Tensor) -> torch.Tensor:
        """Add the layer's outputs to `residual` in place; a pass does not read it again."""
        if isinstance(linear, Fp8Linear):
            if not isinstance(x, Fp8Rows):
                x = rows_in_fp8(x)
            return residual.add_(linear(x))
        residual.addmm_(x, linear.weight.t())
        if linear.bias is not None:
            residual.add_(linear.bias)
        return residual

    def mlp(self, x: Any, residual: torch.Tensor) -> torch.Tensor:
        return self.add(self.down, swiglu(self.gated(x), self.fp8), residual)


def swiglu(joined: torch.Tensor, fp8: bool) -> torch.Tensor | Fp8Rows:
    """Compute silu(gate) * up.

    Args:
        joined: Gate and up, one behind the other, [rows, 2 * dim].
        fp8: Whether the result is in FP8.

    Returns:
        [rows, dim]
    """
    dim = joined.shape[1] // 2
    out, scale = _new_outputs(joined, dim, fp8)
    block = _BLOCK
    warps = 4
    if fp8:
        # One program computes a whole row, because the scale depends on all of it.
        block = power_of_two(dim)
        warps = 16
    with torch.cuda.device_of(joined):
        _swiglu[len(out), triton.cdiv(dim, block)](
            joined, out, scale, dim, block, fp8, num_warps=warps
        )
    if fp8:
        return Fp8Rows(out, scale, joined.dtype)
    return out


def rows_in_fp8(x: torch.Tensor) -> Fp8Rows:
    """Convert [rows, dim] as `quantized.in_fp8` does, in one launch."""
    dim = x.shape[1]
    out, scale = _new_outputs(x, dim, True)
    with torch.cuda.device_of(x):
        _quantize[(len(x),)](x, out, scale, dim, power_of_two(dim))
    return Fp8Rows(out, scale, x.dtype)


def _new_outputs(x: torch.Tensor, dim: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate outputs [rows, dim] for x [rows, ...], and scales [rows, 1] for them in FP8.

    Without FP8 the kernels write no scales, and get the outputs in their place.
    """
    if fp8:
        out = x.new_empty(len(x), dim, dtype=E4M3)
        return out, x.new_empty(len(x), 1, dtype=torch.float32)
    out = x.new_empty(len(x), dim)
    return out, out


def _joined(linears: list[Any]) -> torch.nn.Linear | Fp8Linear:
    """Join linear layers into one that gives all their outputs, one after the other."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.detach() for linear in linears])
    if isinstance(linears[0], Fp8Linear):
        return Fp8Linear(weight, torch.cat([linear.scale for linear in linears], 1), bias)
    outputs, inputs = weight.shape
    joined = torch.nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    joined.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = torch.nn.Parameter(bias, requires_grad=False)
    return joined


@triton.jit
def _store(row, target, scale, is_inside, FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a row; in FP8, store what `in_fp8` makes of it."""
    if FP8:
        row = row.to(tl.float32)
        factor = tl.maximum(tl.div_rn(tl.max(tl.abs(row), 0), 448.0), 1e-30)
        tl.store(scale, factor)
        row = tl.div_rn(row, factor)
    tl.store(target, row.to(target.dtype.element_ty), mask=is_inside)


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
    x, weight, out, scale, eps, DIM: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr
):
    """Apply an RMS norm to a row of x [rows, DIM]."""
    TYPE: tl.constexpr = x.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    column = tl.arange(0, BLOCK)
    offset = tl.program_id(0).to(tl.int64) * DIM + column
    row = tl.load(x + offset, mask=column < DIM, other=0.0).to(WIDE)
    factor = 1 / tl.sqrt(tl.sum(row * row, 0) / DIM + eps)
    row = (row * factor).to(TYPE).to(WIDE)
    row *= tl.load(weight + column, mask=column < DIM, other=0.0).to(WIDE)
    _store(row.to(TYPE), out + offset, scale + tl.program_id(0), column < DIM, FP8)


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
    key_slot,
    key_head,
    value_slot,
    value_head,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process some heads of a token: queries, keys and values.

    Queries are normed and rotated in place. Keys are normed, rotated and put into the cache. Values
    are put there as they are. Shapes: joined [tokens, HEADS + 2 * KV_HEADS, 2 * HALF], cos and sin
    [tokens, 2 * HALF], keys and values [slots, KV_HEADS, 2 * HALF].
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
    offset = (token * (HEADS + 2 * KV_HEADS) + head)[:, None] * (2 * HALF) + half[None, :]
    # The first and second halves of the heads, [BLOCK, HALF] each.
    loaded_first = tl.load(joined + offset, mask=is_head, other=0.0)
    loaded_second = tl.load(joined + offset + HALF, mask=is_head, other=0.0)
    first = loaded_first.to(WIDE)
    second = loaded_second.to(WIDE)
    if NORM:
        # Values are normed too, but are stored as they were loaded.
        square_sum = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = 1 / tl.sqrt(square_sum / (2 * HALF) + eps)
        first = (first * factor[:, None]).to(TYPE).to(WIDE)
        second = (second * factor[:, None]).to(TYPE).to(WIDE)
        query_part = query_weight + half
        key_part = key_weight + half
        weights = tl.where(
            is_query[:, None], tl.load(query_part)[None, :], tl.load(key_part)[None, :]
        )
        first = (first * weights.to(WIDE)).to(TYPE).to(WIDE)
        weights = tl.where(
            is_query[:, None],
            tl.load(query_part + HALF)[None, :],
            tl.load(key_part + HALF)[None, :],
        )
        second = (second * weights.to(WIDE)).to(TYPE).to(WIDE)
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
    tl.store(target, rotated_first.to(TYPE), mask=is_key[:, None])
    tl.store(target + HALF, rotated_second.to(TYPE), mask=is_key[:, None])
    value_number = (head - HEADS - KV_HEADS).to(tl.int64)[:, None]
    target = values + slot * value_slot + value_number * value_head + half[None, :]
    tl.store(target, loaded_first, mask=is_value[:, None])
    tl.store(target + HALF, loaded_second, mask=is_value[:, None])


@triton.jit
def _swiglu(  # type: ignore[no-untyped-def]
    joined, out, scale, DIM: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr
):
    """Compute out [rows, DIM] = silu(gate) * up from joined [rows, 2 * DIM]."""
    TYPE: tl.constexpr = joined.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(joined + row * 2 * DIM + column, mask=column < DIM, other=0.0).to(WIDE)
    up = tl.load(joined + row * 2 * DIM + DIM + column, mask=column < DIM, other=0.0).to(WIDE)
    gated = (gate / (1 + tl.exp(-gate)) * up).to(TYPE)
    _store(gated, out + row * DIM + column, scale + row, column < DIM, FP8)
