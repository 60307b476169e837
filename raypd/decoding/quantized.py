"""Linear layers with weights and inputs in 8 bits, for inference.

A row of the weight has one scale, and every input row, which is a token, its own: what else is in
the pass makes no difference.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from raypd.decoding import native

E4M3 = torch.float8_e4m3fn
_MOST = torch.finfo(E4M3).max


class _Linear(torch.nn.Module):
    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.nn.Parameter(weight, requires_grad=False)  # [out_features, in_features]
        self.scale, self.bias = scale, bias


class Int8Linear(_Linear):
    """In integers, on a CPU with AVX-512 BF16; sums of products are exact.

    Scales are float32 [out_features].
    """

    @classmethod
    def of(cls, linear: torch.nn.Linear) -> "Int8Linear":
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1) / 127).clamp_min(1e-30)
        return cls((weight / scale[:, None]).round().to(torch.int8), scale, linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        rows, scale = native.quantized(x.reshape(-1, self.in_features).contiguous())
        out = native.scaled(torch._int_mm(rows, self.weight.t()), scale, self.scale)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)


class Fp8Linear(_Linear):
    """In FP8 (E4M3), on a GPU that has it; sizes are multiples of 16, sums float32.

    Scales: [1, out_features].
    """

    @classmethod
    def of(cls, linear: torch.nn.Linear) -> "Fp8Linear":
        weight, scale = in_fp8(linear.weight.detach())
        return cls(weight, scale.t(), linear.bias)

    def forward(
        self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.dtype]
    ) -> torch.Tensor:
        """[..., in_features], or rows and scales of `in_fp8` and the type of outputs -> [...,
        out_features]
        """
        rows, scale, dtype = (
            x if isinstance(x, tuple) else (*in_fp8(x.reshape(-1, self.in_features)), x.dtype)
        )
        shape = *(rows if isinstance(x, tuple) else x).shape[:-1], self.out_features
        if not len(rows):
            return scale.new_empty(shape, dtype=dtype)
        return torch._scaled_mm(
            rows, self.weight.t(), scale, self.scale, self.bias, out_dtype=dtype
        ).view(shape)


def in_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, dim] in FP8, and what each is to be multiplied by: float32 [rows, 1]."""
    scale = (rows.abs().amax(1, keepdim=True).float() / _MOST).clamp_min(1e-30)
    return (rows / scale).to(E4M3), scale


def quantize(
    model: PreTrainedModel,
    kind: str,
    device: torch.device | None = None,
    codes: Callable[[torch.nn.Linear], tuple[torch.Tensor, torch.Tensor] | None] | None = None,
) -> None:
    """Makes linear layers of a bfloat16 model into layers of 8 bits, in place.

    The output embeddings stay as they are. The model moves to the device, which at no time holds
    more than one of these layers in bfloat16.

    Args:
        model: A model in bfloat16.
        kind: "w8a8" or "fp8".
        device: Where the model goes; None: it stays where it is.
        codes: For "fp8", finds the codes [out_features, in_features] and the scale, without
            dimensions, of a layer that its checkpoint has in FP8, and None for other layers, which
            then stay as they are. Without it all layers are rounded anew.
    """
    head = model.get_output_embeddings()
    convert = {"w8a8": Int8Linear.of, "fp8": Fp8Linear.of}[kind]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not torch.nn.Linear or child is head:
                continue
            if child.in_features % 16 or child.out_features % 16:
                continue
            if device is not None:
                child.to(device)
            if codes is None:
                setattr(parent, name, convert(child))
                continue
            of_checkpoint = codes(child)
            if of_checkpoint is not None:
                weight, scale = of_checkpoint
                scales = scale.reshape(1, 1).repeat(1, child.out_features)
                setattr(parent, name, Fp8Linear(weight, scales, child.bias))
    if device is not None:
        model.to(device)
