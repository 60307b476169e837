"""A pytest plugin that runs tests/test_gpu.py on a CPU: `.cuda()` is nothing, and sdpa writes
scores out.
"""

import torch

from raypd.decoding.attention import sdpa

torch.set_num_threads(1)
torch.cuda.is_available = lambda: True  # type: ignore[assignment]
torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
sdpa._has_kernel = lambda *_: False
