"""compressed-tensors, the format of LLM Compressor and of vLLM: 4 or 8 bits in integers (w4a16,
w8a16, w8a8), and FP8.

The settings have groups of layers, each with one scheme. The names and dtypes of a layer's tensors
show their format.
"""

from typing import Any

import torch

from raypd.models.checkpoints.format import (
    CheckpointFormat,
    FormatError,
    ReadCodes,
    group_of_inputs,
    part,
    split_parts,
    unpacked,
)
from raypd.models.checkpoints.nvfp4 import nvfp4_weight
from raypd.models.checkpoints.scaled import FP8, ScaledCodes
from raypd.models.checkpoints.tensors import Tensor, Tensors

_PACKED = "pack-quantized"
_NVFP4 = "nvfp4-pack-quantized"
_READABLE = ("dense", _PACKED, _NVFP4, "int-quantized", "float-quantized", "naive-quantized")
_PACKED_PARTS = ("_scale", "_zero_point", "_shape", "_g_idx", "_global_scale")


class CompressedTensors(CheckpointFormat):
    """compressed-tensors, such as RedHatAI/Qwen3-8B-quantized.w4a16."""

    name = "compressed-tensors"
    description = (
        "w4a16, w8a16 and FP8; w8a8 (int8) is kept on CPUs and FP8 on GPUs that can, all others "
        "are dequantized"
    )

    @classmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        return settings.get("quant_method") == "compressed-tensors"

    @property
    def label(self) -> str:
        formats = sorted({str(scheme.get("format")) for scheme in self._schemes()})
        return f"compressed-tensors {', '.join(formats)}"

    def refusal(self) -> str | None:
        for scheme in self._schemes():
            if scheme["format"] not in _READABLE:
                return f"raypd does not read format {scheme['format']}"
            weights = scheme.get("weights") or {}
            if scheme["format"] == _PACKED and weights.get("num_bits") not in (2, 4, 8):
                return f"raypd does not read {weights.get('num_bits')} bits"
            if weights.get("strategy") == "block" and not weights.get("block_structure"):
                return "raypd does not read blocks without a block_structure"
        if self.settings.get("transform_config"):
            return "raypd does not read weights that are rotated (transform_config)"
        sparsity = self.settings.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            return f"raypd does not read sparse weights (format {sparsity['format']})"
        return None

    def plain_weights(self, tensors: Tensors) -> Tensors:
        # The parts of packed weights have special names. All other weights are codes with scales.
        packed, others = split_parts(tensors, "_packed", _PACKED_PARTS)
        zero_points = {}
        codes_and_scales: Tensors = {}
        for name, tensor in others.items():
            if name.endswith(".weight_zero_point"):
                zero_points[name.removesuffix("_zero_point")] = tensor
            else:
                codes_and_scales[name] = tensor
        plain = self._scaled_codes().plain_weights(codes_and_scales)
        for name, zero_point in zero_points.items():
            plain[name] = _with_zero_point(name, codes_and_scales, zero_point)
        for name, parts in packed.items():
            if "_global_scale" in parts:
                codes = parts["_packed"]
                scales = part(parts, "_scale", codes)
                plain[name] = nvfp4_weight(codes, scales, parts["_global_scale"], divides=True)
            else:
                plain[name] = self._unpacked_weight(parts)
        return plain

    @property
    def quantized_product(self) -> str | None:
        """Codes in int8 are kept where their scales are of rows and their inputs are quantized
        token by token, as in the engine's own product.
        """
        kinds = {_product_of(scheme) for scheme in self._schemes()}
        return kinds.pop() if len(kinds) == 1 else None

    def codes(self, tensors: Tensors) -> dict[str, ReadCodes]:
        return self._scaled_codes().codes(tensors)

    def _schemes(self) -> list[dict[str, Any]]:
        """Return the schemes of the groups of layers, each with its format."""
        default = self.settings.get("format") or "dense"
        groups = self.settings.get("config_groups") or {}
        return [{**group, "format": group.get("format") or default} for group in groups.values()]

    def _bits(self, packed: Tensor, outputs: int, inputs: int) -> int:
        """Return the bits of a code in a packed weight [outputs, inputs].

        Groups of layers may have different bits. Those of a layer follow from the width of its
        weight, because its group is named only by a pattern.
        """
        packed_bits = {
            int(scheme["weights"]["num_bits"])
            for scheme in self._schemes()
            if scheme["format"] == _PACKED
        }
        if not packed_bits:
            raise FormatError(f"it has packed weights, and its settings no group in {_PACKED}")
        for bits in packed_bits:
            # The codes of a row are packed into integers of 32 bits.
            if packed.shape == (outputs, -(-inputs * bits // 32)):
                return bits
        listed = " or ".join(map(str, sorted(packed_bits)))
        raise FormatError(
            f"{packed.name} has the shape {list(packed.shape)}, which does not hold a weight of "
            f"{[outputs, inputs]} in {listed} bits"
        )

    def _group_sizes(self) -> set[int]:
        """Return the sizes of groups of inputs that the schemes name."""
        sizes = [(scheme.get("weights") or {}).get("group_size") for scheme in self._schemes()]
        return {int(size) for size in sizes if size is not None}

    def _scaled_codes(self) -> ScaledCodes:
        """Return the description of the weights that are not packed."""
        block: tuple[int, int] | None = None
        for scheme in self._schemes():
            weights = scheme.get("weights") or {}
            if weights.get("strategy") == "block":
                rows, columns = weights["block_structure"]
                block = (int(rows), int(columns))
        return ScaledCodes(dtypes=(FP8, torch.int8), block=block)

    def _unpacked_weight(self, parts: Tensors) -> Tensor:
        """Return a weight [out_features, in_features] whose rows are packed into integers.

        Codes are signed numbers, and are stored with half of their range added.
        """
        packed = parts["_packed"]
        scale = part(parts, "_scale", packed)
        shape = part(parts, "_shape", packed)
        zero_point = parts.get("_zero_point")
        outputs, inputs = (int(size) for size in shape.read().tolist())
        bits = self._bits(packed, outputs, inputs)
        if len(scale.shape) != 2 or scale.shape[0] != outputs:
            raise FormatError(
                f"{scale.name} has the shape {list(scale.shape)} in place of [{outputs}, groups]"
            )
        groups = scale.shape[1]
        half = 2 ** (bits - 1)
        groups_of = _groups_of_inputs(
            parts.get("_g_idx"), group_of_inputs(scale, inputs, groups, self._group_sizes())
        )

        def read() -> torch.Tensor:
            codes = unpacked(packed.read(), bits)[:, :inputs]
            group = groups_of.read().long()
            zeros: torch.Tensor | int = half
            if zero_point is not None:
                # [groups, outputs]: each integer holds adjacent outputs.
                by_group = unpacked(zero_point.read().t().contiguous(), bits)
                zeros = by_group[:, :outputs].t()[:, group]
            return (codes - zeros) * scale.read().float()[:, group]

        return Tensor(packed.name, (outputs, inputs), torch.float32, read)


def _groups_of_inputs(listed: Tensor | None, in_order: Tensor) -> Tensor:
    """Return the group of each input of a weight.

    Args:
        listed: The groups in the file; -1 means that groups are in order.
        in_order: The groups in their order.
    """
    if listed is None:
        return in_order

    def read() -> torch.Tensor:
        groups = listed.read()
        return in_order.read() if bool((groups < 0).any()) else groups

    return Tensor(listed.name, in_order.shape, torch.int64, read)


def _with_zero_point(name: str, tensors: Tensors, zero_point: Tensor) -> Tensor:
    """Return a weight of codes in int8 [out_features, in_features] with zero points of rows."""
    codes = tensors.get(name)
    scale = tensors.get(f"{name}_scale")
    if codes is None or scale is None:
        raise FormatError(f"{zero_point.name} belongs to no weight with a scale")

    def read() -> torch.Tensor:
        zeros = zero_point.read().float().reshape(-1, 1)
        return (codes.read().float() - zeros) * scale.read().float().reshape(-1, 1)

    return Tensor(name, codes.shape, torch.float32, read)


def _product_of(scheme: dict[str, Any]) -> str | None:
    """Return the kind of product that computes as a scheme says; None if there is none."""
    weights = scheme.get("weights") or {}
    inputs = scheme.get("input_activations") or {}
    if scheme["format"] not in ("int-quantized", "float-quantized", "naive-quantized"):
        return None
    by_row = weights.get("strategy") in ("channel", "tensor")
    by_token = inputs.get("dynamic") is True and inputs.get("strategy") == "token"
    if weights.get("num_bits") != 8 or not weights.get("symmetric", True) or not by_row:
        return None
    if weights.get("type") == "float":
        return "fp8"
    return "w8a8" if by_token else None
