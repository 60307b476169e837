"""Functions in C (native.c), for bfloat16 with AVX-512 BF16: compiled when first asked for, in
about a second, by the machine's C compiler, and kept in ~/.cache/raypd. Whoever uses them does
without where `refusal` says why.
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
# The OpenMP runtime is the one that torch has loaded, and its threads.
_LINK = ["-fopenmp", "-shared", "-fPIC", "-lm"]
PANEL = 32  # WIDTH in native.c


def refusal() -> str | None:
    """Why the functions cannot run on this machine; None: they can, and are compiled."""
    if not has("avx512_bf16"):
        return "needs a processor with AVX-512 BF16"
    try:
        library()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return f"cannot be compiled ({error})"
    return None


def has(capability: str) -> bool:
    return bool(torch.cpu.get_capabilities().get(capability, False))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotary embedding, in place: x [tokens, heads, head_dim] in bfloat16, head_dim a multiple of
    32 with stride 1; cos, sin [tokens, head_dim], as transformers' rotary embeddings give them.
    """
    _call("rotate", [x, cos.contiguous(), sin.contiguous()], (*x.shape, x.stride(0), x.stride(1)))


def store(slots: torch.Tensor, new: torch.Tensor, stored: torch.Tensor) -> None:
    """Puts `new` keys or values, bfloat16 [tokens, heads, head_dim], into `stored` at `slots`
    int64; last strides 1.
    """
    _call("store", [new, slots, stored], (*new.shape, *new.stride()[:2], *stored.stride()[:2]))


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of contiguous bfloat16 logits [rows, vocabulary]: the most likely tokens int64 [rows], of
    equals the first, and their log-probabilities float32 [rows].
    """
    tokens, logprobs = (
        torch.empty(len(logits), dtype=torch.int64),
        torch.empty(len(logits), dtype=torch.float32),
    )
    _call("greedy", [logits, tokens, logprobs], logits.shape)
    return tokens, logprobs


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows of x [..., dim] divided by their root mean square, times a weight [dim]; dim is a
    multiple of 16.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    _call("rms_norm", [rows, weight, out], rows.shape, eps)
    return out.view(x.shape)


def linear(
    x: torch.Tensor,  # [..., inputs] in bfloat16, inputs even
    # Bfloat16 [panels, inputs / 2, PANEL, 2]; outputs that fill the last panel are left out.
    panels: torch.Tensor,
    bias: torch.Tensor | None,  # float32 [panels * PANEL]
    outputs: int,
    gated: bool = False,  # each panel is PANEL / 2 outputs of the gate and those that they gate
    # Bfloat16 [..., outputs], added before rounding; not with `gated`.
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer: [..., outputs] in bfloat16, or SwiGLU of it: [..., outputs / 2]."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(len(rows), outputs // 2 if gated else outputs, dtype=x.dtype)
    residual = None if residual is None else residual.contiguous()
    _call("linear", [rows, panels, bias, residual, out], (*rows.shape, outputs, gated))
    return out.view(*x.shape[:-1], out.shape[1])


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [..., dim] in bfloat16, of both joined, [..., 2 * dim], contiguous; dim is a
    multiple of 16.
    """
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype)
    _call("swiglu", [x, out], (out.numel() // out.shape[-1], out.shape[-1]))
    return out


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of bfloat16 [rows, dim] as int8, and what each is to be multiplied by: float32 [rows];
    dim % 16 == 0.
    """
    out, scale = torch.empty_like(x, dtype=torch.int8), torch.empty(len(x), dtype=torch.float32)
    _call("quantize", [x, out, scale], x.shape)
    return out, scale


def scaled(sums: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Sums of products of int8 [rows, columns], times scales [rows] and [columns], in bfloat16;
    columns % 16 == 0.
    """
    out = torch.empty_like(sums, dtype=torch.bfloat16)
    _call("scale", [sums, rows, columns, out], sums.shape)
    return out


def _call(
    function: str, tensors: list[torch.Tensor | None], sizes: tuple[int, ...], *numbers: float
) -> None:
    pointers = [
        None if tensor is None else ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors
    ]
    integers = map(ctypes.c_int64, (*sizes, torch.get_num_threads()))
    getattr(library(), f"raypd_{function}")(*pointers, *integers, *map(ctypes.c_float, numbers))


@cache
def library() -> ctypes.CDLL:
    """Compiled if need be.

    Raises OSError: no compiler, it failed, or what it made cannot be kept or loaded.
    """
    source = _SOURCE.read_bytes()
    name = hashlib.sha256(
        source + " ".join([*_FLAGS, *_LINK, platform.platform()]).encode()
    ).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raypd"
    compiled = folder / f"native-{name}.so"
    if not compiled.exists():
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise OSError("there is no C compiler: cc, gcc or one that the variable CC names")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            into = Path(scratch) / compiled.name
            command = [*compiler.split(), *_FLAGS, str(_SOURCE), *_LINK, "-o", str(into)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(
                    f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
                )
            into.replace(compiled)  # other processes may make the same
    return ctypes.CDLL(str(compiled))
