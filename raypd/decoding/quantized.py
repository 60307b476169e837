"""Linear layers with 8-bit weights and inputs, for inference.

Each row of the weight has a scale, and so has each input row, that is, each token. The result
therefore does not depend on what else is in the pass.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

import raypd.decoding.native as native
from raypd.decoding.layers.expert_weights import (
    ExpertWeights,
    QuantizedExperts,
    gate_of,
    read_weights,
)

E4M3 = torch.float8_e4m3fn
_E4M3_MAX = torch.finfo(E4M3).max
# The smallest scale, so that a row of zeros can be divided by its scale.
_MIN_SCALE = 1e-30


class Fp8Rows(NamedTuple):
    """Inputs of a layer that a kernel has already converted to FP8."""

    rows: torch.Tensor  # [rows, in_features] in FP8
    scale: torch.Tensor  # float32 [rows, 1]
    dtype: torch.dtype  # The dtype of the layer's outputs.


class _Linear(torch.nn.Module):
    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.nn.Parameter(weight, requires_grad=False)  # [out_features, in_features]
        self.scale = scale
        self.bias = bias


class Int8Linear(_Linear):
    """A linear layer in int8, for CPUs with AVX-512 BF16. Its sums of products are exact.

    Its scales are float32 [out_features].
    """

    @classmethod
    def of(cls, linear: torch.nn.Linear) -> "Int8Linear":
        """Quantize a linear layer."""
        return cls(*in_int8(linear.weight.detach()), linear.bias)

    @classmethod
    def with_codes(
        cls, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> "Int8Linear":
        """Make a layer from codes [out_features, in_features] and scales [out_features]."""
        return cls(codes, scales, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        rows, scale = native.quantized(x.reshape(-1, self.in_features).contiguous())
        out = native.scaled(torch._int_mm(rows, self.weight.t()), scale, self.scale)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)


class Fp8Linear(_Linear):
    """A linear layer in FP8 (E4M3), for GPUs that have it. Its sums are float32.

    Its scales are [1, out_features]; its sizes are multiples of 16.
    """

    @classmethod
    def of(cls, linear: torch.nn.Linear) -> "Fp8Linear":
        """Quantize a linear layer."""
        weight, scale = in_fp8(linear.weight.detach())
        return cls(weight, scale.t(), linear.bias)

    @classmethod
    def with_codes(
        cls, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> "Fp8Linear":
        """Make a layer from codes [out_features, in_features] and scales [out_features]."""
        return cls(codes, scales[None], bias)

    def forward(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]; inputs that are already in FP8 are rows."""
        if isinstance(x, Fp8Rows):
            return self._multiply(x)
        rows, scale = in_fp8(x.reshape(-1, self.in_features))
        out = self._multiply(Fp8Rows(rows, scale, x.dtype))
        return out.view(*x.shape[:-1], self.out_features)

    def _multiply(self, x: Fp8Rows) -> torch.Tensor:
        """Compute the product, [rows, out_features]."""
        if len(x.rows) == 0:
            return x.scale.new_empty(0, self.out_features, dtype=x.dtype)
        return torch._scaled_mm(
            x.rows, self.weight.t(), x.scale, self.scale, self.bias, out_dtype=x.dtype
        )


def in_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert rows [rows, dim] to int8.

    Returns:
        The rows in int8, and the float32 scales [rows] by which they are to be multiplied.
    """
    weight = rows.float()
    scale = (weight.abs().amax(1) / 127).clamp_min(_MIN_SCALE)
    return (weight / scale[:, None]).round().to(torch.int8), scale


def in_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert rows [rows, dim] to FP8.

    Returns:
        The rows in FP8, and the float32 scales [rows, 1] by which they are to be multiplied.
    """
    largest = rows.abs().amax(1, keepdim=True).float()
    scale = (largest / _E4M3_MAX).clamp_min(_MIN_SCALE)
    return (rows / scale).to(E4M3), scale


def quantize(
    model: PreTrainedModel,
    kind: str,
    device: torch.device | None = None,
    codes: Callable[[torch.nn.Linear], tuple[torch.Tensor, torch.Tensor] | None] | None = None,
) -> None:
    """Quantize a bfloat16 model: every linear layer except its output embeddings, and all experts.

    Routers stay unchanged.

    Args:
        model: The model, which is changed in place.
        kind: "w8a8" (int8) or "fp8".
        device: The device to which the model moves, or None. The device never holds more than one
            of these layers in bfloat16 at a time.
        codes: Returns the codes [out_features, in_features] of a layer that the checkpoint
            quantized, and their scale, which is scalar or [out_features]. It returns None for other
            layers, which then stay unchanged, as do experts. Without it, all layers are quantized
            here.
    """
    layers: dict[str, type[Int8Linear] | type[Fp8Linear]]
    layers = {"w8a8": Int8Linear, "fp8": Fp8Linear}
    layer = layers[kind]
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if codes is None and gate_of(child) is not None:
                setattr(parent, name, _quantized_experts(child, kind, device))
                continue
            if type(child) is not torch.nn.Linear or child is head:
                continue
            if child.in_features % 16 or child.out_features % 16:
                continue
            if device is not None:
                child.to(device)
            if codes is None:
                setattr(parent, name, layer.of(child))
                continue
            checkpoint_codes = codes(child)
            if checkpoint_codes is not None:
                weight, scale = checkpoint_codes
                on_device = child.weight.device
                scales = scale.to(on_device).expand(child.out_features).contiguous()
                setattr(parent, name, layer.with_codes(weight.to(on_device), scales, child.bias))
    if device is not None:
        model.to(device)


def _quantized_experts(
    experts: torch.nn.Module, kind: str, device: torch.device | None
) -> torch.nn.Module:
    """Return experts with 8-bit codes, or the same experts if their sizes are not multiples of 16.

    The other arguments are those of `quantize`.
    """
    if isinstance(experts, QuantizedExperts):
        return experts
    weights = read_weights(experts)
    sizes = (*weights.gate_up.shape[1:], *weights.down.shape[1:])
    if any(size % 16 for size in sizes):
        return experts
    gate_up, gate_up_scale = _in_8_bits(weights.gate_up, kind, device)
    down, down_scale = _in_8_bits(weights.down, kind, device)
    gate_up_bias = weights.gate_up_bias
    down_bias = weights.down_bias
    if device is not None and gate_up_bias is not None and down_bias is not None:
        gate_up_bias = gate_up_bias.to(device)
        down_bias = down_bias.to(device)
    return QuantizedExperts(
        ExpertWeights(
            weights.gate, gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale
        )
    )


def _in_8_bits(
    weights: torch.Tensor, kind: str, device: torch.device | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weights [experts, outputs, inputs], one expert after the other.

    Returns:
        The codes, and the float32 scales [experts, outputs].
    """
    where = device or weights.device
    dtype = E4M3 if kind == "fp8" else torch.int8
    codes = torch.empty(weights.shape, dtype=dtype, device=where)
    scales = torch.empty(weights.shape[:2], dtype=torch.float32, device=where)
    for number, weight in enumerate(weights):
        if kind == "fp8":
            rows, scale = in_fp8(weight.to(where))
        else:
            rows, scale = in_int8(weight.to(where))
        codes[number] = rows
        scales[number] = scale.flatten()
    return codes, scales
