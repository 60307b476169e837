"""The one rule of who sees whom: all masks, dense, block and in kernels, come from `visible`.

Every token of a program carries a segment, a virtual position and the step that produced it. The
program's `reach` matrix says of two segments HIDDEN, ALL or CAUSAL. Then a query q may attend to a
key k exactly when

    reach[seg(q), seg(k)] is ALL, or it is CAUSAL and position(k) <= position(q);  and step(k) <=
    step(q)

At inference the step condition holds by itself: what is not yet decoded is not in the cache. In
training it is what makes the ground-truth sequence look like inference (HPD sec. 4.4).
"""

from enum import IntEnum
from functools import cache, lru_cache

import numpy as np

NO_TOKEN = -1  # the segment of a cache slot that holds no token: nobody sees it


class Reach(IntEnum):
    """What the tokens of one segment see of another segment."""

    HIDDEN = 0
    ALL = 1
    CAUSAL = 2


def visible(
    reach: np.ndarray,  # [segments, segments] of Reach
    query_segments: np.ndarray,  # [queries]
    query_positions: np.ndarray,  # [queries]
    key_segments: np.ndarray,  # [keys]; a key of segment NO_TOKEN is seen by nobody
    key_positions: np.ndarray,  # [keys]
    # [queries]; None leaves the step condition out (inference)
    query_steps: np.ndarray | None = None,
    key_steps: np.ndarray | None = None,  # [keys]
) -> np.ndarray:
    """Who sees whom by the rule above: bool [queries, keys]."""
    rows = reach[query_segments][:, np.maximum(key_segments, 0)]  # [queries, keys]
    visibility = rows == Reach.ALL
    visibility |= (rows == Reach.CAUSAL) & (key_positions[None, :] <= query_positions[:, None])
    visibility &= (key_segments != NO_TOKEN)[None, :]
    if query_steps is not None and key_steps is not None:
        visibility &= key_steps[None, :] <= query_steps[:, None]
    return visibility


def in_window(
    mask: np.ndarray, query_positions: np.ndarray, key_positions: np.ndarray, window: int
) -> np.ndarray:
    """What a sliding-window layer keeps of what is seen: bool [queries, keys], to be taken together
    with `mask`. The window is `window` tokens long, the query's own included, and counts the tokens
    that the query sees from a key's position to its own. A gap in the positions holds none: a value
    of HPD has the window that it would have alone, however many gaps lie before it. Without gaps
    this is the models' own rule, q - k < window.
    """
    return key_positions >= window_starts(mask, query_positions, key_positions, window)[:, None]


def window_starts(
    mask: np.ndarray, query_positions: np.ndarray, key_positions: np.ndarray, window: int
) -> np.ndarray:
    """`in_window` as the lowest position that each query keeps, [queries]; far below all where no
    window is filled.
    """
    lowest = np.iinfo(np.int64).min
    if len(key_positions) < window:
        return np.full(len(query_positions), lowest)
    counted = mask & (key_positions[None, :] <= query_positions[:, None])
    return np.partition(np.where(counted, key_positions[None, :], lowest), -window, axis=1)[
        :, -window
    ]


def segment_sets(
    reach: np.ndarray, query_segments: np.ndarray, key_segments: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What `visible` takes from `reach`, as two sets of segments a query, one bit a segment, for
    kernels: int32 [queries, 2, words]: the segments that are ALL to a query and those that are
    CAUSAL, segment s at bit s % 32 of word s // 32; and the segments of the keys [keys] by their
    numbers in these sets: their own, or, where there are many, those among the segments that have
    keys. NO_TOKEN has one that is in no set.
    """
    if len(reach) < 32:
        labels = np.where(key_segments == NO_TOKEN, len(reach), key_segments)
        return _few_sets(reach.tobytes(), len(reach), reach.dtype)[query_segments], labels
    live, labels = np.unique(key_segments, return_inverse=True)
    holes = int(live[0] == NO_TOKEN)
    live, labels = live[holes:], labels - holes
    labels = np.where(key_segments == NO_TOKEN, len(live), labels)
    return _sets(reach[query_segments][:, live]), labels


@lru_cache(maxsize=1024)
def _few_sets(reach: bytes, segments: int, dtype: np.dtype) -> np.ndarray:
    """`_sets` of a whole matrix: programs of a method have the same, step after step."""
    return _sets(np.frombuffer(reach, dtype=dtype).reshape(segments, segments))


def _sets(kinds: np.ndarray) -> np.ndarray:
    """[queries, segments] of Reach -> int32 [queries, 2, words]"""
    kinds = np.pad(kinds, ((0, 0), (0, 32 - kinds.shape[1] % 32)))
    bits = np.stack([kinds == Reach.ALL, kinds == Reach.CAUSAL], axis=1)  # [queries, 2, 32 * words]
    return np.packbits(bits, axis=2, bitorder="little").view("<i4")


def grown(reach: np.ndarray, pairs: dict[tuple[int, int], Reach]) -> np.ndarray:
    """A copy of `reach` with pairs {(query segment, key segment): Reach} set; new ones are HIDDEN
    from all others.
    """
    if not pairs:
        return reach
    reach = np.pad(reach, (0, max(0, 1 + max(map(max, pairs)) - len(reach))))
    for (query, key), value in pairs.items():
        reach[query, key] = value
    return reach


@cache
def one_segment() -> np.ndarray:
    """The reach of a program that begins, [1, 1]: segment 0, causal.

    Programs that stay so share it.
    """
    return np.full((1, 1), Reach.CAUSAL, dtype=np.int8)
