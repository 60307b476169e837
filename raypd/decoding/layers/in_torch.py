"""Parts of a layer in torch, for any device and dtype.

They call the modules of transformers, whatever these are (quantized, with an adapter). `Builder`
makes them, and the builders of other devices override what these compute in another way.
"""

from functools import partial
from typing import Any, NamedTuple

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.recurrent import GatedDelta, Mamba2, Recurrence, ShortConvolution
from raypd.decoding.layers.sources import (
    AttentionSource,
    ExpertsSource,
    Linears,
    MlpSource,
    NormStyle,
    RecurrentSource,
    Rope,
)


class Projected(NamedTuple):
    """What attention reads of a pass.

    Attributes:
        query: [tokens, heads, head_dim]
        key: [tokens, kv_heads, head_dim], or None if a kernel has put keys and values into the
            cache already.
        value: [tokens, kv_heads, head_dim], or None likewise.
        gate: The gates of the outputs before the sigmoid, [tokens, heads * head_dim], if there are
            any.
    """

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    gate: torch.Tensor | None = None


class Norm(torch.nn.Module):
    """A norm by its module of transformers."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] -> [..., dim]"""
        normed: torch.Tensor = self.module(x)
        return normed


class Product(torch.nn.Module):
    """A linear layer by its module of transformers."""

    # Whether it reads rows in FP8.
    reads_fp8 = False

    def __init__(self, linears: Linears) -> None:
        super().__init__()
        (self.linear,) = linears.modules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, inputs] -> [tokens, outputs]"""
        out: torch.Tensor = self.linear(x)
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + outputs, [tokens, outputs]. It may be in the place of `residual`."""
        return residual + self(x)


class Attention(torch.nn.Module):
    """The projection of queries, keys and values, their rotation, and attention over the cache."""

    # Whether it reads rows in FP8.
    reads_fp8 = False

    def __init__(self, source: AttentionSource) -> None:
        super().__init__()
        self.layer = source.layer
        self.heads = source.heads
        self.kv_heads = source.kv_heads
        self.head_dim = source.head_dim
        self.rotated = source.rotated
        self.gated = source.gated
        self.take(source)

    def take(self, source: AttentionSource) -> None:
        """Take the linear layers and the norms."""
        self.linears = torch.nn.ModuleList(source.linears.modules)
        self.query_norm = source.query_norm
        self.key_norm = source.key_norm
        self.norms_all_heads = source.norms_all_heads
        self.norms_last = source.norms_last
        self.order: torch.Tensor | None = source.order
        if source.order is not None:
            self.order = source.order.to(source.linears.modules[0].weight.device)

    def forward(self, x: torch.Tensor, rope: Rope, step: Step) -> torch.Tensor:
        """Compute the attention.

        Args:
            x: [tokens, hidden size]
            rope: The rotary embedding.
            step: The pass.

        Returns:
            [tokens, heads * head_dim]
        """
        query, key, value, gate = self.project(x, rope, step)
        out = step.attend(step, self.layer, query, key, value).flatten(1)
        return out if gate is None else self.scaled(out, gate)

    def scaled(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Scale outputs [tokens, heads * head_dim] by the sigmoid of their gates."""
        return out * torch.sigmoid(gate)

    def project(self, x: torch.Tensor, rope: Rope, step: Step) -> Projected:
        """Compute what attention reads."""
        query, key, value = self._linear_outputs(x)
        gate: torch.Tensor | None = None
        if self.gated:
            both = query.unflatten(-1, (self.heads, 2, self.head_dim))
            query = both[:, :, 0].flatten(1)
            gate = both[:, :, 1].flatten(1)
        if self.query_norm is not None and self.norms_all_heads:
            query = self.query_norm(query)
            key = self.key_norm(key)
        query = query.unflatten(-1, (self.heads, -1))
        key = key.unflatten(-1, (self.kv_heads, -1))
        value = value.unflatten(-1, (self.kv_heads, -1))
        norms_heads = self.query_norm is not None and not self.norms_all_heads
        if norms_heads and not self.norms_last:
            query = self.query_norm(query)
            key = self.key_norm(key)
        if self.rotated:
            query = self._rotated(query, rope)
            key = self._rotated(key, rope)
        if norms_heads and self.norms_last:
            query = self.query_norm(query)
            key = self.key_norm(key)
        return Projected(query, key, value, gate)

    def _linear_outputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return queries, keys and values, [tokens, heads * head_dim] each.

        Gates are beside their queries.
        """
        if len(self.linears) > 1:
            return [linear(x) for linear in self.linears]
        query_size = self.heads * self.head_dim
        key_size = self.kv_heads * self.head_dim
        joined = self.linears[0](x)
        value_size = joined.shape[-1] - query_size - key_size
        return list(joined.split([query_size, key_size, value_size], -1))

    def _rotated(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        if self.order is not None:
            x = x[..., self.order]
        return rotate(x, rope)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Apply the rotary embedding to x [tokens, heads, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * rope.cos[:, None] + torch.cat([-second, first], -1) * rope.sin[:, None]


class Mlp(torch.nn.Module):
    """A gated MLP."""

    # Whether it reads rows in FP8.
    reads_fp8 = False

    def __init__(self, source: MlpSource) -> None:
        super().__init__()
        self.take(source)

    def take(self, source: MlpSource) -> None:
        """Take the linear layers."""
        self.inputs = torch.nn.ModuleList(source.inputs.modules)
        (self.down,) = source.down.modules
        self.activation = source.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden size] -> [tokens, hidden size]"""
        if len(self.inputs) > 1:
            gate, up = [linear(x) for linear in self.inputs]
        else:
            gate, up = self.inputs[0](x).chunk(2, -1)
        out: torch.Tensor = self.down(self.activation(gate) * up)
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + MLP(x), [tokens, hidden size]. It may be in the place of `residual`."""
        return residual + self(x)


class Router(torch.nn.Module):
    """The choice of each token's experts, by its module of transformers."""

    def __init__(self, source: ExpertsSource) -> None:
        super().__init__()
        self.module = source.router
        self.inputs = source.router_inputs

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts.

        Args:
            x: [tokens, hidden size]

        Returns:
            The weights and the numbers of each token's experts, [tokens, k] each.
        """
        *_, weights, numbers = self.module(x, *self.inputs)
        return weights, numbers


class Shared(torch.nn.Module):
    """The MLP of a mixture that all tokens go through."""

    def __init__(self, mlp: Mlp, gate: Product | None) -> None:
        """
        Args:
            mlp: The MLP.
            gate: Gives a number per token, whose sigmoid scales the MLP's outputs.
        """
        super().__init__()
        self.mlp = mlp
        self.gate = gate

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + outputs, [tokens, hidden size]; maybe in the place of `residual`."""
        if self.gate is None:
            return self.mlp.add(x, residual)
        return residual + torch.sigmoid(self.gate(x)) * self.mlp(x)


class Experts(torch.nn.Module):
    """A mixture of experts by transformers' code."""

    # It reads the same rows more than once, so they are not in FP8.
    reads_fp8 = False

    def __init__(self, source: ExpertsSource, router: Router, shared: Shared | None) -> None:
        """
        Args:
            source: The router and the experts.
            router: Chooses the experts.
            shared: The MLP for all tokens, if there is one.
        """
        super().__init__()
        self.router = router
        self.shared = shared
        self.take(source)

    def take(self, source: ExpertsSource) -> None:
        """Take the weights of the experts."""
        self.experts = source.experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden size] -> [tokens, hidden size]"""
        return self.add(x, torch.zeros_like(x))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + the mixture, [tokens, hidden size]; maybe in the place of residual."""
        weights, numbers = self.router(x)
        out = self.mix(x, weights, numbers, residual)
        if self.shared is None:
            return out
        return self.shared.add(x, out)

    def mix(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        numbers: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """Add what each token's experts give, times their weights.

        Args:
            x: [tokens, hidden size]
            weights: [tokens, k]
            numbers: The numbers of the experts, [tokens, k].
            residual: [tokens, hidden size]

        Returns:
            [tokens, hidden size]
        """
        forward = self.experts.forward
        if x.dtype == torch.float64:
            # Grouped products have no float64. The code that transformers wraps has one product per
            # expert.
            original = getattr(type(self.experts).forward, "__wrapped__", None)
            if original is not None:
                forward = partial(original, self.experts)
        mixed: torch.Tensor = forward(x, numbers, weights)
        return residual + mixed


class Builder:
    """Builds the parts of a layer in torch.

    Attributes:
        fallbacks: The parts that a builder of another device has left to torch, and why.
        recurrences: The recurrent layers that it built.
    """

    def __init__(self) -> None:
        self.fallbacks: list[str] = []
        self.recurrences: list[Recurrence] = []

    @property
    def is_stable(self) -> bool:
        """Whether a token's outputs have the same bits in every pass."""
        return False

    def norm(
        self,
        module: Any,
        style: NormStyle | None = NormStyle.ROUND_FIRST,
        reader: Any = None,
    ) -> torch.nn.Module:
        """Build a norm.

        Args:
            module: The module of transformers.
            style: How an RMS norm computes; None for a norm of another kind.
            reader: The part that alone reads what it gives, or None.
        """
        return Norm(module)

    def attention(self, source: AttentionSource) -> Attention:
        return Attention(source)

    def product(self, linears: Linears) -> Product:
        return Product(linears)

    def mlp(self, source: MlpSource) -> Mlp:
        return Mlp(source)

    def experts(self, source: ExpertsSource) -> Experts:
        return Experts(source, Router(source), self.shared_mlp(source))

    def gated_delta(self, source: RecurrentSource) -> Recurrence:
        return self.counted(GatedDelta(source, len(self.recurrences)))

    def mamba2(self, source: RecurrentSource) -> Recurrence:
        return self.counted(Mamba2(source, len(self.recurrences)))

    def short_convolution(self, source: RecurrentSource) -> Recurrence:
        return self.counted(ShortConvolution(source, len(self.recurrences)))

    def counted(self, recurrence: Recurrence) -> Recurrence:
        """Note a recurrent layer, and return it."""
        self.recurrences.append(recurrence)
        return recurrence

    def shared_mlp(self, source: ExpertsSource) -> Shared | None:
        """Build the MLP of a mixture that all tokens go through, if there is one."""
        if source.shared is None:
            return None
        gate = None if source.shared_gate is None else self.product(source.shared_gate)
        return Shared(self.mlp(source.shared), gate)
