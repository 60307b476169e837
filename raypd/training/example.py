"""A training example is what a decoding method would have fed, had the model answered with the gold tokens.

The method's own program is run with a teacher in the model's place. Its feeds give tokens, positions and segments, the
number of a feed is the step of its tokens, and what the teacher answers at `sample_at` are the targets. So the mask of
training is `visible` over what decoding feeds (HPD section 4.4, figure 3: "the attention pattern ... is identical").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.visibility import grown, one_segment, visible
from raypd.tasks.base import Document

IGNORED = -100  # a label that is none, for torch
Teacher = Callable[[Feed], list[int]]  # gives for a feed the tokens to be predicted at its `sample_at`


class Skip(Exception):
    """An example that cannot be trained on; its message is the same for all examples of its kind."""


@dataclass
class Example:
    """Tokens in the order in which they are fed.

    tokens, positions, segments, steps: [n] int64. reach: [segments, segments] of Reach. The first `shared` tokens are
    an instruction in common with other examples. targets: the token that is to be predicted at an index; all other
    indices have none. until: the step before which a token left the cache. initial: log-probability of the targets
    under the model before a preference round. draw: makes what is trained on, where a part of it is random.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    steps: np.ndarray
    reach: np.ndarray
    targets: dict[int, int]
    shared: int = 0
    until: dict[int, int] = field(default_factory=dict)
    initial: float = 0.0
    draw: Callable[[Example, torch.Generator | None], Example] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def drawn(self, generator: torch.Generator | None = None) -> Example:
        """The example as it is trained on this time."""
        return self if self.draw is None else self.draw(self, generator)

    def visibility(self) -> np.ndarray:
        """What each own token sees: bool [n - shared, n], by the rule of decoding with its step condition."""
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

    def ahead(self, further: int) -> list[int]:
        """For each target the one so many tokens further along its path; IGNORED where the path ends before."""
        visibility = self.visibility()
        following = {}  # index of a target -> that of the next one: the fed token that it predicted
        for index, token in self.targets.items():
            fed = (self.tokens == token) & (self.positions == self.positions[index] + 1)
            successors = [i for i in np.flatnonzero(fed) if i >= self.shared and visibility[i - self.shared, index]]
            following[index] = int(successors[0]) if successors else None
        labels = []
        for index in self.targets:
            place: int | None = index
            for _ in range(further):
                place = None if place is None else following.get(place)
            labels.append(IGNORED if place is None or place not in self.targets else self.targets[place])
        return labels


def check_usable(document: Document) -> None:
    """Raises Skip for a document that could not be read or labelled, without the place in its message."""
    if document.error is not None:
        raise Skip(document.error.partition(": ")[2] or document.error)


def trace(program: Program[Any], teacher: Teacher) -> tuple[Example, Any]:
    """Runs a new program with a teacher in the model's place: the example, and the program's answer.

    Raises:
        ValueError: the program moves tokens or drafts, which a teacher cannot do.
    """
    tokens: list[int] = []
    until: dict[int, int] = {}
    positions: list[int] = []
    segments: list[int] = []
    steps: list[int] = []
    targets: dict[int, int] = {}
    reach = one_segment()
    shared = step = 0
    feed = next(program)
    while True:
        if feed.move or feed.draft is not None or feed.want_logits or feed.want_hidden:
            raise ValueError("a program that moves or drafts tokens cannot be traced")
        if step == 0:
            shared = feed.shared
        until |= dict.fromkeys(feed.drop, step)
        gold = teacher(feed)
        targets |= {len(tokens) + index: token for index, token in zip(feed.sample_at, gold, strict=True)}
        tokens += feed.tokens
        positions += feed.positions
        segments += feed.segments if feed.segments is not None else [0] * len(feed.tokens)
        steps += [step] * len(feed.tokens)
        reach = grown(reach, feed.reach)
        step += 1
        try:
            feed = program.send(Predictions(list(gold), [0.0] * len(gold)))
        except StopIteration as end:
            table = np.array([tokens, positions, segments, steps], dtype=np.int64)
            return Example(table[0], table[1], table[2], table[3], reach, targets, shared, until), end.value
