"""Functions in C (native.c), for bfloat16 on processors with AVX-512 BF16.

The machine's C compiler compiles them when they are first needed, in about a second, and they are
kept in ~/.cache/raypd. Callers work without them if `refusal` says why they cannot run.
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
    """Tell whether the processor has a capability, by torch's name for it."""
    return bool(torch.cpu.get_capabilities().get(capability, False))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Apply the rotary embedding in place.

    Args:
        x: [tokens, heads, head_dim] in bfloat16, with a last stride of 1; head_dim is a multiple of
            32.
        cos: [tokens, head_dim], as transformers' rotary embeddings return it.
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
    """Pick the most likely tokens, the first one among equals.

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
        style: 0 to round before the product too; 1 to round once; 2 to round once, and to multiply
            by 1 + weight.
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
        x: [..., inputs]; their number is even.
        panels: The weight, [panels, inputs / 2, PANEL, 2].
        bias: float32 [panels * PANEL]
        outputs: How many outputs there are; the others of the last panel are left out.
        gate: 0 for none, else half of each panel gates the other half: 1 by SwiGLU, 3 by gelu.
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
    """Compute linear layers side by side, each on rows of its own.

    Args:
        x: [rows, inputs]
        starts: Where the rows of each layer begin, and where the last ones end, int64 [layers + 1].
        panels: The weights, [layers, panels, inputs / 2, PANEL, 2].
        bias: float32 [layers, panels * PANEL]
        outputs: How many outputs a layer has; the others of the last panel are left out.
        gate: 0 for none, else half of each panel gates the other half: 1 by SwiGLU, 2 clamped as in
            gpt-oss, by `alpha` and `limit`, 3 by gelu.
        alpha: The factor of the gate in its sigmoid.
        limit: The bound of the gate and of what it gates.

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
    """Add to the residual what the experts of each token gave, and round once.

    Args:
        rows: What the experts gave, bfloat16 [rows, dim]; dim is a multiple of 16.
        numbers: The rows of each token, int64 [tokens, k].
        weights: What they are multiplied by, float32 [tokens, k].
        residual: bfloat16 [tokens, dim]
    """
    out = torch.empty_like(residual)
    sizes = (*numbers.shape, rows.shape[1])
    _call("mix", [rows, numbers, weights, residual.contiguous(), out], sizes)
    return out


def gated(x: torch.Tensor, gate: int) -> torch.Tensor:
    """Compute silu(gate) * up or gelu(gate) * up.

    Args:
        x: Gate and up, one behind the other: bfloat16 [..., 2 * dim], contiguous; dim is a multiple
            of 16.
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
    """Multiply sums of products of int8 by the scales of their rows and columns.

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


class Runs(NamedTuple):
    """Runs of recurrent layers that do not continue from each other."""

    starts: torch.Tensor  # The slots of the states from which they continue, int64 [runs].
    ends: torch.Tensor  # The slots into which the states behind them go, int64 [runs].
    offsets: torch.Tensor  # Where the rows of each run begin and end in `rows`, int64 [runs + 1].
    rows: torch.Tensor  # int64 [tokens of all runs]


def delta_scan(
    states: torch.Tensor,
    runs: Runs,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Apply the gated delta rule to runs, token by token. All tensors are contiguous in float32.

    Args:
        states: [slots, heads, key_dim, value_dim]; value_dim is a multiple of 16.
        runs: The runs.
        query: [tokens, key_heads, key_dim]
        key: [tokens, key_heads, key_dim]
        value: [tokens, heads, value_dim]
        kept: What remains of the state at each token, [tokens, heads].
        beta: The rate of writing, [tokens, heads].
        out: [tokens, heads, value_dim]; the rows of the runs are written.
    """
    sizes = (len(runs.starts), states.shape[1], key.shape[1], *states.shape[2:])
    _call("delta_scan", [states, *runs, query, key, value, kept, beta, out], sizes)


def mamba_scan(
    states: torch.Tensor,
    runs: Runs,
    written: torch.Tensor,
    key: torch.Tensor,
    query: torch.Tensor,
    kept: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Apply the recurrence of Mamba-2 to runs, as `delta_scan`.

    Args:
        states: [slots, heads, head_dim, state size]; the state size is a multiple of 16.
        runs: The runs.
        written: Inputs times their steps, [tokens, heads, head_dim].
        key: [tokens, groups, state size]
        query: [tokens, groups, state size]
        kept: What remains of the state at each token, [tokens, heads].
        out: [tokens, heads, head_dim]; the rows of the runs are written.
    """
    sizes = (len(runs.starts), states.shape[1], key.shape[1], *states.shape[2:])
    _call("mamba_scan", [states, *runs, written, key, query, kept, out], sizes)


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
        # Other processes may compile the same file at the same time, so it appears at once.
        output.replace(target)
