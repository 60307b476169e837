"""Rotary embeddings of other kinds, brought into the form of `Rope` by reordering elements.

`Rope` rotates the first half of a head's elements with the second half. Scores stay the same if the
elements of queries and keys are reordered in the same way.
"""

from typing import Any

import torch

from raypd.decoding.layers.sources import Rope


def rotary_dim(config: Any, head_dim: int) -> int:
    """Return how many elements of a head are rotated."""
    rope = getattr(config, "rope_parameters", None) or {}
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def halves_order(head_dim: int, rotary_dim: int) -> torch.Tensor | None:
    """Return the order of heads in which only the first elements are rotated, half with half.

    Args:
        head_dim: The size of a head.
        rotary_dim: How many of them are rotated.

    Returns:
        [head_dim], or None if the order stays as it is.
    """
    if rotary_dim == head_dim:
        return None
    half = rotary_dim // 2
    numbers = torch.arange(rotary_dim)
    return _with_rest(numbers[:half], numbers[half:], head_dim)


def pairs_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Return the order of heads in which adjacent pairs are rotated; see `halves_order`."""
    numbers = torch.arange(rotary_dim)
    return _with_rest(numbers[::2], numbers[1::2], head_dim)


def _with_rest(first: torch.Tensor, second: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Fill up both halves with elements that are not rotated."""
    rest = torch.arange(2 * len(first), head_dim)
    middle = len(rest) // 2
    return torch.cat([first, rest[:middle], second, rest[middle:]])


def widened(cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> Rope:
    """Return the rotary embedding of heads in which some elements are not rotated.

    Args:
        cos: [tokens, rotated elements], whose two halves are equal.
        sin: [tokens, rotated elements]
        head_dim: The size of a head.
    """
    rotary_dim = cos.shape[1]
    if rotary_dim == head_dim:
        return Rope(cos, sin)
    half = rotary_dim // 2
    missing = (0, (head_dim - rotary_dim) // 2)
    half_cos = torch.nn.functional.pad(cos[:, :half], missing, value=1.0)
    half_sin = torch.nn.functional.pad(sin[:, :half], missing)
    return Rope(half_cos.repeat(1, 2), half_sin.repeat(1, 2))


def in_dtype(rope: Rope, dtype: torch.dtype) -> Rope:
    """Return a rotary embedding in the dtype of the hidden states; some families use float32."""
    if rope.cos.dtype == dtype:
        return rope
    return Rope(rope.cos.to(dtype), rope.sin.to(dtype))
