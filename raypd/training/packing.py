"""Examples with a common instruction go through the model in one pass.

A pass is flat, as in the engine: [instruction | own tokens of example 1 | own tokens of example 2 |
...]. Own tokens see the instruction and the tokens of their own example, so that a pass computes
what each example would compute alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from raypd.training.example import Example

Batch = dict[str, Any]


@dataclass
class PaddedRows:
    """The own tokens of a pass as rows of one length, one row per example.

    Attributes:
        index: [examples * longest], the index in the pass of each own token; 0 where a row is
            padded.
        own_tokens: [own tokens], the index in the flattened rows of each own token.
        visible: bool [examples, 1, longest, shared + longest].
    """

    index: torch.Tensor
    own_tokens: torch.Tensor
    visible: torch.Tensor


@dataclass
class Layout:
    """Which tokens of a pass belong together; every attention layer receives it.

    Attributes:
        visible: Per example bool [own tokens, shared + own tokens], whether an own token sees a
            key.
    """

    visible: list[torch.Tensor]

    def __post_init__(self) -> None:
        # The number of own tokens of each example, in their order.
        self.lengths = [len(mask) for mask in self.visible]
        # The number of tokens of the instruction, at the start.
        self.shared = self.visible[0].shape[1] - self.lengths[0]

    @cached_property
    def padded(self) -> PaddedRows:
        """The examples as rows of one length, for kernels that take all of them in one call."""
        device = self.visible[0].device
        longest = max(self.lengths)
        columns = torch.arange(longest, device=device)
        lengths = torch.tensor(self.lengths, device=device)
        is_token = columns < lengths[:, None]
        starts = self.shared + lengths.cumsum(0) - lengths
        visible = torch.zeros(
            len(lengths), 1, longest, self.shared + longest, dtype=torch.bool, device=device
        )
        # A padded query sees the first key, because softmax over no key is NaN.
        visible[..., 0] = True
        for row, mask in zip(visible, self.visible, strict=True):
            row[0, : mask.shape[0], : mask.shape[1]] = mask
        return PaddedRows(
            index=(starts[:, None] + columns).where(is_token, 0).flatten(),
            own_tokens=is_token.flatten().nonzero()[:, 0],
            visible=visible,
        )


def batches(
    examples: Sequence[Example], max_examples: int, max_tokens: int, seed: int
) -> Iterator[list[Example]]:
    """Group examples that have the same instruction.

    Args:
        examples: All examples of an epoch.
        max_examples: The largest number of examples per group.
        max_tokens: The largest number of tokens per group, an instruction counted once. An example
            that is longer forms a group of its own.
        seed: Draws the order of examples and of groups.

    Yields:
        The groups in a random order.
    """
    random = np.random.default_rng(seed)
    groups_by_instruction: dict[bytes, list[list[Example]]] = {}
    for index in random.permutation(len(examples)):
        example = examples[index]
        instruction = example.tokens[: example.shared].tobytes()
        groups = groups_by_instruction.setdefault(instruction, [[]])
        last = groups[-1]
        is_full = len(last) == max_examples
        if last and (is_full or count_tokens([*last, example]) > max_tokens):
            groups.append([])
        groups[-1].append(example)
    all_groups = [group for groups in groups_by_instruction.values() for group in groups]
    for index in random.permutation(len(all_groups)):
        yield all_groups[index]


def pack(examples: Sequence[Example], heads: int = 0) -> Batch:
    """Pack examples with the same instruction into the tensors of one pass.

    Args:
        examples: The examples of one group.
        heads: The number of Medusa heads that are trained; 0 to train the model.

    Returns:
        A dictionary with:
            input_ids, position_ids: [1, tokens].
            label_index: [targets], the indices at which the model predicts.
            shift_labels: [targets], the tokens to be predicted there; with Medusa heads
                [heads * targets], the tokens that each head is to predict there.
            labels: The same as shift_labels; Trainer counts the targets in it.
            visible: As in Layout.
            initial: [examples], as in Example.
    """
    examples = [example.drawn() for example in examples]
    first = examples[0]
    shared = first.shared
    tokens = [first.tokens[:shared]]
    positions = [first.positions[:shared]]
    label_index: list[int] = []
    own_tokens = 0  # of the examples before
    for example in examples:
        tokens.append(example.tokens[shared:])
        positions.append(example.positions[shared:])
        label_index += [own_tokens + index for index in example.targets]
        own_tokens += len(example) - shared
    labels: list[int] = []
    if heads:
        for head in range(heads):
            for example in examples:
                labels += example.ahead(head + 1)
    else:
        for example in examples:
            labels += example.targets.values()
    return {
        "input_ids": torch.from_numpy(np.concatenate(tokens))[None],
        "position_ids": torch.from_numpy(np.concatenate(positions))[None],
        "label_index": torch.tensor(label_index),
        "shift_labels": torch.tensor(labels),
        "labels": torch.tensor(labels),
        "visible": [torch.from_numpy(example.visibility()) for example in examples],
        "initial": torch.tensor([example.initial for example in examples]),
    }


def count_tokens(examples: Sequence[Example]) -> int:
    """Return the number of tokens of a pass, the instruction counted once."""
    return examples[0].shared + sum(len(example) - example.shared for example in examples)
