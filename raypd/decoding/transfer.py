"""How arrays of a pass get to the device, and its results back: without the host waiting for the copy."""

from typing import Any

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of an array on a device. To a GPU it goes from pinned memory, behind the work that is queued there."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class ToHost:
    """A tensor on its way to the host, which waits for it when it reads it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> list[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor.tolist()
