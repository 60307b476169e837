"""Recurrent and convolution layers computed by native.c, in bfloat16 on a CPU.

One product computes everything that a layer reads from the hidden states. Four calls follow: the
convolution, the rates, the scan, and the gated norm. Between these calls values stay in float32, so
they are rounded less often than in transformers.
"""

from __future__ import annotations

import torch

import raypd.decoding.native as native
from raypd.decoding.layers.expert_weights import is_silu
from raypd.decoding.layers.recurrent import GatedDelta, Mamba2, Recurrence, ShortConvolution
from raypd.decoding.layers.sources import RecurrentSource, epsilon
from raypd.decoding.linear import has_pairs
from raypd.decoding.recurrence.plan import RecurrentPass


class _Convolution:
    """A causal convolution computed by native.c."""

    def __init__(self, recurrence: Recurrence, silu: bool) -> None:
        """
        Args:
            recurrence: The layer.
            silu: Whether SiLU follows.
        """
        conv = recurrence.conv
        self.number = recurrence.number
        self.inputs = conv.kernel_size[0] - 1
        # [inputs + 1, channels]
        self.weight = conv.weight.detach().squeeze(1).t().float().contiguous()
        self.bias = None if conv.bias is None else conv.bias.detach().float()
        self.silu = silu

    def __call__(self, values: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        """[tokens, channels] -> float32 [tokens, channels]"""
        stored = work.pool.inputs[self.number]
        taps = work.taps(self.inputs)
        return native.convolve(values, stored, taps, self.weight, self.bias, self.silu)


class CGatedDelta(GatedDelta):
    """A gated delta net computed by native.c."""

    def take(self, source: RecurrentSource) -> None:
        super().take(source)
        self.convolution_in_c = _Convolution(self, silu=True)
        self.speed = self.decay.detach().float().exp()
        self.wide_offset = self.offset.detach().float()

    def mix(self, projected: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        values, gates, writing, forgetting = projected.split(self.sizes, -1)
        mixed = self.convolution_in_c(values, work)
        kept, beta = native.delta_rates(writing, forgetting, self.speed, self.wide_offset)
        states = work.states(self.number)
        out = native.delta_scan(states, work.runs, mixed, kept, beta, self.key_heads)
        return native.gated_norm(out, gates, self.norm.weight, epsilon(self.norm), False)


class CMamba2(Mamba2):
    """A Mamba-2 layer computed by native.c."""

    def take(self, source: RecurrentSource) -> None:
        super().take(source)
        self.convolution_in_c = _Convolution(self, silu=True)
        self.speed = self.decay.detach().float().exp()
        self.wide_offset = self.offset.detach().float()
        self.wide_through = self.through.detach().float()

    def mix(self, projected: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        gates, values, steps = projected.split(self.sizes, -1)
        mixed = self.convolution_in_c(values, work)
        wide_steps, kept = native.mamba_rates(steps, self.speed, self.wide_offset, self.limits)
        out = native.mamba_scan(
            work.states(self.number),
            work.runs,
            mixed,
            wide_steps,
            kept,
            self.wide_through,
            self.key_groups,
        )
        if isinstance(self.norm, torch.nn.Identity):
            return native.gated_norm(out.flatten(1)[:, None], gates, None, 0.0, True)
        parts = out.view(len(out), -1, self.group_size)
        eps = epsilon(self.norm)
        return native.gated_norm(parts, gates, self.norm.weight, eps, self.is_gated_first)


class CShortConvolution(ShortConvolution):
    """A gated short convolution computed by native.c."""

    def take(self, source: RecurrentSource) -> None:
        super().take(source)
        self.convolution_in_c = _Convolution(self, silu=False)

    def mix(self, projected: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        entering, leaving, values = projected.chunk(3, -1)
        mixed = self.convolution_in_c(entering * values, work)
        return (leaving * mixed).to(projected.dtype)


def refusal(recurrence: Recurrence) -> str | None:
    """Return why a layer is left to torch; None if native.c computes it."""
    conv = recurrence.conv
    name = type(recurrence).__name__
    if not has_pairs(conv.weight[:, 0, :2]) or conv.in_channels % 16:
        return f"convolution of {conv.in_channels} channels in {name}"
    if conv.kernel_size[0] - 1 > native.MOST_INPUTS:
        return f"convolution over {conv.kernel_size[0]} tokens in {name}"
    if isinstance(recurrence, ShortConvolution):
        return None
    assert isinstance(recurrence, GatedDelta | Mamba2)
    if not recurrence.in_c:
        return f"sizes of {name}"
    if not is_silu(recurrence.activation):
        return f"activation of {name}"
    if isinstance(recurrence, GatedDelta):
        return None
    return f"norm of {name}" if recurrence.group_size % 16 else None
