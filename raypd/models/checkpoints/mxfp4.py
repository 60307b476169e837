"""MXFP4, in which OpenAI publishes gpt-oss: 4 bits for each weight of the experts, 32 of which
share a scale that is a power of two.
"""

from typing import Any

import torch

from raypd.models.checkpoints.format import CheckpointFormat, check_shape, part, split_parts
from raypd.models.checkpoints.scaled import as_float
from raypd.models.checkpoints.tensors import Tensor, Tensors

# The numbers of the 16 codes (E2M1): a sign, two bits of exponent, one of fraction.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = (*_POSITIVE, *(-number for number in _POSITIVE))


class MxFp4(CheckpointFormat):
    """MXFP4 of gpt-oss."""

    name = "MXFP4"
    description = "experts in 4 bits with a scale for 32 codes, as in gpt-oss; dequantized"

    @classmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        return settings.get("quant_method") == "mxfp4"

    def plain_weights(self, tensors: Tensors) -> Tensors:
        weights, plain = split_parts(tensors, "_blocks", ("_scales",))
        for name, parts in weights.items():
            plain[name] = _experts(parts)
        return plain


def _experts(parts: Tensors) -> Tensor:
    """Return weights of experts as in transformers' gpt-oss, [experts, inputs, outputs].

    Codes are stored as [experts, outputs, groups, 16], the first code in the lower half of a byte.
    """
    codes = parts["_blocks"]
    scales = part(parts, "_scales", codes)
    experts, outputs, groups, width = codes.shape
    check_shape(scales, (experts, outputs, groups))

    def read() -> torch.Tensor:
        weight = numbers_of(codes.read()) * as_float(scales.read())[..., None]
        return weight.flatten(2).transpose(1, 2).contiguous()

    return Tensor(codes.name, (experts, groups * width * 2, outputs), torch.float32, read)


def numbers_of(codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers that E2M1 codes represent, two in each byte.

    Args:
        codes: uint8 [..., n]

    Returns:
        float32 [..., 2 n]
    """
    numbers = torch.tensor(_NUMBERS)
    halves = torch.stack([codes & 15, codes >> 4], dim=-1)
    return numbers[halves.flatten(-2).long()]
