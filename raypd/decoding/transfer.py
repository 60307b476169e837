"""How arrays of a pass get to the device, and its results back: without the host waiting for the
copy.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of an array on a device.

    To a GPU it goes from pinned memory, behind the work that is queued there.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    # Torch would copy with all its threads, which take longer to wake up.
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> Callable[[], list[Any]]:
    """Its numbers, which are on their way: who reads them waits."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))

    def read() -> list[Any]:
        copied.synchronize()
        return copy.tolist()

    return read
