"""The Llama family's layers on GPUs: four products and five kernels each, where torch alone starts
fifty-six.

    norm | q/k/v in one product | norms of queries and keys, rotation, keys and values into the
    cache | attention output, added to the hidden states by the product | norm | gate and up in one
    | silu(gate) * up | down, the same

In FP8 twelve: the kernels before a product write its inputs in FP8; behind attention one of its own
does. What `_place` writes stays as it is: attention reads it in 16 bits. The file needs triton; in
its interpreter kernels run on a CPU.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from raypd.decoding.attention.plan import power_of_two
from raypd.decoding.attention.step import Step
from raypd.decoding.llama import Layer, Projected
from raypd.decoding.quantized import E4M3, Fp8Linear

_HEADS = 16  # heads of a token that a program of `_place` has
_BLOCK = 1024  # numbers that a program of `_swiglu` has


class CudaLayer(Layer):
    """A layer by these kernels, with the weights of transformers'.

    They compute in float32 and round once.
    """

    @staticmethod
    def takes(source: Any) -> bool:
        """Whether a layer of transformers is one that they compute."""
        attention, mlp = source.self_attn, source.mlp
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        plain = (
            attention.head_dim == power_of_two(attention.head_dim)
            and mlp.config.hidden_act == "silu"
        )
        return plain and {type(linear) for linear in linears} in ({torch.nn.Linear}, {Fp8Linear})

    def build(self, attention: Any, mlp: Any) -> None:
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.heads, self.kv_heads = (
            linear.weight.shape[0] // self.head_dim for linear in projections[:2]
        )
        self.projection, self.gated = _joined(projections), _joined([mlp.gate_proj, mlp.up_proj])
        self.output, self.down = attention.o_proj, mlp.down_proj
        self.fp8 = isinstance(self.output, Fp8Linear)
        if self.fp8:
            self.norm = partial(self.norm, fp8=True)  # type: ignore[method-assign]
        del attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj

    @staticmethod
    def norm(x: torch.Tensor, norm: Any, fp8: bool = False) -> Any:
        out, scale, dim = *_room(x, x.shape[-1], fp8), x.shape[-1]
        if len(x):
            with torch.cuda.device_of(x):
                _norm[(len(x),)](
                    x, norm.weight, out, scale, norm.variance_epsilon, dim, power_of_two(dim), fp8
                )
        return (out, scale, x.dtype) if fp8 else out

    def project(self, x: Any, cos: torch.Tensor, sin: torch.Tensor, step: Step) -> Projected:
        # [tokens, heads + 2 * kv_heads, head_dim].
        joined = self.projection(x).unflatten(-1, (-1, self.head_dim))
        query, new = joined[:, : self.heads], joined[:, self.heads : self.heads + self.kv_heads]
        keys, values = step.cache.layer(self.attention.number, new, new)
        norms = [cos if norm is None else norm.weight for norm in (self.query_norm, self.key_norm)]
        with torch.cuda.device_of(joined):
            _place[len(joined), triton.cdiv(joined.shape[1], _HEADS)](
                joined,
                keys,
                values,
                step.slots,
                cos,
                sin,
                *norms,
                0.0 if self.query_norm is None else self.query_norm.variance_epsilon,
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
        return query, None, None  # keys and values are stored

    @staticmethod
    def add(linear: Any, x: Any, residual: torch.Tensor) -> torch.Tensor:
        """In place: a pass has no further use for what is added to."""
        if isinstance(linear, Fp8Linear):
            return residual.add_(linear(x if isinstance(x, tuple) else rows_in_fp8(x)))
        residual.addmm_(x, linear.weight.t())
        return residual if linear.bias is None else residual.add_(linear.bias)

    def mlp(self, x: Any, residual: torch.Tensor) -> torch.Tensor:
        return self.add(self.down, swiglu(self.gated(x), self.fp8), residual)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.dtype]  # of `Fp8Linear`


def swiglu(joined: torch.Tensor, fp8: bool) -> torch.Tensor | Inputs:
    """[rows, 2 * dim] -> silu of the first half * the second."""
    dim = joined.shape[1] // 2
    out, scale = _room(joined, dim, fp8)
    block, warps = (power_of_two(dim), 16) if fp8 else (_BLOCK, 4)  # a row's scale is of all of it
    with torch.cuda.device_of(joined):
        _swiglu[len(out), triton.cdiv(dim, block)](
            joined, out, scale, dim, block, fp8, num_warps=warps
        )
    return (out, scale, joined.dtype) if fp8 else out


def rows_in_fp8(x: torch.Tensor) -> Inputs:
    """[rows, dim] as `quantized.in_fp8` makes it, in one launch."""
    out, scale = _room(x, x.shape[1], True)
    with torch.cuda.device_of(x):
        _quantize[(len(x),)](x, out, scale, x.shape[1], power_of_two(x.shape[1]))
    return out, scale, x.dtype


def _room(x: torch.Tensor, dim: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """For [rows, dim] made of x [rows, ...], and for their scales [rows, 1] in FP8."""
    out = x.new_empty(len(x), dim, dtype=E4M3 if fp8 else x.dtype)
    return out, x.new_empty(len(x), 1, dtype=torch.float32) if fp8 else out


def _joined(linears: list[Any]) -> torch.nn.Linear | Fp8Linear:
    """One layer that gives the outputs of all, one behind the other."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = (
        None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    )
    if isinstance(linears[0], Fp8Linear):
        return Fp8Linear(weight, torch.cat([linear.scale for linear in linears], 1), bias)
    joined = torch.nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    joined.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = torch.nn.Parameter(bias, requires_grad=False)
    return joined


@triton.jit
def _store(row, place, scale, is_inside, FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a row, or, in FP8, what `in_fp8` makes of it."""
    if FP8:
        row = row.to(tl.float32)
        factor = tl.maximum(tl.div_rn(tl.max(tl.abs(row), 0), 448.0), 1e-30)
        tl.store(scale, factor)
        row = tl.div_rn(row, factor)
    tl.store(place, row.to(place.dtype.element_ty), mask=is_inside)


@triton.jit
def _quantize(x, out, scale, DIM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of x [rows, DIM] in FP8."""
    number, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row = tl.load(x + number * DIM + column, mask=column < DIM, other=0.0)
    _store(row, out + number * DIM + column, scale + number, column < DIM, True)


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    x, weight, out, scale, eps, DIM: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr
):
    """RMS norm of a row of x [rows, DIM]."""
    TYPE: tl.constexpr = x.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    column = tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * DIM + column
    row = tl.load(x + place, mask=column < DIM, other=0.0).to(WIDE)
    factor = 1 / tl.sqrt(tl.sum(row * row, 0) / DIM + eps)
    row = (row * factor).to(TYPE).to(WIDE)
    row *= tl.load(weight + column, mask=column < DIM, other=0.0).to(WIDE)
    _store(row.to(TYPE), out + place, scale + tl.program_id(0), column < DIM, FP8)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
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
    """Some heads of a token of `joined` [tokens, HEADS + 2 * KV_HEADS, 2 * HALF]: queries are
    normed and rotated in place, keys go into the cache so, values as they are. cos, sin: [tokens, 2
    * HALF]; keys, values: [slots, ...].
    """
    TYPE: tl.constexpr = joined.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half = tl.arange(0, HALF)
    is_query, is_value = head < HEADS, (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    is_key, is_head = (
        (head >= HEADS) & (head < HEADS + KV_HEADS),
        (head < HEADS + 2 * KV_HEADS)[:, None],
    )
    place = (token * (HEADS + 2 * KV_HEADS) + head)[:, None] * (2 * HALF) + half[None, :]
    # [BLOCK, HALF], and the second halves.
    as_first = tl.load(joined + place, mask=is_head, other=0.0)
    as_second = tl.load(joined + place + HALF, mask=is_head, other=0.0)
    first, second = as_first.to(WIDE), as_second.to(WIDE)
    if NORM:
        factor = 1 / tl.sqrt(
            (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps
        )
        first, second = (
            (first * factor[:, None]).to(TYPE).to(WIDE),
            (second * factor[:, None]).to(TYPE).to(WIDE),
        )
        query_part, key_part = query_weight + half, key_weight + half
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
    cosine, sine = cos + token * cos_stride + half, sin + token * sin_stride + half
    turned = first * tl.load(cosine).to(WIDE)[None, :] - second * tl.load(sine).to(WIDE)[None, :]
    second = (
        second * tl.load(cosine + HALF).to(WIDE)[None, :]
        + first * tl.load(sine + HALF).to(WIDE)[None, :]
    )
    tl.store(joined + place, turned.to(TYPE), mask=is_query[:, None])
    tl.store(joined + place + HALF, second.to(TYPE), mask=is_query[:, None])
    slot = tl.load(slots + token).to(tl.int64)
    place = keys + slot * key_slot + (head - HEADS).to(tl.int64)[:, None] * key_head + half[None, :]
    tl.store(place, turned.to(TYPE), mask=is_key[:, None])
    tl.store(place + HALF, second.to(TYPE), mask=is_key[:, None])
    place = (
        values
        + slot * value_slot
        + (head - HEADS - KV_HEADS).to(tl.int64)[:, None] * value_head
        + half[None, :]
    )
    tl.store(place, as_first, mask=is_value[:, None])
    tl.store(place + HALF, as_second, mask=is_value[:, None])


@triton.jit
def _swiglu(  # type: ignore[no-untyped-def]
    joined, out, scale, DIM: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr
):
    """out [rows, DIM] = silu(gate) * up, of both joined [rows, 2 * DIM]."""
    TYPE: tl.constexpr = joined.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(joined + row * 2 * DIM + column, mask=column < DIM, other=0.0).to(WIDE)
    up = tl.load(joined + row * 2 * DIM + DIM + column, mask=column < DIM, other=0.0).to(WIDE)
    gated = (gate / (1 + tl.exp(-gate)) * up).to(TYPE)
    _store(gated, out + row * DIM + column, scale + row, column < DIM, FP8)
