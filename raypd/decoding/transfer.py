"""Copies between host and device without blocking the host."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device.

    A copy to a GPU goes through pinned memory and is queued after the work already submitted.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    # numpy copies with one thread. Waking up all of torch's threads would take longer than the
    # copy.
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> Callable[[], list[Any]]:
    """Start copying a tensor to the host.

    Returns:
        A function that waits for the copy and returns the numbers as nested lists.
    """
    if tensor.device.type != "cuda":
        return tensor.tolist
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))

    def read() -> list[Any]:
        copied.synchronize()
        return pinned.tolist()

    return read
