"""Choose the attention function that reads the cache, and plug it into transformers models."""

import logging
from functools import cache
from typing import Any

import torch

import raypd.decoding.attention.avx512 as avx512
import raypd.decoding.attention.sdpa as sdpa
from raypd.decoding.attention.check import HeadSizes, error_of
from raypd.decoding.attention.step import Attend, AttentionLayer, Step

# The name under which `attention` is registered with transformers.
NAME = "raypd"

_log = logging.getLogger(__name__)


def choose_attention(
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    config: Any,
    cache_dtype: torch.dtype | None = None,
) -> Attend:
    """Return the attention function with a name.

    Args:
        attention: "sdpa", "avx512", "triton" or "auto".
        device: The model's device.
        dtype: The model's dtype.
        config: The model's text configuration; only "auto" reads it.
        cache_dtype: The dtype of the KV cache; None for the model's.

    Raises:
        ValueError: If there is no such attention, its package is not installed, or it cannot run on
            the device.
    """
    if attention == "auto":
        attention = _fastest(device, dtype, config, cache_dtype)
    if attention == "sdpa":
        return sdpa.attend
    if attention == "avx512":
        kernel: Any = avx512
    elif attention == "triton":
        kernel = _import_triton_kernel()
    else:
        raise ValueError(f"unknown attention {attention!r}: auto, sdpa, avx512, triton")
    refusal = kernel.refusal(device)
    if refusal is not None:
        raise ValueError(refusal)
    attend: Attend = kernel.attend
    return attend


def _import_triton_kernel() -> Any:
    # triton is installed with torch only where there is a GPU, so it is imported only when needed.
    try:
        import raypd.decoding.attention.triton_kernel as triton_kernel
    except ImportError as error:
        raise ValueError(
            f"attention 'triton' needs the package triton ({error}): install it, or use 'sdpa'"
        ) from error
    return triton_kernel


def _fastest(
    device: torch.device, dtype: torch.dtype, config: Any, cache_dtype: torch.dtype | None
) -> str:
    """Return the name of the fastest attention that computes correctly on a device."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return _fastest_on_gpu(device, dtype, _head_sizes(config), cache_dtype)
    if avx512.is_best(device, dtype) and cache_dtype is None:
        return "avx512"
    return "sdpa"


def _head_sizes(config: Any) -> tuple[HeadSizes, ...]:
    """Return the distinct attention sizes of a model's layers."""
    latent_dim = getattr(config, "kv_lora_rank", None)
    if latent_dim:
        dim = latent_dim + config.qk_rope_head_dim
        return (HeadSizes(config.num_attention_heads, 1, dim, latent_dim),)
    sizes: list[HeadSizes] = []
    for layer in range(config.num_hidden_layers):
        of_layer = config.per_layer_config[layer]
        heads = of_layer.num_attention_heads
        kv_heads = getattr(of_layer, "num_key_value_heads", None) or heads
        head_dim = getattr(of_layer, "head_dim", None) or of_layer.hidden_size // heads
        sizes.append(HeadSizes(heads, kv_heads, head_dim))
    return tuple(dict.fromkeys(sizes))


@cache
def _fastest_on_gpu(
    device: torch.device,
    dtype: torch.dtype,
    all_sizes: tuple[HeadSizes, ...],
    cache_dtype: torch.dtype | None,
) -> str:
    """Return "triton" if it computes correctly on this GPU; otherwise warn and return "sdpa"."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "sdpa"
    try:
        attend = choose_attention("triton", device, dtype, None)
        error = max(error_of(attend, device, dtype, sizes, cache_dtype) for sizes in all_sizes)
    # The compiler, the driver and the GPU raise all kinds of exceptions; sdpa needs none of them.
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"
    else:
        if error <= 1:
            return "triton"
        reason = f"it is off by {error:.3g} times what {dtype} may be"
    _log.warning(
        "attention 'sdpa', which is slower, in place of 'triton' on %s: %s", device, reason
    )
    return "sdpa"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    step: Step | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend over the cache of `step`. transformers calls this function in every layer.

    Args:
        module: The layer's attention module, which knows the index of its layer.
        query: Rotated queries, [1, heads, tokens, head_dim].
        key: Rotated keys, [1, kv_heads, tokens, head_dim].
        value: Values, [1, kv_heads, tokens, head_dim].
        attention_mask: Not used; `step` knows what each query sees.
        scaling: The factor of the scores; None means head_dim^-0.5.
        sliding_window: The layer's window.
        softcap: The bound of the scores.
        s_aux: Attention sinks, [heads].
        step: The pass. The engine passes it to the model, and the model's layers pass it on.

    Returns:
        [1, tokens, heads, head_dim], and None in place of the weights.

    Raises:
        RuntimeError: If the model was not called by its engine.
    """
    if step is None:
        raise RuntimeError(
            "a model of a raypd engine is called through the engine alone, and its layers must "
            "hand unknown keyword arguments on to the attention function"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    number = int(module.layer_idx)  # type: ignore[arg-type]
    layer = AttentionLayer(number, scaling, sliding_window, softcap, s_aux)
    attended = step.attend(
        step,
        layer,
        query[0].transpose(0, 1),  # [tokens, heads, head_dim]
        key[0].transpose(0, 1),  # [tokens, kv_heads, head_dim]
        value[0].transpose(0, 1),
    )
    return attended[None], None
