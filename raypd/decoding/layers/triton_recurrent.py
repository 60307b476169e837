"""Kernels of recurrent and convolution layers, for GPUs: a convolution, a scan and a gated norm.

A scan goes through the tokens of a run one by one, with a part of a head's state in registers. This
suits decoding, where a run has one token; for prompts, flash-linear-attention is faster. In
triton's interpreter the kernels run on a CPU.
"""

import torch
import triton
import triton.language as tl

from raypd.decoding.attention.plan import power_of_two
from raypd.decoding.recurrence.plan import RecurrentPass

# The number of channels that one program of a convolution computes.
_CHANNELS = 512
# The number of values of a state that one program of a scan holds, for all keys.
_VALUES = 32
_NORM_EPS = 1e-6  # For the norm of the gated delta rule's queries and keys.


def convolve(
    number: int,
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    work: RecurrentPass,
    silu: bool,
) -> torch.Tensor:
    """Apply a causal convolution along the chains, and store its last inputs.

    This takes one launch if each token is its own run, and three otherwise.

    Args:
        number: The index of the recurrent layer.
        values: [tokens, channels], with a last stride of 1.
        weight: [channels, inputs + 1], contiguous.
        bias: [channels]
        work: The runs.
        silu: Whether SiLU follows.

    Returns:
        [tokens, channels]
    """
    store = work.pool.inputs[number]
    tokens, channels = values.shape
    inputs = store.shape[1]
    out = values.new_empty(tokens, channels)
    grid = (tokens, triton.cdiv(channels, _CHANNELS))
    numbers = work.runs.starts if work.is_single else work.taps(inputs).taps
    with torch.cuda.device_of(values):
        _convolve[grid](
            values,
            store,
            numbers,
            work.runs.ends,
            weight,
            # Without a bias the kernel reads none, but a tensor must still be passed.
            weight if bias is None else bias,
            out,
            values.stride(0),
            channels,
            inputs,
            work.is_single,
            bias is not None,
            silu,
            _CHANNELS,
        )
        if not work.is_single:
            taps = work.taps(inputs)
            # The old inputs may still be read for other states, so the new ones are copied at the
            # end.
            scratch = store.new_empty(len(taps.ends), inputs, channels)
            grid = (len(taps.ends) * inputs, triton.cdiv(channels, _CHANNELS))
            _gather[grid](values, store, taps.last, scratch, values.stride(0), channels, _CHANNELS)
            store.index_copy_(0, taps.ends, scratch)
    return out


def delta_scan(
    states: torch.Tensor,
    mixed: torch.Tensor,
    writing: torch.Tensor,
    forgetting: torch.Tensor,
    decay: torch.Tensor,
    offset: torch.Tensor,
    key_heads: int,
    work: RecurrentPass,
) -> torch.Tensor:
    """Apply the gated delta rule to all runs.

    Args:
        states: float32 [slots, heads, key_dim, value_dim]
        mixed: Queries, keys and values, concatenated, [tokens, channels].
        writing: The rate of writing before the sigmoid, [tokens, heads].
        forgetting: The rate of forgetting before the softplus, with the strides of `writing`.
        decay: The logarithm of the factor of the softplus, [heads].
        offset: What is added before the softplus, [heads].
        key_heads: The number of heads of queries and keys.
        work: The runs.

    Returns:
        float32 [tokens, heads, value_dim]
    """
    _, heads, key_dim, value_dim = states.shape
    out = mixed.new_empty(len(mixed), heads, value_dim, dtype=torch.float32)
    values = min(_VALUES, power_of_two(value_dim))
    grid = (len(work.runs.groups) - 1, heads, triton.cdiv(value_dim, values))
    with torch.cuda.device_of(mixed):
        _delta_scan[grid](
            states,
            *work.runs,
            mixed,
            writing,
            forgetting,
            decay,
            offset,
            out,
            mixed.stride(0),
            writing.stride(0),
            key_dim**-0.5,
            _NORM_EPS,
            heads,
            key_heads,
            key_dim,
            value_dim,
            power_of_two(key_dim),
            values,
            num_stages=1,
        )
    return out


def mamba_scan(
    states: torch.Tensor,
    mixed: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    offset: torch.Tensor,
    through: torch.Tensor,
    limits: tuple[float, float],
    key_groups: int,
    work: RecurrentPass,
) -> torch.Tensor:
    """Apply the recurrence of Mamba-2 to all runs.

    Args:
        states: float32 [slots, heads, head_dim, state size]
        mixed: The inputs, what is written into the state and what is read from it, concatenated,
            [tokens, channels].
        steps: Step sizes before the softplus, [tokens, heads].
        decay: The logarithm of the rate of forgetting, [heads].
        offset: What is added before the softplus, [heads].
        through: The share of the inputs that goes to the output (D), [heads].
        limits: The smallest and the largest step.
        key_groups: The number of groups of heads that share what they read and write.
        work: The runs.

    Returns:
        float32 [tokens, heads, head_dim]
    """
    _, heads, head_dim, state_size = states.shape
    out = mixed.new_empty(len(mixed), heads, head_dim, dtype=torch.float32)
    values = min(_VALUES, power_of_two(head_dim))
    grid = (len(work.runs.groups) - 1, heads, triton.cdiv(head_dim, values))
    with torch.cuda.device_of(mixed):
        _mamba_scan[grid](
            states,
            *work.runs,
            mixed,
            steps,
            decay,
            offset,
            through,
            out,
            mixed.stride(0),
            steps.stride(0),
            *limits,
            heads,
            key_groups,
            head_dim,
            state_size,
            values,
            power_of_two(state_size),
            num_stages=1,
        )
    return out


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    gate_first: bool,
) -> torch.Tensor:
    """Multiply parts of rows by the SiLU of a gate, and divide them by their root mean square.

    Args:
        x: float32 [rows, parts, dim], contiguous.
        gate: [rows, parts * dim], with a last stride of 1.
        weight: [dim], or [parts * dim] for a weight of each part; None for no norm.
        eps: Added to the mean squares.
        gate_first: Whether the gate is applied before the norm.

    Returns:
        [rows, parts * dim], in the dtype of the gate.
    """
    rows, parts, dim = x.shape
    out = gate.new_empty(rows, parts * dim)
    is_apart = weight is not None and len(weight) > dim
    with torch.cuda.device_of(x):
        _gated_norm[rows, parts](
            x,
            gate,
            gate if weight is None else weight,
            out,
            eps,
            gate.stride(0),
            parts,
            dim,
            gate_first,
            weight is not None,
            is_apart,
            power_of_two(dim),
        )
    return out


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x [rows, dim] times the sigmoid of a gate, of any row stride."""
    out = torch.empty_like(x)
    rows, dim = x.shape
    with torch.cuda.device_of(x):
        _sigmoid_gate[rows, triton.cdiv(dim, _CHANNELS)](
            x, gate, out, gate.stride(0), dim, _CHANNELS
        )
    return out


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    values,
    store,
    numbers,
    ends,
    weight,
    bias,
    out,
    stride,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    SINGLE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve some channels of a row.

    Shapes: values and out [rows, CHANNELS], store [slots, INPUTS, CHANNELS], weight [CHANNELS,
    INPUTS + 1]. `numbers` are the taps [rows, INPUTS]; in a SINGLE pass they are the slot from
    which each row continues, and the row's own inputs go to the slot in `ends`.
    """
    TYPE: tl.constexpr = values.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    newest = tl.load(values + row * stride + channel, mask=inside, other=0.0)
    taps = weight + channel * (INPUTS + 1)
    total = newest.to(WIDE) * tl.load(taps + INPUTS, mask=inside, other=0.0).to(WIDE)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(WIDE)
    if SINGLE:
        start = tl.load(numbers + row)
        target = store + tl.load(ends + row) * INPUTS * CHANNELS + channel
        for i in tl.static_range(INPUTS):
            source = store + (start * INPUTS + i) * CHANNELS + channel
            before = tl.load(source, mask=inside, other=0.0)
            total += before.to(WIDE) * tl.load(taps + i, mask=inside, other=0.0).to(WIDE)
            if i > 0:
                tl.store(target + (i - 1) * CHANNELS, before, mask=inside)
        tl.store(target + (INPUTS - 1) * CHANNELS, newest, mask=inside)
    else:
        for i in tl.static_range(INPUTS):
            number = tl.load(numbers + row * INPUTS + i)
            fresh = tl.load(
                values + number * stride + channel, mask=inside & (number >= 0), other=0.0
            )
            stored = tl.load(
                store + (-1 - number) * CHANNELS + channel, mask=inside & (number < 0), other=0.0
            )
            before = fresh.to(WIDE) + stored.to(WIDE)
            total += before * tl.load(taps + i, mask=inside, other=0.0).to(WIDE)
    if SILU:
        total = total / (1 + tl.exp(-total))
    tl.store(out + row * CHANNELS + channel, total.to(TYPE), mask=inside)


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    values, store, numbers, out, stride, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy some channels of an input to out [inputs, CHANNELS]; `numbers` are as in `_convolve`."""
    index = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    number = tl.load(numbers + index)
    fresh = tl.load(values + number * stride + channel, mask=inside & (number >= 0), other=0.0)
    stored = tl.load(
        store + (-1 - number) * CHANNELS + channel, mask=inside & (number < 0), other=0.0
    )
    tl.store(out + index * CHANNELS + channel, tl.where(number >= 0, fresh, stored), mask=inside)


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    """Return log(1 + e^x) as torch computes it."""
    return tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _delta_scan(  # type: ignore[no-untyped-def]
    states,
    starts,
    ends,
    offsets,
    rows,
    groups,
    mixed,
    writing,
    forgetting,
    decay,
    offset,
    out,
    stride,
    rate_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Advance some values of a head's states through the runs of a group, one by one."""
    group = tl.program_id(0)
    head = tl.program_id(1)
    key = tl.arange(0, KEY_BLOCK)
    value = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_key = key < KEYS
    is_value = value < VALUES
    inside = is_key[:, None] & is_value[None, :]
    in_state = key[:, None] * VALUES + value[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    speed = tl.exp(tl.load(decay + head).to(tl.float32))
    shift = tl.load(offset + head).to(tl.float32)
    for run in range(tl.load(groups + group), tl.load(groups + group + 1)):
        source = states + (tl.load(starts + run) * HEADS + head) * KEYS * VALUES
        state = tl.load(source + in_state, mask=inside, other=0.0)
        for number in range(tl.load(offsets + run), tl.load(offsets + run + 1)):
            row = tl.load(rows + number)
            base = mixed + row * stride
            query = tl.load(base + key_head * KEYS + key, mask=is_key, other=0.0).to(tl.float32)
            written = base + (KEY_HEADS + key_head) * KEYS + key
            keys = tl.load(written, mask=is_key, other=0.0).to(tl.float32)
            value_pointers = base + 2 * KEY_HEADS * KEYS + head * VALUES + value
            values = tl.load(value_pointers, mask=is_value, other=0.0).to(tl.float32)
            query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + eps))
            keys = keys * (1 / tl.sqrt(tl.sum(keys * keys, 0) + eps))
            write = tl.load(writing + row * rate_stride + head).to(tl.float32)
            forget = tl.load(forgetting + row * rate_stride + head).to(tl.float32)
            state = state * tl.exp(-speed * _softplus(forget + shift))
            change = values - tl.sum(keys[:, None] * state, 0)
            change = change / (1 + tl.exp(-write))
            state = state + keys[:, None] * change[None, :]
            result = tl.sum(query[:, None] * state, 0)
            tl.store(out + (row * HEADS + head) * VALUES + value, result, mask=is_value)
        target = states + (tl.load(ends + run) * HEADS + head) * KEYS * VALUES
        tl.store(target + in_state, state, mask=inside)


@triton.jit
def _mamba_scan(  # type: ignore[no-untyped-def]
    states,
    starts,
    ends,
    offsets,
    rows,
    groups,
    mixed,
    steps,
    decay,
    offset,
    through,
    out,
    stride,
    rate_stride,
    lowest,
    highest,
    HEADS: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
):
    """Advance some rows of a head's states through the runs of a group, one by one."""
    group = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.program_id(2) * DIM_BLOCK + tl.arange(0, DIM_BLOCK)
    number_in_state = tl.arange(0, STATE_BLOCK)
    is_dim = dim < DIM
    is_state = number_in_state < STATE
    inside = is_dim[:, None] & is_state[None, :]
    in_state = dim[:, None] * STATE + number_in_state[None, :]
    key_group = head // (HEADS // KEY_GROUPS)
    speed = tl.exp(tl.load(decay + head).to(tl.float32))
    shift = tl.load(offset + head).to(tl.float32)
    share = tl.load(through + head).to(tl.float32)
    for run in range(tl.load(groups + group), tl.load(groups + group + 1)):
        source = states + (tl.load(starts + run) * HEADS + head) * DIM * STATE
        state = tl.load(source + in_state, mask=inside, other=0.0)
        for number in range(tl.load(offsets + run), tl.load(offsets + run + 1)):
            row = tl.load(rows + number)
            base = mixed + row * stride
            x = tl.load(base + head * DIM + dim, mask=is_dim, other=0.0).to(tl.float32)
            written = base + HEADS * DIM + key_group * STATE + number_in_state
            keys = tl.load(written, mask=is_state, other=0.0).to(tl.float32)
            query_pointers = written + KEY_GROUPS * STATE
            query = tl.load(query_pointers, mask=is_state, other=0.0).to(tl.float32)
            step = _softplus(tl.load(steps + row * rate_stride + head).to(tl.float32) + shift)
            step = tl.minimum(tl.maximum(step, lowest), highest)
            state = state * tl.exp(-speed * step) + (step * x)[:, None] * keys[None, :]
            result = tl.sum(state * query[None, :], 1) + share * x
            tl.store(out + (row * HEADS + head) * DIM + dim, result, mask=is_dim)
        target = states + (tl.load(ends + run) * HEADS + head) * DIM * STATE
        tl.store(target + in_state, state, mask=inside)


@triton.jit
def _gated_norm(  # type: ignore[no-untyped-def]
    x,
    gate,
    weight,
    out,
    eps,
    stride,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    NORM: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gate and norm a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    in_row = (row * PARTS + part) * DIM + column
    gates = tl.load(gate + row * stride + part * DIM + column, mask=inside, other=0.0)
    gates = gates.to(tl.float32)
    scaled = gates / (1 + tl.exp(-gates))
    total = tl.load(x + in_row, mask=inside, other=0.0)
    if GATE_FIRST:
        total = total * scaled
    if NORM:
        total = total / tl.sqrt(tl.sum(total * total, 0) / DIM + eps)
        by = weight + column
        if APART:
            by += part * DIM
        total = total * tl.load(by, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        total = total * scaled
    tl.store(out + in_row, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid_gate(  # type: ignore[no-untyped-def]
    x, gate, out, stride, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Scale some elements of a row by the sigmoid of their gates."""
    TYPE: tl.constexpr = x.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < DIM
    numbers = tl.load(x + row * DIM + column, mask=inside, other=0.0).to(WIDE)
    gates = tl.load(gate + row * stride + column, mask=inside, other=0.0).to(WIDE)
    scaled = numbers / (1 + tl.exp(-gates))
    tl.store(out + row * DIM + column, scaled.to(TYPE), mask=inside)
