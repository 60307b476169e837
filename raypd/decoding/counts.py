"""What an engine reports of a program. No torch here: `model: fake` has none."""

from dataclasses import dataclass
from typing import Any


@dataclass
class TokenCounts:
    prefill_tokens: int = 0  # of its first feed, put through the model for it
    shared_tokens: int = 0  # of its first feed, in the cache already, computed for another program
    # Of its answer, end tokens too: no mask, no draft that was rejected, but the keys that `guided`
    # is given.
    decode_tokens: int = 0
    steps: int = 0  # feeds that were answered


@dataclass
class Finished:
    """A program that ended: with its answer, or with the exception that it raised."""

    tag: Any
    answer: Any
    error: Exception | None
    counts: TokenCounts
