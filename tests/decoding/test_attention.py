"""The attention of a pass against torch's own, a span at a time, wherever the regions lie in the cache."""

import numpy as np
import pytest
import torch

from raypd.decoding.attention.sdpa import attend
from raypd.decoding.attention.step import AttentionLayer, PrefixGroup, Span, Step
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.visibility import in_window, one_segment, segment_sets, visible, window_starts

KV_HEADS, REPEAT, DIM = 2, 3, 16


def span_of(a: int, size: int, start: int, length: int, prefix: int) -> Span:
    """The last `size` tokens of a text of `length`, which lies in the cache from `start` on."""
    tokens = np.stack([prefix + np.arange(length), np.zeros(length, dtype=int), np.zeros(length, dtype=int)])
    return Span(a, a + size, start, length, one_segment(), tokens[:, length - size :], tokens, prefix)


@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize(
    "regions",
    [
        [(1, 0, 9), (2, 16, 12), (1, 32, 8)],  # (queries, start, keys): at equal distances
        [(2, 0, 12), (2, 16, 12), (2, 32, 4)],  # the last one's padding would lie behind the cache
        [(1, 0, 9), (2, 11, 12), (1, 32, 8), (4, 23, 9)],
        [(9, 0, 9), (6, 16, 12), (1, 32, 3)],  # a prompt, and the second part of one
    ],
)
def test_a_pass_is_what_each_of_its_spans_is_alone(
    regions: list[tuple[int, int, int]], softcap: float | None, prefix: int
) -> None:
    torch.manual_seed(0)
    own = max(start + length for _, start, length in regions)
    cache = KVCache(own + prefix, None, torch.device("cpu"))
    cache.keys[0], cache.values[0] = torch.randn(2, own + prefix, KV_HEADS, DIM, dtype=torch.float64)
    begins = np.cumsum([0, *(size for size, _, _ in regions)]).tolist()
    spans = [span_of(a, *region, prefix) for a, region in zip(begins, regions, strict=False)]
    tokens = spans[-1].b
    query = torch.randn(tokens, KV_HEADS * REPEAT, DIM, dtype=torch.float64)
    new = torch.randn(2, tokens, KV_HEADS, DIM, dtype=torch.float64)
    slots = torch.tensor([span.start + span.length - span.size + i for span in spans for i in range(span.size)])
    step = Step(cache, [PrefixGroup(spans, own, prefix)], slots, slots[:0], attend)
    attended = attend(step, AttentionLayer(0, DIM**-0.5, None, softcap), query, *new)

    for span in spans:
        here = [*range(own, own + prefix), *range(span.start, span.start + span.length)]
        stores = (cache.keys[0], cache.values[0])
        keys, values = (store[here].transpose(0, 1).repeat_interleave(REPEAT, 0) for store in stores)
        scores = query[span.a : span.b].transpose(0, 1) @ keys.transpose(1, 2) * DIM**-0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        unseen = torch.ones(span.size, len(here), dtype=torch.bool).triu(len(here) - span.size + 1)
        wanted = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values
        torch.testing.assert_close(attended[span.a : span.b], wanted.transpose(0, 1))


def test_only_text_that_is_read_in_order_is_causal() -> None:
    in_order, asks = [0, 0, 0, 0, 0, 1, 1, 1], [([0] * 8, 5, True), ([0] * 8, 2, False)]
    refilled = [0, 0, 2, 0, 0, 1, 1, 1]  # a slot that was free was filled later
    for steps, asked, causal in (*asks, (in_order, 5, True), (refilled, 5, False)):
        span = span_of(0, 3, 0, 8, 0)
        span.keys[2] = steps
        span.queries = span.keys[:, asked : asked + 3]
        assert span.causal == causal


def test_what_a_kernel_reads_is_the_rule() -> None:
    """Sets of segments and first positions of windows, for random tokens, against `visible` and `in_window`."""
    rng = np.random.default_rng(7)
    for segments in (1, 3, 31, 32, 80):
        reach = rng.integers(0, 3, (segments, segments)).astype(np.int8)
        key_segments, key_positions = rng.integers(-1, segments, 60), rng.integers(0, 40, 60)
        query_segments, query_positions = rng.integers(0, segments, 20), rng.integers(0, 40, 20)
        seen = visible(reach, query_segments, query_positions, key_segments, key_positions)

        sets, labels = segment_sets(reach, query_segments, key_segments)
        whole, causal = ((sets[:, kind][:, labels // 32] >> (labels % 32)) & 1 == 1 for kind in (0, 1))
        np.testing.assert_array_equal(whole | (causal & (key_positions <= query_positions[:, None])), seen)
        for window in (1, 2, 7, 60, 61):
            starts = window_starts(seen, query_positions, key_positions, window)
            kept = in_window(seen, query_positions, key_positions, window)
            np.testing.assert_array_equal(key_positions >= starts[:, None], kept)
