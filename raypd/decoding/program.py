"""What a decoding method is: a coroutine that yields feeds and is sent predictions.

A method reads like its paper's pseudo-code and knows nothing of batches, devices or caches; the shortest one is
methods/autoregressive.py. The engine packs the feeds of many programs into one forward pass; tokens see tokens of the
same program alone, as `visibility` says.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.visibility import Reach

_T = TypeVar("_T")
ANY_OBJECT = r"\{.*\}"  # as a pattern: any JSON object


class Heads(Protocol):
    """What drafts behind last hidden states, as Medusa's heads do."""

    def draft(self, hidden: Sequence[torch.Tensor], tree: Any) -> list[list[int]]:
        """What may follow behind last hidden states [hidden size]: ids for each, in the order of the tree's nodes."""


@dataclass
class DraftRequest:
    """Asks `heads` what may follow behind last hidden states [hidden size], which came as `Predictions.hidden`.

    The engine runs heads once for all programs of a step that name the same heads and tree.
    """

    heads: Heads
    hidden: Sequence[torch.Tensor]
    tree: Any


@dataclass
class Feed:
    """The tokens that a program puts through the model in one step.

    Tokens stand in such an order that none sees a later one of the same feed: a long feed goes in chunks.

    Args:
        tokens, positions: [n] ids and virtual positions (RoPE and causality).
        segments: [n] segment of each token; None: all in segment 0.
        reach: {(query segment, key segment): Reach}, pairs added to those already known; pairs never named are HIDDEN,
            (0, 0) begins as CAUSAL.
        sample_at: indices into `tokens` behind which a next token is wanted; predictions come in this order.
        allowed_token_ids: for each of `sample_at` what may be chosen (None: any token).
        shared: how many leading tokens of a program's first feed other programs may have in common with it (an
            instruction). They must be segment 0 at positions 0, 1, 2, ..., are computed once, and stay for reuse.
        drop: row indices (0 is the program's first token ever fed) that leave the cache before this feed.
        move: {row index: segment} tokens that change segment before this feed.
        want_logits: also return the logits, for a method that verifies.
        want_hidden: also return the last hidden states, which the model's output embeddings read, for heads.
        draft: asks heads between two feeds; such a feed holds no tokens, takes no pass, and is never the first.
        pattern: in a first feed, a regular expression of all that is to be decoded (or ANY_OBJECT), for another engine
            that holds an answer to one by itself; this one reads `allowed_token_ids`.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    segments: Sequence[int] | None = None
    reach: dict[tuple[int, int], Reach] = field(default_factory=dict)
    sample_at: Sequence[int] = ()
    allowed_token_ids: Sequence[AllowedTokens | None] | None = None
    shared: int = 0
    drop: Sequence[int] = ()
    move: dict[int, int] = field(default_factory=dict)
    want_logits: bool = False
    want_hidden: bool = False
    draft: DraftRequest | None = None
    pattern: str | None = None


@dataclass
class Predictions:
    """What the model says after a feed; in each list one entry for each of its `sample_at`.

    Args:
        tokens: those picked by the program's sampling.
        logprobs: their log-probabilities under the model (temperature 1, among `allowed_token_ids`; see `sample`).
        logits: [vocabulary] each, on the model's device, where the feed wanted them.
        hidden: last hidden states [hidden size] each, on the model's device, where the feed wanted them.
        drafts: for each hidden state of the feed's `draft` the tokens that the heads drafted.
    """

    tokens: list[int]
    logprobs: list[float]
    logits: list[torch.Tensor] | None = None
    hidden: list[torch.Tensor] | None = None
    drafts: list[list[int]] = field(default_factory=list)


Program = Generator[Feed, Predictions, _T]
