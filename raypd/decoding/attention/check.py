"""Check an attention function with a small random pass on the device that it runs on."""

from typing import NamedTuple

import numpy as np
import torch

from raypd.decoding.attention.step import Attend, AttentionLayer, PrefixGroup, Span, Step
from raypd.decoding.kv_cache import KVCache, in_8_bits
from raypd.decoding.visibility import POSITION, SEGMENT, Reach

_PREFIX_LENGTH = 280
# The queries and own keys of each span: a prompt; a text being decoded whose keys are split; values
# decoded in parallel; and enough texts being decoded that a kernel reads the prefix once for all of
# them.
_PARALLEL = (5, 70)
_SHAPES = [(90, 90), (1, 420), _PARALLEL, *[(1, 20)] * 16]
# Sums may differ by a few rounding errors of the dtype.
_TOLERATED_ROUNDINGS = 4


class HeadSizes(NamedTuple):
    """The sizes of the heads of an attention layer."""

    heads: int  # Query heads.
    kv_heads: int
    dim: int  # The size of a query or key.
    # How many leading elements of a key form its value; None if values are separate and have the
    # same size as keys.
    latent_dim: int | None = None


class _Tensors(NamedTuple):
    """The inputs of attention for all slots of the cache."""

    query: torch.Tensor  # [tokens, heads, dim]
    key: torch.Tensor  # [slots, kv_heads, dim]
    value: torch.Tensor  # [slots, kv_heads, dim of a value]


def error_of(
    attend: Attend,
    device: torch.device,
    dtype: torch.dtype,
    sizes: HeadSizes,
    cache_dtype: torch.dtype | None = None,
) -> float:
    """Compare an attention function with one computed in float64.

    Args:
        attend: The function to check.
        device: Where it runs.
        dtype: The dtype of its inputs.
        sizes: The sizes of queries, keys and values.
        cache_dtype: The dtype of the cache; None for that of the inputs. The reference reads keys
            and values as the cache holds them.

    Returns:
        The largest difference, as a multiple of the tolerance for the dtype.
    """
    rng = np.random.default_rng(0)
    spans = _random_spans(rng)
    slot_count = spans[-1].key_start + spans[-1].key_count
    slots = torch.from_numpy(np.concatenate([_query_slots(span) for span in spans])).to(device)
    heads, kv_heads, dim, latent_dim = sizes
    query = _random_tensor(rng, (len(slots), heads, dim), device, dtype)
    key = _random_tensor(rng, (slot_count, kv_heads, dim), device, dtype)
    value = _random_tensor(rng, (slot_count, kv_heads, dim), device, dtype)
    if cache_dtype is not None:
        key = in_8_bits(key, cache_dtype).to(dtype)
        value = in_8_bits(value, cache_dtype).to(dtype)
    cache = KVCache(slot_count, None, device, dtype=cache_dtype)
    if latent_dim is None:
        keys, values = cache.layer(0, key, value)
        values.copy_(value)
    else:
        value = key[..., :latent_dim]
        keys = cache.latents(0, key)
    keys.copy_(key)
    tensors = _Tensors(query, key, value)
    step = Step(cache, [PrefixGroup(spans, 0, _PREFIX_LENGTH)], slots, slots[:0], attend)
    layer = AttentionLayer(0, dim**-0.5, latent_dim=latent_dim)
    new_value = value[slots] if latent_dim is None else None
    attended = attend(step, layer, query, key[slots], new_value)
    largest = 0.0
    for span in spans:
        exact = _attend_exactly(span, tensors, layer.scale)
        difference = attended[span.query_start : span.query_end].double() - exact
        largest = max(largest, float(difference.abs().max().nan_to_num(torch.inf)))
    return largest / (_TOLERATED_ROUNDINGS * torch.finfo(dtype).eps)


def _random_spans(rng: np.random.Generator) -> list[Span]:
    """Make spans of the shapes above, whose own keys are contiguous in the cache."""
    reach = np.array(
        [
            [Reach.CAUSAL, Reach.HIDDEN, Reach.HIDDEN],
            [Reach.ALL, Reach.CAUSAL, Reach.HIDDEN],
            [Reach.CAUSAL, Reach.ALL, Reach.CAUSAL],
        ],
        dtype=np.int8,
    )
    spans: list[Span] = []
    row = 0
    slot = _PREFIX_LENGTH
    for queries, length in _SHAPES:
        keys = np.zeros((3, length), dtype=np.int64)
        keys[POSITION] = _PREFIX_LENGTH + np.arange(length)
        if (queries, length) == _PARALLEL:
            keys[SEGMENT] = rng.integers(0, len(reach), length)
        span = Span(
            query_start=row,
            query_end=row + queries,
            key_start=slot,
            key_count=length,
            reach=reach,
            queries=keys[:, -queries:],
            keys=keys,
            prefix_length=_PREFIX_LENGTH,
        )
        spans.append(span)
        row += queries
        slot += length
    return spans


def _query_slots(span: Span) -> np.ndarray:
    """Return the slots of a span's queries, which are its last keys."""
    end = span.key_start + span.key_count
    return np.arange(end - span.query_count, end)


def _random_tensor(
    rng: np.random.Generator, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(device, dtype)


def _attend_exactly(span: Span, tensors: _Tensors, scale: float) -> torch.Tensor:
    """Return the attention of a span in float64, [queries, heads, dim of a value]."""
    query = tensors.query[span.query_start : span.query_end].double()
    key = _keys_of(span, tensors.key, query.shape[1])
    value = _keys_of(span, tensors.value, query.shape[1])
    visibility, _, _ = span.with_prefix()
    hidden = torch.from_numpy(~visibility).to(query.device)  # [queries, keys]
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def _keys_of(span: Span, stored: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the prefix and the own keys of a span in float64, once per query head.

    [slots, kv_heads, dim] -> [keys, heads, dim]
    """
    prefix = stored[: span.prefix_length]
    own = stored[span.key_start : span.key_start + span.key_count]
    keys = torch.cat([prefix, own]).double()
    return keys.repeat_interleave(heads // keys.shape[1], 1)
