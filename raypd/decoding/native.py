"""Functions in C (native.c), for bfloat16 on processors with AVX-512 BF16.

The machine's C compiler compiles them on first use, in about a second, and the result is kept in
~/.cache/raypd. If `refusal` gives a reason why they cannot run, callers do without them.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = [
    "-O3",
    "-std=c11",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bf16",
    "-mfma",
]
# torch has loaded the OpenMP runtime, so the functions use its threads.
_LINK = ["-fopenmp", "-shared", "-fPIC", "-lm"]
PANEL = 32  # WIDTH in native.c
MOST_KEYS = 256  # In native.c: a head of the gated delta rule has at most this many.
MOST_INPUTS = 7  # In native.c: a convolution reads at most this many before a token.


def refusal() -> str | None:
    """Return why the functions cannot run on this machine; None if they can, and are compiled."""
    if not has("avx512_bf16"):
        return "needs a processor with AVX-512 BF16"
    try:
        library()
    except (OSError, RuntimeError) as error:  # A RuntimeError means there is no home folder.
        return f"cannot be compiled ({error})"
    return None


def has(capability: str) -> bool:
    """Return whether the processor has a capability, given by torch's name for it."""
    return bool(torch.cpu.get_capabilities().get(capability, False))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Apply the rotary embedding in place.

    Args:
        x: [tokens, heads, head_dim] in bfloat16, with a last stride of 1; head_dim is a multiple of
            32.
        cos: [tokens, head_dim], as returned by transformers' rotary embeddings.
        sin: [tokens, head_dim]
    """
    sizes = (*x.shape, x.stride(0), x.stride(1))
    _call("rotate", [x, cos.contiguous(), sin.contiguous()], sizes)


def store(slots: torch.Tensor, new: torch.Tensor, stored: torch.Tensor) -> None:
    """Copy keys or values into the cache.

    Args:
        slots: int64 [tokens]
        new: bfloat16 [tokens, heads, head_dim], with a last stride of 1.
        stored: bfloat16 [slots, heads, head_dim], likewise.
    """
    sizes = (*new.shape, *new.stride()[:2], *stored.stride()[:2])
    _call("store", [new, slots, stored], sizes)


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick the most likely tokens; among equals, the first one.

    Args:
        logits: bfloat16 [rows, vocabulary], contiguous.

    Returns:
        Tokens int64 [rows], and their log-probabilities float32 [rows].
    """
    tokens = torch.empty(len(logits), dtype=torch.int64)
    logprobs = torch.empty(len(logits), dtype=torch.float32)
    _call("greedy", [logits, tokens, logprobs], logits.shape)
    return tokens, logprobs


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, style: int = 0) -> torch.Tensor:
    """Divide the rows of x by their root mean square, and multiply them by a weight.

    Args:
        x: [..., dim]; dim is a multiple of 16.
        weight: [dim]
        eps: Added to the mean square.
        style: 0 to also round before the product; 1 to round once; 2 to round once and multiply by
            1 + weight.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    _call("rms_norm", [rows, weight, out], (*rows.shape, style), eps)
    return out.view(x.shape)


def linear(
    x: torch.Tensor,
    panels: torch.Tensor,
    bias: torch.Tensor | None,
    outputs: int,
    gate: int = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a linear layer in bfloat16.

    Args:
        x: [..., inputs]; the number of inputs is even.
        panels: The weight, [panels, inputs / 2, PANEL, 2].
        bias: float32 [panels * PANEL]
        outputs: The number of outputs; the rest of the last panel is left out.
        gate: 0 for none; otherwise half of each panel gates the other half: 1 by SwiGLU, 3 by gelu.
        residual: [..., outputs], added before rounding; not with a gate.

    Returns:
        [..., outputs], or [..., outputs / 2] with a gate.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    width = outputs // 2 if gate else outputs
    out = torch.empty(len(rows), width, dtype=x.dtype)
    if residual is not None:
        residual = residual.contiguous()
    _call("linear", [rows, panels, bias, residual, out], (*rows.shape, outputs, gate))
    return out.view(*x.shape[:-1], width)


def grouped_linear(
    x: torch.Tensor,
    starts: torch.Tensor,
    panels: torch.Tensor,
    bias: torch.Tensor | None,
    outputs: int,
    gate: int = 0,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> torch.Tensor:
    """Compute several linear layers in one call, each on its own rows.

    Args:
        x: [rows, inputs]
        starts: Where the rows of each layer begin, and where the last ones end, int64 [layers + 1].
        panels: The weights, [layers, panels, inputs / 2, PANEL, 2].
        bias: float32 [layers, panels * PANEL]
        outputs: The number of outputs of a layer; the rest of the last panel is left out.
        gate: 0 for none; otherwise half of each panel gates the other half: 1 by SwiGLU, 2 clamped
            as in gpt-oss, by `alpha` and `limit`, 3 by gelu.
        alpha: The factor of the gate inside the sigmoid.
        limit: The bound of the gate and of the gated values.

    Returns:
        [rows, outputs], or [rows, outputs / 2] with a gate.
    """
    width = outputs // 2 if gate else outputs
    out = torch.empty(len(x), width, dtype=x.dtype)
    sizes = (len(panels), x.shape[1], outputs, gate)
    _call("grouped_linear", [x.contiguous(), panels, bias, out, starts], sizes, alpha, limit)
    return out


def mix(
    rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """Add the outputs of each token's experts to the residual, and round once.

    Args:
        rows: The outputs of the experts, bfloat16 [rows, dim]; dim is a multiple of 16.
        numbers: The row indices of each token, int64 [tokens, k].
        weights: The weights of these rows, float32 [tokens, k].
        residual: bfloat16 [tokens, dim]
    """
    out = torch.empty_like(residual)
    sizes = (*numbers.shape, rows.shape[1])
    _call("mix", [rows, numbers, weights, residual.contiguous(), out], sizes)
    return out


def gated(x: torch.Tensor, gate: int) -> torch.Tensor:
    """Compute silu(gate) * up or gelu(gate) * up.

    Args:
        x: Gate and up, concatenated: bfloat16 [..., 2 * dim], contiguous; dim is a multiple of 16.
        gate: 1 for silu, 3 for gelu by tanh.

    Returns:
        [..., dim]
    """
    dim = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], dim, dtype=x.dtype)
    _call("gated", [x, out], (out.numel() // dim, dim, gate))
    return out


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to int8.

    Args:
        x: bfloat16 [rows, dim]; dim is a multiple of 16.

    Returns:
        int8 [rows, dim], and the float32 scales [rows] by which they are to be multiplied.
    """
    out = torch.empty_like(x, dtype=torch.int8)
    scale = torch.empty(len(x), dtype=torch.float32)
    _call("quantize", [x, out, scale], x.shape)
    return out, scale


def scaled(
    sums: torch.Tensor, row_scales: torch.Tensor, column_scales: torch.Tensor
) -> torch.Tensor:
    """Multiply int8 dot products by the scales of their rows and columns.

    Args:
        sums: int32 [rows, columns]; the number of columns is a multiple of 16.
        row_scales: float32 [rows]
        column_scales: float32 [columns]

    Returns:
        bfloat16 [rows, columns]
    """
    out = torch.empty_like(sums, dtype=torch.bfloat16)
    _call("scale", [sums, row_scales, column_scales, out], sums.shape)
    return out


class RecurrentRuns(NamedTuple):
    """Runs of recurrent layers.

    The runs of a group are computed one after the other, each after the runs that it continues.
    """

    starts: torch.Tensor  # The slots of the states from which they continue, int64 [runs].
    ends: torch.Tensor  # The slots into which the states after them go, int64 [runs].
    offsets: torch.Tensor  # Where the rows of each run begin and end in `rows`, int64 [runs + 1].
    rows: torch.Tensor  # int64 [tokens of all runs]
    groups: torch.Tensor  # Where the runs of each group begin and end, int64 [groups + 1].


class Taps(NamedTuple):
    """The inputs that a convolution reads before each row.

    They are row indices of the pass, or -1 - n for stored input n.
    """

    taps: torch.Tensor  # int64 [rows, inputs]
    # The slots whose stored inputs change, int64 [slots], and what goes there, [slots, inputs].
    ends: torch.Tensor
    last: torch.Tensor


def convolve(
    values: torch.Tensor,
    store: torch.Tensor,
    taps: Taps,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Apply a causal convolution to each channel, along the chains, and store its last inputs.

    Args:
        values: bfloat16 [rows, channels], with a last stride of 1; the number of channels is a
            multiple of 16.
        store: The stored inputs, bfloat16 [slots, inputs, channels], contiguous.
        taps: What the convolution reads; there are at most 7 inputs before a row.
        weight: float32 [inputs + 1, channels], contiguous.
        bias: float32 [channels]
        silu: Whether SiLU follows.

    Returns:
        float32 [rows, channels]
    """
    rows, channels = values.shape
    inputs = store.shape[1]
    out = torch.empty(rows, channels)
    scratch = store.new_empty(len(taps.ends), inputs, channels)
    tensors = [values, store, *taps, scratch, weight, bias, out]
    sizes = (rows, values.stride(0), inputs, channels, len(taps.ends), silu)
    _call("convolve", tensors, sizes)
    return out


def delta_rates(
    write: torch.Tensor, forget: torch.Tensor, speed: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the rates of the gated delta rule.

    Args:
        write: Rates of writing before the sigmoid, bfloat16 [rows, heads].
        forget: Rates of forgetting before the softplus, with the strides of `write`.
        speed: The factor of the softplus, float32 [heads].
        offset: What is added before the softplus, float32 [heads].

    Returns:
        What remains of the state at each token, and the rates of writing, float32 [rows, heads].
    """
    kept = torch.empty(write.shape)
    beta = torch.empty(write.shape)
    sizes = (len(write), write.stride(0), write.shape[1])
    _call("delta_rates", [write, forget, speed, offset, kept, beta], sizes)
    return kept, beta


def mamba_rates(
    steps: torch.Tensor, speed: torch.Tensor, offset: torch.Tensor, limits: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the steps of Mamba-2.

    Args:
        steps: Step sizes before the softplus, bfloat16 [rows, heads].
        speed: The rate of forgetting, float32 [heads].
        offset: What is added before the softplus, float32 [heads].
        limits: The smallest and the largest step.

    Returns:
        The steps, and what remains of the state at each token, float32 [rows, heads].
    """
    kept = torch.empty(steps.shape)
    out = torch.empty(steps.shape)
    sizes = (len(steps), steps.stride(0), steps.shape[1])
    _call("mamba_rates", [steps, speed, offset, kept, out], sizes, *limits)
    return out, kept


def delta_scan(
    states: torch.Tensor,
    runs: RecurrentRuns,
    mixed: torch.Tensor,
    kept: torch.Tensor,
    beta: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """Apply the gated delta rule to runs, token by token. All tensors are contiguous and float32.

    Args:
        states: [slots, heads, key_dim, value_dim]; both are multiples of 16, and key_dim is at
            most 256.
        runs: The runs.
        mixed: Queries, keys and values, concatenated, [tokens, 2 * key_heads * key_dim + heads *
            value_dim]. Queries and keys are normed here.
        kept: What remains of the state at each token, [tokens, heads].
        beta: The rate of writing, [tokens, heads].
        key_heads: The number of heads of queries and keys.

    Returns:
        [tokens, heads, value_dim]; the rows of the runs are written.
    """
    _, heads, key_dim, value_dim = states.shape
    out = torch.empty(len(mixed), heads, value_dim)
    sizes = (len(runs.groups) - 1, heads, key_heads, key_dim, value_dim)
    _call("delta_scan", [states, *runs, mixed, kept, beta, out], sizes)
    return out


def mamba_scan(
    states: torch.Tensor,
    runs: RecurrentRuns,
    mixed: torch.Tensor,
    steps: torch.Tensor,
    kept: torch.Tensor,
    through: torch.Tensor,
    key_groups: int,
) -> torch.Tensor:
    """Apply the recurrence of Mamba-2 to runs, like `delta_scan`.

    Args:
        states: [slots, heads, head_dim, state size]; the state size is a multiple of 16.
        runs: The runs.
        mixed: The inputs, what is written into the state (B) and what is read from it (C),
            concatenated, [tokens, heads * head_dim + 2 * key_groups * state size].
        steps: [tokens, heads]
        kept: What remains of the state at each token, [tokens, heads].
        through: The share of the inputs that goes to the output (D), [heads].
        key_groups: The number of groups of heads that share what they read and write.

    Returns:
        [tokens, heads, head_dim]; the rows of the runs are written.
    """
    _, heads, head_dim, state_size = states.shape
    out = torch.empty(len(mixed), heads, head_dim)
    sizes = (len(runs.groups) - 1, heads, key_groups, head_dim, state_size)
    _call("mamba_scan", [states, *runs, mixed, steps, kept, through, out], sizes)
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
        x: float32 [rows, parts, dim], contiguous; dim is a multiple of 16.
        gate: bfloat16 [rows, parts * dim], with a last stride of 1.
        weight: bfloat16 [dim], or [parts * dim] for a weight of each part; None for no norm.
        eps: Added to the mean squares.
        gate_first: Whether the gate is applied before the norm.

    Returns:
        bfloat16 [rows, parts * dim]
    """
    rows, parts, dim = x.shape
    out = torch.empty(rows, parts * dim, dtype=gate.dtype)
    apart = weight is not None and len(weight) > dim
    sizes = (rows, gate.stride(0), parts, dim, gate_first, apart)
    _call("gated_norm", [x, gate, weight, out], sizes, eps)
    return out


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply x by the sigmoid of a gate, in place.

    Args:
        x: bfloat16 [rows, dim], contiguous; dim is a multiple of 16.
        gate: bfloat16 [rows, dim], with a last stride of 1.
    """
    _call("sigmoid_gate", [x, gate], (len(x), gate.stride(0), x.shape[1]))


def _call(
    function: str, tensors: list[torch.Tensor | None], sizes: tuple[int, ...], *numbers: float
) -> None:
    """Call a C function with tensors, sizes, the number of threads, and floating-point numbers."""
    pointers = [
        None if tensor is None else ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors
    ]
    integers = map(ctypes.c_int64, (*sizes, torch.get_num_threads()))
    floats = map(ctypes.c_float, numbers)
    getattr(library(), f"raypd_{function}")(*pointers, *integers, *floats)


@cache
def library() -> ctypes.CDLL:
    """Load the compiled functions, and compile them if necessary.

    Raises:
        OSError: If there is no compiler, it fails, or its output cannot be kept or loaded.
    """
    settings = " ".join([*_FLAGS, *_LINK, platform.platform()])
    digest = hashlib.sha256(_SOURCE.read_bytes() + settings.encode()).hexdigest()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    compiled = caches / "raypd" / f"native-{digest[:16]}.so"
    if not compiled.exists():
        _compile(compiled)
    return ctypes.CDLL(str(compiled))


def _compile(target: Path) -> None:
    """Compile native.c into a shared library."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("there is no C compiler: cc, gcc or one that the variable CC names")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [*compiler.split(), *_FLAGS, str(_SOURCE), *_LINK, "-o", str(output)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            message = process.stderr.strip()[-300:]
            raise OSError(f"{command[0]} ended with {process.returncode}: {message}")
        # Other processes may compile the same file at the same time, so it is put in place
        # atomically.
        output.replace(target)
