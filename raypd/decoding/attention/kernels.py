"""Which attention reads the cache, and how models of transformers come to call it."""

from typing import Any

import torch

from raypd.decoding.attention import avx512, sdpa
from raypd.decoding.attention.step import Attend, AttentionLayer, Step

NAME = "raypd"  # of `attention` among transformers' attention functions


def chosen(attention: str, device: torch.device, dtype: torch.dtype) -> Attend:
    """The attention of a name. Raises ValueError where there is none, it is not installed, or it cannot run there."""
    if attention == "auto":
        attention = "avx512" if avx512.is_best(device, dtype) else "sdpa"
    kernels: dict[str, Any] = {"sdpa": sdpa, "avx512": avx512}
    if attention == "triton":
        try:
            from raypd.decoding.attention import triton_kernel
        except ImportError as error:
            reason = f"attention 'triton' needs the package triton ({error}): install it, or use 'sdpa'"
            raise ValueError(reason) from error
        kernels["triton"] = triton_kernel
    if attention not in kernels:
        raise ValueError(f"there is no attention {attention!r}: auto, sdpa, avx512, triton")
    if attention != "sdpa" and (refusal := kernels[attention].refusal(device)) is not None:
        raise ValueError(refusal)
    attend: Attend = kernels[attention].attend
    return attend


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
    """What transformers calls in every layer: `step.attend`. Returns [1, tokens, heads, head_dim], and no weights.
    Raises RuntimeError where the model was called otherwise than by its engine, or has attention sinks."""
    if step is None:
        raise RuntimeError(
            "a model of a raypd engine is called through the engine alone, and its layers must hand unknown keyword "
            "arguments on to the attention function"
        )
    if s_aux is not None:
        raise RuntimeError("its attention has sinks, which raypd's attention does not know")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [tokens, heads, head_dim]
    layer = AttentionLayer(int(module.layer_idx), scale, sliding_window, softcap)  # type: ignore[arg-type]
    return step.attend(step, layer, query, key, value)[None], None
