"""What every format of a checkpoint provides."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from raypd.models.checkpoints.tensors import Tensor, Tensors

# The codes [out_features, in_features] of a weight and their scales, float32: a scalar or
# [out_features].
ReadCodes = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class FormatError(ValueError):
    """A tensor of a checkpoint that contradicts its format."""


class CheckpointFormat(ABC):
    """A format in which files hold weights.

    A subclass is added by one file and by one line in `registry.FORMATS`.

    Attributes:
        name: The common name of the format.
        description: One line about what raypd does with it.
        read_by_transformers: Whether transformers reads the files by itself. Otherwise
            `plain_weights` does.
        stays_quantized: Whether transformers keeps the weights quantized.
        quantized_product: The kind of product, "fp8" or "w8a8", by which the engine computes with
            the codes of the file (see `codes`); None if it has no such product.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    read_by_transformers: ClassVar[bool] = False
    stays_quantized: ClassVar[bool] = False

    def __init__(self, settings: dict[str, Any], file: str) -> None:
        """
        Args:
            settings: The section `quantization_config` of config.json, or its equivalent.
            file: The file that contains the settings.
        """
        self.settings = settings
        self.file = file

    @classmethod
    @abstractmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        """Return whether settings describe this format."""

    @property
    def quantized_product(self) -> str | None:
        return None

    @property
    def label(self) -> str:
        """What the checkpoint calls the format."""
        return method_of(self.settings)

    def refusal(self) -> str | None:
        """Return why raypd cannot read this checkpoint, in a clause; None if it can."""
        return None

    def plain_weights(self, tensors: Tensors) -> Tensors:
        """Return the weights as they are in a checkpoint that is not quantized.

        Args:
            tensors: All tensors of the checkpoint.

        Raises:
            FormatError: If a tensor contradicts the format.
        """
        raise NotImplementedError

    def codes(self, tensors: Tensors) -> dict[str, ReadCodes]:
        """Return the weights with which `quantized_product` computes, by their names."""
        return {}


def method_of(settings: dict[str, Any]) -> str:
    """Return the name of the method in a section `quantization_config`."""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    method = settings.get("quant_method")
    # A transformers enumeration has the name as its value.
    return str(getattr(method, "value", method) or "without a name")


def split_parts(
    tensors: Tensors, codes_suffix: str, part_suffixes: tuple[str, ...]
) -> tuple[dict[str, Tensors], Tensors]:
    """Collect the tensors that together hold one weight.

    Args:
        tensors: All tensors of a checkpoint.
        codes_suffix: The end of the name of the tensor with the codes, such as ".qweight".
        part_suffixes: The ends of the names of the tensors that accompany it, such as ".scales".

    Returns:
        The parts of each quantized weight, by the part of the name before the suffix and by suffix;
        and all other tensors.
    """
    stems = {name.removesuffix(codes_suffix) for name in tensors if name.endswith(codes_suffix)}
    suffixes = (codes_suffix, *part_suffixes)
    parts: dict[str, Tensors] = {stem: {} for stem in stems}
    others: Tensors = {}
    for name, tensor in tensors.items():
        for suffix in suffixes:
            stem = name.removesuffix(suffix)
            if name.endswith(suffix) and stem in stems:
                parts[stem][suffix] = tensor
                break
        else:
            others[name] = tensor
    return parts, others


def part(parts: Tensors, suffix: str, codes: Tensor) -> Tensor:
    """Return one of the parts of a weight.

    Raises:
        FormatError: If it is missing.
    """
    tensor = parts.get(suffix)
    if tensor is None:
        name = suffix.rpartition(".")[2].lstrip("_")
        raise FormatError(f"{codes.name} has no {name}")
    return tensor


def check_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise FormatError if a tensor has a different shape than its format says."""
    if tensor.shape != shape:
        raise FormatError(
            f"{tensor.name} has the shape {list(tensor.shape)} in place of {list(shape)}"
        )


def group_of_inputs(scale: Tensor, inputs: int, groups: int, sizes: set[int]) -> Tensor:
    """Return the group of each input of a weight whose files do not give it, [inputs].

    Args:
        scale: The scales of the weight, for messages.
        inputs: Inputs of the weight.
        groups: Groups of inputs that have scales.
        sizes: Sizes of a group that the settings name. The last group of a weight may be smaller.

    Raises:
        FormatError: If no size gives that many groups.
    """
    if groups == 1:
        sizes = {inputs}
    fitting = [size for size in sizes if size > 0 and -(-inputs // size) == groups]
    if len(fitting) != 1:
        named = ", ".join(str(size) for size in sorted(sizes)) or "none"
        raise FormatError(
            f"{scale.name} has {groups} groups of {inputs} inputs, which is not what the "
            f"group_size of the settings ({named}) gives"
        )
    size = fitting[0]
    return Tensor(scale.name, (inputs,), torch.int64, lambda: torch.arange(inputs) // size)


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack unsigned numbers, several in each integer, the first in its lowest bits.

    Args:
        packed: int32 [..., n]
        bits: 2, 4 or 8.

    Returns:
        int32 [..., n * 32 / bits]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (packed[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)
