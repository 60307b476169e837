"""When the device has no memory for a pass: how many tokens a pass may hold from then on."""

from __future__ import annotations

import logging

import torch

LEAST_TOKENS = 16  # of a pass: below this, what does not fit is the program and not the pass
_CALM_PASSES = 128  # good passes before more is tried again; twice as many after every failure
_MOST_AT_FLOOR = 3  # smallest passes that fail one after the other: another process has the memory

_log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device's memory did not suffice; some backends raise a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


class TokenBudget:
    """Tokens of one pass, at most `most`: halved when a pass does not fit the memory, doubled after many that did."""

    def __init__(self, most: int) -> None:
        self.most = self.tokens = most
        self._calm, self._patience = 0, _CALM_PASSES
        self._at_floor = 0

    @property
    def hopeless(self) -> bool:
        """Whether it is not a matter of single programs: the smallest passes fail one after the other."""
        return self._at_floor > _MOST_AT_FLOOR

    def fitted(self) -> None:
        """A pass went through."""
        self._calm += 1
        self._at_floor = 0
        if self.tokens < self.most and self._calm >= self._patience:
            self.tokens, self._calm = min(self.most, 2 * self.tokens), 0

    def too_much(self, tokens: int) -> bool:
        """Halves after a pass of so many tokens that did not fit. False where it was as small as a pass gets."""
        self._calm, self._patience = 0, 2 * self._patience
        if tokens <= LEAST_TOKENS:
            self._at_floor += 1
            return False
        self.tokens = max(LEAST_TOKENS, min(tokens, self.tokens) // 2)
        _log.warning("out of memory in a step of %d tokens; from here on at most %d", tokens, self.tokens)
        return True
