"""How arrays of a pass get to the device: without the host waiting for the copy."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of an array on a device. To a GPU it goes from pinned memory, behind the work that is queued there."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
