"""What a family tells a builder about a layer: the modules of transformers, and how they compute.

A builder takes the weights out of these modules, so that the model does not hold them twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from raypd.decoding.attention.step import AttentionLayer

# The names of the classes of transformers that compute silu.
_SILU = {"SiLU", "SiLUActivation"}


class Rope(NamedTuple):
    """The rotary embedding of a pass.

    The first half of a head's numbers is rotated with the second one. Numbers that are not rotated
    have a cosine of 1 and a sine of 0.
    """

    cos: torch.Tensor  # [tokens, head_dim]
    sin: torch.Tensor  # [tokens, head_dim]


class NormStyle(IntEnum):
    """Where an RMS norm rounds, and what its weight is. native.c and triton know the numbers."""

    ROUND_FIRST = 0  # Rounds x / rms to 16 bits, and multiplies by the weight.
    ROUND_ONCE = 1  # Multiplies by the weight in float32.
    OFFSET = 2  # Multiplies by 1 + weight in float32.


class Linears:
    """Linear layers that read the same inputs, and can be joined into one."""

    def __init__(self, owner: Any, *names: str) -> None:
        """
        Args:
            owner: The module of transformers that has them.
            names: Their names in it, in the order of their outputs.
        """
        self.owner = owner
        self.names = names

    @property
    def modules(self) -> list[Any]:
        return [getattr(self.owner, name) for name in self.names]

    def drop(self) -> None:
        """Remove the layers from their owner, after their weights were copied."""
        for name in self.names:
            delattr(self.owner, name)


@dataclass
class AttentionSource:
    """An attention: projection, norms of queries and keys, and rotation."""

    layer: AttentionLayer
    # Queries, keys and values, or one layer that gives all of them.
    linears: Linears
    heads: int
    kv_heads: int
    head_dim: int
    query_norm: Any = None
    key_norm: Any = None
    norm_style: NormStyle = NormStyle.ROUND_FIRST
    # Whether the norms reach over all heads of a token, instead of over each of them.
    norms_all_heads: bool = False
    # Whether the norms come behind the rotation.
    norms_last: bool = False
    # Whether queries and keys are rotated.
    rotated: bool = True
    # The order in which `Rope` expects the numbers of a head, [head_dim]; None for their own.
    # Queries and keys change their order alike, so scores stay the same.
    order: torch.Tensor | None = None

    @property
    def has_norms(self) -> bool:
        return self.query_norm is not None


@dataclass
class MlpSource:
    """A gated MLP: down(activation(gate(x)) * up(x))."""

    # Gate and up, or one layer that gives both of them.
    inputs: Linears
    down: Linears
    activation: Callable[[torch.Tensor], torch.Tensor]

    @property
    def is_silu(self) -> bool:
        return type(self.activation).__name__ in _SILU


@dataclass
class SoftmaxRouter:
    """A router that chooses the experts with the largest softmax of a linear layer."""

    weight: torch.Tensor  # [experts, hidden size]
    bias: torch.Tensor | None
    k: int  # Experts per token.
    # Whether the weights of a token's experts are divided by their sum.
    renormalizes: bool


@dataclass
class ExpertsSource:
    """A mixture of experts: a router and its experts."""

    # The module that computes the weights [tokens, k] and the numbers [tokens, k] of each token's
    # experts, behind something else.
    router: Any
    # The module of transformers with the weights of all experts.
    experts: Any
    # What else the router's module is called with.
    router_inputs: tuple[Any, ...] = ()
    # The router, if it is of this kind.
    softmax: SoftmaxRouter | None = None
    # An MLP for all tokens, whose result is added.
    shared: MlpSource | None = None
    # A linear layer whose sigmoid scales the result of `shared`.
    shared_gate: Linears | None = None

    def drop(self) -> None:
        """Remove the weights from the module of the experts, after they were copied."""
        for name in [name for name, _ in self.experts.named_parameters()]:
            delattr(self.experts, name)


def epsilon(module: Any) -> float:
    """Return what an RMS norm of transformers adds to the mean square."""
    if hasattr(module, "variance_epsilon"):
        return float(module.variance_epsilon)
    return float(module.eps)


def projected_rows(source: AttentionSource) -> torch.Tensor | None:
    """Return the order of the outputs of a projection in which `Rope` expects them, [outputs]."""
    if source.order is None:
        return None
    first = torch.arange(source.heads + source.kv_heads)[:, None] * source.head_dim
    rotated = (first + source.order).flatten()
    values = torch.arange(source.kv_heads * source.head_dim) + len(rotated)
    return torch.cat([rotated, values])


def in_order(norm: Any, source: AttentionSource) -> Any:
    """Return a norm of queries or keys for outputs in the order of `Rope`."""
    if source.order is None:
        return norm
    weight = norm.weight.detach()
    first = torch.arange(0, len(weight), source.head_dim)[:, None]
    numbers = (first + source.order).flatten().to(weight.device)
    reordered = copy.deepcopy(norm)
    reordered.weight = torch.nn.Parameter(weight[numbers], requires_grad=False)
    return reordered
