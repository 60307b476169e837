"""What a decoding method is: a coroutine that yields feeds and receives predictions.

A method reads like the pseudo-code in its paper and knows nothing about batches, devices or caches;
methods/guided.py is the shortest. The engine packs the feeds of many programs into one forward
pass. A token sees only tokens of its own program, by the rule in visibility.py.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.visibility import Reach

_T = TypeVar("_T")
ANY_OBJECT = r"\{.*\}"  # A pattern that means any JSON object.


class ProgramError(Exception):
    """A program asked for something that the engine cannot do."""


class StatesFull(ProgramError):
    """A program's first feed opens more segments than recurrent states fit into memory.

    It is raised in the program, at its first feed. A program that can open fewer segments at a time
    yields a different first feed instead.

    Attributes:
        segments: The largest number of segments that may begin at a time.
    """

    def __init__(self, message: str, segments: int) -> None:
        super().__init__(message)
        self.segments = segments


class Drafter(Protocol):
    """Guesses the next tokens of several texts at once: Medusa's heads, or a draft model."""

    def draft(self, contexts: Sequence[Any], plan: Any) -> list[list[int]]:
        """Guess what may follow.

        Args:
            contexts: What the drafter guesses from, one for each text: a last hidden state [hidden
                size] for Medusa's heads, a `DraftedText` for a draft model.
            plan: What is to be guessed: a tree of guesses for Medusa's heads, None for a draft
                model.

        Returns:
            Token ids for each context.
        """


@dataclass
class DraftRequest:
    """Asks a drafter what may follow.

    The drafter runs once for all programs of a step that name it with the same plan.

    Attributes:
        drafter: The drafter that guesses.
        contexts: One for each text of the program, as `Drafter.draft` takes them.
        plan: What is to be guessed.
    """

    drafter: Drafter
    contexts: Sequence[Any]
    plan: Any = None


@dataclass
class Feed:
    """The tokens that a program puts through the model in one step.

    The tokens must be ordered so that none sees a later one of the same feed, because a long feed
    goes through the model in chunks.
    """

    # Token ids, [n].
    tokens: Sequence[int]
    # Virtual positions, for rotary embeddings and causality, [n].
    positions: Sequence[int]
    # The segment of each token, [n]; None means that all are in segment 0.
    segments: Sequence[int] | None = None
    # Values by (query segment, key segment), added to those set before. (0, 0) starts as CAUSAL; a
    # pair that has never been set is HIDDEN.
    reach: dict[tuple[int, int], Reach] = field(default_factory=dict)
    # For each segment that begins in this feed or in a later one, the row from which its first
    # token continues. Recurrent layers follow this; attention reads only `reach`. A segment that is
    # not named begins a new text, and in a model with recurrent layers sees no other segment.
    continues: Mapping[int, int] = field(default_factory=dict)
    # Segments that get no token after this feed, so that their recurrent states are freed.
    closed: Sequence[int] = ()
    # Whether the next feed may drop rows of this one. The recurrent state before it is then kept.
    may_drop: bool = False
    # The indices of the tokens for which a next token is to be predicted, in the order of the
    # predictions.
    sample_at: Sequence[int] = ()
    # The tokens allowed next, for each entry of `sample_at`; None allows any token.
    allowed_token_ids: Sequence[AllowedTokens | None] | None = None
    # The number of leading tokens of a first feed that other programs have in common with this one.
    # They must be in segment 0 at positions 0, 1, 2, ...
    shared: int = 0
    # Rows that leave the cache before this feed. Row 0 is the first token the program ever fed.
    drop: Sequence[int] = ()
    # New segments of earlier rows, set before this feed: {row: segment}.
    move: dict[int, int] = field(default_factory=dict)
    # Whether the predictions include logits, which a method that verifies drafts needs.
    want_logits: bool = False
    # Whether the predictions include the last hidden states, which heads need.
    want_hidden: bool = False
    # Asks a drafter for drafts between two feeds. Such a feed contains no tokens, takes no pass,
    # and is never a program's first feed.
    draft: DraftRequest | None = None
    # The program has no tokens to feed. It keeps its cache until `Engine.resume`, and is then sent
    # empty predictions.
    pause: bool = False
    # The number of tokens of the answer so far, for a method whose feeds also contain drafts. None
    # counts all tokens of later feeds.
    decoded: int | None = None
    # In a first feed: the form of everything that will be decoded, as a regular expression,
    # ANY_OBJECT, or a JSON Schema. It is for other engines, which enforce a form themselves; this
    # engine reads `allowed_token_ids`.
    pattern: str | Mapping[str, Any] | None = None


@dataclass
class Predictions:
    """The model's response to a feed, with one entry per entry of `sample_at` in each list."""

    # Token ids picked by the program's sampling.
    tokens: list[int]
    # The model's log-probabilities at temperature 1, among `allowed_token_ids` (see `sample`).
    logprobs: list[float]
    # [vocabulary] each, on the model's device, if the feed wanted them.
    logits: list[torch.Tensor] | None = None
    # [hidden size] each, on the model's device, if the feed wanted them.
    hidden: list[torch.Tensor] | None = None
    # What was drafted for each context of the feed's `draft`.
    drafts: list[list[int]] = field(default_factory=list)


Program = Generator[Feed, Predictions, _T]
