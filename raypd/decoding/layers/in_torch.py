"""Parts of a layer in torch, for any device and dtype.

They call the transformers modules, whatever kind these are (quantized, with an adapter). `Builder`
makes them, and the builders for other devices override whatever those devices compute differently.
"""

from functools import partial
from typing import Any, NamedTuple

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.recurrent import GatedDelta, Mamba2, Recurrence, ShortConvolution
from raypd.decoding.layers.sources import (
    AttentionSource,
    ExpertsSource,
    LatentSource,
    Linears,
    MlpSource,
    NormStyle,
    RecurrentSource,
    Rope,
)


class Projected(NamedTuple):
    """What attention reads in a pass.

    Attributes:
        query: [tokens, heads, head_dim]
        key: [tokens, kv_heads, head_dim], or None if a kernel has already stored keys and values in
            the cache.
        value: [tokens, kv_heads, head_dim], or None likewise.
        gate: The gates of the outputs before the sigmoid, [tokens, heads * head_dim], if there are
            any.
    """

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    gate: torch.Tensor | None = None


class Norm(torch.nn.Module):
    """A norm computed by its transformers module."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] -> [..., dim]"""
        normed: torch.Tensor = self.module(x)
        return normed


class Product(torch.nn.Module):
    """A linear layer computed by its transformers module."""

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
        """Return residual + outputs, [tokens, outputs]. It may overwrite `residual`."""
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
        self.values_are_keys = source.values_are_keys
        self.is_reader = source.is_reader
        self.take(source)

    def take(self, source: AttentionSource) -> None:
        """Take the linear layers and the norms."""
        self.linears = torch.nn.ModuleList(source.linears.modules)
        self.query_norm = source.query_norm
        self.key_norm = source.key_norm
        self.value_norm = source.value_norm
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
        if rope.query_scale is not None:
            query = query * rope.query_scale
        out = step.attend(step, self.layer, query, key, value).flatten(1)
        return out if gate is None else self.scaled(out, gate)

    def scaled(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Scale outputs [tokens, heads * head_dim] by the sigmoid of their gates."""
        return out * torch.sigmoid(gate)

    def project(self, x: torch.Tensor, rope: Rope, step: Step) -> Projected:
        """Return what attention reads."""
        outputs = self._linear_outputs(x)
        query = outputs[0]
        gate: torch.Tensor | None = None
        if self.gated:
            both = query.unflatten(-1, (self.heads, 2, self.head_dim))
            query = both[:, :, 0].flatten(1)
            gate = both[:, :, 1].flatten(1)
        query = self._finished(query, self.heads, self.query_norm, rope)
        if self.is_reader:
            return Projected(query, None, None, gate)
        _, key, value = outputs
        key = self._finished(key, self.kv_heads, self.key_norm, rope)
        value = value.unflatten(-1, (self.kv_heads, -1))
        if self.value_norm is not None:
            value = self.value_norm(value)
        return Projected(query, key, value, gate)

    def _finished(self, x: torch.Tensor, heads: int, norm: Any, rope: Rope) -> torch.Tensor:
        """Norm and rotate queries or keys, [tokens, heads * head_dim] -> [tokens, heads, ...]."""
        if norm is not None and self.norms_all_heads:
            x = norm(x)
        x = x.unflatten(-1, (heads, -1))
        norms_heads = norm is not None and not self.norms_all_heads
        if norms_heads and not self.norms_last:
            x = norm(x)
        if self.rotated:
            x = self._rotated(x, rope)
        if norms_heads and self.norms_last:
            x = norm(x)
        return x

    def _linear_outputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the queries, keys and values that the layer computes, [tokens, outputs] each.

        Gates come next to their queries.
        """
        if self.is_reader or len(self.linears) > 1:
            outputs = [linear(x) for linear in self.linears]
            if self.values_are_keys:
                outputs.append(outputs[1])
            return outputs
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
    rotated = x * rope.cos[:, None] + torch.cat([-second, first], -1) * rope.sin[:, None]
    return rotated.to(x.dtype)


class Products(torch.nn.Module):
    """Linear layers that read the same inputs, computed by their transformers modules."""

    # Whether they read rows in FP8.
    reads_fp8 = False

    def __init__(self, linears: Linears) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(linears.modules)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """[tokens, inputs] -> [tokens, outputs] for each layer"""
        return [linear(x) for linear in self.linears]


class HeadProduct(torch.nn.Module):
    """A product of each head with its own weight."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor) -> None:
        """
        Args:
            weight: [heads, outputs, inputs]
        """
        super().__init__()
        self.register_buffer("weight", weight.transpose(1, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, inputs] -> [tokens, heads, outputs]"""
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


class LatentAttention(torch.nn.Module):
    """Attention to latents (MLA), without ever expanding them to keys and values.

    A query is first multiplied by the weight that would expand latents to keys, and then attends to
    the latents themselves; the result is multiplied by the weight that would expand latents to
    values. So the cache holds one latent and one rotated key per token, whatever the number of
    heads.
    """

    def __init__(self, source: LatentSource, builder: "Builder") -> None:
        """
        Args:
            source: What it computes.
            builder: Builds its parts.
        """
        super().__init__()
        self.layer = source.layer
        self.heads = source.heads
        self.plain_dim = source.plain_dim
        self.head_dim = source.rope_dim
        self.latent_dim = source.latent_dim
        absorbed, expansion = source.absorbed_weights()
        self.absorb = builder.head_product(absorbed)
        self.expand = builder.head_product(expansion)
        self.inputs = builder.products(source.inputs)
        self.reads_fp8 = self.inputs.reads_fp8
        self.latent_norm = builder.norm(source.latent_norm, source.norm_style)
        self.query: Product | None = None
        if source.query is not None:
            self.query = builder.product(source.query)
            self.query_norm = builder.norm(source.query_norm, source.norm_style, self.query)
        self.order: torch.Tensor | None = None
        if source.order is not None:
            self.order = source.order.to(absorbed.device)

    def forward(self, x: torch.Tensor, rope: Rope, step: Step) -> torch.Tensor:
        """Compute the attention as `Attention.forward` does.

        Returns:
            [tokens, heads * value_dim]
        """
        query, key = self.project(x, rope, step)
        if rope.query_scale is not None:
            query = query * rope.query_scale
        latents = step.attend(step, self.layer, query, key, None)
        return self.expand(latents).flatten(1)

    def project(
        self, x: torch.Tensor, rope: Rope, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute queries and keys; the keys are None if they are already in the cache.

        Returns:
            [tokens, heads, latent_dim + rope_dim] and [tokens, 1, latent_dim + rope_dim].
        """
        query, latents = self.query_and_latents(x)
        tokens = len(query)
        latent_dim = self.latent_dim
        absorbed = query.new_empty(tokens, self.heads, latent_dim + self.head_dim)
        absorbed[..., :latent_dim] = self.absorb(query[..., : self.plain_dim])
        absorbed[..., latent_dim:] = self.rotated(query[..., self.plain_dim :], rope)
        key = latents.new_empty(tokens, 1, latent_dim + self.head_dim)
        key[:, 0, :latent_dim] = self.latent_norm(latents[:, :latent_dim])
        key[..., latent_dim:] = self.rotated(latents[:, None, latent_dim:], rope)
        return absorbed, key

    def query_and_latents(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute queries [tokens, heads, plain_dim + rope_dim], and latents with rotated keys.

        The latents [tokens, latent_dim + rope_dim] are not normed yet, and the keys are not rotated
        yet.
        """
        query, latents = self.inputs(x)
        if self.query is not None:
            query = self.query(self.query_norm(query))
        return query.unflatten(-1, (self.heads, -1)), latents

    def rotated(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Apply the rotary embedding to x [tokens, heads, rope_dim]."""
        if self.order is not None:
            x = x[..., self.order]
        return rotate(x, rope)


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
        """Return residual + MLP(x), [tokens, hidden size]. It may overwrite `residual`."""
        return residual + self(x)


class Router(torch.nn.Module):
    """The choice of each token's experts, computed by its transformers module."""

    def __init__(self, source: ExpertsSource) -> None:
        super().__init__()
        self.module = source.router
        self.inputs = source.router_inputs

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts.

        Args:
            x: [tokens, hidden size]

        Returns:
            The weights and the indices of each token's experts, [tokens, k] each.
        """
        *_, weights, numbers = self.module(x, *self.inputs)
        return weights, numbers


class Shared(torch.nn.Module):
    """The MLP of a mixture that all tokens go through."""

    def __init__(self, mlp: Mlp, gate: Product | None) -> None:
        """
        Args:
            mlp: The MLP.
            gate: Returns one number per token, whose sigmoid scales the MLP's outputs.
        """
        super().__init__()
        self.mlp = mlp
        self.gate = gate

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + outputs, [tokens, hidden size]; it may overwrite `residual`."""
        if self.gate is None:
            return self.mlp.add(x, residual)
        return residual + torch.sigmoid(self.gate(x)) * self.mlp(x)


class Experts(torch.nn.Module):
    """A mixture of experts computed by transformers' code."""

    # It reads the same rows more than once, so it does not take them in FP8.
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
        """Return residual + the mixture, [tokens, hidden size]; it may overwrite `residual`."""
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
        """Add the outputs of each token's experts, times their weights.

        Args:
            x: [tokens, hidden size]
            weights: [tokens, k]
            numbers: The indices of the experts, [tokens, k].
            residual: [tokens, hidden size]

        Returns:
            [tokens, hidden size]
        """
        forward = self.experts.forward
        if x.dtype == torch.float64:
            # Grouped products do not support float64. The code that transformers wraps computes one
            # product per expert.
            original = getattr(type(self.experts).forward, "__wrapped__", None)
            if original is not None:
                forward = partial(original, self.experts)
        mixed: torch.Tensor = forward(x, numbers, weights)
        return residual + mixed


class Builder:
    """Builds the parts of a layer in torch.

    Attributes:
        fallbacks: The parts that the builder for another device left to torch, and why.
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
            module: The transformers module.
            style: How an RMS norm computes; None for a norm of another kind.
            reader: The only part that reads the norm's output, or None.
        """
        return Norm(module)

    def attention(self, source: AttentionSource) -> Attention:
        return Attention(source)

    def latent_attention(self, source: LatentSource) -> LatentAttention:
        return LatentAttention(source, self)

    def product(self, linears: Linears) -> Product:
        return Product(linears)

    def products(self, linears: Linears) -> Products:
        return Products(linears)

    def head_product(self, weight: torch.Tensor) -> torch.nn.Module:
        """Build a product of each head with its own weight, [heads, outputs, inputs]."""
        return HeadProduct(weight)

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
        """Record a recurrent layer, and return it."""
        self.recurrences.append(recurrence)
        return recurrence

    def shared_mlp(self, source: ExpertsSource) -> Shared | None:
        """Build the MLP of a mixture that all tokens go through, if there is one."""
        if source.shared is None:
            return None
        gate = None if source.shared_gate is None else self.product(source.shared_gate)
        return Shared(self.mlp(source.shared), gate)
