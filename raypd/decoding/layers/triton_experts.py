"""Kernels of a mixture of experts, for GPUs.

Nothing is sorted or copied on the host: `counts` has the number of rows of each expert, from which
each kernel computes where an expert's rows begin. The kernels can therefore be part of a CUDA
graph. An entry is a pair of a token and one of its experts; entries are numbered token by token. A
sorted row is the row of an entry after the entries are sorted by expert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from raypd.decoding.attention.plan import power_of_two
from raypd.decoding.layers.expert_weights import Gate, GateKind
from raypd.decoding.layers.triton_gates import activated

# The number of entries that one program of `_rank` or `_sort` processes.
_ENTRIES = 64
# The number of elements that one program of `_mix` computes.
_BLOCK = 1024


class ExpertOrder(NamedTuple):
    """The entries of a pass, sorted by expert."""

    counts: torch.Tensor  # The number of entries of each expert, int32 [experts].
    order: torch.Tensor  # The entry of each sorted row, int32 [entries].


class GroupedWeights(NamedTuple):
    """The linear layers of all experts."""

    weight: torch.Tensor  # [experts, outputs, inputs], with any strides.
    bias: torch.Tensor | None  # [experts, outputs]
    scale: torch.Tensor | None  # The scales of FP8 codes, float32 [experts, outputs].


def choose(logits: torch.Tensor, k: int, renormalizes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts with the largest softmax.

    Args:
        logits: [tokens, experts]
        k: The number of experts per token.
        renormalizes: Whether the weights of a token's experts are divided by their sum.

    Returns:
        Weights [tokens, k] in at least float32, and expert indices int32 [tokens, k].
    """
    tokens, experts = logits.shape
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.new_empty(tokens, k, dtype=wide)
    numbers = logits.new_empty(tokens, k, dtype=torch.int32)
    if tokens:
        with torch.cuda.device_of(logits):
            _choose[(tokens,)](
                logits, weights, numbers, experts, k, power_of_two(experts), renormalizes
            )
    return weights, numbers


def sort_by_expert(numbers: torch.Tensor, experts: int) -> ExpertOrder:
    """Sort entries by expert; `numbers` are the indices of each token's experts, [tokens, k]."""
    entries = numbers.numel()
    counts = torch.zeros(experts, dtype=torch.int32, device=numbers.device)
    ranks = torch.empty(entries, dtype=torch.int32, device=numbers.device)
    order = torch.empty(entries, dtype=torch.int32, device=numbers.device)
    grid = (triton.cdiv(entries, _ENTRIES),)
    if entries:
        with torch.cuda.device_of(numbers):
            _rank[grid](numbers, ranks, counts, entries, _ENTRIES)
            _sort[grid](
                numbers, ranks, order, counts, entries, experts, power_of_two(experts), _ENTRIES
            )
    return ExpertOrder(counts, order)


def gated_rows(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    k: int,
    expert_order: ExpertOrder,
    weights: GroupedWeights,
    gate: Gate,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the products up to and including the activation.

    Args:
        x: [tokens, inputs], possibly in FP8.
        x_scale: The scales of rows in FP8, float32 [tokens, 1].
        k: The number of experts per token.
        expert_order: The entries, sorted by expert.
        weights: The weights of gates, then those of the gated values.
        gate: The activation.
        dtype: The dtype of the result.

    Returns:
        [sorted rows, outputs / 2]
    """
    outputs = weights.weight.shape[1] // 2
    out = torch.empty(len(expert_order.order), outputs, dtype=dtype, device=x.device)
    _launch(x, x_scale, weights, expert_order, None, out, k, gate)
    return out


def weighted_rows(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    entry_weights: torch.Tensor,
    expert_order: ExpertOrder,
    weights: GroupedWeights,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the products after the activation, times the weights of the entries.

    Args:
        x: [sorted rows, inputs], possibly in FP8.
        x_scale: The scales of rows in FP8, float32 [sorted rows, 1].
        entry_weights: [tokens, k]
        expert_order: The entries, sorted by expert.
        weights: The weights.
        dtype: The dtype of the result.

    Returns:
        [entries, outputs]
    """
    outputs = weights.weight.shape[1]
    out = torch.empty(len(expert_order.order), outputs, dtype=dtype, device=x.device)
    _launch(x, x_scale, weights, expert_order, entry_weights, out, 1, None)
    return out


def add_entries(entries: torch.Tensor, k: int, residual: torch.Tensor) -> torch.Tensor:
    """Add the entries [tokens * k, dim] of each token to the residual [tokens, dim], in place."""
    tokens, dim = residual.shape
    if tokens:
        with torch.cuda.device_of(residual):
            _mix[tokens, triton.cdiv(dim, _BLOCK)](
                entries, residual, residual.stride(0), dim, k, _BLOCK
            )
    return residual


def _launch(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weights: GroupedWeights,
    expert_order: ExpertOrder,
    entry_weights: torch.Tensor | None,
    out: torch.Tensor,
    k: int,
    gate: Gate | None,
) -> None:
    entries = len(expert_order.order)
    if entries == 0:
        return
    experts, _, inputs = weights.weight.shape
    outputs = out.shape[1]
    # If experts have few rows, small blocks suffice, and a GPU reads the weights only once anyway.
    rows = 16 if entries <= 16 * experts or x.element_size() > 2 else 64
    columns = 64
    depth = max(32, min(128, 128 // x.element_size()))
    blocks = min(entries, triton.cdiv(entries, rows) + experts)
    with torch.cuda.device_of(x):
        _grouped[blocks, triton.cdiv(outputs, columns)](
            x,
            # What is missing is not read, but a tensor must still be passed for it.
            expert_order.counts if x_scale is None else x_scale,
            weights.weight,
            expert_order.counts if weights.scale is None else weights.scale,
            expert_order.counts if weights.bias is None else weights.bias,
            expert_order.counts,
            expert_order.order,
            expert_order.counts if entry_weights is None else entry_weights,
            out,
            x.stride(0),
            *weights.weight.stride(),
            0.0 if gate is None else gate.alpha,
            0.0 if gate is None else gate.limit,
            INPUTS=inputs,
            OUTPUTS=outputs,
            EXPERTS=experts,
            K=k,
            GATE=0 if gate is None else int(gate.kind),
            BIAS=weights.bias is not None,
            SCALED=weights.scale is not None,
            WEIGHTED=entry_weights is not None,
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=depth,
            EXPERT_BLOCK=power_of_two(experts),
            num_warps=4,
            num_stages=3,
        )


_CLAMPED = tl.constexpr(int(GateKind.CLAMPED))


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits,
    weights,
    numbers,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Choose the experts of a token."""
    WIDE: tl.constexpr = weights.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    lowest = float("-inf")
    scores = tl.load(logits + token * EXPERTS + expert, mask=expert < EXPERTS, other=lowest)
    scores = scores.to(WIDE)
    high = tl.max(scores, 0)
    total = tl.sum(tl.exp(scores - high), 0)
    if RENORMALIZE:
        remaining = scores
        total = tl.sum(tl.zeros([BLOCK], WIDE), 0)
        for _ in range(K):
            best = tl.max(remaining, 0)
            total += tl.exp(best - high)
            remaining = tl.where(expert == tl.argmax(remaining, 0), lowest, remaining)
    for number in range(K):
        best = tl.max(scores, 0)
        chosen = tl.argmax(scores, 0)
        tl.store(weights + token * K + number, tl.exp(best - high) / total)
        tl.store(numbers + token * K + number, chosen)
        scores = tl.where(expert == chosen, lowest, scores)


@triton.jit
def _rank(numbers, ranks, counts, entries, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the entries of each expert, and number them in arbitrary order."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < entries
    number = tl.load(numbers + entry, mask=is_entry, other=0)
    rank = tl.atomic_add(counts + number, 1, mask=is_entry)
    tl.store(ranks + entry, rank, mask=is_entry)


@triton.jit
def _sort(  # type: ignore[no-untyped-def]
    numbers,
    ranks,
    order,
    counts,
    entries,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the index of each entry to its sorted row."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < entries
    number = tl.load(numbers + entry, mask=is_entry, other=0)
    rank = tl.load(ranks + entry, mask=is_entry, other=0)
    expert = tl.arange(0, EXPERT_BLOCK)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    start = tl.sum(tl.where(expert[None, :] < number[:, None], count[None, :], 0), 1)
    tl.store(order + start + rank, entry, mask=is_entry)


@triton.jit
def _grouped(  # type: ignore[no-untyped-def]
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    counts,
    order,
    entry_weights,
    out,
    x_stride,
    expert_stride,
    output_stride,
    input_stride,
    alpha,
    limit,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
):
    """Compute a block of an expert's rows.

    With a gate, x has one row per token and `out` has the sorted rows; the weights have 2 * OUTPUTS
    rows. If WEIGHTED, x has the sorted rows and `out` has one row per entry.
    """
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    PARTS: tl.constexpr = 2 if GATE else 1
    number = tl.program_id(0)
    index = tl.arange(0, EXPERT_BLOCK)
    count = tl.load(counts + index, mask=index < EXPERTS, other=0)
    blocks = (count + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= number).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    is_expert = index == expert
    rows_of_expert = tl.sum(tl.where(is_expert, count, 0), 0)
    first_block = tl.sum(tl.where(is_expert, ends - blocks, 0), 0)
    start = tl.sum(tl.where(index < expert, count, 0), 0)
    row = (number - first_block) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows_of_expert
    sorted_row = start + row
    entry = tl.load(order + sorted_row, mask=is_row, other=0)
    source = sorted_row if WEIGHTED else entry // K
    target = entry if WEIGHTED else sorted_row
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < OUTPUTS
    depth = tl.arange(0, DEPTH)
    x_rows = x + source.to(tl.int64)[:, None] * x_stride
    weights = weight + expert.to(tl.int64) * expert_stride
    weights += column.to(tl.int64)[None, :] * output_stride
    first = tl.zeros([ROWS, COLUMNS], WIDE)
    second = tl.zeros([ROWS, COLUMNS], WIDE)
    for begin in range(0, INPUTS, DEPTH):
        offset = begin + depth
        is_input = offset < INPUTS
        left = tl.load(
            x_rows + offset[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        pointers = weights + offset[:, None].to(tl.int64) * input_stride
        is_weight = is_input[:, None] & is_column[None, :]
        right = tl.load(pointers, mask=is_weight, other=0.0)
        first += tl.dot(left, right, input_precision="ieee", out_dtype=WIDE)
        if GATE:
            right = tl.load(pointers + OUTPUTS * output_stride, mask=is_weight, other=0.0)
            second += tl.dot(left, right, input_precision="ieee", out_dtype=WIDE)
    output = expert.to(tl.int64) * (PARTS * OUTPUTS) + column
    if SCALED:
        by = tl.load(x_scale + source, mask=is_row, other=0.0)[:, None]
        first *= by * tl.load(weight_scale + output, mask=is_column, other=0.0)[None, :]
        if GATE:
            second *= (
                by * tl.load(weight_scale + output + OUTPUTS, mask=is_column, other=0.0)[None, :]
            )
    if BIAS:
        first += tl.load(bias + output, mask=is_column, other=0.0).to(WIDE)[None, :]
        if GATE:
            second += tl.load(bias + output + OUTPUTS, mask=is_column, other=0.0).to(WIDE)[None, :]
    if GATE == _CLAMPED:
        first = tl.minimum(first, limit)
        second = tl.maximum(tl.minimum(second, limit), -limit)
        first = first / (1 + tl.exp(-alpha * first)) * (second + 1)
    elif GATE:
        first = activated(first, GATE, WIDE) * second
    if WEIGHTED:
        first *= tl.load(entry_weights + entry, mask=is_row, other=0.0).to(WIDE)[:, None]
    to = out + target.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(to, first.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _mix(  # type: ignore[no-untyped-def]
    entries, residual, stride, DIM: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the entries of a token to the residual."""
    TYPE: tl.constexpr = residual.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < DIM
    total = tl.load(residual + token * stride + column, mask=is_column, other=0.0).to(WIDE)
    for number in range(K):
        pointers = entries + (token * K + number) * DIM + column
        total += tl.load(pointers, mask=is_column, other=0.0).to(WIDE)
    tl.store(residual + token * stride + column, total.to(TYPE), mask=is_column)
