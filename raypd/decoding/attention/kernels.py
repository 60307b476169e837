"""Which attention reads the cache, and how models of transformers come to call it."""

import logging
from functools import cache
from typing import Any

import torch

from raypd.decoding.attention import avx512, sdpa
from raypd.decoding.attention.check import error_of
from raypd.decoding.attention.step import Attend, AttentionLayer, Step

NAME = "raypd"  # of `attention` among transformers' attention functions

_log = logging.getLogger(__name__)


def chosen(attention: str, device: torch.device, dtype: torch.dtype, config: Any) -> Attend:
    """The attention of a name, for a model's text configuration.

    Raises ValueError: none, not installed, not for it.
    """
    if attention == "auto":
        attention = "avx512" if avx512.is_best(device, dtype) else "sdpa"
        if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
            attention = _of_gpu(device, dtype, *_head_sizes(config))
    kernels: dict[str, Any] = {"sdpa": sdpa, "avx512": avx512}
    if attention == "triton":
        try:
            from raypd.decoding.attention import triton_kernel
        except ImportError as error:
            reason = (
                f"attention 'triton' needs the package triton ({error}): install it, or use 'sdpa'"
            )
            raise ValueError(reason) from error
        kernels["triton"] = triton_kernel
    if attention not in kernels:
        raise ValueError(f"there is no attention {attention!r}: auto, sdpa, avx512, triton")
    if attention != "sdpa" and (refusal := kernels[attention].refusal(device)) is not None:
        raise ValueError(refusal)
    attend: Attend = kernels[attention].attend
    return attend


def _head_sizes(config: Any) -> tuple[int, int, int]:
    """(heads, key heads, head_dim) of a model's text configuration."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


@cache
def _of_gpu(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> str:
    """triton where it is right on this GPU, tried once, else sdpa, with a warning."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "sdpa"
    try:
        error = error_of(chosen("triton", device, dtype, None), device, dtype, heads, kv_heads, dim)
        reason = None if error <= 1 else f"it is off by {error:.3g} times what {dtype} may be"
    # Of the compiler, the driver or the GPU: whatever it is, sdpa does without.
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"
    if reason is None:
        return "triton"
    _log.warning(
        "attention 'sdpa', which is slower, in place of 'triton' on %s: %s", device, reason
    )
    return "sdpa"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim], rotated
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim], rotated
    value: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,  # factor of the scores; None: head_dim^-0.5
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # attention sinks, [heads]
    step: Step | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: `step.attend`. Returns [1, tokens, heads, head_dim],
    and no weights. Raises RuntimeError where the model was called otherwise than by its engine, or
    has attention sinks.
    """
    if step is None:
        advice = "and its layers must hand unknown keyword arguments on to the attention function"
        raise RuntimeError(
            f"a model of a raypd engine is called through the engine alone, {advice}"
        )
    if s_aux is not None:
        raise RuntimeError("its attention has sinks, which raypd's attention does not know")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # [tokens, heads, head_dim].
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer = AttentionLayer(int(module.layer_idx), scale, sliding_window, softcap)  # type: ignore[arg-type]
    return step.attend(step, layer, query, key, value)[None], None
