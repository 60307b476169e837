"""AWQ and GPTQ: 4 bits for each weight, eight of them in an integer of 32 bits, in groups with a
scale and a zero point each.

Both store the transposed weight [in_features, out_features]. For one of its numbers, in group g:

    weight = (code - zero_point[g]) * scale[g]
"""

from typing import Any

import torch

from raypd.models.checkpoints.format import (
    CheckpointFormat,
    check_shape,
    group_of_inputs,
    part,
    split_parts,
    unpacked,
)
from raypd.models.checkpoints.tensors import Tensor, Tensors

# AWQ puts outputs into the eight places of an integer in the order 0, 2, 4, 6, 1, 3, 5, 7. So this
# is the place of each of the eight outputs.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class _PackedFormat(CheckpointFormat):
    """What AWQ and GPTQ have in common."""

    def plain_weights(self, tensors: Tensors) -> Tensors:
        suffixes = (".qzeros", ".scales", ".g_idx")
        weights, plain = split_parts(tensors, ".qweight", suffixes)
        for stem, parts in weights.items():
            plain[f"{stem}.weight"] = self._weight(parts)
        return plain

    def _weight(self, parts: Tensors) -> Tensor:
        """Return the weight [out_features, in_features] of a layer."""
        raise NotImplementedError

    @property
    def bits(self) -> int:
        return int(self.settings.get("bits", self.settings.get("w_bit", 4)))


class Awq(_PackedFormat):
    """AWQ, such as Qwen/Qwen2.5-7B-Instruct-AWQ."""

    name = "AWQ"
    description = "4 bits in groups, made by AutoAWQ; dequantized"

    @classmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        return settings.get("quant_method") == "awq"

    def refusal(self) -> str | None:
        version = str(self.settings.get("version", "gemm")).lower()
        if version != "gemm":
            return f"raypd does not read version {version}"
        if self.bits != 4:
            return f"raypd does not read {self.bits} bits"
        return None

    def _weight(self, parts: Tensors) -> Tensor:
        codes = parts[".qweight"]
        zeros = part(parts, ".qzeros", codes)
        scales = part(parts, ".scales", codes)
        inputs = codes.shape[0]
        outputs = codes.shape[1] * 8
        groups = scales.shape[0]
        check_shape(scales, (groups, outputs))
        check_shape(zeros, (groups, codes.shape[1]))

        def read() -> torch.Tensor:
            unsigned = _in_order(codes.read()).view(groups, -1, outputs)
            zero_points = _in_order(zeros.read())[:, None]
            weight = (unsigned - zero_points) * scales.read().float()[:, None]
            return weight.view(inputs, outputs).t().contiguous()

        return Tensor(codes.name, (outputs, inputs), torch.float32, read)


def _in_order(packed: torch.Tensor) -> torch.Tensor:
    """Unpack rows of AWQ, int32 [n, outputs / 8] -> [n, outputs]."""
    eights = unpacked(packed, 4).unflatten(-1, (-1, 8))
    return eights[..., list(_AWQ_PLACES)].flatten(-2)


class Gptq(_PackedFormat):
    """GPTQ, such as Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4."""

    name = "GPTQ"
    description = "2, 4 or 8 bits in groups, made by GPTQModel or AutoGPTQ; dequantized"

    @classmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        return settings.get("quant_method") == "gptq"

    def refusal(self) -> str | None:
        overrides = self.settings.get("dynamic") or {}
        if any("bits" in of_layers for of_layers in overrides.values()):
            return "raypd does not read layers with other bits (dynamic)"
        if self.bits not in (2, 4, 8):
            return f"raypd does not read {self.bits} bits"
        layout = self.settings.get("checkpoint_format", "gptq")
        if layout not in ("gptq", "gptq_v2"):
            return f"raypd does not read checkpoint_format {layout}"
        return None

    def _weight(self, parts: Tensors) -> Tensor:
        codes = parts[".qweight"]
        zeros = part(parts, ".qzeros", codes)
        scales = part(parts, ".scales", codes)
        bits = self.bits
        per_integer = 32 // bits
        inputs = codes.shape[0] * per_integer
        outputs = codes.shape[1]
        groups = scales.shape[0]
        check_shape(scales, (groups, outputs))
        check_shape(zeros, (groups, outputs // per_integer))
        group_of_input = parts.get(".g_idx")
        if group_of_input is not None:
            check_shape(group_of_input, (inputs,))
        sizes = {int(self.settings.get("group_size", -1))}
        groups_of = group_of_input or group_of_inputs(scales, inputs, groups, sizes)
        # Files of the first version hold zero points minus one.
        offset = 0 if self.settings.get("checkpoint_format") == "gptq_v2" else 1

        def read() -> torch.Tensor:
            # [outputs, inputs]: each integer holds adjacent inputs.
            unsigned = unpacked(codes.read().t().contiguous(), bits)
            zero_points = (unpacked(zeros.read(), bits) + offset) & (2**bits - 1)
            group = groups_of.read().long()
            by_input = scales.read().float()[group].t()
            return (unsigned - zero_points[group].t()) * by_input

        return Tensor(codes.name, (outputs, inputs), torch.float32, read)
