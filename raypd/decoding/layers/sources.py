"""What a family tells a builder about a layer: its transformers modules and how they compute.

A builder removes the weights from these modules, so that the model does not hold them twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from raypd.decoding.attention.step import AttentionLayer
from raypd.decoding.layers.expert_weights import GateKind, gate_kind


class Rope(NamedTuple):
    """The rotary embedding of a pass.

    The first half of a head's elements is rotated with the second half. Elements that are not
    rotated have a cosine of 1 and a sine of 0.
    """

    cos: torch.Tensor  # [tokens, head_dim]
    sin: torch.Tensor  # [tokens, head_dim]
    # The factor of queries after the rotation, [tokens, 1, 1].
    query_scale: torch.Tensor | None = None


class NormStyle(IntEnum):
    """Where an RMS norm rounds, and what its weight is. native.c and triton use these numbers."""

    ROUND_FIRST = 0  # Rounds x / rms to 16 bits, then multiplies by the weight.
    ROUND_ONCE = 1  # Multiplies by the weight in float32.
    OFFSET = 2  # Multiplies by 1 + weight in float32.


class Linears:
    """Linear layers that read the same inputs and can be joined into one."""

    def __init__(self, owner: Any, *names: str) -> None:
        """
        Args:
            owner: The transformers module that has them.
            names: Their attribute names in it, in the order of their outputs.
        """
        self.owner = owner
        self.names = names

    @property
    def modules(self) -> list[Any]:
        return [getattr(self.owner, name) for name in self.names]

    @property
    def outputs(self) -> int:
        """The number of their outputs."""
        return sum(int(module.weight.shape[0]) for module in self.modules)

    def by_kind(self) -> list[Linears]:
        """Split the layers where their kind changes, because only some may be quantized."""
        groups: list[list[str]] = []
        last_kind: type | None = None
        for name in self.names:
            kind = type(getattr(self.owner, name))
            if kind is not last_kind:
                groups.append([])
            groups[-1].append(name)
            last_kind = kind
        return [Linears(self.owner, *names) for names in groups]

    def drop(self) -> None:
        """Remove the layers from their owner after their weights have been copied."""
        for name in self.names:
            delattr(self.owner, name)


@dataclass
class AttentionSource:
    """An attention layer: projection, norms of queries and keys, and rotation."""

    layer: AttentionLayer
    # The layers for queries, keys and values, or one layer for all of them; without those that this
    # attention does not compute.
    linears: Linears
    heads: int
    kv_heads: int
    head_dim: int
    query_norm: Any = None
    key_norm: Any = None
    # The norm of values, which has no weight.
    value_norm: Any = None
    norm_style: NormStyle = NormStyle.ROUND_FIRST
    # Whether the norms span all heads of a token instead of each head separately.
    norms_all_heads: bool = False
    # Whether the norms come after the rotation.
    norms_last: bool = False
    # Whether queries and keys are rotated.
    rotated: bool = True
    # The order in which `Rope` expects the elements of a head, [head_dim]; None if that is their
    # own. Queries and keys are reordered in the same way, so scores stay the same.
    order: torch.Tensor | None = None
    # Whether each query head comes with a gate of the same size, whose sigmoid scales its output.
    gated: bool = False
    # Whether the values are the keys before norm and rotation.
    values_are_keys: bool = False
    # Whether it reads the keys and values that an earlier layer, `layer.number`, stored.
    is_reader: bool = False

    @property
    def has_norms(self) -> bool:
        return self.query_norm is not None

    @property
    def stored_heads(self) -> int:
        """The number of key and value heads that the layer computes."""
        return 0 if self.is_reader else self.kv_heads

    @property
    def output_count(self) -> int:
        """The number of outputs of `linears`."""
        parts = 1 if self.values_are_keys else 2
        query_parts = 2 if self.gated else 1
        heads = query_parts * self.heads + parts * self.stored_heads
        return heads * self.head_dim


@dataclass
class LatentSource:
    """An attention layer whose keys and values are computed from one latent per token (MLA).

        query = q_b(norm(q_a(x))), or q(x)    [heads, plain_dim + rope_dim]
        latent, rotated key = kv_a(x)         [latent_dim], [rope_dim]
        keys, values = kv_b(norm(latent))     [heads, plain_dim], [heads, value_dim]

    The last elements of a query and the one key that all heads share are rotated.
    """

    layer: AttentionLayer
    # q_a, or q, and kv_a.
    inputs: Linears
    # q_b, which follows the norm; None if `inputs` return the queries.
    query: Linears | None
    query_norm: Any
    latent_norm: Any
    # kv_b
    expansion: Linears
    heads: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    norm_style: NormStyle = NormStyle.ROUND_FIRST
    # The order in which `Rope` expects the rotated elements, [rope_dim]; None if that is their own.
    order: torch.Tensor | None = None

    def absorbed_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights that move kv_b from keys to queries, and from values to outputs.

        Returns:
            [heads, latent_dim, plain_dim] and [heads, value_dim, latent_dim].
        """
        (linear,) = self.expansion.modules
        weight = dense_weight(linear, self.latent_norm.weight.dtype)
        by_head = weight.unflatten(0, (self.heads, -1))
        keys, values = by_head.split([self.plain_dim, self.value_dim], 1)
        return keys.transpose(1, 2), values


@dataclass
class MlpSource:
    """A gated MLP: down(activation(gate(x)) * up(x))."""

    # Gate and up, or one layer for both.
    inputs: Linears
    down: Linears
    activation: Callable[[torch.Tensor], torch.Tensor]

    @property
    def gate(self) -> GateKind | None:
        """The kind of the activation; None if only `activation` can compute it."""
        return gate_kind(self.activation)


@dataclass
class RecurrentSource:
    """A recurrent or convolution layer from transformers, up to its output product."""

    # The module, which has a convolution, rates and a norm.
    module: Any
    # The layers that read the hidden states.
    linears: Linears
    # The order in which the rest of the layer reads their outputs, [outputs]; None for their own.
    order: torch.Tensor | None = None
    # The factors of the layer's inputs, and of the outputs of the linear layers, [outputs].
    input_factor: float = 1.0
    factors: torch.Tensor | None = None

    def by_kind(self) -> list[tuple[Linears, torch.Tensor | None]]:
        """Split the linear layers where their kind changes, each with the order of its outputs.

        Outputs are reordered only within a linear layer.
        """
        groups: list[tuple[Linears, torch.Tensor | None]] = []
        begin = 0
        for linears in self.linears.by_kind():
            end = begin + linears.outputs
            order = None if self.order is None else self.order[begin:end] - begin
            groups.append((linears, order))
            begin = end
        return groups


@dataclass
class SoftmaxRouter:
    """A router that chooses the experts with the largest softmax of a linear layer's outputs."""

    weight: torch.Tensor  # [experts, hidden size]
    bias: torch.Tensor | None
    k: int  # The number of experts per token.
    # Whether the weights of a token's experts are divided by their sum.
    renormalizes: bool


@dataclass
class ExpertsSource:
    """A mixture of experts: a router and its experts."""

    # The module that computes the weights [tokens, k] and the indices [tokens, k] of each token's
    # experts. They come after another result.
    router: Any
    # The transformers module with the weights of all experts.
    experts: Any
    # Further arguments for the router's module.
    router_inputs: tuple[Any, ...] = ()
    # The router, if it is of this kind.
    softmax: SoftmaxRouter | None = None
    # An MLP that all tokens go through, whose result is added.
    shared: MlpSource | None = None
    # A linear layer whose sigmoid scales the result of `shared`.
    shared_gate: Linears | None = None

    def drop(self) -> None:
        """Remove the weights from the experts' module after they have been copied."""
        for name in [name for name, _ in self.experts.named_parameters()]:
            delattr(self.experts, name)


def epsilon(module: Any) -> float:
    """Return what a transformers RMS norm adds to the mean square."""
    if hasattr(module, "variance_epsilon"):
        return float(module.variance_epsilon)
    return float(module.eps)


def projected_rows(source: AttentionSource) -> torch.Tensor | None:
    """Return which outputs of `linears` are queries, keys and values in the order of `Rope`.

    The gates of the queries, which are next to their heads in the layer, come last.

    Returns:
        [outputs], or None if that is all of them in their own order.
    """
    head_dim = source.head_dim
    if source.order is None and not source.values_are_keys and not source.gated:
        return None
    order = torch.arange(head_dim) if source.order is None else source.order
    query_size = 2 * head_dim if source.gated else head_dim
    first_query = torch.arange(source.heads)[:, None] * query_size
    keys_begin = source.heads * query_size
    key_size = source.stored_heads * head_dim
    first_key = keys_begin + torch.arange(source.stored_heads)[:, None] * head_dim
    values_begin = keys_begin if source.values_are_keys else keys_begin + key_size
    parts = [
        (first_query + order).flatten(),
        (first_key + order).flatten(),
        values_begin + torch.arange(key_size),
    ]
    if source.gated:
        parts.append((first_query + head_dim + torch.arange(head_dim)).flatten())
    return torch.cat(parts)


def dense_weight(linear: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a linear layer without bias, whatever its format.

    Args:
        linear: The layer.
        dtype: The dtype of its inputs.

    Returns:
        [outputs, inputs]
    """
    if type(linear) is torch.nn.Linear:
        return linear.weight.detach()
    device = next(linear.parameters()).device
    outputs: torch.Tensor = linear(torch.eye(linear.in_features, dtype=dtype, device=device))
    return outputs.detach().t()


def with_unit_weight(norm: Any, dim: int, like: torch.Tensor) -> Any:
    """Return a norm without weight as a norm with a weight of 1.

    Args:
        norm: The transformers norm.
        dim: The size of its inputs.
        like: A tensor with the dtype and the device of the weight.
    """
    weighted = copy.deepcopy(norm)
    weighted.weight = torch.nn.Parameter(like.new_ones(dim), requires_grad=False)
    return weighted


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
