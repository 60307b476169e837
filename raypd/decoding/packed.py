"""Linear layers of a model on a CPU, with weights in the layout that its products read.

oneDNN else brings a weight into that layout in every product, which for few tokens takes a fifth to a third of the
time. The results are as exact; sums in float32 may go in another order, as they do in passes of other sizes.
"""

from __future__ import annotations

import torch

_TOKENS = 2048  # of a pass for which the layout is chosen; it is as good for fewer


class PackedLinear(torch.nn.Module):
    """A linear layer in bfloat16 on a CPU, for inference alone.

    Args:
        linear: gives its weight, which is copied, and its bias.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TOKENS)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was, made anew: [out_features, in_features]."""
        return self.packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linear(model: torch.nn.Module) -> None:
    """Packs every plain linear layer that gains by it, in place; an embedding that shares its weight keeps that."""
    if not is_possible():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and _gains(child.weight):
                setattr(parent, name, PackedLinear(child))


def is_possible() -> bool:
    """Whether this torch, on this processor, has such products. They are those of torch.compile, and not documented."""
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _gains(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.numel() > 0
