"""Linear layers in bfloat16 on a CPU, to decode: weights lie as their products, native.c's or
oneDNN's, read them.
"""

from typing import Any

import torch

from raypd.decoding import native
from raypd.decoding.native import PANEL

_TOKENS = 2048  # of a pass for which the layout is chosen; it is as good for fewer


class PanelLinear(torch.nn.Module):
    """A linear layer by native.c; its weight is copied.

    A token's outputs are the same bits in every pass.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
    ) -> None:
        super().__init__()
        # The first half of its outputs are gates of the second: SwiGLU.
        self.outputs, self.gated = len(weight), gated
        rows = [weight, *([] if bias is None else [bias[:, None].float()])]
        if gated:  # half a panel of gates, half a panel of what they gate
            rows = [
                part.view(2, -1, PANEL // 2, part.shape[1]).transpose(0, 1).reshape(part.shape)
                for part in rows
            ]
        rows = [torch.nn.functional.pad(part, (0, 0, 0, -len(part) % PANEL)) for part in rows]
        self.panels = rows[0].view(-1, PANEL, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()
        self.bias = rows[1][:, 0].contiguous() if len(rows) > 1 else None

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], made anew."""
        rows = self.panels.transpose(1, 2).flatten(2).flatten(0, 1)[: self.outputs]
        if self.gated:
            rows = rows.view(-1, 2, PANEL // 2, rows.shape[1]).transpose(0, 1).reshape(rows.shape)
        return rows

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], or half of them; what is added to it is like
        it.
        """
        return native.linear(x, self.panels, self.bias, self.outputs, self.gated, residual)


class PackedLinear(torch.nn.Module):
    """A linear layer by oneDNN; its weight is copied."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], made anew."""
        return self.packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


AnyLinear = torch.nn.Linear | PanelLinear | PackedLinear


def pack_linears(model: torch.nn.Module, in_c: bool, only: list[Any] | None = None) -> None:
    """Packs linear layers in place, or those of `only`; an embedding keeps a weight that it
    shares.
    """
    kind = PanelLinear if in_c else PackedLinear
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (
                type(child) is torch.nn.Linear
                and has_pairs(child.weight)
                and (only is None or child in only)
            ):
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, kind(child.weight.detach(), bias))


def narrowed(linear: AnyLinear, outputs: torch.Tensor) -> torch.nn.Linear | PanelLinear:
    """Some outputs [n] of a linear layer without a bias, as a layer; in `PanelLinear` they are the
    same bits.
    """
    if isinstance(linear, PanelLinear):
        return PanelLinear(linear.panels[outputs // PANEL, :, outputs % PANEL].flatten(1))
    weight = linear.weight.detach()[outputs]
    some = torch.nn.Linear(weight.shape[1], len(outputs), bias=False, device="meta")
    some.weight = torch.nn.Parameter(weight, requires_grad=False)
    return some


def is_possible() -> bool:
    """Whether this torch, on this processor, has oneDNN's.

    They are those of torch.compile, and not documented.
    """
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not torch.backends.mkldnn.is_available() or not all(
        hasattr(torch.ops.mkldnn, name) for name in names
    ):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_pairs(weight: torch.Tensor) -> bool:
    """Whether a weight is one of bfloat16 on a CPU, with rows of pairs."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return plain and weight.numel() > 0 and weight.shape[-1] % 2 == 0
