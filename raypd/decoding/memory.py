"""When the device has no memory for a pass: how many tokens a pass may hold from then on."""

import contextlib
import logging
from pathlib import Path

import torch

LEAST_TOKENS = 16  # of a pass: below this, what does not fit is the program and not the pass
_CALM_PASSES = 128  # good passes before more is tried again; twice as many after every failure
_MOST_AT_FLOOR = 3  # smallest passes that fail one after the other: another process has the memory
_SPARE = 0.1  # of the main memory: what is left to everything else
# Of a GPU's: for gaps between what is allocated, and for kernels that are loaded later.
_MARGIN = 0.05
_MACHINE = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")

_log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device's memory did not suffice; some backends raise a
    plain RuntimeError.
    """
    texts = ("out of memory", "cublas_status_alloc_failed")
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)
    )


def slots_that_fit(free: int, total: int, peak: int, slot: int) -> int:
    """Slots, of `slot` bytes each, in what is `free` of a GPU's `total` memory, less a pass's
    `peak` and a margin.
    """
    return max(0, int(free - peak - _MARGIN * total)) // slot


def has_main_memory(size: int) -> bool:
    """Whether so many bytes are free, beside a spare part of the machine's, or its container's,
    memory: an operating system hands out more than it has, and ends the process when that is used,
    where a GPU's driver would refuse.
    """
    sizes: list[tuple[int, int]] = []  # (bytes, free ones), as far as the system tells
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":") for line in _MACHINE.read_text().splitlines())
        sizes.append(
            (1024 * int(lines["MemTotal"].split()[0]), 1024 * int(lines["MemAvailable"].split()[0]))
        )
    # Of the process's control group (version 2)
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit = int((_CONTAINER / "memory.max").read_text())  # "max": none
        held = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        sizes.append(
            (
                limit,
                limit
                - int((_CONTAINER / "memory.current").read_text())
                + int(held["inactive_file"]),
            )
        )
    return all(size <= free - _SPARE * total for total, free in sizes)


class TokenBudget:
    """Tokens of one pass, at most `most`: halved when a pass does not fit the memory, doubled after
    many that did.
    """

    def __init__(self, limit: int) -> None:
        self.most = self.tokens = limit
        self._calm, self._patience = 0, _CALM_PASSES
        self._at_floor = 0

    @property
    def hopeless(self) -> bool:
        """Whether it is not a matter of single programs: the smallest passes fail one after the
        other.
        """
        return self._at_floor > _MOST_AT_FLOOR

    def fitted(self) -> None:
        self._calm += 1
        self._at_floor = 0
        if self.tokens < self.most and self._calm >= self._patience:
            self.tokens, self._calm = min(self.most, 2 * self.tokens), 0

    def too_much(self, tokens: int) -> bool:
        """Halves after a pass of so many tokens that did not fit.

        False where it was as small as a pass gets.
        """
        self._calm, self._patience = 0, 2 * self._patience
        if tokens <= LEAST_TOKENS:
            self._at_floor += 1
            return False
        self.tokens = max(LEAST_TOKENS, min(tokens, self.tokens) // 2)
        _log.warning(
            "out of memory in a step of %d tokens; from here on at most %d", tokens, self.tokens
        )
        return True
