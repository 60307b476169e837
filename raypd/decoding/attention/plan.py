"""What a kernel reads of a pass: its blocks of queries, and who sees whom as integers, a few a
token.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from raypd.decoding.attention.step import Span, Step
from raypd.decoding.transfer import to_device
from raypd.decoding.visibility import segment_sets, window_starts

_NO_START = np.iinfo(np.int32).min
_LEAST_PART = 256  # keys that a block reads at least where others read more for the same queries


class Item(NamedTuple):
    """A block of queries, as a kernel reads it.

    Places are those of the pass, slots those of the cache.
    """

    first: int  # place of its first query
    queries: int
    prefix_slot: int
    prefix: int  # keys
    own_slot: int
    own_keys: int  # up to the last one that any of its queries sees
    clear: int  # own keys before the first one that not all of its queries see
    key: int  # its first own key among those of the pass
    prefix_begin: int = 0  # position of its first prefix key
    # Where its first query's result goes that is to be merged with those of other items; -1: none.
    split_row: int = -1

    def parts(self, most: int) -> Iterator["Item"]:
        """It as several, each of so many keys at most."""
        for begin in range(0, self.prefix, most):
            length = min(most, self.prefix - begin)
            slot, begin = self.prefix_slot + begin, self.prefix_begin + begin
            yield self._replace(
                prefix_slot=slot, prefix=length, own_keys=0, clear=0, prefix_begin=begin
            )
        for begin in range(0, self.own_keys, most):
            length = min(most, self.own_keys - begin)
            slot, key, clear = (
                self.own_slot + begin,
                self.key + begin,
                min(max(0, self.clear - begin), length),
            )
            yield self._replace(prefix=0, own_slot=slot, own_keys=length, clear=clear, key=key)


class KernelPlan:
    """What a kernel reads beside queries, keys and values, built once a pass; `repeat` query heads
    share a key head. `rows`: the sizes of its blocks of queries, rising; a span that fits none has
    several of the last. `fill` items fill the device: where there are fewer, long keys are split,
    and a prefix is read for several spans at once; 0: never. `queries` [tokens, 2 + 2 * words]:
    position, step and two sets of segments; `keys` [own keys, 3]: position, step, segment; `merged`
    [n, 3]: tokens with several results, each in rows `merged_rows[begin:end]` of `split_rows`.
    """

    def __init__(self, step: Step, repeat: int, rows: tuple[int, ...], fill: int = 0) -> None:
        self.device = step.slots.device
        grouped = [(span, group) for group in step.groups for span in group.spans]
        self.spans = spans = [span for span, _ in grouped]
        queries = np.concatenate([span.queries for span in spans], axis=1)
        keys = np.concatenate([span.keys for span in spans], axis=1)
        if all(span.reach is spans[0].reach for span in spans):
            words, keys[1] = segment_sets(spans[0].reach, queries[1], keys[1])
        else:
            sets = [segment_sets(span.reach, span.queries[1], span.keys[1]) for span in spans]
            words = np.zeros(
                (queries.shape[1], 2, max(some.shape[2] for some, _ in sets)), dtype=np.int32
            )
            for span, (some, _) in zip(spans, sets, strict=True):
                words[span.a : span.b, :, : some.shape[2]] = some
            keys[1] = np.concatenate([labels for _, labels in sets])
        self.words = power_of_two(words.shape[2])  # of a set of segments, 32 each
        words = np.pad(words, ((0, 0), (0, 0), (0, self.words - words.shape[2])))
        items: list[tuple[int, Item]] = []  # with the rows of its block
        first_key = 0
        for (span, group), clear in zip(grouped, _clear(spans, queries, words, keys), strict=True):
            span_queries = span.size
            size = _size(span_queries * repeat, rows, repeat)
            block = size // repeat
            causal = span_queries > block and span.causal
            for first in range(0, span_queries, block):
                count = min(block, span_queries - first)
                own_keys = span.length
                if causal:
                    own_keys = span.length - span_queries + first + count
                    clear = own_keys - count
                item = Item(
                    span.a + first,
                    count,
                    group.start,
                    group.length,
                    span.start,
                    own_keys,
                    clear,
                    first_key,
                )
                items.append((size, item))
            first_key += span.length
        self.most_own = max(item.own_keys for _, item in items)  # keys of the item with most
        merged, merged_rows = np.zeros((0, 3)), np.zeros(0)
        if fill:
            items, merged, merged_rows = _split(_shared(items, step, repeat, rows), fill)
        self.split_rows = len(merged_rows)
        sizes = sorted({size for size, _ in items})
        parts = [
            np.column_stack([queries[0], queries[2], words.reshape(len(words), -1)]),
            keys[[0, 2, 1]].T,
            merged,
            merged_rows,
            *(np.array([item for of, item in items if of == size]) for size in sizes),
        ]
        self.queries, self.keys, self.merged, self.merged_rows, *blocks = _moved(parts, self.device)
        # (rows, items) of each size of block that occurs.
        self.blocks = list(zip(sizes, blocks, strict=True))
        # Who sees whom, as a kernel found it, by a layer's window.
        self.seen: dict[int | None, torch.Tensor] = {}
        self._starts: dict[int | None, torch.Tensor | None] = {}

    def starts(self, window: int | None) -> torch.Tensor | None:
        """[tokens] for each query the first position that a layer's window holds; None: none is
        filled.
        """
        if window not in self._starts:
            self._starts[window] = None
            if window is not None and any(span.felt(window) for span in self.spans):
                starts = [
                    window_starts(*s.all_seen(), window) if s.felt(window) else [_NO_START] * s.size
                    for s in self.spans
                ]
                (self._starts[window],) = _moved(
                    [np.maximum(np.concatenate(starts), _NO_START)], self.device
                )
        return self._starts[window]


def _clear(
    spans: list[Span], queries: np.ndarray, words: np.ndarray, keys: np.ndarray
) -> list[int]:
    """Of each span, its own keys before the first one that not all of its queries see: [spans].

    queries: [3, tokens] positions, segments, steps. words: [tokens, 2, words] their sets of
    segments. keys: [3, keys] positions, numbers in these sets, steps.
    """
    begins = np.cumsum([0, *(span.size for span in spans[:-1])])
    lengths = [span.length for span in spans]
    # [spans, words]: what is ALL to each query of a span.
    every = np.bitwise_and.reduceat(words[:, 0], begins)
    upto = np.bitwise_and.reduceat(words[:, 0] | words[:, 1], begins)  # or CAUSAL
    position, step = (
        np.repeat(np.minimum.reduceat(queries[row], begins), lengths) for row in (0, 2)
    )
    word = np.repeat(np.arange(0, every.size, every.shape[1]), lengths) + (keys[1] >> 5)
    of_all, of_some = (sets.take(word) >> (keys[1] & 31) & 1 for sets in (every, upto))
    hidden = np.flatnonzero(((of_all | (of_some & (keys[0] <= position))) & (keys[2] <= step)) == 0)
    firsts = np.cumsum([0, *lengths])  # the first key of each span, and the end
    nearest = np.append(hidden, firsts[-1])[np.searchsorted(hidden, firsts[:-1])]
    return (np.minimum(nearest, firsts[1:]) - firsts[:-1]).tolist()


@cache
def _size(queries: int, rows: tuple[int, ...], repeat: int) -> int:
    """The rows of a block for so many queries and query heads."""
    return max(
        next((fitting for fitting in rows if fitting >= queries), rows[-1]), power_of_two(repeat)
    )


def _shared(
    items: list[tuple[int, Item]], step: Step, repeat: int, rows: tuple[int, ...]
) -> list[tuple[int, Item]]:
    """Items that read a long prefix for the queries of several spans, where that takes half as many
    or fewer.
    """
    for group in step.groups:
        first, end = group.spans[0].a, group.spans[-1].b
        size = _size((end - first) * repeat, rows, repeat)
        mine = [(of, item) for of, item in items if first <= item.first < end]
        starts = range(first, end, size // repeat)
        if group.length >= _LEAST_PART and 2 * len(starts) <= len(mine):
            apart = [(of, item._replace(prefix=0)) for of, item in mine]
            blocks = [(begin, min(size // repeat, end - begin)) for begin in starts]
            shared = [
                (size, Item(begin, n, group.start, group.length, 0, 0, 0, 0)) for begin, n in blocks
            ]
            items = (
                [(of, item) for of, item in items if not first <= item.first < end] + apart + shared
            )
    return items


def _split(
    items: list[tuple[int, Item]], fill: int
) -> tuple[list[tuple[int, Item]], np.ndarray, np.ndarray]:
    """Items of about the same number of keys, or all as they are where they fill the device; what
    is to be merged.
    """
    keys = sum(item.prefix + item.own_keys for _, item in items)
    most = max(_LEAST_PART, -(-keys // fill // _LEAST_PART) * _LEAST_PART)
    parts = [
        (size, part)
        for size, item in items
        for part in (item.parts(most) if item.prefix + item.own_keys > 1.5 * most else [item])
    ]
    tokens = [np.arange(part.first, part.first + part.queries) for _, part in parts]
    results = np.bincount(np.concatenate(tokens))
    rows: list[int] = []  # of results: the token of each
    for number, (size, part) in enumerate(parts):
        if results[part.first] > 1:
            parts[number] = size, part._replace(split_row=len(rows))
            rows += tokens[number].tolist()
    merged, begins = np.unique(np.sort(rows), return_index=True)
    ends = np.append(begins[1:], len(rows))[: len(merged)]
    return parts, np.column_stack([merged, begins, ends]), np.argsort(rows, kind="stable")


def _moved(parts: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays as int32 on the device, in one transfer; each begins at a multiple of 16 bytes, as
    triton likes it.
    """
    ends = np.cumsum([-(-part.size // 4) * 4 for part in parts])
    packed = np.zeros(ends[-1], dtype=np.int32)
    for part, end in zip(parts, ends, strict=True):
        begin = end - -(-part.size // 4) * 4
        packed[begin : begin + part.size] = part.reshape(-1)
    moved = to_device(packed, device)
    begins = [0, *ends[:-1].tolist()]
    return [
        moved[b : b + part.size].view(part.shape) for b, part in zip(begins, parts, strict=True)
    ]


def power_of_two(n: int) -> int:
    """The lowest one that is n at least."""
    return 1 << (n - 1).bit_length()
