"""What a program has cost, in tokens; without torch, for who only counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TokenCounts:
    """What a row has cost, in tokens put through the model: by its first feed, and by all later ones.

    `shared_tokens` were in the cache already, computed for another row.
    """

    prefill_tokens: int = 0
    shared_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
