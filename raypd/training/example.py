"""A training example is what a decoding method would have fed, had the model answered with the gold
tokens. The method's own program runs with a teacher in the model's place; the number of a feed is
the step of its tokens, and what the teacher answers at `sample_at` are the targets. So the mask of
training is `visible` over what decoding feeds.
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
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.text import Prompt
from raypd.decoding.visibility import grown, one_segment, visible
from raypd.tasks.base import Document
from raypd.tasks.prompting import encode

IGNORED = -100  # a label that is none, for torch
# Gives for a feed the tokens to be predicted at its `sample_at`.
Teacher = Callable[[Feed], list[int]]


class Skip(Exception):
    """An example that cannot be trained on; its message is the same for all examples of its
    kind.
    """


@dataclass
class Example:
    """Tokens in the order in which they are fed."""

    tokens: np.ndarray  # [n] int64, as the next three
    positions: np.ndarray
    segments: np.ndarray
    steps: np.ndarray
    reach: np.ndarray  # [segments, segments] of Reach
    targets: dict[int, int]  # the token to be predicted at an index; other indices have none
    shared: int = 0  # the first tokens, an instruction in common with other examples
    # The step before which a token left the cache.
    until: dict[int, int] = field(default_factory=dict)
    initial: float = 0.0  # log-probability of the targets under the model before a preference round
    # What is trained on, if random.
    draw: "Callable[[Example, torch.Generator | None], Example] | None" = None

    def __len__(self) -> int:
        return len(self.tokens)

    def drawn(self, generator: torch.Generator | None = None) -> "Example":
        return self if self.draw is None else self.draw(self, generator)

    def visibility(self) -> np.ndarray:
        """What each own token sees: bool [n - shared, n], by the rule of decoding with its step
        condition.
        """
        own_tokens = slice(self.shared, None)
        queries = self.segments[own_tokens], self.positions[own_tokens]
        visibility = visible(
            self.reach, *queries, self.segments, self.positions, self.steps[own_tokens], self.steps
        )
        for key, step in self.until.items():
            visibility[self.steps[own_tokens] >= step, key] = False
        return visibility

    def ahead(self, further: int) -> list[int]:
        """For each target the one so many tokens further along its path; IGNORED where the path
        ends before.
        """
        visibility = self.visibility()
        # Index of a target -> that of the next one: the fed token that it predicted; -1: none.
        following = {}
        for index, token in self.targets.items():
            fed = (self.tokens == token) & (self.positions == self.positions[index] + 1)
            fed[self.shared :] &= visibility[:, index]
            fed[: self.shared] = False
            following[index] = int(fed.argmax()) if fed.any() else -1
        labels = []
        for index in self.targets:
            for _ in range(further):
                index = following.get(index, -1)
            labels.append(self.targets.get(index, IGNORED))
        return labels


class Examples(ABC):
    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.column = config.training.labels_column
        self.skipped: Counter[str] = Counter()  # by the reason
        # Documents; labels; of these lost without their document.
        self.lost = self.labels = self.lost_labels = 0

    @abstractmethod
    def __call__(self, documents: Sequence[Document]) -> Iterable[Example]: ...

    def skip(self, reason: object, documents: int = 1) -> None:
        self.skipped[str(reason)] += documents
        self.lost += documents

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, special=False)


def listed(skipped: Counter[str], most_common: int | None = None) -> str:
    return "".join(
        f"\n  {count:,} x {reason}" for reason, count in skipped.most_common(most_common)
    )


def check_usable(document: Document) -> None:
    """Raises Skip for a document that could not be read or labelled, without the place in its
    message.
    """
    if document.error is not None:
        raise Skip(document.error.partition(": ")[2] or document.error)


def written(prompt: list[int], answer: list[int], shared: int = 0) -> Example:
    """An answer token by token, as `autoregressive` writes it."""
    tokens = iter(answer)
    program = autoregressive(
        Prompt(prompt, shared), len(answer), lambda ids: len(ids) == len(answer)
    )
    return trace(program, lambda feed: [next(tokens) for _ in feed.sample_at])[0]


def trace(program: Program[Any], teacher: Teacher) -> tuple[Example, Any]:
    """Runs a program with a teacher: the example, and its answer.

    Raises ValueError where it moves tokens or drafts.
    """
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    steps: list[int] = []
    until: dict[int, int] = {}
    targets: dict[int, int] = {}
    reach = one_segment()
    feed = next(program)
    shared = feed.shared
    for step in count():
        if feed.move or feed.draft is not None or feed.want_logits or feed.want_hidden:
            raise ValueError("a program that moves or drafts tokens cannot be traced")
        until |= dict.fromkeys(feed.drop, step)
        gold = teacher(feed)
        targets |= {
            len(tokens) + index: token for index, token in zip(feed.sample_at, gold, strict=True)
        }
        tokens += feed.tokens
        positions += feed.positions
        segments += feed.segments if feed.segments is not None else [0] * len(feed.tokens)
        steps += [step] * len(feed.tokens)
        reach = grown(reach, feed.reach)
        try:
            feed = program.send(Predictions(list(gold), [0.0] * len(gold)))
        except StopIteration as end:
            answer = end.value
            break
    table = np.array([tokens, positions, segments, steps], dtype=np.int64)
    return Example(table[0], table[1], table[2], table[3], reach, targets, shared, until), answer
