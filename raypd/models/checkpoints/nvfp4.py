"""NVFP4, for NVIDIA's Blackwell GPUs: 4 bits for each weight, 16 of which share a scale in FP8; all
weights of a layer share another one.
"""

from typing import Any

import torch

from raypd.models.checkpoints.format import CheckpointFormat, check_shape, part
from raypd.models.checkpoints.mxfp4 import numbers_of
from raypd.models.checkpoints.scaled import OF_ACTIVATIONS, is_modelopt
from raypd.models.checkpoints.tensors import Tensor, Tensors

_GROUP = 16


class NvFp4(CheckpointFormat):
    """NVFP4 of ModelOpt, such as nvidia/Qwen3-8B-NVFP4."""

    name = "ModelOpt NVFP4"
    description = "4 bits with a scale for 16 codes; dequantized"

    @classmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        return is_modelopt(settings) and settings.get("quant_algo") == "NVFP4"

    @property
    def label(self) -> str:
        return f"modelopt {self.settings['quant_algo']}"

    def plain_weights(self, tensors: Tensors) -> Tensors:
        plain: Tensors = {}
        for name, tensor in tensors.items():
            weight = name.removesuffix("_scale").removesuffix("_scale_2")
            is_scale = weight != name and weight in tensors
            if is_scale or name.endswith(OF_ACTIVATIONS):
                continue
            if tensor.dtype == torch.uint8:
                scales = part(tensors, f"{name}_scale", tensor)
                plain[name] = nvfp4_weight(tensor, scales, part(tensors, f"{name}_scale_2", tensor))
            else:
                plain[name] = tensor
        return plain


def nvfp4_weight(codes: Tensor, scales: Tensor, scale: Tensor, divides: bool = False) -> Tensor:
    """Return a weight [out_features, in_features].

    Args:
        codes: Two in each byte, the first one in the lower half, [out_features, in_features / 2].
        scales: [out_features, in_features / 16]
        scale: The scale of the whole weight.
        divides: Whether weights are divided by it instead of multiplied.
    """
    outputs, bytes_of_row = codes.shape
    inputs = bytes_of_row * 2
    check_shape(scales, (outputs, inputs // _GROUP))

    def read() -> torch.Tensor:
        tensor_scale = scale.read().float().reshape(())
        if divides:
            by_group = scales.read().float() / tensor_scale
        else:
            by_group = scales.read().float() * tensor_scale
        return numbers_of(codes.read()) * by_group.repeat_interleave(_GROUP, 1)

    return Tensor(codes.name, (outputs, inputs), torch.float32, read)
