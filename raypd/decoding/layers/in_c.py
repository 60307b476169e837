"""Parts of a layer by native.c, in bfloat16 on a CPU.

Sums in float32 may be added up in another order than in torch. One product computes queries, keys
and values. Another one computes gate and up, and multiplies them in bfloat16.
"""

from typing import Any

import torch

import raypd.decoding.native as native
from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Attention, Builder, Mlp, Norm, Product, Projected
from raypd.decoding.layers.sources import (
    AttentionSource,
    Linears,
    MlpSource,
    NormStyle,
    Rope,
    epsilon,
    in_order,
    projected_rows,
)
from raypd.decoding.linear import PackedLinear, PanelLinear, has_pairs
from raypd.decoding.quantized import Int8Linear

AnyProduct = PanelLinear | PackedLinear | Int8Linear


class CNorm(torch.nn.Module):
    """An RMS norm by native.c."""

    def __init__(self, module: Any, style: NormStyle) -> None:
        super().__init__()
        self.weight = module.weight
        self.eps = epsilon(module)
        self.style = style

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] -> [..., dim]"""
        return native.rms_norm(x, self.weight, self.eps, self.style)


class CProduct(Product):
    """A linear layer whose products are packed."""

    def __init__(self, product: AnyProduct) -> None:
        torch.nn.Module.__init__(self)
        self.linear = product

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return _add(self.linear, x, residual)


def _add(product: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return residual + product(x), [tokens, outputs]."""
    if isinstance(product, PanelLinear):
        return product(x, residual)
    return residual + product(x)


class CAttention(Attention):
    """An attention whose projections are one product."""

    def __init__(self, source: AttentionSource, product: AnyProduct, norms: list[Any]) -> None:
        """
        Args:
            source: What it computes.
            product: Gives queries, keys and values in the order of `Rope`.
            norms: Those of queries and keys, or none.
        """
        super().__init__(source)
        self.projection = product
        self.norms = torch.nn.ModuleList(norms)

    def take(self, source: AttentionSource) -> None:
        self.norms_all_heads = source.norms_all_heads
        self.norms_last = source.norms_last

    def project(self, x: torch.Tensor, rope: Rope, step: Step) -> Projected:
        joined = self.projection(x).unflatten(-1, (-1, self.head_dim))  # [tokens, all heads, ...]
        query, key, value = joined.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if len(self.norms) == 0:
            if self.rotated:
                # Queries and keys are neighbours, and are rotated in one call.
                native.rotate(joined[:, : -self.kv_heads], rope.cos, rope.sin)
            return query, key, value
        if self.norms_last and self.rotated:
            native.rotate(joined[:, : -self.kv_heads], rope.cos, rope.sin)
        query = self._normed(query, self.norms[0])
        key = self._normed(key, self.norms[1])
        if self.rotated and not self.norms_last:
            native.rotate(query, rope.cos, rope.sin)
            native.rotate(key, rope.cos, rope.sin)
        return query, key, value

    def _normed(self, x: torch.Tensor, norm: Any) -> torch.Tensor:
        if not self.norms_all_heads:
            return norm(x)
        return norm(x.flatten(1)).view(x.shape)


class CMlp(Mlp):
    """A gated MLP of two products."""

    def __init__(
        self, source: MlpSource, gated: AnyProduct, down: AnyProduct, has_swiglu: bool
    ) -> None:
        """
        Args:
            source: What it computes.
            gated: Gives gate and up; if it is a `PanelLinear`, their product.
            down: Reads that.
            has_swiglu: Whether native.c has the activation.
        """
        torch.nn.Module.__init__(self)
        self.gated = gated
        self.down = down
        self.activation = source.activation
        self.has_swiglu = has_swiglu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._between(x))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return _add(self.down, self._between(x), residual)

    def _between(self, x: torch.Tensor) -> torch.Tensor:
        """Return activation(gate) * up, [tokens, intermediate size]."""
        x = self.gated(x)
        if isinstance(self.gated, PanelLinear) and self.gated.gated:
            return x
        if self.has_swiglu:
            return native.swiglu(x)
        gate, up = x.chunk(2, -1)
        return self.activation(gate) * up


class CBuilder(Builder):
    """Builds the parts by native.c."""

    @property
    def is_stable(self) -> bool:
        return len(self.fallbacks) == 0

    def norm(
        self,
        module: Any,
        style: NormStyle | None = NormStyle.ROUND_FIRST,
        reader: Any = None,
    ) -> torch.nn.Module:
        if style is None or not has_pairs(module.weight) or len(module.weight) % 16:
            self.fallbacks.append(f"norm {type(module).__name__}")
            return Norm(module)
        return CNorm(module, style)

    def attention(self, source: AttentionSource) -> Attention:
        outputs = (source.heads + 2 * source.kv_heads) * source.head_dim
        is_even = source.head_dim % 32 == 0 and _outputs(source.linears) == outputs
        if not is_even or not _are_packable(source.linears):
            self.fallbacks.append(f"attention with heads of {source.head_dim}")
            return Attention(source)
        norms: list[Any] = []
        if source.has_norms:
            for norm in (source.query_norm, source.key_norm):
                norms.append(self.norm(in_order(norm, source), source.norm_style))
        product = self.joined(source.linears, rows=projected_rows(source))
        return CAttention(source, product, norms)

    def product(self, linears: Linears) -> Product:
        if not _are_packable(linears):
            self.fallbacks.append("product")
            return Product(linears)
        return CProduct(self.joined(linears))

    def mlp(self, source: MlpSource) -> Mlp:
        if not _are_packable(source.inputs) or not _are_packable(source.down):
            self.fallbacks.append("mlp")
            return Mlp(source)
        fused = _has_swiglu(source)
        if not fused:
            self.fallbacks.append("activation of an MLP")
        gated = self.joined(source.inputs, gated=fused)
        return CMlp(source, gated, self.joined(source.down), fused)

    def joined(
        self, linears: Linears, gated: bool = False, rows: torch.Tensor | None = None
    ) -> AnyProduct:
        """Join linear layers into one, and remove them from their owner.

        Args:
            linears: The layers.
            gated: As `PanelLinear` has it.
            rows: The order of the outputs, [outputs]; None for their own.
        """
        modules = linears.modules
        weight = torch.cat([module.weight.detach() for module in modules])
        bias = None
        if modules[0].bias is not None:
            bias = torch.cat([module.bias.detach() for module in modules])
        scale = None
        if isinstance(modules[0], Int8Linear):
            scale = torch.cat([module.scale for module in modules])
        linears.drop()
        if rows is not None:
            weight = weight[rows]
            bias = None if bias is None else bias[rows]
            scale = None if scale is None else scale[rows]
        if scale is not None:
            return Int8Linear(weight, scale, bias)
        return self.linear(weight, bias, gated)

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
    ) -> PanelLinear | PackedLinear:
        """Make a linear layer of a weight in bfloat16."""
        return PanelLinear(weight, bias, gated)


class AmxBuilder(CBuilder):
    """Builds the parts by native.c, except products, which oneDNN computes with AMX."""

    @property
    def is_stable(self) -> bool:
        return False

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
    ) -> PackedLinear:
        return PackedLinear(weight, bias)


def _are_packable(linears: Linears) -> bool:
    """Tell whether linear layers can be joined into a packed product."""
    modules = linears.modules
    kinds = {type(module) for module in modules}
    biases = {module.bias is None for module in modules if hasattr(module, "bias")}
    if len(biases) != 1:
        return False
    if kinds == {torch.nn.Linear}:
        return all(has_pairs(module.weight) for module in modules)
    return kinds == {Int8Linear}


def _outputs(linears: Linears) -> int:
    """Count the outputs of linear layers."""
    return sum(int(module.weight.shape[0]) for module in linears.modules)


def _has_swiglu(source: MlpSource) -> bool:
    """Tell whether native.c has the activation of an MLP of this size."""
    return source.is_silu and _outputs(source.inputs) % 32 == 0
