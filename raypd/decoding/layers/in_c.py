"""Parts of a layer computed by native.c, in bfloat16 on a CPU.

float32 sums may be added up in a different order than in torch. One product computes queries, keys
and values. Another computes gate and up, and multiplies them in bfloat16.
"""

from itertools import pairwise
from typing import Any

import torch

import raypd.decoding.attention.avx512 as avx512
import raypd.decoding.native as native
from raypd.decoding.attention.step import Step
from raypd.decoding.layers.expert_weights import (
    ExpertWeights,
    Gate,
    GateKind,
    gate_of,
    read_weights,
)
from raypd.decoding.layers.in_torch import (
    Attention,
    Builder,
    Experts,
    HeadProduct,
    LatentAttention,
    Mlp,
    Norm,
    Product,
    Products,
    Projected,
    Router,
    Shared,
)
from raypd.decoding.layers.recurrent import (
    GatedDelta,
    Mamba2,
    Recurrence,
    ShortConvolution,
    joined_parts,
)
from raypd.decoding.layers.recurrent_in_c import (
    CGatedDelta,
    CMamba2,
    CShortConvolution,
    refusal,
)
from raypd.decoding.layers.sources import (
    AttentionSource,
    ExpertsSource,
    LatentSource,
    Linears,
    MlpSource,
    NormStyle,
    RecurrentSource,
    Rope,
    SoftmaxRouter,
    epsilon,
    in_order,
    projected_rows,
    with_unit_weight,
)
from raypd.decoding.linear import GroupedPanels, PackedLinear, PanelLinear, has_pairs
from raypd.decoding.quantized import Int8Linear

AnyProduct = PanelLinear | PackedLinear | Int8Linear


class CNorm(torch.nn.Module):
    """An RMS norm computed by native.c."""

    def __init__(self, module: Any, style: NormStyle) -> None:
        super().__init__()
        self.weight = module.weight
        self.eps = epsilon(module)
        self.style = style

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] -> [..., dim]"""
        return native.rms_norm(x, self.weight, self.eps, self.style)


class CProduct(Product):
    """A linear layer whose weight is packed."""

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
    """An attention layer whose projections are one product."""

    def __init__(
        self,
        source: AttentionSource,
        product: AnyProduct,
        query_norm: Any,
        key_norm: Any,
        value_norm: Any,
    ) -> None:
        """
        Args:
            source: What the layer computes.
            product: Returns queries, keys and values in the order of `Rope`.
            query_norm: The norm of queries, or None.
            key_norm: The norm of keys, or None.
            value_norm: The norm of values, or None.
        """
        super().__init__(source)
        self.projection = product
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.value_norm = value_norm

    def take(self, source: AttentionSource) -> None:
        self.norms_all_heads = source.norms_all_heads
        self.norms_last = source.norms_last

    def project(self, x: torch.Tensor, rope: Rope, step: Step) -> Projected:
        joined = self.projection(x).unflatten(-1, (-1, self.head_dim))  # [tokens, all heads, ...]
        kv_heads = 0 if self.is_reader else self.kv_heads
        count = self.heads + 2 * kv_heads
        query, key, value = joined[:, :count].split([self.heads, kv_heads, kv_heads], 1)
        gate = joined[:, count:].flatten(1) if self.gated else None
        if self.rotated and (self.query_norm is None or self.norms_last):
            # Queries and keys are adjacent, so they are rotated in one call.
            native.rotate(joined[:, : self.heads + kv_heads], rope.cos, rope.sin)
        query = self._normed(query, self.query_norm, rope)
        if self.is_reader:
            return Projected(query, None, None, gate)
        key = self._normed(key, self.key_norm, rope)
        if self.value_norm is not None:
            value = self.value_norm(value)
        return Projected(query, key, value, gate)

    def scaled(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        native.sigmoid_gate(out, gate)
        return out

    def _normed(self, x: torch.Tensor, norm: Any, rope: Rope) -> torch.Tensor:
        """Norm queries or keys [tokens, heads, head_dim], and rotate them if still needed."""
        if norm is None:
            return x
        x = norm(x.flatten(1)).view(x.shape) if self.norms_all_heads else norm(x)
        if self.rotated and not self.norms_last:
            native.rotate(x, rope.cos, rope.sin)
        return x


class CProducts(Products):
    """Linear layers as one product."""

    def __init__(self, product: AnyProduct, sizes: list[int]) -> None:
        """
        Args:
            product: Returns the outputs of all layers.
            sizes: The number of outputs of each layer.
        """
        torch.nn.Module.__init__(self)
        self.product = product
        self.sizes = sizes

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(self.product(x).split(self.sizes, -1))


class CHeadProduct(torch.nn.Module):
    """A product of each head with its own packed weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        """
        Args:
            weight: [heads, outputs, inputs]
        """
        super().__init__()
        self.heads = len(weight)
        self.panels = GroupedPanels(weight.contiguous(), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, inputs] -> [tokens, heads, outputs]"""
        rows = x.transpose(0, 1).reshape(-1, x.shape[-1])
        starts = torch.arange(self.heads + 1) * len(x)
        return self.panels(rows, starts).unflatten(0, (self.heads, -1)).transpose(0, 1)


class CLatentAttention(LatentAttention):
    """Attention to latents whose rotation is computed by native.c."""

    def rotated(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        if rope.cos.dtype != torch.bfloat16 or self.head_dim % 32:
            return super().rotated(x, rope)
        copied = x.contiguous() if self.order is None else x[..., self.order]
        native.rotate(copied, rope.cos, rope.sin)
        return copied


class CMlp(Mlp):
    """A gated MLP of two products."""

    def __init__(
        self, source: MlpSource, gated: AnyProduct, down: AnyProduct, gate: GateKind | None
    ) -> None:
        """
        Args:
            source: What the layer computes.
            gated: Returns gate and up; if it is a `PanelLinear` and native.c supports the
                activation, their product.
            down: Reads the result.
            gate: The activation; None if native.c does not support it.
        """
        torch.nn.Module.__init__(self)
        self.gated = gated
        self.down = down
        self.activation = source.activation
        self.gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._between(x))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return _add(self.down, self._between(x), residual)

    def _between(self, x: torch.Tensor) -> torch.Tensor:
        """Return activation(gate) * up, [tokens, intermediate size]."""
        x = self.gated(x)
        if isinstance(self.gated, PanelLinear) and self.gated.gate:
            return x
        if self.gate is not None:
            return native.gated(x, self.gate)
        gate, up = x.chunk(2, -1)
        return self.activation(gate) * up


class CRouter(Router):
    """A softmax router whose linear layer is packed."""

    def __init__(self, source: SoftmaxRouter, product: PanelLinear | PackedLinear) -> None:
        torch.nn.Module.__init__(self)
        self.product = product
        self.k = source.k
        self.renormalizes = source.renormalizes

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, numbers = self.product(x).float().softmax(-1).topk(self.k)
        if self.renormalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, numbers


class CExperts(Experts):
    """A mixture whose tokens are sorted by expert, for products of many tokens each."""

    def __init__(
        self,
        source: ExpertsSource,
        router: Router,
        shared: Shared | None,
        gate_up: torch.nn.Module,
        down: torch.nn.Module,
    ) -> None:
        """
        Args:
            source: The router and the experts.
            router: Chooses the experts.
            shared: The MLP for all tokens, if there is one.
            gate_up: The products up to and including the activation, like `GroupedPanels`.
            down: Reads the result.
        """
        super().__init__(source, router, shared)
        self.gate_up = gate_up
        self.down = down

    def take(self, source: ExpertsSource) -> None:
        self.count = 0
        source.drop()

    def mix(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        numbers: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        k = numbers.shape[1]
        _, order = numbers.flatten().sort(stable=True)
        starts = torch.zeros(self.count + 1, dtype=torch.int64)
        torch.cumsum(numbers.flatten().bincount(minlength=self.count), 0, out=starts[1:])
        rows = self.down(self.gate_up(x.index_select(0, order // k), starts), starts)
        # The sorted row of each pair of token and expert.
        sorted_rows = torch.empty_like(order)
        sorted_rows[order] = torch.arange(len(order))
        return native.mix(rows, sorted_rows.view(numbers.shape), weights.float(), residual)


class GroupedLoop(torch.nn.Module):
    """Products computed one after the other, each on its own rows."""

    def __init__(self, products: list[Any], gate: Gate | None) -> None:
        """
        Args:
            products: The products.
            gate: The activation after them, or None.
        """
        super().__init__()
        self.products = torch.nn.ModuleList(products)
        self.gate = gate

    def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Compute the same as `GroupedPanels.forward`."""
        parts: list[torch.Tensor] = []
        for product, (start, end) in zip(self.products, pairwise(starts.tolist()), strict=True):
            if end > start:
                parts.append(product(x[start:end]))
        joined = torch.cat(parts)
        if self.gate is None:
            return joined
        if self.gate.kind == GateKind.CLAMPED:
            return self.gate(joined)
        return native.gated(joined, self.gate.kind)


class CBuilder(Builder):
    """Builds the parts with native.c."""

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
        is_even = source.head_dim % 32 == 0 and source.linears.outputs == source.output_count
        if not is_even or not _are_packable(source.linears):
            self.fallbacks.append(f"attention with heads of {source.head_dim}")
            return Attention(source)
        query_norm = self._head_norm(source.query_norm, source)
        key_norm = self._head_norm(source.key_norm, source)
        value_norm = None
        if source.value_norm is not None:
            like = source.linears.modules[0].weight
            unit_norm = with_unit_weight(source.value_norm, source.head_dim, like)
            value_norm = self.norm(unit_norm, source.norm_style)
        product = self.joined(source.linears, rows=projected_rows(source))
        return CAttention(source, product, query_norm, key_norm, value_norm)

    def _head_norm(self, norm: Any, source: AttentionSource) -> Any:
        """Build the norm of queries or keys, if there is one."""
        if norm is None:
            return None
        return self.norm(in_order(norm, source), source.norm_style)

    def latent_attention(self, source: LatentSource) -> LatentAttention:
        key_dim = source.latent_dim + source.rope_dim
        if source.rope_dim % 32 or not avx512.takes_sizes(source.heads, key_dim, source.latent_dim):
            self.fallbacks.append(f"latent attention of {source.latent_dim}")
        attention = CLatentAttention(source, self)
        source.expansion.drop()
        return attention

    def product(self, linears: Linears) -> Product:
        if not _are_packable(linears):
            self.fallbacks.append("product")
            return Product(linears)
        return CProduct(self.joined(linears))

    def products(self, linears: Linears) -> Products:
        if not _are_packable(linears):
            self.fallbacks.append("products")
            return Products(linears)
        sizes = [int(module.weight.shape[0]) for module in linears.modules]
        return CProducts(self.joined(linears), sizes)

    def head_product(self, weight: torch.Tensor) -> torch.nn.Module:
        if not has_pairs(weight):
            self.fallbacks.append("product of heads")
            return HeadProduct(weight)
        return CHeadProduct(weight)

    def mlp(self, source: MlpSource) -> Mlp:
        if not _are_packable(source.inputs) or not _are_packable(source.down):
            self.fallbacks.append("mlp")
            return Mlp(source)
        gate = _gate_of(source)
        if gate is None:
            self.fallbacks.append("activation of an MLP")
        gated = self.joined(source.inputs, gate=gate)
        return CMlp(source, gated, self.joined(source.down), gate)

    def experts(self, source: ExpertsSource) -> Experts:
        router = self.router(source)
        shared = self.shared_mlp(source)
        reason = self._expert_refusal(source)
        if reason is not None:
            self.fallbacks.append(reason)
            return Experts(source, router, shared)
        weights = read_weights(source.experts)
        gate = weights.gate
        if weights.gate_up_scale is None:
            gate_up, down = self.grouped(weights)
        else:
            gate_up = GroupedLoop(_int8_products(weights, "gate_up"), gate)
            down = GroupedLoop(_int8_products(weights, "down"), None)
        experts = CExperts(source, router, shared, gate_up, down)
        experts.count = len(weights.gate_up)
        return experts

    def gated_delta(self, source: RecurrentSource) -> Recurrence:
        return self.recurrence(source, GatedDelta, CGatedDelta)

    def mamba2(self, source: RecurrentSource) -> Recurrence:
        return self.recurrence(source, Mamba2, CMamba2)

    def short_convolution(self, source: RecurrentSource) -> Recurrence:
        return self.recurrence(source, ShortConvolution, CShortConvolution)

    def recurrence(
        self, source: RecurrentSource, in_torch: type[Recurrence], in_c: type[Recurrence]
    ) -> Recurrence:
        """Build a recurrent layer.

        Args:
            source: What the layer computes.
            in_torch: The class that computes it in torch.
            in_c: The class that computes it with native.c.
        """
        number = len(self.recurrences)
        part = in_torch(source, number)
        reason = refusal(part)
        if reason is None:
            part = in_c(source, number)
        else:
            self.fallbacks.append(reason)
        groups = source.by_kind()
        if all(_are_packable(linears) for linears, _ in groups):
            part.projection = joined_parts(
                [self.joined(linears, rows=order) for linears, order in groups]
            )
        else:
            self.fallbacks.append(f"projection of {in_torch.__name__}")
        return self.counted(part)

    def router(self, source: ExpertsSource) -> Router:
        """Build the router of a mixture."""
        softmax = source.softmax
        if softmax is None or not has_pairs(softmax.weight):
            self.fallbacks.append(f"router {type(source.router).__name__}")
            return Router(source)
        bias = None if softmax.bias is None else softmax.bias.detach()
        return CRouter(softmax, self.linear(softmax.weight.detach(), bias))

    def grouped(self, weights: ExpertWeights) -> tuple[torch.nn.Module, torch.nn.Module]:
        """Make the products of experts in bfloat16."""
        gate = weights.gate
        gate_up = GroupedPanels(
            weights.gate_up, weights.gate_up_bias, int(gate.kind), gate.alpha, gate.limit
        )
        return gate_up, GroupedPanels(weights.down, weights.down_bias)

    @staticmethod
    def _expert_refusal(source: ExpertsSource) -> str | None:
        """Return why the experts are left to torch; None if they are not."""
        name = type(source.experts).__name__
        if gate_of(source.experts) is None:
            return f"activation of {name}"
        weights = read_weights(source.experts)
        if weights.gate_up_scale is None and not has_pairs(weights.gate_up):
            return f"dtype of {name}"
        if weights.gate_up.shape[1] % 32 or weights.down.shape[1] % 16:
            return f"sizes of {name}"
        return None

    def joined(
        self,
        linears: Linears,
        gate: GateKind | None = None,
        rows: torch.Tensor | None = None,
    ) -> AnyProduct:
        """Join linear layers into one, and remove them from their owner.

        Args:
            linears: The layers.
            gate: How the first half of the outputs gates the second half, if the product does this.
            rows: The order of the outputs, [outputs]; None to keep their order.
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
        return self.linear(weight, bias, gate)

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gate: GateKind | None = None
    ) -> PanelLinear | PackedLinear:
        """Make a linear layer of a weight in bfloat16."""
        return PanelLinear(weight, bias, gate or 0)


class AmxBuilder(CBuilder):
    """Builds the parts with native.c, except products, which oneDNN computes with AMX."""

    @property
    def is_stable(self) -> bool:
        return False

    def head_product(self, weight: torch.Tensor) -> torch.nn.Module:
        # torch computes it with oneDNN.
        return HeadProduct(weight.contiguous())

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gate: GateKind | None = None
    ) -> PackedLinear:
        return PackedLinear(weight, bias)

    def grouped(self, weights: ExpertWeights) -> tuple[torch.nn.Module, torch.nn.Module]:
        gate_up = GroupedLoop(self._products(weights.gate_up, weights.gate_up_bias), weights.gate)
        return gate_up, GroupedLoop(self._products(weights.down, weights.down_bias), None)

    def _products(self, weights: torch.Tensor, bias: torch.Tensor | None) -> list[PackedLinear]:
        products: list[PackedLinear] = []
        for number, weight in enumerate(weights):
            products.append(
                self.linear(weight.contiguous(), None if bias is None else bias[number])
            )
        return products


def _are_packable(linears: Linears) -> bool:
    """Return whether linear layers can be joined into a packed product."""
    modules = linears.modules
    kinds = {type(module) for module in modules}
    biases = {module.bias is None for module in modules if hasattr(module, "bias")}
    if len(biases) != 1:
        return False
    if kinds == {torch.nn.Linear}:
        return all(has_pairs(module.weight) for module in modules)
    return kinds == {Int8Linear}


def _gate_of(source: MlpSource) -> GateKind | None:
    """Return the activation of an MLP; None if native.c does not support it for this size."""
    return source.gate if source.inputs.outputs % 32 == 0 else None


def _int8_products(weights: ExpertWeights, name: str) -> list[Int8Linear]:
    """Make a product of each expert's codes; `name` is "gate_up" or "down"."""
    codes = getattr(weights, name)
    scales = getattr(weights, f"{name}_scale")
    biases = getattr(weights, f"{name}_bias")
    products: list[Int8Linear] = []
    for number in range(len(codes)):
        bias = None if biases is None else biases[number]
        products.append(Int8Linear(codes[number], scales[number], bias))
    return products
