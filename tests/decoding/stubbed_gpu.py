"""A pytest plugin that runs tests/test_gpu.py on a CPU.

`.cuda()` does nothing, and sdpa computes scores itself.
"""

from typing import Any

import torch

from raypd.decoding.attention import sdpa


def _unmoved(self: Any, *_: object, **__: object) -> Any:
    return self


torch.set_num_threads(1)
torch.cuda.is_available = lambda: True  # type: ignore[assignment]
torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
torch.Tensor.cuda = _unmoved  # type: ignore[assignment,method-assign]
torch.nn.Module.cuda = _unmoved  # type: ignore[assignment,method-assign]
sdpa._has_kernel = lambda *_: False
