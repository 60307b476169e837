"""Models made faster for the device that they are on: layers by native.c, oneDNN's products, or
layers for GPUs.
"""

import copy
import logging
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from raypd.decoding import native
from raypd.decoding.attention import avx512, sdpa
from raypd.decoding.attention.kernels import chosen
from raypd.decoding.attention.step import Attend, PrefixGroup, Span, Step
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.linear import is_possible, pack_linears
from raypd.decoding.llama import AmxLayer, Layer, Llama, NativeLayer, is_llama
from raypd.decoding.quantized import Fp8Linear, quantize
from raypd.decoding.visibility import one_segment

_TOKENS = 40  # of the text that layers for GPUs are tried on
_TOLERANCE = 0.05  # of its logits, relative to float64

_log = logging.getLogger(__name__)


def pack(model: PreTrainedModel, stable: bool = False) -> PreTrainedModel | Llama:
    """A model made faster where possible, as exact: in bfloat16 on a CPU, in 16 bits on a GPU.

    It takes the weights: use it, not `model`. stable: for an engine that is, where that is not the
    fastest, too.
    """
    if model.device.type == "cuda":
        return _on_gpu(model)
    in_c = avx512.is_best(torch.device("cpu"), torch.bfloat16) or (
        stable and native.refusal() is None
    )
    if not in_c and not is_possible():
        return model
    layer = NativeLayer if in_c else AmxLayer
    if (
        native.refusal() is None
        and is_llama(model)
        and all(layer.takes(source) for source in model.model.layers)
    ):
        pack_linears(model, in_c, only=[model.lm_head])
        return Llama(model, layer)
    pack_linears(model, in_c)
    return model


def _on_gpu(model: Any) -> PreTrainedModel | Llama:
    if not is_llama(model):
        return model
    attend = chosen("auto", model.device, model.dtype, model.config)
    if attend is sdpa.attend:  # triton cannot run, which was said
        return model
    from raypd.decoding.cuda_layer import CudaLayer

    if not all(CudaLayer.takes(layer) for layer in model.model.layers):
        return model
    try:
        error = layers_error(model, CudaLayer, attend)
        reason = None if error <= _TOLERANCE else f"off by {error:.2g} of the logits' norm"
    except Exception as failure:  # of the compiler, the driver or the GPU
        reason = f"{type(failure).__name__}: {failure}"
    if reason is None:
        return Llama(model, CudaLayer)
    _log.warning(
        "layers in torch, which are slower, in place of those for GPUs on %s: %s",
        model.device,
        reason,
    )
    return model


@torch.inference_mode()
def layers_error(model: Any, layer: type[Layer], attend: Attend) -> float:
    """How far the logits of a small model with such layers, of `model`'s kind with random weights,
    are from those in float64, or of layers of FP8 in torch, relative to their norm.
    """
    config = copy.deepcopy(model.config)
    config.update(
        {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256}
    )
    config.pad_token_id = None
    with torch.device(model.device):
        small = type(model)._from_config(config, dtype=model.dtype).eval()
    fp8 = isinstance(model.model.layers[0].self_attn.o_proj, Fp8Linear)
    if fp8:
        quantize(small, "fp8")
    tokens = torch.arange(_TOKENS, device=model.device)
    texts = np.zeros((3, _TOKENS), dtype=np.int64)
    texts[0] = np.arange(_TOKENS)
    group = PrefixGroup([Span(0, _TOKENS, 0, _TOKENS, one_segment(), texts, texts)])

    def logits(model: Llama, attend: Attend) -> torch.Tensor:
        step = Step(KVCache(_TOKENS, None, tokens.device), [group], tokens, tokens, attend)
        return model(tokens, tokens, step)[0].double()

    exact = logits(
        Llama(copy.deepcopy(small) if fp8 else copy.deepcopy(small).double()), sdpa.attend
    )
    return float((logits(Llama(small, layer), attend) - exact).norm() / exact.norm())
