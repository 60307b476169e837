"""Parts of a layer by native.c, in bfloat16 on a CPU.

Sums in float32 may be added up in another order than in torch. One product computes queries, keys
and values. Another one computes gate and up, and multiplies them in bfloat16.
"""

from itertools import pairwise
from typing import Any

import torch

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
    Mlp,
    Norm,
    Product,
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
    Linears,
    MlpSource,
    NormStyle,
    RecurrentSource,
    Rope,
    SoftmaxRouter,
    epsilon,
    in_order,
    projected_rows,
)
from raypd.decoding.linear import GroupedPanels, PackedLinear, PanelLinear, has_pairs
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
        query, key, value = joined[:, : self.heads + 2 * self.kv_heads].split(
            [self.heads, self.kv_heads, self.kv_heads], 1
        )
        gate = joined[:, self.heads + 2 * self.kv_heads :].flatten(1) if self.gated else None
        # Queries and keys are neighbours, and are rotated in one call.
        both = joined[:, : self.heads + self.kv_heads]
        if len(self.norms) == 0:
            if self.rotated:
                native.rotate(both, rope.cos, rope.sin)
            return Projected(query, key, value, gate)
        if self.norms_last and self.rotated:
            native.rotate(both, rope.cos, rope.sin)
        query = self._normed(query, self.norms[0])
        key = self._normed(key, self.norms[1])
        if self.rotated and not self.norms_last:
            native.rotate(query, rope.cos, rope.sin)
            native.rotate(key, rope.cos, rope.sin)
        return Projected(query, key, value, gate)

    def scaled(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        native.sigmoid_gate(out, gate)
        return out

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
            gate_up: The products up to and with the activation, as `GroupedPanels`.
            down: Reads these.
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
        # The row of each token's experts.
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        return native.mix(rows, places.view(numbers.shape), weights.float(), residual)


class GroupedLoop(torch.nn.Module):
    """Products one after the other, each of which reads rows of its own."""

    def __init__(self, products: list[Any], gate: Gate | None) -> None:
        """
        Args:
            products: The products.
            gate: The activation behind them, or None.
        """
        super().__init__()
        self.products = torch.nn.ModuleList(products)
        self.gate = gate

    def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Compute as `GroupedPanels.forward` does."""
        parts: list[torch.Tensor] = []
        for product, (start, end) in zip(self.products, pairwise(starts.tolist()), strict=True):
            if end > start:
                parts.append(product(x[start:end]))
        joined = torch.cat(parts)
        if self.gate is None:
            return joined
        if self.gate.kind == GateKind.SWIGLU:
            return native.swiglu(joined)
        return self.gate(joined)


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
        is_even = source.head_dim % 32 == 0 and source.linears.outputs == source.outputs
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
            source: What it computes.
            in_torch: Its kind in torch.
            in_c: Its kind by native.c.
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
        """Say why the experts are left to torch; None if they are not."""
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
    """Tell whether linear layers can be joined into a packed product."""
    modules = linears.modules
    kinds = {type(module) for module in modules}
    biases = {module.bias is None for module in modules if hasattr(module, "bias")}
    if len(biases) != 1:
        return False
    if kinds == {torch.nn.Linear}:
        return all(has_pairs(module.weight) for module in modules)
    return kinds == {Int8Linear}


def _has_swiglu(source: MlpSource) -> bool:
    """Tell whether native.c has the activation of an MLP of this size."""
    return source.is_silu and source.inputs.outputs % 32 == 0


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
