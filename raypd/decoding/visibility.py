"""The single rule for which token sees which. All masks, dense or in kernels, come from `visible`.

Every token of a program has a segment, a virtual position and the step that produced it. The
program's `reach` matrix has HIDDEN, ALL or CAUSAL for each pair of segments. A query q may attend
to a key k exactly when

    reach[segment(q), segment(k)] is ALL, or it is CAUSAL and position(k) <= position(q);
    and step(k) <= step(q)

At inference the step condition always holds, because a token that has not been decoded yet is not
in the cache. In training it makes the ground-truth sequence look like inference (HPD, section 4.4).
"""

from enum import IntEnum
from functools import cache, lru_cache

import numpy as np

NO_TOKEN = -1  # The segment of a cache slot that holds no token. No token sees it.

# Rows of a table [3, tokens] with what the rule needs to know about each token.
POSITION = 0
SEGMENT = 1
STEP = 2

# With at most this many segments, a set fits into one word and leaves a bit for NO_TOKEN.
_FEW_SEGMENTS = 31


class Reach(IntEnum):
    """What the tokens of one segment see of another segment."""

    HIDDEN = 0
    ALL = 1
    CAUSAL = 2


def visible(
    reach: np.ndarray,
    query_segments: np.ndarray,
    query_positions: np.ndarray,
    key_segments: np.ndarray,
    key_positions: np.ndarray,
    query_steps: np.ndarray | None = None,
    key_steps: np.ndarray | None = None,
) -> np.ndarray:
    """Apply the rule above.

    Args:
        reach: `Reach` of each pair of segments, [segments, segments].
        query_segments: [queries]
        query_positions: [queries]
        key_segments: [keys]. No query sees a key whose segment is NO_TOKEN.
        key_positions: [keys]
        query_steps: [queries], or None to leave the step condition out, as inference may.
        key_steps: [keys], or None.

    Returns:
        A bool array [queries, keys] that is True where the query sees the key.
    """
    kinds = reach[query_segments][:, np.maximum(key_segments, 0)]  # [queries, keys]
    visibility = kinds == Reach.ALL
    visibility |= (kinds == Reach.CAUSAL) & (key_positions[None, :] <= query_positions[:, None])
    visibility &= (key_segments != NO_TOKEN)[None, :]
    if query_steps is not None and key_steps is not None:
        visibility &= key_steps[None, :] <= query_steps[:, None]
    return visibility


def in_window(
    mask: np.ndarray, query_positions: np.ndarray, key_positions: np.ndarray, window: int
) -> np.ndarray:
    """Apply a sliding window to what the queries see.

    The window is `window` tokens long, including the query's own token, and counts the tokens that
    the query sees from a key's position to its own. A gap in the positions contains no tokens, so a
    value of HPD has the window that it would have alone, however many gaps come before it. Without
    gaps this is the models' own rule, q - k < window.

    Args:
        mask: What the queries see without the window, [queries, keys].
        query_positions: [queries]
        key_positions: [keys]
        window: The number of tokens in the window.

    Returns:
        A bool array [queries, keys], to be combined with `mask` by a logical and.
    """
    starts = window_starts(mask, query_positions, key_positions, window)
    return key_positions >= starts[:, None]


def window_starts(
    mask: np.ndarray, query_positions: np.ndarray, key_positions: np.ndarray, window: int
) -> np.ndarray:
    """Return the lowest position in each query's window, [queries].

    The arguments are those of `in_window`. The result is far below all positions for a query whose
    window is not full.
    """
    lowest = np.iinfo(np.int64).min
    if len(key_positions) < window:
        return np.full(len(query_positions), lowest)
    counted = mask & (key_positions[None, :] <= query_positions[:, None])
    positions = np.where(counted, key_positions[None, :], lowest)  # [queries, keys]
    return np.partition(positions, -window, axis=1)[:, -window]


def segment_sets(
    reach: np.ndarray, query_segments: np.ndarray, key_segments: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Write `reach` as sets of segments with one bit per segment, which kernels can read.

    Args:
        reach: [segments, segments] of `Reach`.
        query_segments: [queries]
        key_segments: [keys]

    Returns:
        The sets, int32 [queries, 2, words]: the segments that are ALL to a query and those that are
        CAUSAL to it. Segment s is bit s % 32 of word s // 32. Also the index of each key's segment
        in these sets, [keys]. With few segments this is the segment itself; with many, only
        segments that have keys are numbered. NO_TOKEN gets a number that is in no set.
    """
    if len(reach) <= _FEW_SEGMENTS:
        labels = np.where(key_segments == NO_TOKEN, len(reach), key_segments)
        sets = _sets_of_all(reach.tobytes(), len(reach), reach.dtype)
        return sets[query_segments], labels
    live, labels = np.unique(key_segments, return_inverse=True)
    if live[0] == NO_TOKEN:
        live = live[1:]
        labels = labels - 1
    labels = np.where(key_segments == NO_TOKEN, len(live), labels)
    return _pack_sets(reach[query_segments][:, live]), labels


@lru_cache(maxsize=1024)
def _sets_of_all(reach: bytes, segments: int, dtype: np.dtype) -> np.ndarray:
    """Pack a whole matrix, with a cache: a method's programs use the same one in every step."""
    matrix = np.frombuffer(reach, dtype=dtype).reshape(segments, segments)
    return _pack_sets(matrix)


def _pack_sets(kinds: np.ndarray) -> np.ndarray:
    """Pack [queries, segments] of `Reach` into int32 [queries, 2, words]."""
    kinds = np.pad(kinds, ((0, 0), (0, 32 - kinds.shape[1] % 32)))
    bits = np.stack([kinds == Reach.ALL, kinds == Reach.CAUSAL], axis=1)  # [queries, 2, 32 * words]
    return np.packbits(bits, axis=2, bitorder="little").view("<i4")


def grown(reach: np.ndarray, pairs: dict[tuple[int, int], Reach]) -> np.ndarray:
    """Return a copy of `reach` in which some pairs of segments are set.

    Args:
        reach: [segments, segments] of `Reach`. It is returned itself if `pairs` is empty.
        pairs: The values to set, by (query segment, key segment). A segment that is not in `reach`
            yet starts as HIDDEN from all others.
    """
    if not pairs:
        return reach
    segments = 1 + max(max(pair) for pair in pairs)
    reach = np.pad(reach, (0, max(0, segments - len(reach))))
    for (query, key), value in pairs.items():
        reach[query, key] = value
    return reach


@cache
def one_segment() -> np.ndarray:
    """Return the reach [1, 1] with which every program starts: one causal segment 0.

    Programs that never open another segment share this array.
    """
    return np.full((1, 1), Reach.CAUSAL, dtype=np.int8)
