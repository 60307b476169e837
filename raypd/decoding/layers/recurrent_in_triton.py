"""Recurrent and convolution layers on GPUs: a product, a convolution, a scan and a gated norm.

A pass in which each token is its own run, as in decoding, can be captured as a CUDA graph. This
file needs triton.
"""

from typing import Any

import torch

import raypd.decoding.layers.triton_recurrent as kernels
from raypd.decoding.layers.recurrent import GatedDelta, Mamba2, ShortConvolution
from raypd.decoding.layers.sources import epsilon
from raypd.decoding.recurrence.plan import RecurrentPass


class CudaGatedDelta(GatedDelta):
    """A gated delta net in three launches after its product."""

    def mix(self, projected: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        if not work.is_single and self.has_package("fla"):
            return super().mix(projected, work)
        values, gates, writing, forgetting = projected.split(self.sizes, -1)
        weight = self.conv.weight.squeeze(1)
        mixed = kernels.convolve(self.number, values, weight, self.conv.bias, work, True)
        out = kernels.delta_scan(
            work.states(self.number),
            mixed,
            writing,
            forgetting,
            self.decay,
            self.offset,
            self.key_heads,
            work,
        )
        return kernels.gated_norm(out, gates, self.norm.weight, epsilon(self.norm), False)


class CudaMamba2(Mamba2):
    """A Mamba-2 layer in three launches after its product."""

    def mix(self, projected: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        if not work.is_single and self.has_package("mamba_ssm"):
            return super().mix(projected, work)
        gates, values, steps = projected.split(self.sizes, -1)
        weight = self.conv.weight.squeeze(1)
        mixed = kernels.convolve(self.number, values, weight, self.conv.bias, work, True)
        out = kernels.mamba_scan(
            work.states(self.number),
            mixed,
            steps,
            self.decay,
            self.offset,
            self.through,
            self.limits,
            self.key_groups,
            work,
        )
        if isinstance(self.norm, torch.nn.Identity):
            return kernels.gated_norm(out, gates, None, 0.0, True)
        parts = out.view(len(out), -1, self.group_size)
        eps = epsilon(self.norm)
        return kernels.gated_norm(parts, gates, self.norm.weight, eps, self.is_gated_first)


class CudaShortConvolution(ShortConvolution):
    """A gated short convolution in three launches after its product."""

    def mix(self, projected: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        entering, leaving, values = projected.chunk(3, -1)
        weight: Any = self.conv.weight.squeeze(1)
        inputs = entering * values
        mixed = kernels.convolve(self.number, inputs, weight, self.conv.bias, work, False)
        return leaving * mixed
