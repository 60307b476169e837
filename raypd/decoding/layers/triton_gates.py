"""Activations of gates for the GPU kernels."""

import triton
import triton.language as tl

from raypd.decoding.layers.expert_weights import GateKind

_GELU = tl.constexpr(int(GateKind.GELU))


@triton.jit
def activated(gate, GATE: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return silu(gate), or gelu(gate) by tanh. GATE is a `GateKind`."""
    inner = gate
    if GATE == _GELU:
        # gelu(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)). The constants have the
        # dtype of the sums, because triton treats plain numbers as float32.
        cubic = tl.full([1], 0.044715, WIDE)
        factor = tl.full([1], 1.5957691216057308, WIDE)
        inner = factor * (gate + cubic * gate * gate * gate)
    return gate / (1 + tl.exp(-inner))
