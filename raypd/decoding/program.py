"""What a decoding method is: a coroutine that yields feeds and is sent predictions.

It reads like its paper's pseudo-code and knows nothing of batches, devices or caches
(methods/autoregressive.py is the shortest). The engine packs many programs' feeds into one forward
pass; tokens see tokens of the same program alone, as `visibility` says.
"""

from collections.abc import Generator, Mapping, Sequence
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
        """What may follow behind last hidden states [hidden size]: ids for each, in the order of
        the tree's nodes.
        """


@dataclass
class DraftRequest:
    """Asks `heads` what may follow; they run once for all programs of a step that name the same
    heads and tree.
    """

    heads: Heads
    hidden: Sequence[torch.Tensor]  # [hidden size] each, as they came in `Predictions.hidden`
    tree: Any


@dataclass
class Feed:
    """The tokens that a program puts through the model in one step.

    Tokens stand in such an order that none sees a later one of the same feed: a long feed goes in
    chunks. `reach`: pairs (query segment, key segment) added to those already known; (0, 0) begins
    as CAUSAL, pairs never named are HIDDEN. `draft` asks heads between two feeds: such a feed holds
    no tokens, takes no pass, and is never the first. `pattern`, in a first feed: a regular
    expression of all that is to be decoded, ANY_OBJECT, or for a server a JSON Schema: for another
    engine that holds an answer to one by itself; this one reads `allowed_token_ids`.
    """

    tokens: Sequence[int]  # [n]
    positions: Sequence[int]  # [n] virtual (RoPE and causality)
    segments: Sequence[int] | None = None  # [n]; None: all in segment 0
    reach: dict[tuple[int, int], Reach] = field(default_factory=dict)
    # Indices of tokens behind which a next one is wanted, in the order of predictions.
    sample_at: Sequence[int] = ()
    # For each of `sample_at`; None: any token.
    allowed_token_ids: Sequence[AllowedTokens | None] | None = None
    # Leading tokens of a first feed, in common with other programs: segment 0, positions 0, 1, ...
    shared: int = 0
    # Rows (0: the program's first token ever fed) that leave the cache before this feed.
    drop: Sequence[int] = ()
    # {row: segment} tokens that change segment before this feed.
    move: dict[int, int] = field(default_factory=dict)
    want_logits: bool = False  # for a method that verifies
    want_hidden: bool = False  # last hidden states, which the output embeddings read, for heads
    draft: DraftRequest | None = None
    # Tokens of the answer so far, where feeds hold drafts, too; None: all of later feeds.
    decoded: int | None = None
    pattern: str | Mapping[str, Any] | None = None


@dataclass
class Predictions:
    """What the model says after a feed; in each list one entry for each of its `sample_at`."""

    tokens: list[int]  # picked by the program's sampling
    # Under the model (temperature 1, among `allowed_token_ids`; see `sample`)
    logprobs: list[float]
    # [vocabulary] each, on the model's device, where the feed wanted them.
    logits: list[torch.Tensor] | None = None
    hidden: list[torch.Tensor] | None = None  # [hidden size] each, likewise
    # What heads drafted for each hidden state of `draft`.
    drafts: list[list[int]] = field(default_factory=list)


Program = Generator[Feed, Predictions, _T]
