"""The weights of a mixture's experts, read from transformers modules."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch


class GateKind(IntEnum):
    """How a gate multiplies the gated values. native.c and the triton kernels use these numbers."""

    SWIGLU = 1  # silu(gate) * up
    # gate * sigmoid(alpha * gate) * (up + 1), after both were clamped, as in gpt-oss.
    CLAMPED = 2
    GELU = 3  # gelu(gate) * up, with gelu by tanh


# The gate kinds of transformers' activation classes.
_KINDS = {
    "SiLU": GateKind.SWIGLU,
    "SiLUActivation": GateKind.SWIGLU,
    "GELUTanh": GateKind.GELU,
}


def gate_kind(activation: Any) -> GateKind | None:
    """Return the kind of gate with an activation; None if the engine does not support it."""
    if activation is torch.nn.functional.silu:
        return GateKind.SWIGLU
    return _KINDS.get(type(activation).__name__)


class Gate(NamedTuple):
    """The activation of experts."""

    kind: GateKind
    alpha: float = 0.0  # The factor of the gate inside the sigmoid, if it is clamped.
    limit: float = 0.0  # The bound of the gate and of the gated values, if it is clamped.

    def __call__(self, joined: torch.Tensor) -> torch.Tensor:
        """Apply the activation to gates and gated values, [rows, 2 * dim] -> [rows, dim]."""
        gate, up = joined.chunk(2, -1)
        if self.kind == GateKind.SWIGLU:
            return torch.nn.functional.silu(gate) * up
        if self.kind == GateKind.GELU:
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


@dataclass
class ExpertWeights:
    """The weights of all experts, or their 8-bit codes.

    Attributes:
        gate: The activation.
        gate_up: Gate and up weights, [experts, 2 * intermediate size, hidden size].
        down: [experts, hidden size, intermediate size]
        gate_up_bias: [experts, 2 * intermediate size]
        down_bias: [experts, hidden size]
        gate_up_scale: The scales of codes, float32 [experts, 2 * intermediate size].
        down_scale: float32 [experts, hidden size]
    """

    gate: Gate
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None


class QuantizedExperts(torch.nn.Module):
    """Experts with 8-bit codes that replace those of transformers."""

    def __init__(self, weights: ExpertWeights) -> None:
        """
        Args:
            weights: The codes and their scales.
        """
        super().__init__()
        self.gate = weights.gate
        self.gate_up = torch.nn.Parameter(weights.gate_up, requires_grad=False)
        self.down = torch.nn.Parameter(weights.down, requires_grad=False)
        self.register_buffer("gate_up_scale", weights.gate_up_scale, persistent=False)
        self.register_buffer("down_scale", weights.down_scale, persistent=False)
        self.register_buffer("gate_up_bias", weights.gate_up_bias, persistent=False)
        self.register_buffer("down_bias", weights.down_bias, persistent=False)

    @property
    def weights(self) -> ExpertWeights:
        """The codes and their scales."""
        names = ("gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale")
        return ExpertWeights(self.gate, *[getattr(self, name) for name in names])

    def forward(
        self, x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the same as the transformers module, with weights converted back to 16 bits.

        Args:
            x: [tokens, hidden size]
            numbers: The indices of the experts, [tokens, k].
            weights: [tokens, k]

        Returns:
            [tokens, hidden size]
        """
        mixed = torch.zeros_like(x)
        for expert in numbers.unique().tolist():
            tokens, columns = torch.where(numbers == expert)
            between = self.gate(self._linear(x[tokens], "gate_up", expert))
            out = self._linear(between, "down", expert) * weights[tokens, columns, None]
            mixed.index_add_(0, tokens, out.to(x.dtype))
        return mixed

    def _linear(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        codes = getattr(self, name)[expert].to(x.dtype)
        scale = getattr(self, f"{name}_scale")[expert]
        bias = getattr(self, f"{name}_bias")
        weight = (codes * scale[:, None]).to(x.dtype)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias[expert])


def is_silu(activation: Any) -> bool:
    """Return whether a transformers activation is SiLU."""
    return gate_kind(activation) is GateKind.SWIGLU


def gate_of(experts: Any) -> Gate | None:
    """Return the activation of transformers experts; None if the engine does not support it."""
    if isinstance(experts, QuantizedExperts):
        return experts.gate
    if not getattr(experts, "has_gate", False) or getattr(experts, "has_post_expert_norm", False):
        return None
    if type(experts)._apply_gate.__name__ == "_default_apply_gate":
        kind = gate_kind(experts.act_fn)
        return None if kind is None else Gate(kind)
    if type(experts).__name__ == "GptOssExperts":
        return Gate(GateKind.CLAMPED, float(experts.alpha), float(experts.limit))
    return None


def read_weights(experts: Any) -> ExpertWeights:
    """Read the weights of experts with a supported activation, in the engine's own layout."""
    if isinstance(experts, QuantizedExperts):
        return experts.weights
    gate = gate_of(experts)
    assert gate is not None
    gate_up = experts.gate_up_proj.detach()
    down = experts.down_proj.detach()
    gate_up_bias = None
    down_bias = None
    if experts.has_bias:
        gate_up_bias = experts.gate_up_proj_bias.detach()
        down_bias = experts.down_proj_bias.detach()
    if experts.is_transposed:
        gate_up = gate_up.transpose(1, 2)
        down = down.transpose(1, 2)
    if not experts.is_concatenated:
        # Gates and gated values are interleaved.
        gate_up = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1)
        if gate_up_bias is not None:
            gate_up_bias = torch.cat([gate_up_bias[:, ::2], gate_up_bias[:, 1::2]], 1)
    return ExpertWeights(gate, gate_up, down, gate_up_bias, down_bias)
