"""Formats whose weights are codes in FP8 or int8, which are multiplied by scales.

A weight `w` is accompanied by a tensor of scales called `w_scale` or `w_scale_inv`: one number for
all codes, one for each row (an output of the layer), or one for each block of rows and columns.
"""

from dataclasses import dataclass
from typing import Any

import torch

from raypd.models.checkpoints.format import CheckpointFormat, FormatError, ReadCodes, check_shape
from raypd.models.checkpoints.tensors import Tensor, Tensors

FP8 = torch.float8_e4m3fn
# Scales of activations, which are only needed where activations are rounded, too.
OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub", "input_global_scale")


@dataclass(frozen=True)
class ScaledCodes:
    """Weights that are codes with scales.

    Attributes:
        suffix: What is appended to the weight's name in the name of its scales.
        dtypes: Dtypes that codes may have.
        block: Rows and columns of a block with one scale; None if a scale is for a row or for the
            whole weight.
        for_rows: Whether a scale may be for a row.
    """

    suffix: str = "_scale"
    dtypes: tuple[torch.dtype, ...] = (FP8,)
    block: tuple[int, int] | None = None
    for_rows: bool = True

    def plain_weights(self, tensors: Tensors) -> Tensors:
        """As `CheckpointFormat.plain_weights`."""
        plain: Tensors = {}
        for name, tensor in tensors.items():
            if name.endswith(OF_ACTIVATIONS) or self._is_scale(name, tensors):
                continue
            scale = tensors.get(name + self.suffix)
            if scale is not None:
                self._check(tensor, scale)
                plain[name] = dequantized(tensor, scale, self.block)
                continue
            if tensor.dtype in self.dtypes:
                missing = name.rpartition(".")[2] + self.suffix
                raise FormatError(f"{name} is {name_of(tensor.dtype)} and has no {missing}")
            plain[name] = tensor
        return plain

    def codes(self, tensors: Tensors) -> dict[str, ReadCodes]:
        """As `CheckpointFormat.codes`, for weights with one scale or with one per row."""
        readers: dict[str, ReadCodes] = {}
        for name, tensor in tensors.items():
            scale = tensors.get(name + self.suffix)
            if scale is None or tensor.dtype not in self.dtypes or len(tensor.shape) != 2:
                continue
            if scale.count in (1, tensor.shape[0]):
                readers[name] = _reader(tensor, scale)
        return readers

    def _is_scale(self, name: str, tensors: Tensors) -> bool:
        weight = name.removesuffix(self.suffix)
        return weight != name and weight in tensors

    def _check(self, codes: Tensor, scale: Tensor) -> None:
        if codes.dtype not in self.dtypes:
            right = " or ".join(name_of(dtype) for dtype in self.dtypes)
            raise FormatError(f"{codes.name} has a scale, and is {codes.dtype} in place of {right}")
        if scale.count == 1 or self.block is not None:
            return
        rows = codes.shape[0]
        by_row = self.for_rows and len(codes.shape) == 2
        if not by_row or scale.shape not in ((rows,), (rows, 1)):
            expected = f"one, or one for each of its {rows} rows" if by_row else "one"
            raise FormatError(
                f"{codes.name} has scales of shape {list(scale.shape)} in place of {expected}"
            )


def dequantized(codes: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return codes times scales.

    Args:
        codes: [..., rows, columns]
        scale: One number, [rows], [rows, 1], or one for each block.
        block: Rows and columns of a block, of which the last one may be smaller; None if there are
            no blocks.

    Returns:
        float32 [..., rows, columns]
    """
    if block is not None and scale.count > 1:
        rows, columns = codes.shape[-2:]
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        check_shape(scale, (*codes.shape[:-2], *blocks))

    def read() -> torch.Tensor:
        weight = codes.read().float()
        scales = as_float(scale.read())
        if scales.numel() == 1:
            return weight * scales.reshape(())
        if block is None:
            return weight * scales.reshape(-1, 1)
        by_row = scales.repeat_interleave(block[0], -2)[..., : weight.shape[-2], :]
        by_number = by_row.repeat_interleave(block[1], -1)[..., : weight.shape[-1]]
        return weight * by_number

    return Tensor(codes.name, codes.shape, torch.float32, read)


def as_float(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as float32; those in bytes are powers of two, of which 127 is 1 (E8M0)."""
    if scales.dtype == torch.uint8:
        return (scales.float() - 127).exp2()
    return scales.float()


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype of codes, as people call it."""
    return {FP8: "FP8", torch.int8: "int8"}.get(dtype, str(dtype).removeprefix("torch."))


def _reader(codes: Tensor, scale: Tensor) -> ReadCodes:
    def read() -> tuple[torch.Tensor, torch.Tensor]:
        scales = as_float(scale.read())
        if scales.numel() == 1:
            return codes.read(), scales.reshape(())
        return codes.read(), scales.flatten()

    return read


class _Fp8Format(CheckpointFormat):
    """FP8 weights with which the engine's GPU product can compute."""

    scaled_codes = ScaledCodes()

    @property
    def quantized_product(self) -> str | None:
        return "fp8"

    def plain_weights(self, tensors: Tensors) -> Tensors:
        return self.scaled_codes.plain_weights(tensors)

    def codes(self, tensors: Tensors) -> dict[str, ReadCodes]:
        return self.scaled_codes.codes(tensors)


class ModelOptFp8(_Fp8Format):
    """FP8 of NVIDIA's ModelOpt, such as nvidia/Llama-3.1-8B-Instruct-FP8."""

    name = "ModelOpt FP8"
    description = "codes in FP8 with one scale per weight; kept on GPUs with FP8, else dequantized"
    scaled_codes = ScaledCodes(for_rows=False)

    @classmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        return is_modelopt(settings) and settings.get("quant_algo") == "FP8"

    @property
    def label(self) -> str:
        return f"modelopt {self.settings['quant_algo']}"


def is_modelopt(settings: dict[str, Any]) -> bool:
    """Return whether settings are those that ModelOpt writes."""
    return settings.get("quant_method", "modelopt") == "modelopt" and "quant_algo" in settings


class BlockFp8(CheckpointFormat):
    """FP8 of DeepSeek and Qwen, with a scale for each block of 128 x 128 codes; also Mistral's,
    with one scale per weight, and MXFP8, with one for 32 codes of a row.
    """

    name = "block FP8"
    description = "codes in FP8 with one scale per block or per weight; dequantized"

    @classmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        return settings.get("quant_method") in ("fp8", "mxfp8")

    def plain_weights(self, tensors: Tensors) -> Tensors:
        block: tuple[int, int] | None = None
        if self.settings.get("quant_method") == "mxfp8":
            block = (1, 32)
        if size := self.settings.get("weight_block_size"):
            block = (int(size[0]), int(size[1]))
        return ScaledCodes("_scale_inv", block=block).plain_weights(tensors)


class RowFp8(_Fp8Format):
    """FP8 of Meta's FBGEMM, such as meta-llama/Llama-3.1-405B-Instruct-FP8."""

    name = "FBGEMM FP8"
    description = "codes in FP8 with one scale per row; kept on GPUs with FP8, else dequantized"

    @classmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        return settings.get("quant_method") == "fbgemm_fp8"
