"""Examples that share an instruction go through the model together, the instruction once.

One pass is flat, as in the engine: [instruction | own tokens of example 1 | own tokens of example 2 | ...]. Own tokens
see the instruction and tokens of their example alone, so a pass computes what each example would alone, and the
instruction's gradient is the sum over all that read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raypd.training.example import Example

Batch = dict[str, torch.Tensor]


@dataclass
class Layout:
    """Which tokens of a pass belong together; handed to every attention layer.

    shared: tokens of the instruction, at the start. own: [examples, longest] index of each own token in the pass, 0
    behind an example's last. there: [own tokens] which of the flattened `own` are tokens.
    seen: bool [examples, longest, shared + longest] of whether an own token sees a key.
    """

    shared: int
    own: torch.Tensor
    there: torch.Tensor
    seen: torch.Tensor


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
    for instruction, members in by_instruction.items():
        size = most_tokens
        for example in members:
            own = len(example) - example.shared
            if not instruction or size + own > most_tokens or len(groups[-1]) == most_examples:
                groups.append([])
                size = example.shared
            groups[-1].append(example)
            size += own
    yield from (groups[i] for i in random.permutation(len(groups)))


def pack(examples: Sequence[Example]) -> Batch:
    """One pass over examples with the same instruction, as tensors.

    Returns:
        input_ids, position_ids: [1, tokens]. label_index, shift_labels: [targets] where the model predicts, and what.
        shared: [] and own, there, seen: as in Layout.
    """
    examples = [example.drawn() for example in examples]
    shared = examples[0].shared
    lengths = [len(example) - shared for example in examples]
    columns = [[np.array(getattr(examples[0], name)[:shared])] for name in ("tokens", "positions")]
    longest = max(lengths)
    own = np.zeros((len(examples), longest), dtype=np.int64)
    seen = np.zeros((len(examples), longest, shared + longest), dtype=bool)
    seen[:, :, 0] = True  # a query that is none must see something, or its softmax is not a number
    index: list[int] = []
    labels: list[int] = []
    at = shared
    for number, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        for column, name in zip(columns, ("tokens", "positions"), strict=True):
            column.append(getattr(example, name)[shared:])
        own[number, :length] = np.arange(at, at + length)
        seen[number, :length, : shared + length] = example.seen()
        for place, token in example.targets.items():
            index.append(at + place - shared)
            labels.append(token)
        at += length
    ids, positions = (torch.from_numpy(np.concatenate(column))[None] for column in columns)
    return {
        "input_ids": ids,
        "position_ids": positions,
        "label_index": torch.tensor(index),
        "shift_labels": torch.tensor(labels),
        "shared": torch.tensor(shared),
        "own": torch.from_numpy(own),
        "there": torch.from_numpy(np.flatnonzero(np.arange(longest) < np.array(lengths)[:, None])),
        "seen": torch.from_numpy(seen),
    }


def count_tokens(examples: Iterable[Example]) -> int:
    """Tokens of the pass over examples of one instruction."""
    tokens = shared = 0
    for example in examples:
        tokens, shared = tokens + len(example) - example.shared, example.shared
    return tokens + shared
