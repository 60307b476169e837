"""Whether an attention function is right on the device that it runs on: a small random pass against
float64.
"""

import numpy as np
import torch

from raypd.decoding.attention.step import Attend, AttentionLayer, PrefixGroup, Span, Step
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.visibility import Reach

# Queries and own keys: a prompt, a text in decoding whose keys are split, values in parallel; and
# so many texts in decoding that the prefix is read once for all.
_PREFIX = 280
_SPANS = [(90, 90), (1, 420), (5, 70), *[(1, 20)] * 16]


def error_of(
    attend: Attend, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> float:
    """The largest difference from float64, as a share of what numbers of that type may be off
    by.
    """
    draw = np.random.default_rng(0)
    spans, tokens, start = [], 0, _PREFIX
    for number, (queries, length) in enumerate(_SPANS):
        segments = draw.integers(0, 3, length) if number == 2 else np.zeros(length, dtype=np.int64)
        keys = np.stack([_PREFIX + np.arange(length), segments, np.zeros(length, dtype=np.int64)])
        reach = np.where(
            np.eye(3), Reach.CAUSAL, np.array([[0, 0, 0], [1, 0, 0], [2, 1, 0]])
        ).astype(np.int8)
        spans.append(
            Span(tokens, tokens + queries, start, length, reach, keys[:, -queries:], keys, _PREFIX)
        )
        tokens, start = tokens + queries, start + length
    slots = np.concatenate(
        [np.arange(s.start + s.length - s.size, s.start + s.length) for s in spans]
    )
    cache, places = KVCache(start, None, device), torch.from_numpy(slots).to(device)
    step = Step(cache, [PrefixGroup(spans, 0, _PREFIX)], places, places[:0], attend)
    shapes = [(tokens, heads, dim), (start, kv_heads, dim), (start, kv_heads, dim)]
    query, key, value = (
        torch.from_numpy(draw.standard_normal(shape)).to(device, dtype) for shape in shapes
    )
    for store, numbers in zip(cache.layer(0, key, value), (key, value), strict=True):
        store.copy_(numbers)
    attended = attend(
        step, AttentionLayer(0, dim**-0.5), query, key[places], value[places]
    ).double()
    largest = 0.0
    for span in spans:
        own = slice(span.start, span.start + span.length)
        span_key, span_value = (
            torch.cat([numbers[:_PREFIX], numbers[own]])
            .double()
            .repeat_interleave(heads // kv_heads, 1)
            for numbers in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query[span.a : span.b].double(), span_key) * dim**-0.5
        hidden = torch.from_numpy(~span.all_seen()[0]).to(device)
        exact = torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), span_value
        )
        largest = max(
            largest, float((attended[span.a : span.b] - exact).abs().max().nan_to_num(torch.inf))
        )
    return largest / (4 * torch.finfo(dtype).eps)
