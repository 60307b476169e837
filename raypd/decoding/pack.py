"""Make a model faster on its device.

Its layers are then computed by native.c, by oneDNN's products, or by GPU kernels.
"""

import copy
import logging
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import raypd.decoding.attention.avx512 as avx512
import raypd.decoding.attention.sdpa as sdpa
import raypd.decoding.native as native
from raypd.decoding.attention.kernels import choose_attention
from raypd.decoding.attention.step import Attend, PrefixGroup, Span, Step
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.layers.in_c import AmxBuilder, CBuilder
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.linear import is_possible, pack_linears
from raypd.decoding.models.decoder import DecoderModel, Family
from raypd.decoding.models.registry import find_family
from raypd.decoding.quantized import Fp8Linear, quantize
from raypd.decoding.recurrence.chains import RecurrentRun
from raypd.decoding.recurrence.plan import RecurrentPass
from raypd.decoding.recurrence.states import EMPTY, StatePool
from raypd.decoding.visibility import POSITION, one_segment

# The number of tokens of the text on which GPU layers are checked.
_CHECK_TOKENS = 40
# The largest error of that text's logits, relative to their norm.
_TOLERANCE = 0.05

_log = logging.getLogger(__name__)


def pack_model(
    model: PreTrainedModel | DecoderModel, stable: bool = False
) -> PreTrainedModel | DecoderModel:
    """Make a model faster, in bfloat16 on a CPU or in 16 bits on a GPU.

    Its logits stay as exact as they were.

    Args:
        model: The model, whose weights are taken. Use the result instead of it.
        stable: Whether the model is for a stable engine. If so, it is packed even if that is not
            the fastest choice.

    Returns:
        The packed model, or `model` itself if nothing makes it faster or it is already packed.
    """
    if isinstance(model, DecoderModel):
        return model
    if model.device.type == "cuda":
        return _pack_on_gpu(model)
    if model.dtype != torch.bfloat16:
        return model
    in_c = avx512.is_best(torch.device("cpu"), torch.bfloat16)
    if stable and native.refusal() is None:
        in_c = True
    if not in_c and not is_possible():
        return model
    family = find_family(model)
    if family is None or native.refusal() is not None:
        pack_linears(model, in_c)
        return model
    pack_linears(model, in_c, only=[model.lm_head])
    packed = family.build(model, CBuilder() if in_c else AmxBuilder())
    # The linear layers among the parts that the builder left to torch can still be packed.
    pack_linears(packed, in_c)
    return packed


def _pack_on_gpu(model: Any) -> PreTrainedModel | DecoderModel:
    family = find_family(model)
    if family is None:
        return model
    attend = choose_attention("auto", model.device, model.dtype, model.config.get_text_config())
    if attend is sdpa.attend:
        # triton cannot run here; the choice of the attention has already logged the reason.
        return model
    from raypd.decoding.layers.in_triton import CudaBuilder

    try:
        error = layers_error(model, CudaBuilder(), attend)
    # The compiler, the driver and the GPU raise all kinds of exceptions; torch needs none of them.
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"
    else:
        if error <= _TOLERANCE:
            return family.build(model, CudaBuilder())
        reason = f"off by {error:.2g} of the logits' norm"
    _log.warning(
        "layers in torch, which are slower, in place of those for GPUs on %s: %s",
        model.device,
        reason,
    )
    return model


@torch.inference_mode()
def layers_error(model: Any, builder: Builder, attend: Attend) -> float:
    """Check the parts that a builder makes, on a small model with random weights.

    Args:
        model: The model from which the small one takes its kind, dtype and quantization.
        builder: The builder.
        attend: The attention function.

    Returns:
        The difference between its logits and those in float64, relative to their norm. Layers in
        FP8 are compared with the same layers in torch instead.
    """
    family = find_family(model)
    assert family is not None
    small = _small_model(model, family)
    is_fp8 = any(isinstance(module, Fp8Linear) for module in model.modules())
    if is_fp8:
        quantize(small, "fp8")
    reference = copy.deepcopy(small)
    if not is_fp8:
        reference = reference.double()
    exact = _check_logits(family.build(reference, Builder()), sdpa.attend)
    logits = _check_logits(family.build(small, builder), attend)
    return float((logits - exact).norm() / exact.norm())


def _small_model(model: Any, family: Family) -> Any:
    """Return a model of the same kind with random weights, and one layer of each type."""
    config = copy.deepcopy(model.config.get_text_config())
    layer_types = list(dict.fromkeys(getattr(config, "layer_types", None) or ["full_attention"]))
    small = {
        "num_hidden_layers": len(layer_types),
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 256,
        **family.small,
    }
    if getattr(config, "layer_types", None):
        small["layer_types"] = layer_types
    config.update(small)
    config.pad_token_id = None
    with torch.device(model.device):
        return type(model)._from_config(config, dtype=model.dtype).eval()


def _check_logits(model: DecoderModel, attend: Attend) -> torch.Tensor:
    """Return a model's logits of a short text in float64, [tokens, vocabulary]."""
    device = next(model.parameters()).device
    numbers = torch.arange(_CHECK_TOKENS, device=device)  # Ids, positions, slots and rows.
    table = np.zeros((3, _CHECK_TOKENS), dtype=np.int64)
    table[POSITION] = np.arange(_CHECK_TOKENS)
    span = Span(
        query_start=0,
        query_end=_CHECK_TOKENS,
        key_start=0,
        key_count=_CHECK_TOKENS,
        reach=one_segment(),
        queries=table,
        keys=table,
    )
    cache = KVCache(_CHECK_TOKENS, None, device)
    step = Step(cache, [PrefixGroup([span])], numbers, numbers, attend)
    if model.recurrences:
        shapes = [recurrence.state for recurrence in model.recurrences]
        run = RecurrentRun(np.arange(_CHECK_TOKENS), start=EMPTY, end=EMPTY + 1, level=0)
        pool = StatePool(shapes, 1, device)
        step.recurrence = RecurrentPass([run], _CHECK_TOKENS, pool)
    logits, _ = model(numbers, numbers, step)
    return logits.double()
