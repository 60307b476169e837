"""Linear layers in bfloat16 on a CPU, for decoding.

Their weights are laid out in the form that the products of native.c or oneDNN read.
"""

from typing import Any

import torch

import raypd.decoding.native as native
from raypd.decoding.native import PANEL

# The number of tokens for which oneDNN chooses the layout, which is as good for fewer.
_TOKENS = 2048


class PanelLinear(torch.nn.Module):
    """A linear layer computed by native.c. It copies its weight.

    A token's outputs have the same bits in every pass.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gate: int = 0
    ) -> None:
        """
        Args:
            weight: [out_features, in_features] in bfloat16.
            bias: [out_features]
            gate: How the first half of the outputs gates the second half, as in `native.linear`.
        """
        super().__init__()
        self.outputs = len(weight)
        self.gate = gate
        rows = self._padded(weight)
        # [panels, in_features / 2, PANEL, 2]
        self.panels = rows.view(-1, PANEL, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()
        self.bias: torch.Tensor | None = None
        if bias is not None:
            self.bias = self._padded(bias[:, None].float())[:, 0].contiguous()

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring rows [out_features, n] into the order of the panels, and pad the last panel."""
        if self.gate:
            # Half of each panel consists of gates, the other half of the gated values.
            halves = rows.view(2, -1, PANEL // 2, rows.shape[1])
            rows = halves.transpose(0, 1).reshape(rows.shape)
        return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % PANEL))

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out_features, in_features], rebuilt from the panels."""
        rows = self.panels.transpose(1, 2).flatten(2).flatten(0, 1)[: self.outputs]
        if self.gate:
            halves = rows.view(-1, 2, PANEL // 2, rows.shape[1])
            rows = halves.transpose(0, 1).reshape(rows.shape)
        return rows

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the layer.

        Args:
            x: [..., in_features]
            residual: Added to the outputs, [..., out_features]; not for a gated layer.

        Returns:
            [..., out_features], or half as many if the layer is gated.
        """
        return native.linear(x, self.panels, self.bias, self.outputs, self.gate, residual)


class GroupedPanels(torch.nn.Module):
    """Several linear layers computed by native.c in one call, each on its own rows.

    A row's outputs have the same bits in every pass.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        bias: torch.Tensor | None,
        gate: int = 0,
        alpha: float = 0.0,
        limit: float = 0.0,
    ) -> None:
        """
        Args:
            weights: [layers, out_features, in_features] in bfloat16.
            bias: [layers, out_features]
            gate: As in `native.grouped_linear`.
            alpha: As in `native.grouped_linear`.
            limit: As in `native.grouped_linear`.
        """
        super().__init__()
        self.outputs = weights.shape[1]
        self.gate = gate
        self.alpha = alpha
        self.limit = limit
        # [layers, panels, in_features / 2, PANEL, 2]
        panels = -(-self.outputs // PANEL)
        self.panels = weights.new_empty(len(weights), panels, weights.shape[2] // 2, PANEL, 2)
        self.bias: torch.Tensor | None = None
        if bias is not None:
            self.bias = torch.empty(len(weights), panels * PANEL)
        for number, weight in enumerate(weights):
            layer_bias = None if bias is None else bias[number]
            layer = PanelLinear(weight, layer_bias, gate)
            self.panels[number] = layer.panels
            if self.bias is not None:
                assert layer.bias is not None
                self.bias[number] = layer.bias

    def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Compute all layers.

        Args:
            x: The rows of the first layer, then those of the second layer, ..., [rows,
                in_features].
            starts: Where the rows of each layer begin, and where the last rows end, [layers + 1].

        Returns:
            [rows, out_features], or half as many with a gate.
        """
        return native.grouped_linear(
            x, starts, self.panels, self.bias, self.outputs, self.gate, self.alpha, self.limit
        )


class PackedLinear(torch.nn.Module):
    """A linear layer computed by oneDNN. It copies its weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS)

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out_features, in_features], unpacked again."""
        return self.packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


AnyLinear = torch.nn.Linear | PanelLinear | PackedLinear


def pack_linears(model: torch.nn.Module, in_c: bool, only: list[Any] | None = None) -> None:
    """Replace linear layers of a model by packed ones, in place.

    If an embedding shares its weight with a layer, the embedding keeps it.

    Args:
        model: The model.
        in_c: Whether native.c computes them; if not, oneDNN does.
        only: The layers to replace; None for all in bfloat16.
    """
    kind = PanelLinear if in_c else PackedLinear
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not torch.nn.Linear or not has_pairs(child.weight):
                continue
            if only is not None and child not in only:
                continue
            bias = None if child.bias is None else child.bias.detach()
            setattr(parent, name, kind(child.weight.detach(), bias))


def narrowed(linear: AnyLinear, outputs: torch.Tensor) -> torch.nn.Linear | PanelLinear:
    """Return a layer with some outputs of another one, which must have no bias.

    With `PanelLinear` the outputs have the same bits.

    Args:
        linear: The layer.
        outputs: The indices of its outputs to keep, [n].
    """
    if isinstance(linear, PanelLinear):
        return PanelLinear(linear.panels[outputs // PANEL, :, outputs % PANEL].flatten(1))
    weight = linear.weight.detach()[outputs]
    narrow = torch.nn.Linear(weight.shape[1], len(outputs), bias=False, device="meta")
    narrow.weight = torch.nn.Parameter(weight, requires_grad=False)
    return narrow


def is_possible() -> bool:
    """Return whether this torch has oneDNN's products on this processor.

    These functions belong to torch.compile and are not documented, so each one is checked for.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    for name in ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise"):
        if not hasattr(torch.ops.mkldnn, name):
            return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_pairs(weight: torch.Tensor) -> bool:
    """Return whether a weight is in bfloat16 on a CPU and its rows have an even length.

    The products multiply two numbers at a time.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return weight.numel() > 0 and weight.shape[-1] % 2 == 0
