"""Examples go through the model together, the instruction that they share once, flat as in the
engine: [instruction | own tokens of example 1 | own tokens of example 2 | ...]. Own tokens see the
instruction and tokens of their example alone, so a pass computes what each example would alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from raypd.training.example import Example

Batch = dict[str, Any]


@dataclass
class Layout:
    """Which tokens of a pass belong together; handed to every attention layer."""

    # of each example bool [own tokens, shared + own tokens]: whether an own token sees a key
    visible: list[torch.Tensor]

    def __post_init__(self) -> None:
        # Own tokens of each example, in their order.
        self.lengths = [len(mask) for mask in self.visible]
        # Tokens of the instruction, at the start.
        self.shared = self.visible[0].shape[1] - self.lengths[0]

    @cached_property
    def padded(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The examples as rows of one length, for kernels that take all at once: index of each own
        token in the pass, [examples * longest] (0: padded); places of own tokens; visibility
        [examples, 1, longest, shared + longest].
        """
        device, longest = self.visible[0].device, max(self.lengths)
        place, lengths = (
            torch.arange(longest, device=device),
            torch.tensor(self.lengths, device=device),
        )
        is_token = place < lengths[:, None]
        first = self.shared + lengths.cumsum(0) - lengths
        visible = torch.zeros(
            len(lengths), 1, longest, self.shared + longest, dtype=torch.bool, device=device
        )
        visible[..., 0] = True  # a padded row sees something: softmax over nothing is NaN
        for row, mask in zip(visible, self.visible, strict=True):
            row[0, : mask.shape[0], : mask.shape[1]] = mask
        return (
            (first[:, None] + place).where(is_token, 0).flatten(),
            is_token.flatten().nonzero()[:, 0],
            visible,
        )


def batches(
    examples: Sequence[Example], most_examples: int, most_tokens: int, seed: int
) -> Iterator[list[Example]]:
    """Groups with one instruction, in an order drawn by `seed`; an example longer than
    `most_tokens` goes alone.
    """
    random = np.random.default_rng(seed)
    by_instruction: dict[bytes, list[list[Example]]] = {}
    for index in random.permutation(len(examples)):
        example = examples[index]
        groups = by_instruction.setdefault(example.tokens[: example.shared].tobytes(), [[]])
        if groups[-1] and (
            len(groups[-1]) == most_examples or count_tokens([*groups[-1], example]) > most_tokens
        ):
            groups.append([])
        groups[-1].append(example)
    every = [group for groups in by_instruction.values() for group in groups]
    yield from (every[i] for i in random.permutation(len(every)))


def pack(examples: Sequence[Example], heads: int = 0) -> Batch:
    """One pass over examples with the same instruction, as tensors.

    input_ids, position_ids: [1, tokens]. label_index: [targets], where the model predicts, and
    shift_labels what; with Medusa heads [heads * targets], what each head predicts there. labels:
    the same, without which Trainer does not count targets. visible: as in Layout. initial:
    [examples].
    """
    examples = [example.drawn() for example in examples]
    first, shared = examples[0], examples[0].shared
    tokens = np.concatenate(
        [first.tokens[:shared], *(example.tokens[shared:] for example in examples)]
    )
    positions = np.concatenate(
        [first.positions[:shared], *(example.positions[shared:] for example in examples)]
    )
    # Own tokens of the examples before.
    offsets = [0, *accumulate(len(example) - shared for example in examples)]
    index = [
        place + offset
        for example, offset in zip(examples, offsets, strict=False)
        for place in example.targets
    ]
    if heads:
        labels = [
            label for d in range(heads) for example in examples for label in example.ahead(d + 1)
        ]
    else:
        labels = [label for example in examples for label in example.targets.values()]
    return {
        "input_ids": torch.from_numpy(tokens)[None],
        "position_ids": torch.from_numpy(positions)[None],
        "label_index": torch.tensor(index),
        "shift_labels": torch.tensor(labels),
        "labels": torch.tensor(labels),
        "visible": [torch.from_numpy(example.visibility()) for example in examples],
        "initial": torch.tensor([example.initial for example in examples]),
    }


def count_tokens(examples: Sequence[Example]) -> int:
    return examples[0].shared + sum(len(example) - example.shared for example in examples)
