"""What an engine reports about a program. `model: fake` needs it without torch."""

from dataclasses import dataclass
from typing import Any


@dataclass
class TokenCounts:
    """The tokens and steps that one program took."""

    # Tokens of the first feed that went through the model for this program.
    prefill_tokens: int = 0
    # Tokens of the first feed that were already in the cache, computed for another program.
    shared_tokens: int = 0
    # Tokens of the answer, including end tokens. Masks and rejected drafts do not count, but the
    # given keys of `guided` do.
    decode_tokens: int = 0
    # Feeds that were answered.
    steps: int = 0


@dataclass
class Finished:
    """A program that has ended, with its answer or the exception that it raised."""

    tag: Any
    answer: Any
    error: Exception | None
    counts: TokenCounts
