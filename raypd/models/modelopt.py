"""Reads checkpoints that NVIDIA's ModelOpt quantized to FP8 with one scale per weight tensor.

transformers does not know this format and would load the FP8 codes as if they were weights. The
classes below are registered with transformers, which then multiplies each weight by its scale
while it loads the file, one tensor after the other, experts included.
"""

from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, _IdentityOp
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from raypd.errors import ModelError

METHOD = "modelopt"
# Attribute of a linear layer whose dequantized weight is `code * scale`: the scale, a tensor of
# float32 without dimensions. It is no parameter and no buffer, so it is not saved with the model.
SCALE = "modelopt_scale"
_FP8 = torch.float8_e4m3fn
# Attribute of a model with the faults of its tensors. transformers swallows the text of an error
# that a conversion raises, so they are collected here and `check_tensors` raises the first one.
_FAULTS = "modelopt_faults"


@register_quantization_config(METHOD)
class ModelOptConfig(QuantizationConfigMixin):
    """The section `quantization_config` of such a checkpoint."""

    def __init__(self, **settings: Any) -> None:
        self.quant_method = METHOD
        self.quant_algo = settings.get("quant_algo")
        # transformers then removes this section from the model's configuration after loading.
        self.dequantize = True


@register_quantizer(METHOD)
class ModelOptQuantizer(HfQuantizer):
    """Tells transformers which tensors belong together, and what to make of them."""

    serialized_names: ClassVar = {"weight": ["weight", "weight_scale", "input_scale"]}

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": DequantizeFp8}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


class DequantizeFp8(ConversionOps):
    """Multiplies each FP8 weight by its scale, and casts everything to the model's dtype."""

    def __init__(self, hf_quantizer: ModelOptQuantizer) -> None:
        # transformers looks for this name to leave the tensors of the file in their own dtype.
        self.hf_quantizer = hf_quantizer

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        full_layer_name: str | None = None,
        model: PreTrainedModel | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Returns the weights of `input_dict` without their scales.

        A key is a pattern of names in the checkpoint; its value is the list of tensors that match
        it, for example one for each expert.
        """
        assert model is not None
        converted: dict[str, Any] = {}
        for key, tensors in input_dict.items():
            if key.endswith(("weight_scale", "input_scale")):
                continue
            weights = _as_list(tensors)
            scales = _as_list(input_dict.get(f"{key}_scale", []))
            if not scales:
                scales = [None] * len(weights)
            dequantized = []
            for weight, scale in zip(weights, scales, strict=True):
                fault = _fault(weight, scale)
                if fault is not None:
                    faults = model.__dict__.setdefault(_FAULTS, [])
                    faults.append(f"{full_layer_name or key} {fault}")
                dequantized.append(_dequantized(weight, scale, model.dtype))
            if key != "weight":
                converted[key] = dequantized
                continue
            # A weight that the model has under the same name; transformers wants that name here.
            name = full_layer_name or key
            converted[name] = dequantized[0]
            module = model.get_submodule(name.rpartition(".")[0])
            scale = scales[0]
            if scale is not None and scale.numel() == 1 and type(module) is torch.nn.Linear:
                setattr(module, SCALE, scale.float().reshape(()))
        return converted

    @property
    def reverse_op(self) -> ConversionOps:
        """Saves the dequantized weights as they are."""
        return _IdentityOp()


def _as_list(tensors: Any) -> list[Any]:
    if isinstance(tensors, list):
        return tensors
    return [tensors]


def _fault(weight: torch.Tensor, scale: torch.Tensor | None) -> str | None:
    """Says why a weight is not one of FP8 with one scale, nor one that was not quantized."""
    if weight.dtype != _FP8 and scale is None:
        return None if weight.is_floating_point() else f"is {weight.dtype} and has no scale"
    if weight.dtype != _FP8:
        return f"has a scale, and is {weight.dtype} in place of FP8 (E4M3)"
    if scale is None:
        return "is FP8 and has no weight_scale"
    if scale.numel() != 1:
        return f"has scales of shape {list(scale.shape)} in place of one"
    return None


def _dequantized(
    weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if scale is None or scale.numel() != 1:
        return weight.to(dtype)
    return (weight.float() * scale.float()).to(dtype)


def check_tensors(model: PreTrainedModel, name: str) -> None:
    """Raises ModelError where a tensor of a loaded checkpoint was not as the format says."""
    faults = getattr(model, _FAULTS, [])
    if faults:
        raise ModelError(
            f"model {name!r}: not FP8 of ModelOpt with a scale per tensor: {faults[0]}"
        )


def codes(linear: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Finds the FP8 codes [out_features, in_features] of a dequantized layer, and their scale.

    A code has 4 significant bits and bfloat16 has 8, so that dividing the product by its scale
    gives the code again, exactly.

    Returns:
        None for a layer that was not quantized in the checkpoint.
    """
    scale = getattr(linear, SCALE, None)
    if scale is None:
        return None
    scale = scale.to(linear.weight.device)
    return (linear.weight.detach().float() / scale).to(_FP8), scale
