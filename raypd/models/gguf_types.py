"""The number types of GGUF files, as llama.cpp's package dequantizes them."""

from functools import cache, partial
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers.integrations.gguf import dequant

# These need no dequantization.
_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


def reason_in_types(reader: Any) -> str | None:
    """Return which tensor of a file has a type that cannot be read; None if all can be read.

    Args:
        reader: The reader of the package gguf.
    """
    for tensor in reader.tensors:
        if not _is_read(tensor.tensor_type):
            return (
                f"its tensor {tensor.name} has the type {tensor.tensor_type.name}, which the "
                "package gguf does not dequantize"
            )
    return None


def add_types() -> None:
    """Add to transformers' own reader, which has few architectures, the types that it lacks."""
    for kind in GGMLQuantizationType:
        if kind in _PLAIN or kind in dequant.GGML_BLOCK or not _is_read(kind):
            continue
        dequant.GGML_BLOCK[int(kind)] = gguf.GGML_QUANT_SIZES[kind]
        dequant._DEQUANT[int(kind)] = partial(_dequantize, kind)


@cache
def _is_read(kind: GGMLQuantizationType) -> bool:
    """Return whether the package gguf dequantizes a type."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _dequantize(
    kind: GGMLQuantizationType, blocks: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the numbers of blocks, [blocks, numbers of a block].

    Args:
        kind: Their type.
        blocks: [blocks, bytes of a block]
        dtype: The dtype of the numbers.
    """
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind)).to(dtype)
