"""Memory of the device: what fits, and how large a pass may be after one did not fit."""

import contextlib
import logging
from pathlib import Path
from typing import NamedTuple

import torch

# A pass is never made smaller than this. If it does not fit, the program is too large.
MIN_PASS_TOKENS = 16
# The number of passes in a row that must fit before a larger one is tried. It doubles at every
# failure.
_CALM_PASSES = 128
# After this many failures in a row of the smallest passes, another process must hold the memory.
_MAX_FLOOR_FAILURES = 3
# The share of main memory that is left for everything else on the machine.
_SPARE_SHARE = 0.1
# The share of a GPU's memory that is reserved for fragmentation and for kernels loaded later.
_GPU_MARGIN = 0.05
# The free bytes that are assumed for a machine that does not report them.
_UNKNOWN_MEMORY = 4 << 30
_MEMORY_OF_MACHINE = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")

_log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that the device ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    # Some backends raise a plain RuntimeError.
    message = str(error).lower()
    return "out of memory" in message or "cublas_status_alloc_failed" in message


def slots_that_fit(free: int, total: int, peak: int, slot_bytes: int) -> int:
    """Return how many cache slots fit a GPU.

    Args:
        free: The bytes that are free.
        total: The bytes of the GPU's whole memory, of which a margin is kept free.
        peak: The bytes that the largest pass needs besides the cache.
        slot_bytes: The bytes of one slot in all layers.
    """
    usable = int(free - peak - _GPU_MARGIN * total)
    return max(0, usable) // slot_bytes


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device, without the spare share of main memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    memories = [memory for memory in (_machine_memory(), _container_memory()) if memory is not None]
    return int(min((m.free - _SPARE_SHARE * m.total for m in memories), default=_UNKNOWN_MEMORY))


class _MainMemory(NamedTuple):
    total: int  # bytes
    free: int  # bytes


def has_main_memory(size: int) -> bool:
    """Return whether `size` bytes are free in addition to the spare share of main memory.

    Where a GPU's driver would refuse, an operating system promises more memory than it has and
    kills the process that uses it. So the engine has to check first.
    """
    for memory in (_machine_memory(), _container_memory()):
        if memory is not None and size > memory.free - _SPARE_SHARE * memory.total:
            return False
    return True


def _machine_memory() -> _MainMemory | None:
    """Read the machine's memory; None if the system does not report it."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":") for line in _MEMORY_OF_MACHINE.read_text().splitlines())
        total = 1024 * int(lines["MemTotal"].split()[0])
        free = 1024 * int(lines["MemAvailable"].split()[0])
        return _MainMemory(total, free)
    return None


def _container_memory() -> _MainMemory | None:
    """Read the memory of the process's control group (version 2); None if it has no limit."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit = int((_CONTROL_GROUP / "memory.max").read_text())  # "max" means no limit.
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        statistics = (_CONTROL_GROUP / "memory.stat").read_text()
        values = dict(line.split() for line in statistics.splitlines())
        # The system takes cached files back when a process needs their memory.
        reclaimable = int(values["inactive_file"])
        return _MainMemory(limit, limit - used + reclaimable)
    return None


class TokenBudget:
    """The number of tokens that one pass may hold.

    It is halved when a pass does not fit into memory, and doubled after many passes that did.

    Attributes:
        limit: The largest number of tokens a pass may ever hold.
        tokens: The number of tokens a pass may hold now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens = limit
        self._calm_passes = 0
        self._patience = _CALM_PASSES
        self._floor_failures = 0

    @property
    def hopeless(self) -> bool:
        """Whether the smallest passes keep failing, whichever programs they contain."""
        return self._floor_failures > _MAX_FLOOR_FAILURES

    def record_success(self) -> None:
        """Count a pass that fitted into memory, and raise the budget after many of them."""
        self._calm_passes += 1
        self._floor_failures = 0
        if self.tokens < self.limit and self._calm_passes >= self._patience:
            self.tokens = min(self.limit, 2 * self.tokens)
            self._calm_passes = 0

    def shrink(self, tokens: int) -> bool:
        """Lower the budget after a pass that did not fit into memory.

        Args:
            tokens: The number of tokens in that pass.

        Returns:
            False if the pass was already as small as a pass gets.
        """
        self._calm_passes = 0
        self._patience *= 2
        if tokens <= MIN_PASS_TOKENS:
            self._floor_failures += 1
            return False
        self.tokens = max(MIN_PASS_TOKENS, min(tokens, self.tokens) // 2)
        _log.warning(
            "A pass of %d tokens ran out of memory. Passes now hold at most %d tokens.",
            tokens,
            self.tokens,
        )
        return True
