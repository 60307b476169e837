"""Examples with a common instruction go through the model in one pass.

A pass is flat, as in the engine: [instruction | own tokens of example 1 | own tokens of example 2 |
...]. Own tokens see the instruction and the tokens of their own example, so that a pass computes
what each example would compute alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from raypd.decoding import FedText, RecurrentRun, in_window, runs_of_texts
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
class PassLayout:
    """Which tokens of a pass belong together; every layer that mixes tokens receives it.

    Attributes:
        visible: Per example bool [own tokens, shared + own tokens], whether an own token sees a
            key.
        positions: The position of each token of the pass, [tokens].
        runs: The runs of recurrent layers; None if the model has none.
        window: The number of tokens that a token of the instruction sees; None for all.
    """

    visible: list[torch.Tensor]
    positions: torch.Tensor
    runs: list[RecurrentRun] | None = None
    window: int | None = None
    _windowed: dict[int, "PassLayout"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The number of own tokens of each example, in their order.
        self.lengths = [len(mask) for mask in self.visible]
        # The number of tokens of the instruction, at the start.
        self.shared = self.visible[0].shape[1] - self.lengths[0]

    @property
    def tokens(self) -> int:
        """The number of tokens of the pass."""
        return len(self.positions)

    @cached_property
    def instruction(self) -> torch.Tensor:
        """What the tokens of the instruction see of each other, bool [shared, shared]."""
        pairs = self.positions.new_ones(self.shared, self.shared, dtype=torch.bool)
        visible = pairs.tril()
        if self.window is not None:
            visible &= ~pairs.tril(-self.window)
        return visible

    def in_window(self, window: int | None) -> "PassLayout":
        """Return what is visible in a layer with a window, by the rule of decoding.

        Args:
            window: The number of tokens that the layer's queries see; None for all.
        """
        if window is None or self.shared + max(self.lengths) <= window:
            return self
        if window not in self._windowed:
            self._windowed[window] = self._cut(window)
        return self._windowed[window]

    def _cut(self, window: int) -> "PassLayout":
        positions = self.positions.cpu().numpy()
        begin = self.shared
        masks = []
        for mask in self.visible:
            end = begin + len(mask)
            queries = positions[begin:end]
            keys = np.concatenate([positions[: self.shared], queries])
            visible = mask.cpu().numpy()
            visible = visible & in_window(visible, queries, keys, window)
            masks.append(torch.from_numpy(visible).to(mask.device))
            begin = end
        return PassLayout(masks, self.positions, self.runs, window)

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
        max_tokens: The largest number of tokens per group, an instruction counted once. A longer
            example forms its own group.
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


def pack(examples: Sequence[Example], heads: int = 0, recurrent: bool = False) -> Batch:
    """Pack examples with the same instruction into the tensors of one pass.

    Args:
        examples: The examples of one group.
        heads: The number of Medusa heads that are trained; 0 to train the model.
        recurrent: Whether the model has recurrent layers.

    Returns:
        A dictionary with:
            input_ids, position_ids: [1, tokens].
            label_index: [targets], the indices at which the model predicts.
            shift_labels: [targets], the tokens to be predicted there; with Medusa heads
                [heads * targets], the tokens that each head is to predict there.
            labels: The same as shift_labels; Trainer counts the targets in it.
            visible: As in PassLayout.
            runs: The runs of recurrent layers; None if the model has none.
            initial: [examples], as in Example.

    Raises:
        ProgramError: If recurrent layers cannot follow an example.
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
        "runs": runs_of_texts(map(_fed_text, examples), shared) if recurrent else None,
        "initial": torch.tensor([example.initial for example in examples]),
    }


def _fed_text(example: Example) -> FedText:
    """Return what recurrent layers read of an example."""
    shared = example.shared
    continues = {segment: index - shared for segment, index in example.continues.items()}
    return FedText(example.positions[shared:], example.segments[shared:], example.reach, continues)


def layout_of(batch: Batch) -> PassLayout:
    """Return the layout of a pass that `pack` made."""
    return PassLayout(batch["visible"], batch["position_ids"][0], batch["runs"])


def count_tokens(examples: Sequence[Example]) -> int:
    """Return the number of tokens of a pass, the instruction counted once."""
    return examples[0].shared + sum(len(example) - example.shared for example in examples)
