"""Parts of a layer on GPUs: four products and five kernels, where torch alone starts fifty-six.

    norm
    queries, keys and values in one product
    norms of queries and keys, rotation, keys and values into the cache
    attention output, which the product adds to the hidden states
    norm
    gate and up in one product
    silu(gate) * up
    down, which the product adds to the hidden states

In FP8 there are twelve: the kernels before a product write its inputs in FP8, and a separate kernel
converts the output of attention.

The kernels compute in float32 and round once. This file needs triton.
"""

from typing import Any

import torch

import raypd.decoding.layers.triton_experts as experts_kernels
import raypd.decoding.layers.triton_kernels as kernels
import raypd.decoding.layers.triton_recurrent as recurrent_kernels
from raypd.decoding.attention.plan import power_of_two
from raypd.decoding.attention.step import Step
from raypd.decoding.layers.expert_weights import (
    QuantizedExperts,
    gate_of,
    is_silu,
    read_weights,
)
from raypd.decoding.layers.in_torch import (
    Attention,
    Builder,
    Experts,
    LatentAttention,
    Mlp,
    Norm,
    Product,
    Products,
    Projected,
    Router,
)
from raypd.decoding.layers.recurrent import Mamba2, Recurrence, joined_parts
from raypd.decoding.layers.recurrent_in_triton import (
    CudaGatedDelta,
    CudaMamba2,
    CudaShortConvolution,
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
)
from raypd.decoding.layers.triton_experts import GroupedWeights
from raypd.decoding.quantized import Fp8Linear, Fp8Rows


class CudaNorm(torch.nn.Module):
    """An RMS norm in one launch, whose result may be in FP8."""

    def __init__(self, module: Any, style: NormStyle, fp8: bool) -> None:
        super().__init__()
        self.weight = module.weight
        self.eps = epsilon(module)
        self.style = style
        self.fp8 = fp8

    def forward(self, x: torch.Tensor) -> Any:
        """[rows, dim] -> [rows, dim]"""
        return kernels.rms_norm(x, self.weight, self.eps, self.style, self.fp8)


class CudaProduct(Product):
    """A linear layer that adds its outputs to the residual in place.

    Nothing else in the pass reads the old residual.
    """

    def __init__(self, linear: torch.nn.Linear | Fp8Linear) -> None:
        torch.nn.Module.__init__(self)
        self.linear = linear
        self.reads_fp8 = isinstance(linear, Fp8Linear)

    def forward(self, x: Any) -> torch.Tensor:
        if self.reads_fp8 and not isinstance(x, Fp8Rows):
            x = kernels.rows_in_fp8(x)
        return self.linear(x)

    def add(self, x: Any, residual: torch.Tensor) -> torch.Tensor:
        if self.reads_fp8:
            return residual.add_(self(x))
        residual.addmm_(x, self.linear.weight.t())
        if self.linear.bias is not None:
            residual.add_(self.linear.bias)
        return residual


class CudaAttention(Attention):
    """An attention layer whose projections are one product.

    One kernel norms and rotates queries and keys, and stores keys and values.
    """

    def __init__(self, source: AttentionSource, linear: torch.nn.Linear | Fp8Linear) -> None:
        """
        Args:
            source: What the layer computes.
            linear: Returns queries, keys and values in the order of `Rope`.
        """
        super().__init__(source)
        self.projection = CudaProduct(linear)
        self.reads_fp8 = self.projection.reads_fp8

    def take(self, source: AttentionSource) -> None:
        self.norms: tuple[torch.Tensor, torch.Tensor] | None = None
        self.eps = 0.0
        self.norm_style = source.norm_style
        self.norms_values = source.value_norm is not None
        if source.has_norms:
            query_norm = in_order(source.query_norm, source)
            # A layer that reads the keys of another layer has no key norm.
            key_norm = query_norm if source.is_reader else in_order(source.key_norm, source)
            self.norms = (query_norm.weight.detach(), key_norm.weight.detach())
            self.eps = epsilon(query_norm)

    def project(self, x: Any, rope: Rope, step: Step) -> Projected:
        # [tokens, heads + 2 * kv_heads, head_dim], or the queries alone; then, if there are gates,
        # one more head of gates for each query head.
        joined = self.projection(x).unflatten(-1, (-1, self.head_dim))
        count = self.heads + 2 * self.kv_heads
        query = kernels.store_heads(
            joined[:, :count],
            self.heads,
            rope if self.rotated else None,
            self.norms,
            self.eps,
            self.norm_style,
            self.norms_values,
            step,
            self.layer.number,
        )
        # Keys and values are in the cache now.
        gate = joined[:, count:].flatten(1) if self.gated else None
        return Projected(query, None, None, gate)

    def scaled(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return recurrent_kernels.sigmoid_gate(out, gate)


class CudaProducts(Products):
    """Linear layers as one product."""

    def __init__(self, linear: torch.nn.Linear | Fp8Linear, sizes: list[int]) -> None:
        """
        Args:
            linear: Returns the outputs of all layers.
            sizes: The number of outputs of each layer.
        """
        torch.nn.Module.__init__(self)
        self.product = CudaProduct(linear)
        self.reads_fp8 = self.product.reads_fp8
        self.sizes = sizes

    def forward(self, x: Any) -> list[torch.Tensor]:
        return list(self.product(x).split(self.sizes, -1))


class CudaLatentAttention(LatentAttention):
    """Attention to latents.

    One kernel norms and stores latents, and rotates queries and keys.
    """

    def take_norm(self, source: LatentSource) -> None:
        """Take the weights that the kernel reads."""
        self.norm_weight = source.latent_norm.weight.detach()
        self.norm_eps = epsilon(source.latent_norm)
        self.norm_style = source.norm_style
        order = torch.arange(source.rope_dim) if source.order is None else source.order
        self.kernel_order = order.to(self.norm_weight.device, torch.int32)

    def project(self, x: Any, rope: Rope, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, latents = self.query_and_latents(x)
        absorbed = kernels.store_latents(
            query,
            latents,
            self.kernel_order,
            rope,
            self.norm_weight,
            self.norm_eps,
            self.norm_style,
            step,
            self.layer.number,
        )
        absorbed[..., : self.latent_dim] = self.absorb(query[..., : self.plain_dim])
        # The latents and the keys are in the cache now.
        return absorbed, None


class CudaMlp(Mlp):
    """A gated MLP of two products."""

    def __init__(
        self,
        source: MlpSource,
        gated: torch.nn.Linear | Fp8Linear,
        down: torch.nn.Linear | Fp8Linear,
    ) -> None:
        """
        Args:
            source: What the layer computes.
            gated: Returns gate and up.
            down: Reads their product.
        """
        torch.nn.Module.__init__(self)
        self.gated = CudaProduct(gated)
        self.down = CudaProduct(down)
        self.reads_fp8 = self.gated.reads_fp8
        self.gate = source.gate
        self.activation = source.activation

    def forward(self, x: Any) -> torch.Tensor:
        return self.down(self._between(x))

    def add(self, x: Any, residual: torch.Tensor) -> torch.Tensor:
        return self.down.add(self._between(x), residual)

    def _between(self, x: Any) -> Any:
        """Return activation(gate) * up, [tokens, intermediate size]."""
        joined = self.gated(x)
        if self.gate is not None:
            return kernels.gated(joined, self.gate, self.down.reads_fp8)
        gate, up = joined.chunk(2, -1)
        return self.activation(gate) * up


class CudaRouter(Router):
    """A softmax router in a product and one launch."""

    def __init__(self, source: SoftmaxRouter) -> None:
        torch.nn.Module.__init__(self)
        self.weight = source.weight
        self.bias = source.bias
        self.k = source.k
        self.renormalizes = source.renormalizes

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(x, self.weight, self.bias)
        return experts_kernels.choose(logits, self.k, self.renormalizes)


class CudaExperts(Experts):
    """A mixture in five launches after its router, or seven in FP8."""

    def take(self, source: ExpertsSource) -> None:
        weights = read_weights(source.experts)
        self.gate = weights.gate
        self.gate_up = GroupedWeights(weights.gate_up, weights.gate_up_bias, weights.gate_up_scale)
        self.down = GroupedWeights(weights.down, weights.down_bias, weights.down_scale)
        source.drop()

    def mix(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        numbers: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        k = numbers.shape[1]
        expert_order = experts_kernels.sort_by_expert(numbers, len(self.gate_up.weight))
        rows, scale = self._inputs(x)
        between = experts_kernels.gated_rows(
            rows, scale, k, expert_order, self.gate_up, self.gate, x.dtype
        )
        rows, scale = self._inputs(between)
        entries = experts_kernels.weighted_rows(
            rows, scale, weights, expert_order, self.down, x.dtype
        )
        return experts_kernels.add_entries(entries, k, residual)

    def _inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return rows in the form that the products read, and their scales in FP8."""
        if self.gate_up.scale is None:
            return x, None
        converted = kernels.rows_in_fp8(x)
        return converted.rows, converted.scale


class CudaBuilder(Builder):
    """Builds the parts with triton kernels and torch's products."""

    def norm(
        self,
        module: Any,
        style: NormStyle | None = NormStyle.ROUND_FIRST,
        reader: Any = None,
    ) -> torch.nn.Module:
        if style is None:
            self.fallbacks.append(f"norm {type(module).__name__}")
            return Norm(module)
        return CudaNorm(module, style, fp8=getattr(reader, "reads_fp8", False))

    def attention(self, source: AttentionSource) -> Attention:
        is_even = source.head_dim == power_of_two(source.head_dim)
        if source.has_norms and (source.norms_all_heads or source.norms_last):
            is_even = False
        if not is_even or not are_joinable(source.linears):
            self.fallbacks.append(f"attention with heads of {source.head_dim}")
            return Attention(source)
        if source.linears.outputs != source.output_count:
            self.fallbacks.append("attention whose values have another size than keys")
            return Attention(source)
        return CudaAttention(source, joined(source.linears, projected_rows(source)))

    def latent_attention(self, source: LatentSource) -> LatentAttention:
        is_even = source.rope_dim == power_of_two(source.rope_dim)
        if not is_even or source.latent_dim != power_of_two(source.latent_dim):
            self.fallbacks.append(f"latent attention of {source.latent_dim}")
            return LatentAttention(source, self)
        attention = CudaLatentAttention(source, self)
        attention.take_norm(source)
        return attention

    def products(self, linears: Linears) -> Products:
        if not are_joinable(linears):
            self.fallbacks.append("products")
            return Products(linears)
        sizes = [int(module.weight.shape[0]) for module in linears.modules]
        return CudaProducts(joined(linears), sizes)

    def product(self, linears: Linears) -> Product:
        if not are_joinable(linears):
            self.fallbacks.append("product")
            return Product(linears)
        return CudaProduct(linears.modules[0])

    def mlp(self, source: MlpSource) -> Mlp:
        if not are_joinable(source.inputs) or not are_joinable(source.down):
            self.fallbacks.append("mlp")
            return Mlp(source)
        if source.gate is None:
            self.fallbacks.append("activation of an MLP")
        return CudaMlp(source, joined(source.inputs), source.down.modules[0])

    def experts(self, source: ExpertsSource) -> Experts:
        router = Router(source) if source.softmax is None else CudaRouter(source.softmax)
        shared = self.shared_mlp(source)
        gate = gate_of(source.experts)
        is_int8 = False
        if isinstance(source.experts, QuantizedExperts):
            is_int8 = source.experts.gate_up.dtype == torch.int8
        if gate is None or is_int8:
            self.fallbacks.append(f"experts {type(source.experts).__name__}")
            return Experts(source, router, shared)
        return CudaExperts(source, router, shared)

    def gated_delta(self, source: RecurrentSource) -> Recurrence:
        return self.recurrence(CudaGatedDelta(source, len(self.recurrences)), source)

    def mamba2(self, source: RecurrentSource) -> Recurrence:
        part = CudaMamba2(source, len(self.recurrences))
        if not is_silu(part.activation):
            self.fallbacks.append("activation of Mamba2")
            return self.recurrence(Mamba2(source, len(self.recurrences)), source)
        return self.recurrence(part, source)

    def short_convolution(self, source: RecurrentSource) -> Recurrence:
        return self.recurrence(CudaShortConvolution(source, len(self.recurrences)), source)

    def recurrence(self, part: Recurrence, source: RecurrentSource) -> Recurrence:
        """Join the linear layers of a recurrent layer if they are of the same kind."""
        groups = source.by_kind()
        if all(are_joinable(linears) for linears, _ in groups):
            products = [CudaProduct(joined(linears, order)) for linears, order in groups]
            part.projection = joined_parts(products)
            # A factor on the inputs has to be applied before they are converted.
            is_plain = len(products) == 1 and part.input_factor == 1.0
            part.reads_fp8 = is_plain and products[0].reads_fp8
        else:
            self.fallbacks.append(f"projection of {type(part).__name__}")
        return self.counted(part)


def are_joinable(linears: Linears) -> bool:
    """Return whether linear layers can be joined into one."""
    modules = linears.modules
    if len({module.bias is None for module in modules if hasattr(module, "bias")}) != 1:
        return False
    return {type(module) for module in modules} in ({torch.nn.Linear}, {Fp8Linear})


def joined(linears: Linears, rows: torch.Tensor | None = None) -> torch.nn.Linear | Fp8Linear:
    """Join linear layers into one, and remove them from their owner.

    Args:
        linears: The layers.
        rows: The order of the outputs, [outputs]; None to keep their order.
    """
    modules = linears.modules
    weight = torch.cat([module.weight.detach() for module in modules])
    bias = None
    if modules[0].bias is not None:
        bias = torch.cat([module.bias.detach() for module in modules])
    scale = None
    if isinstance(modules[0], Fp8Linear):
        scale = torch.cat([module.scale for module in modules], 1)
    linears.drop()
    if rows is not None:
        rows = rows.to(weight.device)
        weight = weight[rows]
        bias = None if bias is None else bias[rows]
        scale = None if scale is None else scale[:, rows]
    if scale is not None:
        return Fp8Linear(weight, scale, bias)
    outputs, inputs = weight.shape
    linear = torch.nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear
