"""What an engine says of a program that ended. No torch here: `model: fake` has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class TokenCounts:
    """What a row has cost, in tokens put through the model: by its first feed, and by all later ones.

    `shared_tokens` were in the cache already, computed for another row.
    """

    prefill_tokens: int = 0
    shared_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0


@dataclass
class Finished:
    """A program that ended: with its answer, or with the exception that it raised."""

    tag: Any
    answer: Any
    error: Exception | None
    counts: TokenCounts
