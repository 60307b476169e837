"""The tensors of a checkpoint, read or computed when they are needed."""

import math
from collections.abc import Callable
from typing import Any

import torch


class Tensor:
    """A tensor that is in a file, or that is computed from tensors in files.

    transformers accepts it in place of a tensor, and reads it with `tensor[...]` when its turn
    comes. So only a few of them are in memory at a time, in addition to the model.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],
    ) -> None:
        """
        Args:
            name: Its name in the file, for messages.
            shape: Its shape.
            dtype: Its dtype.
            read: Reads or computes it. Several threads may call it at the same time.
        """
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.read = read

    @property
    def count(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.read()[index]


# By their names in the checkpoint, or in the model.
Tensors = dict[str, Tensor]
