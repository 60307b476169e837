"""The device that is measured, and its clock."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Wait until the device has finished."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the seconds of a call until the device has finished, and what the call returned."""
    synchronize()
    start = time.perf_counter()
    result = function(*arguments)
    synchronize()
    return time.perf_counter() - start, result


def product_rate(size: int, rounds: int = 20) -> float:
    """Return the operations per second of a bfloat16 matrix product, the best of three.

    Args:
        size: The number of rows and columns.
        rounds: The number of products per measurement.
    """
    a, b = torch.randn(2, size, size, device=DEVICE, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(rounds):
            a @ b

    timed(products)
    return 2 * size**3 * rounds / min(timed(products)[0] for _ in range(3))


def release() -> None:
    """Give the memory of what was deleted back to the device."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def has_fp8() -> bool:
    """Tell whether the device multiplies in FP8; a CPU does so slowly, for rehearsals."""
    return DEVICE.type != "cuda" or torch.cuda.get_device_capability() >= (8, 9)


def has_triton() -> bool:
    """Tell whether triton's kernels run here."""
    return DEVICE.type == "cuda" and importlib.util.find_spec("triton") is not None


def gpu_uuid() -> str | None:
    """Return the UUID of the GPU; None without one."""
    if DEVICE.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(0).uuid)


def machine() -> str:
    """Return the device and the packages that are measured, in words."""
    packages = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    if importlib.util.find_spec("triton"):
        packages.append(f"triton {importlib.metadata.version('triton')}")
    name = "no GPU"
    if DEVICE.type == "cuda":
        name = torch.cuda.get_device_name()
    return ", ".join([name, *packages])
