"""What a pass and a kernel are told of who sees whom. test_exactness.py has what attention makes of it."""

import numpy as np

from raypd.decoding.attention.step import Span
from raypd.decoding.visibility import in_window, one_segment, segment_sets, visible


def span_of(a: int, size: int, start: int, length: int, prefix: int) -> Span:
    """The last `size` tokens of a text of `length`, which lies in the cache from `start` on."""
    tokens = np.stack([prefix + np.arange(length), np.zeros(length, dtype=int), np.zeros(length, dtype=int)])
    return Span(a, a + size, start, length, one_segment(), tokens[:, length - size :], tokens, prefix)


def test_only_text_that_is_read_in_order_is_causal() -> None:
    in_order, asks = [0, 0, 0, 0, 0, 1, 1, 1], [([0] * 8, 5, True), ([0] * 8, 2, False)]
    refilled = [0, 0, 2, 0, 0, 1, 1, 1]  # a slot that was free was filled later
    for steps, asked, causal in (*asks, (in_order, 5, True), (refilled, 5, False)):
        span = span_of(0, 3, 0, 8, 0)
        span.keys[2] = steps
        span.queries = span.keys[:, asked : asked + 3]
        assert span.causal == causal


def test_what_a_kernel_reads_is_the_rule() -> None:
    """Sets of segments for random tokens against `visible`, and windows against their rule written out."""
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
            later = key_positions > key_positions[:, None]  # [keys, keys], of those that the query has before it
            before = seen & (key_positions <= query_positions[:, None])
            kept = in_window(seen, query_positions, key_positions, window)
            np.testing.assert_array_equal(kept, before.astype(int) @ later.T < window)
