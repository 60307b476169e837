"""Examples that share an instruction go through the model together, the instruction once.

One pass is flat, as in the engine: [instruction | own tokens of example 1 | own tokens of example 2 | ...]. Own tokens
see the instruction and tokens of their example alone, so a pass computes what each example would alone, and the
instruction's gradient is the sum over all that read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from raypd.training.example import Example

Batch = dict[str, torch.Tensor]


@dataclass
class Layout:
    """Which tokens of a pass belong together; handed to every attention layer."""

    shared: int  # tokens of the instruction, at the start
    lengths: list[int]  # own tokens of each example, in their order
    visible: list[torch.Tensor]  # of each example bool [length, shared + length]: whether an own token sees a key

    @cached_property
    def padded(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The examples as rows of one length, for kernels that take all of them at once.

        Returns:
            Index of each own token in the pass, [examples, longest], 0 where a row is padded; which places are own
            tokens, bool, the same shape; and the visibility, bool [examples, 1, longest, shared + longest].
        """
        device, longest = self.visible[0].device, max(self.lengths)
        place = torch.arange(longest, device=device)
        lengths = torch.tensor(self.lengths, device=device)
        is_token = place < lengths[:, None]
        first = self.shared + lengths.cumsum(0) - lengths
        visible = torch.zeros(len(self.lengths), 1, longest, self.shared + longest, dtype=torch.bool, device=device)
        visible[..., 0] = True  # a padded row sees something: softmax over nothing is NaN
        for row, example_visible in zip(visible, self.visible, strict=True):
            row[0, : example_visible.shape[0], : example_visible.shape[1]] = example_visible
        return (first[:, None] + place).where(is_token, 0), is_token, visible


def batches(examples: Sequence[Example], most_examples: int, most_tokens: int, seed: int) -> Iterator[list[Example]]:
    """Groups of examples with the same instruction, in an order drawn by `seed`: at most so many, of so many tokens.

    An example that is longer than `most_tokens` goes alone.
    """
    random = np.random.default_rng(seed)
    by_instruction: dict[tuple[int, ...], list[Example]] = {}
    for index in random.permutation(len(examples)):
        example = examples[index]
        by_instruction.setdefault(tuple(example.tokens[: example.shared].tolist()), []).append(example)
    groups: list[list[Example]] = []
    for members in by_instruction.values():
        size = most_tokens
        for example in members:
            length = len(example) - example.shared
            if size + length > most_tokens or len(groups[-1]) == most_examples:
                groups.append([])
                size = example.shared
            groups[-1].append(example)
            size += length
    yield from (groups[i] for i in random.permutation(len(groups)))


def pack(examples: Sequence[Example], heads: int = 0) -> Batch:
    """One pass over examples with the same instruction, as tensors.

    Returns:
        input_ids, position_ids: [1, tokens]. label_index: [targets], where the model predicts, and shift_labels what;
        with Medusa heads [heads * targets], what each head predicts there. labels: the same, without which Trainer does
        not count targets.
        shared: [], lengths: [examples], seen: all masks in one row: as in Layout (see `layout`). initial: [examples].
    """
    examples = [example.drawn() for example in examples]
    first, shared = examples[0], examples[0].shared
    tokens = np.concatenate([first.tokens[:shared], *(example.tokens[shared:] for example in examples)])
    positions = np.concatenate([first.positions[:shared], *(example.positions[shared:] for example in examples)])
    index: list[int] = []
    labels: list[int] = []
    if heads:
        labels = [label for d in range(heads) for example in examples for label in example.ahead(d + 1)]
    offset = 0  # own tokens of the examples before
    for example in examples:
        index += [offset + place for place in example.targets]
        labels += [] if heads else example.targets.values()
        offset += len(example) - shared
    return {
        "input_ids": torch.from_numpy(tokens)[None],
        "position_ids": torch.from_numpy(positions)[None],
        "label_index": torch.tensor(index),
        "shift_labels": torch.tensor(labels),
        "labels": torch.tensor(labels),
        "shared": torch.tensor(shared),
        "lengths": torch.tensor([len(example) - shared for example in examples]),
        "initial": torch.tensor([example.initial for example in examples]),
        "seen": torch.from_numpy(np.concatenate([example.visibility().ravel() for example in examples])),
    }


def layout(batch: Batch) -> Layout:
    """The layout of a pass that `pack` made."""
    shared, lengths = int(batch["shared"]), batch["lengths"].tolist()
    parts = batch["seen"].split([length * (shared + length) for length in lengths])
    return Layout(shared, lengths, [part.view(n, shared + n) for part, n in zip(parts, lengths, strict=True)])


def count_tokens(examples: Iterable[Example]) -> int:
    """Tokens of the pass over examples of one instruction."""
    tokens = shared = 0
    for example in examples:
        tokens, shared = tokens + len(example) - example.shared, example.shared
    return tokens + shared
