"""A training example: the tokens that a decoding method would feed if the model answered correctly.

The method's own program runs with a teacher in place of the model. The number of a feed becomes the
step of its tokens, and the teacher's answers at `sample_at` become the targets. The attention mask
of training is therefore `visible`, applied to what decoding feeds.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from raypd.config import RunConfig
from raypd.decoding import (
    Feed,
    Predictions,
    Program,
    Prompt,
    autoregressive,
    grown,
    one_segment,
    visible,
)
from raypd.tasks import Document, encode

IGNORED = -100  # the label that torch's cross entropy leaves out
# Returns, for a feed, the gold tokens at its `sample_at`.
Teacher = Callable[[Feed], list[int]]


class Skip(Exception):
    """An example cannot be trained on.

    The message is the same for all examples that are skipped for one reason, so that they can be
    counted by it.
    """


@dataclass
class Example:
    """Tokens in the order in which decoding feeds them."""

    tokens: np.ndarray  # [n] int64, like the next three
    positions: np.ndarray
    segments: np.ndarray
    steps: np.ndarray
    reach: np.ndarray  # [segments, segments] of Reach
    # The index of a token -> the token to be predicted there. Other indices are not trained on.
    targets: dict[int, int]
    # The number of leading tokens that form an instruction shared with other examples.
    shared: int = 0
    # Index of a token -> the step before which it left the cache.
    until: dict[int, int] = field(default_factory=dict)
    # Segment -> the index of the token from which recurrent layers continue it.
    continues: dict[int, int] = field(default_factory=dict)
    # Log-probability of the targets under the model before a preference round.
    initial: float = 0.0
    # Draws what is trained on, where that is random (SPACE).
    draw: "Callable[[Example, torch.Generator | None], Example] | None" = None

    def __len__(self) -> int:
        return len(self.tokens)

    def drawn(self, generator: torch.Generator | None = None) -> "Example":
        """Return one draw of a random example, or any other example unchanged."""
        if self.draw is None:
            return self
        return self.draw(self, generator)

    def visibility(self) -> np.ndarray:
        """Return which tokens each own token sees, by the rule of decoding.

        Returns:
            bool [n - shared, n]: a row per token after the instruction.
        """
        own_tokens = slice(self.shared, None)
        visibility = visible(
            self.reach,
            self.segments[own_tokens],
            self.positions[own_tokens],
            self.segments,
            self.positions,
            self.steps[own_tokens],
            self.steps,
        )
        for key, step in self.until.items():
            visibility[self.steps[own_tokens] >= step, key] = False
        return visibility

    def ahead(self, distance: int) -> list[int]:
        """Return, for each target, the target `distance` tokens further along its path.

        Args:
            distance: How many tokens to go forward. Medusa head d predicts d + 1 tokens ahead.

        Returns:
            A token id per target; IGNORED where the path ends earlier.
        """
        following = self._following_targets()
        labels = []
        for index in self.targets:
            for _ in range(distance):
                index = following.get(index, -1)
            labels.append(self.targets.get(index, IGNORED))
        return labels

    def _following_targets(self) -> dict[int, int]:
        """Map the index of each target to that of the fed token that it predicted; -1 if none."""
        visibility = self.visibility()
        following = {}
        for index, token in self.targets.items():
            is_fed = (self.tokens == token) & (self.positions == self.positions[index] + 1)
            is_fed[self.shared :] &= visibility[:, index]
            is_fed[: self.shared] = False
            following[index] = int(is_fed.argmax()) if is_fed.any() else -1
        return following


class Examples(ABC):
    """Makes examples from documents, and counts what cannot be trained on."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.column = config.training.labels_column
        self.skipped: Counter[str] = Counter()  # by reason
        self.lost = 0  # documents that are not trained on
        self.labels = 0
        self.lost_labels = 0  # labels that are not trained on although their document is

    @abstractmethod
    def __call__(self, documents: Sequence[Document]) -> Iterable[Example]: ...

    def skip(self, reason: object, documents: int = 1) -> None:
        """Count documents that are not trained on."""
        self.skipped[str(reason)] += documents
        self.lost += documents

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text in which no control token is recognized."""
        return encode(self.tokenizer, text, special=False)


def listed(skipped: Counter[str], most_common: int | None = None) -> str:
    """Return a line per reason, the most frequent first, each with a line end before it."""
    reasons = skipped.most_common(most_common)
    return "".join(f"\n  {count:,} x {reason}" for reason, count in reasons)


def check_usable(document: Document) -> None:
    """Raise Skip for a document that could not be read or labelled.

    The message omits the document's location, so that equal reasons are counted together.
    """
    if document.error is not None:
        raise Skip(document.error.partition(": ")[2] or document.error)


def written(prompt: list[int], answer: list[int], shared: int = 0) -> Example:
    """Return the example of an answer that `autoregressive` writes token by token.

    Args:
        prompt: Token ids of the prompt.
        answer: Token ids of the answer.
        shared: The number of leading prompt tokens shared with other examples.
    """
    tokens = iter(answer)
    program = autoregressive(
        Prompt(prompt, shared), len(answer), lambda ids: len(ids) == len(answer)
    )
    example, _ = trace(program, lambda feed: [next(tokens) for _ in feed.sample_at])
    return example


def trace(program: Program[Any], teacher: Teacher) -> tuple[Example, Any]:
    """Run a program with a teacher in place of the model.

    Args:
        program: The program of a decoding method.
        teacher: Returns the gold tokens of each feed.

    Returns:
        The example, and the answer that the program returned.

    Raises:
        ValueError: If the program moves or drafts tokens, which cannot be traced.
    """
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    steps: list[int] = []
    until: dict[int, int] = {}
    continues: dict[int, int] = {}
    targets: dict[int, int] = {}
    reach = one_segment()
    feed = next(program)
    shared = feed.shared
    for step in count():
        if feed.move or feed.draft is not None or feed.want_logits or feed.want_hidden:
            raise ValueError("a program that moves or drafts tokens cannot be traced")
        until |= dict.fromkeys(feed.drop, step)
        continues |= feed.continues
        gold = teacher(feed)
        for index, token in zip(feed.sample_at, gold, strict=True):
            targets[len(tokens) + index] = token
        tokens += feed.tokens
        positions += feed.positions
        segments += [0] * len(feed.tokens) if feed.segments is None else feed.segments
        steps += [step] * len(feed.tokens)
        reach = grown(reach, feed.reach)
        try:
            feed = program.send(Predictions(list(gold), [0.0] * len(gold)))
        except StopIteration as end:
            answer = end.value
            break
    example = Example(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        segments=np.array(segments, dtype=np.int64),
        steps=np.array(steps, dtype=np.int64),
        reach=reach,
        targets=targets,
        shared=shared,
        until=until,
        continues=continues,
    )
    return example, answer
