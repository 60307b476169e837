"""When the device has no memory for a step: how many tokens a step may hold from then on."""

from __future__ import annotations

import logging

import torch

LEAST_TOKENS = 16  # of a step: below this, what does not fit is the program and not the step
_CALM_STEPS = 128  # good steps before more is dared again; twice as many after every failure

_MOST_AT_FLOOR = 3  # smallest steps that fail one after the other: somebody else has the memory

_log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device's memory did not suffice; some backends raise a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


class TokenBudget:
    """Most tokens of one step: halved when a step does not fit the memory, doubled again after many that did."""

    def __init__(self, most: int) -> None:
        self.most = self.tokens = most
        self._calm, self._patience = 0, _CALM_STEPS
        self._at_floor = 0

    @property
    def hopeless(self) -> bool:
        """Whether it is not a matter of single programs: the smallest steps fail one after the other."""
        return self._at_floor > _MOST_AT_FLOOR

    def fitted(self) -> None:
        """A step went through."""
        self._calm += 1
        self._at_floor = 0
        if self.tokens < self.most and self._calm >= self._patience:
            self.tokens, self._calm = min(self.most, 2 * self.tokens), 0

    def too_much(self, tokens: int) -> bool:
        """A step of so many tokens did not fit: halves. False when it was as small as a step gets."""
        self._calm, self._patience = 0, 2 * self._patience
        if tokens <= LEAST_TOKENS:
            self._at_floor += 1
            return False
        self.tokens = max(LEAST_TOKENS, min(tokens, self.tokens) // 2)
        _log.warning("out of memory in a step of %d tokens; from here on at most %d", tokens, self.tokens)
        return True
